"""What a run is judged by: tau, acceptance by position, speedup, intervals.

Every number comes from a `Trace`, one entry a round. With s_k the probability that the
first k drafted tokens are all accepted, tau = 1 + sum_k s_k, but for a last round that
the end of the text cut (it may have no bonus); the geometric form
(1 - alpha^(G+1)) / (1 - alpha) holds only for equal, independent acceptance.
"""

import numpy as np

from specjax.pytree import pytree
from specjax.typing import Array, Bool, Int


@pytree
class Trace:
    """One entry a round and row; a round that a row did not run has 0 committed."""

    num_accepted: Int[Array, "B R"]  # drafted tokens that reached the text
    num_committed: Int[Array, "B R"]  # tokens that reached the text, bonus included
    rejected: Bool[Array, "B R"]  # the drafted token after the accepted was refused
    # The drafted tokens; of a tree, those on the accepted path and what was refused
    # after it (`verify.followed`).
    drafted: Int[Array, "B R D"]

    @property
    def depth(self) -> int:
        """Most tokens a round could accept."""
        return self.drafted.shape[2]


def num_rounds(trace: Trace) -> np.ndarray:
    """Rounds of each row [B]."""
    return np.sum(np.asarray(trace.num_committed) > 0, axis=1)


def tau(trace: Trace) -> float:
    """Mean tokens committed per round, bonus included, pooled over all rounds.

    The ratio of sums, as DSpark and vLLM report it. The prefill's token is in no round.
    NaN if no round was run.
    """
    rounds = num_rounds(trace).sum()
    return float(np.sum(trace.num_committed) / rounds) if rounds else float("nan")


def tau_of_rows(trace: Trace) -> float:
    """Mean over rows of each row's own tau, as the DFlash paper reports it."""
    rounds = num_rounds(trace)
    totals = np.sum(trace.num_committed, axis=1)[rounds > 0]
    return float(np.mean(totals / rounds[rounds > 0])) if totals.size else float("nan")


def accepted_per_round(trace: Trace) -> float:
    """Mean drafted tokens accepted per round: tau without the bonus."""
    rounds = num_rounds(trace).sum()
    return float(np.sum(trace.num_accepted) / rounds) if rounds else float("nan")


def alpha_by_position(trace: Trace) -> list[float]:
    """alpha_k, k = 1..G: of the rounds that tested token k, how many accepted it.

    A token is tested if all before it were accepted and the text did not end before it,
    so a perfect drafter has 1 at every position it reaches. NaN where none was tested.
    """
    accepted, rejected = np.asarray(trace.num_accepted), np.asarray(trace.rejected)
    alphas = []
    for k in range(1, trace.depth + 1):
        kept = int(np.sum(accepted >= k))
        refused = int(np.sum((accepted == k - 1) & rejected))
        alphas.append(kept / (kept + refused) if kept + refused else float("nan"))
    return alphas


def survival_by_position(trace: Trace) -> list[float]:
    """s_k, k = 1..G: of all rounds, how many accepted at least k drafted tokens."""
    rounds = num_rounds(trace).sum()
    accepted = np.asarray(trace.num_accepted)
    return [
        float(np.sum(accepted >= k) / rounds) if rounds else float("nan")
        for k in range(1, trace.depth + 1)
    ]


def speedup(tau: float, draft_cost: float, verify_ratio: float) -> float:
    """Predicted speedup of one round over plain decoding.

    S = tau / (v + c): c is the time of a whole draft (all its passes) and commit, v
    that of the verify pass, both in units of one plain decoding pass.
    """
    return tau / (verify_ratio + draft_cost)


def bootstrap_tau(
    trace: Trace, seed: int = 0, num_samples: int = 1000, level: float = 0.95
) -> tuple[float, float]:
    """Interval of the pooled tau over resampled rows (prompts), percentile method.

    Rounds of one prompt depend on each other, so prompts are resampled, not rounds.
    """
    rounds = num_rounds(trace)
    totals = np.sum(np.asarray(trace.num_committed), axis=1)
    rounds, totals = rounds[rounds > 0], totals[rounds > 0]
    if not rounds.size:
        return float("nan"), float("nan")
    pick = np.random.default_rng(seed).integers(
        0, rounds.size, (num_samples, rounds.size)
    )
    taus = totals[pick].sum(axis=1) / rounds[pick].sum(axis=1)
    low, high = np.quantile(taus, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
