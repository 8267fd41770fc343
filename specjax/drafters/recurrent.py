"""What EAGLE-1 and EAGLE-3 share: a layer that drafts on its own outputs.

MTP, which chains several layers, shares the state alone.

The pair (feature of x_t, x_{t+1}) stands at position t and its output says what follows
x_{t+1}. A drafted pair holds the drafter's own output instead of a feature; once the
target has judged the tokens they are fed again with its true features. A pass always
feeds the last depth + 1 pairs of the text, which is what a round may have committed: so
a state depends on the text alone, and a round costs one pass a level.
"""

import abc
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax import draft_tree, kv_cache
from specjax.drafters import base
from specjax.drafters.base import Batch
from specjax.kv_cache import KVCache
from specjax.pytree import pytree
from specjax.transformer import (
    Block,
    Shared,
    TransformerConfig,
    Unrolled,
    locate,
    unrolled,
)
from specjax.tree import DynamicTree, Tree
from specjax.typing import Array, Float, Int


@pytree
class State:
    cache: KVCache  # pairs of the text but the fresh ones
    # The last P positions of the text, fed again with the anchor; zeros if it has less.
    tokens: Int[Array, "B P"]
    features: Float[Array, "B P MD"]
    num_fresh: Int[Array, "B"]


class Recurrent(abc.ABC):
    """Drafting on its own outputs, as EAGLE-1 and EAGLE-3 do.

    A subclass is a frozen dataclass with the fields below and says what a target
    feature becomes (`fuse`), what a pass does (`step`) and what its output says
    (`logits`).
    """

    config: TransformerConfig  # of the one layer
    gamma: int
    topology: Tree | DynamicTree | None

    @abc.abstractmethod
    def fuse(self, params, features: Array) -> Array: ...

    @abc.abstractmethod
    def step(
        self, params, e: Array, g: Array, block: Block, slots
    ) -> tuple[Array, Any]: ...

    @abc.abstractmethod
    def logits(self, params, shared: Shared, y: Array) -> Array: ...

    @property
    def tree(self) -> Tree | DynamicTree:
        return self.topology or Tree.chain(self.gamma)

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    def forward(
        self,
        params,
        shared,
        pairs: tuple[Array, Array],
        cache: KVCache,
        *,
        ancestors=None,
        depths=None,
        behind: Any = 0,
    ):
        """One cached pass over pairs (token, g): outputs [B T D] and the cache.

        `ancestors`, `depths` and `behind` are those of `Transformer.__call__`.
        """
        tokens, g = pairs
        block = locate(self.config, tokens.shape, cache, ancestors, depths, behind)
        e = shared.embedding(tokens)
        y, (k, v) = self.step(params, e, g, block, (cache.k[0], cache.v[0]))
        return y, KVCache((k,), (v,), cache.length)

    def prefill(self, params, shared, tokens, lengths, features, cache_size) -> State:
        c, B, P = self.config, tokens.shape[0], self.tree.depth + 1
        cache = kv_cache.init(
            1,
            B,
            c.num_kv_heads,
            cache_size + draft_tree.num_slots(self.tree) + 1,
            c.head_width,
            shared.embed.dtype,
        )
        g = self.fuse(params, features)
        _, cache = self.forward(params, shared, (base.shift(tokens, 1), g), cache)
        return read_text(cache, P, tokens, features, lengths)

    def draft(self, params, shared, state: State, anchor, sampling, keys):
        rows, last = jnp.arange(anchor.shape[0]), state.num_fresh - 1
        tokens = jnp.roll(state.tokens, -1, axis=1).at[rows, last].set(anchor)
        g = self.fuse(params, state.features)
        y, cache = self.forward(params, shared, (tokens, g), state.cache)
        y = y[rows, last]
        cache = kv_cache.commit(cache, None, state.num_fresh)

        slots = draft_tree.num_slots(self.tree)
        levels = max(self.tree.depth - 1, 1)
        depths = np.repeat(np.arange(levels), slots // levels).astype(np.int32)

        def step(cache, tokens, g, sees, level):
            y, cache = self.forward(
                params,
                shared,
                (tokens, g),
                cache,
                ancestors=sees,
                depths=depths,
                behind=level * tokens.shape[1],
            )
            return self.logits(params, shared, y), y, cache

        first = self.logits(params, shared, y)
        draft, cache = draft_tree.grow_from(
            self.tree, first, y, step, cache, sampling, keys
        )
        # Entries of drafted pairs stay past `length`, where nothing sees them.
        cache = dataclasses.replace(cache, length=state.cache.length)
        return draft, dataclasses.replace(state, cache=cache)

    def commit(self, params, shared, state: State, verdict, tokens, features) -> State:
        del params, shared
        return append(state, tokens, features, verdict.num_committed)

    def unroll(
        self,
        params,
        shared,
        tokens,
        g: Float[Array, "B T D"],
        *,
        every: int,
        steps: int,
    ) -> list[Float[Array, "B R D"]]:
        """Outputs of `steps` passes from every so many rows, fed the text's own tokens.

        Pass i of row t reads (output of pass i - 1, x_{t+1+i}), as if i tokens had been
        drafted from t and all were right.
        """
        B, T = tokens.shape
        e = shared.embedding(base.shift(tokens, 1))
        block = locate(self.config, (B, T), None, None, None)
        y, (k, v) = self.step(params, e, g, block, None)
        slots, outputs, rows = Unrolled(k, v), [y[:, ::every]], np.arange(0, T, every)
        for i in range(1, steps):
            block = unrolled(self.config, B, rows, T, i)
            e = shared.embedding(base.shift(tokens, 1 + i)[:, ::every])
            y, slots = self.step(params, e, outputs[-1], block, slots)
            outputs.append(y)
        return outputs

    def acceptance(self, params, shared, batch: Batch, outputs):
        """What to log of outputs that `unroll` made at every `THIN`-th row: pass k - 1
        drafts token k."""
        laws = [self.logits(params, shared, y) for y in outputs[: self.tree.depth]]
        return base.step_acceptance(laws, shared, batch)


def append(
    state: State,
    tokens: Int[Array, "B N"],
    features: Float[Array, "B N MD"],
    count: Int[Array, "B"],
) -> State:
    """Takes in the first `count` of new tokens; the last P of all are fresh then.

    The cache must hold the pairs that leave the window.
    """
    P, N = state.tokens.shape[1], tokens.shape[1]
    total = state.num_fresh + count
    fresh = jnp.minimum(total, P)
    slot = jnp.arange(P, dtype=jnp.int32)[None]
    at = (total - fresh)[:, None] + slot  # among the old ones, then the new ones
    new = at - state.num_fresh[:, None]
    rows = jnp.arange(tokens.shape[0])[:, None]

    def pick(old, added):
        old = old[rows, jnp.minimum(at, P - 1)]
        added = added[rows, jnp.clip(new, 0, N - 1)].astype(old.dtype)
        widen = lambda x: x.reshape(*x.shape, *(1,) * (old.ndim - 2))
        kept = jnp.where(widen(new >= 0), added, old)
        return jnp.where(widen(slot < fresh[:, None]), kept, jnp.zeros_like(kept))

    return State(
        cache=kv_cache.commit(state.cache, None, total - fresh),
        tokens=pick(state.tokens, tokens),
        features=pick(state.features, features),
        num_fresh=fresh,
    )


def read_text(cache: KVCache, P: int, tokens, features, lengths) -> State:
    """The state after the first `lengths` tokens, whose pairs are in the cache."""
    B = tokens.shape[0]
    empty = State(
        cache=cache,
        tokens=jnp.zeros((B, P), jnp.int32),
        features=jnp.zeros((B, P, features.shape[2]), features.dtype),
        num_fresh=jnp.zeros((B,), jnp.int32),
    )
    return append(empty, tokens, features, lengths)


def check(drafter: Any) -> None:
    """Refuses fields that no drafter of this family can have."""
    name = type(drafter).__name__.lower()
    if drafter.gamma < 1:
        raise ValueError(f"{name} needs gamma >= 1, got {drafter.gamma}.")
    if drafter.config.num_layers != 1:
        raise ValueError(
            f"{name} is one layer, got config.num_layers={drafter.config.num_layers}."
        )


def check_target(drafter: Any, shared: Shared) -> None:
    """Refuses a target that the layer was not made for."""
    (V, D), c = shared.embed.shape, drafter.config
    if (c.vocab_size, c.width) != (V, D):
        raise ValueError(
            f"{type(drafter).__name__.lower()} is made for {c.vocab_size} ids of width "
            f"{c.width}; the target has {V} of width {D}."
        )
