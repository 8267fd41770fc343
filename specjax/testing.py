"""Small models and exact oracles, for tests, notebooks and the certificate.

A sampler is checked by the joint law of its first tokens, never by one token alone: a
residual or bonus read from the wrong row leaves the first token exactly right. The law
is enumerated, so the only error is that of the sample, and the false-alarm rate is the
threshold on the p-value.
"""

import functools
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from specjax import drafters
from specjax.sampling import Sampling
from specjax.targets.llama import Llama
from specjax.transformer import TransformerConfig

FALSE_ALARM = 1e-6  # how often a right sampler may fail one check
# Compiling a tiny model costs far more than running it.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
if version("jaxlib").startswith("0.10."):  # options that later versions refuse
    FAST |= {
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
    }


@functools.partial(jax.jit, static_argnums=0, compiler_options=FAST)
def _init(model: Any, *args: Any) -> Any:
    return model.init(*args)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=FAST)
def _laws(target: Any, sampling: Sampling, num_tokens: int, params: Any, texts: Any):
    hidden = target(params, texts).hidden[:, -num_tokens:]
    return sampling.probs(target.logits(params, hidden))


def tiny_target(
    seed: int = 0, scale: float = 6.0, **fields: Any
) -> tuple[Llama, dict[str, Any]]:
    """A random target of a few thousand weights, with laws that are far from flat.

    `scale` multiplies the initial weights: at 1 all next-token laws are near uniform.
    """
    config: dict[str, Any] = {
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
    params = _init(target, jax.random.key(seed))
    # In NumPy: op by op JAX would compile for each shape.
    grow = lambda path, x: (
        x
        if "scale" in jax.tree_util.keystr(path)
        else jnp.asarray(np.asarray(x) * np.float32(scale))
    )
    return target, jax.tree_util.tree_map_with_path(grow, params)


def tiny_drafter(
    name: str, target: Llama, params: Any, seed: int = 1, **fields: Any
) -> tuple[Any, Any]:
    """A registered drafter of the paper's shape for `tiny_target`, randomly started."""
    mask = target.config.vocab_size - 1
    drafter = drafters.get(name).for_target(target.config, mask, **fields)
    return drafter, _init(drafter, jax.random.key(seed), target.shared(params))


def perturb(params: Any, seed: int = 0, scale: float = 0.1) -> Any:
    """Adds normal noise of deviation `scale` to every weight, so that none is zero."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    noise = lambda x: rng.normal(0, scale, x.shape).astype(x.dtype)
    noisy = [jnp.asarray(np.asarray(x) + noise(x)) for x in leaves]
    return jax.tree.unflatten(tree, noisy)


def joint_law(
    next_law: Callable[[tuple[int, ...]], np.ndarray], num_tokens: int
) -> np.ndarray:
    """Probability of every text of `num_tokens` tokens, [V, ..., V], the first slowest.

    `next_law` maps the tokens so far, () at the start, to the law of the next one [V].
    """
    first = np.asarray(next_law(()), np.float64)
    law = first
    for _ in range(num_tokens - 1):
        rows = [next_law(tuple(map(int, text))) for text in np.ndindex(law.shape)]
        law = law[..., None] * np.reshape(rows, (*law.shape, first.size))
    return law


def target_law(
    target: Any,
    params: Any,
    prompt: Sequence[int],
    sampling: Sampling,
    num_tokens: int,
) -> np.ndarray:
    """`joint_law` of a target after a prompt, from one pass over all continuations."""
    V = target.config.vocab_size
    num_texts = V ** (num_tokens - 1)
    texts = np.indices((V,) * (num_tokens - 1)).reshape(num_tokens - 1, num_texts).T
    tokens = np.concatenate([np.tile(prompt, (len(texts), 1)), texts], axis=1)
    laws = _laws(target, sampling, num_tokens, params, jnp.asarray(tokens, jnp.int32))
    probs = np.asarray(laws, np.float64)
    rows = {
        tuple(t[:i]): p[i]
        for t, p in zip(texts.tolist(), probs, strict=True)
        for i in range(num_tokens)
    }
    return joint_law(rows.__getitem__, num_tokens)


def count(texts: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each text [rows, tokens] occurs, shaped as its `joint_law`."""
    texts = np.asarray(texts)
    counts = np.zeros((vocab_size,) * texts.shape[1], np.int64)
    np.add.at(counts, tuple(texts.T), 1)
    return counts


def chi_square(counts: np.ndarray, law: np.ndarray, pool: float = 10.0) -> float:
    """p-value of Pearson's test that `counts` were drawn from `law`.

    Cells that expect fewer than `pool` are joined into one; a hit in a cell of
    probability 0 gives 0 outright.
    """
    counts, law = np.ravel(counts), np.ravel(law)
    if np.any(counts[law == 0]):
        return 0.0
    expected = law / law.sum() * counts.sum()
    small = expected < pool
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    # A pool that is itself too small tells nothing; its hits are already in the total.
    observed, expected = observed[expected >= 1], expected[expected >= 1]
    if len(expected) < 2:
        return 1.0
    statistic = np.sum((observed - expected) ** 2 / expected)
    return float(special.gammaincc((len(expected) - 1) / 2, statistic / 2))
