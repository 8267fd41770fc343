"""The trainer: resumed = straight, checkpoints, the feature cache, nothing to learn."""

import dataclasses
import functools
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from specjax import feature_cache, targets, testing, training
from specjax.corpus import Texts
from specjax.drafters import base
from specjax.drafters.medusa import Medusa
from specjax.sharding import MeshShape
from specjax.training import TrainConfig, train

DRAFTER = Medusa(gamma=2, num_heads=2, share_head=True)
# 10 texts in batches of 2: an epoch ends at step 5.
CONFIG = TrainConfig(steps=10, batch_size=2, log_every=1, save_every=3)
LEARNED = slice(3, 14)  # of 16 tokens


@pytest.fixture(scope="module", autouse=True)
def promotion():
    """AdamW of optax raises a float to an integer count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def pretrained():
    target, params = testing.tiny_target(num_layers=2)
    return targets.Pretrained("toy", target, params, None, ())


def make_texts(seed=0, rows=10):
    tokens = np.random.default_rng(seed).integers(0, 24, (rows, 16), np.int32)
    mask = np.zeros(tokens.shape, bool)
    mask[:, LEARNED] = True
    return Texts(tokens, mask)


TEXTS = make_texts()


class Log(dict):
    """Metrics by step; seconds left out."""

    def __call__(self, step, values):
        assert values.pop("tokens_per_s") >= 0
        self[step] = values


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def straight(pretrained, tmp_path_factory):
    """Ten steps at one go: folder, parameters, metrics."""
    folder, log = tmp_path_factory.mktemp("straight"), Log()
    params = train(pretrained, DRAFTER, TEXTS, CONFIG, folder=folder, log=log)
    return folder, params, log


def steps(folder):
    return sorted(int(p.name) for p in (folder / "checkpoints").iterdir())


def state_at_the_end(folder, params):
    """Parameters and optimiser state of the last checkpoint."""
    keeper = training.Checkpoints(folder / "checkpoints", {})
    state = CONFIG.optimiser().init(params)
    tree = {"params": params, "state": state}
    args = keeper.ocp.args.StandardRestore(tree)
    found = keeper._read(CONFIG.steps, tree=args)["tree"]
    keeper.close()
    return found


def test_a_run_logs_every_step_and_keeps_two_checkpoints(straight):
    folder, _, log = straight
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
    assert steps(folder) == [9, 10]


@pytest.mark.parametrize("stop", [4, 5])  # within an epoch, at its end
def test_a_resumed_run_is_the_straight_one_bit_by_bit(
    pretrained, straight, tmp_path, stop
):
    log = Log()
    run = functools.partial(train, pretrained, DRAFTER, TEXTS, CONFIG, folder=tmp_path)
    run(log=log, stop_after=stop)
    assert list(log) == list(range(1, stop + 1))
    params = run(log=log)
    folder, expected, metrics = straight
    assert log == metrics  # each step once, the same numbers
    same(params, expected)
    same(state_at_the_end(tmp_path, params), state_at_the_end(folder, params))


def copy(straight, tmp_path):
    shutil.copytree(straight[0], tmp_path / "run")
    return tmp_path / "run"


def test_a_finished_run_goes_on_by_nothing(pretrained, straight, tmp_path):
    log, folder = Log(), copy(straight, tmp_path)
    params = train(pretrained, DRAFTER, TEXTS, CONFIG, folder=folder, log=log)
    assert log == {}
    same(params, straight[1])


def test_a_run_of_another_net_is_no_damaged_file(pretrained, straight, tmp_path):
    """The fields are the same, the code has changed."""
    folder, start = copy(straight, tmp_path), straight[1]
    wider = jax.tree.map(lambda x: jnp.pad(x, [(0, 1)] * x.ndim), start)
    with pytest.raises(ValueError, match="other settings"):
        train(pretrained, DRAFTER, TEXTS, CONFIG, folder=folder, params=wider)


def test_a_killed_save_leaves_the_one_before(pretrained, straight, tmp_path):
    """Checkpoint 10 was being written: a temporary folder, no final one."""
    folder, log = copy(straight, tmp_path), Log()
    kept = folder / "checkpoints"
    (kept / "10").rename(kept / "10.orbax-checkpoint-tmp")
    for path in (kept / "10.orbax-checkpoint-tmp").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    params = train(pretrained, DRAFTER, TEXTS, CONFIG, folder=folder, log=log)
    assert list(log) == [10]
    same(params, straight[1])


def empty(path: pathlib.Path):
    for file in path.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE = {
    "everything cut in half": lambda step: empty(step),
    "the arrays cut in half": lambda step: empty(step / "tree"),
    "the arrays gone": lambda step: shutil.rmtree(step / "tree"),
    "the settings gone": lambda step: shutil.rmtree(step / "about"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_says_what_to_delete(
    pretrained, straight, tmp_path, damage
):
    folder, log = copy(straight, tmp_path), Log()
    newest = folder / "checkpoints" / "10"
    DAMAGE[damage](newest)
    run = functools.partial(train, pretrained, DRAFTER, TEXTS, CONFIG, folder=folder)
    with pytest.raises(ValueError, match=r"checkpoints/10 is damaged.*delete") as error:
        run()
    assert "\n" not in str(error.value)
    shutil.rmtree(newest)
    same(run(log=log), straight[1])
    assert list(log) == [10]


@pytest.mark.parametrize(
    ("changed", "named"),
    [(n, n) for n in ("config", "texts", "fields", "target", "weights")]
    + [("mask", "texts")],
)
def test_other_settings_are_refused_by_their_name(
    pretrained, straight, tmp_path, changed, named
):
    other = jax.tree.map(lambda x: x * 1.01, pretrained.params)
    arguments = (
        dict(pretrained=pretrained, drafter=DRAFTER, texts=TEXTS, config=CONFIG)
        | {
            "config": dict(config=dataclasses.replace(CONFIG, learning_rate=1e-4)),
            "texts": dict(texts=make_texts(seed=1)),
            "fields": dict(drafter=dataclasses.replace(DRAFTER, decay=0.5)),
            "target": dict(pretrained=dataclasses.replace(pretrained, name="other")),
            "weights": dict(pretrained=dataclasses.replace(pretrained, params=other)),
            "mask": dict(texts=Texts(TEXTS.tokens, ~TEXTS.mask)),
        }[changed]
    )
    with pytest.raises(ValueError, match=rf"step 10 .*other settings.*{named}"):
        train(**arguments, folder=copy(straight, tmp_path))


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
    assert steps(tmp_path) == []


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


# --- the feature cache


def build(folder, pretrained, taps=(-1,), texts=TEXTS, **options):
    return feature_cache.cache_features(folder, pretrained, taps, texts, **options)


def test_cached_features_are_those_computed_on_the_fly(pretrained, tmp_path):
    taps, done = (1, -1), []
    cache = build(tmp_path / "c", pretrained, taps, batch_size=4, progress=done.append)
    assert done == [4, 8, 10]  # the last batch is not full
    run = jax.jit(functools.partial(feature_cache.features, pretrained.target, taps))
    live = run(pretrained.params, TEXTS.tokens, TEXTS.mask)
    rows = np.array([9, 0, 3, 8, 9])  # any order, repeats too
    batch = cache.batch(TEXTS, rows)
    np.testing.assert_array_equal(batch.tokens, TEXTS.tokens[rows])
    pairs = ((batch.features, live.features), (batch.hidden, live.hidden))
    for found, full in pairs:
        found, wanted = np.asarray(found), np.asarray(full)[rows]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, rtol=2**-8, atol=1e-5)
        distances = np.abs(found[:, None] - np.asarray(full)[None]).sum((2, 3))
        np.testing.assert_array_equal(distances.argmin(1), rows)
        rounded = found.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(found, rounded)
    again = build(tmp_path / "c", pretrained, taps)
    np.testing.assert_array_equal(again.features, cache.features)


def test_cached_keys_and_values_are_those_of_their_layer_and_row(pretrained, tmp_path):
    layers, rows = {"kv_layers": (0, 1)}, np.array([9, 0])
    cache = build(tmp_path / "c", pretrained, **layers)
    run = functools.partial(feature_cache.features, pretrained.target, (-1,), **layers)
    live = jax.jit(run)(pretrained.params, TEXTS.tokens, TEXTS.mask)
    empty = pretrained.target.init_cache(len(TEXTS), 16)
    own = jax.jit(pretrained.target)(pretrained.params, TEXTS.tokens, empty).cache
    same(live.kv, tuple(zip(own.k, own.v, strict=True)))
    again = build(tmp_path / "c", pretrained, **layers)
    for stored in (cache, again):
        found = stored.batch(TEXTS, rows).kv
        right = jax.tree.map(lambda x: x[rows], live.kv)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
            np.testing.assert_allclose(a, b, rtol=2**-8, atol=1e-5)
    with pytest.raises(ValueError, match="is no feature cache of these texts"):
        build(tmp_path / "c", pretrained, kv_layers=(1, 0))


def test_training_from_the_cache_follows_training_without(
    pretrained, straight, tmp_path
):
    log = Log()
    cache = build(tmp_path / "c", pretrained)
    train(pretrained, DRAFTER, TEXTS, CONFIG, cache=cache, log=log)
    for step, values in straight[2].items():
        for name, value in values.items():
            assert log[step][name] == pytest.approx(value, rel=0.05, abs=0.02)


@pytest.mark.parametrize("foreign", ["texts", "taps", "weights", "name"])
def test_a_cache_of_something_else_is_refused(pretrained, tmp_path, foreign):
    build(tmp_path / "c", pretrained)
    other = jax.tree.map(lambda x: x * 1.01, pretrained.params)
    arguments = (
        dict(pretrained=pretrained, taps=(-1,), texts=TEXTS)
        | {
            "texts": dict(texts=make_texts(seed=1)),
            "taps": dict(taps=(1,)),
            "weights": dict(pretrained=dataclasses.replace(pretrained, params=other)),
            "name": dict(pretrained=dataclasses.replace(pretrained, name="other")),
        }[foreign]
    )
    with pytest.raises(ValueError, match="is no feature cache of these texts"):
        build(tmp_path / "c", **arguments)


def cut(path, keep):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


@pytest.mark.parametrize("file", ["features.npy", "hidden.npy", "manifest.json"])
@pytest.mark.parametrize("keep", [0.0, 0.9, None])
def test_a_damaged_cache_is_refused_in_one_line(pretrained, tmp_path, file, keep):
    build(tmp_path / "c", pretrained)
    path = tmp_path / "c" / file
    path.unlink() if keep is None else cut(path, keep)
    with pytest.raises(ValueError, match=r"damaged|no feature cache") as error:
        build(tmp_path / "c", pretrained)
    assert "\n" not in str(error.value)
    assert "delete it" in str(error.value)


def test_a_killed_build_is_built_again(pretrained, tmp_path):
    def killed(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "c", pretrained, progress=killed)
    assert not (tmp_path / "c").exists()
    build(tmp_path / "c", pretrained)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


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


@pytest.mark.parametrize("name", ["eagle3", "dflash", "pard"])
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

    cache, mesh = Cache(np.zeros(1), np.zeros(1)), MeshShape().make(jax.devices()[:1])
    read = training._reader(None, None, DRAFTER, TEXTS, cache, mesh)
    rows = np.arange(2)
    assert read(rows) == (TEXTS, rows, mesh)
