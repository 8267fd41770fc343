"""The trainer: what it logs, where it starts, what it refuses, nothing to learn."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_run import CONFIG, DRAFTER, TEXTS, Log, make_target, same

from specjax import feature_cache, sharding, testing, training
from specjax.corpus import Texts
from specjax.drafters import base
from specjax.drafters.medusa import Medusa
from specjax.sharding import MeshShape
from specjax.training import TrainConfig, train


@pytest.fixture(scope="module", autouse=True)
def promotion():
    """AdamW of optax raises a float to an integer count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def pretrained():
    return make_target()


def test_a_run_logs_every_step(pretrained):
    log = Log()
    train(pretrained, DRAFTER, TEXTS, CONFIG, log=log)
    assert list(log) == list(range(1, 11))
    assert set(log[1]) == {
        *("loss", "grad_norm", "tau", "skipped"),
        *(f"{name}_{k}" for name in ("ce", "alpha", "survival") for k in (1, 2)),
    }
    survival = [log[1]["survival_1"], log[1]["survival_2"]]
    assert log[1]["tau"] == pytest.approx(1 + sum(survival))
    for values in log.values():  # what is measured is of the step's own weights
        loss = 0.8 * values["ce_1"] + 0.8**2 * values["ce_2"]
        assert values["loss"] == pytest.approx(loss, rel=1e-4)


# --- nothing to learn from


def test_texts_without_a_token_to_learn_move_nothing(pretrained):
    nothing = Texts(TEXTS.tokens, np.zeros_like(TEXTS.mask))
    start, log = fresh(pretrained), Log()
    run = functools.partial(train, pretrained, DRAFTER, nothing, CONFIG)
    params = run(params=start, stop_after=2, log=log)
    same(params, start)
    assert log[1]["loss"] == log[2]["loss"] == 0.0


def test_a_masked_row_and_a_row_of_one_token_are_finite(pretrained):
    mask = TEXTS.mask.copy()
    mask[::2] = False
    mask[1] = False
    mask[1, 0] = True  # no head guesses the first token: nothing to learn either
    log = Log()
    params = train(
        pretrained, DRAFTER, Texts(TEXTS.tokens, mask), CONFIG, stop_after=5, log=log
    )
    assert all(np.isfinite(v) for values in log.values() for v in values.values())
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


# --- starts and ends


def fresh(pretrained, seed=7):
    shared = pretrained.target.shared(pretrained.params)
    return jax.jit(DRAFTER.init)(jax.random.key(seed), shared)


def test_a_warm_start_begins_from_what_is_given_and_leaves_it_whole(pretrained):
    start, log = testing.perturb(fresh(pretrained)), Log()
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), start)
    params = train(
        pretrained, DRAFTER, TEXTS, CONFIG, params=narrow, stop_after=1, log=log
    )
    # The rate starts at 0: the first step leaves the parameters, now in float32.
    same(params, jax.tree.map(lambda x: x.astype(jnp.float32), narrow))
    cold = Log()
    train(pretrained, DRAFTER, TEXTS, CONFIG, stop_after=1, log=cold)
    assert log[1]["loss"] != cold[1]["loss"]


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_loss_that_is_no_number_stops_before_it_is_saved(
    pretrained, tmp_path, log_every
):
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), fresh(pretrained))
    config = dataclasses.replace(CONFIG, log_every=log_every)
    run = functools.partial(train, pretrained, DRAFTER, TEXTS, config, folder=tmp_path)
    at = 1 if log_every == 1 else 3  # where a checkpoint would be saved
    with pytest.raises(FloatingPointError, match=rf"nan at step {at}; lower learn"):
        run(params=broken)
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("name", ["steps", "batch_size", "log_every", "save_every"])
def test_settings_are_checked(name):
    with pytest.raises(ValueError, match=f"{name} >= 1, got 0"):
        TrainConfig(**{name: 0})
    with pytest.raises(ValueError, match="learning_rate must be > 0"):
        TrainConfig(learning_rate=0.0)


def test_the_rate_rises_and_falls_as_the_settings_say():
    config = TrainConfig(steps=100, learning_rate=1.0, warmup=0.1, final=0.05)
    rates = [float(config.schedule()(s)) for s in (0, 5, 10, 55, 100)]
    np.testing.assert_allclose(rates, [0, 0.5, 1.0, 0.525, 0.05], atol=1e-3)


