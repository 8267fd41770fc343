"""One drafter for two targets of a family: what it was trained for, and its sibling.

PARD (arXiv:2504.18583) and a draft model read token ids alone, so one of them serves
every target of the tokenizer; drafters of features belong to one target. The siblings
here are `tiny` and `tiny` as Medusa-2's training left it (`joint.tuned`, an adapter in
all layers; it chooses as `tiny` does at 96.5 % of held-out tokens). Nothing is trained:
each shipped drafter, trained for `tiny`, drafts for both. In the table, greedy:

    tau          tokens a round with `tiny`
    sibling      with the tuned one
    difference   sibling - tau, with a 95 % bootstrap over prompts
    same         whether the sibling's text with the drafter is its text without

PARD's paper shows one drafter for the sizes of a family; a second size of `tiny` does
not exist.

    python experiments/one_for_two.py            3 minutes on 2 cores
"""

import dataclasses

import common
import jax
import numpy as np

from specjax import checkpoints, joint, metrics, targets
from specjax.generate import Model, Weights, autoregressive, generate
from specjax.sampling import GREEDY

SMOKE = {
    "drafters": ("pard",),
    "tasks": ("code",),
    "num_prompts": 2,
    "max_new_tokens": 8,
}


@dataclasses.dataclass(frozen=True)
class Config:
    drafters: tuple[str, ...] = ("draft_model", "pard", "pard2", "eagle", "dflash")
    tasks: tuple[str, ...] = ("code", "math", "chat")
    num_prompts: int = 24  # a task
    max_new_tokens: int = 64
    seed: int = 0


def main(config: Config) -> list[dict]:
    tiny = targets.load("tiny")
    shared, shipped = tiny.target.shared(tiny.params), checkpoints.shipped("tiny")
    _, medusa, adapter = checkpoints.load(shipped["medusa2"], shared)
    sibling = joint.tuned(tiny, medusa, adapter)
    chat = lambda p: tiny.tokenizer.chat([{"role": "user", "content": p}])
    prompts = {
        task: [chat(p) for p in some]
        for task, some in common.load_prompts(config.tasks, config.num_prompts).items()
    }

    def run(model, pretrained, params, some):
        return generate(
            model,
            Weights(pretrained.params, params),
            some,
            max_new_tokens=config.max_new_tokens,
            key=jax.random.key(config.seed),
            width=128,
        )

    rows, plain = [], {}
    for name in config.drafters:
        _, drafter, params = checkpoints.load(shipped[name], shared)
        model = Model(tiny.target, drafter, GREEDY, tiny.stop_ids)
        for task, some in prompts.items():
            if task not in plain:
                plain[task] = run(autoregressive(model), sibling, None, some).tokens
            first = run(model, tiny, params, some)
            other = run(model, sibling, params, some)
            rows.append(
                {
                    "drafter": name,
                    "task": task,
                    **compare(first.trace, other.trace, config.seed),
                    "same": other.tokens == plain[task],
                }
            )
    return rows


def compare(first: metrics.Trace, other: metrics.Trace, seed: int) -> dict[str, float]:
    """Both tau, and their difference over the same prompts drawn anew."""
    tokens = np.array([np.sum(t.num_committed, axis=1) for t in (first, other)])
    rounds = np.array([metrics.num_rounds(t) for t in (first, other)])
    B = tokens.shape[1]
    draws = np.random.default_rng(seed).integers(0, B, (2000, B))
    tau = tokens[:, draws].sum(2) / rounds[:, draws].sum(2)
    low, high = np.percentile(tau[1] - tau[0], [2.5, 97.5])
    own, theirs = tokens.sum(1) / rounds.sum(1)
    values = {"tau": own, "sibling": theirs, "difference": theirs - own}
    values |= {"low": low, "high": high}
    return {name: float(value) for name, value in values.items()}


if __name__ == "__main__":
    common.run(main, Config)
