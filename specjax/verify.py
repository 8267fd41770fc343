"""Verification: which drafted tokens stay, and the token that follows them.

Written for one sequence and vmapped by the caller; knows no model, cache or drafter.
For a token x drafted from q where the target's law is p:

    accept with probability min(1, p(x) / q(x))                       (1)
    after the first rejection draw from norm(max(0, p - q))           (2)
    after a full accept draw from p at the next position              (3)

The committed tokens follow the target's law exactly (Leviathan et al. 2023,
arXiv:2211.17192, Algorithm 1 and appendix A.1; Chen et al. 2023, arXiv:2302.01318).
A deterministic draft is the case of a one-hot q: no rule of its own is needed.
"""

import jax
import jax.numpy as jnp

from specjax.pytree import pytree
from specjax.sampling import Sampling, categorical
from specjax.typing import Array, Bool, Float, Int, PRNGKey

PAD = -1  # fills token arrays past the last committed token


@pytree
class Verdict:
    """What a round commits. -1 accepted marks a finished row: nothing is committed."""

    num_accepted: Int[Array, "*B"]  # drafted tokens kept, bonus excluded
    tokens: Int[Array, "*B N"]  # accepted tokens, then the bonus, then PAD
    valid: Bool[Array, "*B"]  # False if a drafted token has q = 0: a broken drafter

    @property
    def num_committed(self) -> Int[Array, "*B"]:
        """Nodes whose cache entries stay: the anchor and the accepted tokens."""
        return self.num_accepted + 1


def accept_probs(q: Float[Array, "*G V"], p: Float[Array, "*G V"]) -> Array:
    """min(1, p / q) for every token, eq. 1; 0 where q is 0."""
    ratio = p / jnp.where(q > 0, q, 1.0)
    return jnp.where(q > 0, jnp.minimum(1.0, ratio), 0.0)


def residual(q: Float[Array, "V"], p: Float[Array, "V"]) -> Float[Array, "V"]:
    """norm(max(0, p - q)), the law of the token that replaces a rejected one, eq. 2."""
    excess = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(excess)  # 0 only if p == q, and then nothing is ever rejected
    return jnp.where(mass > 0, excess / jnp.where(mass > 0, mass, 1.0), p)


def verify_chain(
    tokens: Int[Array, "G"],
    q: Float[Array, "G V"],
    p: Float[Array, "N V"],
    key: PRNGKey,
) -> Verdict:
    """Keeps the longest accepted prefix of `tokens` and adds one bonus token.

    Token k was drawn from `q[k]`; `p[k]` is the target's law there, and `p[G]` the law
    after a full accept. The key is consumed. The comparison is strict: a token with
    p = 0 is rejected also by a uniform of exactly 0.
    """
    G = tokens.shape[0]
    accept_key, bonus_key = jax.random.split(key)
    drawn = jnp.take_along_axis(accept_probs(q, p[:G]), tokens[:, None], 1)[:, 0]
    accepted = jax.random.uniform(accept_key, (G,)) < drawn
    n = jnp.sum(jnp.cumprod(accepted.astype(jnp.int32)))
    valid = jnp.all(jnp.take_along_axis(q, tokens[:, None], 1) > 0)

    # A zero row past the draft makes the residual there equal p: the free bonus token.
    q = jnp.pad(q, ((0, 1), (0, 0)))
    return _verdict(tokens, n, categorical(residual(q[n], p[n]), bonus_key), valid)


def verify_greedy(tokens: Int[Array, "G"], best: Int[Array, "N"]) -> Verdict:
    """`verify_chain` when p is one-hot at `best`: keeps the prefix that equals it."""
    n = jnp.sum(jnp.cumprod((tokens == best[:-1]).astype(jnp.int32)))
    return _verdict(tokens, n, best[n], jnp.asarray(True))


def verify(
    tokens: Int[Array, "G"],
    q: Float[Array, "G V"],
    logits: Float[Array, "N V"],
    sampling: Sampling,
    key: PRNGKey,
) -> Verdict:
    """Applies the exact rule of the sampling settings to the target's logits."""
    if sampling.greedy:
        return verify_greedy(tokens, jnp.argmax(logits, axis=-1).astype(jnp.int32))
    return verify_chain(tokens, q, sampling.probs(logits), key)


def _verdict(tokens, n, bonus, valid) -> Verdict:
    slot = jnp.arange(tokens.shape[0] + 1)
    kept = jnp.where(slot < n, jnp.pad(tokens, (0, 1)), PAD)
    return Verdict(
        num_accepted=n, tokens=jnp.where(slot == n, bonus, kept), valid=valid
    )
