"""Definitions of the field (C20): which mean, what a bonus is, what was tested."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import metrics
from specjax.metrics import Trace


def trace(committed, accepted=None, rejected=None, gamma=4):
    """Rows of tokens committed per round; all but the last of a round are drafts."""
    rounds = max(map(len, committed))
    fill = lambda rows: np.array([r + [0] * (rounds - len(r)) for r in rows])
    committed = fill(committed)
    accepted = np.maximum(committed - 1, 0) if accepted is None else fill(accepted)
    refused = (committed > 0) & (accepted < gamma) if rejected is None else rejected
    return Trace(
        num_accepted=jnp.asarray(accepted),
        num_committed=jnp.asarray(committed),
        rejected=jnp.asarray(refused, bool),
        drafted=jnp.zeros((*committed.shape, gamma), jnp.int32),
    )


TWO_REQUESTS = trace([[5, 5], [1] * 10])


def test_pooled_tau_and_mean_of_means_differ_as_defined():
    assert metrics.tau(TWO_REQUESTS) == pytest.approx(20 / 12)
    assert metrics.tau_of_rows(TWO_REQUESTS) == pytest.approx(3.0)
    assert metrics.accepted_per_round(TWO_REQUESTS) == pytest.approx(8 / 12)


def test_acceptance_of_the_first_position_counts_every_round():
    assert metrics.alpha_by_position(TWO_REQUESTS) == [2 / 12, 1, 1, 1]
    assert metrics.survival_by_position(TWO_REQUESTS) == [2 / 12] * 4


def test_half_right_half_wrong_accepts_one_of_two():
    """The product of mean acceptances would say 0.75."""
    run = trace([[3, 1, 3, 1]], gamma=2)
    assert metrics.accepted_per_round(run) == 1.0
    assert metrics.alpha_by_position(run) == [0.5, 1.0]


def test_tau_is_one_plus_the_sum_of_survivals():
    run = trace([[1, 4, 2], [5, 3]])
    assert metrics.tau(run) == pytest.approx(1 + sum(metrics.survival_by_position(run)))


def test_a_perfect_drafter_cut_by_the_texts_end_is_still_perfect():
    """Four tokens of text: positions never tested are no rejections."""
    run = trace([[3]], accepted=[[3]], rejected=[[False]])
    assert metrics.alpha_by_position(run)[:3] == [1.0, 1.0, 1.0]
    assert math.isnan(metrics.alpha_by_position(run)[3])


def test_a_row_that_ended_adds_no_rounds():
    assert metrics.num_rounds(TWO_REQUESTS).tolist() == [2, 10]


def test_no_round_at_all_is_nan_and_no_error():
    empty = trace([[0]])
    values = metrics.tau(empty), metrics.tau_of_rows(empty)
    assert all(map(math.isnan, (*values, *metrics.bootstrap_tau(empty))))


def test_the_bootstrap_interval_is_finite_and_holds_the_pooled_tau():
    rng = np.random.default_rng(0)
    run = trace([rng.integers(1, 6, 20).tolist() for _ in range(30)])
    low, high = metrics.bootstrap_tau(run)
    assert 1 <= low < metrics.tau(run) < high <= 5
    assert metrics.bootstrap_tau(run) == (low, high)  # seeded


def test_the_predicted_speedup_charges_draft_and_verification():
    assert metrics.speedup(3.0, draft_cost=0.5, verify_ratio=1.0) == pytest.approx(2.0)
