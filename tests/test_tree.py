"""Static trees, and one pass over a tree against separate passes over its paths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import kv_cache, testing
from specjax.tree import Tree

TREE = Tree((-1, 0, 0, 1, 1, 2, 5, 5))
PATHS = [(0, 1, 3), (0, 1, 4), (0, 2, 5, 6), (0, 2, 5, 7)]
NODES = jnp.array([[9, 3, 4, 5, 3, 6, 7, 8], [2, 2, 7, 1, 1, 0, 5, 6]])
PREFIX = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]])
LENGTHS = jnp.array([4, 2])  # ragged: row 1 has only two committed tokens


@pytest.fixture(scope="module")
def model():
    target, params = testing.tiny_target(num_layers=2)
    run = jax.jit(target, static_argnames=("taps",))
    cache = run(params, PREFIX, target.init_cache(2, 24)).cache
    return run, params, kv_cache.commit(cache, None, LENGTHS)


def over_tree(model, tree=TREE, nodes=NODES, **block):
    run, params, cache = model
    block = {"ancestors": tree.ancestors[None], "depths": tree.depths[None]} | block
    block = {name: jnp.asarray(value) for name, value in block.items()}
    return run(params, nodes, cache, **block, taps=(1, 2))


def test_depths_and_ancestors_follow_the_parents():
    assert TREE.depths.tolist() == [0, 1, 1, 2, 2, 2, 3, 3]
    assert TREE.depth == 3 and TREE.num_nodes == 8 and not TREE.is_chain
    for node, row in enumerate(TREE.ancestors):
        above, parent = {node}, TREE.parents[node]
        while parent >= 0:
            above.add(parent)
            parent = TREE.parents[parent]
        assert set(np.flatnonzero(row)) == above


def test_a_chain_is_the_tree_of_one_path():
    chain = Tree.chain(3)
    assert chain == Tree((-1, 0, 1, 2)) and chain.is_chain
    np.testing.assert_array_equal(chain.ancestors, np.tri(4, dtype=bool))
    assert Tree.chain(0).num_nodes == 1 and Tree.chain(0).depth == 0


@pytest.mark.parametrize("parents", [(), (0,), (-1, 1), (-1, 0, 3), (-1, -1)])
def test_nodes_out_of_order_are_refused(parents):
    with pytest.raises(ValueError, match="parent"):
        Tree(parents)


def test_a_pass_over_a_chain_is_a_plain_causal_pass(model):
    run, params, cache = model
    chain = over_tree(model, Tree.chain(7))
    plain = run(params, NODES, cache, taps=(1, 2))
    np.testing.assert_array_equal(chain.hidden, plain.hidden)
    np.testing.assert_array_equal(chain.features, plain.features)


def test_a_pass_over_a_tree_equals_separate_passes_over_its_paths(model):
    run, params, cache = model
    tree = over_tree(model)
    for path in PATHS:
        alone = run(params, NODES[:, jnp.array(path)], cache, taps=(1, 2))
        np.testing.assert_allclose(tree.hidden[:, path], alone.hidden, atol=1e-5)
        np.testing.assert_allclose(tree.features[:, path], alone.features, atol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_committing_a_path_leaves_the_cache_of_its_text(model, path):
    """The whole path and, in the other row, its first token alone."""
    run, params, cache = model
    kept = jnp.array([len(path), 1])
    padded = jnp.array([path, (0,) * len(path)])
    ours = kv_cache.commit(over_tree(model).cache, padded, kept)
    text = NODES[:, jnp.array(path)]
    fresh = kv_cache.commit(run(params, text, cache).cache, None, kept)
    np.testing.assert_array_equal(ours.length, fresh.length)
    after = jnp.array([[11, 12], [13, 14]])
    np.testing.assert_allclose(
        run(params, after, ours).hidden, run(params, after, fresh).hidden, atol=1e-5
    )


def test_a_mask_for_each_row_may_differ(model):
    chain, tree = Tree.chain(7), TREE
    masks = jnp.stack([jnp.asarray(chain.ancestors), jnp.asarray(tree.ancestors)])
    depths = jnp.stack([jnp.asarray(chain.depths), jnp.asarray(tree.depths)])
    both = over_tree(model, ancestors=masks, depths=depths).hidden
    one, two = over_tree(model, chain).hidden, over_tree(model).hidden
    np.testing.assert_allclose(both[0], one[0], atol=1e-6)
    np.testing.assert_allclose(both[1], two[1], atol=1e-6)
