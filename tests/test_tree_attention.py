"""Tree attention against a loop in float64; the GPU kernel is in `test_mosaic_gpu`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from tree_inputs import by_hand, inputs

from specjax import kv_cache, sharding, testing
from specjax.kernels.tree_attention import reference, shapes, tpu, tree_attention
from specjax.kernels.tree_attention.shapes import Shape
from specjax.sharding import MeshShape
from specjax.tree import Tree

kernel = functools.partial(tree_attention, implementation="pallas_tpu", interpret=True)


@pytest.mark.parametrize("name", shapes.SMALL)
def test_the_reference_is_attention_to_the_text_and_the_ancestors(name):
    shape = shapes.SMALL[name]
    args = inputs(shape)
    ours = tree_attention(*args, window=shape.window, implementation="reference")
    right = by_hand(*args, shape.window)
    np.testing.assert_allclose(ours, right, atol=2e-5)


@pytest.mark.parametrize("name", shapes.SMALL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_is_attention_in_float64(name, dtype):
    shape = shapes.SMALL[name]
    args = inputs(shape, dtype)
    ours = kernel(*args, window=shape.window)
    right = by_hand(*args, shape.window)
    assert ours.dtype == jnp.dtype(dtype)
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(ours.astype(jnp.float32), right, atol=tolerance)


@pytest.mark.parametrize("implementation", ["reference", "pallas_tpu"])
def test_what_no_node_sees_changes_nothing(implementation):
    """Slots past the nodes, and of other branches, whatever they hold but NaN."""
    shape = Shape(2, 4, 2, 1, 256, 64)
    q, k, v, length, ancestors, *rest = inputs(shape, lengths=[9, 250])
    run = lambda k, v: tree_attention(
        q,
        k,
        v,
        length,
        ancestors,
        *rest,
        implementation=implementation,
        interpret=True,
    )
    seen = reference.visible(length, 256, ancestors, *rest, None)
    hidden = ~np.asarray(seen).any(1)[:, None, :, None]
    noise = np.where(hidden, np.float32(1e4), np.float32(0))
    assert hidden.any()
    np.testing.assert_array_equal(run(k, v), run(k + noise, v - noise))
    # A slot of another branch reaches its own branch alone.
    (slot,) = np.flatnonzero(~np.asarray(ancestors)[0, 3])[:1]
    changed = v.at[0, 0, 9 + slot].add(100.0)
    before, after = run(k, v), run(k, changed)
    blind = ~np.asarray(ancestors)[0, :, slot]
    np.testing.assert_array_equal(before[0, blind], after[0, blind])
    assert np.abs(before[0, slot] - after[0, slot]).max() > 0.1


def test_lengths_and_trees_are_known_at_run_time_alone():
    """One program for every topology and fill of one size."""
    shape = Shape(1, 4, 2, 1, 128, 64)
    run = jax.jit(kernel)
    for seed, length in ((0, 0), (1, 64), (2, 124)):
        args = inputs(shape, seed=seed, lengths=[length])
        np.testing.assert_allclose(run(*args), by_hand(*args, None), atol=2e-5)
    assert run._cache_size() == 1


def test_bits_are_those_of_the_ancestors():
    rng = np.random.default_rng(0)
    seen = rng.random((2, 3, 45)) < 0.5
    found = np.asarray(tpu.words(jnp.asarray(seen))).view(np.uint32)
    back = [(found[..., m // 32] >> np.uint32(m % 32)) & 1 for m in range(45)]
    np.testing.assert_array_equal(np.stack(back, -1), seen)


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (1, 4), (2, 1)])
def test_devices_of_a_mesh_compute_their_own_rows_and_heads(data, tensor):
    """4 rows, 2 kv heads: over 4 devices the heads stay whole."""
    args = inputs(Shape(4, 5, 4, 2, 128, 64))
    shape = MeshShape(data=data, tensor=tensor)
    mesh = shape.make(jax.devices()[: shape.size])
    spread = lambda x: NamedSharding(
        mesh, sharding.fit(sharding.row_axes(x, 4), x.shape, mesh)
    )
    placed = [jax.device_put(x, spread(x)) for x in args[1:]]
    with sharding.use(mesh):
        run = jax.jit(kernel).lower(args[0], *placed).compile()
        ours = run(args[0], *placed)
    np.testing.assert_allclose(ours, by_hand(*args, None), atol=2e-5)
    assert "all-gather" not in run.as_text()


@pytest.mark.parametrize(
    ("slots", "implementation", "says"),
    [
        (100, "pallas_tpu", "multiple of 128 slots, got 100"),
        (128, "triton", "unknown implementation 'triton'; known: reference"),
        (128, "mosaic_gpu", "bfloat16 or float16, got float32"),
    ],
)
def test_what_a_kernel_does_not_take_is_refused(slots, implementation, says):
    args = inputs(Shape(1, 2, 2, 1, slots, 64))
    with pytest.raises(ValueError, match=says):
        tree_attention(*args, implementation=implementation)


CACHE = 128


@pytest.fixture(scope="module")
def stack():
    """A target with a window in one layer, a cache with text, and a tree of 4."""
    target, params = testing.tiny_target(num_layers=2, windows=(None, 6))
    cache = target.init_cache(2, CACHE)
    text = np.random.default_rng(0).integers(0, 24, (2, 9))
    out = jax.jit(target)(params, jnp.asarray(text, jnp.int32), cache)
    cache = kv_cache.commit(out.cache, None, jnp.asarray([9, 5], jnp.int32))
    return target, params, cache, Tree((-1, 0, 0, 1))


@pytest.mark.slow
def test_a_target_runs_the_kernel_that_it_names(stack):
    target, params, cache, tree = stack
    nodes = jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 8]], jnp.int32)
    run = lambda t: t(
        params, nodes, cache, ancestors=tree.ancestors, depths=tree.depths, taps=(1,)
    )
    right = jax.jit(run, static_argnums=0)(target)
    named = dataclasses.replace(target, attention="pallas_tpu")
    with pltpu.force_tpu_interpret_mode():
        ours = run(named)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_a_named_kernel_fails_loudly_where_it_cannot_run(stack):
    target, params, cache, _ = stack
    named = dataclasses.replace(target, attention="pallas_tpu")
    with pytest.raises(ValueError, match="interpret mode"):
        named(params, jnp.ones((2, 1), jnp.int32), cache)
