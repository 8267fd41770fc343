"""What a threshold on the confidence saves, and what it costs: DSpark's figure 5.

A row stops before its first draft whose confidence is under the threshold. `rate` is
the share of verified tokens, the anchor included, that a round commits, `tau` the
tokens a round commits and `verified` those it verifies. Intervals of tau are 95 %
bootstraps over prompts. `gamma` rows stop every draft at one length instead: at the
same number verified, is choosing by confidence better than drafting less?

Beside ours stand the paper's, Qwen3-4B on GSM8K, HumanEval and MT-Bench, T = 1.

    python experiments/threshold_sweep.py               about four minutes on 2 cores
"""

import dataclasses
import pathlib

import common
import jax
import jax.numpy as jnp
import numpy as np

from specjax import figures, metrics, targets
from specjax.generate import Model, Weights, generate
from specjax.sampling import Sampling
from specjax.scheduler import Threshold
from specjax.verify import PAD

SMOKE = {
    "tasks": ("code",),
    "thresholds": (0.5,),
    "gammas": (2,),
    "num_prompts": 2,
    "max_new_tokens": 8,
}
SWEEP = [f"{t / 10:g}" for t in range(10)]
RATES = {  # of the paper, percent
    "math": (76.9, 76.9, 76.9, 77.2, 78.0, 78.9, 80.1, 82.1, 86.4, 92.5),
    "code": (67.6, 67.6, 67.8, 68.5, 69.6, 72.1, 74.9, 78.6, 84.3, 92.0),
    "chat": (45.7, 45.5, 47.3, 51.4, 58.5, 66.5, 75.0, 82.4, 89.8, 95.7),
}
TAUS = {
    "math": (6.11, 6.11, 6.11, 6.12, 6.14, 6.13, 6.01, 5.74, 5.48, 4.56),
    "code": (5.38, 5.38, 5.39, 5.40, 5.36, 5.36, 5.24, 5.06, 4.70, 3.73),
    "chat": (3.64, 3.62, 3.64, 3.56, 3.47, 3.27, 3.05, 2.74, 2.33, 2.00),
}
PAPER = [
    {"task": task, "stop": f"threshold {t}", "rate": rate / 100, "tau": tau}
    for task in RATES
    for t, rate, tau in zip(SWEEP, RATES[task], TAUS[task], strict=True)
]


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "tiny"
    drafter: str = "dspark"  # name or folder
    tasks: tuple[str, ...] = ("code", "math", "chat")
    thresholds: tuple[float, ...] = tuple(t / 10 for t in range(10))
    gammas: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    temperature: float = 1.0
    num_prompts: int = 30  # a task
    max_new_tokens: int = 64
    seed: int = 0


def main(config: Config) -> list[dict]:
    pretrained = targets.load(config.target)
    chosen = common.load_drafters((config.drafter,), config.target, pretrained)
    drafter, params = next(iter(chosen.values()))
    tasks = common.load_prompts(config.tasks, config.num_prompts)
    model = Model(
        pretrained.target,
        drafter,
        Sampling(config.temperature),
        pretrained.stop_ids,
    )
    ways = {
        f"threshold {t:g}": dataclasses.replace(model, policy=Threshold(t))
        for t in config.thresholds
    } | {
        # The block keeps its width, so that only where drafts stop differs.
        f"gamma {g}": dataclasses.replace(model, policy=First(g))
        for g in config.gammas
    }
    rows = []
    for stop, way in ways.items():
        for task, prompts in tasks.items():
            chats = [[{"role": "user", "content": p}] for p in prompts]
            tokens = [pretrained.tokenizer.chat(chat) for chat in chats]
            trace = generate(
                way,
                Weights(pretrained.params, params),
                tokens,
                max_new_tokens=config.max_new_tokens,
                key=jax.random.key(config.seed),
                width=96,
            ).trace
            rows.append({"task": task, "stop": stop} | summary(trace))
    return sorted(rows, key=lambda row: config.tasks.index(row["task"]))


@dataclasses.dataclass(frozen=True)
class First:
    """A policy that verifies the first `count` drafts of every row."""

    count: int

    def init(self):
        return ()

    def plan(self, state, confidence, live):
        del live
        rows = confidence.shape[0]
        return jnp.full((rows,), self.count, jnp.int32), state


def summary(trace: metrics.Trace) -> dict:
    rounds = metrics.num_rounds(trace).sum()
    ran = np.asarray(trace.num_committed) > 0
    verified = np.sum(np.asarray(trace.drafted)[ran] != PAD) + rounds
    low, high = metrics.bootstrap_tau(trace)
    return {
        "rate": float(np.sum(trace.num_committed) / verified),
        "tau": metrics.tau(trace),
        "tau_low": low,
        "tau_high": high,
        "verified": float(verified / rounds),
    }


def figure(rows: list[dict], path: pathlib.Path) -> None:
    """tau against tokens verified, a panel a task."""
    plt = figures.pyplot()
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    fig, axes = plt.subplots(
        1,
        len(tasks),
        figsize=(0.8 + 2.8 * len(tasks), 3),
        squeeze=False,
        layout="constrained",
    )
    for axis, task in zip(axes[0], tasks, strict=True):
        for kind, colour in zip(("threshold", "gamma"), figures.COLOURS, strict=False):
            mine = [r for r in rows if r["task"] == task and r["stop"].startswith(kind)]
            mine = sorted(mine, key=lambda r: r["verified"])
            axis.plot(
                [r["verified"] for r in mine],
                [r["tau"] for r in mine],
                "o-",
                color=colour,
                ms=4,
                label={"threshold": "by confidence", "gamma": "by length"}[kind],
            )
        axis.set_title(task, fontsize=9)
        axis.set_xlabel("tokens verified a round")
    axes[0, 0].set_ylabel("tau")
    axes[0, 0].legend(frameon=False, fontsize=8)
    fig.savefig(path, dpi=120)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
