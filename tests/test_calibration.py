"""Calibration against recorded numbers, and against its definitions by hand."""

import golden
import numpy as np
import pytest

from specjax import calibration


def recorded_rounds():
    """400 rounds whose true temperatures are 2, 1/2, 1 and 3."""
    z = 4 * golden.hashed(2001, (400, 4)) + 1.5
    u = golden.hashed(2002, (400, 4)) + 0.5
    kept = u < calibration.sigmoid(z / np.array([2, 0.5, 1, 3])[None])
    return z, np.sum(np.cumprod(kept, axis=1), axis=1)


def test_the_fit_is_the_one_recorded():
    z, accepted = recorded_rounds()
    assert np.bincount(accepted).tolist() == [153, 31, 53, 69, 94]
    T = calibration.fit(z, accepted)
    assert T == (2.05, 0.70, 0.75, 4.00)
    labels = calibration.survived(accepted, 4)
    errors = lambda p: [calibration.ece(p[:, k], labels[:, k]) for k in range(4)]
    raw = [0.143178, 0.066469, 0.080643, 0.123010]
    fitted = [0.042766, 0.046180, 0.058570, 0.036435]
    np.testing.assert_allclose(errors(calibration.prefixes(z)), raw, atol=1e-6)
    np.testing.assert_allclose(errors(calibration.prefixes(z, T)), fitted, atol=1e-6)


def test_what_is_right_stays_nearly_as_it_is():
    rng = np.random.default_rng(0)
    z = rng.normal(1, 1.5, (200_000, 2))
    kept = rng.random(z.shape) < calibration.sigmoid(z)
    T = calibration.fit(z, np.cumprod(kept, axis=1).sum(1))
    np.testing.assert_allclose(T, 1, atol=0.1)
    labels = np.cumprod(kept, axis=1) > 0
    assert calibration.ece(calibration.prefixes(z)[:, 1], labels[:, 1]) < 0.005


def test_ece_and_brier_by_hand():
    """Bins [0, .05) .. ; 1.0 is in the last one, beside .96."""
    p, y = np.array([0.02, 0.04, 0.96, 1.0]), np.array([0, 1, 1, 1])
    count, said, was = calibration.reliability(p, y)
    assert count[[0, 19]].tolist() == [2, 2] and count.sum() == 4
    np.testing.assert_allclose(
        [said[0], was[0], said[19], was[19]], [0.03, 0.5, 0.98, 1]
    )
    assert np.isnan(said[10])
    assert calibration.ece(p, y) == pytest.approx(0.5 * 0.47 + 0.5 * 0.02)
    assert calibration.brier(p, y) == pytest.approx((0.0004 + 0.9216 + 0.0016) / 4)


def test_auc_counts_pairs_and_half_of_ties():
    assert (
        calibration.auc(np.array([0.1, 0.4, 0.4, 0.9]), np.array([0, 0, 1, 1])) == 0.875
    )
    assert np.isnan(calibration.auc(np.array([0.1, 0.2]), np.array([1, 1])))


def test_auc_does_not_change_with_a_positions_own_temperature():
    z, accepted = recorded_rounds()
    label = accepted > 0
    first = [
        calibration.auc(calibration.sigmoid(z[:, 0] / T), label) for T in (1, 2.05)
    ]
    assert first[0] == first[1] > 0.5


def test_rounds_without_their_counts_are_refused():
    with pytest.raises(ValueError, match="a count a round"):
        calibration.fit(np.zeros((3, 2)), np.zeros(4))
