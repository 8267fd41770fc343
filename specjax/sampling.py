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
        return jnp.argmax(self.possible(logits), axis=-1).astype(jnp.int32)

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
    16 rows of 49,152 on a CPU: the cut is found bit by bit, in the order-preserving
    integers of the scores, as the largest value above which there is enough.
    """
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    bits = jnp.where(scores == 0, 0, bits)  # -0 is 0
    order = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # ascending as the scores

    def enough(cut):
        above = jnp.where(order >= cut, weights, 0.0)
        return jnp.sum(above, axis=-1, keepdims=True) >= need

    low = jnp.full_like(order[..., :1], jnp.iinfo(jnp.int32).min)
    zero = jnp.zeros_like(low)
    cut = jnp.where(enough(zero), zero, low)

    def bit(i, cut):
        higher = cut + jnp.left_shift(jnp.int32(1), 30 - i)
        return jnp.where(enough(higher), higher, cut)

    cut = jax.lax.fori_loop(0, 31, bit, cut)
    above, equal = order > cut, order == cut
    missing = need - jnp.sum(jnp.where(above, weights, 0.0), axis=-1, keepdims=True)

    def lowest(equal):
        before = jnp.cumsum(jnp.where(equal, weights, 0.0), axis=-1) - weights
        return equal & (before < missing)

    several = jnp.any(jnp.sum(equal, axis=-1) > 1)
    kept = above | jax.lax.cond(several, lowest, lambda equal: equal, equal)
    return jnp.where(kept, scores, -jnp.inf)


def categorical(probs: Float[Array, "*B V"], key: PRNGKey) -> Int[Array, "*B"]:
    """Draws a token a row, never one of probability 0."""
    log = jnp.where(probs > 0, jnp.log(jnp.where(probs > 0, probs, 1.0)), -jnp.inf)
    return jax.random.categorical(key, log, axis=-1).astype(jnp.int32)
