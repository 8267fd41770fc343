"""What speculation is worth: the governing equation, and the times that it needs.

Leviathan et al. 2022, arXiv:2211.17192, section 3, with a verify pass that is not free.
With t the time of a plain round (a pass of one token), s_k the probability that the
first k drafts of a round are all accepted,

    tau(g) = 1 + s_1 + .. + s_g         of one run at the largest g                (1)
    s_k    = alpha_1 .. alpha_k         alpha^k for one constant alpha              (2)
    S(g)   = tau(g) / (v(g + 1) + c(g))                                             (3)
    v(N)   = time of a round of N nodes whose draft costs nothing, over t
    c(g)   = time that drafting g tokens adds to it, over t
    passes a second over n tokens = 1 / time of a round of n tokens in all rows     (4)

Eq. 1 takes a round of a long draft for one of a short draft. They do not begin at the
same places: a long draft jumps over easy text, so s_1 of its rounds is a little low for
shorter drafts (`experiments/cost_model.py`: tau(1) by up to 8 %, mostly less).

A sequential drafter has c(g) = g c(1) or nearly, a block drafter c(g) = c(1) or nearly:
c is measured at some g and read off between them, so neither is assumed. Break-even is
the smallest constant alpha at which S >= 1 at the best g; there may be none.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from specjax import bench
from specjax.drafters.none import NoDrafter
from specjax.generate import Weights
from specjax.tree import Tree

NODES = (1, 2, 4, 8, 16, 32)


def survival(alphas: float | Sequence[float], gamma: int) -> np.ndarray:
    """s_1 .. s_gamma of eq. 2; of a list the last alpha goes on."""
    given = np.atleast_1d(np.asarray(alphas, np.float64))[:gamma]
    return np.cumprod(np.pad(given, (0, gamma - len(given)), mode="edge"))


def taus(survived: ArrayLike) -> np.ndarray:
    """tau(1) .. tau(G) of eq. 1."""
    return 1 + np.cumsum(np.asarray(survived, np.float64))


def speedups(
    survived: ArrayLike, verify_ratio: ArrayLike, draft_cost: ArrayLike
) -> np.ndarray:
    """S(1) .. S(G) of eq. 3; the ratios are those at g = 1 .. G."""
    return taus(survived) / (np.asarray(verify_ratio) + np.asarray(draft_cost))


def best_gamma(speeds: ArrayLike) -> tuple[int, float]:
    """The g of largest S, and that S; of equals the shortest draft."""
    at = int(np.argmax(speeds))
    return at + 1, float(np.asarray(speeds)[at])


def break_even(verify_ratio: ArrayLike, draft_cost: ArrayLike) -> float | None:
    """Smallest constant alpha at which S >= 1 at its best g; None if there is none."""
    G = len(np.asarray(verify_ratio))
    best = lambda alpha: max(speedups(survival(alpha, G), verify_ratio, draft_cost))
    if best(1.0) < 1:
        return None
    low, high = 0.0, 1.0  # S rises with alpha
    if best(low) >= 1:
        return low
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if best(middle) >= 1 else (middle, high)
    return high


@dataclasses.dataclass(frozen=True)
class Curve:
    """Time of a round over tokens in the pass, for a number of rows; linear between."""

    rows: int
    tokens: tuple[int, ...]  # ascending, the first is `rows`: a plain round
    seconds: tuple[float, ...]

    def at(self, tokens: Any) -> Any:
        """Seconds of a round; past the largest measured it goes on as its last part."""
        n, t = np.asarray(self.tokens, np.float64), np.asarray(self.seconds)
        inside = np.interp(tokens, n, t)
        if len(n) == 1:
            return inside
        slope = max(0.0, (t[-1] - t[-2]) / (n[-1] - n[-2]))
        return inside + slope * np.maximum(np.asarray(tokens) - n[-1], 0)

    def ratio(self, nodes: Any) -> Any:
        """v of a round of so many nodes a row."""
        return self.at(np.asarray(nodes) * self.rows) / self.seconds[0]

    def passes(self, up_to: int) -> tuple[float, ...]:
        """Eq. 4 for 1 .. `up_to` tokens: what `scheduler.Prefix` and `Delayed` take.

        Fewer tokens than rows cost what one a row does.
        """
        return tuple((1 / self.at(np.arange(1, up_to + 1))).tolist())


def load_passes(
    path: str | pathlib.Path, rows: int = 1, drafter: str | None = None
) -> tuple[float, ...]:
    """`passes` of so many rows from what `specjax cost --json` wrote.

    With `drafter` they are rounds a second, its draft included: that is spent whatever
    of it is verified, so a scheduler that is not told of it stops too early.
    """
    try:
        written = json.loads(pathlib.Path(path).read_text("utf-8"))
        curves = written["curves"]
        found = {int(c["rows"]): tuple(map(float, c["passes"])) for c in curves}
        first, plain = int(curves[0]["rows"]), float(curves[0]["passes"][0])
    except (ValueError, KeyError, TypeError, IndexError):
        raise ValueError(
            f"{path} has no curves; write it with `specjax cost --json {path}`."
        ) from None
    if rows not in found:
        raise ValueError(
            f"{path} has curves of {', '.join(map(str, found))} rows, not of {rows}; "
            f"measure it with `specjax cost --batch {rows}`."
        )
    if drafter is None:
        return found[rows]
    added = {d["drafter"]: d["c"][-1] / plain for d in written.get("drafters", [])}
    if drafter not in added or rows != first:
        raise ValueError(
            f"{path} has drafts of {first} rows by {', '.join(added) or 'no drafter'}, "
            f"not of {rows} by {drafter}; measure them with `specjax cost --batch "
            f"{rows} --drafters {drafter}`."
        )
    return tuple(1 / (1 / p + added[drafter]) for p in found[rows])


def gammas_to_time(gamma: int, given: Sequence[int] | None = None) -> tuple[int, ...]:
    """Where c is measured: 1, 3, 7, .. (2, 4, 8, .. nodes) and the largest."""
    chosen = given or [n - 1 for n in NODES if n > 1]
    return tuple(sorted({g for g in chosen if g < gamma} | {gamma}))


@dataclasses.dataclass(frozen=True)
class Times:
    """What one run on one machine says: rounds, and what drafts add to them."""

    curve: Curve
    added: dict[tuple[str, int], float]  # c of a drafter at a gamma

    def draft_cost(self, name: str, gammas: Iterable[int]) -> np.ndarray:
        """c(g), linear between the measured ones and as the nearest beyond them."""
        known = sorted(g for n, g in self.added if n == name)
        return np.interp(list(gammas), known, [self.added[name, g] for g in known])


def measure(
    runner: bench.Bench,
    drafters: dict[str, tuple[Any, Any]],
    temperature: float,
    nodes: Sequence[int] = NODES,
    gammas: Sequence[int] | None = None,
    tick=lambda what: None,
) -> Times:
    """Times every kind of round in turn, in each of some repeats.

    A repeat is compared with itself: v is the median of its ratios to its own plain
    round, c that of a drafter's round less the free one, which ran in the same repeat.
    So what else the machine does falls on both, unless it changes in between. The first
    repeat compiles and is not counted.
    """
    variants = {
        (name, g): (drafter if g == drafter.gamma else _with_gamma(drafter, g), params)
        for name, (drafter, params) in drafters.items()
        for g in gammas_to_time(drafter.gamma, gammas)
    }
    widths = sorted({1, *nodes, *(g + 1 for _, g in variants)})
    kinds: dict[Any, tuple[Any, Any]] = {}
    for n in widths:  # a drafter's rounds run right after the free one of their width
        tree = Tree.chain(n - 1)
        kinds[n] = (bench.FreeDrafter(tree=tree) if n > 1 else NoDrafter()), None
        kinds |= {at: pair for at, pair in variants.items() if at[1] == n - 1}
    seen = _seconds(runner, kinds, temperature, tick)
    plain, rows = seen[1], runner.settings.batch_size
    t = float(np.median(plain))
    seconds = tuple(t * float(np.median(seen[n] / plain)) for n in widths)
    added = {
        at: max(0.0, float(np.median((seen[at] - seen[at[1] + 1]) / plain)))
        for at in variants
    }
    return Times(Curve(rows, tuple(n * rows for n in widths), seconds), added)


def _seconds(runner, kinds, temperature: float, tick) -> dict[Any, np.ndarray]:
    """Seconds of a round of each kind, one a repeat."""
    settings = runner.settings
    prompts = runner.batches(next(iter(runner.tasks)))[0]
    prompts = (prompts * settings.batch_size)[: settings.batch_size]
    seen: dict[Any, list[float]] = {kind: [] for kind in kinds}
    for repeat in range(settings.timing_repeats + 1):
        for kind, (drafter, params) in kinds.items():
            what = f"{kind} nodes" if isinstance(kind, int) else "{} {}".format(*kind)
            tick(f"{what}, repeat {repeat} of {settings.timing_repeats}")
            model = runner.model(drafter, temperature)
            weights = Weights(runner.pretrained.params, params)
            spent = runner.seconds_per_round(model, weights, prompts)
            if repeat:
                seen[kind].append(spent)
    return {kind: np.array(times) for kind, times in seen.items()}


def _with_gamma(drafter: Any, gamma: int) -> Any:
    return dataclasses.replace(drafter, gamma=gamma)
