"""A target whose equal layers lie stacked, so that one compiled body runs them all.

    layers/0/..  [L ..]     the parameters of a run of layers that are built alike

A program of 80 layers compiles as fast as one of a single layer, and on a mesh one
layer's weights at a time are gathered from `fsdp`. Training reads whole texts so; a
pass over a cache is left to the layers one by one, whose caches are updated in place.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from specjax import mla, sharding, transformer
from specjax.kv_cache import KVCache
from specjax.layers import RMSNorm
from specjax.mla import DeepSeekConfig
from specjax.targets.deepseek import DeepSeek
from specjax.targets.llama import Llama
from specjax.transformer import Output, Shared, TransformerConfig, locate
from specjax.typing import Params, PRNGKey


@dataclasses.dataclass(frozen=True)
class Scanned:
    """See `targets.base.Target`; its parameters are those of `stack`.

    Raises NotImplementedError for a stack whose layers read more than the stream.
    """

    target: Llama

    def __post_init__(self):
        if type(self.target) not in (Llama, DeepSeek):
            raise NotImplementedError(
                f"layers of a {type(self.target).__name__} target are not alike enough "
                "to be scanned; use the target itself."
            )

    @property
    def config(self) -> TransformerConfig:
        return self.target.config

    def runs(self) -> list[tuple[nn.Module, int, int]]:
        """Layers that are built alike and stand together: the module, first, end."""
        deep = isinstance(self.config, DeepSeekConfig)
        layer_of: Any = mla.layer_of if deep else transformer.layer_of
        numbered = [
            (layer_of(self.config, i), i) for i in range(self.config.num_layers)
        ]
        groups = itertools.groupby(numbered, key=lambda pair: pair[0])
        found = [(module, [i for _, i in group]) for module, group in groups]
        return [(module, at[0], at[-1] + 1) for module, at in found]

    def stack(self, params: Params) -> Params:
        """Parameters of the target, each run of layers as one tree [L ..]."""
        rest = {k: v for k, v in params.items() if not k.startswith("layer_")}
        join = lambda *leaves: jnp.stack(leaves)
        runs = {
            str(n): jax.tree.map(join, *(params[f"layer_{i}"] for i in range(a, b)))
            for n, (_, a, b) in enumerate(self.runs())
        }
        return rest | {sharding.STACKED: runs}

    def unstack(self, params: Params) -> Params:
        """The inverse of `stack`."""
        rest = {k: v for k, v in params.items() if k != sharding.STACKED}
        for n, (_, a, b) in enumerate(self.runs()):
            whole = params[sharding.STACKED][str(n)]
            for i in range(a, b):
                rest[f"layer_{i}"] = jax.tree.map(lambda x, at=i - a: x[at], whole)
        return rest

    def init(self, key: PRNGKey) -> Params:
        return self.stack(self.target.init(key))

    def init_cache(self, batch_size: int, size: int, dtype=jnp.float32) -> KVCache:
        return self.target.init_cache(batch_size, size, dtype)

    def __call__(
        self,
        params: Params,
        tokens,
        cache=None,
        *,
        taps: Sequence[int] = (),
        **block: Any,
    ) -> Output:
        if cache is not None:
            whole = self.unstack(params)
            return self.target(whole, tokens, cache, taps=taps, **block)
        x = sharding.constrain_batch(sharding.look_up(params["embed"], tokens))
        where = locate(self.config, x.shape[:2], None, *_given(block))
        L = self.config.num_layers
        wanted = sorted({t % (L + 1) for t in taps})
        states = {0: x}
        for n, (module, a, b) in enumerate(self.runs()):
            whole = params[sharding.STACKED][str(n)]

            def body(x, i, module=module, whole=whole):
                pick = lambda p: jax.lax.dynamic_index_in_dim(p, i, keepdims=False)
                one = {"params": jax.tree.map(pick, whole)}
                return module.apply(one, x, where, None)[0], None

            for start, end in itertools.pairwise([a, *_between(wanted, a, b), b]):
                layers = jnp.arange(start - a, end - a)
                x, _ = jax.lax.scan(body, x, layers)
                states[end] = x
        norm = RMSNorm(self.config.norm_eps)
        hidden: Any = norm.apply({"params": params["norm"]}, x)
        states[L] = hidden
        picked = [states[t % (L + 1)] for t in taps]
        features = jnp.concatenate(picked or [x[..., :0]], axis=-1)
        return Output(hidden, features, None)

    def logits(self, params: Params, hidden):
        return self.target.logits(params, hidden)

    def shared(self, params: Params) -> Shared:
        return self.target.shared(params)


def _given(block: dict[str, Any]) -> tuple[np.ndarray | None, Any]:
    unknown = set(block) - {"ancestors", "depths"}
    if unknown:
        raise ValueError(f"a scanned pass without a cache takes no {sorted(unknown)}.")
    return block.get("ancestors"), block.get("depths")


def _between(taps: list[int], first: int, end: int) -> list[int]:
    """Where a run of layers is cut to keep the states that are asked for."""
    return [t for t in taps if first < t < end]
