r"""EAGLE-3 against EAGLE-1: more texts, training-time test, and what the layer reads.

Li et al. 2025, arXiv:2503.01840, say that regressing features keeps EAGLE from gaining
by more data; that EAGLE-3, which drops the regression, unrolls its drafts in training
and reads three states of the target, goes on gaining; and that without the unrolling
acceptance falls with the position. Of LLaMA-3.1 8B on MT-bench at T = 0 they report tau
4.05 for EAGLE (a tree of 60 nodes), 5.37 without the regression and with training-time
test, 6.13 with three states as well; by position EAGLE falls from .71 to .51, EAGLE-3
stays at .78 to .81. Their growth with data is a figure without numbers.

Here each drafter is trained on 1/16, 1/4 and all of the same texts that the target
wrote, each share a part of the next. **Steps are equal, not epochs**: with equal epochs
the smallest share would get a sixteenth of the steps, and the table would show too
little training instead of too little data. All have the same batches, learning rate
and schedule.

They are asked at every position of texts that the target wrote on held-out prompts, at
T = 1 and greedily. With p, q the laws of drafted token k and x the text's tokens,

    alpha_k = sum w_k (1 - TV(p_k, q_k)) / sum w_k,
    w_k     = min(1, q_1(x_1) / p_1(x_1)) .. min(1, q_{k-1}(x_{k-1}) / p_{k-1}(x_{k-1}))

over positions is the acceptance of token k given that all before it were accepted, as
x was drawn from p. `tau` is 1 + sum_k alpha_1 .. alpha_k, of a chain as long as
`depth`, in rounds that start anywhere; `low` and `high` are the least and the largest
over seeds. `gain` is tau less that of the first drafter named, same share, with a 95 %
bootstrap over texts: all are asked at the same places.

    python experiments/eagle3_scaling.py --runs runs/eagle3_scaling
    python experiments/eagle3_scaling.py --runs runs/eagle3_scaling --name why \
        --shares 1 --temperatures 1 --drafters eagle "eagle token loss" eagle3 ...

The second form, with other names of `VARIANTS`, asks what makes the difference; results
`seeds` are of two trainings. The first took 40 minutes at a load of 12.
"""

import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np

from specjax import corpus, drafters, feature_cache, figures, targets, training
from specjax.corpus import Texts
from specjax.drafters import base
from specjax.drafters.eagle3 import Eagle3
from specjax.sampling import Sampling
from specjax.targets.base import Pretrained
from specjax.typing import Array

SMOKE = {
    "drafters": ("eagle", "eagle3"),
    "shares": (0.5,),
    "self_prompts": 16,
    "length": 32,
    "asked": 64,
    "steps": 2,
    "depth": 2,
    "temperatures": (1.0,),
    "tasks": ("code",),
    "num_prompts": 2,
    "seeds": (0,),
}
PAPER = [
    {"drafter": "eagle", "share": "1", "T": "0", "tau": 4.05},
    {"drafter": "eagle3 last state", "share": "1", "T": "0", "tau": 5.37},
    {"drafter": "eagle3", "share": "1", "T": "0", "tau": 6.13},
]


class LastState(Eagle3):
    """EAGLE-3 that reads what EAGLE-1 reads: the last state alone, after its norm."""

    @property
    def taps(self) -> tuple[int, ...]:
        return (-1,)


EAGLE = drafters.get("eagle")
LATE: dict[str, Any] = {"target_states": (2, 4, 7)}  # of 8 layers; published: 2, 4, 5
FLAGS = {"fc_norm": True, "norm_before_residual": True, "norm_output": True}  # of 3.1
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "eagle": (EAGLE, {}),
    "eagle3": (Eagle3, {"ttt_steps": 5}),
    "eagle3 one pass": (Eagle3, {"ttt_steps": 1}),
    # What makes the difference.
    "eagle token loss": (EAGLE, {"w_feature": 0.0, "w_token": 1.0}),
    "eagle3 normed": (Eagle3, {"ttt_steps": 5, "fc_norm": True}),
    "eagle3 late normed": (Eagle3, {"ttt_steps": 5, **LATE, "fc_norm": True}),
    "eagle3.1 late": (Eagle3, {"ttt_steps": 5, **LATE, **FLAGS}),
    "eagle3 last state": (LastState, {"ttt_steps": 5, "target_states": (7,)}),
    "eagle3 one pass, normed": (Eagle3, {"ttt_steps": 1, "fc_norm": True}),
    "eagle3 one pass, late": (Eagle3, {"ttt_steps": 1, **LATE}),
    "eagle3 one pass, late normed": (
        Eagle3,
        {"ttt_steps": 1, **LATE, "fc_norm": True},
    ),
    "eagle3 one pass, last": (LastState, {"ttt_steps": 1, "target_states": (7,)}),
    "eagle3 one pass, target's head": (Eagle3, {"ttt_steps": 1, "share_head": True}),
    "eagle3 one pass, normed residual": (
        Eagle3,
        {"ttt_steps": 1, "norm_before_residual": True},
    ),
}


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "tiny"
    drafters: tuple[str, ...] = ("eagle", "eagle3", "eagle3 one pass")
    shares: tuple[float, ...] = (0.0625, 0.25, 1.0)  # of the texts
    self_prompts: int = 1024  # chats that the target writes to learn from
    length: int = 96  # tokens of a text
    asked: int = 160  # tokens of a held-out text, its prompt included
    steps: int = 160  # the same for each share
    learning_rate: float = 4e-3
    depth: int = 6  # drafted tokens
    temperatures: tuple[float, ...] = (0.0, 1.0)
    tasks: tuple[str, ...] = ("code", "math", "chat")
    num_prompts: int = 16  # a task
    seeds: tuple[int, ...] = (0,)  # of training
    runs: pathlib.Path | None = None  # keeps checkpoints: a run that was cut goes on


