"""Sampling settings: from logits to the law that tokens are drawn from.

One function serves every position of target and drafter, the bonus included, in the
order temperature, top-k, top-p, min-p (that of `transformers`, vLLM and SGLang).
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
        logits = self.possible(logits)
        logits = logits / self.temperature
        if self.top_k is not None or self.top_p < 1:
            logits = self._keep_likeliest(logits)
        probs = jax.nn.softmax(logits, axis=-1)
        if self.min_p > 0:
            floor = self.min_p * jnp.max(probs, axis=-1, keepdims=True)
            probs = jnp.where(probs >= floor, probs, 0.0)
            probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
        return probs

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

    def _keep_likeliest(self, logits):
        order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
        ranked = jnp.take_along_axis(logits, order, axis=-1)
        V = logits.shape[-1]
        keep = jnp.arange(V) < (V if self.top_k is None else self.top_k)
        keep = jnp.broadcast_to(keep, order.shape)
        if self.top_p < 1:
            mass = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
            before = jnp.cumsum(mass, axis=-1) - mass
            keep = keep & (before < self.top_p)
        rank = jnp.argsort(order, axis=-1)  # the inverse permutation
        return jnp.where(jnp.take_along_axis(keep, rank, axis=-1), logits, -jnp.inf)

    def draw(
        self, logits: Float[Array, "*B V"], key: PRNGKey
    ) -> tuple[Int[Array, "*B"], Float[Array, "*B V"]]:
        """Draws one token a row and returns it with the law that it was drawn from."""
        probs = self.probs(logits)
        if self.greedy:
            return jnp.argmax(probs, axis=-1).astype(jnp.int32), probs
        return categorical(probs, key), probs


GREEDY = Sampling(temperature=0.0)


def categorical(probs: Float[Array, "*B V"], key: PRNGKey) -> Int[Array, "*B"]:
    """Draws a token a row, never one of probability 0."""
    log = jnp.where(probs > 0, jnp.log(jnp.where(probs > 0, probs, 1.0)), -jnp.inf)
    return jax.random.categorical(key, log, axis=-1).astype(jnp.int32)