def test_expected_tau_is_the_mean_of_products_not_the_product_of_means():
    """C20: half of the drafts all right and half all wrong accept one token of two."""
    values = jnp.array([[1.0, 1.0], [0.0, 0.0]])
    logs = base.acceptance(values, jnp.ones((2, 2), bool))
    flat = training._scalars({k: np.asarray(v) for k, v in logs.items()})
    assert flat["tau"] == 2.0 and flat["alpha_1"] == flat["alpha_2"] == 0.5
    cut = base.acceptance(values, jnp.array([[True, False], [True, True]]))
    assert cut["survival"].tolist() == [0.5, 0.0]


def test_a_batch_with_nothing_to_learn_moves_nothing_and_is_counted(pretrained):
    """C19, from non-zero momentum."""
    drafter = Medusa(gamma=2, num_heads=2)
    config = TrainConfig(steps=8)
    shared = pretrained.target.shared(pretrained.params)
    params = drafter.init(jax.random.key(0), shared)
    state = config.optimiser().init(params)
    rows = np.arange(4)
    for step, empty in enumerate((False, False, True)):
        mask = TEXTS.mask[rows] & (not empty)
        batch = feature_cache.features(
            pretrained.target,
            drafter.taps,
            pretrained.params,
            jnp.asarray(TEXTS.tokens[rows]),
            jnp.asarray(mask),
        )
        before = jax.tree.map(np.array, (params, state))
        with jax.numpy_dtype_promotion("standard"):
            params, state, metrics = training.train_step(
                drafter, config, params, state, shared, batch, jax.random.key(step)
            )
        assert metrics["skipped"] == float(empty)
    same = jax.tree.map(np.array_equal, before, jax.tree.map(np.array, (params, state)))
    assert all(jax.tree.leaves(same))


