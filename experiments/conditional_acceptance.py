"""Acceptance by position: is a later token worse once all before it were right?

alpha_k = P(token k accepted | tokens 1 .. k-1 accepted). Heads that read the last state
alone (Medusa) must guess token k without knowing token k - 1; heads or layers that read
what was drafted before (Hydra, EAGLE) need not. The target writes one text a prompt, by
itself; at every position of it each drafter drafts a chain, and the target's pass over
that chain gives the probability a_k that its token k is accepted and 1 - TV_k, that of
any token drawn there. Then

    alpha_k = sum w_k (1 - TV_k) / sum w_k,   w_k = a_1 .. a_{k-1},

over positions, w_k = 0 behind a token that ends the text. So all drafters are asked at
the same positions of the same texts: `gain` is the difference from the first one named.
Intervals are 95 % bootstraps over prompts. `survival` is alpha_1 .. alpha_k together; 1
plus its sum is the tau of rounds that start anywhere (a run's rounds start where the
last one ended, so its tau differs).

Beside ours stand numbers of others for T = 0. EAGLE: the paper's 0- to 3-alpha, Vicuna
7B on MT-bench (arXiv:2401.15077); on LLaMA2-chat 70B .75 .69 .65 .64, and for L3.1 8B
EAGLE-3's paper (arXiv:2503.01840) has EAGLE falling from .71 to .51 and EAGLE-3 staying
at .78 to .81. Medusa: its repository's top-1 accuracy of the first head, Vicuna 7B
against ShareGPT text; those of the later heads, .316 .201 .147, are over all texts and
not conditional. Of Hydra we know no such numbers; of whole trees Medusa-2 is reported
to keep 3.47 tokens a round (Vicuna 7B), Hydra 3.65 (Vicuna 13B, by EAGLE-3's paper).

    python experiments/conditional_acceptance.py        two minutes on 2 cores
"""

import dataclasses
import functools
import pathlib

import common
import jax
import jax.numpy as jnp
import numpy as np

from specjax import figures, kv_cache, targets
from specjax.generate import Model, Weights, autoregressive, generate, pad_prompts
from specjax.sampling import Sampling
from specjax.typing import Array
from specjax.verify import PAD, Verdict

SMOKE = {
    "drafters": ("medusa", "hydra"),
    "tasks": ("code",),
    "temperatures": (1.0,),
    "num_prompts": 2,
    "max_new_tokens": 8,
}
PAPER = [
    {"drafter": "medusa", "T": "0", "k": 1, "alpha": 0.560},
    {"drafter": "eagle", "T": "0", "k": 1, "alpha": 0.79},
    {"drafter": "eagle", "T": "0", "k": 2, "alpha": 0.74},
    {"drafter": "eagle", "T": "0", "k": 3, "alpha": 0.72},
    {"drafter": "eagle", "T": "0", "k": 4, "alpha": 0.73},
]
WIDTH = 96  # tokens that prompts are padded to: one compiled program for all tasks


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "tiny"
    # Names or folders.
    drafters: tuple[str, ...] = ("medusa", "hydra", "hydra_plus", "eagle", "mtp")
    tasks: tuple[str, ...] = ("code", "math", "chat")
    gamma: int = 4
    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_prompts: int = 32  # a task
    max_new_tokens: int = 64
    seed: int = 0


@functools.partial(jax.jit, static_argnames=("model",))
def ask(
    model: Model, weights: Weights, prompts, lengths, texts, num_tokens, key
) -> tuple[Array, Array]:
    """Sums over a text's positions of w_k (1 - TV_k) and of w_k, [B G] each."""
    target, drafter, sampling = model.target, model.drafter, model.sampling
    shared, (B, W) = target.shared(weights.target), texts.shape
    stop, D = jnp.asarray(model.stop_ids, jnp.int32), drafter.tree.depth
    size = prompts.shape[1] + W + D + 2
    cache = target.init_cache(B, size, weights.target["embed"].dtype)
    out = target(weights.target, prompts, cache, taps=drafter.taps)
    one = jnp.ones((B,), jnp.int32)
    cache = kv_cache.commit(out.cache, None, lengths)
    state = drafter.prefill(
        weights.drafter, shared, prompts, lengths, out.features, size
    )

    def step(carry, xs):
        cache, state = carry
        anchor, following, here, key = xs
        keys = jax.random.split(key, B)
        seen = dataclasses.replace(shared, cache=cache)
        draft, state = drafter.draft(
            weights.drafter, seen, state, anchor, sampling, keys
        )
        nodes = jnp.concatenate([anchor[:, None], draft.tokens], axis=1)
        out = target(weights.target, nodes, cache, taps=drafter.taps)
        p = sampling.probs(target.logits(weights.target, out.hidden))[:, :-1]
        at = lambda law: jnp.take_along_axis(law, draft.tokens[..., None], axis=2)
        accepted = jnp.minimum(1.0, at(p) / at(draft.laws))[..., 0]
        goes_on = jnp.where(jnp.isin(draft.tokens, stop), 0.0, accepted)
        before = jnp.cumprod(goes_on, axis=1)[:, :-1]
        live = (here < num_tokens) & ~jnp.isin(anchor, stop)
        w = jnp.pad(before, ((0, 0), (1, 0)), constant_values=1.0)
        w = jnp.where(live[:, None], w, 0.0)
        kept = jnp.sum(jnp.minimum(p, draft.laws), axis=2)

        # Nothing is accepted: the text goes on as the target wrote it.
        tokens = jnp.full((B, D + 1), PAD, jnp.int32).at[:, 0].set(following)
        verdict = Verdict(0 * one, tokens, jnp.ones((B,), bool))
        state = drafter.commit(
            weights.drafter, shared, state, verdict, nodes, out.features
        )
        return (kv_cache.commit(out.cache, None, one), state), (w * kept, w)

    following = jnp.pad(texts[:, 1:], ((0, 0), (0, 1)))
    keys = jax.random.split(key, W)
    places = jnp.arange(W, dtype=jnp.int32)
    xs = (texts.T, following.T, places, keys)
    _, (kept, reached) = jax.lax.scan(step, (cache, state), xs)
    return jnp.sum(kept, axis=0), jnp.sum(reached, axis=0)


