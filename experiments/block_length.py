"""DSpark's figure 4: proposal length of DFlash and of DSpark's two heads.

arXiv:2607.05147 lets the proposal (anchor and drafted tokens) grow from 4 to 16: tau
of DFlash saturates, the Markov head goes on gaining and the RNN head most, for 0.2 to
1.3 % of a round's latency at batch 128. Beside ours stand its numbers for Qwen3-4B.

Here `tau` is of the drafters of `block_table.py`, which were trained on blocks of 7
drafted tokens, with fewer slots (DFlash's own ablation: those trained on long blocks
shrink well and those of short ones do not grow). Lengths past 8 have no tau here.
It is 1 + sum of survival at T = 1 at the same positions of the same texts
(`conditional_acceptance.py`); `gain` is over the first drafter, with a 95 % bootstrap
over prompts.

`ms` is a draft and the target's pass over it, `batch` rows behind a prompt: the median
of interleaved repeats, all drafters of a length in turns. `overhead` is the median over
turns of the ratio to the first drafter's turn, less 1. Time does not depend on the
weights, so it is there for all lengths.

    python experiments/block_length.py      4 minutes after `block_table.py`
"""

import dataclasses
import pathlib
import time

import common
import jax
import jax.numpy as jnp
import numpy as np
import trained

from specjax import figures, kv_cache
from specjax.sampling import Sampling

SMOKE = {
    "budget": trained.SMOKE,
    "drafters": ("dflash", "dspark"),
    "tasks": ("code",),
    "lengths": (3, 5),
    "trained_gamma": 3,
    "num_prompts": 2,
    "max_new_tokens": 8,
    "batch": 1,
    "repeats": 2,
}
_LENGTHS = (4, 8, 12, 16)
_FIGURE = {
    ("math", "dflash"): (3.32, 4.80, 5.39, 5.54),
    ("math", "dspark"): (3.54, 5.57, 6.62, 7.19),
    ("math", "dspark rnn"): (3.54, 5.73, 6.97, 7.68),
    ("code", "dflash"): (3.23, 4.44, 4.85, 4.96),
    ("code", "dspark"): (3.41, 5.12, 5.89, 6.26),
    ("code", "dspark rnn"): (3.42, 5.26, 6.07, 6.44),
    ("chat", "dflash"): (2.61, 2.95, 3.02, 3.03),
    ("chat", "dspark"): (2.80, 3.49, 3.66, 3.70),
    ("chat", "dspark rnn"): (2.83, 3.58, 3.72, 3.81),
}
_OVERHEAD = {  # of a round, %, from the latencies of the figure
    "dspark": (0.22, 0.56, 0.94, 1.31),
    "dspark rnn": (0.23, 0.61, 1.01, 1.41),
}
PAPER = [
    {"drafter": name, "task": task, "length": length, "tau": tau}
    | ({"overhead": _OVERHEAD[name][i]} if name in _OVERHEAD else {})
    for (task, name), taus in _FIGURE.items()
    for i, (length, tau) in enumerate(zip(_LENGTHS, taus, strict=True))
]


@dataclasses.dataclass(frozen=True)
class Config:
    budget: trained.Budget = trained.FULL
    drafters: tuple[str, ...] = ("dflash", "dspark", "dspark rnn")
    tasks: tuple[str, ...] = ("code", "math", "chat")
    lengths: tuple[int, ...] = _LENGTHS  # the anchor and the drafted tokens
    trained_gamma: int = 7
    temperature: float = 1.0
    num_prompts: int = 32  # a task
    max_new_tokens: int = 64
    batch: int = 8  # rows of a round that is timed
    repeats: int = 60
    seed: int = 0


