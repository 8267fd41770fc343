"""Every kernel and the whole generate step lower for TPU and for CUDA, on any machine.

Lowering needs no device and no compiler of the vendor; it finds block shapes and
operations that Mosaic does not take, and a call that only runs on the CPU. What the
chips' own compilers say is in `benchmarks/compile_kernels.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import testing
from specjax.generate import Model, Weights, advance, prefill
from specjax.sampling import GREEDY, Sampling
from specjax.tree import Tree

TARGET = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_width": 64}
PROMPT = 16  # tokens
CALLS = {"pallas_tpu": "tpu_custom_call"}  # what a kernel is called once lowered
STEPS = [("tpu", "pallas_tpu"), ("tpu", None), ("cuda", None)]
DRAFTERS = {
    "chain": ("medusa", None),
    "tree": ("eagle", Tree((-1, 0, 0, 1, 1, 2))),
}


def lowered(run, platform, *args, **static):
    return run.trace(*args, **static).lower(lowering_platforms=(platform,)).as_text()


def step(attention, name, topology, sampling=GREEDY, batch_size=2):
    """Prefill and rounds of a small model as jitted functions with their arguments."""
    target, params = testing.tiny_target(**TARGET)
    drafter, weights = testing.tiny_drafter(name, target, params, gamma=2)
    if topology is not None:
        drafter = dataclasses.replace(drafter, topology=topology)
    abstract = jax.ShapeDtypeStruct
    model = Model(dataclasses.replace(target, attention=attention), drafter, sampling)
    weights = Weights(params, weights)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch_size))
    prompt = (
        abstract((batch_size, PROMPT), jnp.int32),
        abstract((batch_size,), jnp.int32),
        keys,
        abstract((0,), jnp.int32),
    )
    sizes = {"cache_size": 128, "max_new_tokens": 32}
    state = jax.eval_shape(lambda w, *x: prefill(model, w, *x, **sizes), weights, *prompt)
    return (
        (prefill, (model, weights, *prompt), sizes),
        (advance, (model, weights, state, abstract((), jnp.int32)), {}),
    )


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize(("platform", "attention"), STEPS)
def test_prefill_and_rounds_lower(platform, attention, kind):
    for run, args, static in step(attention, *DRAFTERS[kind]):
        text = lowered(run, platform, *args, **static)
        assert "main" in text
        if attention is not None:
            assert CALLS[attention] in text
