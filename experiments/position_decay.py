"""Loss weights by position: DFlash's decay against the one that acceptance gives.

A slot matters only if all before it are accepted. DFlash (arXiv:2602.06036, eq. 4)
weighs slot k by exp(-(k - 1) / gamma'), 4 for blocks of 8, and shows in a figure
without numbers that this learns faster and ends higher than equal weights. With
alpha_k, the acceptance of slot k given all before, the weight can be derived: the
chance that slot k is reached is

    reach_k = alpha_1 .. alpha_{k-1}

Trainings of the same drafter on the same batches: no decay, the published one, and
`reach`, from the alphas that the drafter trained with the published decay has on its
own training texts; on demand 0.8^k, which differs little from the published 0.78^k. tau
at T = 1 is 1 + sum of survival at the same positions of the same held-out texts
(`conditional_acceptance.py`); `gain` is over the published decay, both with a 95 %
bootstrap over prompts.

    python experiments/position_decay.py      2 minutes, and 2 of training a drafter
"""

import dataclasses

import common
import jax
import jax.numpy as jnp
import numpy as np
import trained

from specjax import training
from specjax.drafters.dflash import DFlash
from specjax.typing import Array

SMOKE = {
    "budget": trained.SMOKE,
    "weights": ("published", "reach"),
    "tasks": ("code",),
    "gamma": 3,
    "num_prompts": 2,
    "max_new_tokens": 8,
}


@dataclasses.dataclass(frozen=True)
class Weighted(DFlash):
    """DFlash with any weights in its loss."""

    weights: tuple[float, ...] = ()

    @property
    def slot_weights(self) -> Array:
        return jnp.array(self.weights, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Config:
    budget: trained.Budget = trained.FULL
    weights: tuple[str, ...] = ("published", "none", "reach")  # also "0.8^k"
    tasks: tuple[str, ...] = ("code", "math", "chat")
    gamma: int = 7
    temperature: float = 1.0
    num_prompts: int = 32  # a task
    max_new_tokens: int = 64
    seed: int = 0


def main(config: Config) -> list[dict]:
    shop = trained.Workshop(config.budget)
    prompts = shop.prompts(config.tasks, config.num_prompts)
    published = shop.make("dflash", gamma=config.gamma)
    first = shop.train(published, config.seed)
    k = np.arange(config.gamma)
    choices = {
        "published": np.asarray(published.slot_weights),
        "none": np.ones(config.gamma),
        "0.8^k": 0.8**k,
        "reach": reach(shop, published, first),
    }
    found = {}
    for name in config.weights:
        drafter, params = published, first
        if name != "published":
            w = tuple(round(float(x), 4) for x in choices[name])
            drafter = shop.make("dflash", Weighted, gamma=config.gamma, weights=w)
            params = shop.train(drafter, config.seed)
        everything = [
            shop.ask(config, drafter, params, chats, config.temperature)
            for chats in prompts.values()
        ]
        tasks = zip(
            (*prompts, "all"), (*everything, np.hstack(everything)), strict=True
        )
        found[name] = dict(tasks)
    rows = []
    for task in (*prompts, "all"):
        for name, by_task in found.items():
            counts, base = by_task[task], found["published"][task]
            sums = counts.sum(1)
            row = {"task": task, "weights": name} | trained.compare(counts, base)
            row["alpha"] = (sums[0] / np.maximum(sums[1], 1e-9)).tolist()
            rows.append(row | {"w": choices[name].tolist()})
    return rows


def reach(shop, drafter, params, batches: int = 8) -> np.ndarray:
    """alpha_1 .. alpha_{k-1}, of blocks in the texts that the drafter learned from.

    "survival" of a batch is a mean of products, so alphas are ratios of neighbours and
    their product up to k - 1 is the survival there.
    """
    cache, survival = shop.features(drafter), []
    shared = shop.pretrained.target.shared(shop.pretrained.params)
    for step in range(batches):
        batch = cache.batch(shop.texts, shop.texts.batch(step, 8, 1))
        key = jax.random.key(step)
        logs = training.measure(drafter, params, shared, batch, key)
        survival.append(np.asarray(logs["survival"]))
    return np.concatenate([[1.0], np.mean(survival, axis=0)[:-1]])


HIDDEN = ("alpha", "w")

if __name__ == "__main__":
    common.run(main, Config)
