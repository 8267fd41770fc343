"""The interface of a drafter: one frozen record of hyperparameters with pure methods.

A round is draft -> verify -> commit. The engine owns the target, its cache and the
verifier; the drafter owns a private `State` that the engine only carries:

    prefill  the prompt and the target's features of it -> State
    draft    State and the anchor -> G tokens, and the law each was drawn from
    commit   State and the features of the committed tokens -> State

`commit` must leave the state that `prefill` on the longer text would have made.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from specjax import sharding
from specjax.pytree import pytree
from specjax.sampling import Sampling
from specjax.transformer import Shared, TransformerConfig
from specjax.tree import DynamicTree, Tree
from specjax.typing import Array, Bool, Float, Int, Keys, Params, PRNGKey
from specjax.verify import Draft, Verdict


@dataclasses.dataclass(frozen=True)
class Card:
    """What `specjax drafters` prints about a method."""

    reads: str  # what a draft is conditioned on
    passes: str  # sequential drafter passes per round
    trained: str  # which weights training moves
    paper: str  # authors, arXiv number
    year: int


@pytree
class Batch:
    """Training texts with what the frozen target said about them."""

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]  # True on the tokens to learn (the answers)
    features: Float[Array, "B T MD"]  # the drafter's taps
    hidden: Float[Array, "B T D"]  # the state that the target's head reads
    # Keys and values [B K T E] of the target's layers that `kv_layers` names.
    kv: tuple[tuple[Array, Array], ...] = ()


@dataclasses.dataclass(frozen=True)
class Joint:
    """How a drafter is trained together with its target; see `specjax.joint`."""

    head_weight: float = 0.2  # lambda of the drafter's loss
    schedule: Literal["constant", "linear", "sine"] = "constant"  # of lambda
    heads_first: float = 0.5  # share of the steps in which the target stays
    target_rate: float = 0.25  # learning rate of the target over the drafter's
    distil: bool = True  # L_0 = KL from the first target; False: the data's CE
    rank: int = 32  # r of the adapter
    alpha: float = 16.0  # the adapter counts alpha / r

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"an adapter needs rank >= 1, got {self.rank}.")
        if not 0 <= self.heads_first <= 1:
            raise ValueError(
                f"heads_first is a share of the steps, got {self.heads_first}."
            )
        for name in ("head_weight", "target_rate", "alpha"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"joint training needs {name} > 0, got {getattr(self, name)}."
                )


@runtime_checkable
class Drafter(Protocol):
    """See the module's docstring. Batch first; `keys` has one key a row.

    A drafter that attends to the target's own keys and values names the layers that it
    reads in a property `kv_layers`. It finds them in `shared.cache` when it drafts, the
    committed text below the cache's length, and in `Batch.kv` when it is trained. One
    that is trained together with the target has a property `joint`, a `Joint`.

    The hidden word of the protocol is `length`: a row's committed tokens whose features
    the drafter has seen. The anchor is at that position and its features come only with
    the next commit.
    """

    card: ClassVar[Card]

    @classmethod
    def for_target(
        cls, config: TransformerConfig, mask_token_id: int | None, **fields: Any
    ) -> "Drafter":
        """The paper's shape scaled to a target; `fields` override.

        `mask_token_id` is an id that no text holds, for drafters that fill in masks.
        """
        ...

    @property
    def gamma(self) -> int:
        """Drafted tokens on a chain; of a tree, `tree` says what a round has."""
        ...

    @property
    def tree(self) -> Tree | DynamicTree:
        """Topology of a round: static, or chosen anew under a fixed node count."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """States of the target to read, in the numbering of `Transformer.__call__`."""
        ...

    @property
    def max_positions(self) -> int | None:
        """Positions the drafter was made for; None if it has no limit of its own."""
        ...

    def init(self, key: PRNGKey, shared: Shared) -> Params: ...

    def prefill(
        self,
        params: Params,
        shared: Shared,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, "B"],
        features: Float[Array, "B T MD"],
        cache_size: int,
    ) -> Any:
        """State after each row's first `lengths` tokens; what follows is padding."""
        ...

    def draft(
        self,
        params: Params,
        shared: Shared,
        state: Any,
        anchor: Int[Array, "B"],
        sampling: Sampling,
        keys: Keys,
    ) -> tuple[Draft, Any]:
        """Proposes the tokens of `tree`, drawn under `sampling`.

        Greedy settings ask for the likeliest children. `draft_tree` makes trees of the
        laws of a block, and grows them for a drafter that goes step by step.
        """
        ...

    def commit(
        self,
        params: Params,
        shared: Shared,
        state: Any,
        verdict: Verdict,
        tokens: Int[Array, "B N"],
        features: Float[Array, "B N MD"],
    ) -> Any:
        """Takes in the anchor and the accepted tokens.

        `tokens[:, i]` and `features[:, i]` belong to node i of the accepted path (the
        anchor is 0); only the first `verdict.num_committed` of a row are real. The next
        anchor is the last token of the verdict.
        """
        ...

    def loss(
        self, params: Params, shared: Shared, batch: Batch, key: PRNGKey
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """Mean loss over the tokens to learn, and what to log of it.

        "alpha" [G] is the acceptance estimate by position against the target's own law
        at temperature 1, on the text's prefix: the mean of sum min(p, q), or of p at
        the proposal if that is an argmax. "survival" [G] is the mean of its products
        up to a position, so that tau = 1 + sum of survival (`acceptance` makes both).
        """
        ...


def kv_layers(drafter: Any) -> tuple[int, ...]:
    """Layers of the target whose keys and values a drafter reads; mostly none."""
    return getattr(drafter, "kv_layers", ())


def joint(drafter: Any) -> Joint | None:
    """How a drafter is trained together with its target; None for most: it is not."""
    return getattr(drafter, "joint", None)


def reads_states_alone(drafter: Any) -> bool:
    """Whether a training reads states of the frozen target and nothing else.

    Then the target's layers are scanned. Keys and values are those of a pass over a
    cache, and a target that is trained too has adapters layer by layer.
    """
    return joint(drafter) is None and not kv_layers(drafter)


def draw(
    sampling: Sampling, logits: Float[Array, "B *G V"], keys: Keys
) -> tuple[Int[Array, "B *G"], Float[Array, "B *G V"]]:
    """`sampling.draw` with each row's own key."""
    probs = sampling.probs(logits)
    return jax.vmap(sampling.pick)(probs, keys), probs


def masked_mean(
    values: Float[Array, "*B"], weights: Bool[Array, "*B"] | Float[Array, "*B"]
) -> Float[Array, ""]:
    """Weighted mean over real entries; 0, with zero gradient, if there are none."""
    weights = weights.astype(jnp.float32)
    total = jnp.sum(weights)
    # `where` on the values too: a NaN under a zero weight must not come through.
    values = jnp.where(weights > 0, values, 0.0)
    return jnp.sum(values * weights) / jnp.where(total > 0, total, 1.0)


def acceptance(
    values: Float[Array, "*B G"], wanted: Bool[Array, "*B G"]
) -> dict[str, Array]:
    """ "alpha" and "survival" [G] of drafts whose tokens are accepted with `values`.

    Not the product of mean acceptances: half of all drafts right throughout and half
    wrong throughout survive with 1/2 at every position.
    """
    by_slot = jax.vmap(masked_mean, in_axes=-1)
    kept = jnp.cumprod(jnp.where(wanted, values, 0.0), axis=-1)
    return {"alpha": by_slot(values, wanted), "survival": by_slot(kept, wanted)}


def cross_entropy(
    logits: Float[Array, "*B V"], labels: Int[Array, "*B"]
) -> Float[Array, "*B"]:
    """-log softmax(logits)[label], float32.

    Gradients of both entropies are written out: derived, they go over all V more often.
    """
    return _hard(logits.astype(jnp.float32), labels)


@jax.custom_vjp
def _hard(z, label):
    return _hard_forward(z, label)[0]


def _hard_forward(z, label):
    lse = jax.nn.logsumexp(z, axis=-1)
    chosen = jnp.take_along_axis(z, label[..., None], axis=-1)[..., 0]
    return lse - chosen, (z, label, lse)


def _hard_backward(kept, g):
    z, label, lse = kept
    q = jnp.exp(z - lse[..., None])
    ids = jnp.arange(z.shape[-1], dtype=label.dtype)
    at_label = jnp.expand_dims(ids, range(label.ndim)) == label[..., None]
    return g[..., None] * (q - at_label.astype(q.dtype)), None


_hard.defvjp(_hard_forward, _hard_backward)


def soft_cross_entropy(
    logits: Float[Array, "*B V"], probs: Float[Array, "*B V"]
) -> Float[Array, "*B"]:
    """-sum_v p_v log softmax(logits)_v: the KL from p, but for p's own entropy."""
    return _soft(logits.astype(jnp.float32), probs)


@jax.custom_vjp
def _soft(z, p):
    return _soft_forward(z, p)[0]


def _soft_forward(z, p):
    lse, total = jax.nn.logsumexp(z, axis=-1), jnp.sum(p, axis=-1)
    return -jnp.sum(p * (z - lse[..., None]), axis=-1), (z, p, lse, total)


def _soft_backward(kept, g):
    z, p, lse, total = kept
    log = z - lse[..., None]
    by_logits = jnp.exp(log) * total[..., None] - p
    return g[..., None] * by_logits, -g[..., None] * log


_soft.defvjp(_soft_forward, _soft_backward)


def smooth_l1(x: Float[Array, "*B D"], y: Float[Array, "*B D"]) -> Float[Array, "*B"]:
    """Mean over the width of d^2 / 2 where d = |x - y| < 1, else of d - 1/2."""
    d = jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32))
    return jnp.mean(jnp.where(d < 1, 0.5 * d * d, d - 0.5), axis=-1)