def test_the_written_gradient_of_the_soft_loss_is_the_derived_one():
    """Also of rows whose p does not sum to 1, and of logits of any size."""
    rng = np.random.default_rng(0)
    z = jnp.asarray(rng.normal(0, [[[1.0]], [[100.0]]], (2, 3, 7)), jnp.float32)
    p = jnp.asarray(rng.uniform(0, 1, (2, 3, 7)), jnp.float32)
    plain = lambda z, p: -jnp.sum(p * jax.nn.log_softmax(z), axis=-1)
    for of in (plain, base.soft_cross_entropy):
        weighed = lambda z, p, of=of: jnp.sum(of(z, p) * jnp.arange(3.0)[None])
        found = of(z, p), *jax.grad(weighed, (0, 1))(z, p)
        if of is plain:
            right = found
    for a, b in zip(found, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_the_written_gradient_of_the_hard_loss_is_the_derived_one():
    rng = np.random.default_rng(0)
    z = jnp.asarray(rng.normal(0, [[[1.0]], [[100.0]]], (2, 3, 7)), jnp.float32)
    label = jnp.asarray(rng.integers(0, 7, (2, 3)))
    plain = lambda z, y: -jnp.sum(jax.nn.log_softmax(z) * jax.nn.one_hot(y, 7), -1)
    weighed = lambda z, of: jnp.sum(of(z, label) * jnp.arange(3.0)[None])
    found, right = (
        (of(z, label), jax.grad(weighed)(z, of)) for of in (base.cross_entropy, plain)
    )
    for a, b in zip(found, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mesh", [None, MeshShape(data=2, tensor=4)], ids=str)
@pytest.mark.parametrize("T", [6, 7, 8])
def test_a_few_places_at_a_time_give_what_all_give(T, mesh, monkeypatch):
    """On the mesh one row of 6 or 8 tokens is split by tokens, each part for itself."""
    x = jnp.arange(T * 3.0).reshape(1, T, 3)
    held = []

    def values(x, label):
        held.append(x.shape)
        return {"a": jnp.sin(x).sum(2) * label, "b": jnp.stack([label, -label], 2)}

    def run(x):
        label = jnp.arange(float(T))[None]
        out = base.few_places(values, 5, x, label)
        return jnp.sum(out["a"] ** 2), out

    grad = jax.value_and_grad(run, has_aux=True)
    right = grad(x)
    assert held.pop() == (1, T, 3)
    held.clear()
    monkeypatch.setattr(base, "SCORES", 10 if mesh is None else 2)
    with sharding.use(mesh and mesh.make()):
        found = jax.jit(grad)(x)
    most = 2 if mesh is None else 4
    assert held and all(shape[1] <= most for shape in held)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-5)
    jax.tree.map(close, found, right)
    assert "remat" in str(jax.make_jaxpr(grad)(x))  # what a part held is not kept
    held.clear()
    devices = 1 if mesh is None else mesh.size
    monkeypatch.setattr(base, "SCORES", T * 5 / devices)
    with sharding.use(mesh and mesh.make()):
        jax.eval_shape(run, x)
    assert held == [(1, T, 3)]  # they fit: no device holds more than its share


def test_heads_that_give_the_targets_laws_are_always_accepted(pretrained):
    args = pretrained.target, pretrained.params, DRAFTER, TEXTS, None, None
    batch = training._reader(*args)(np.arange(2))
    shared = pretrained.target.shared(pretrained.params)
    x = jnp.stack([base.shift(batch.hidden, k) for k in (1, 2)], axis=2)
    logits = lambda x: [shared.logits(x[:, :, i]) for i in (0, 1)]
    _, logs = base.head_losses(logits, x, shared, batch, 2)
    np.testing.assert_allclose(logs["alpha"], [1, 1], rtol=1e-6)


def test_the_scores_of_all_heads_count_as_held(pretrained, monkeypatch):
    seen = []
    few = lambda values, scores, *rows: seen.append(scores) or values(*rows)
    monkeypatch.setattr(base, "few_places", few)
    args = pretrained.target, pretrained.params, DRAFTER, TEXTS, None, None
    batch = training._reader(*args)(np.arange(2))
    shared = pretrained.target.shared(pretrained.params)
    jax.eval_shape(DRAFTER.loss, fresh(pretrained), shared, batch, jax.random.key(0))
    assert seen == [DRAFTER.num_heads * pretrained.target.config.vocab_size]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle", "dflash"])
def test_layers_computed_again_give_the_same_gradient(name):
    target, params = testing.tiny_target()
    drafter, weights = testing.tiny_drafter(name, target, params)
    tokens = jnp.asarray(np.arange(64).reshape(2, 32) % 20, jnp.int32)
    batch = feature_cache.features(target, drafter.taps, params, tokens, tokens >= 0)
    found = []
    for remat in (False, True):
        config = TrainConfig(remat=remat)
        copies = jax.tree.map(jnp.copy, (weights, config.optimiser().init(weights)))
        args = target.shared(params), batch, jax.random.key(1)
        step = functools.partial(training.train_step, drafter, config)
        assert ("remat" in str(jax.make_jaxpr(step)(*copies, *args))) == remat
        found.append(float(step(*copies, *args)[2]["grad_norm"]))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@dataclasses.dataclass(frozen=True)
class Drawn(Medusa):
    """Its loss is what its key draws."""

    def loss(self, params, shared, batch, key):
        loss, logs = super().loss(params, shared, batch, key)
        return 0 * loss + jax.random.uniform(key), logs


def test_each_step_has_a_key_and_each_seed_an_order_of_its_own(pretrained):
    log = Log()
    drawn = Drawn(gamma=2, num_heads=2, share_head=True)
    train(pretrained, drawn, TEXTS, CONFIG, stop_after=3, log=log)
    assert len({values["loss"] for values in log.values()}) == 3
    first, start = [], testing.perturb(fresh(pretrained))
    for seed in (0, 1):
        config = dataclasses.replace(CONFIG, seed=seed)
        train(pretrained, DRAFTER, TEXTS, config, params=start, stop_after=1, log=log)
        first.append(log[1]["loss"])
    assert first[0] != first[1]


def test_gradients_are_clipped_and_weights_decay():
    """Adam forgets the size of one gradient, not that of the ones before it."""

    def second(**fields):
        config = TrainConfig(steps=10, warmup=0.1, learning_rate=0.1, **fields)
        optimiser, params = config.optimiser(), jnp.ones(1)
        state = optimiser.init(params)
        for gradient in (1000.0, 1.0):
            updates, state = optimiser.update(jnp.full(1, gradient), state, params)
        return float(updates[0])

    assert second() == pytest.approx(-0.1, rel=1e-3)  # both are cut to 1
    assert second(grad_clip=1e9) == pytest.approx(-0.0685, rel=0.1)
    assert second(weight_decay=0.5) == pytest.approx(second() - 0.1 * 0.5, rel=1e-3)


def test_a_drafter_is_given_the_keys_and_values_it_reads(pretrained):
    class Reads(Medusa):
        kv_layers = (1,)

    drafter = Reads(gamma=2, num_heads=2)
    args = pretrained.target, pretrained.params, drafter, TEXTS, None, None
    ((k, v),) = training._reader(*args)(np.arange(2)).kv
    assert k.shape == v.shape == (2, 2, 16, 8)


def test_a_cache_is_read_by_the_rows_of_the_mesh():
    class Cache(feature_cache.FeatureCache):
        def batch(self, *args):
            return args

    cache = Cache(pathlib.Path(), np.dtype([]), 1)
    mesh = MeshShape().make(jax.devices()[:1])
    read = training._reader(None, None, DRAFTER, TEXTS, cache, mesh)
    rows = np.arange(2)
    assert read(rows) == (TEXTS, rows, mesh)
