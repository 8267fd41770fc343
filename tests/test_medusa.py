"""Medusa-1 against numbers recorded from the reference code, and a transcription."""

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters.base import Batch
from specjax.drafters.medusa import Medusa
from specjax.sampling import GREEDY
from specjax.targets.llama import Llama
from specjax.transformer import TransformerConfig
from specjax.tree import Tree

TEXT = [3, 7, 1, 9, 4, 5, 11, 2]
CONFIG = TransformerConfig(
    vocab_size=32,
    width=24,
    num_layers=7,
    num_heads=4,
    num_kv_heads=2,
    head_width=6,
    mlp_width=32,
    norm_eps=1e-5,
)
TARGET = Llama(CONFIG)
FORMULA = {"factor": 0.3, "quadratic": 0.3}
LAST_LOGITS = [
    (0.808368, -1.024391, 0.188887, -0.314320),
    (0.742144, 0.759662, 0.605253, -0.543797),
    (0.764136, -1.317787, 0.756789, 0.191156),
]


@pytest.fixture(scope="module")
def fixture():
    tensors = golden.llama(golden.counted(0, delta=1.25, **FORMULA), CONFIG)
    tensor = golden.counted(300, **FORMULA)
    heads = [
        [tensor("", shape) for shape in ((24, 24), (24,), (32, 24))] for _ in range(3)
    ]
    w, b, u = (np.stack(x) for x in zip(*heads, strict=True))
    weights = golden.to_jax({"w": w, "b": b, "u": u})
    params = golden.to_jax(tensors)
    out = jax.jit(lambda p, t: TARGET(p, t, taps=(-1,)))(params, jnp.array([TEXT]))
    return params, weights, out, (w, b, u)


def medusa(**fields):
    return Medusa.for_target(CONFIG, None, **{"gamma": 3} | fields)


def loss(fixture, drafter, mask):
    params, weights, out, _ = fixture
    batch = Batch(jnp.array([TEXT]), mask, out.features, out.hidden)
    return jax.jit(drafter.loss)(
        weights, TARGET.shared(params), batch, jax.random.key(0)
    )


def test_the_target_of_the_fixture_is_the_one_recorded(fixture):
    params, _, out, _ = fixture
    logits = TARGET.logits(params, out.hidden)[0]
    right = [-0.148348, 1.291171, -0.430536, -0.000515]
    np.testing.assert_allclose(logits[-1, :4], right, atol=5e-5)
    assert np.argmax(logits, axis=1).tolist() == [5, 5] + [17] * 6
    right = [1.149918, 1.339197, -1.060132, 0.193980]
    np.testing.assert_allclose(out.features[0, -1, :4], right, atol=5e-5)


def test_logits_are_those_recorded(fixture):
    params, weights, out, _ = fixture
    logits = medusa().logits(weights, TARGET.shared(params), out.features, 3)[0]
    np.testing.assert_allclose(logits[-1, :, :4], LAST_LOGITS, atol=5e-5)
    assert float(jnp.sum(jnp.abs(logits))) == pytest.approx(730.717844, abs=5e-3)


def test_heads_equal_their_transcription(fixture):
    params, weights, out, (w, b, u) = fixture
    ours = medusa().logits(weights, TARGET.shared(params), out.features, 3)[0]
    for f, row in zip(np.asarray(out.features[0], np.float64), ours, strict=True):
        for k in range(3):
            z = f + golden.silu(w[k] @ f + b[k])
            np.testing.assert_allclose(row[k], u[k] @ z, atol=5e-5)


@pytest.mark.parametrize(("decay", "right"), [(0.8, 7.768786), (1.0, 11.918841)])
def test_losses_are_those_recorded(fixture, decay, right):
    """Labels are all ids but the first three; the paper's weights, and none."""
    value, logs = loss(fixture, medusa(decay=decay), jnp.arange(8)[None] >= 3)
    np.testing.assert_allclose(logs["ce"], [4.445342, 3.016257, 4.457242], atol=5e-5)
    assert float(value) == pytest.approx(right, abs=2e-4)


def test_a_head_never_learns_the_token_before_its_own(fixture):
    """Head k is scored on x_{t+1+k}: with one label left only that cell counts."""
    _, logs = loss(fixture, medusa(), jnp.arange(8)[None] == 2)
    logits = medusa().logits(
        fixture[1], TARGET.shared(fixture[0]), fixture[2].features, 3
    )[0]
    log_q = jax.nn.log_softmax(logits)
    right = [-log_q[0, 0, TEXT[2]], 0, 0]  # head 2 would need position -1
    np.testing.assert_allclose(logs["ce"], right, atol=1e-5)


def test_the_draft_is_the_heads_best_after_the_last_token(fixture):
    params, weights, out, (w, b, u) = fixture
    shared, keys = TARGET.shared(params), jax.random.split(jax.random.key(0), 1)
    state = medusa().prefill(
        weights, shared, jnp.array([TEXT]), jnp.array([8]), out.features, 16
    )
    draft, _ = medusa().draft(weights, shared, state, jnp.array([17]), GREEDY, keys)
    assert draft.tokens[0, 0] == 16  # as in the recorded tree, below
    f = np.asarray(out.features[0, -1], np.float64)
    best = [np.argmax(u[k] @ (f + golden.silu(w[k] @ f + b[k]))) for k in range(3)]
    assert draft.tokens[0].tolist() == best


def test_the_tree_is_the_one_recorded(fixture):
    """Two guesses of the first head, two of the second behind the better one."""
    params, weights, out, _ = fixture
    shared, keys = TARGET.shared(params), jax.random.split(jax.random.key(0), 1)
    drafter = medusa(topology=Tree((-1, 0, 0, 1, 1)))
    args = jnp.array([TEXT]), jnp.array([8]), out.features, 16
    state = drafter.prefill(weights, shared, *args)
    args = shared, state, jnp.array([17]), GREEDY, keys
    draft, _ = drafter.draft(weights, *args)
    assert draft.tokens.tolist() == [[16, 27, 17, 31]]


def test_heads_start_as_the_targets_head_but_for_the_bias(fixture):
    params, _, out, _ = fixture
    shared = TARGET.shared(params)
    weights = medusa().init(jax.random.key(0), shared)
    assert not np.any(weights["w"])
    assert np.all(np.abs(weights["b"]) <= 24**-0.5) and np.any(weights["b"])
    for u in weights["u"]:
        np.testing.assert_array_equal(u, shared.head)
    no_bias = weights | {"b": jnp.zeros_like(weights["b"])}
    logits = medusa().logits(no_bias, shared, out.features, 3)
    right = shared.logits(out.features)
    np.testing.assert_allclose(logits[:, :, 1], right, atol=2e-5)


def test_a_shared_head_is_the_targets_and_is_not_trained(fixture):
    shared = TARGET.shared(fixture[0])
    weights = medusa(share_head=True).init(jax.random.key(0), shared)
    assert set(weights) == {"w", "b"}


@pytest.mark.parametrize("fields", [{"gamma": 0}, {"decay": 0.0}, {"decay": 1.5}])
def test_bad_settings_are_refused(fields):
    with pytest.raises(ValueError, match="medusa needs"):
        Medusa(**fields)
