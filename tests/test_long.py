"""Long texts: a few queries a time, on one device and split over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_deepseek
import test_gemma

from specjax import feature_cache, layers, sharding, testing
from specjax.drafters import p_eagle
from specjax.sharding import MeshShape
from specjax.targets.scanned import Scanned

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 24, (1, 72)), jnp.int32)


def states(target, params, tokens=TOKENS):
    run = jax.jit(lambda params, tokens: target(params, tokens, taps=(1, 3)).features)
    return run(params, tokens)


def test_a_few_queries_a_time_give_the_states_of_all_at_once(monkeypatch):
    target, params = testing.tiny_target(windows=(None, 7, 7, None))
    whole = states(target, params)
    slope = jax.jit(jax.grad(lambda p: jnp.sum(states(target, p) ** 2)))(params)
    monkeypatch.setattr(layers, "LONG", 2 * 72 * 5)  # 4 queries: 5 do not divide 72
    program = str(jax.make_jaxpr(target)(params, TOKENS))
    assert "72,72" not in program  # neither scores nor mask
    np.testing.assert_allclose(states(target, params), whole, atol=1e-4)
    scanned = Scanned(target)
    found = states(scanned, scanned.stack(params))
    np.testing.assert_allclose(found, whole, atol=1e-4)
    few = jax.jit(jax.grad(lambda p: jnp.sum(states(target, p) ** 2)))(params)
    for a, b in zip(jax.tree.leaves(few), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma", "deepseek"])
def test_other_targets_go_a_few_queries_a_time_too(kind, monkeypatch, tmp_path):
    if kind == "gemma":
        model = test_gemma.load(tmp_path, test_gemma.A)
        target, params = model.target, model.params
    else:
        target, params = test_deepseek.tiny()
    tokens = TOKENS[:, :32] % target.config.vocab_size
    whole = target(params, tokens).hidden
    monkeypatch.setattr(layers, "LONG", 256)
    np.testing.assert_allclose(target(params, tokens).hidden, whole, atol=1e-4)


def test_one_text_is_split_by_its_tokens(monkeypatch):
    """A device reads its part of the text and holds the states of that part alone."""
    target, params = testing.tiny_target(num_kv_heads=2, num_heads=4)
    whole = states(target, params)
    monkeypatch.setattr(layers, "LONG", 2 * 72 * 2)
    mesh = MeshShape(data=2, fsdp=2, tensor=2).make()
    read = []

    def part(rows):
        read.append(rows)
        return np.asarray(TOKENS)[rows]

    with sharding.use(mesh):
        tokens = sharding.load(mesh, TOKENS.shape, part)
        assert tokens.sharding.shard_shape(tokens.shape) == (1, 18)
        placed = sharding.place(params, mesh)
        mask = sharding.load(mesh, TOKENS.shape, lambda r: np.ones((1, 72), bool)[r])
        look = jax.jit(lambda p, t, m: feature_cache.features(target, (1, 3), p, t, m))
        program = look.lower(placed, tokens, mask).compile()
        found = program(placed, tokens, mask).features
    np.testing.assert_allclose(np.asarray(found), whole, atol=1e-4)
    assert found.sharding.shard_shape(found.shape)[1] == 18
    # Keys and values of the whole text are gathered, scores never are.
    text = program.as_text()
    assert not [x for x in text.splitlines() if "all-gather" in x and ",72,72]" in x]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, MeshShape(data=2, fsdp=2, tensor=2)])
def test_segments_of_one_long_text_have_the_gradient_of_a_short_one(mesh, monkeypatch):
    target, params = testing.tiny_target()
    drafter, weights = testing.tiny_drafter("p_eagle", target, params, segments=3)
    shared, mask = target.shared(params), jnp.ones(TOKENS.shape, bool)
    batch = feature_cache.features(target, drafter.taps, params, TOKENS, mask)
    loss = lambda w: drafter.loss(w, shared, batch, jax.random.key(1))[0]
    value, slope = jax.jit(jax.value_and_grad(loss))(weights)
    monkeypatch.setattr(layers, "LONG", 1000)
    monkeypatch.setattr(p_eagle, "TABLE", 0)
    mesh = mesh and mesh.make()
    with sharding.use(mesh):
        found, few = jax.jit(jax.value_and_grad(loss))(sharding.place(weights, mesh))
    assert float(found) == pytest.approx(float(value), rel=1e-4)
    for a, b in zip(jax.tree.leaves(few), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, atol=1e-3)
