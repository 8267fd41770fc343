"""No drafter: plain autoregressive decoding as the case gamma = 0 of the engine.

A round is one target pass over the anchor alone and commits the bonus. It is the
baseline that every speedup is measured against, and the reference that greedy text is
compared with.
"""

import dataclasses

import jax.numpy as jnp

from specjax.drafters.base import Draft
from specjax.tree import Tree


@dataclasses.dataclass(frozen=True)
class NoDrafter:
    """Implements what the engine calls of `base.Drafter`; it is not in the registry."""

    gamma: int = 0
    taps: tuple[int, ...] = ()
    max_positions: None = None
    tree: Tree = dataclasses.field(default=Tree.chain(0))

    def prefill(self, params, shared, tokens, lengths, features, cache_size):
        del params, shared, tokens, lengths, features, cache_size
        return ()

    def draft(self, params, shared, state, anchor, sampling, keys):
        del params, sampling, keys
        B, V = anchor.shape[0], shared.head.shape[0]
        nothing = Draft(tokens=jnp.zeros((B, 0), jnp.int32), probs=jnp.zeros((B, 0, V)))
        return nothing, state

    def commit(self, params, shared, state, verdict, tokens, features):
        del params, shared, verdict, tokens, features
        return state
