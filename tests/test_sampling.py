"""Sampling settings against a plain transcription, their corners and their order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling as sampling_module
from specjax import testing
from specjax.sampling import GREEDY, Sampling, categorical

LOGITS = np.random.default_rng(0).normal(0, 2, (5, 11)).astype(np.float32)
# Compiled whole: op by op each test would compile dozens of programs.
probs_of = jax.jit(lambda logits, sampling: sampling.probs(logits), static_argnums=1)
draw_of = jax.jit(Sampling.draw, static_argnums=0)


def reference(logits, s):
    """One row, token by token: temperature, top-k, top-p, min-p."""
    z = np.asarray(logits, np.float64) / s.temperature
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    order = order[: s.top_k or len(z)]
    mass = np.exp(z[order]) / np.exp(z[order]).sum()
    kept, total = [], 0.0
    for token, m in zip(order, mass, strict=True):
        if total < s.top_p:
            kept.append(token)
        total += m
    probs = np.zeros(len(z))
    probs[kept] = np.exp(z[kept]) / np.exp(z[kept]).sum()
    probs[probs < s.min_p * probs.max()] = 0
    return probs / probs.sum()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(0.6),
        Sampling(1.7, top_k=3),
        Sampling(top_p=0.8),
        Sampling(0.5, top_p=0.01),
        Sampling(min_p=0.2),
        Sampling(1.3, top_k=6, top_p=0.7, min_p=0.15),
        Sampling(top_k=50, top_p=1.0),
    ],
)
def test_laws_equal_the_token_by_token_transcription(sampling):
    right = [reference(row, sampling) for row in LOGITS]
    ours = probs_of(LOGITS, sampling)
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, right, atol=1e-6)


def test_temperature_comes_before_top_p():
    """At temperature 2 the nucleus of 0.8 is wider than at 1."""
    logits = np.log(np.array([0.81, 0.15, 0.03, 0.01], np.float32))
    kept = lambda t: np.count_nonzero(probs_of(logits, Sampling(t, top_p=0.8)))
    assert (kept(1.0), kept(2.0)) == (1, 2)


def test_top_p_measures_mass_after_top_k():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    probs = probs_of(logits, Sampling(top_k=2, top_p=0.55))
    np.testing.assert_allclose(probs, [1, 0, 0, 0], atol=1e-6)  # 0.4 / 0.7 > 0.55


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.0, top_p=0.3, top_k=5, min_p=0.1),
        Sampling(1e-6),
        Sampling(1.0, top_k=1),
    ],
)
def test_zero_and_tiny_temperature_and_top_1_are_greedy(sampling):
    best = np.argmax(LOGITS, axis=-1)
    for seed in range(3):
        tokens, probs = draw_of(sampling, LOGITS, jax.random.key(seed))
        np.testing.assert_array_equal(tokens, best)
        np.testing.assert_array_equal(probs, np.eye(11)[best])


def test_greedy_breaks_ties_by_the_lowest_id():
    tokens, _ = GREEDY.draw(jnp.array([1.0, 3.0, 3.0]), jax.random.key(0))
    assert tokens == 1


def test_a_top_k_tie_keeps_exactly_k():
    probs = probs_of(np.zeros(5, np.float32), Sampling(top_k=2))
    np.testing.assert_allclose(probs, [0.5, 0.5, 0, 0, 0])


def test_the_defaults_cut_nothing_off():
    keys = jax.random.split(jax.random.key(0), 1000)
    draw = jax.jit(jax.vmap(lambda k: Sampling().draw(jnp.zeros(16), k)[0]))
    assert set(draw(keys).tolist()) == set(range(16))


@pytest.mark.parametrize("off", [None, 0, -1])
def test_every_spelling_of_no_top_k_is_the_same_setting(off):
    assert Sampling(top_k=off, top_p=1.0) == Sampling()
    assert hash(Sampling(top_k=off)) == hash(Sampling())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature must be a number >= 0"),
        ({"temperature": float("nan")}, "temperature must be a number >= 0"),
        ({"temperature": float("inf")}, "temperature must be a number >= 0"),
        ({"top_p": 0.0}, "use temperature=0"),
        ({"top_p": 1.2}, r"top_p must lie in \(0, 1\]"),
        ({"top_k": -2}, "top_k must be >= 1"),
        ({"min_p": 1.5}, r"min_p must lie in \[0, 1\]"),
    ],
)
def test_impossible_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(0.5, 3, 0.9, 0.1)])
def test_a_nan_logit_is_a_token_that_never_comes(sampling):
    logits = np.array([0.0, np.nan, 1.0, -np.inf, 0.5], np.float32)
    probs = np.asarray(probs_of(logits, sampling))
    assert np.all(np.isfinite(probs)) and probs[1] == 0 == probs[3]
    assert float(probs.sum()) == pytest.approx(1, abs=1e-6)


def test_a_token_of_probability_zero_is_never_drawn():
    probs = jnp.array([0.0, 0.3, 0.0, 0.7, 0.0])
    keys = jax.random.split(jax.random.key(1), 2000)
    drawn = jax.jit(jax.vmap(lambda k: categorical(probs, k)))(keys)
    assert set(drawn.tolist()) == {1, 3}


def test_bf16_logits_give_a_float32_law():
    probs = probs_of(jnp.asarray(LOGITS, jnp.bfloat16), Sampling(top_p=0.9))
    assert probs.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(probs).sum(-1), 1, atol=1e-6)


def test_draws_follow_the_law_over_many_blocks_of_ids():
    """150 ids: three blocks, the last not full; weights need not sum to 1."""
    law = np.random.default_rng(0).gamma(0.3, size=150) * 7
    law[[0, 63, 64, 149]] = 0
    law[128:140] = 0
    keys = jax.random.split(jax.random.key(0), 40_000)
    weights = jnp.asarray(law, jnp.float32)
    drawn = jax.jit(jax.vmap(lambda k: categorical(weights, k)))(keys)
    counts = np.bincount(drawn, minlength=150)
    assert testing.chi_square(counts, law) > testing.FALSE_ALARM
    law[5] += law.sum() * 0.05
    assert testing.chi_square(counts, law) < testing.FALSE_ALARM  # it could have failed


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_drawn_independently(seed):
    """Rows of one call: the pair's law is the product of the rows'."""
    law = jnp.asarray([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])
    keys = jax.random.split(jax.random.key(seed), 20_000)
    pairs = jax.jit(jax.vmap(lambda k: categorical(law, k)))(keys)
    counts = testing.count(np.asarray(pairs), 3)
    right = np.outer(*np.asarray(law, np.float64))
    assert testing.chi_square(counts, right) > testing.FALSE_ALARM


@pytest.mark.parametrize("top_k", [None, 1, 7, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.5, 0.95, 1e-6])
@pytest.mark.parametrize("num_ids", [200, 17_001])
def test_cuts_are_those_of_a_stable_sort_on_many_logits_with_ties(
    top_k, top_p, num_ids
):
    """The longer rows are searched by blocks, but for the flat one."""
    rng = np.random.default_rng(0)
    logits = np.round(rng.normal(0, 3, (6, num_ids)), 1).astype(np.float32)  # ties
    logits[0, ::3] = -np.inf
    logits[1] *= 0
    if num_ids > 200:
        assert num_ids > 2 * sampling_module.BLOCK * sampling_module.BLOCKS
        logits = logits[2 if top_p < 1 else 0 :]  # without flat rows all is by blocks
    sampling = Sampling(0.9, top_k=top_k, top_p=top_p, min_p=0.01)
    got = np.asarray(probs_of(logits, sampling))
    if sampling.greedy:
        return
    for row, z in zip(got, logits / np.float32(0.9), strict=True):
        order = np.argsort(-z, kind="stable")[: top_k or len(z)]
        law = np.exp(z[order].astype(np.float64) - z.max())
        law /= law.sum()
        before = np.cumsum(law) - law
        kept = order if top_p == 1 else order[before < top_p * (1 - 1e-6)]
        law = np.exp(z[kept].astype(np.float64) - z.max())
        kept = kept[law >= 0.01 - 1e-7]
        assert set(np.flatnonzero(row)) == set(kept.tolist())


def test_a_flat_row_is_cut_as_if_it_stood_alone():
    """Its cut lies below the blocks that hold that of the steep row beside it."""
    num_ids = 2 * sampling_module.BLOCK * sampling_module.BLOCKS + 1
    logits = np.linspace(1e-3, 0, num_ids, dtype=np.float32)
    both = np.stack([logits, 1e5 * logits])
    kept = np.count_nonzero(probs_of(both, Sampling(top_p=0.9)), axis=1)
    assert kept[0] == pytest.approx(0.9 * num_ids, rel=1e-3) and kept[1] < 1000


def test_a_uniform_that_rounding_carries_to_the_end_takes_the_last_with_weight():
    inverse = sampling_module._inverse
    assert inverse(jnp.array([0.0, 1.0, 0.0]), jnp.array(1.0)) == 1
    assert inverse(jnp.array([0.0, 1.0, 0.0]), jnp.array(0.0)) == 1
