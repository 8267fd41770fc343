"""DFlash 2: DFlash with short convolutions around its sublayers and a path selector.

Inco AI and Z Lab 2026, a blog post without a paper; the equations are those of the
authors' model code, whose tensors are named in brackets. The backbone is `dflash`:
G + 1 slots of which the anchor's drafts nothing. Around each attention and each MLP of
width D, with n_t the normed input at slot t, g channels to a group and K taps,

    D_t = P n_t,  [2 K D/g] numbers     [kernel_projection]                       (1)
    y_t[c] = sum_o (base[0, o, c] + D_t[0, o, c div g]) n_{t-o}[c]                (2)
    z_t[c] = sum_o (base[1, o, c] + D_t[1, o, c div g]) s_{t-o}[c]                (3)

the sublayer reads y, s is its output, and z is what is added to the stream. Slots
before the block are zeros: nothing leaks between blocks, and keys and values of the
text come from H as before. Attention in the block stays as it was; only the taps look
back.

With U_t the head's logits at slot t and h_t the state it reads, the k likeliest ids of
U_t are candidates, and a path through them is walked from a_0 = anchor on:

    S_t(b) = U_t(b) + <A[a_{t-1}] * (P' h_t), B[b]>                               (4)

over candidates b, A and B tables of r numbers an id [predecessor_codebook,
successor_codebook]. Greedy drafts take the best; else a_t is drawn from
softmax(S_t / T) over the candidates, the law that the verifier is given. `topology`
makes trees: eq. 4 knows a node by its token and depth alone, so all are walked from one
pass.

No training code was published. As third parties do (NeMo-Automodel, SpecForge), the
convolutions start as the identity and B as zeros, so that training starts as DFlash's,
and the loss is eq. 5 of `dflash` for U plus

    w_selector sum w_k CE(S_k, x_{s+k}) / sum w_k                                 (5)

over the slots whose label is among the candidates, after the text's own tokens (both
sums are over these slots; others put the label among the candidates instead).

Departs from the code: top-k and top-p of the settings also cut the drafted law.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax import draft_tree, sharding
from specjax.drafters import base, block
from specjax.drafters.base import Batch, Card
from specjax.drafters.dflash import DFlash, State
from specjax.layers import dense
from specjax.transformer import Shared, TransformerConfig
from specjax.typing import Array, Float, Int, Params, PRNGKey


class GroupedConv(nn.Module):
    """Eq. 1 to 3 around one sublayer. Parameters: `base`, `projection`."""

    drafter: Any

    def setup(self):
        d = self.drafter
        K, D = d.conv_taps, d.width
        identity = lambda *_: jnp.zeros((2, K, D)).at[:, 0].set(1.0)
        self.base = self.param("base", identity)
        shape = (2, K, D // d.conv_group, D)
        self.projection = self.param("projection", nn.initializers.zeros, shape)

    def __call__(self, n: Float[Array, "B T D"]) -> tuple[Array, Callable]:
        """What the sublayer reads, and what makes z of its output."""
        d, shape = self.drafter, n.shape
        to_blocks = lambda x: x.reshape(shape[0], -1, d.num_slots, d.width)
        dynamic = dense(to_blocks(n), self.projection)  # [B A N 2 K D/g]
        kernel = jnp.repeat(dynamic, d.conv_group, axis=-1)
        kernel = kernel + jnp.broadcast_to(self.base.astype(n.dtype), kernel.shape)

        def side(i: int, x):
            x, N = to_blocks(x), d.num_slots
            back = lambda o: jnp.pad(x, ((0, 0), (0, 0), (o, 0), (0, 0)))[:, :, :N]
            taps = [kernel[..., i, o, :] * back(o) for o in range(d.conv_taps)]
            return sum(taps[1:], taps[0]).reshape(shape)

        return side(0, n), lambda s: side(1, s)


class ConvLayer(block.BlockLayer):
    """A layer of DFlash in the convolutions."""

    def setup(self):
        super().setup()
        self.attention_conv = GroupedConv(self.drafter)
        self.mlp_conv = GroupedConv(self.drafter)

    def around(self, sublayer: str, n: Array) -> tuple[Array, Callable]:
        return self.attention_conv(n) if sublayer == "attention" else self.mlp_conv(n)


class Net(block.Net):
    make_layer: ClassVar[type[block.BlockLayer]] = ConvLayer


class Selector(nn.Module):
    """Eq. 4. Parameters: `predecessor`, `successor`, `projection`."""

    rank: int
    top_k: int
    vocab_size: int
    width: int

    def setup(self):
        normal, zeros = nn.initializers.normal(0.02), nn.initializers.zeros
        V, r, D = self.vocab_size, self.rank, self.width
        self.predecessor = self.param("predecessor", normal, (V, r))
        self.successor = self.param("successor", zeros, (V, r))
        self.projection = self.param("projection", normal, (r, D))

    def __call__(
        self, logits: Float[Array, "*B V"], before: Int[Array, "*B"], h: Array
    ) -> Float[Array, "*B V"]:
        """S over all ids, -inf for those that are no candidates."""
        best, ids = jax.lax.top_k(logits, self.top_k)  # [*B k]
        gate = sharding.look_up(self.predecessor, before) * dense(h, self.projection)
        path = jnp.einsum(
            "...r,...kr->...k", gate, sharding.look_up(self.successor, ids)
        )
        scores = best + path.astype(jnp.float32)
        out = jnp.full(logits.shape, -jnp.inf, jnp.float32)
        return jnp.put_along_axis(out, ids, scores, axis=-1, inplace=False)


@dataclasses.dataclass(frozen=True)
class DFlash2(DFlash):
    """Hyperparameters beside those of `DFlash`."""

    card: ClassVar[Card] = Card(
        reads="features of several layers, drafted tokens",
        passes="1, and gamma of a small selector",
        trained="block layers, fusion, selector",
        paper="Inco AI and Z Lab, blog, August 2026",
        year=2026,
    )

    propose: Literal["argmax", "sample"] = "sample"
    conv_taps: int = 2  # K
    conv_group: int = 16  # g, channels with one dynamic kernel
    rank: int = 256  # r
    top_k: int = 16  # k, candidates of a slot
    w_selector: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        for name in ("conv_taps", "conv_group", "rank", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"dflash2 needs {name} >= 1, got {getattr(self, name)}."
                )
        if self.width % self.conv_group:
            raise ValueError(
                f"dflash2 needs conv_group to divide the width {self.width}, got "
                f"{self.conv_group}."
            )
        if self.inject != "every_layer":
            raise ValueError(
                "dflash2's convolutions run over blocks, not over the text: it has no "
                f"inject={self.inject!r}."
            )

    @classmethod
    def for_target(cls, config: TransformerConfig, mask_token_id, **fields):
        """DFlash's shape; the published rank for vocabularies of 8,192 ids and more."""
        defaults = {
            "rank": min(256, max(4, config.vocab_size // 32)),
            "top_k": min(16, config.vocab_size),
            "conv_group": math.gcd(16, config.width),
        }
        return super().for_target(config, mask_token_id, **defaults | fields)

    @property
    def net(self) -> block.Net:
        return Net(self)

    def init(self, key: PRNGKey, shared: Shared) -> Params:
        if self.top_k > shared.embed.shape[0]:
            raise ValueError(
                f"dflash2 has top_k={self.top_k} candidates; the target has "
                f"{shared.embed.shape[0]} ids."
            )
        backbone_key, selector_key = jax.random.split(key)
        logits = jnp.zeros((1, shared.embed.shape[0]))
        args = logits, jnp.zeros((1,), jnp.int32), jnp.zeros((1, self.width))
        params = self._selector(shared).init(selector_key, *args)["params"]
        return super().init(backbone_key, shared) | {"selector": params}

    def _selector(self, shared: Shared) -> Selector:
        return Selector(self.rank, self.top_k, shared.embed.shape[0], self.width)

    def select(self, params: Params, shared: Shared, logits, before, h) -> Any:
        """Eq. 4."""
        args = logits, before, h
        return self._selector(shared).apply({"params": params["selector"]}, *args)

    def draft(self, params, shared: Shared, state: State, anchor, sampling, keys):
        h, state = self.fill(params, shared, state, anchor)
        h = h[:, 1 : self.tree.depth + 1]
        U = shared.logits(h)

        def step(carry, tokens, sees, level):
            del sees
            wide = lambda x: jnp.repeat(
                x[:, level + 1][:, None], tokens.shape[1], axis=1
            )
            return self.select(params, shared, wide(U), tokens, wide(h)), carry

        first = self.select(params, shared, U[:, 0], anchor, h[:, 0])
        draft, _ = draft_tree.grow(self.tree, first, step, None, sampling, keys)
        return draft, state

    def loss(self, params, shared: Shared, batch: Batch, key: PRNGKey):
        """Eq. 5 beside DFlash's loss; "alpha" is that of the selector's law."""
        x, at, wanted = self.blocks(params, shared, batch, key)
        rows, h = jnp.arange(x.shape[0])[:, None, None], x[:, :, 1:]
        before, labels = batch.tokens[rows, at - 1], batch.tokens[rows, at]
        weights = jnp.where(wanted, self.slot_weights[None, None], 0.0)

        def values(h, before, labels):
            logits = shared.logits(h)
            scores = self.select(params, shared, logits, before, h)
            score = jnp.take_along_axis(scores, labels[..., None], axis=-1)[..., 0]
            covered = jnp.isfinite(score)
            # In two steps: no NaN may come from the gradient of what is not covered.
            path = jax.nn.logsumexp(scores, axis=-1) - jnp.where(covered, score, 0.0)
            return base.cross_entropy(logits, labels), path, covered

        args = self.gamma * shared.embed.shape[0], h, before, labels
        ce, path, covered = base.few_places(values, *args)
        path = base.masked_mean(path, jnp.where(covered, weights, 0.0))

        def law(some):
            mine = before[:, some], h[:, some]
            return self.select(params, shared, shared.logits(mine[1]), *mine)

        by_slot = jax.vmap(base.masked_mean, in_axes=(2, 2))
        logs = {
            "ce": by_slot(ce, wanted),
            "ce_selector": path,
            "covered": by_slot(covered.astype(jnp.float32), wanted),
        } | self.judge(shared, batch, law, at, wanted)
        return base.masked_mean(ce, weights) + self.w_selector * path, logs
