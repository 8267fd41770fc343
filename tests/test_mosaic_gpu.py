"""Mosaic GPU kernels under JAX's interpreter, which knows threads, barriers, memories.

It came with jax 0.11. Nothing here has run on a GPU.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from tree_inputs import by_hand, inputs

from specjax import kv_cache, testing
from specjax.kernels import clustered_head, mosaic
from specjax.kernels.clustered_head import shapes as head_shapes
from specjax.kernels.tree_attention import choose, gpu, shapes, tree_attention
from specjax.kernels.tree_attention.shapes import Shape
from specjax.tree import Tree

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="interpreted from jax 0.11 on"
)
SHAPES = {
    name: shapes.SMALL[name] for name in ("one node", "a window", "wide heads")
} | {
    "two groups of queries, two splits": Shape(2, 33, 3, 1, 512, 128),
    "two tiles of queries": Shape(2, 64, 3, 1, 256, 64, window=50),
}


def attend(*args, window=None):
    return tree_attention(
        *args, window=window, implementation="mosaic_gpu", interpret=True
    )


@interpreted
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_is_attention_in_float64(name):
    shape = SHAPES[name]
    args = inputs(shape, "bfloat16")
    ours = attend(*args, window=shape.window)
    assert ours.dtype == jnp.bfloat16
    right = by_hand(*args, shape.window)
    np.testing.assert_allclose(np.asarray(ours, np.float64), right, atol=2e-2)


@interpreted
def test_float16_is_closer_than_bfloat16():
    shape = Shape(2, 6, 4, 2, 128, 64)
    args = inputs(shape, "float16", lengths=[3, 117])
    ours = np.asarray(attend(*args), np.float64)
    np.testing.assert_allclose(ours, by_hand(*args, None), atol=2e-3)


@interpreted
def test_what_no_node_sees_changes_nothing():
    """Slots past the nodes, which the blocks of 64 hold too."""
    q, k, v, length, *rest = inputs(Shape(1, 4, 2, 1, 128, 64), "bfloat16", lengths=[9])
    noise = np.where(np.arange(128) < 9 + 4, np.float32(0), np.float32(1e4))
    noise = jnp.asarray(noise[None, None, :, None], jnp.bfloat16)
    np.testing.assert_array_equal(
        attend(q, k, v, length, *rest), attend(q, k + noise, v - noise, length, *rest)
    )


HEAD = head_shapes.Shape(2, 5, 64, 192, 3)


def random_head(shape):
    rng, s = np.random.default_rng(0), shape
    normal = lambda *dims: jnp.asarray(rng.normal(size=dims), jnp.bfloat16)
    rows = [rng.permutation(s.clusters)[: s.scored] for _ in range(s.batch)]
    z, table = normal(s.batch, s.width), normal(s.clusters, s.rows, s.width)
    return z, jnp.asarray(np.stack(rows), jnp.int32), table


@interpreted
@pytest.mark.parametrize("shape", [HEAD, head_shapes.Shape(1, 6, 128, 256, 2)])
def test_token_scores_are_those_of_float64_and_of_the_chosen_alone(shape):
    """NaN in the rows of other clusters would reach them."""
    z, best, table = random_head(shape)
    others = np.setdiff1d(np.arange(shape.clusters), np.asarray(best))
    assert len(others)
    spoilt = table.at[others].set(jnp.nan)
    ours = clustered_head.token_scores(
        z, best, spoilt, implementation="mosaic_gpu", interpret=True
    )
    exact = lambda x: np.asarray(x, np.float64)
    right = np.einsum("bd,byrd->byr", exact(z), exact(table)[np.asarray(best)])
    np.testing.assert_allclose(ours, right, atol=5e-5)


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "says"),
    [
        (40, 64, "bfloat16", "got 40 rows of width 64"),
        (64, 80, "bfloat16", "got 64 rows of width 80"),
        (64, 2048, "bfloat16", "up to 1024, got"),
        (64, 64, "float32", "bfloat16 or float16, got float32"),
    ],
)
def test_tables_that_the_kernel_does_not_take_are_refused(rows, width, dtype, says):
    z, best, table = random_head(head_shapes.Shape(1, 2, rows, width, 1))
    with pytest.raises(ValueError, match=says):
        clustered_head.token_scores(
            z, best, table.astype(dtype), implementation="mosaic_gpu"
        )


@pytest.mark.parametrize("length", [0, 5, 60, 64, 100, 123, 187])
def test_each_node_is_in_one_block_of_the_nodes(length):
    """Of a cache of 256 slots: where blocks overlap at its end too."""
    M = 69
    ancestors = jnp.eye(M, dtype=bool)[None]
    seen = np.asarray(gpu.node_tiles(jnp.asarray([length], jnp.int32), ancestors, 256))
    start = length // 8 * 8 + 64 * np.arange(seen.shape[2] // 64)
    slots = (np.minimum(start, 256 - 64)[:, None] + np.arange(64)).ravel()
    found = [slots[row].tolist() for row in seen[0]]
    assert found == [[length + m] for m in range(M)]


@pytest.mark.parametrize("splits", [1, 3, 4])
def test_splits_share_the_text_without_a_gap(splits):
    length = jnp.asarray([0, 1, 64, 700], jnp.int32)
    first = jnp.asarray([0, 0, 0, 3], jnp.int32)
    found = np.asarray(gpu.split_text(length, first, splits))
    for row, n, start in zip(found, length, first, strict=True):
        blocks = [b for begin, count, *_ in row for b in range(begin, begin + count)]
        assert blocks == list(range(int(start), -(-int(n) // 64)))
        assert row[:, 1].max() - row[:, 1].mean() < 1  # even, up to a block
        assert set(row[:, 2]) == {int(n)} and set(row[:, 3]) == {int(n) // 8 * 8}


@pytest.mark.skipif(
    hasattr(plgpu, "InterpretGPUParams"), reason="this jax has an interpreter"
)
def test_an_old_jax_says_that_it_has_no_interpreter():
    with pytest.raises(NotImplementedError, match=r"jax 0\.11"):
        attend(*inputs(Shape(1, 2, 2, 1, 64, 64), "bfloat16"))


@pytest.mark.parametrize(
    ("slots", "width", "says"),
    [(72, 64, "multiple of 64 slots, got 72"), (64, 80, "got 80 and 80")],
)
def test_shapes_that_the_kernel_does_not_take_are_refused(slots, width, says):
    args = inputs(Shape(1, 2, 2, 1, slots, width), "bfloat16")
    with pytest.raises(ValueError, match=says):
        tree_attention(*args, implementation="mosaic_gpu")


def test_a_named_kernel_fails_loudly_on_another_platform():
    args = inputs(Shape(1, 2, 2, 1, 64, 64), "bfloat16")
    with pytest.raises(ValueError, match="interpret mode"):
        tree_attention(*args, implementation="mosaic_gpu")


@pytest.mark.parametrize(("capability", "runs"), [("9.0", True), ("8.0", False)])
def test_none_chooses_the_kernel_on_hopper_alone(monkeypatch, capability, runs):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(mosaic, "capability", lambda: capability)
    args = inputs(Shape(1, 2, 2, 1, 64, 64), "bfloat16")
    z, _, table = random_head(HEAD)
    chosen = choose(None, *args[:3]), clustered_head.choose(None, z, table)
    assert chosen == ("mosaic_gpu" if runs else "reference",) * 2
    if not runs:
        with pytest.raises(ValueError, match=r"capability 9 .* has 8\.0"):
            tree_attention(*args, implementation="mosaic_gpu")


@interpreted
def test_a_target_runs_the_kernel_that_it_names():
    """A window in one layer, rows of 9 and 5 tokens, a tree of 4."""
    fields = {"num_heads": 2, "num_kv_heads": 1, "head_width": 64}
    target, params = testing.tiny_target(num_layers=2, windows=(None, 6), **fields)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    text = np.random.default_rng(0).integers(0, 24, (2, 9))
    cache = target.init_cache(2, 64, jnp.bfloat16)
    cache = jax.jit(target)(params, jnp.asarray(text, jnp.int32), cache).cache
    cache = kv_cache.commit(cache, None, jnp.asarray([9, 5], jnp.int32))
    tree = Tree((-1, 0, 0, 1))
    nodes = jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 8]], jnp.int32)
    shape = {"ancestors": tree.ancestors, "depths": tree.depths}
    run = lambda t: jax.jit(lambda p, c: t(p, nodes, c, **shape).hidden)(params, cache)
    right = run(target)
    with plgpu.force_gpu_interpret_mode():
        ours = run(dataclasses.replace(target, attention="mosaic_gpu"))
    apart = np.abs(np.asarray(ours, np.float32) - np.asarray(right, np.float32))
    assert apart.max() < 0.1 and apart.mean() < 0.01  # of states of deviation 1
