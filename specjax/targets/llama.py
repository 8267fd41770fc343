"""Targets of the Llama form: Llama 3.x, SmolLM2, Qwen2.5 and Qwen3 dense.

What separates these families is data, not code: biases (Qwen2.5), per-head norms of q
and k (Qwen3), the rotary scaling and whether the head is tied. `convert.py` reads all
of it from config.json into a `TransformerConfig`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax import kv_cache
from specjax.kv_cache import KVCache
from specjax.transformer import Output, Shared, Transformer, TransformerConfig, tables
from specjax.typing import Array, Float, Params, PRNGKey


@dataclasses.dataclass(frozen=True)
class Llama:
    """See `targets.base.Target`."""

    config: TransformerConfig
    attention: str | None = None  # of `kernels.tree_attention`; None chooses

    def init(self, key: PRNGKey) -> Params:
        """Random float32 weights; under `jax.eval_shape` only their shapes."""
        tokens = jnp.zeros((1, 1), jnp.int32)
        return Transformer(self.config).init(key, tokens)["params"]

    def init_cache(self, batch_size: int, size: int, dtype=jnp.float32) -> KVCache:
        c = self.config
        return kv_cache.init(
            c.num_layers, batch_size, c.num_kv_heads, size, c.head_width, dtype
        )

    def __call__(self, params: Params, tokens, cache=None, **block) -> Output:
        return Transformer(self.config, self.attention).apply(
            {"params": params}, tokens, cache, **block
        )  # pyright: ignore[reportReturnType]

    def logits(
        self, params: Params, hidden: Float[Array, "*B D"]
    ) -> Float[Array, "*B V"]:
        return self.shared(params).logits(hidden)

    def shared(self, params: Params) -> Shared:
        """Both tables with gradients stopped: no drafter trains the target."""
        return jax.lax.stop_gradient(tables(self.config, params))
