"""Hydra against EAGLE at equal cost: of two drafters with one tau, which is faster?

A head of Hydra (Ankner et al. 2024, arXiv:2402.05109) is a matrix that reads the state
and the tokens drafted before it; a step of EAGLE (Li et al. 2024, arXiv:2401.15077) is
a decoder layer. EAGLE is accepted more often, Hydra's step should be cheaper. By
EAGLE-3's paper (arXiv:2503.01840), Vicuna 13B at T = 0, means over five tasks, a round
of Hydra++ keeps 3.50 tokens at 2.80 times the speed of plain decoding, one of EAGLE
3.96 at 3.05: a round takes 1.25 and 1.30 plain passes. Hydra's paper finds an EAGLE
layer of its own training to keep more tokens at about the speed of Hydra++ (a figure).

Here the shipped drafters draft chains of 1 to 6 tokens (Hydra has four heads) and a
grown tree of 16 nodes on the same prompts. Times are in plain passes (one token, no
drafter). All ways are timed in turn, a few rounds each, and the least of many turns is
taken: what else the machine does only adds. The measured speedup has no such remedy.

    v         a round of these nodes whose draft costs nothing
    c         what the draft and its commit add to it
    round     v + c
    tau       tokens kept a round, with a 95 % bootstrap over prompts
    predicted tau / round;   measured: tokens a second over those of plain decoding
    needs     round over EAGLE's of the same draft: a drafter with so many times EAGLE's
              tau is as fast, with less it is slower
    has       tau over EAGLE's of the same draft
    at_tau    round over that of EAGLE's chains **at this row's tau**: below 1 the row
              is faster than EAGLE would be. Between two chains their times are joined
              by a line, as mixing rounds of both would; plain decoding is the first

    python experiments/hydra_vs_eagle.py        9 minutes on 2 cores at a load of 16
    python experiments/hydra_vs_eagle.py --target smollm2-135m --name smollm2-costs

For a target without shipped drafters, as in the second form, drafters of its shape with
random weights are timed: all but tau, which is then not known.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import common
import jax
import numpy as np

from specjax import bench, checkpoints, drafters, figures, metrics, targets
from specjax.drafters.none import NoDrafter
from specjax.generate import Weights
from specjax.tree import DynamicTree

SMOKE = {
    "drafters": ("eagle", "hydra"),
    "gammas": (1, 2),
    "trees": (),
    "tasks": ("code",),
    "num_prompts": 1,
    "max_new_tokens": 8,
    "turns": 1,
}
TREES = {"grown 16": DynamicTree(16, 4)}
# Vicuna 13B, T = 0; Hydra's own tree of 64 nodes, EAGLE's of 26.
PAPER = [
    {"drafter": "hydra_plus", "draft": "grown 16", "tau": 3.50, "round": 1.25}
    | {"measured": 2.80},
    {"drafter": "eagle", "draft": "grown 16", "tau": 3.96, "round": 1.30}
    | {"measured": 3.05},
]


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "tiny"
    drafters: tuple[str, ...] = ("eagle", "hydra", "hydra_plus")  # eagle first
    gammas: tuple[int, ...] = (1, 2, 4, 6)  # chains
    trees: tuple[str, ...] = tuple(TREES)
    temperature: float = 0.0
    tasks: tuple[str, ...] = ("code", "math", "chat")
    num_prompts: int = 4  # a task
    max_new_tokens: int = 64
    turns: int = 40  # of the timing, four rounds each
    seed: int = 0


def load(config: Config, pretrained) -> tuple[dict[str, tuple[Any, Any]], bool]:
    """The shipped drafters, or for other targets drafters with random weights."""
    if set(config.drafters) <= set(checkpoints.shipped(config.target)):
        return common.load_drafters(config.drafters, config.target, pretrained), True
    shared, made = pretrained.target.shared(pretrained.params), {}
    for name in config.drafters:
        drafter = drafters.get(name).for_target(pretrained.target.config, None)
        params = jax.jit(drafter.init)(jax.random.key(config.seed), shared)
        cast = lambda x: x.astype(pretrained.dtype)
        made[name] = drafter, jax.tree.map(cast, params)
    return made, False


def shapes(config: Config, loaded) -> dict[str, dict[str, tuple[Any, Any]]]:
    """By the name of a draft: the drafters that can make it."""
    changes = {f"chain {g}": {"gamma": g, "topology": None} for g in config.gammas}
    changes |= {name: {"topology": TREES[name]} for name in config.trees}
    found = {}
    for draft, change in changes.items():
        able = {}
        for name, (drafter, params) in loaded.items():
            try:
                able[name] = dataclasses.replace(drafter, **change), params
            except ValueError as error:  # more than its heads can draft
                print(f"no {draft} of {name}: {error}")
        found[draft] = able
    return found


def time_rounds(runner: bench.Bench, able, config: Config) -> dict[str, np.ndarray]:
    """Seconds of a round by turn: plain, of a free draft, of each drafter."""
    tree = next(iter(able.values()))[0].tree
    ways = {"plain": (NoDrafter(), None), "free": (bench.FreeDrafter(tree=tree), None)}
    ways |= able
    prompts = runner.batches("all")[0]
    turns = [
        [
            runner.seconds_per_round(
                runner.model(drafter, config.temperature),
                Weights(runner.pretrained.params, params),
                prompts,
            )
            for drafter, params in ways.values()
        ]
        for _ in range(config.turns + 1)
    ]
    return dict(zip(ways, np.transpose(turns[1:]), strict=True))  # the first compiles


def kept(runner: bench.Bench, drafter, params, config: Config) -> dict[str, Any]:
    """tau with its interval and the measured speedup."""
    model = runner.model(drafter, config.temperature)
    weights = Weights(runner.pretrained.params, params)
    run, plain = runner.paired(model, weights, "all")
    return {
        "tau": metrics.tau(run.trace),
        "interval": list(metrics.bootstrap_tau(run.trace, config.seed)),
        "measured": run.tokens_per_second / plain.tokens_per_second,
    }


def main(config: Config) -> list[dict]:
    pretrained = targets.load(config.target)
    loaded, trained = load(config, pretrained)
    tasks = common.load_prompts(config.tasks, config.num_prompts)
    pooled: dict[str, Sequence[str]] = {
        "all": [p for prompts in tasks.values() for p in prompts]
    }
    settings = bench.Settings(
        max_new_tokens=config.max_new_tokens, seed=config.seed, timing_rounds=4
    )
    runner = bench.Bench(pretrained, pooled, settings)
    unknown = {"tau": None, "interval": None, "measured": None}
    rows = []
    for draft, able in shapes(config, loaded).items():
        times = time_rounds(runner, able, config)
        plain, free = times["plain"].min(), times["free"].min()
        for name, (drafter, params) in able.items():
            whole = times[name].min() / plain
            rows.append(
                {
                    "drafter": name,
                    "draft": draft,
                    "v": float(free / plain),
                    "c": float(whole - free / plain),
                    "round": float(whole),
                }
                | (kept(runner, drafter, params, config) if trained else unknown)
            )
            print(f"{draft} of {name}: round {whole:.2f}")
    return [row | beside(row, rows, config.drafters[0]) for row in rows]


def beside(row: dict[str, Any], rows: list[dict], first: str) -> dict[str, Any]:
    """Against the first drafter: with the same draft, and at the same tau."""
    tau, theirs = row["tau"], [r for r in rows if r["drafter"] == first]
    same = next(r for r in theirs if r["draft"] == row["draft"])
    result = {
        "predicted": tau and tau / row["round"],
        "needs": row["round"] / same["round"],
        "has": tau and tau / same["tau"],
        "at_tau": None,
    }
    if tau:
        chains = [r for r in theirs if r["draft"].startswith("chain")]
        taus = [1.0] + [r["tau"] for r in chains]
        if tau <= max(taus):
            rounds = [1.0] + [r["round"] for r in chains]
            order = np.argsort(taus)
            at = np.interp(tau, np.array(taus)[order], np.array(rounds)[order])
            result["at_tau"] = row["round"] / float(at)
    return result


def figure(rows: list[dict], path: pathlib.Path) -> None:
    """tau against the time of a round; lines through 0 join what is equally fast."""
    plt = figures.pyplot()
    fig, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    names = list(dict.fromkeys(row["drafter"] for row in rows))
    known = rows[0]["tau"] is not None
    for name, colour in zip(names, figures.COLOURS, strict=False):
        mine = [r for r in rows if r["drafter"] == name]
        for style, chain in (("o-", True), ("s", False)):
            some = [r for r in mine if r["draft"].startswith("chain") == chain]
            x = [r["round"] for r in some]
            y = [r["tau"] if known else int(r["draft"].split()[-1]) for r in some]
            label = name if chain else None
            axis.plot(x, y, style, color=colour, label=label)
    if known:
        top = 1.1 * max(r["tau"] for r in rows)
        for speed in (0.25, 0.5, 1.0):
            end = min(max(r["round"] for r in rows), top / speed)
            axis.plot([0, end], [0, speed * end], ":", color="grey", lw=0.8)
            axis.annotate(f"{speed:g}x", (end, speed * end), fontsize=8, color="grey")
        axis.set_ylim(1, top)
    axis.set_xlabel("time of a round, in plain passes")
    axis.set_ylabel("tau" if known else "tokens of a chain, nodes of a tree")
    axis.set_title("lines: chains; squares: trees", fontsize=9)
    axis.legend(frameon=False, fontsize=8)
    fig.savefig(path, dpi=120)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
