"""DSpark's table 1: drafters by domain, the same texts and steps for all.

The paper (arXiv:2607.05147) trains EAGLE-3, DFlash and DSpark for the same targets on
the same 1.3 million chats and reports tau at T = 1 for blocks of 7. Beside ours stand
its means over the three tasks of a domain, for Qwen3-4B. Here each drafter has a few
minutes on what `tiny` wrote itself (`trained.Budget`): EAGLE-3 of one layer, unrolled 7
times, the others of two layers; DSpark with each of its three heads; and DFlash 2, of
which no such table exists.

DFlash draws its slots at T = 1 as in that paper; "dflash argmax" is the same drafter
proposing each slot's likeliest token. `tau` is the ratio of sums over all rounds, the
mean over trainings where there are several; `low` and `high` are a 95 % bootstrap over
prompts of the first training.

    python experiments/block_table.py      4 minutes, and 2 of training a drafter
"""

import dataclasses
from typing import Any

import common
import jax
import numpy as np
import trained

from specjax import metrics
from specjax.generate import Weights, generate

SMOKE = {
    "budget": trained.SMOKE,
    "drafters": ("dflash", "dspark"),
    "tasks": ("code",),
    "temperatures": (1.0,),
    "gamma": 3,
    "num_prompts": 2,
    "max_new_tokens": 8,
    "seeds": (0,),
}
_MEANS = {  # of GSM8K, MATH, AIME25; MBPP, HumanEval, LCB; MT-Bench, Alpaca, Arena
    "eagle3": {"math": 4.56, "code": 3.87, "chat": 2.40},
    "dflash": {"math": 4.80, "code": 4.44, "chat": 2.95},
    "dspark": {"math": 5.57, "code": 5.12, "chat": 3.49},
}
PAPER = [
    {"drafter": name, "task": task, "T": "1", "tau": value}
    for name, means in _MEANS.items()
    for task, value in means.items()
]


@dataclasses.dataclass(frozen=True)
class Config:
    budget: trained.Budget = trained.FULL
    drafters: tuple[str, ...] = (
        "eagle3",
        "dflash",
        "dflash argmax",
        "dspark",
        "dspark gated",
        "dspark rnn",
        "dflash2",
    )
    tasks: tuple[str, ...] = ("code", "math", "chat")
    gamma: int = 7
    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_prompts: int = 24  # a task
    max_new_tokens: int = 64
    seeds: tuple[int, ...] = (0,)  # of training


def main(config: Config) -> list[dict]:
    shop = trained.Workshop(config.budget)
    prompts = shop.prompts(config.tasks, config.num_prompts)
    rows = []
    for name in config.drafters:
        drafter = shop.make(name.removesuffix(" argmax"), gamma=config.gamma)
        by_seed = [shop.train(drafter, seed) for seed in config.seeds]
        greedy = name.endswith("argmax")
        if greedy:
            drafter = dataclasses.replace(drafter, propose="argmax")
        for T in config.temperatures:
            if greedy and T == 0:
                continue  # there it proposes so anyway
            for task, chats in prompts.items():
                traces = [decode(config, shop, drafter, p, T, chats) for p in by_seed]
                rows.append({"drafter": name, "task": task, "T": f"{T:g}"})
                rows[-1] |= summary(traces)
    return rows


def decode(config: Config, shop, drafter, params, T: float, prompts) -> metrics.Trace:
    return generate(
        shop.model(drafter, T),
        Weights(shop.pretrained.params, params),
        prompts,
        max_new_tokens=config.max_new_tokens,
        key=jax.random.key(0),
        width=96,  # one compiled program for all tasks
    ).trace


def summary(traces: list[metrics.Trace]) -> dict[str, Any]:
    low, high = metrics.bootstrap_tau(traces[0])
    taus = [metrics.tau(trace) for trace in traces]
    return {
        "tau": float(np.mean(taus)),
        "low": low,
        "high": high,
        "by_seed": taus,
        "rounds": int(metrics.num_rounds(traces[0]).sum()),
    }


if __name__ == "__main__":
    common.run(main, Config)
