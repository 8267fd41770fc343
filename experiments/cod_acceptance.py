"""What conditional drop of tokens (COD) costs in acceptance, at equal steps.

PARD (arXiv:2504.18583) keeps of K = 8 copies of a text 3.4 rows a token instead of 8
(`cod_counts.py`) and reports a training about three times as cheap at equal quality.
Here the shipped draft model is adapted for as many steps with the drop and without, on
the same batches; `untrained` is the draft model with masks it has never seen. tau at
T = 1 is 1 + sum of survival at the same positions of the same texts
(`conditional_acceptance.py`), `gain` over the first setting, both with a 95 % bootstrap
over prompts. `seconds` are of a step of the training, other jobs included.

    python experiments/cod_acceptance.py      4 minutes
"""

import dataclasses
import time

import common
import trained

from specjax.drafters.pard import Pard

SMOKE = {
    "budget": dataclasses.replace(trained.SMOKE, steps=1),
    "tasks": ("code",),
    "settings": ("0.7:0.2",),
    "gamma": 2,
    "num_prompts": 2,
    "max_new_tokens": 8,
}
BUDGET = dataclasses.replace(trained.FULL, steps=100, batch_size=4)


@dataclasses.dataclass(frozen=True)
class Config:
    budget: trained.Budget = BUDGET
    settings: tuple[str, ...] = ("0.7:0.2", "1:0", "untrained")  # rate:floor
    blocks: int = 8  # K
    gamma: int = 7
    learning_rate: float = 2e-3
    tasks: tuple[str, ...] = ("code", "math", "chat")
    temperature: float = 1.0
    num_prompts: int = 32  # a task
    max_new_tokens: int = 64
    seeds: tuple[int, ...] = (0,)  # of training
    seed: int = 0


def main(config: Config) -> list[dict]:
    shop = trained.Workshop(config.budget)
    pretrained = shop.pretrained
    models = common.load_drafters(("draft_model",), config.budget.target, pretrained)
    model, weights = models["draft_model"]
    prompts = shop.prompts(config.tasks, config.num_prompts)
    found, seconds = {}, {}
    for spec in config.settings:
        fields = {"gamma": config.gamma, "blocks": config.blocks}
        if spec != "untrained":
            rate, floor = map(float, spec.split(":"))
            fields |= {"rate": rate, "floor": floor}
        mask = pretrained.tokenizer.mask_token_id
        drafter = Pard.adapt(model, pretrained.target.config, mask, **fields)
        for seed in config.seeds if spec != "untrained" else config.seeds[:1]:
            began, params = time.perf_counter(), weights
            if spec != "untrained":
                args = drafter, seed, weights, config.learning_rate
                params = shop.train(*args)
            took = (time.perf_counter() - began) / config.budget.steps
            for task, chats in prompts.items():
                args = config, drafter, params, chats, config.temperature
                found[task, spec, seed] = shop.ask(*args)
                seconds[task, spec, seed] = took
    rows = []
    for (task, spec, seed), counts in found.items():
        first = found[task, config.settings[0], seed]
        about = {"task": task, "rate_floor": spec, "seed": seed}
        about["seconds"] = seconds[task, spec, seed]
        rows.append(about | trained.compare(counts, first))
    return sorted(rows, key=lambda row: config.tasks.index(row["task"]))


if __name__ == "__main__":
    common.run(main, Config)
