"""Is a drafter as sure as it should be? Reliability, and the temperatures that mend it.

A scheduler multiplies confidences along a draft, so an error of one position is in all
later ones: 10 % too sure at each of seven positions is 1.1^7 = 1.95 times too sure of
the whole. Sequential temperature scaling (DSpark, arXiv:2607.05147, section 3.2.1) fits
one number a position, from the first on, those before it being fixed:

    P_k = sigmoid(z_1 / T_1) .. sigmoid(z_k / T_k)                                (1)
    T_k = the number of a grid of least ECE of P_k against "the first k drafts of the
          round were all accepted"                                                (2)

over held-out rounds whose drafts were verified whole; z is the confidence before the
sigmoid. A round counts at every position: once a draft was refused the label is 0. The
paper names neither grid nor bins; these are ours. Labels must come from the rule and
the temperature that are to be served. NumPy, on the host.
"""

from collections.abc import Sequence

import numpy as np

BINS = 20  # of equal width
GRID = np.round(np.arange(0.25, 4.001, 0.05), 2)


def bin_of(probs: np.ndarray, bins: int = BINS) -> np.ndarray:
    """Number of each probability's bin; 1 is in the last one."""
    return np.minimum((np.asarray(probs) * bins).astype(int), bins - 1)


def reliability(
    probs: np.ndarray, happened: np.ndarray, bins: int = BINS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each bin: how many, mean probability, share that happened (NaN if empty)."""
    at = bin_of(probs, bins)
    total = lambda x: np.bincount(at, np.asarray(x, np.float64), bins)
    count = np.bincount(at, minlength=bins)
    some = np.where(count > 0, count, np.nan)
    return count, total(probs) / some, total(happened) / some


def ece(probs: np.ndarray, happened: np.ndarray, bins: int = BINS) -> float:
    """Mean distance over bins, by how many each holds, of probability and share."""
    if not len(probs):
        return float("nan")
    count, said, was = reliability(probs, happened, bins)
    return float(np.nansum(count * np.abs(said - was)) / len(probs))


def brier(probs: np.ndarray, happened: np.ndarray) -> float:
    """Mean squared distance from what happened."""
    return float(np.mean((np.asarray(probs) - np.asarray(happened)) ** 2))


def auc(scores: np.ndarray, happened: np.ndarray) -> float:
    """Chance that one that happened scores above one that did not; a tie is half.

    NaN if all happened or none. A temperature of this position changes nothing here.
    """
    scores, happened = np.asarray(scores), np.asarray(happened, bool)
    values, rank = np.unique(scores, return_inverse=True)
    yes = np.bincount(rank[happened], minlength=len(values))
    no = np.bincount(rank[~happened], minlength=len(values))
    below = np.cumsum(no) - no
    pairs = yes.sum() * no.sum()
    return float(np.sum(yes * (below + no / 2)) / pairs) if pairs else float("nan")


def sigmoid(z: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -np.asarray(z, np.float64)))


def prefixes(logits: np.ndarray, temperatures: Sequence[float] | None = None):
    """P of eq. 1 for every prefix, [X G]."""
    T = 1.0 if temperatures is None else np.asarray(temperatures)[None]
    return np.cumprod(sigmoid(np.asarray(logits, np.float64) / T), axis=1)


def survived(num_accepted: np.ndarray, gamma: int) -> np.ndarray:
    """Whether the first k drafts of a round were all accepted, [X G]."""
    return np.asarray(num_accepted)[:, None] > np.arange(gamma)[None]


def fit(
    logits: np.ndarray,
    num_accepted: np.ndarray,
    grid: Sequence[float] | np.ndarray = GRID,
    bins: int = BINS,
) -> tuple[float, ...]:
    """Temperatures of eq. 2, one a position; the least of equals.

    Args:
      logits: confidences before the sigmoid of rounds that were verified whole [X G].
      num_accepted: drafts accepted in them [X].
    """
    logits = np.asarray(logits, np.float64)
    if logits.ndim != 2 or not len(logits) or len(logits) != len(num_accepted):
        raise ValueError(
            f"calibration needs logits [rounds, gamma] and a count a round, got "
            f"{logits.shape} and {np.shape(num_accepted)}."
        )
    labels = survived(num_accepted, logits.shape[1])
    before, temperatures = np.ones(len(logits)), []
    for k in range(logits.shape[1]):
        tried = [before * sigmoid(logits[:, k] / T) for T in grid]
        errors = [ece(p, labels[:, k], bins) for p in tried]
        best = int(np.argmin(errors))
        temperatures.append(float(grid[best]))
        before = tried[best]
    return tuple(temperatures)
