"""Heads trained beside a frozen target and together with it: tokens won, quality lost.

Cai et al. 2024, arXiv:2401.10774: on Vicuna-7B the recipe of Medusa-2 takes the speedup
from 2.2x to 2.8x at an MT-Bench score of 6.18, where the first model has 6.17 and joint
training without the recipe 5.925. Stern et al. 2018, arXiv:1811.03115 (WMT14 En-De,
distilled data, k = 4, 6, 8): a mean block of 1.85, 1.90, 1.91 with a frozen model and
3.27, 4.18, 4.69 with a trained one. Here the same texts, written by the target, teach

    frozen   the heads alone
    recipe   heads first, then both: KL from the first target, a quarter of the rate
    direct   both at once at one rate, the loss of the heads with weight 1, CE

and each is decoded with its own target. KL, the share of equal choices and the loss are
those of the tuned target on texts that were held out. One training a row; the interval
of tau is over prompts.

    python experiments/joint_training.py      about 35 minutes on 2 cores at a load of 4
"""

import dataclasses
import pathlib
from typing import Any

import common
import jax

from specjax import corpus, drafters, figures, joint, metrics, targets, training
from specjax.generate import Model, Weights, generate
from specjax.sampling import Sampling

SMOKE = {
    "rows": ("medusa frozen", "medusa recipe"),
    "self_prompts": 16,
    "length": 32,
    "steps": 2,
    "temperatures": (0.0,),
    "gamma": 2,
    "tasks": ("code",),
    "num_prompts": 2,
    "max_new_tokens": 8,
}
DIRECT = {"heads_first": 0.0, "target_rate": 1.0, "head_weight": 1.0, "distil": False}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa frozen": ("medusa", {}),
    "medusa recipe": ("medusa2", {"rank": 16}),
    "medusa direct": ("medusa2", {"rank": 16} | DIRECT),
    "blockwise frozen": ("blockwise", {"hidden_width": 160}),
    "blockwise tuned": ("blockwise", {"hidden_width": 160, "tune_target": True}),
}


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "tiny"
    rows: tuple[str, ...] = tuple(WAYS)
    gamma: int = 4
    self_prompts: int = 1024  # chats that the target writes to learn from
    length: int = 128  # tokens of a training text
    steps: int = 300
    temperatures: tuple[float, ...] = (0.0, 1.0)
    tasks: tuple[str, ...] = ("code", "math", "chat")
    num_prompts: int = 16  # a task
    max_new_tokens: int = 64
    seed: int = 0


def main(config: Config) -> list[dict]:
    pretrained = targets.load(config.target)
    examples = corpus.self_made(pretrained, config.self_prompts, 0, config.length)
    texts, held = corpus.pack(examples, config.length).part(1 / 16)
    tasks = common.load_prompts(config.tasks, config.num_prompts)
    chats = [[{"role": "user", "content": p}] for ps in tasks.values() for p in ps]
    prompts = [pretrained.tokenizer.chat(chat) for chat in chats]
    settings = training.TrainConfig(steps=config.steps, seed=config.seed)
    rows = []
    for way in config.rows:
        name, fields = WAYS[way]
        drafter = drafters.get(name).for_target(
            pretrained.target.config, None, gamma=config.gamma, **fields
        )
        params = training.train(pretrained, drafter, texts, settings)
        own = joint.tuned(pretrained, drafter, params)
        kept = joint.quality(pretrained, own, held)
        for t in config.temperatures:
            model = Model(own.target, drafter, Sampling(t), own.stop_ids)
            run = generate(
                model,
                Weights(own.params, params),
                prompts,
                max_new_tokens=config.max_new_tokens,
                key=jax.random.key(config.seed),
            )
            low, high = metrics.bootstrap_tau(run.trace, config.seed)
            rows.append(
                {
                    "heads": way,
                    "temperature": t,
                    "tau": metrics.tau(run.trace),
                    "tau_low": low,
                    "tau_high": high,
                    "alpha": metrics.alpha_by_position(run.trace),
                    **kept,
                }
            )
    return rows


def figure(rows: list[dict], path: pathlib.Path) -> None:
    """tau against the KL of the target from what it was."""
    plt = figures.pyplot()
    fig, axis = plt.subplots(figsize=(5, 3.4), layout="constrained")
    cold = [r for r in rows if r["temperature"] == min(x["temperature"] for x in rows)]
    for row in cold:
        error = [[row["tau"] - row["tau_low"]], [row["tau_high"] - row["tau"]]]
        axis.errorbar(
            row["kl"], row["tau"], error, fmt="o", capsize=3, label=row["heads"]
        )
    axis.set_xscale("symlog", linthresh=1e-3)
    axis.set_xlim(left=-2e-4)
    axis.set_xlabel("KL from the first target, nats a token")
    axis.set_ylabel(f"tau, T = {cold[0]['temperature']:g}")
    axis.legend(frameon=False, fontsize=8)
    fig.savefig(path, dpi=150)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
