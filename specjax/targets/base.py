"""What the engine and the drafters may ask of a target."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from specjax.kv_cache import KVCache
from specjax.transformer import Output, Shared, TransformerConfig
from specjax.typing import Array, Float, Params, PRNGKey


@runtime_checkable
class Target(Protocol):
    """A decoder as pure functions of a parameter tree: frozen, hashable, no arrays.

    `__call__` has the arguments and the result of `transformer.Transformer.__call__`.
    """

    @property
    def config(self) -> TransformerConfig: ...

    def init(self, key: PRNGKey) -> Params: ...

    def init_cache(self, batch_size: int, size: int, dtype: Any = ...) -> KVCache: ...

    def __call__(self, params: Params, tokens, cache=None, **block) -> Output: ...

    def logits(self, params: Params, hidden: Float[Array, "*B D"]) -> Array: ...

    def shared(self, params: Params) -> Shared: ...


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One of our arrays and the stored tensors that make it up."""

    sources: list[tuple[str, tuple[int, ...]]]  # names and shapes as stored
    join: Callable[[list[np.ndarray]], np.ndarray] = lambda parts: parts[0]
    part: Callable[[np.ndarray], list[np.ndarray]] = lambda array: [array]
    dtype: Any = None  # of our array, whatever the others have


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A target with its weights, its tokenizer and the ids that end an answer."""

    name: str  # as it stands in tables
    target: Target
    params: Params
    tokenizer: Any  # targets.tokenizer.Tokenizer
    stop_ids: tuple[int, ...]

    @property
    def dtype(self) -> jnp.dtype:
        return self.params["embed"].dtype