def main(config: Config) -> list[dict]:
    shop = trained.Workshop(config.budget)
    prompts = shop.prompts(config.tasks, config.num_prompts)
    fit = lambda name, gamma: shop.make(name, gamma=gamma)
    params = {
        name: shop.train(fit(name, config.trained_gamma), config.seed)
        for name in config.drafters
    }
    rows = []
    for length in config.lengths:
        made = {name: fit(name, length - 1) for name in config.drafters}
        calls = {n: call_of(config, shop, d, params[n]) for n, d in made.items()}
        times = in_turns(calls, config.repeats)
        first = config.drafters[0]
        for task, chats in prompts.items():
            found = {}
            for name, drafter in made.items():
                row = {"drafter": name, "task": task, "length": length}
                ratio = np.median(times[name] / times[first]) - 1
                row |= dict.fromkeys(("tau", "low", "high", "gain"), None)
                row |= dict.fromkeys(("gain_low", "gain_high"), None)
                if length - 1 <= config.trained_gamma:
                    args = config, drafter, params[name], chats, config.temperature
                    found[name] = shop.ask(*args)
                    row |= trained.compare(found[name], found[first])
                row["ms"] = 1e3 * float(np.median(times[name]))
                rows.append(row | {"overhead": 100 * float(ratio)})
    return rows


def call_of(config: Config, shop, drafter, params):
    """A draft and the target's pass over it, behind prompts of 64 tokens."""
    target, weights = shop.pretrained.target, shop.pretrained.params
    shared, (B, T) = target.shared(weights), (config.batch, 64)
    text = jax.random.randint(jax.random.key(0), (B, T), 6, target.config.vocab_size)
    size, lengths = T + 64, jnp.full((B,), T, jnp.int32)
    cache = target.init_cache(B, size, weights["embed"].dtype)
    prefill = jax.jit(lambda w: target(w, text, cache, taps=drafter.taps))
    out = prefill(weights)
    cache = kv_cache.commit(out.cache, None, lengths)
    begin = jax.jit(drafter.prefill, static_argnums=5)
    state = begin(params, shared, text, lengths, out.features, size)
    keys = jax.random.split(jax.random.key(1), B)

    def round_(weights, params, state, cache):
        shared = target.shared(weights)
        args = params, shared, state, text[:, 0], Sampling(config.temperature), keys
        draft, _ = drafter.draft(*args)
        nodes = jnp.concatenate([text[:, :1], draft.tokens], axis=1)
        hidden = target(weights, nodes, cache, taps=drafter.taps).hidden
        return target.logits(weights, hidden)

    run = jax.jit(round_)
    return lambda: jax.block_until_ready(run(weights, params, state, cache))


def in_turns(calls, repeats: int) -> dict[str, np.ndarray]:
    """Seconds of each call, taken in turns."""
    times = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    return {name: np.array(t) for name, t in times.items()}


def figure(rows: list[dict], path: pathlib.Path) -> None:
    """Left: tau against length by task. Right: the overhead of a round."""
    plt = figures.pyplot()
    names, tasks = (
        list(dict.fromkeys(r[field] for r in rows)) for field in ("drafter", "task")
    )
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    styles = "-", "--", ":"
    for name, colour in zip(names, figures.COLOURS, strict=False):
        mine = [r for r in rows if r["drafter"] == name]
        for task, style in zip(tasks, styles, strict=False):
            known = [r for r in mine if r["task"] == task and r["tau"] is not None]
            x, tau = ([r[key] for r in known] for key in ("length", "tau"))
            label = task if name == names[-1] else None
            left.plot(x, tau, "o" + style, color=colour, label=label)
        once = [r for r in mine if r["task"] == tasks[0]]
        x, over = ([r[key] for r in once] for key in ("length", "overhead"))
        right.plot(x, over, "o-", color=colour, label=name)
    left.set(xlabel="proposal length", ylabel="tau")
    left.set_xticks(sorted({r["length"] for r in rows if r["tau"] is not None}))
    left.legend(frameon=False, fontsize=8, loc="upper left")
    right.set(xlabel="proposal length", ylabel="round's overhead, %")
    right.set_xticks(sorted({r["length"] for r in rows}))
    right.legend(frameon=False, fontsize=8)
    fig.savefig(path, dpi=120)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
