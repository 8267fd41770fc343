"""What EAGLE's layer needs to see: the token, the feature, or both.

Li et al. 2024, arXiv:2401.15077, argue in section 3 that a feature alone does not say
which token was drawn from it, and a token alone not what the target makes of the text;
the layer that reads the feature with the token drawn from it drafts best. Their speedup
on a 7B target is 1.5x for the token, 1.9x for the feature and 2.8x for both. Here each
variant is trained on the same texts in the same order from the same start, and measured
on held-out prompts: alpha at each position of a chain, and tau.

    python experiments/eagle_inputs.py        13 minutes on 2 cores at a load of 8
"""

import dataclasses
import pathlib

import common
import jax
import numpy as np

from specjax import corpus, drafters, figures, metrics, targets, training
from specjax.generate import Model, Weights, generate
from specjax.sampling import Sampling

SMOKE = {
    "inputs": ("token", "both"),
    "self_prompts": 16,
    "length": 32,
    "steps": 2,
    "temperatures": (1.0,),
    "gamma": 2,
    "tasks": ("code",),
    "num_prompts": 1,
    "max_new_tokens": 8,
    "seeds": (0,),
}
PAPER_SPEEDUP = {"token": 1.5, "feature": 1.9, "both": 2.8}  # of a 7B target


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "tiny"
    inputs: tuple[str, ...] = ("token", "feature", "both")
    gamma: int = 5
    self_prompts: int = 1024  # chats that the target writes to learn from
    length: int = 128  # tokens of a training text
    steps: int = 200
    temperatures: tuple[float, ...] = (0.0, 1.0)
    tasks: tuple[str, ...] = ("code", "math", "chat")
    num_prompts: int = 12  # a task
    max_new_tokens: int = 64
    seeds: tuple[int, ...] = (0, 1)  # of training and of decoding


def main(config: Config) -> list[dict]:
    pretrained = targets.load(config.target)
    examples = corpus.self_made(pretrained, config.self_prompts, 0, config.length)
    texts = corpus.pack(examples, config.length)
    tasks = common.load_prompts(config.tasks, config.num_prompts)
    chats = [[{"role": "user", "content": p}] for ps in tasks.values() for p in ps]
    prompts = [pretrained.tokenizer.chat(chat) for chat in chats]
    rows = []
    for inputs in config.inputs:
        drafter = drafters.get("eagle").for_target(
            pretrained.target.config, None, gamma=config.gamma, inputs=inputs
        )
        runs = {t: [] for t in config.temperatures}
        for seed in config.seeds:
            settings = training.TrainConfig(steps=config.steps, seed=seed)
            params = training.train(pretrained, drafter, texts, settings)
            weights = Weights(pretrained.params, params)
            for t in config.temperatures:
                model = Model(
                    pretrained.target, drafter, Sampling(t), pretrained.stop_ids
                )
                run = generate(
                    model,
                    weights,
                    prompts,
                    max_new_tokens=config.max_new_tokens,
                    key=jax.random.key(seed),
                )
                runs[t].append(run.trace)
        rows += [summary(inputs, t, traces) for t, traces in runs.items()]
    return rows


def summary(inputs: str, temperature: float, traces: list) -> dict:
    """alpha by position and tau, means over seeds, and the spread of tau."""
    taus = [metrics.tau(trace) for trace in traces]
    alphas = np.array([metrics.alpha_by_position(trace) for trace in traces])
    return {
        "inputs": inputs,
        "temperature": temperature,
        "tau": float(np.mean(taus)),
        "tau_low": min(taus),
        "tau_high": max(taus),
        "alpha": alphas.mean(axis=0).tolist(),
        "paper_speedup": PAPER_SPEEDUP[inputs],
    }


def figure(rows: list[dict], path: pathlib.Path) -> None:
    """alpha by position for each variant, one panel a temperature."""
    plt = figures.pyplot()
    temperatures = sorted({r["temperature"] for r in rows})
    fig, axes = plt.subplots(
        1,
        len(temperatures),
        figsize=(4 * len(temperatures), 3.2),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, t in zip(axes[0], temperatures, strict=True):
        for row in rows:
            if row["temperature"] == t:
                label = f"{row['inputs']}, tau {row['tau']:.2f}"
                axis.plot(
                    range(1, len(row["alpha"]) + 1), row["alpha"], "o-", label=label
                )
        axis.set_xlabel("position in the draft")
        axis.set_title(f"T = {t:g}")
        axis.legend(frameon=False)
    axes[0, 0].set_ylabel("acceptance, given all before")
    fig.savefig(path, dpi=150)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
