"""DSpark's figure 2: acceptance by position of EAGLE-3, DFlash, DSpark and DFlash 2.

arXiv:2607.05147 finds that a drafter that goes token by token (EAGLE-3) is accepted as
often or more often the further a draft gets, given that all before was accepted, that
DFlash, whose slots know nothing of each other's tokens, falls behind, and that DSpark's
small sequential head holds the level. Beside ours stand the numbers of its figure for
Qwen3-4B (T = 1, means over the benchmarks of a domain).

The drafters are those of `block_table.py`, asked at the same positions of the same
texts as in `conditional_acceptance.py`, which says what the columns are. `change` is
alpha at k less that at 1, with a 95 % bootstrap over prompts: below 0 it decays.

    python experiments/block_positions.py      2 minutes after `block_table.py`
"""

import dataclasses
from typing import Any

import common
import conditional_acceptance
import numpy as np
import trained

SMOKE = {
    "budget": trained.SMOKE,
    "drafters": ("dflash", "dspark"),
    "tasks": ("code",),
    "gamma": 3,
    "num_prompts": 2,
    "max_new_tokens": 8,
}
_FIGURE = {
    ("math", "dflash"): (0.885, 0.827, 0.820, 0.834, 0.841, 0.839, 0.828),
    ("math", "eagle3"): (0.811, 0.823, 0.838, 0.844, 0.851, 0.856, 0.850),
    ("math", "dspark"): (0.905, 0.890, 0.888, 0.885, 0.887, 0.891, 0.882),
    ("code", "dflash"): (0.865, 0.815, 0.797, 0.801, 0.810, 0.801, 0.777),
    ("code", "eagle3"): (0.771, 0.774, 0.781, 0.791, 0.787, 0.794, 0.784),
    ("code", "dspark"): (0.886, 0.872, 0.860, 0.861, 0.858, 0.859, 0.851),
    ("chat", "dflash"): (0.718, 0.648, 0.638, 0.661, 0.682, 0.692, 0.688),
    ("chat", "eagle3"): (0.534, 0.589, 0.642, 0.678, 0.709, 0.729, 0.733),
    ("chat", "dspark"): (0.735, 0.738, 0.740, 0.744, 0.758, 0.766, 0.761),
}
PAPER = [
    {"drafter": name, "task": task, "T": "1", "k": k, "alpha": alpha}
    for (task, name), alphas in _FIGURE.items()
    for k, alpha in enumerate(alphas, 1)
]
HIDDEN = ("gain", "gain_low", "gain_high")


@dataclasses.dataclass(frozen=True)
class Config:
    budget: trained.Budget = trained.FULL
    drafters: tuple[str, ...] = ("eagle3", "dflash", "dspark", "dspark rnn", "dflash2")
    tasks: tuple[str, ...] = ("code", "math", "chat")
    gamma: int = 7
    temperature: float = 1.0
    num_prompts: int = 32  # a task
    max_new_tokens: int = 64
    seed: int = 0


def main(config: Config) -> list[dict]:
    shop = trained.Workshop(config.budget)
    prompts = shop.prompts(config.tasks, config.num_prompts)
    found = {}
    for name in config.drafters:
        drafter = shop.make(name, gamma=config.gamma)
        params = shop.train(drafter, config.seed)
        for task, chats in prompts.items():
            args = config, drafter, params, chats, config.temperature
            found[task, name] = shop.ask(*args)
    rows = []
    for (task, name), counts in found.items():
        about = {"drafter": name, "task": task, "T": f"{config.temperature:g}"}
        first = found[task, config.drafters[0]]
        settings: Any = config  # of which it reads the seed
        mine = conditional_acceptance.summary(settings, counts, first)
        changes = change(counts)
        rows += [about | a | b for a, b in zip(mine, changes, strict=True)]
    return sorted(rows, key=lambda row: config.tasks.index(row["task"]))


def change(counts: np.ndarray) -> list[dict]:
    """alpha_k - alpha_1 of sums [2 B G], on the same resampled texts."""
    B = counts.shape[1]
    draws = np.random.default_rng(0).integers(0, B, (2000, B))
    rate = lambda x: x[0] / np.maximum(x[1], 1e-9)
    less = lambda a: a - a[..., :1]
    low, high = np.percentile(less(rate(counts[:, draws].sum(2))), [2.5, 97.5], axis=0)
    columns = less(rate(counts.sum(1))), low, high
    names = "change", "change_low", "change_high"
    return [dict(zip(names, map(float, x), strict=True)) for x in np.stack(columns, 1)]


figure = conditional_acceptance.figure

if __name__ == "__main__":
    common.run(main, Config)
