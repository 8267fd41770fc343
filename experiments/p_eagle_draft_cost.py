"""Time of a draft by gamma: one deeper pass (P-EAGLE) against gamma passes (EAGLE-3).

P-EAGLE (arXiv:2602.01469) drafts gamma tokens in one pass of more layers over 2 gamma
rows, EAGLE-3 one token a pass of one layer. Here both draft for the tiny target behind
a prompt, with untrained weights of the shipped shapes (time does not depend on them):
EAGLE-3 of one layer, P-EAGLE of two (the quarter of the target's layers that it takes)
and of four, as published. The table has milliseconds a draft, the median of interleaved
repeats, and the ratio to EAGLE-3's; below 1 the single pass is the faster one.

The paper reports 1.10 to 1.36 times EAGLE-3's throughput on large targets, each at its
own best gamma (7 against 3); acceptance is not measured here.

    python experiments/p_eagle_draft_cost.py     2 minutes on 2 cores
"""

import dataclasses
import time

import common
import jax
import jax.numpy as jnp
import numpy as np

from specjax import drafters, figures, targets
from specjax.sampling import GREEDY

SMOKE = {"gammas": (1, 3), "layers": (2,), "repeats": 3}


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "tiny"
    gammas: tuple[int, ...] = (1, 2, 4, 7, 12)
    layers: tuple[int, ...] = (2, 4)  # of P-EAGLE
    prompt: int = 128  # tokens
    repeats: int = 100
    seed: int = 0


def main(config: Config) -> list[dict]:
    pretrained = targets.load(config.target)
    shared = pretrained.target.shared(pretrained.params)
    shape = pretrained.target.config
    mask = getattr(pretrained.tokenizer, "mask_token_id", None)
    key = jax.random.key(config.seed)
    text = jax.random.randint(key, (1, config.prompt), 0, shape.vocab_size)

    def call_of(drafter):
        params = jax.jit(drafter.init)(key, shared)
        run = jax.jit(lambda p: pretrained.target(p, text, taps=drafter.taps))
        lengths, size = jnp.array([config.prompt]), config.prompt + 32
        prefill = jax.jit(drafter.prefill, static_argnums=5)
        features = run(pretrained.params).features
        state = prefill(params, shared, text, lengths, features, size)
        keys = jax.random.split(key, 1)
        draft = jax.jit(drafter.draft, static_argnums=4)
        args = params, shared, state, text[:, 0], GREEDY, keys
        return lambda: jax.block_until_ready(draft(*args)[0].tokens)

    rows = []
    for gamma in config.gammas:
        made = {"eagle3": drafters.get("eagle3").for_target(shape, None, gamma=gamma)}
        for n in config.layers:
            one = drafters.get("p_eagle").for_target(shape, mask, gamma=gamma)
            deep = dataclasses.replace(one.config, num_layers=n)
            made[f"p_eagle_{n}"] = dataclasses.replace(one, config=deep)
        times = interleaved({k: call_of(d) for k, d in made.items()}, config.repeats)
        row = {"gamma": gamma} | {f"{k}_ms": 1e3 * t for k, t in times.items()}
        for n in config.layers:
            row[f"ratio_{n}"] = times[f"p_eagle_{n}"] / times["eagle3"]
        rows.append(row)
    return rows


def interleaved(calls, repeats: int) -> dict[str, float]:
    """Median seconds of each call, taken in turns."""
    times = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    return {name: float(np.median(t)) for name, t in times.items()}


def figure(rows, path) -> None:
    plt = figures.pyplot()
    fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    for name in (k for k in rows[0] if k.endswith("_ms")):
        ax.plot([r["gamma"] for r in rows], [r[name] for r in rows], "o-", label=name)
    ax.set(xlabel="gamma", ylabel="ms a draft", ylim=(0, None))
    ax.legend()
    fig.savefig(path, dpi=120)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
