"""What PARD and P-EAGLE share: a pass that ends in masks, and training of many such.

A draft from the text up to an anchor place is one causal pass over that text and D - 1
masks behind it; the row of the mask at depth d = 1, 2, .. says what is d tokens further
than what the text's own last row (d = 0) says. In training every place of a text is an
anchor at once. A row (a, d) stands at position a + d and sees, as in the draft itself,

    the text's own rows (s, 0) with s <= a, and the masks (a, 1) .. (a, d)        (1)

so D copies of a text are one flattened text. Few of these rows are kept (conditional
drop of tokens, COD; An et al. 2025, arXiv:2504.18583): all of depth 0, and of depth d a
random share of the places whose chain was kept up to depth d - 1,

    m_d = floor(n max(rate^d, floor)),   n tokens to learn                        (2)

so that every key a kept row needs is there and a dropped row is neither query nor key.
What is drawn for a place depends on the key, the row of the batch and the place alone:
padding changes nothing. There are as many slots as a text of nothing but tokens to
learn needs; those that another text does not fill are idle, seen by no real row.

Between rounds nothing of a mask is kept. A pass feeds the last depth + 1 pairs of the
text again (`recurrent`), then the masks behind each row's last pair.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters import base
from specjax.drafters.base import Batch
from specjax.drafters.recurrent import State
from specjax.layers import Sees, is_long
from specjax.transformer import Shared, TransformerConfig
from specjax.typing import Array, Bool, Int, PRNGKey

IDLE = -2  # anchor of a slot that holds no row; the lowest real one is -1, no text


class Rows(NamedTuple):
    """Rows of a flattened text; the first T are the text's own, in order."""

    anchor: Int[Array, "B R"]
    depth: Int[Array, "B R"]

    @property
    def real(self) -> Bool[Array, "B R"]:
        return self.anchor != IDLE

    @property
    def position(self) -> Int[Array, "B R"]:
        return jnp.maximum(self.anchor + self.depth, 0)

    def read(self, values: Array, places: Int[Array, "B R"]) -> Array:
        """values[b, places[b, r]]; zeros (False) for idle rows and past either end."""
        B, T = values.shape[:2]
        inside = self.real & (places >= 0) & (places < T)
        found = values[jnp.arange(B)[:, None], jnp.clip(places, 0, T - 1)]
        inside = inside.reshape(*inside.shape, *(1,) * (values.ndim - 2))
        return jnp.where(inside, found, jnp.zeros_like(found))

    def tokens(self, text: Int[Array, "B T"], mask_token_id: int) -> Array:
        """The text's own tokens at depth 0, masks elsewhere."""
        return jnp.where(
            self.depth == 0, self.read(text, self.anchor), jnp.int32(mask_token_id)
        )


def visible(query, key):
    """Eq. 1 for queries and keys given as (anchor, depth), [.. Q] and [.. K]."""
    (a, d), (key_a, key_d) = (
        (x[..., :, None] for x in query),
        (x[..., None, :] for x in key),
    )
    return ((key_d == 0) & (key_a <= a)) | ((key_a == a) & (key_d <= d))