@functools.partial(jax.jit, static_argnames=("target", "drafter", "sampling", "depth"))
def ask(target, drafter, sampling, depth, weights, params, tokens, mask) -> Array:
    """Sums over a text's positions of w_k (1 - TV_k) and of w_k, [2 B depth]."""
    shared = target.shared(weights)
    out = target(weights, tokens, taps=drafter.taps)
    g = drafter.fuse(params, out.features)
    outputs = drafter.unroll(params, shared, tokens, g, every=1, steps=depth)
    laws = sampling.probs(shared.logits(out.hidden))
    w = base.shift(mask, 1).astype(jnp.float32)  # the anchor is of the answer
    sums = []
    for k, y in enumerate(outputs, 1):
        p = base.shift(laws, k)
        q = sampling.probs(drafter.logits(params, shared, y))
        w = jnp.where(base.shift(mask, 1 + k), w, 0.0)
        kept = w * jnp.sum(jnp.minimum(p, q), axis=2)
        sums.append(jnp.stack([jnp.sum(kept, axis=1), jnp.sum(w, axis=1)]))
        following = base.shift(tokens, 1 + k)[..., None]
        at_p, at_q = (jnp.take_along_axis(x, following, axis=2)[..., 0] for x in (p, q))
        # Of a tie, greedy decoding may have written the other token: p is 0 there.
        seen = at_p > 0
        ratio = at_q / jnp.where(seen, at_p, 1.0)
        w = jnp.where(seen, w * jnp.minimum(1.0, ratio), 0.0)
    return jnp.stack(sums, axis=-1)


def kept(config: Config, name: str, make: Callable[[], Texts]) -> Texts:
    """What `make` gives, from a file among the runs if it is there."""
    if config.runs is None:
        return make()
    path = config.runs / f"{name}.npz"
    if not path.exists():
        texts = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, tokens=texts.tokens, mask=texts.mask)
    found = np.load(path)
    return Texts(found["tokens"], found["mask"])


def to_learn(config: Config, pretrained: Pretrained) -> Texts:
    """Chats that the target wrote, in no order."""
    made = corpus.self_made(pretrained, config.self_prompts, 0, config.length)
    texts = corpus.pack(made, config.length)
    order = np.random.default_rng(0).permutation(len(texts))  # they come sorted
    return Texts(texts.tokens[order], texts.mask[order])


def written(config: Config, pretrained: Pretrained, temperature: float) -> Texts:
    """The target's answers to held-out prompts."""
    tasks = common.load_prompts(config.tasks, config.num_prompts)
    prompts = [p for of_task in tasks.values() for p in of_task]
    answers = corpus.answer(
        pretrained,
        prompts,
        temperature=temperature,
        max_new_tokens=64,
        key=jax.random.key(1),
    )
    return corpus.pack(answers, config.asked)


def measure(pretrained, drafter, params, texts: Texts, temperature, depth):
    """The sums of `ask` for each text, [2 X depth]."""
    sums = []
    for at in range(0, len(texts), 8):
        # The last rows are filled up with the first ones: one shape, compiled once.
        rows = np.arange(at, at + 8) % len(texts)
        found = ask(
            pretrained.target,
            drafter,
            Sampling(temperature),
            depth,
            pretrained.params,
            params,
            texts.tokens[rows],
            texts.mask[rows],
        )
        sums.append(np.asarray(found, np.float64)[:, : len(texts) - at])
    return np.concatenate(sums, axis=1)


