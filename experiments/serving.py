"""Requests served together on this machine: speed of all, speed of each, budget, load.

As many users as slots each send their next request when the last has ended. `gamma G`
verifies G drafts of every row (0: plain decoding), the others stop DSpark's seven by
its confidence: at a threshold, by the prefix scheduler or its asynchronous form, which
are told the rounds a second that were measured here. `throughput` is tokens a second of
all, `user_speed` of one request after its first token; `verified` are tokens verified a
request and round, the anchor included, `paid` those that a slot's pass had for it: all
slots take the width of the longest draft, to the next of 1, 2, 4 and 8 nodes.

`simulated` is the throughput of the same requests and policy in `specjax.simulate`,
from the times of the parts and from rounds recorded at gamma 7, `off` how far it is
from what was measured; `packed` is what it would be if the drafts of all slots were
packed into one pass. Means over seeds, `_sd` their deviation.

These are the axes of figures 7 and 8 of the DSpark paper (arXiv:2607.05147), whose
curves are DeepSeek-V4's on servers; `serving_at_scale.py` has a target of that kind.

Other work on the machine would stretch some rounds and not others: by default a second
is one that this process had a core for, and it is kept to one core.

    python experiments/serving.py                         about 10 minutes on a core
"""

import dataclasses
import os
import pathlib
import time
from typing import Any

import common
import numpy as np

from specjax import figures, targets
from specjax.drafters.none import NoDrafter
from specjax.generate import Model, Weights
from specjax.sampling import Sampling
from specjax.scheduler import Delayed, Prefix, Threshold
from specjax.serving import Batch, Report, Request, serve, summary
from specjax.simulate import Costs, Recorded, Simulator
from specjax.tree import Tree

SMOKE = {
    "users": (2,),
    "gammas": (0,),
    "max_new_tokens": 8,
    "rounds_of_requests": 2,
    "repeats": 1,
    "seeds": (0,),
}
HIDDEN = ("seconds", "first_token_95", "per_token", "live")


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "tiny"
    drafter: str = "dspark"  # name or folder; must say how sure it is
    users: tuple[int, ...] = (1, 4, 16)
    gammas: tuple[int, ...] = (0, 1, 2, 4)  # beside all of the drafter's
    threshold: float = 0.5
    tasks: tuple[str, ...] = ("code", "math", "chat")
    temperature: float = 1.0
    max_new_tokens: int = 64
    rounds_of_requests: int = 3  # requests a user
    repeats: int = 10  # of the timing of each part
    wall: bool = False  # time by the wall's clock, on all cores
    seeds: tuple[int, ...] = (0, 1, 2)


def main(config: Config) -> list[dict]:
    # Before JAX counts its cores; not every system can.
    if not config.wall and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    pretrained = targets.load(config.target)
    chosen = common.load_drafters((config.drafter,), config.target, pretrained)
    drafter, params = next(iter(chosen.values()))
    weights = Weights(pretrained.params, params)
    tasks = common.load_prompts(config.tasks, 16)
    chats = [p for row in zip(*tasks.values(), strict=True) for p in row]
    prompts = [
        tuple(pretrained.tokenizer.chat([{"role": "user", "content": p}]))
        for p in chats
    ]

    def make(slots: int, drafter: Any = drafter, policy: Any = None) -> Batch:
        sampling = Sampling(config.temperature)
        args = pretrained.target, drafter, sampling, pretrained.stop_ids
        return Batch(
            Model(*args, policy=policy),
            weights,
            slots,
            max_new_tokens=config.max_new_tokens,
            prompt_width=max(map(len, prompts)),
            clock=time.perf_counter if config.wall else time.process_time,
        )

    rows = []
    for slots in config.users:
        ways = {f"gamma {g}": make(slots, _drafting(drafter, g)) for g in config.gammas}
        whole = f"gamma {drafter.gamma}"
        ways[whole] = make(slots)
        told = make(slots, policy=Threshold(config.threshold))
        passes = Costs.of(told, config.repeats).passes(slots)
        first = slots * drafter.gamma // 2
        ways[f"threshold {config.threshold:g}"] = told
        ways["prefix"] = make(slots, policy=Prefix(passes))
        ways["delayed"] = make(slots, policy=Delayed(passes, first))
        asked = [_asked(config, prompts, slots, seed) for seed in config.seeds]
        # All ways once, then all again: what else the machine does falls on all alike.
        served = [{n: serve(b, r, slots) for n, b in ways.items()} for r in asked]
        drafts = Recorded.of(_joined([s[whole] for s in served]))
        for name, batch in ways.items():
            costs = Costs.of(batch, config.repeats)
            reports = [s[name] for s in served]
            same = [_simulated(r, batch, costs, drafts, batch.widths) for r in reports]
            packed = [_simulated(r, batch, costs, drafts, None) for r in reports]
            row = {"way": name, "users": slots} | means(reports)
            row["simulated"], row["packed"] = (
                float(np.mean(same)),
                float(np.mean(packed)),
            )
            row["off"] = row["simulated"] / row["throughput"] - 1
            row["seconds"] = [costs.begin, costs.draft[0], *costs.verify]
            rows.append(row)
    return rows


