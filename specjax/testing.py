"""Small models and exact oracles, for tests, notebooks and the lossless check."""

from typing import Any

import jax

from specjax import drafters
from specjax.targets.llama import Llama
from specjax.transformer import TransformerConfig


def tiny_target(
    seed: int = 0, scale: float = 25.0, **fields: Any
) -> tuple[Llama, dict[str, Any]]:
    """A random target of a few thousand weights, with laws that are far from flat.

    `scale` multiplies the initial weights: at 1 all next-token laws are near uniform.
    """
    config = {
        "vocab_size": 24,
        "width": 16,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_width": 8,
        "mlp_width": 24,
        "max_positions": 256,
    }
    target = Llama(TransformerConfig(**config | fields))
    params = jax.jit(target.init)(jax.random.key(seed))
    grow = lambda path, x: x if "scale" in jax.tree_util.keystr(path) else x * scale
    return target, jax.tree_util.tree_map_with_path(grow, params)


def tiny_drafter(
    name: str, target: Llama, params: Any, seed: int = 1, **fields: Any
) -> tuple[Any, Any]:
    """A registered drafter of the paper's shape for `tiny_target`, randomly initialised."""
    mask = target.config.vocab_size - 1
    drafter = drafters.get(name).for_target(target.config, mask, **fields)
    return drafter, jax.jit(drafter.init)(jax.random.key(seed), target.shared(params))
