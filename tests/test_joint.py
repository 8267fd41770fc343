"""Medusa-2 and what trains a drafter together with its target."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_medusa import CONFIG, TARGET, TEXT, fixture, medusa

from specjax import checkpoints, corpus, joint, testing, training
from specjax.drafters.base import Batch, Joint
from specjax.drafters.blockwise import Blockwise
from specjax.drafters.medusa2 import Medusa2
from specjax.targets.base import Pretrained
from specjax.targets.scanned import Scanned

__all__ = ["fixture"]


def learner(**fields):
    heads = medusa(**{n: fields.pop(n) for n in ("decay",) if n in fields})
    return joint.Learner(Medusa2.adapt(heads, CONFIG, None, **fields), TARGET)


HALF = learner(rank=4, heads_first=0.5)


@pytest.fixture(scope="module")
def parts(fixture):
    params, weights, out, _ = fixture
    shared = TARGET.shared(params)
    mask = jnp.arange(8)[None] >= 3
    batch = Batch(jnp.array([TEXT]), mask, out.features, out.hidden)
    low = joint.adapter(jax.random.key(0), params, 4)
    noisy = testing.perturb(low, scale=0.05)
    return params, shared, batch, weights | {joint.ADAPTER: low}, noisy


@functools.partial(jax.jit, static_argnums=0, compiler_options=testing.FAST)
def compute(one, *args):
    return jax.value_and_grad(one.loss, has_aux=True)(*args)


def run(one, parts, weights, progress=1.0):
    params, shared, batch, _, _ = parts
    context = joint.Context(shared, params, jnp.float32(progress))
    return compute(one, weights, context, batch, jax.random.key(0))


def test_the_loss_of_given_data_is_the_one_recorded(parts):
    """Numbers of axolotl 76bc572: lambda 0.2, decay 0.8, labels from the 4th token."""
    (value, logs), _ = run(learner(rank=4, distil=False), parts, parts[3])
    assert float(value) == pytest.approx(5.357473, abs=2e-4)
    assert float(0.2 * logs["heads"]) == pytest.approx(1.553757, abs=1e-4)
    assert float(logs["kl"]) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("schedule", "progress", "share"),
    [
        ("constant", 0.3, 1.0),
        ("linear", 0.3, 0.3),
        ("sine", 0.0, 0.0),
        ("sine", 1 / 3, 0.5),
        ("sine", 1.0, 1.0),
    ],
)
def test_the_weight_of_the_heads_follows_its_schedule(schedule, progress, share):
    ours = joint.ramp(schedule, jnp.float32(progress))
    np.testing.assert_allclose(ours, share, atol=1e-6)


@pytest.mark.slow
def test_self_distillation_is_the_kl_from_the_first_target(parts):
    """Against a transcription in NumPy, averaged over the tokens to learn alone."""
    params, _, batch, weights, noisy = parts
    weights = weights | {joint.ADAPTER: noisy}
    (value, logs), _ = run(HALF, parts, weights)
    moved = joint.merge(params, noisy, 16 / 4)
    laws = lambda w: np.asarray(
        jax.nn.log_softmax(TARGET.logits(w, TARGET(w, batch.tokens).hidden)), np.float64
    )[0]
    p, q = laws(params), laws(moved)
    kl = np.sum(np.exp(p) * (p - q), axis=1)
    right = kl[2:7].mean()  # these places have the labels 3 to 7
    assert right > 1e-3
    np.testing.assert_allclose([logs["own"], logs["kl"]], right, rtol=1e-3)
    np.testing.assert_allclose(value, logs["own"] + 0.2 * logs["heads"], rtol=1e-5)


def test_the_target_stays_while_only_the_heads_learn(parts):
    weights = parts[3] | {joint.ADAPTER: parts[4]}
    size = lambda g: sum(float(jnp.sum(jnp.abs(x))) for x in jax.tree.leaves(g))
    for progress, moves in ((0.0, False), (0.49, False), (0.5, True)):
        _, grads = run(HALF, parts, weights, progress)
        assert (size(grads[joint.ADAPTER]) > 0) == moves
        assert size(grads["u"]) > 0


def test_the_gradient_of_the_heads_reaches_the_target(parts):
    """Without eq. 2 too: what makes Medusa-2 more than Medusa-1."""
    _, grads = run(HALF, parts, parts[3])  # at B = 0 the KL has no gradient
    for pair in grads[joint.ADAPTER].values():
        assert np.any(pair["b"])


def test_an_adapter_is_added_to_every_matrix_of_the_layers_and_to_nothing_else(parts):
    params, _, _, _, noisy = parts
    moved = joint.merge(params, noisy, 2.0)
    for (path, before), after in zip(
        jax.tree_util.tree_leaves_with_path(params),
        jax.tree.leaves(moved),
        strict=True,
    ):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        right = before
        if name in noisy:
            right = before + 2.0 * noisy[name]["b"] @ noisy[name]["a"]
        np.testing.assert_allclose(after, right, atol=1e-6)
        in_layer = name.startswith("layer_") and before.ndim == 2
        assert (name in noisy) == in_layer


def test_the_target_learns_at_its_share_of_the_rate(parts):
    updates = {"u": jnp.ones(2), joint.ADAPTER: {"x": {"a": jnp.ones(2)}}}
    slow = learner(rank=4, target_rate=0.25).scale_updates(updates)
    assert slow["u"].tolist() == [1, 1]
    assert slow[joint.ADAPTER]["x"]["a"].tolist() == [0.25, 0.25]


DRAFTER = Medusa2(gamma=2, num_heads=2, heads_first=0.0, rank=4, head_weight=1.0)


def train(pretrained, texts, steps, **fields):
    drafter = dataclasses.replace(DRAFTER, **fields)
    config = training.TrainConfig(steps=steps, batch_size=8, learning_rate=1e-2)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        return training.train(pretrained, drafter, texts, config)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run of a tiny target, saved and read again."""
    target, params = testing.tiny_target(num_layers=2)
    pretrained = Pretrained("toy", target, params, None, ())
    rng = np.random.default_rng(0)
    texts = corpus.Texts(
        rng.integers(0, 24, (16, 12)).astype(np.int32), np.ones((16, 12), bool)
    )
    drafter, weights = DRAFTER, train(pretrained, texts, 12)
    folder = tmp_path_factory.mktemp("joint") / "drafter"
    checkpoints.save(folder, "medusa2", drafter, weights, dtype=jnp.float32)
    return pretrained, drafter, weights, folder, texts