def sees(config: TransformerConfig, rows: Rows) -> Bool[Array, "B R R"] | Sees:
    """Which of the rows sees which; of very many how to tell."""
    of = rows.anchor, rows.depth
    if is_long(config.num_heads // config.num_kv_heads, rows.anchor.shape[1]):
        return Sees(of, of, visible)
    return visible(of, of)


def num_kept(n: int, depth: int, rate: float, floor: float) -> int:
    """Eq. 2."""
    return int(n * max(rate**depth, floor))


def drop(
    key: PRNGKey,
    wanted: Bool[Array, "B T"],
    n: Int[Array, "B"],
    sizes: np.ndarray,
    first: int,
) -> Rows:
    """Draws the rows of COD.

    Args:
      wanted: positions whose row has something to learn.
      n: tokens to learn, of eq. 2.
      sizes: [T+1 D] rows of depth 1, 2, .. to keep for n = 0, 1, .., T.
      first: lowest anchor, 0, or -1 if a row may have masks alone before it.
    """
    (B, T), rows = wanted.shape, jnp.arange(wanted.shape[0])[:, None]
    count = jnp.asarray(sizes, jnp.int32)[n]  # [B D]
    pool = wanted & (jnp.arange(T) > first)[None]
    anchors = [jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))]
    depths = [jnp.zeros((B, T), jnp.int32)]
    for d, size in enumerate(sizes[-1].tolist(), 1):
        size = min(size, T)
        keys = base.place_keys(jax.random.fold_in(key, d), (B, T))
        noise = jax.vmap(jax.vmap(jax.random.uniform))(keys)
        lowest, place = jax.lax.top_k(-jnp.where(pool, noise, 2.0), size)
        kept = (lowest > -2.0) & (jnp.arange(size)[None] < count[:, d - 1 : d])
        anchors.append(jnp.where(kept, place.astype(jnp.int32) - d, IDLE))
        depths.append(jnp.full((B, size), d, jnp.int32))
        kept = jnp.zeros((B, T + 1), bool).at[rows, jnp.where(kept, place, T)].set(True)
        pool = jnp.pad(kept[:, : T - 1], ((0, 0), (1, 0))) & wanted
    return Rows(jnp.concatenate(anchors, axis=1), jnp.concatenate(depths, axis=1))


def judge(
    logits_of: Callable[[Rows, np.ndarray], Array],
    shared: Shared,
    batch: Batch,
    depth: int,
    offset: int,
) -> dict[str, Array]:
    """What to log: all depths from every `THIN`-th anchor, nothing dropped.

    `logits_of(rows, where)` are the logits of some of the rows, where.shape + [V]. Row
    (a, d) drafts the token at a + d + 1 + offset.
    """
    B, T = batch.tokens.shape
    thin = max(base.THIN, T // 512)  # the logits of at most 512 anchors are held
    some, d = np.arange(0, T, thin), np.arange(depth)
    masks = np.stack(np.broadcast_arrays(some[:, None], d[1:]), axis=-1).reshape(-1, 2)
    text = np.stack([np.arange(T), np.zeros(T, int)], axis=-1)
    rows = np.concatenate([text, masks]).astype(np.int32)
    rows = Rows(*(jnp.broadcast_to(x, (B, len(x))) for x in jnp.asarray(rows).T))
    behind = T + np.arange(len(masks)).reshape(len(some), depth - 1)
    where = np.concatenate([some[:, None], behind], axis=1)

    label = some[:, None] + d[None] + 1 + offset  # [A D]
    hidden = batch.hidden[:, np.minimum(label - 1, T - 1)]
    wanted = batch.mask[:, np.minimum(label, T - 1)] & jnp.asarray(label < T)[None]
    accepted = base.overlap(logits_of(rows, where), shared.logits(hidden))
    return base.acceptance(accepted, wanted)


def fill(
    state: State, anchor: Int[Array, "B"], mask_token_id: int, depth: int
) -> tuple[Int[Array, "B W"], Int[Array, "B W"], Int[Array, "B D"]]:
    """The tokens of a draft's pass, the pair of the window each belongs to, and the
    columns that draft.

    The text's fresh tokens and the anchor, then masks; a row with few fresh ones has
    its masks earlier and more of them than it needs, behind those that draft. Masks
    belong to the last pair.
    """
    B, P = state.tokens.shape
    last = state.num_fresh[:, None] - 1
    tokens = jnp.roll(state.tokens, -1, axis=1)
    tokens = tokens.at[jnp.arange(B)[:, None], last].set(anchor[:, None])
    tokens = jnp.pad(tokens, ((0, 0), (0, depth - 1)))
    column = jnp.arange(P + depth - 1, dtype=jnp.int32)[None]
    tokens = jnp.where(column <= last, tokens, jnp.int32(mask_token_id))
    drafts = last + jnp.arange(depth, dtype=jnp.int32)[None]
    return tokens, jnp.minimum(column, last), drafts
