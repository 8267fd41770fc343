"""Depth of a block drafter: DSpark of few layers, and where features are injected.

Two tables of papers on one axis. DSpark's figure 3 (arXiv:2607.05147, Qwen3-4B): with
two layers it is ahead of DFlash with five on all nine tasks, with one it is behind.
DFlash's table 9 (arXiv:2602.06036, Qwen3-4B, 5 layers, blocks of 8): target features
given to every layer as keys and values keep tau 4.2 / 4.0 / 3.0 on GSM8K, HumanEval and
MT-bench, given to the input of the first layer alone 3.5 / 3.5 / 2.6.

`tiny` has 8 layers where Qwen3-4B has 36, so depths here are 1, 2 and 4; the numbers of
5 layers stand beside our 4. All have the same texts and steps (`trained.Budget`); more
layers have more parameters and take longer. Both ways of injection have the same
parameters (`drafters/block.py`, eq. 4).

T = 1, slots drawn, asked at the same positions of the same texts
(`conditional_acceptance.py`); tau is 1 + sum of survival. `gain` is over the first
drafter named, with a 95 % bootstrap over prompts. Each is trained from every seed;
counts are summed over them, and `by_seed` has the tau of each.

    python experiments/block_depth.py      5 minutes, and 1 to 3 of training a drafter
"""

import dataclasses
import pathlib

import common
import numpy as np
import trained

from specjax import figures

SMOKE = {
    "budget": trained.SMOKE,
    "drafters": ("dflash at input:1", "dspark:1"),
    "tasks": ("code",),
    "gamma": 3,
    "num_prompts": 2,
    "max_new_tokens": 8,
    "seeds": (0,),
}
_FIGURE = {  # means over the tasks of a domain: math, code, chat
    ("dspark", 1): (4.21, 3.77, 2.61),
    ("dspark", 2): (5.15, 4.70, 3.17),
    ("dspark", 4): (5.57, 5.12, 3.49),
    ("dflash", 4): (4.80, 4.44, 2.95),
}
PAPER = [
    {"drafter": name, "layers": layers, "task": task, "tau": tau}
    for (name, layers), taus in _FIGURE.items()
    for task, tau in zip(("math", "code", "chat"), taus, strict=True)
]


@dataclasses.dataclass(frozen=True)
class Config:
    budget: trained.Budget = trained.FULL
    drafters: tuple[str, ...] = (  # name:layers
        "dflash:4",
        "dflash:2",
        "dflash:1",
        "dflash at input:4",
        "dflash at input:2",
        "dflash at input:1",
        "dspark:2",
        "dspark:1",
    )
    tasks: tuple[str, ...] = ("code", "math", "chat")
    gamma: int = 7
    temperature: float = 1.0
    num_prompts: int = 32  # a task
    max_new_tokens: int = 64
    seed: int = 0  # of the texts asked about
    seeds: tuple[int, ...] = (0, 1)  # of the trainings


def main(config: Config) -> list[dict]:
    shop = trained.Workshop(config.budget)
    prompts = shop.prompts(config.tasks, config.num_prompts)
    found = {}
    for spec in config.drafters:
        name, layers = spec.split(":")
        drafter = shop.make(name, gamma=config.gamma, num_layers=int(layers))
        for seed in config.seeds:
            params = shop.train(drafter, seed)
            for task, chats in prompts.items():
                args = config, drafter, params, chats, config.temperature
                found.setdefault((name, int(layers), task), []).append(shop.ask(*args))
    rows = []
    for (name, layers, task), counts in found.items():
        first = next(c for (_, _, t), c in found.items() if t == task)
        row = {"drafter": name, "layers": layers, "task": task}
        row |= trained.compare(np.sum(counts, 0), np.sum(first, 0))
        rows.append(row | {"by_seed": [float(trained.tau(c.sum(1))) for c in counts]})
    return rows


def figure(rows: list[dict], path: pathlib.Path) -> None:
    """tau against layers, a panel a task."""
    plt = figures.pyplot()
    tasks, names = (
        list(dict.fromkeys(r[field] for r in rows)) for field in ("task", "drafter")
    )
    size = 1 + 2.8 * len(tasks), 3
    fig, axes = plt.subplots(
        1, len(tasks), figsize=size, squeeze=False, sharey=True, layout="constrained"
    )
    for axis, task in zip(axes[0], tasks, strict=True):
        for i, name in enumerate(names):
            mine = [r for r in rows if (r["task"], r["drafter"]) == (task, name)]
            mine.sort(key=lambda r: r["layers"])
            column = lambda key, mine=mine: np.array([r[key] for r in mine])
            x, tau = column("layers") * 1.03 ** (i - 1), column("tau")
            bars = [tau - column("low"), column("high") - tau]
            colour = figures.COLOURS[i]
            axis.errorbar(x, tau, bars, color=colour, marker="o", ms=4, label=name)
        axis.set_xscale("log", base=2)
        ticks = sorted({r["layers"] for r in rows})
        axis.set_xticks(ticks, list(map(str, ticks)))
        axis.set_title(task, fontsize=9)
        axis.set_xlabel("layers")
    axes[0, 0].set_ylabel("tau")
    axes[0, 0].legend(frameon=False, fontsize=8)
    fig.savefig(path, dpi=120)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