def test_training_moves_the_target_and_a_file_keeps_it(trained):
    pretrained, drafter, weights, folder, texts = trained
    shared = pretrained.target.shared(pretrained.params)
    _, read, params = checkpoints.load(folder, shared)
    assert read == drafter
    for a, b in zip(jax.tree.leaves(weights), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)
    moved = joint.tuned(pretrained, read, params)
    assert moved.name == "toy (tuned)"
    there = joint.quality(pretrained, moved, texts)
    assert there["kl"] > 1e-4 and there["agreement"] < 1
    back = joint.quality(pretrained, pretrained, texts)
    assert back["kl"] == pytest.approx(0, abs=1e-6) and back["agreement"] == 1
    assert back["loss_before"] == back["loss_after"]


@pytest.mark.slow
def test_the_trainer_uses_the_targets_rate_and_its_share_of_the_steps(trained):
    """The first step has the rate 0, so the second alone moves, from one gradient."""
    pretrained, _, _, _, texts = trained
    moved = lambda **fields: [
        np.asarray(pair["b"])
        for pair in train(pretrained, texts, 2, **fields)[joint.ADAPTER].values()
    ]
    whole = moved(target_rate=1.0)
    for a, b in zip(whole, moved(target_rate=0.25), strict=True):
        assert np.any(a)
        np.testing.assert_allclose(b, a / 4, rtol=1e-4)
    assert not any(np.any(b) for b in moved(heads_first=0.6))


