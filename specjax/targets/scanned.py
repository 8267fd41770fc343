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
from specjax.targets.base import Target
from specjax.targets.deepseek import DeepSeek
from specjax.targets.llama import Llama
from specjax.transformer import Output, Shared, TransformerConfig, locate
from specjax.typing import Params, PRNGKey

ALIKE = (Llama, DeepSeek)  # targets whose layers read the stream alone


@dataclasses.dataclass(frozen=True)
class Scanned:
    """See `targets.base.Target`; its parameters are those of `stack`.

    Raises NotImplementedError for a stack whose layers read more than the stream.
    """

    target: Llama

    def __post_init__(self):
        if type(self.target) not in ALIKE:
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
            alone = sharding.unstack(params)
            return self.target(alone, tokens, cache, taps=taps, **block)
        x = sharding.constrain_batch(sharding.look_up(params["embed"], tokens))
        where = locate(self.config, x.shape[:2], None, *_given(block))
        L = self.config.num_layers
        inner = sorted({t % (L + 1) for t in taps} - {0, L})
        # Each tapped state has a place in `kept`, all others share the last one.
        places = [inner.index(i) if i in inner else len(inner) for i in range(1, L + 1)]
        kept = jnp.stack([x] * (len(inner) + 1), axis=2)
        first = x
        for n, (module, a, b) in enumerate(self.runs()):

            def body(carry, layer, module=module):
                (x, kept), (one, place) = carry, layer
                x, _ = module.apply({"params": one}, x, where, None)
                kept = jax.lax.dynamic_update_index_in_dim(kept, x, place, axis=2)
                return (x, kept), None

            layers = params[sharding.STACKED][str(n)], jnp.asarray(places[a:b])
            (x, kept), _ = jax.lax.scan(body, (x, kept), layers)
        norm = RMSNorm(self.config.norm_eps)
        hidden: Any = norm.apply({"params": params["norm"]}, x)
        states = {0: first, L: hidden} | {t: kept[:, :, i] for i, t in enumerate(inner)}
        picked = [states[t % (L + 1)] for t in taps]
        features = jnp.concatenate(picked or [x[..., :0]], axis=-1)
        return Output(hidden, features, None)

    def logits(self, params: Params, hidden):
        return self.target.logits(params, hidden)

    def shared(self, params: Params) -> Shared:
        return self.target.shared(params)


def arranged(target: Any, stacked: bool) -> Target:
    """The target with its layers stacked, if they are alike, or one by one.

    However few there are: of 2 to 8 a scan compiles and runs no slower on a CPU.
    """
    alone = target.target if isinstance(target, Scanned) else target
    return Scanned(alone) if stacked and type(alone) in ALIKE else alone


def _given(block: dict[str, Any]) -> tuple[np.ndarray | None, Any]:
    unknown = set(block) - {"ancestors", "depths"}
    if unknown:
        raise ValueError(f"a scanned pass without a cache takes no {sorted(unknown)}.")
    return block.get("ancestors"), block.get("depths")
