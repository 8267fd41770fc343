"""Stacked layers against the same layers one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import feature_cache, sharding, testing
from specjax.mla import DeepSeekConfig
from specjax.targets.base import Target
from specjax.targets.deepseek import DeepSeek
from specjax.targets.llama import Llama
from specjax.targets.scanned import Scanned, arranged
from specjax.transformer import TransformerConfig

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 24, (3, 9)), jnp.int32)


def features(target, params, taps):
    run = jax.jit(functools.partial(feature_cache.features, target, taps))
    return run(params, TOKENS, TOKENS > 0)


@pytest.mark.parametrize(
    "windows", [(), pytest.param((None, 4, 4, None), marks=pytest.mark.slow)]
)
def test_features_are_those_of_the_layers_one_by_one(windows):
    """Of every tap, from either end, twice and out of order."""
    target, params = testing.tiny_target(windows=windows)
    scanned, taps = Scanned(target), (-1, 3, 0, 1, 2, 4, 3, -2)
    assert isinstance(scanned, Target)
    assert len(scanned.runs()) == (3 if windows else 1)
    stacked = scanned.stack(params)
    want, have = features(target, params, taps), features(scanned, stacked, taps)
    np.testing.assert_allclose(have.hidden, want.hidden, atol=1e-6)
    np.testing.assert_allclose(have.features, want.features, atol=1e-6, rtol=1e-6)
    none = jax.eval_shape(functools.partial(scanned, taps=()), stacked, TOKENS)
    assert none.features.shape == (3, 9, 0)
    back = sharding.unstack(stacked)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), back, params))


@pytest.mark.slow
def test_dense_and_expert_layers_are_two_runs():
    config = DeepSeekConfig(
        vocab_size=24,
        width=16,
        num_layers=5,
        num_heads=2,
        num_kv_heads=1,
        head_width=4,
        mlp_width=24,
        q_rank=8,
        kv_rank=8,
        nope_width=4,
        value_width=4,
        num_dense_layers=2,
        num_experts=4,
        experts_per_token=2,
        expert_width=8,
        num_groups=1,
        groups_per_token=1,
    )
    scanned = Scanned(DeepSeek(config))
    assert [(a, b) for _, a, b in scanned.runs()] == [(0, 2), (2, 5)]
    params = jax.jit(scanned.target.init)(jax.random.key(0))
    want = features(scanned.target, params, range(6))
    have = features(scanned, scanned.stack(params), range(6))
    np.testing.assert_allclose(have.features, want.features, atol=1e-6)


def test_a_cache_is_read_layer_by_layer():
    target, params = testing.tiny_target()
    scanned = Scanned(target)
    cache = target.init_cache(3, 16)
    want = target(params, TOKENS, cache, taps=(2,))
    have = scanned(scanned.stack(params), TOKENS, cache, taps=(2,))
    np.testing.assert_array_equal(have.hidden, want.hidden)
    np.testing.assert_array_equal(have.cache.k[3], want.cache.k[3])


def test_a_layer_is_compiled_once_however_many_there_are():
    def size(num_layers, taps=(1,)):
        config = TransformerConfig(24, 16, num_layers, 4, 2, 8, 24)
        scanned = Scanned(Llama(config))
        params = jax.eval_shape(lambda: scanned.init(jax.random.key(0)))
        run = jax.jit(functools.partial(scanned, taps=taps))
        return run.lower(params, TOKENS).as_text().count("dot_general")

    assert size(12) == size(3) == size(12, taps=(1, 5, 9))


def test_stacked_parameters_are_split_as_single_ones_are():
    target, params = testing.tiny_target(num_kv_heads=4, num_heads=4)
    mesh = sharding.MeshShape(2, 2, 2).make()
    split = sharding.shardings(Scanned(target).stack(params), mesh)["layers"]["0"]
    single = sharding.shardings(params, mesh)["layer_0"]
    for path, at in jax.tree_util.tree_leaves_with_path(split):
        one = single
        for entry in path:
            one = one[entry.key]
        assert tuple(at.spec) in ((None, *one.spec), ()), path


def test_a_tree_without_a_cache_is_that_of_the_layers_one_by_one():
    """Node 2 hangs on node 0."""
    target, params = testing.tiny_target()
    scanned = Scanned(target)
    block = {
        "ancestors": np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool),
        "depths": np.array([0, 1, 1], np.int32),
    }
    stacked, tokens = scanned.stack(params), TOKENS[:, :3]
    run = lambda target, params: jax.jit(lambda p: target(p, tokens, **block))(params)
    want, have = run(target, params), run(scanned, stacked)
    np.testing.assert_allclose(have.hidden, want.hidden, atol=2e-5)
    with pytest.raises(ValueError, match=r"takes no \['behind'\]"):
        scanned(stacked, tokens, behind=1)


def test_layers_that_read_more_than_the_stream_are_refused():
    class Other(Llama):
        pass

    other = Other(testing.tiny_target()[0].config)
    with pytest.raises(NotImplementedError, match="Other target are not alike"):
        Scanned(other)
    assert arranged(other, stacked=True) is other
    plain = testing.tiny_target()[0]
    scanned = arranged(plain, stacked=True)
    assert scanned == Scanned(plain) == arranged(scanned, stacked=True)
    assert arranged(scanned, stacked=False) is plain
