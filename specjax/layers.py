"""The layers that Flax lacks: dense for few rows, grouped attention, rotary, gated MLP.

Equations and numerics follow the published Llama and Qwen decoders (see
`transformer.py`): norms, angles and softmax in float32, everything else in the dtype of
the activations.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from specjax import sharding
from specjax.pytree import pytree, static
from specjax.typing import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding with the published scalings.

    "proportional" (Gemma 4) turns the first `partial` of the pairs, the others not.
    """

    theta: float = 10_000.0
    scaling: Literal["none", "linear", "llama3", "yarn", "proportional"] = "none"
    factor: float = 1.0
    original_max_position: int = 8192  # tokens; llama3 and yarn only
    low_freq_factor: float = 1.0  # llama3 only
    high_freq_factor: float = 4.0  # llama3 only
    beta_fast: float = 32.0  # yarn only
    beta_slow: float = 1.0  # yarn only
    attention_factor: float | None = None  # yarn only; None derives it from factor
    truncate: bool = True  # yarn only: ramp ends on whole dimensions
    partial: float = 1.0  # proportional only

    def __post_init__(self):
        known = ("none", "linear", "llama3", "yarn", "proportional")
        if self.scaling not in known:
            raise ValueError(
                f"unknown rope scaling {self.scaling!r}; known: {', '.join(known)}."
            )
        if self.theta <= 0 or self.factor <= 0:
            raise ValueError(
                f"rope needs theta > 0 and factor > 0, got theta={self.theta}, "
                f"factor={self.factor}."
            )

    def frequencies(self, head_width: int) -> np.ndarray:
        """Radians per position of each pair [E/2], float32."""
        exponent = np.arange(0, head_width, 2, dtype=np.float64) / head_width
        inverse = self.theta**-exponent
        if self.scaling == "linear":
            inverse = inverse / self.factor
        elif self.scaling == "llama3":
            inverse = self._llama3(inverse)
        elif self.scaling == "yarn":
            inverse = self._yarn(inverse, head_width)
        elif self.scaling == "proportional":
            turned = int(self.partial * head_width // 2)
            inverse = inverse / self.factor
            inverse = np.where(np.arange(len(inverse)) < turned, inverse, 0.0)
        return inverse.astype(np.float32)

    @property
    def magnitude(self) -> float:
        """The factor on both cos and sin; other than 1 only for yarn."""
        if self.scaling != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def _llama3(self, inverse: np.ndarray) -> np.ndarray:
        wavelength = 2 * np.pi / inverse
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = (self.original_max_position / wavelength - low) / (high - low)
        smooth = np.clip(smooth, 0.0, 1.0)
        return inverse * ((1 - smooth) / self.factor + smooth)

    def _yarn(self, inverse: np.ndarray, head_width: int) -> np.ndarray:
        def dimension(rotations: float) -> float:
            turns = self.original_max_position / (rotations * 2 * np.pi)
            return head_width * math.log(turns) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_width - 1)
        if low == high:
            high += 0.001
        ramp = (np.arange(head_width // 2) - low) / (high - low)
        ramp = np.clip(ramp, 0.0, 1.0)
        return (1 - ramp) * inverse + ramp * inverse / self.factor


def rotary(
    rope: Rope, positions: Int[Array, "B T"], head_width: int
) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"]]:
    """cos and sin of each position, float32, in the half-split layout."""
    frequencies = rope.frequencies(head_width)[None, None]
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles) * rope.magnitude, jnp.sin(angles) * rope.magnitude


def rotate(
    x: Float[Array, "B X T E"],
    cos: Float[Array, "B T E"],
    sin: Float[Array, "B T E"],
) -> Float[Array, "B X T E"]:
    """Turns each pair (i, i + E/2) by its angle. X is any axis of heads."""
    first, second = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    cos, sin = cos[:, None].astype(x.dtype), sin[:, None].astype(x.dtype)
    return x * cos + turned * sin


def dense(
    x: Float[Array, "*B D"], w: Float[Array, "*F D"], dtype: Any = None
) -> Float[Array, "..."]:
    """x @ w^T over the last axes, accumulated in float32: [*B *F], in x's dtype.

    Weights lie as on disk, output first. On the CPU a product of few rows is bound by
    reading w, and XLA's default is slow beyond one; see `_few_rows` and `_each_row`.
    """
    if sharding.in_use():  # axes of w stay apart: they may be split
        last = ((x.ndim - 1,), (w.ndim - 1,)), ((), ())
        out = jax.lax.dot_general(x, w, last, preferred_element_type=jnp.float32)
        return out.astype(dtype or x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    matrix = w.reshape(-1, w.shape[-1])
    if 1 < rows.shape[0] <= 8 and matrix.size <= CACHED:
        out = jax.lax.platform_dependent(rows, matrix, cpu=_each_row, default=_product)
    elif 1 < rows.shape[0] <= 32 and matrix.shape[0] % 2 == 0:
        out = jax.lax.platform_dependent(rows, matrix, cpu=_few_rows, default=_product)
    else:
        out = _product(rows, matrix)
    return out.reshape(*x.shape[:-1], *w.shape[:-1]).astype(dtype or x.dtype)


CACHED = 2**19  # weights of a matrix that stays in a core's cache between its rows


def _each_row(x: Float[Array, "R D"], w: Float[Array, "O D"]) -> Float[Array, "R O"]:
    """`_product` row by row: with w cached, XLA's one-row product is the fastest.

    Measured on the tiny target, 2 cores: a pass of 5 rows 3.3 -> 1.5 ms.
    """
    one = lambda row: jnp.dot(w, row, preferred_element_type=jnp.float32)
    return jnp.stack([one(row) for row in x])


def _product(x: Float[Array, "R D"], w: Float[Array, "O D"]) -> Float[Array, "R O"]:
    return jnp.einsum("RD,OD->RO", x, w, preferred_element_type=jnp.float32)


def _few_rows(x: Float[Array, "R D"], w: Float[Array, "O D"]) -> Float[Array, "R O"]:
    """`_product` as a batch of two with w on the left.

    Measured 1.4 to 2 times as fast for 2 to 16 rows on 2 cores
    (`benchmarks/dense.py`).
    """
    halves = w.reshape(2, -1, w.shape[1])
    twice = jnp.broadcast_to(x, (2, *x.shape))
    out = jnp.einsum("COD,CRD->COR", halves, twice, preferred_element_type=jnp.float32)
    return out.reshape(-1, x.shape[0]).T


class RMSNorm(nn.Module):
    """x / rms(x) in float32, cast to x's dtype, times the weight (Llama's order)."""

    eps: float = 1e-6

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        weight = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * jnp.broadcast_to(weight.astype(x.dtype), x.shape)


def attend(
    q: Float[Array, "B K Q E"],
    k: Float[Array, "B K S E"],
    v: Float[Array, "B K S E"],
    mask: Bool[Array, "#B Q S"],
    own: tuple[tuple[Array, Array], ...] = (),
    scale: float | None = None,
) -> Float[Array, "B K Q E"]:
    """Softmax attention in float32 of grouped queries; True in `mask` is visible.

    Q runs over query heads of one kv head times positions. The sum over keys is divided
    by its normaliser at the end: E numbers a row instead of S. A row that sees nothing
    returns the mean of the values, never NaN. `own` are more keys and values [B K T E],
    of which a query sees those of its own position alone. Without `scale` the queries
    are divided by the root of E; with it the scores are multiplied, in float32.
    """
    B, K, Q, E = q.shape
    # One batch axis: fewer copies. On a mesh rows and heads are split apart.
    merge = lambda x: x if sharding.in_use() else x.reshape(B * K, *x.shape[2:])
    scores = jnp.einsum(
        "...QE,...SE->...QS",
        merge(q * (E**-0.5) if scale is None else q),
        merge(k),
        preferred_element_type=jnp.float32,
    )
    scores = scores if scale is None else scores * scale
    mask = jnp.broadcast_to(mask[:, None], (B, K, *mask.shape[1:]))
    scores = jnp.where(merge(mask), scores, jnp.finfo(jnp.float32).min)
    S = scores.shape[-1]
    mine = lambda x: merge(jnp.tile(x, (1, 1, Q // x.shape[2], 1))).astype(jnp.float32)
    by = E**-0.5 if scale is None else scale
    for key, _ in own:
        score = jnp.sum(merge(q).astype(jnp.float32) * mine(key), -1, keepdims=True)
        scores = jnp.concatenate([scores, score * by], axis=-1)
    # What the largest is subtracts out: no gradient goes back through it.
    largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum(
        "...QS,...SE->...QE",
        weights[..., :S].astype(v.dtype),
        merge(v),
        preferred_element_type=jnp.float32,
    )
    for i, (_, value) in enumerate(own):
        out = out + weights[..., S + i, None] * mine(value)
    return (out / total).reshape(B, K, Q, E).astype(q.dtype)


LONG = 2**25  # scores of a kv head that are held at once; of more queries a few a time


def is_long(groups: int, length: int) -> bool:
    """Whether the scores of a text with itself are too many to be held at once."""
    return groups * length * length > LONG


@pytree
class Sees:
    """What a query sees of the keys, told by numbers of both: no [Q S] mask exists.

    `see` takes arrays [.. Q] and [.. S] of `query` and `key` and returns [.. Q S].
    """

    query: tuple[Int[Array, "B Q"], ...]
    key: tuple[Int[Array, "B S"], ...]
    see: Callable[..., Array] = static()


def earlier(query: tuple[Array], key: tuple[Array]) -> Bool[Array, "*B Q S"]:
    """Keys up to a query's position."""
    return key[0][..., None, :] <= query[0][..., :, None]


def attend_long(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B K S E"],
    v: Float[Array, "B K S E"],
    sees: Sees,
    places: tuple[Int[Array, "B T"], Int[Array, "B S"]],
    window: int | None = None,
    scale: float | None = None,
) -> Float[Array, "B T HE"]:
    """`attend`, so many queries a time that their G T' S scores are at most `LONG`.

    Neither the scores nor a mask of the whole text exist, and a gradient computes them
    again. `places` are positions of queries and keys, for the window. On a mesh that
    splits the text (`sharding.rows`) each device goes through its own part.
    """
    (B, T, H, _), (K, S) = q.shape, k.shape[1:3]
    G, R = H // K, sharding.sequence_ways(B, T)
    most = max(1, LONG // (G * S))
    t = next(n for n in range(min(T // R, most), 0, -1) if T // R % n == 0)

    def some(q, at, query):
        seen = sees.see(query, sees.key)
        if window is not None:
            seen &= at[..., None] - places[1][:, None] < window
        mask = jnp.tile(seen, (1, G, 1))
        out = attend(group_queries(q, K), k, v, mask, scale=scale)
        return ungroup_queries(out, t)

    split = lambda x: jnp.moveaxis(x.reshape(B, R, -1, t, *x.shape[2:]), 2, 0)
    each = jax.checkpoint(jax.vmap(some, in_axes=1, out_axes=1))
    parts = jax.tree.map(split, (q, places[0], sees.query))
    out = jax.lax.map(lambda x: each(*x), parts)
    return jnp.moveaxis(out, 0, 2).reshape(B, T, -1)


def group_queries(q: Float[Array, "B T H E"], num_kv_heads: int) -> Array:
    """Lays the G query heads that share a kv head beside each other: [B K G*T E]."""
    return rearrange(q, "B T (K G) E -> B K (G T) E", K=num_kv_heads)


def ungroup_queries(out: Float[Array, "B K Q E"], num_positions: int) -> Array:
    """Undoes `group_queries` and joins the heads: [B T H*E]."""
    return rearrange(out, "B K (G T) E -> B T (K G E)", T=num_positions)


def gelu(x: Array) -> Array:
    """GELU in its tanh form."""
    return jax.nn.gelu(x, approximate=True)


def mixture(
    rows: Float[Array, "R D"],
    chosen: Int[Array, "R Y"],
    weights: Float[Array, "R Y"],
    gate_up: Float[Array, "X D TwoF"],
    down: Float[Array, "X F D"],
    activation: Callable[[Array], Array] = jax.nn.silu,
) -> Float[Array, "R D"]:
    """Each row's weighted sum of its Y experts' gated MLPs.

    The rows are sorted by expert, so that each expert is one product.
    """
    (X, F, _), Y = down.shape, chosen.shape[1]
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=X).astype(jnp.int32)
    source = order // Y
    hidden = jax.lax.ragged_dot(rows[source], gate_up, sizes)
    hidden = activation(hidden[:, :F]) * hidden[:, F:]
    out = jax.lax.ragged_dot(hidden, down, sizes)
    weights = weights.reshape(-1)[order].astype(out.dtype)
    return (
        jnp.zeros_like(rows).at[source].add((out * weights[:, None]).astype(rows.dtype))
    )


_REMAT = contextvars.ContextVar("remat", default=False)


@contextlib.contextmanager
def rematerialised() -> Iterator[None]:
    """Programs traced in here keep what goes into a layer, for the gradient, and
    compute what is inside it once more.

    It saves memory on accelerators; XLA for the CPU computes nothing twice. Compiled
    for TPU v5e, a 12-layer draft model's step takes 329 MB instead of 742 beside its
    arguments, EAGLE-3's at 512 tokens 23 instead of 65.
    """
    token = _REMAT.set(True)
    try:
        yield
    finally:
        _REMAT.reset(token)


@functools.cache
def _remat(cls: type[nn.Module]) -> Any:
    return nn.remat(cls, static_argnums=getattr(cls, "static_args", ()))


def of_layers(cls: type[nn.Module]) -> Any:
    """The class to make a stack's layers of: `cls`, or as `rematerialised` has it.

    A class whose `__call__` takes functions names them in `static_args`; self is 0.
    """
    return _remat(cls) if _REMAT.get() else cls


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); gate and up are one matrix [2 F D]."""

    mlp_width: int
    use_bias: bool = False
    activation: Callable[[Array], Array] = jax.nn.silu

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        D, F = x.shape[-1], self.mlp_width
        normal = nn.initializers.normal(0.02)
        zeros = nn.initializers.zeros
        hidden = dense(x, self.param("gate_up", normal, (2, F, D)))
        if self.use_bias:
            hidden = hidden + self.param("gate_up_bias", zeros, (2, F))[None, None]
        hidden = self.activation(hidden[..., 0, :]) * hidden[..., 1, :]
        out = dense(hidden, self.param("down", normal, (D, F)))
        if self.use_bias:
            out = out + self.param("down_bias", zeros, (D,))[None, None]
        return out
