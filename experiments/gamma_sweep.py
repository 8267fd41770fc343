"""tau and speedup against gamma: how many tokens a round should draft.

For each drafter and gamma the same prompts are decoded with the same keys, so the
points of a curve are paired; the spread is over seeds. Beside the measured tau stands
the closed form for one constant acceptance rate alpha (Leviathan et al. 2023,
arXiv:2211.17192, eq. 1),

    tau(gamma) = (1 - alpha^(gamma+1)) / (1 - alpha),

with alpha the acceptance of the first position, measured at the smallest gamma: where
the curve runs below it, later positions are harder than the first. The speedup of
section 3 of the paper becomes tau / (v + c) with the measured times v of a verify pass
of gamma + 1 nodes and c of a draft, both over a plain round (`specjax.bench`). No table
of the paper is reproduced: its targets are not ours.

    python experiments/gamma_sweep.py        about 8 minutes on 2 cores
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import common
import numpy as np

from specjax import bench, figures, metrics, targets

SMOKE = {
    "drafters": ("medusa",),
    "gammas": (2,),
    "tasks": ("code",),
    "num_prompts": 1,
    "max_new_tokens": 8,
    "seeds": (0, 1),
    "timing_repeats": 1,
}


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "tiny"
    drafters: tuple[str, ...] = ()  # shipped names or folders; empty: all shipped
    gammas: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    temperature: float = 1.0
    tasks: tuple[str, ...] = ("code", "math", "chat")
    prompts: pathlib.Path | None = None  # a .jsonl instead of the tasks
    num_prompts: int = 6  # a task
    max_new_tokens: int = 96
    seeds: tuple[int, ...] = (0, 1, 2)
    timing_repeats: int = 5


def main(config: Config) -> list[dict]:
    pretrained = targets.load(config.target)
    chosen = common.load_drafters(config.drafters, config.target, pretrained)
    tasks = common.load_prompts(config.tasks, config.num_prompts, config.prompts)
    pooled: dict[str, Sequence[str]]
    pooled = {"all": [p for prompts in tasks.values() for p in prompts]}
    runners = [
        bench.Bench(
            pretrained,
            pooled,
            bench.Settings(
                temperatures=(config.temperature,),
                max_new_tokens=config.max_new_tokens,
                seed=seed,
                timing_repeats=config.timing_repeats,
            ),
        )
        for seed in config.seeds
    ]
    rows = []
    for name, (drafter, params) in chosen.items():
        alpha = None
        for gamma in sorted(config.gammas):
            try:
                drafting = dataclasses.replace(drafter, gamma=gamma)
            except ValueError as error:  # more than its heads can draft
                print(f"{name} stops before gamma {gamma}: {error}")
                break
            row = measure(runners, drafting, params, config.temperature)
            alpha = row["alpha"][0] if alpha is None else alpha
            rows.append({"drafter": name, "gamma": gamma} | _beside(row, alpha, gamma))
    return rows


def measure(runners, drafter: Any, params: Any, temperature: float) -> dict[str, Any]:
    """One point: mean and deviation over seeds; costs are timed once."""
    model = runners[0].model(drafter, temperature)
    weights = bench.Weights(runners[0].pretrained.params, params)
    pairs = [runner.paired(model, weights, "all") for runner in runners]
    costs = runners[0].costs(drafter, params, temperature)
    taus = [metrics.tau(run.trace) for run, _ in pairs]
    speeds = [run.tokens_per_second / plain.tokens_per_second for run, plain in pairs]
    alphas = [metrics.alpha_by_position(run.trace) for run, _ in pairs]
    tau, tau_sd = _mean_sd(taus)
    measured, measured_sd = _mean_sd(speeds)
    return {
        "tau": tau,
        "tau_sd": tau_sd,
        "alpha": [_mean_seen(position) for position in zip(*alphas, strict=True)],
        "v": costs.verify_ratio,
        "c": costs.draft_cost,
        "predicted": metrics.speedup(tau, costs.draft_cost, costs.verify_ratio),
        "measured": measured,
        "measured_sd": measured_sd,
    }


def _mean_seen(values: Sequence[float]) -> float:
    """Mean over the seeds that reached a position; NaN if none did."""
    seen = [v for v in values if not np.isnan(v)]
    return float(np.mean(seen)) if seen else float("nan")


def _mean_sd(values: list[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=min(1, len(values) - 1)))


def closed_form(alpha: float, gamma: int) -> float:
    """tau of gamma drafts that are each accepted with probability alpha."""
    if alpha >= 1:
        return float(gamma + 1)
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def _beside(row: dict[str, Any], alpha: float, gamma: int) -> dict[str, Any]:
    tau = closed_form(alpha, gamma)
    closed = {
        "tau_constant_alpha": tau,
        "speedup_constant_alpha": metrics.speedup(tau, row["c"], row["v"]),
    }
    return row | closed


def figure(rows: list[dict], path: pathlib.Path) -> None:
    """Measured with its spread, solid; the constant-alpha form dotted."""
    plt = figures.pyplot()
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    names = list(dict.fromkeys(r["drafter"] for r in rows))
    for name, colour in zip(names, figures.COLOURS, strict=False):
        mine = [r for r in rows if r["drafter"] == name]
        column = lambda key, mine=mine: [r[key] for r in mine]
        gamma, bar = column("gamma"), {"color": colour, "capsize": 2, "marker": "o"}
        left.errorbar(gamma, column("tau"), column("tau_sd"), label=name, ms=4, **bar)
        left.plot(gamma, column("tau_constant_alpha"), ":", color=colour)
        right.errorbar(gamma, column("measured"), column("measured_sd"), ms=4, **bar)
        right.plot(gamma, column("predicted"), "--", color=colour)
    left.set_ylabel("tau (tokens per round)")
    left.set_title("dotted: constant alpha", fontsize=9)
    right.set_ylabel("speedup over plain decoding")
    right.set_title("dashed: tau / (v + c)", fontsize=9)
    right.axhline(1, color="black", lw=0.8)
    left.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        axis.set_xlabel("gamma (drafted tokens per round)")
    fig.savefig(path, dpi=120)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