def learned(config: Config, pretrained, name: str, drafter, part: Texts, folder, seed):
    """Trains a variant on a share of the texts."""
    taps = "_".join(map(str, drafter.taps))
    cache = feature_cache.cache_features(
        folder / f"features-{taps}-{len(part)}", pretrained, drafter.taps, part
    )
    settings = training.TrainConfig(
        steps=config.steps, learning_rate=config.learning_rate, seed=seed
    )
    kept = folder / f"{name.replace(' ', '_')}-{len(part)}-{seed}"
    return training.train(
        pretrained,
        drafter,
        part,
        settings,
        cache=cache,
        folder=kept if config.runs else None,
    )


def main(config: Config) -> list[dict]:
    pretrained = targets.load(config.target)
    texts = kept(config, "texts", lambda: to_learn(config, pretrained))
    held_out = {
        T: kept(config, f"asked-{T:g}", lambda T=T: written(config, pretrained, T))
        for T in config.temperatures
    }
    folder = config.runs or pathlib.Path(tempfile.mkdtemp(prefix="specjax-scaling-"))
    found = {}
    for name in config.drafters:
        cls, fields = VARIANTS[name]
        drafter = cls.for_target(pretrained.target.config, None, gamma=1, **fields)
        for share in config.shares:
            count = round(share * len(texts))
            part = Texts(texts.tokens[:count], texts.mask[:count])
            for seed in config.seeds:
                params = learned(config, pretrained, name, drafter, part, folder, seed)
                for T, asked in held_out.items():
                    sums = measure(pretrained, drafter, params, asked, T, config.depth)
                    found.setdefault((name, count, share, T), []).append(sums)
                    tau = 1 + survival(sums.sum(1)).sum()
                    print(f"{name}, {count} texts, seed {seed}, T {T:g}: {tau:.3f}")
    return summary(config, found)


def survival(sums: np.ndarray) -> np.ndarray:
    """alpha_1 .. alpha_k together, of sums [2 .. depth]."""
    return np.cumprod(sums[0] / np.maximum(sums[1], 1e-9), axis=-1)


def summary(config: Config, found: dict) -> list[dict]:
    """Means over seeds; the gain over the first drafter on the same resampled texts."""
    rows = []
    for (name, count, share, T), by_seed in found.items():
        first = found[(config.drafters[0], count, share, T)]
        X = by_seed[0].shape[1]
        draws = np.random.default_rng(0).integers(0, X, (2000, X))
        tau = lambda runs, rows: np.mean(
            [1 + survival(s[:, rows].sum(-2)).sum(-1) for s in runs], axis=0
        )
        everything = np.arange(X)
        gains = tau(by_seed, draws) - tau(first, draws)
        taus = [float(tau([sums], everything)) for sums in by_seed]
        alphas = [s.sum(1)[0] / np.maximum(s.sum(1)[1], 1e-9) for s in by_seed]
        rows.append(
            {
                "drafter": name,
                "share": f"{share:g}",
                "texts": count,
                "T": f"{T:g}",
                "tau": float(np.mean(taus)),
                "low": min(taus),
                "high": max(taus),
                "gain": float(tau(by_seed, everything) - tau(first, everything)),
                "gain_low": float(np.percentile(gains, 2.5)),
                "gain_high": float(np.percentile(gains, 97.5)),
                "alpha_1_to_depth": np.mean(alphas, axis=0).tolist(),
            }
        )
    return rows


def figure(rows: list[dict], path: pathlib.Path) -> None:
    """Left: tau against texts. Right: alpha by position at the largest share."""
    plt = figures.pyplot()
    names, temperatures = (
        list(dict.fromkeys(row[field] for row in rows)) for field in ("drafter", "T")
    )
    most = max(row["texts"] for row in rows)
    fig, axes = plt.subplots(
        2, len(temperatures), squeeze=False, figsize=(9, 6.4), layout="constrained"
    )
    for (above, below), T in zip(axes.T, temperatures, strict=True):
        for name, colour in zip(names, figures.COLOURS, strict=False):
            mine = [r for r in rows if (r["drafter"], r["T"]) == (name, T)]
            column = lambda key, mine=mine: np.array([r[key] for r in mine])
            tau = column("tau")
            bars = [tau - column("low"), column("high") - tau]
            above.errorbar(
                column("texts"), tau, bars, color=colour, marker="o", label=name
            )
            alpha = next(r["alpha_1_to_depth"] for r in mine if r["texts"] == most)
            below.plot(range(1, len(alpha) + 1), alpha, "o-", color=colour)
        above.set_xscale("log", base=2)
        above.set_title(f"T = {T}; bars: over seeds", fontsize=9)
        above.set_xlabel("texts learned from, equal steps")
        above.set_ylabel("tau of a chain")
        below.set_xlabel(f"position k, {most} texts")
        below.set_ylabel("accepted, if all before were")
        below.set_ylim(0, 1)
    axes[0, 0].legend(frameon=False, fontsize=8)
    fig.savefig(path, dpi=120)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
