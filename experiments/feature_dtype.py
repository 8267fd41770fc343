"""Acceptance lost when cached features are int8: EAGLE-3 and DFlash.

A feature cache (`feature_cache.py`) keeps bfloat16, or int8 with a scale for each token
and tap, which is half the disk. Each drafter is trained from both, with the same texts,
batches and seed (`trained.Budget`), and then asked with features of the target itself:
what is compared is what it learned. No paper's table: those we know keep bfloat16.

T = 1, at the same positions of the same texts (`conditional_acceptance.py`); tau is
1 + sum of survival, `gain` over bfloat16, with a 95 % bootstrap over prompts. Rows of
seed `all` are of the sums over seeds. `bytes` are those of the shards a token of the
padded texts.

    python experiments/feature_dtype.py      a minute, and 1 to 3 of training a drafter
"""

import dataclasses
import pathlib

import common
import numpy as np
import trained

from specjax import figures

SMOKE = {
    "budget": trained.SMOKE,
    "drafters": ("dflash",),
    "tasks": ("code",),
    "gamma": 3,
    "num_prompts": 2,
    "max_new_tokens": 8,
    "seeds": (0, 1),
}
DTYPES = ("bfloat16", "int8")


@dataclasses.dataclass(frozen=True)
class Config:
    budget: trained.Budget = trained.FULL
    drafters: tuple[str, ...] = ("eagle3", "dflash")
    tasks: tuple[str, ...] = ("code", "math", "chat")
    gamma: int = 7
    temperature: float = 1.0
    num_prompts: int = 32  # a task
    max_new_tokens: int = 64
    seeds: tuple[int, ...] = (0, 1)
    seed: int = 0  # of the texts that are asked


def main(config: Config) -> list[dict]:
    shop = trained.Workshop(config.budget)
    prompts = shop.prompts(config.tasks, config.num_prompts)
    rows = []
    for name in config.drafters:
        drafter, found = shop.make(name, gamma=config.gamma), {}
        for seed in config.seeds:
            for dtype in DTYPES:
                params = shop.train(drafter, seed, dtype=dtype)
                for task, chats in prompts.items():
                    args = config, drafter, params, chats, config.temperature
                    found[str(seed), dtype, task] = shop.ask(*args)
        for dtype in DTYPES:
            for task in prompts:
                of = [found[str(seed), dtype, task] for seed in config.seeds]
                found["all", dtype, task] = np.sum(of, axis=0)
        sizes = {dtype: bytes_of(shop, drafter, dtype) for dtype in DTYPES}
        for (seed, dtype, task), counts in found.items():
            row = {"drafter": name, "dtype": dtype, "seed": seed, "task": task}
            row |= trained.compare(counts, found[seed, DTYPES[0], task])
            rows.append(row | {"bytes": sizes[dtype]})
    return rows


def bytes_of(shop: trained.Workshop, drafter, dtype) -> float:
    """On disk, for each token of the texts."""
    cache = shop.features(drafter, dtype)
    assert cache is not None  # both drafters read features
    shards = cache.folder.glob("*.npy")
    return sum(path.stat().st_size for path in shards) / shop.texts.tokens.size


def figure(rows: list[dict], path: pathlib.Path) -> None:
    """What int8 wins or loses, each seed and all, with intervals."""
    plt = figures.pyplot()
    fig, axis = plt.subplots(figsize=(6, 3), layout="constrained")
    mine = [r for r in rows if r["dtype"] != DTYPES[0]]
    labels = list(dict.fromkeys(f"{r['drafter']}\n{r['task']}" for r in mine))
    seeds = list(dict.fromkeys(r["seed"] for r in mine))
    for i, (seed, colour) in enumerate(zip(seeds, figures.COLOURS, strict=False)):
        of = [r for r in mine if r["seed"] == seed]
        x = [labels.index(f"{r['drafter']}\n{r['task']}") for r in of]
        x = np.array(x) + 0.2 * (i - len(seeds) / 2 + 0.5)
        gain, low, high = (
            np.array([r[k] for r in of]) for k in ("gain", "gain_low", "gain_high")
        )
        bars = gain - low, high - gain
        axis.errorbar(x, gain, bars, fmt="o", color=colour, label=f"seed {seed}")
    axis.axhline(0, color="grey", linewidth=0.8)
    axis.set_xticks(range(len(labels)), labels)
    axis.set_ylabel("tau of int8 less that of bfloat16")
    axis.legend(frameon=False, fontsize=8)
    fig.savefig(path, dpi=120)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