def main(config: Config) -> list[dict]:
    pretrained = targets.load(config.target)
    chosen = common.load_drafters(config.drafters, config.target, pretrained)
    tasks = common.load_prompts(config.tasks, config.num_prompts)
    rows = []
    for temperature in config.temperatures:
        sampling = Sampling(temperature)
        for task, prompts in tasks.items():
            chats = [[{"role": "user", "content": p}] for p in prompts]
            tokens = [pretrained.tokenizer.chat(chat) for chat in chats]
            first = None
            for name, (drafter, params) in chosen.items():
                if hasattr(drafter, "propose"):  # the estimate needs drawn drafts
                    drafter = dataclasses.replace(drafter, propose="sample")
                drafter = dataclasses.replace(drafter, gamma=config.gamma)
                model = Model(pretrained.target, drafter, sampling, pretrained.stop_ids)
                weights = Weights(pretrained.params, params)
                counts = run(config, model, weights, tokens)
                first = counts if first is None else first
                about = {"drafter": name, "task": task, "T": f"{temperature:g}"}
                rows += [about | row for row in summary(config, counts, first)]
    return rows


def run(config: Config, model: Model, weights: Weights, prompts) -> np.ndarray:
    """Kept and reached of each prompt, [2 B G]; the text is the target's own."""
    plain = generate(
        autoregressive(model),
        Weights(weights.target, None),
        prompts,
        max_new_tokens=config.max_new_tokens,
        key=jax.random.key(config.seed),
        width=WIDTH,
    )
    texts = np.zeros((len(prompts), config.max_new_tokens), np.int32)
    for row, text in zip(texts, plain.tokens, strict=True):
        row[: len(text)] = text
    padded, lengths = pad_prompts(prompts, WIDTH)
    sums = ask(
        model,
        weights,
        jnp.asarray(padded),
        jnp.asarray(lengths),
        jnp.asarray(texts),
        jnp.asarray([len(text) for text in plain.tokens], jnp.int32),
        jax.random.key(config.seed),
    )
    return np.asarray(sums, np.float64)


def summary(config: Config, counts: np.ndarray, first: np.ndarray) -> list[dict]:
    """alpha by position, and its gain over the first drafter, on the same resamples."""
    B = counts.shape[1]
    draws = np.random.default_rng(config.seed).integers(0, B, (2000, B))
    rate = lambda x: x[0] / np.maximum(x[1], 1e-9)
    resampled = lambda x: rate(x[:, draws].sum(2))
    ends = lambda x: np.percentile(x, [2.5, 97.5], axis=0)
    alpha, base = rate(counts.sum(1)), rate(first.sum(1))
    low, high = ends(resampled(counts))
    gain_low, gain_high = ends(resampled(counts) - resampled(first))
    return [
        {
            "k": k + 1,
            "reached": float(counts[1, :, k].sum()),
            "alpha": float(alpha[k]),
            "low": float(low[k]),
            "high": float(high[k]),
            "survival": float(np.prod(alpha[: k + 1])),
            "gain": float(alpha[k] - base[k]),
            "gain_low": float(gain_low[k]),
            "gain_high": float(gain_high[k]),
        }
        for k in range(len(alpha))
    ]


def figure(rows: list[dict], path: pathlib.Path) -> None:
    """alpha by position: tasks side by side, a row a temperature."""
    plt = figures.pyplot()
    tasks, temperatures, names = (
        list(dict.fromkeys(r[field] for r in rows))
        for field in ("task", "T", "drafter")
    )
    shape = len(temperatures), len(tasks)
    size = 1 + 2.8 * shape[1], 0.6 + 2.5 * shape[0]
    fig, axes = plt.subplots(
        *shape, figsize=size, squeeze=False, sharey=True, layout="constrained"
    )
    for i, T in enumerate(temperatures):
        for j, task in enumerate(tasks):
            axis = axes[i, j]
            for name, colour in zip(names, figures.COLOURS, strict=False):
                at = (task, T, name)
                mine = [r for r in rows if (r["task"], r["T"], r["drafter"]) == at]
                column = lambda key, mine=mine: np.array([r[key] for r in mine])
                alpha = column("alpha")
                bars = [alpha - column("low"), column("high") - alpha]
                axis.errorbar(
                    column("k"), alpha, bars, color=colour, marker="o", ms=4, label=name
                )
            axis.set_title(f"{task}, T = {T}", fontsize=9)
            axis.set_xticks(sorted({r["k"] for r in rows}))
            axis.set_ylim(0, 1)
    for axis in axes[-1]:
        axis.set_xlabel("position k")
    for axis in axes[:, 0]:
        axis.set_ylabel("accepted, if all before were")
    axes[0, 0].legend(frameon=False, fontsize=8)
    fig.savefig(path, dpi=120)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
