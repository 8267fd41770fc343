"""PARD-2 against the numbers that its authors' code gave on closed-form weights.

The models are those of `test_draft_model`; the last two states of the target are read.
"""

import dataclasses
import functools
from unittest import mock

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_draft_model import CONFIG, GREEDY_TEXT, PROMPT, tensors

from specjax.drafters.base import Batch
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.parallel import Rows
from specjax.drafters.pard import Pard
from specjax.drafters.pard2 import Pard2
from specjax.generate import Model, Weights, generate
from specjax.sampling import GREEDY, Sampling
from specjax.targets.llama import Llama
from specjax.transformer import Shared

MASK = 31
TEXT = [3, 7, 1, 9, 5, 27, 29]
DRAFTED = [  # logits of ids 0 to 3 behind the prompt: the anchor's row, two masks'
    (-1.242916, -0.477086, 0.502893, 1.257139),
    (1.257458, 0.049128, -1.181254, -1.881408),
    (1.165134, -0.042142, -1.230501, -1.866528),
]


def drafter_of(**fields):
    fields = {"gamma": 3, "blocks": 3, "rate": 1.0, "gate": 0.0} | fields
    return Pard2(CONFIG, MASK, target_states=(-1, -2), **fields)


@functools.cache
def weights():
    params = golden.to_jax(tensors(0.02))
    projection = jnp.asarray(golden.waves(200, (8, 16)), jnp.float32)
    return {**params, "projection": projection}


@functools.cache
def target_weights():
    return golden.to_jax(tensors(0.0))


@functools.cache
def batch_of(rows=1):
    tokens = jnp.asarray([TEXT] * rows, jnp.int32)
    out = jax.jit(functools.partial(Llama(CONFIG), taps=(-1, -2)))(
        target_weights(), tokens
    )
    return Batch(tokens, jnp.ones(tokens.shape, bool), out.features, out.hidden)


@functools.partial(jax.jit, static_argnums=0)
def loss(drafter, params, batch, seed=0):
    shared = Llama(CONFIG).shared(target_weights())
    return drafter.loss(params, shared, batch, jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=0)
def draft_after(drafter, params, features):
    """Drafted behind the prompt, whose last token is the anchor."""
    shared = Llama(CONFIG).shared(target_weights())
    args = jnp.array([PROMPT[:3]]), jnp.array([3]), features, 16
    state = drafter.prefill(params, shared, *args)
    keys = jax.random.split(jax.random.key(0), 1)
    args = shared, state, jnp.array([PROMPT[3]]), Sampling(), keys
    return drafter.draft(params, *args)[0].probs


def test_a_draft_with_features_is_the_recorded_pass():
    """Of the first token there is no feature, and it is not dropped for that."""
    probs = draft_after(drafter_of(), weights(), batch_of().features[:, :3])[0]
    assert jnp.argmax(probs, -1).tolist() == [13, 8, 17]
    difference = np.log(probs[:, :4]) - np.array(DRAFTED)
    np.testing.assert_allclose(difference - difference[:, :1], 0, atol=3e-5)


@pytest.mark.parametrize(
    ("use_features", "accepted"),
    [
        (True, [1, 1, 1, 1, 1, 2, 2]),
        pytest.param(False, [1, 0, 1, 1, 1, 1, 1, 2], marks=pytest.mark.slow),
    ],
)
def test_accepted_counts_are_those_recorded_with_features_and_without(
    use_features, accepted
):
    drafter = drafter_of(use_features=use_features)
    model = Model(Llama(CONFIG), drafter, GREEDY)
    run = generate(
        model, Weights(target_weights(), weights()), [PROMPT], max_new_tokens=16
    )
    assert run.tokens[0] == GREEDY_TEXT
    assert run.trace.num_accepted.tolist() == [accepted]


def test_without_features_and_with_a_scale_of_zero_it_is_pard():
    params = {k: v for k, v in weights().items() if k != "projection"}
    nothing = jnp.zeros((1, 3, 0))
    right = draft_after(Pard(CONFIG, MASK, gamma=3), params, nothing)
    ours = draft_after(drafter_of(use_features=False), weights(), nothing)
    np.testing.assert_array_equal(ours, right)
    ours = draft_after(drafter_of(scale=0.0), weights(), batch_of().features[:, :3])
    np.testing.assert_allclose(ours, right, atol=1e-6)