def overlap(
    logits: Float[Array, "*B V"], target_logits: Float[Array, "*B V"]
) -> Float[Array, "*B"]:
    """sum_v min(p, q) = 1 - TV: the acceptance of a token drawn from q, eq. 1.4."""
    q, p = jax.nn.softmax(logits, axis=-1), jax.nn.softmax(target_logits, axis=-1)
    return jnp.sum(jnp.minimum(q, p), axis=-1)


SCORES = 2**27  # of a part on a device; laws and gradients are as large again


def few_places(values: Callable[..., Any], scores: int, *rows: Any) -> Any:
    """values(*rows), so few places T' at a time that their scores fit `SCORES`.

    `rows` are arrays [B T ..]; `values` maps parts of them [B T' ..] to a tree of
    arrays [B T' ..] by way of `scores` numbers a place, such as the vocabulary. Where
    one part holds all, that is all that happens; else a gradient computes each part
    again. On a mesh that splits the text (`sharding.rows`) each device goes through
    its own part.
    """
    B, T = jax.tree.leaves(rows)[0].shape[:2]
    held = B * T * scores / sharding.num_devices()
    parts = min(T, math.ceil(held / SCORES))
    if parts <= 1:
        return values(*rows)
    R = sharding.sequence_ways(B, T)
    t = math.ceil(T / R / parts)
    n = math.ceil(T / R / t)

    def split(x):
        x = x.reshape(B, R, T // R, *x.shape[2:])
        more = [(0, 0)] * x.ndim
        more[2] = 0, n * t - T // R
        x = jnp.pad(x, more).reshape(B, R, n, t, *x.shape[3:])
        return jnp.moveaxis(x, 2, 0).reshape(n, B, R * t, *x.shape[4:])

    def join(x):
        x = jnp.moveaxis(x.reshape(n, B, R, t, *x.shape[3:]), 0, 2)
        x = x.reshape(B, R, n * t, *x.shape[4:])[:, :, : T // R]
        return x.reshape(B, T, *x.shape[3:])

    def part(some):
        return values(*jax.tree.map(sharding.constrain_batch, some))

    out = jax.lax.map(jax.checkpoint(part), jax.tree.map(split, rows))
    return jax.tree.map(join, out)


def label_losses(
    logits: Callable[[Array], Array],
    vocab_size: int,
    x: Float[Array, "B T *D"],
    labels: Int[Array, "B T *G"],
) -> Float[Array, "B T *G"]:
    """`cross_entropy` of the logits at rows of x, a few places at a time."""
    values = lambda x, labels: cross_entropy(logits(x), labels)
    return few_places(values, math.prod(labels.shape[2:]) * vocab_size, x, labels)


def law_losses(
    logits: Callable[[Array], Array],
    x: Float[Array, "B T D"],
    shared: Shared,
    hidden: Float[Array, "B T E"],
) -> Float[Array, "B T"]:
    """`soft_cross_entropy` of the logits at rows of x from the law of the target's
    states, a few places at a time."""

    def values(x, hidden):
        p = jax.nn.softmax(shared.logits(hidden), axis=-1)
        return soft_cross_entropy(logits(x), p)

    return few_places(values, shared.embed.shape[0], x, hidden)


def step_acceptance(
    laws: Sequence[Float[Array, "B R V"]], shared: Shared, batch: Batch
) -> dict[str, Array]:
    """`acceptance` of drafts that step k = 1, 2, .. draws from laws of x_{t+1+k}, each
    at every `THIN`-th place t."""
    accepted, known = [], []
    for k, q in enumerate(laws, 1):
        p = shared.logits(shift(batch.hidden, k)[:, ::THIN])
        accepted.append(overlap(q, p))
        known.append(shift(batch.mask, 1 + k)[:, ::THIN])
    stack = lambda xs: jnp.stack(xs, axis=-1)
    return acceptance(stack(accepted), stack(known))


def head_losses(
    logits: Callable[[Array], list[Float[Array, "B T V"]]],
    x: Float[Array, "B T *D"],
    shared: Shared,
    batch: Batch,
    depth: int,
) -> tuple[Float[Array, "G"], dict[str, Array]]:
    """Mean cross-entropy of heads k = 1..G that guess x_{t+1+k}, and `acceptance`.

    `logits` are those of each head at rows of x. Acceptance is that of the first
    `depth` heads. Heads are arrays of their own: V-wide ones joined and cut cost more
    than the products behind them.
    """
    some = logits(x[:, ::THIN])
    ahead = lambda x: jnp.stack([shift(x, 1 + k) for k in range(1, len(some) + 1)], 2)
    labels, wanted = ahead(batch.tokens), ahead(batch.mask)

    def values(x, labels):
        ces = map(cross_entropy, logits(x), jnp.moveaxis(labels, 2, 0))
        return jnp.stack(list(ces), axis=2)

    each = few_places(values, len(some) * shared.embed.shape[0], x, labels)
    ces = jax.vmap(masked_mean, in_axes=2)(each, wanted)
    return ces, step_acceptance(some[:depth], shared, batch)


THIN = 8  # acceptance is estimated from every 8th position: a softmax a head is dear


def shift(x: Array, by: int) -> Array:
    """x[:, t + by] at t; what is past either end is zero (False)."""
    if by < 0:
        return jnp.concatenate([jnp.zeros_like(x[:, :-by]), x[:, :by]], axis=1)
    return jnp.concatenate([x[:, by:], jnp.zeros_like(x[:, :by])], axis=1)


def late(steps: list[Array]) -> list[Array]:
    """What step k = 1, 2, .. makes of place t - k, at t: there all guess one token,
    and the target's law of it is computed once."""
    return [shift(x, -k) for k, x in enumerate(steps, 1)]


def late_means(
    values: list[Float[Array, "B T"]], wanted: Bool[Array, "B T"]
) -> Float[Array, "K"]:
    """Each step's `masked_mean` of what `late` made, which begins at t = k."""
    place = jnp.arange(wanted.shape[1])[None]
    means = [masked_mean(x, wanted & (place >= k)) for k, x in enumerate(values, 1)]
    return jnp.stack(means)


def place_keys(key: PRNGKey, shape: tuple[int, ...]) -> Array:
    """A key for each row and place [B T]: padding changes no other place's draws."""
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    rows, places = (jnp.arange(n) for n in shape)
    return jax.vmap(fold, in_axes=(0, None))(fold(key, rows), places)
