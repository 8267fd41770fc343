"""Blockwise parallel decoding: a transcription, the residual, the drawn sub-loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import testing
from specjax.drafters import base
from specjax.drafters.base import Batch
from specjax.drafters.blockwise import Blockwise
from specjax.sampling import GREEDY

TEXT = [3, 7, 1, 9, 4, 5, 11, 2]


@pytest.fixture(scope="module")
def kit():
    target, params = testing.tiny_target()
    drafter, weights = testing.tiny_drafter("blockwise", target, params, gamma=3)
    out = jax.jit(lambda p, t: target(p, t, taps=(-1,)))(params, jnp.array([TEXT]))
    return target.shared(params), drafter, weights, out


def batch_of(out, mask):
    return Batch(jnp.array([TEXT]), mask, out.features, out.hidden)


def test_states_equal_their_transcription(kit):
    """Eq. 1: one block of all slices, each added to its input."""
    _, drafter, weights, out = kit
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), testing.perturb(weights))
    F, D = drafter.hidden_width, 16
    assert w["w1"].shape == (3 * F, D) and w["w2"].shape == (3 * D, 3 * F)
    ours = drafter.states(testing.perturb(weights), out.features)[0]
    for f, rows in zip(np.asarray(out.features[0], np.float64), ours, strict=True):
        y = w["w2"] @ np.maximum(w["w1"] @ f + w["b1"], 0) + w["b2"]
        for j in range(3):
            np.testing.assert_allclose(rows[j], f + y[j * D : j * D + D], atol=1e-4)


def test_without_the_block_every_head_says_what_the_target_says(kit):
    shared, drafter, weights, out = kit
    assert not np.any(weights["w2"]) and np.any(weights["w1"])
    logits = shared.logits(drafter.states(weights, out.features))
    for j in range(3):
        np.testing.assert_allclose(
            logits[:, :, j], shared.logits(out.features), atol=1e-5
        )


def test_the_draft_is_each_slices_best_after_the_last_token(kit):
    shared, drafter, weights, out = kit
    weights = testing.perturb(weights)
    args = jnp.array([TEXT]), jnp.array([8]), out.features, 16
    state = drafter.prefill(weights, shared, *args)
    keys = jax.random.split(jax.random.key(0), 1)
    draft, _ = drafter.draft(weights, shared, state, jnp.array([1]), GREEDY, keys)
    best = jnp.argmax(shared.logits(drafter.states(weights, out.features[:, -1])), -1)
    np.testing.assert_array_equal(draft.tokens, best)


def test_one_sub_loss_is_drawn_and_their_mean_is_the_mean_loss(kit):
    """Over many keys exactly the losses of the heads come up, each equally often."""
    shared, drafter, weights, out = kit
    weights, mask = testing.perturb(weights), jnp.arange(8)[None] >= 3
    batch = batch_of(out, mask)
    one = jax.jit(drafter.loss)
    drawn = [
        float(one(weights, shared, batch, jax.random.key(i))[0]) for i in range(48)
    ]
    _, logs = one(weights, shared, batch, jax.random.key(0))
    counts = [sum(abs(x - float(c)) < 1e-5 for x in drawn) for c in logs["ce"]]
    assert sum(counts) == 48 and min(counts) >= 6
    every = dataclasses.replace(drafter, one_loss=False)
    whole, _ = every.loss(weights, shared, batch, jax.random.key(0))
    np.testing.assert_allclose(whole, jnp.mean(logs["ce"]), rtol=1e-6)


def test_a_slice_learns_the_token_that_it_guesses(kit):
    """With one label left, at position 5, slice j is scored at position 5 - (1 + j)."""
    shared, drafter, weights, out = kit
    weights = testing.perturb(weights)
    batch = batch_of(out, jnp.arange(8)[None] == 5)
    _, logs = drafter.loss(weights, shared, batch, jax.random.key(0))
    logits = shared.logits(drafter.states(weights, out.features))[0]
    right = [base.cross_entropy(logits[5 - j - 2, j], jnp.asarray(5)) for j in range(3)]
    np.testing.assert_allclose(logs["ce"], right, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"gamma": 0}, "gamma >= 1, got 0"),
        ({"hidden_width": 0}, "hidden_width >= 1"),
        ({"num_slices": 3}, "num_slices=3"),
    ],
)
def test_bad_settings_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        Blockwise(**{"hidden_width": 8} | fields)


def test_slices_beyond_the_draft_learn_too(kit):
    shared, drafter, weights, out = kit
    weights, batch = testing.perturb(weights), batch_of(out, jnp.arange(8)[None] >= 3)
    short = dataclasses.replace(drafter, gamma=1)
    one = jax.jit(lambda key: short.loss(weights, shared, batch, key))
    found = [one(jax.random.key(i)) for i in range(12)]
    losses = {round(float(loss), 4) for loss, _ in found}
    assert losses == {round(float(c), 4) for c in found[0][1]["ce"]}