def test_the_loss_is_that_recorded():
    total, logs = loss(drafter_of(), weights(), batch_of())
    assert float(logs["ce"]) == pytest.approx(3.333413, abs=2e-5)
    assert float(logs["kd"]) == pytest.approx(0.082785, abs=2e-5)
    assert float(total) == pytest.approx(0.416126, abs=2e-5)


def test_a_row_weighs_what_the_target_gives_the_tokens_behind_its_masks():
    """The published table: rows by label, g = 1, .9, .8, .7, .6."""
    g = np.array([1, 0.9, 0.8, 0.7, 0.6])
    # A target of two ids that says so: the text is all id 1.
    hidden = np.stack([np.zeros(4), np.log(g[1:] / (1 - g[1:]))], axis=-1)
    hidden = jnp.asarray(np.pad(hidden, ((0, 1), (0, 0)))[None], jnp.float32)
    shared = Shared(embed=jnp.eye(2), head=jnp.eye(2))
    tokens = jnp.ones((1, 5), jnp.int32)
    batch = Batch(tokens, tokens > 0, hidden, hidden)
    label, depth = np.array([(j, b) for b in range(4) for j in range(1, 5)]).T
    rows = Rows(*(jnp.asarray(x)[None] for x in (label - 1 - depth, depth)))
    real = np.asarray(label - 1 - depth >= -1)
    ours = np.asarray(drafter_of(blocks=4).confidence(shared, batch, rows))[0]
    right = [1, 1, 1, 1, 1, 0.9, 0.8, 0.7, 1, 0.9, 0.72, 0.56, 1, 0.9, 0.72, 0.504]
    np.testing.assert_allclose(ours[real], np.array(right)[real], atol=1e-6)


def test_the_weights_of_the_text_are_those_recorded():
    """g of each token, by the rows with one mask before their label, and the sum."""
    drafter, batch = drafter_of(), batch_of()
    shared = Llama(CONFIG).shared(target_weights())
    anchor = jnp.arange(-1, 6)[None]
    g = drafter.confidence(shared, batch, Rows(anchor, jnp.ones_like(anchor)))[0]
    right = [1, 0.028445, 0.052551, 0.016255, 0.075174, 0.100720, 0.017899]
    np.testing.assert_allclose(g, right, atol=2e-6)
    rows = drafter.rows(jax.random.key(0), batch.mask)
    weights = drafter.confidence(shared, batch, rows)
    wanted = rows.read(batch.mask, rows.position + 1)
    assert float(jnp.sum(weights, where=wanted)) == pytest.approx(7.312733, abs=1e-5)


def test_a_text_loses_its_features_all_at_once_and_as_often_as_asked():
    """Half of 32 equal texts: the loss is the mean of the two modes' losses, mixed."""
    drafter, batch = drafter_of(gate=0.5), batch_of(32)
    seen = dataclasses.replace(drafter, gate=0.0)
    hidden = dataclasses.replace(batch, features=jnp.zeros_like(batch.features))
    both = [float(loss(seen, weights(), b)[1]["kd"]) for b in (batch, hidden)]
    look = lambda *args: {"judged": args[-1].features}
    with mock.patch.object(Pard2, "judge", look):
        logs = loss(drafter, weights(), batch)[1]
    mixed = float(logs["kd"])
    share = (mixed - both[0]) / (both[1] - both[0])
    assert share * 32 == pytest.approx(round(share * 32), abs=0.02)  # whole texts
    assert 6 <= round(share * 32) <= 26
    np.testing.assert_array_equal(logs["judged"], batch.features)  # as it drafts


def test_states_are_spread_over_the_target_as_published():
    model = DraftModel(CONFIG)
    states = lambda n: (
        Pard2.adapt(model, dataclasses.replace(CONFIG, num_layers=n), MASK).taps
    )
    assert states(32) == (-1, -8, -16, -24)
    assert states(8) == (-1, -2, -4, -6)
    assert states(2) == (-1, -2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_states": ()}, r"from the last one, -1, down; got \(\)"),
        ({"target_states": (3,)}, r"down; got \(3,\)"),
        ({"gate": 1.0}, "0 <= gate < 1, got 1.0"),
        ({"w_kd": -1.0}, "w_kd >= 0, got -1.0"),
        ({"blocks": 0}, "pard2 needs blocks >= 1"),
    ],
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(drafter_of(), **fields)
