"""P-EAGLE against EAGLE-3 as more is drafted: tau for K = 1 to 7.

P-EAGLE (arXiv:2602.01469) drafts all K tokens in one pass of two layers, EAGLE-3 one
token a pass of one layer, each reading what it drafted before. A pass is what a draft
costs (`p_eagle_draft_cost.py`); here is what it is worth. Beside ours stand acceptance
lengths that vLLM's authors give for gpt-oss-20b on HumanEval and MT-bench, P-EAGLE of
four layers: there P-EAGLE is ahead at every K, by 0.37 and 0.17 tokens at K = 3 and by
0.91 and 0.43 at K = 7.

Both are trained on the same texts for as many steps (`trained.Budget`), EAGLE-3
unrolled 7 times and P-EAGLE with 8 depths, and asked at the same positions of the same
texts (`conditional_acceptance.py`): tau is 1 + sum of survival up to K, exact for every
K from one chain of 7, as no token of either depends on what is drafted after it. `gain`
is over EAGLE-3, with a 95 % bootstrap over prompts.

    python experiments/p_eagle_vs_eagle3.py     2 minutes, and 4 of training
"""

import dataclasses
import pathlib

import common
import numpy as np
import trained

from specjax import figures

SMOKE = {
    "budget": trained.SMOKE,
    "tasks": ("code",),
    "temperatures": (1.0,),
    "gamma": 2,
    "num_prompts": 2,
    "max_new_tokens": 8,
}
PAPER = [
    {"drafter": "p_eagle", "task": "code", "K": 3, "tau": 3.02},
    {"drafter": "p_eagle", "task": "chat", "K": 3, "tau": 2.87},
    {"drafter": "p_eagle", "task": "code", "K": 7, "tau": 3.94},
    {"drafter": "p_eagle", "task": "chat", "K": 7, "tau": 3.70},
    {"drafter": "eagle3", "task": "code", "K": 3, "tau": 2.65},
    {"drafter": "eagle3", "task": "chat", "K": 3, "tau": 2.70},
    {"drafter": "eagle3", "task": "code", "K": 7, "tau": 3.03},
    {"drafter": "eagle3", "task": "chat", "K": 7, "tau": 3.27},
]


@dataclasses.dataclass(frozen=True)
class Config:
    budget: trained.Budget = trained.FULL
    tasks: tuple[str, ...] = ("code", "math", "chat")
    gamma: int = 7  # the largest K
    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_prompts: int = 32  # a task
    max_new_tokens: int = 64
    seed: int = 0


def main(config: Config) -> list[dict]:
    shop = trained.Workshop(config.budget)
    prompts = shop.prompts(config.tasks, config.num_prompts)
    found = {}
    for name in ("eagle3", "p_eagle"):
        drafter = shop.make(name, gamma=config.gamma)
        params = shop.train(drafter, config.seed)
        for T in config.temperatures:
            for task, chats in prompts.items():
                found[T, task, name] = shop.ask(config, drafter, params, chats, T)
    rows = []
    for (T, task, name), counts in found.items():
        first = found[T, task, "eagle3"]
        for K in range(1, config.gamma + 1):
            about = {"drafter": name, "task": task, "T": f"{T:g}", "K": K}
            rows.append(about | trained.compare(counts, first, K))
    return rows


def figure(rows: list[dict], path: pathlib.Path) -> None:
    """tau against K, a panel a task, a row a temperature."""
    plt = figures.pyplot()
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    temperatures = list(dict.fromkeys(r["T"] for r in rows))
    shape = len(temperatures), len(tasks)
    size = 1 + 2.8 * shape[1], 0.6 + 2.5 * shape[0]
    fig, axes = plt.subplots(
        *shape, figsize=size, squeeze=False, sharey=True, layout="constrained"
    )
    for i, T in enumerate(temperatures):
        for j, task in enumerate(tasks):
            for name, colour in zip(
                ("eagle3", "p_eagle"), figures.COLOURS, strict=False
            ):
                at = (task, T, name)
                mine = [r for r in rows if (r["task"], r["T"], r["drafter"]) == at]
                K, tau, low, high = (
                    np.array([r[x] for r in mine]) for x in ("K", "tau", "low", "high")
                )
                axes[i, j].plot(K, tau, "o-", ms=4, color=colour, label=name)
                axes[i, j].fill_between(K, low, high, color=colour, alpha=0.15, lw=0)
            axes[i, j].set_title(f"{task}, T = {T}", fontsize=9)
            axes[i, j].set_xticks(K)
    for axis in axes[-1]:
        axis.set_xlabel("K, tokens drafted")
    for axis in axes[:, 0]:
        axis.set_ylabel("tau")
    axes[0, 0].legend(frameon=False, fontsize=8)
    fig.savefig(path, dpi=120)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
