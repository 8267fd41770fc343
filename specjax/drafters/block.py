"""What DFlash, DFlash 2 and DSpark share: a block of slots over a text's features.

With F_t the raw outputs of M target layers at position t, side by side, and X the
embeddings of a block's slots,

    H_t = RMS(F_t W_c)                                                            (1)
    q = N W_q,  [k, v] = [H; N] W_kv,  N = RMS(X)        norms on q and k, rotary (2)
    X = X + softmax(q k^T E^-1/2) v W_o;  X = X + MLP(RMS(X))                     (3)

so that every layer is given the same H ("every_layer"). The alternative is to give H
to the first layer alone ("input"): the text then runs through the layers itself, each
position seeing those before it, and a block sees in layer i what layer i - 1 made of H:

    C_0 = H;  [k, v] = [N_C; N] W_kv,  N_C = RMS(C_i);  C_{i+1} = eq. 3 of C_i     (4)

The same weights serve text and block, so both ways have the same parameters.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax.drafters import base
from specjax.layers import (
    GatedMLP,
    RMSNorm,
    attend,
    dense,
    group_queries,
    of_layers,
    rotary,
    rotate,
    ungroup_queries,
)
from specjax.typing import Array, Bool, Float, Int, PRNGKey


class Angles(NamedTuple):
    cos: Float[Array, "B T E"]
    sin: Float[Array, "B T E"]


class BlockAttention(nn.Module):
    """Eq. 2 and the attention of eq. 3; text and block share one projection."""

    drafter: Any

    def setup(self):
        d = self.drafter
        normal = nn.initializers.normal(0.02)
        D, E = d.width, d.head_width
        self.q = self.param("q", normal, (d.num_heads, E, D))
        self.kv = self.param("kv", normal, (2, d.num_kv_heads, E, D))
        self.out = self.param("out", normal, (D, d.num_heads * E))
        self.q_norm, self.k_norm = RMSNorm(d.norm_eps), RMSNorm(d.norm_eps)

    def keys_values(self, x: Float[Array, "B T D"], at: Angles):
        """Normed and rotated keys, bare values, [B K T E] each."""
        kv = dense(x, self.kv)  # [B T 2 K E]
        k = self.k_norm(kv[:, :, 0]).swapaxes(1, 2)
        return rotate(k, *at), kv[:, :, 1].swapaxes(1, 2)

    def __call__(self, x, k, v, at: Angles, mask: Bool[Array, "#B T S"]):
        """Attention of the block's queries over the keys and values given."""
        d = self.drafter
        q = self.q_norm(dense(x, self.q))
        q = rotate(q.swapaxes(1, 2), *at).swapaxes(1, 2)
        mask = jnp.tile(mask, (1, d.num_heads // d.num_kv_heads, 1))
        out = attend(group_queries(q, d.num_kv_heads), k, v, mask)
        return dense(ungroup_queries(out, x.shape[1]), self.out)


class BlockLayer(nn.Module):
    """Eq. 3."""

    drafter: Any
    static_args: ClassVar[tuple[int, ...]] = (2,)  # join

    def setup(self):
        d = self.drafter
        self.input_norm, self.post_norm = RMSNorm(d.norm_eps), RMSNorm(d.norm_eps)
        self.attention = BlockAttention(d)
        self.mlp = GatedMLP(d.mlp_width)

    def context(self, h, at: Angles):
        """What a layer caches of H, which never passes its input norm."""
        return self.attention.keys_values(h, at)

    def around(self, sublayer: str, n: Array) -> tuple[Array, Callable]:
        """What a sublayer reads of its normed input, and what is made of its output."""
        del sublayer
        return n, lambda y: y

    def __call__(self, x, join, at: Angles, mask):
        """`join` puts the block's keys and values beside those of the context."""
        n, close = self.around("attention", self.input_norm(x))
        k, v = join(*self.attention.keys_values(n, at))
        x = x + close(self.attention(n, k, v, at, mask))
        n, close = self.around("mlp", self.post_norm(x))
        return x + close(self.mlp(n)), (k, v)


class Net(nn.Module):
    """Eq. 1 to 4. Parameters: `fc`, `hidden_norm`, `layer_{i}`, `norm`.

    `drafter` is a `dflash.DFlash`: the sizes, `inject`, and which keys are near.
    """

    drafter: Any
    make_layer: ClassVar[type[BlockLayer]] = BlockLayer

    def setup(self):
        d = self.drafter
        M = len(d.target_layer_ids)
        self.fc = self.param("fc", nn.initializers.normal(0.02), (d.width, M * d.width))
        self.hidden_norm, self.norm = RMSNorm(d.norm_eps), RMSNorm(d.norm_eps)
        self.layer = [of_layers(self.make_layer)(d) for _ in range(d.num_layers)]

    def angles(self, positions: Int[Array, "B T"]) -> Angles:
        return Angles(*rotary(self.drafter.rope, positions, self.drafter.head_width))

    def context(self, features: Float[Array, "B T MD"], positions, joins, places):
        """Keys and values of a text in every layer, as `joins` put them.

        `places` [B S] are the positions of the keys that come out of `joins`.
        """
        h = self.hidden_norm(dense(features, self.fc))
        if self.drafter.inject == "input":
            before = places[:, None] <= positions[..., None]
            return self.run(h, positions, joins, before, places)[1]
        at = self.angles(positions)
        pairs = zip(self.layer, joins, strict=True)
        return [join(*layer.context(h, at)) for layer, join in pairs]

    def run(self, x, positions, joins, mask, places) -> tuple[Array, list]:
        """Eq. 3 layer by layer, and each one's keys and values."""
        at, joined = self.angles(positions), []
        for i, (layer, join) in enumerate(zip(self.layer, joins, strict=True)):
            near = self.drafter.near(i, positions, places)
            x, kv = layer(x, join, at, mask if near is None else mask & near)
            joined.append(kv)
        return x, joined

    def __call__(self, x, positions, joins, mask, places) -> tuple[Array, list]:
        """States of the slots after the final norm, and each layer's k and v.

        `places` [B S] are the positions of the keys that `mask` [B T S] lets be seen.
        """
        x, joined = self.run(x, positions, joins, mask, places)
        return self.norm(x), joined

    def train(self, features, blocks, anchors: Int[Array, "B A"]):
        """All blocks of a text at once; block b sees H before its own anchor only.

        `blocks` [B A N D] are embedded; returns the slots' states, [B A N D].
        """
        B, A, N, D = blocks.shape
        T = features.shape[1]
        here = jnp.broadcast_to(jnp.arange(T), (B, T))
        alone = [lambda k, v: (k, v)] * len(self.layer)
        context = self.context(features, here, alone, here)
        sees_context = jnp.arange(T)[None, None] < anchors[..., None]  # [B A T]
        sees_block = jnp.broadcast_to(jnp.eye(A, dtype=bool), (B, A, A))
        mask = jnp.concatenate(
            [sees_context, jnp.repeat(sees_block, N, axis=2)], axis=2
        )
        positions = (anchors[..., None] + jnp.arange(N)[None, None]).reshape(B, A * N)

        def beside(k, v):
            return lambda bk, bv: (
                jnp.concatenate([k, bk], axis=2),
                jnp.concatenate([v, bv], axis=2),
            )

        x, _ = self(
            blocks.reshape(B, A * N, D),
            positions,
            [beside(k, v) for k, v in context],
            jnp.repeat(mask, N, axis=1),
            jnp.concatenate([here, positions], axis=1),
        )
        return x.reshape(B, A, N, D)


def draw_anchors(
    key: PRNGKey, mask: Bool[Array, "B T"], num_anchors: int
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Draws positions without replacement among answer tokens followed by another one.

    Returns them in ascending order and which are real: a short answer has fewer than
    asked for, the rest stand at 0 and count for nothing.
    """
    B, T = mask.shape
    valid = mask & base.shift(mask, 1)
    order = jnp.where(valid, jax.random.uniform(key, (B, T)), 2.0)
    width = min(num_anchors, T)
    lowest, anchors = jax.lax.top_k(-order, width)
    real = lowest > -2.0
    anchors = jnp.sort(jnp.where(real, anchors, T), axis=1)
    real = anchors < T
    return jnp.where(real, anchors, 0), real
