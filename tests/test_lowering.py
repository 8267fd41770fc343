"""Every kernel and the whole generate step lower for TPU and for CUDA, on any machine.

Lowering needs no device and no compiler of the vendor; it finds block shapes and
operations that Mosaic does not take, and a call that only runs on the CPU. What the
chips' own compilers say is in `benchmarks/compile_kernels.py`.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from specjax import testing
from specjax.gemma import GemmaConfig
from specjax.generate import Model, Weights, advance, prefill
from specjax.kernels import clustered_head, tree_attention
from specjax.kernels.clustered_head import shapes as head_shapes
from specjax.kernels.tree_attention import shapes
from specjax.sampling import GREEDY, Sampling
from specjax.targets.gemma import Gemma
from specjax.tree import DynamicTree, Tree

# A kernel's platform, and what its call is named once lowered.
KERNELS = {
    "pallas_tpu": ("tpu", "tpu_custom_call"),
    "mosaic_gpu": ("cuda", "mosaic_gpu"),
}
DTYPES = {"pallas_tpu": ("float32", "bfloat16"), "mosaic_gpu": ("bfloat16",)}
TARGET = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_width": 64}
DRAFTERS = {
    "chain": ("medusa", None),
    "tree": ("eagle", Tree((-1, 0, 0, 1, 1, 2))),
    "tree at run time": ("eagle3", DynamicTree(5, depth=2, width=2)),
    "the target's cache": ("gemma4_mtp", None),
}
abstract = jax.ShapeDtypeStruct


def lowered(run, platform, *args, **static):
    return run.trace(*args, **static).lower(lowering_platforms=(platform,)).as_text()


def attention(name, shape, dtype):
    """Tree attention by a named kernel, lowered for its platform."""
    s, i32 = shape, lambda *dims: abstract(dims, jnp.int32)
    kv = abstract((s.batch, s.kv_heads, s.slots, s.width), dtype)
    args = (
        abstract((s.batch, s.nodes, s.heads, s.width), dtype),
        *(kv, kv, i32(s.batch)),
        abstract((s.batch, s.nodes, s.nodes), bool),
        *(i32(s.batch, s.nodes), i32(s.batch, s.nodes)),
    )
    call = functools.partial(
        tree_attention.tree_attention, window=s.window, implementation=name
    )
    return lowered(jax.jit(call), KERNELS[name][0], *args)


def check_attention(name, shape, dtype):
    text = attention(name, shape, dtype)
    assert KERNELS[name][1] in text
    scores = f"{shape.nodes}x{shape.slots}x"  # no [N S] array outside the kernel
    assert scores not in text


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", shapes.LARGE)
def test_tree_attention_lowers(name, shape):
    check_attention(name, shapes.LARGE[shape], "bfloat16")


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", ["gemma 4 e2b", "gemma 4 e2b, 16 states"])
def test_a_clustered_head_lowers(name, shape):
    s, (platform, call) = head_shapes.LARGE[shape], KERNELS[name]
    args = (
        abstract((s.batch, s.width), jnp.bfloat16),
        abstract((s.batch, s.scored), jnp.int32),
        abstract((s.clusters, s.rows, s.width), jnp.bfloat16),
    )
    run = functools.partial(clustered_head.token_scores, implementation=name)
    assert call in lowered(jax.jit(run), platform, *args)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [(n, d) for n in DTYPES for d in DTYPES[n]])
@pytest.mark.parametrize("shape", shapes.SMALL | shapes.LARGE)
def test_tree_attention_lowers_at_every_shape(name, dtype, shape):
    check_attention(name, (shapes.SMALL | shapes.LARGE)[shape], dtype)


def steps(attention, name, topology, made=None, sampling=GREEDY, dtype="bfloat16"):
    """Prefill and rounds of a small model as jitted functions with their arguments."""
    target, params = made or testing.tiny_target(**TARGET)
    drafter, weights = testing.tiny_drafter(name, target, params)
    if topology is not None:
        drafter = dataclasses.replace(drafter, topology=topology)
    model = Model(dataclasses.replace(target, attention=attention), drafter, sampling)
    weights = jax.tree.map(
        lambda x: abstract(x.shape, dtype if x.dtype == jnp.float32 else x.dtype),
        Weights(params, weights),
    )
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
    i32 = lambda *dims: abstract(dims, jnp.int32)
    args = model, weights, i32(2, 16), i32(2), keys, i32(0)
    sizes = {"cache_size": 128, "max_new_tokens": 32}
    run = functools.partial(prefill, model, **sizes)
    return (
        (prefill, args, sizes),
        (advance, (model, weights, jax.eval_shape(run, *args[1:]), i32()), {}),
    )


def check_steps(attention, platform, drafter, **options):
    for run, args, static in steps(attention, *DRAFTERS[drafter], **options):
        text = lowered(run, platform, *args, **static)
        if attention is not None:
            assert KERNELS[attention][1] in text


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["chain", "tree"])
@pytest.mark.parametrize("attention", KERNELS)
def test_prefill_and_rounds_lower_with_a_named_kernel(attention, drafter):
    check_steps(attention, KERNELS[attention][0], drafter)


def tiny_gemma(full_head_width):
    """Local and full layers of two widths, the last two with the keys of others."""
    config = GemmaConfig(
        vocab_size=24,
        width=16,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_width=256,
        mlp_width=24,
        windows=(8, None, 8, None),
        full_kv_heads=1,
        full_head_width=full_head_width,
        num_shared_layers=2,
    )
    target = Gemma(config)
    return target, jax.jit(target.init)(jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["tree", "the target's cache"])
@pytest.mark.parametrize(
    ("attention", "width"), [("pallas_tpu", 512), ("mosaic_gpu", 128)]
)
def test_every_layer_of_a_gemma_round_lowers_with_a_named_kernel(
    attention, width, drafter
):
    """Gemma 4's 512 on TPU, which the GPU kernel refuses."""
    platform, call = KERNELS[attention]
    made = tiny_gemma(width)
    for run, args, static in steps(attention, *DRAFTERS[drafter], made=made):
        assert lowered(run, platform, *args, **static).count(f"@{call}") == 4


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_prefill_and_rounds_lower_without_a_kernel(platform):
    check_steps(None, platform, "tree")


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7, top_p=0.9)], ids=str)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("attention", [*KERNELS, None])
def test_prefill_and_rounds_of_more_drafters_lower(attention, drafter, sampling):
    platforms = ("tpu", "cuda") if attention is None else KERNELS[attention][:1]
    for platform in platforms:
        check_steps(attention, platform, drafter, sampling=sampling)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["chain", "tree"])
def test_prefill_and_rounds_in_float32_lower_for_tpus(drafter):
    check_steps("pallas_tpu", "tpu", drafter, dtype="float32")


def test_the_chips_own_compilers_took_all_when_last_asked():
    result = Path(__file__).parents[1] / "benchmarks" / "compile_kernels.json"
    made = json.loads(result.read_text())
    rows = [row for platform in made.values() for row in platform["rows"]]
    chips = {row["chip"] for row in rows}
    assert chips == {"TPU v5e", "TPU v5p", "TPU v6e", "TPU 7x", "NVIDIA H200"}
    assert [row for row in rows if row["result"] != "compiled"] == []