def test_quality_counts_the_tokens_to_learn_whatever_the_batch(trained):
    pretrained, drafter, weights, _, texts = trained
    moved = joint.tuned(pretrained, drafter, weights)
    mask = np.arange(12)[None] >= np.arange(16)[:, None] % 7
    some = dataclasses.replace(texts, mask=mask)
    a, b = (joint.quality(pretrained, moved, some, size) for size in (16, 5))
    assert a == pytest.approx(b, rel=1e-5)


def test_another_target_refuses_the_adapter(trained):
    pretrained, drafter, weights, _, _ = trained
    target, params = testing.tiny_target(num_layers=3)
    other = dataclasses.replace(pretrained, target=target, params=params)
    stacked = dataclasses.replace(other, params=Scanned(target).stack(params))
    for wrong in (other, stacked):
        with pytest.raises(ValueError, match=r"has 4 matrices, .* 6"):
            joint.check(wrong, weights)
    right = Scanned(pretrained.target).stack(pretrained.params)
    joint.check(dataclasses.replace(pretrained, params=right), weights)
    with pytest.raises(ValueError, match="together with another target"):
        joint.tuned(other, drafter, weights)
    plain = medusa()
    assert joint.tuned(other, plain, weights) is other


def test_blockwise_may_train_its_target_too():
    assert Blockwise(hidden_width=8).joint is None
    settings = Blockwise(hidden_width=8, tune_target=True).joint
    assert settings is not None and settings.head_weight == 1.0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rank": 0}, "rank >= 1, got 0"),
        ({"heads_first": 1.5}, "share of the steps, got 1.5"),
        ({"head_weight": 0.0}, "head_weight > 0, got 0.0"),
        ({"target_rate": -1.0}, "target_rate > 0"),
    ],
)
def test_bad_settings_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        Joint(**fields)
    with pytest.raises(ValueError, match=says):
        Medusa2(**fields)


@pytest.mark.slow
def test_the_loss_has_the_heads_by_the_schedule_and_judges_them_by_the_moved_target(
    parts,
):
    params, shared, batch, weights, noisy = parts
    one = learner(rank=4, schedule="sine", heads_first=0.0)
    weights = weights | {joint.ADAPTER: noisy}
    context = joint.Context(shared, params, jnp.float32(1 / 3))
    loss = jax.jit(one.loss, compiler_options=testing.FAST)
    value, logs = loss(weights, context, batch, jax.random.key(0))
    heads = 0.1 * float(logs["heads"])
    assert float(value - logs["own"]) == pytest.approx(heads, rel=1e-4)

    @functools.partial(jax.jit, compiler_options=testing.FAST)
    def alpha(params):
        out = TARGET(params, batch.tokens, taps=(-1,))
        there = dataclasses.replace(batch, features=out.features, hidden=out.hidden)
        return one.drafter.loss(weights, shared, there, jax.random.key(0))[1]["alpha"]

    moved = joint.merge(params, noisy, 16 / 4)
    np.testing.assert_allclose(logs["alpha"], alpha(moved), atol=1e-5)
    assert np.abs(logs["alpha"] - alpha(params)).max() > 1e-3


def test_an_adapter_starts_small_by_the_width_it_reads():
    params = {"layer_0": {"wide": jnp.zeros((2, 400)), "thin": jnp.zeros((400, 4))}}
    low = joint.adapter(jax.random.key(0), params, 8)
    for name, limit in (("wide", 0.05), ("thin", 0.5)):
        pair = low[f"layer_0/{name}"]
        assert limit * 0.8 < float(jnp.max(jnp.abs(pair["a"]))) <= limit
        assert not np.any(pair["b"])


def test_quality_of_a_first_token_is_none(trained):
    """Nothing predicts it: with no other token to learn there is nothing to count."""
    pretrained, drafter, weights, _, texts = trained
    moved = joint.tuned(pretrained, drafter, weights)
    first = dataclasses.replace(texts, mask=np.arange(12)[None] == np.zeros((16, 1)))
    assert set(joint.quality(pretrained, moved, first, 16).values()) == {0.0}
