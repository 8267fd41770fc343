"""The cache: what is written, committed and forgotten, and cached = uncached passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import kv_cache, testing

TEXT = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2]])


def numbered(batch=1, size=12, start=3, nodes=8):
    """A cache whose verify block at `start` holds 100 times the node's number."""
    cache = kv_cache.init(1, batch, 1, size, 2)
    block = 100.0 * jnp.arange(nodes)[None, None, :, None].astype(jnp.float32)
    block = jnp.broadcast_to(block, (batch, 1, nodes, 2))
    starts = jnp.full(batch, start)
    k = kv_cache.write(cache.k[0], block, starts)
    return dataclasses.replace(cache, k=(k,), v=(k,), length=starts)


@pytest.mark.parametrize(
    ("path", "count", "slots"),
    [((0, 2, 5, 7), 4, [0, 200, 500, 700]), ((0, 1, 1, 1), 2, [0, 100])],
)
def test_a_committed_path_becomes_contiguous(path, count, slots):
    cache = kv_cache.commit(numbered(), jnp.array([path]), jnp.array([count]))
    assert cache.length.tolist() == [3 + count]
    for entries in (cache.k[0], cache.v[0]):
        assert entries[0, 0, 3 : 3 + count, 0].tolist() == slots
        assert not np.any(entries[0, 0, :3])


def test_each_row_commits_its_own_path():
    paths = jnp.array([[0, 2, 5, 7], [0, 1, 3, 3]])
    cache = kv_cache.commit(numbered(batch=2), paths, jnp.array([4, 3]))
    assert cache.k[0][0, 0, 3:7, 1].tolist() == [0, 200, 500, 700]
    assert cache.k[0][1, 0, 3:6, 1].tolist() == [0, 100, 300]


def test_a_chain_moves_nothing():
    before = numbered()
    after = kv_cache.commit(before, None, jnp.array([2]))
    np.testing.assert_array_equal(after.k[0], before.k[0])
    assert after.length.tolist() == [5]


def test_a_finished_row_commits_nothing():
    """The engine gives it -1 accepted, 0 committed."""
    after = kv_cache.commit(numbered(), None, jnp.array([0]))
    assert after.length.tolist() == [3]


def test_rewinding_only_ever_shortens():
    cache = numbered(batch=2)
    assert kv_cache.rewind(cache, jnp.array([1, 9])).length.tolist() == [1, 3]


def test_rows_are_written_at_their_own_start():
    slots = jnp.zeros((2, 1, 6, 1))
    new = jnp.arange(1.0, 5.0).reshape(2, 1, 2, 1)
    out = kv_cache.write(slots, new, jnp.array([0, 3]))[:, 0, :, 0]
    assert out.tolist() == [[1, 2, 0, 0, 0, 0], [0, 0, 0, 3, 4, 0]]


def test_leaves_are_distinct_buffers_so_that_a_cache_can_be_donated():
    cache = kv_cache.init(2, 1, 1, 4, 2)
    give = jax.jit(lambda c: jax.tree.map(lambda x: x + 1, c), donate_argnums=0)
    give(cache)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))


@pytest.fixture(scope="module", params=["full", "window"])
def model(request):
    windows = (None, 3) if request.param == "window" else ()
    target, params = testing.tiny_target(num_layers=2, windows=windows)
    return target, jax.jit(target), params


@pytest.mark.parametrize("cuts", [(9,), (4, 9), (1, 2, 9), (5, 6, 7, 9)])
def test_cached_passes_of_any_size_equal_the_uncached_pass(model, cuts):
    target, run, params = model
    whole = run(params, TEXT).hidden
    cache, parts, start = target.init_cache(2, 16), [], 0
    for end in cuts:
        out = run(params, TEXT[:, start:end], cache)
        cache = kv_cache.commit(out.cache, None, jnp.full(2, end - start))
        parts.append(out.hidden)
        start = end
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=2e-5)


def test_ragged_rows_see_no_padding(model):
    target, run, params = model
    out = run(params, TEXT.at[1, 4:].set(0), target.init_cache(2, 16))
    cache = kv_cache.commit(out.cache, None, jnp.array([9, 4]))
    after = jnp.array([[7], [2]])
    ours = run(params, after, cache).hidden
    short = jnp.concatenate([TEXT[1:, :4], after[1:]], axis=1)
    np.testing.assert_allclose(ours[1], run(params, short).hidden[0, -1:], atol=2e-5)


def test_stale_slots_after_a_rewind_are_invisible(model):
    target, run, params = model
    cache = kv_cache.commit(
        run(params, TEXT, target.init_cache(2, 16)).cache, None, jnp.full(2, 9)
    )
    back = kv_cache.rewind(cache, jnp.array([3, 5]))
    other = jnp.array([[6, 6], [7, 7]])
    ours = run(params, other, back).hidden
    for row, length in enumerate((3, 5)):
        text = jnp.concatenate([TEXT[row, :length], other[row]])[None]
        right = run(params, text).hidden[0, length:]
        np.testing.assert_allclose(ours[row], right, atol=2e-5)


def test_entries_take_the_caches_dtype():
    slots = jnp.zeros((2, 1, 4, 2), jnp.bfloat16)
    got = kv_cache.write(slots, jnp.ones((2, 1, 1, 2)), jnp.array([0, 1]))
    assert got.dtype == jnp.bfloat16
    assert got[:, 0, :, 0].tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
