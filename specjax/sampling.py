"""Sampling settings: from logits to the law that tokens are drawn from.

One function serves every position of target and drafter, the bonus included, in the
order temperature, top-k, top-p (that of `transformers`, vLLM and SGLang), min-p.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from specjax.typing import Array, Float, Int, PRNGKey

GREEDY_BELOW = 1e-5  # temperatures under this are greedy: dividing by them overflows


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `Sampling()` leaves the model's law as it is."""

    temperature: float = 1.0  # 0 is greedy, whatever the rest says
    top_k: int | None = None  # keep the k likeliest; None, 0 and -1 are off
    top_p: float = 1.0  # keep the fewest tokens that reach this mass; 1 is off
    min_p: float = 0.0  # drop tokens under min_p times the largest; 0 is off
    num_ids: int | None = None  # ids from here on are never drawn: rows that pad a head

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature must be a number >= 0 (0 is greedy), got "
                f"{self.temperature}."
            )
        if self.top_k is not None and self.top_k < -1:
            raise ValueError(
                f"top_k must be >= 1, or None, 0 or -1 for off; got {self.top_k}."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p must lie in (0, 1], 1 being off; got {self.top_p}. "
                "For greedy decoding use temperature=0."
            )
        if not 0 <= self.min_p <= 1:
            raise ValueError(
                f"min_p must lie in [0, 1], 0 being off; got {self.min_p}."
            )
        if self.num_ids is not None and self.num_ids < 1:
            raise ValueError(f"num_ids must be >= 1 or None, got {self.num_ids}.")
        # One spelling of "off", so that equal settings compile once.
        object.__setattr__(self, "top_k", self.top_k if (self.top_k or 0) > 0 else None)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    def probs(self, logits: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
        """The law after all settings, float32, rows sum to 1."""
        if self.greedy:
            return jax.nn.one_hot(self.best(logits), logits.shape[-1])
        return jax.nn.softmax(self.scores(logits), axis=-1)

    def scores(self, logits: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
        """Logarithms of the law up to a constant a row, -inf for what is never drawn.

        Not for greedy settings. Give it whole batches: under `vmap` a rare branch, that
        of equal logits at a cut, runs always.
        """
        scores = self.possible(logits) / self.temperature
        V = scores.shape[-1]
        if self.top_k is not None and self.top_k < V:
            scores = _keep(scores, jnp.ones_like(scores), float(self.top_k))
        best = jnp.max(scores, axis=-1, keepdims=True)
        if self.top_p < 1:
            weights = jnp.exp(scores - best)
            need = self.top_p * jnp.sum(weights, axis=-1, keepdims=True)
            scores = _keep(scores, weights, need)
        if self.min_p > 0:
            scores = jnp.where(scores >= best + math.log(self.min_p), scores, -jnp.inf)
        return scores

    def possible(self, logits: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
        """float32 logits, -inf for NaN and for ids that no text may hold."""
        banned = jnp.isnan(logits)
        if self.num_ids is not None and self.num_ids < logits.shape[-1]:
            beyond = jnp.arange(logits.shape[-1]) >= self.num_ids
            banned = banned | jnp.broadcast_to(beyond, banned.shape)
        return jnp.where(banned, -jnp.inf, logits.astype(jnp.float32))

    def best(self, logits: Float[Array, "*B V"]) -> Int[Array, "*B"]:
        """The likeliest token; the lowest id of several."""
        scores = self.possible(logits)
        # Two passes: XLA's own argmax takes four times as long on a CPU.
        top = scores == jnp.max(scores, axis=-1, keepdims=True)
        ids = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
        return jnp.min(jnp.where(top, ids, scores.shape[-1] - 1), axis=-1)

    def pick(self, probs: Float[Array, "*B V"], key: PRNGKey) -> Int[Array, "*B"]:
        """Draws one token a row from laws that `probs` made."""
        if self.greedy:
            return jnp.argmax(probs, axis=-1).astype(jnp.int32)
        return categorical(probs, key)

    def draw(
        self, logits: Float[Array, "*B V"], key: PRNGKey
    ) -> tuple[Int[Array, "*B"], Float[Array, "*B V"]]:
        """Draws one token a row and returns it with the law that it was drawn from."""
        probs = self.probs(logits)
        return self.pick(probs, key), probs


GREEDY = Sampling(temperature=0.0)


def _keep(
    scores: Float[Array, "*B V"], weights: Float[Array, "*B V"], need: Array | float
) -> Float[Array, "*B V"]:
    """Keeps the fewest likeliest entries whose weights reach `need`; -inf elsewhere.

    Of equal scores at the cut the lower ids stay. No sort, which takes XLA 400 ms for
    16 rows of 49,152 on a CPU.
    """
    need = jnp.broadcast_to(jnp.asarray(need, weights.dtype), (*scores.shape[:-1], 1))
    cut = _narrow_cut(scores, weights, need)
    order = _ordered(scores)

    def ties():
        above, equal = order > cut, order == cut
        mass = jnp.sum(jnp.where(above, weights, 0.0), axis=-1, keepdims=True)
        before = jnp.cumsum(jnp.where(equal, weights, 0.0), axis=-1) - weights
        return jnp.where(above | (equal & (before < need - mass)), scores, -jnp.inf)

    return jax.lax.cond(
        jnp.any(jnp.sum(order == cut, axis=-1) > 1),
        ties,
        lambda: jnp.where(order >= cut, scores, -jnp.inf),
    )


def _ordered(scores: Float[Array, "*B V"]) -> Int[Array, "*B V"]:
    """Integers that ascend as the scores do."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    bits = jnp.where(scores == 0, 0, bits)  # -0 is 0
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _cut(
    scores: Float[Array, "*B V"], weights: Float[Array, "*B V"], need: Array
) -> Int[Array, "*B 1"]:
    """The largest value at and above which there is enough, found bit by bit."""
    order = _ordered(scores)

    def enough(cut):
        above = jnp.where(order >= cut, weights, 0.0)
        return jnp.sum(above, axis=-1, keepdims=True) >= need

    low = jnp.full_like(order[..., :1], jnp.iinfo(jnp.int32).min)
    zero = jnp.zeros_like(low)
    cut = jnp.where(enough(zero), zero, low)

    def bit(i, cut):
        higher = cut + jnp.left_shift(jnp.int32(1), 30 - i)
        return jnp.where(enough(higher), higher, cut)

    return jax.lax.fori_loop(0, 31, bit, cut)


BLOCK = 64  # entries of a row that are looked at together
BLOCKS = 128  # of them, those with the largest entries, that a cut is looked for in


def _narrow_cut(
    scores: Float[Array, "*B V"], weights: Float[Array, "*B V"], need: Array
) -> Int[Array, "*B 1"]:
    """`_cut` by way of the blocks with the largest entries, if these hold enough.

    Whatever exceeds the least of their largest entries lies in them. A flat law, whose
    cut lies lower, is searched as a whole.
    """
    if scores.shape[-1] <= 2 * BLOCK * BLOCKS:
        return _cut(scores, weights, need)
    blocks, blocks_w = _in_blocks(scores, -jnp.inf), _in_blocks(weights, 0.0)
    # Both results are used whole: a slice of one would compile to a sort.
    tops, which = jax.lax.top_k(jnp.max(blocks, axis=-1), BLOCKS)

    def chosen(blocks):
        few = jnp.take_along_axis(blocks, which[..., None], axis=-2)
        return few.reshape(*few.shape[:-2], -1)

    few, few_w = chosen(blocks), chosen(blocks_w)
    inside = jnp.where(few > jnp.min(tops, axis=-1, keepdims=True), few_w, 0.0)
    holds = jnp.all(jnp.sum(inside, axis=-1, keepdims=True) >= need)
    return jax.lax.cond(
        holds,
        lambda: _cut(few, few_w, need),
        lambda: _cut(scores, weights, need),
    )


def _in_blocks(x: Float[Array, "*B V"], fill: float) -> Float[Array, "*B X E"]:
    """Rows cut into blocks of E = `BLOCK`, the last one filled up."""
    short = -x.shape[-1] % BLOCK
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)], constant_values=fill)
    return x.reshape(*x.shape[:-1], -1, BLOCK)


def categorical(probs: Float[Array, "*B V"], key: PRNGKey) -> Int[Array, "*B"]:
    """Draws a token a row, never one of probability 0; rows may sum to anything > 0.

    By the inverse of the summed law: a block, then a token in it, each by its own
    uniform. The 24 bits of a uniform move the law by less than 1e-4 (total variation)
    at 128,000 ids. Twelve times as fast on a CPU as noise for every id.
    """
    blocks = _in_blocks(probs, 0.0)
    u = jax.random.uniform(key, (2, *probs.shape[:-1]))
    block = _inverse(jnp.sum(blocks, axis=-1), u[0])
    row = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return block * BLOCK + _inverse(row, u[1])


def _inverse(weights: Float[Array, "*B N"], u: Float[Array, "*B"]) -> Int[Array, "*B"]:
    """The first index whose running sum exceeds u times the whole, of weight > 0."""
    sums = jnp.cumsum(weights, axis=-1)
    passed = jnp.sum(sums <= u[..., None] * sums[..., -1:], axis=-1, dtype=jnp.int32)
    # Rounding may carry u past the end: then the last one that has weight.
    ids = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    last = jnp.max(jnp.where(weights > 0, ids, 0), axis=-1)
    return jnp.minimum(passed, last)