def _drafting(drafter: Any, gamma: int) -> Any:
    """A drafter of fewer tokens from the same block; none at all for 0."""
    if not gamma:
        return NoDrafter()
    return dataclasses.replace(drafter, topology=Tree.chain(gamma))


def _asked(config: Config, prompts, slots: int, seed: int) -> list[Request]:
    """All users' requests, over the prompts in turn; a seed shifts the start."""
    count = slots * config.rounds_of_requests
    return [
        Request(prompts[i % len(prompts)], config.max_new_tokens, seed=i)
        for i in range(seed * count, (seed + 1) * count)
    ]


def _joined(reports: list[Report]) -> Report:
    return Report([s for r in reports for s in r.served], [], [])


def _simulated(report: Report, batch: Batch, costs: Costs, drafts, widths) -> float:
    """Throughput of requests of the same prompts and lengths in the simulator."""
    served = sorted(report.served, key=lambda s: s.request.seed)
    asked = [
        dataclasses.replace(s.request, max_new_tokens=s.num_tokens) for s in served
    ]
    server = Simulator(
        drafts,
        costs,
        batch.slots,
        policy=batch.model.policy,
        gamma=batch.model.drafter.gamma
        if batch.model.policy
        else batch.model.drafter.tree.depth,
        widths=widths,
    )
    return summary(serve(server, asked, batch.slots))["throughput"]


def means(reports: list[Report]) -> dict[str, float]:
    """Means over seeds, and deviations of the two speeds."""
    found = [summary(r) for r in reports]
    row = {}
    for name in found[0]:
        values = [f[name] for f in found]
        row[name] = float(np.mean(values))
        if name in ("throughput", "user_speed"):
            spread = np.std(values, ddof=min(1, len(values) - 1))
            row[f"{name}_sd"] = float(spread)
    return row


def figure(rows: list[dict], path: pathlib.Path) -> None:
    draw(rows, path, "tiny target, measured on one core")


def draw(rows: list[dict], path: pathlib.Path, title: str) -> None:
    """Throughput against the speed of one on the left, budget against load right."""
    plt = figures.pyplot()
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    ways = list(dict.fromkeys(r["way"] for r in rows))
    static = [w for w in ways if w.startswith("gamma")]
    greys = plt.cm.Greys(np.linspace(0.35, 0.9, len(static)))
    colours = dict(zip(static, greys, strict=True))
    others = [w for w in ways if w not in static]
    colours |= dict(zip(others, figures.COLOURS, strict=False))
    for way in ways:
        mine = sorted((r for r in rows if r["way"] == way), key=lambda r: r["users"])
        column = lambda name, mine=mine: [r[name] for r in mine]
        line = {"color": colours[way], "marker": "o", "ms": 3.5, "lw": 1.2}
        if way in static:
            line["ls"] = "--"
        left.plot(column("user_speed"), column("throughput"), label=way, **line)
        right.plot(column("users"), column("verified"), label=way, **line)
    left.set_xlabel("tokens a second of one user")
    left.set_ylabel("tokens a second of all")
    left.set_title(title, fontsize=9)
    right.set_xscale("log", base=2)
    users = sorted({r["users"] for r in rows})
    right.set_xticks(users, [str(u) for u in users])
    right.set_xlabel("users")
    right.set_ylabel("tokens verified a request and round")
    right.set_ylim(bottom=0)
    handles, labels = left.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    fig.savefig(path, dpi=120)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
