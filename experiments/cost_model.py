"""Predicted against measured speedup: what the cost model is worth on the tiny target.

Leviathan et al. 2022, arXiv:2211.17192, section 3, with a measured verify pass
(`specjax/cost.py`). For each drafter, v and c are timed, one run at its largest gamma
gives the survival by position, and from these alone

    S(g) = (1 + s_1 + .. + s_g) / (v(g + 1) + c(g))

is predicted for shorter drafts too. Beside it stands what whole runs take with the
drafter and without, in turn, at each g: the mean of some runs and their deviation. tau
is of those runs; `tau_predicted` is of the longest draft's survival, whose rounds begin
at other places. The paper's predictions are for other models on a TPU and are not
repeated.

    python experiments/cost_model.py        5 minutes on 2 cores
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

import common
import numpy as np

from specjax import bench, cost, figures, metrics, targets
from specjax.generate import Weights

SMOKE = {
    "drafters": ("medusa",),
    "gammas": (1,),
    "tasks": ("code",),
    "num_prompts": 1,
    "max_new_tokens": 24,
    "runs": 1,
    "repeats": 1,
}


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "tiny"
    drafters: tuple[str, ...] = ()  # shipped names or folders; empty: all shipped
    gammas: tuple[int, ...] = (1, 3)  # and each drafter's own
    temperature: float = 0.0
    tasks: tuple[str, ...] = ("code", "math", "chat")
    num_prompts: int = 2  # a task
    max_new_tokens: int = 96
    runs: int = 3  # of all prompts, with the drafter and without
    repeats: int = 9  # of the timing of rounds
    seed: int = 0


def main(config: Config) -> list[dict]:
    pretrained = targets.load(config.target)
    chosen = common.load_drafters(config.drafters, config.target, pretrained)
    tasks = common.load_prompts(config.tasks, config.num_prompts)
    settings = bench.Settings(
        temperatures=(config.temperature,),
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        timing_repeats=config.repeats,
    )
    pooled: dict[str, Sequence[str]]
    pooled = {"all": [p for prompts in tasks.values() for p in prompts]}
    runner = bench.Bench(pretrained, pooled, settings)
    rows = []
    for name, (drafter, params) in chosen.items():
        times = cost.measure(
            runner, {name: (drafter, params)}, config.temperature, (1,), config.gammas
        )
        rows += beside(runner, times, name, drafter, params, config)
    errors = np.array([row["error"] for row in rows])
    print(
        f"error of {len(rows)} predictions: median {np.median(errors):+.0%}, median of "
        f"sizes {np.median(np.abs(errors)):.0%}, worst "
        f"{errors[np.argmax(np.abs(errors))]:+.0%}"
    )
    return rows


def beside(runner, times, name: str, drafter, params, config: Config) -> list[dict]:
    """A drafter's rows, one a gamma; the largest first gives the survival."""
    weights = Weights(runner.pretrained.params, params)
    survived, rows = None, []
    for gamma in sorted((g for n, g in times.added if n == name), reverse=True):
        variant = dataclasses.replace(drafter, gamma=gamma)
        model = runner.model(variant, config.temperature)
        pairs = [runner.paired(model, weights, "all") for _ in range(config.runs)]
        if survived is None:
            survived = metrics.survival_by_position(pairs[0][0].trace)
        speeds = [run.tokens_per_second / p.tokens_per_second for run, p in pairs]
        v = float(times.curve.ratio(gamma + 1))
        (c,) = times.draft_cost(name, [gamma]).tolist()
        tau = float(cost.taus(survived)[gamma - 1])
        predicted = metrics.speedup(tau, c, v)
        rows.append(
            {
                "drafter": name,
                "gamma": gamma,
                "tau_predicted": tau,
                "tau": metrics.tau(pairs[0][0].trace),
                "c": c,
                "v": v,
                "predicted": predicted,
                "measured": float(np.mean(speeds)),
                "measured_sd": float(np.std(speeds, ddof=min(1, len(speeds) - 1))),
                "error": predicted / float(np.mean(speeds)) - 1,
                "load": os.getloadavg()[0],
            }
        )
    return rows[::-1]


def figure(rows: list[dict], path: pathlib.Path) -> None:
    """Predicted against measured, a point a drafter and gamma, and where they agree."""
    plt = figures.pyplot()
    fig, axis = plt.subplots(figsize=(5, 4.4), layout="constrained")
    for i, gamma in enumerate(sorted({row["gamma"] for row in rows})):
        mine = [row for row in rows if row["gamma"] == gamma]
        column = lambda key, mine=mine: [row[key] for row in mine]
        axis.errorbar(
            column("measured"),
            column("predicted"),
            xerr=column("measured_sd"),
            fmt="o",
            ms=4,
            color=figures.COLOURS[i % len(figures.COLOURS)],
            label=f"gamma {gamma}",
        )
    top = 1.05 * max(max(r["measured"], r["predicted"]) for r in rows)
    axis.plot([0, top], [0, top], color="0.5", lw=1)
    axis.set(xlim=(0, top), ylim=(0, top), aspect="equal")
    axis.set_xlabel("measured speedup")
    axis.set_ylabel("predicted: tau / (v + c)")
    axis.legend(frameon=False, fontsize=8)
    fig.savefig(path, dpi=120)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
