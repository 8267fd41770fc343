"""Speculative decoding in JAX: trained drafters on one verifier that is exact.

The verbs keep their modules: `specjax.generate.generate`, `specjax.training.train`,
`specjax.bench.Bench`, `specjax.verify.verify_chain`.
"""

from specjax.drafters import REGISTRY
from specjax.drafters.base import Batch, Draft, Drafter
from specjax.generate import Generation, Model, Weights
from specjax.kv_cache import KVCache
from specjax.metrics import Trace
from specjax.sampling import GREEDY, Sampling
from specjax.targets import Pretrained, Target, load
from specjax.transformer import Shared, TransformerConfig
from specjax.tree import Tree
from specjax.verify import Verdict

__all__ = [
    "GREEDY",
    "REGISTRY",
    "Batch",
    "Draft",
    "Drafter",
    "Generation",
    "KVCache",
    "Model",
    "Pretrained",
    "Sampling",
    "Shared",
    "Target",
    "Trace",
    "TransformerConfig",
    "Tree",
    "Verdict",
    "Weights",
    "load",
]
