"""Does the MTP objective help the target, and is its module worth more than one added?

DeepSeek-V3 trains its module together with the target (arXiv:2412.19437, section 2.2):
loss = L_main + w L_mtp with w = 0.3 for 10 of 14.8 trillion tokens, then 0.1. Here a
small decoder learns from nothing on texts that the tiny target wrote, once by the next
token alone and once with the module; same seed, rows, steps and optimiser. To each of
the two frozen targets a module is then added, trained for as many steps on the same
texts by the same loss. On held-out texts the table has

    held_out    the target's own loss, nats a token
    module_ce   the module's loss at its one step
    alpha       acceptance, sum min(p, q), of step 1 and of step 2 by reuse
    tau         tokens a round of two drafts, expected from the survival

The paper reports the first (better on most benchmarks at 15.7 B and 228.7 B parameters,
the module dropped) and 85 to 90 % acceptance of the second token; it compares with no
module added afterwards. Here are under a million weights on a few hundred thousand
tokens: a check of the code and of signs, not of sizes.

    python experiments/mtp_pretraining.py        10 minutes on 2 cores
"""

import dataclasses
import functools
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax import corpus, targets, training
from specjax.corpus import Texts
from specjax.drafters import base
from specjax.drafters.base import Batch
from specjax.drafters.mtp import MTP
from specjax.targets.base import Pretrained
from specjax.targets.llama import Llama
from specjax.training import TrainConfig
from specjax.transformer import TransformerConfig, tables

SMOKE = {"num_chats": 24, "num_held_out": 16, "steps": 3, "length": 48, "seeds": (0,)}
SWITCH = 10 / 14.8  # share of the tokens at the first weight


@dataclasses.dataclass(frozen=True)
class Config:
    writer: str = "tiny"  # the target that writes the texts
    num_chats: int = 2048
    num_held_out: int = 256
    length: int = 128  # tokens of a text
    width: int = 96
    num_layers: int = 4
    steps: int = 200
    batch_size: int = 16  # texts a step
    learning_rate: float = 4e-3
    weights: tuple[float, float] = (0.3, 0.1)  # of the module's loss
    seeds: tuple[int, ...] = (0, 1)


def texts_of(config: Config, count: int, seed: int) -> Texts:
    """Chats that the writer invents; every token up to the end is to be learned."""
    writer = targets.load(config.writer)
    made = corpus.self_made(writer, count, seed, config.length)
    texts = corpus.pack(made, config.length)
    real = np.flip(np.maximum.accumulate(np.flip(texts.mask, 1), 1), 1)
    return Texts(texts.tokens, np.ascontiguousarray(real))


def shape_of(config: Config, vocab_size: int) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=vocab_size,
        width=config.width,
        num_layers=config.num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_width=config.width // 4,
        mlp_width=3 * config.width,
        tie_embeddings=True,
        max_positions=config.length,
    )


def joint_loss(target: Llama, drafter: MTP, params, tokens, mask, weight):
    """L_main + weight L_mtp; both reach the trunk and the shared tables."""
    hidden = target(params["target"], tokens).hidden
    shared = tables(target.config, params["target"])
    labels, wanted = base.shift(tokens, 1), base.shift(mask, 1)
    main = base.masked_mean(base.cross_entropy(shared.logits(hidden), labels), wanted)
    batch = Batch(tokens, mask, hidden, hidden)
    module, _ = drafter.loss(params["module"], shared, batch, jax.random.key(0))
    return main + weight * module, main


@functools.partial(
    jax.jit, static_argnames=("target", "drafter", "config"), donate_argnums=(3, 4)
)
def step(target, drafter, config: TrainConfig, params, state, tokens, mask, weight):
    loss = functools.partial(joint_loss, target, drafter)
    (_, main), grads = jax.value_and_grad(loss, has_aux=True)(
        params, tokens, mask, weight
    )
    updates, state = config.optimiser().update(grads, state, params)
    return optax.apply_updates(params, updates), state, main


def pretrain(config: Config, optimisation: TrainConfig, target, drafter, texts, joint):
    """Target and module from nothing; `joint` False gives the module no weight."""
    keys = jax.random.split(jax.random.key(optimisation.seed))
    params = {"target": target.init(keys[0])}
    shared = target.shared(params["target"])
    params["module"] = drafter.init(keys[1], shared)
    state = optimisation.optimiser().init(params)
    for i in range(config.steps):
        rows = texts.batch(i, config.batch_size, optimisation.seed)
        weight = config.weights[i >= SWITCH * config.steps] if joint else 0.0
        params, state, _ = step(
            target,
            drafter,
            optimisation,
            params,
            state,
            texts.tokens[rows],
            texts.mask[rows],
            jnp.float32(weight),
        )
    return params


def evaluate(target, drafter, params, module, texts: Texts, batch_size: int):
    """Means over held-out texts: the target's loss, the module's, alpha, survival."""

    @jax.jit
    def look(params, module, tokens, mask):
        loss, main = joint_loss(
            target, drafter, {"target": params, "module": module}, tokens, mask, 1.0
        )
        hidden = target(params, tokens).hidden
        batch, key = Batch(tokens, mask, hidden, hidden), jax.random.key(0)
        _, logs = drafter.loss(module, target.shared(params), batch, key)
        return main, loss - main, logs["alpha"], logs["survival"]

    found = []
    for at in range(0, len(texts) - batch_size + 1, batch_size):
        rows = slice(at, at + batch_size)
        found.append(look(params, module, texts.tokens[rows], texts.mask[rows]))
    return [np.mean(x, axis=0) for x in zip(*jax.device_get(found), strict=True)]


def main(config: Config) -> list[dict[str, Any]]:
    """One row for each seed, target and module."""
    vocab_size = targets.load(config.writer).target.config.vocab_size
    texts = texts_of(config, config.num_chats, 0)
    held_out = texts_of(config, config.num_held_out, 1)
    target = Llama(shape_of(config, vocab_size))
    drafter = MTP.for_target(target.config, None, gamma=2, unroll=None, decay=1.0)
    size = min(config.batch_size, len(held_out))
    rows = []
    for seed in config.seeds:
        optimisation = TrainConfig(
            steps=config.steps,
            batch_size=config.batch_size,
            learning_rate=config.learning_rate,
            weight_decay=0.05,
            seed=seed,
        )
        for joint in (False, True):
            params = pretrain(config, optimisation, target, drafter, texts, joint)
            frozen = Pretrained("small", target, params["target"], None, ())
            modules = {
                "afterwards": training.train(frozen, drafter, texts, optimisation)
            }
            if joint:
                modules["with the target"] = params["module"]
            for added, module in modules.items():
                loss, ce, alpha, survival = evaluate(
                    target, drafter, params["target"], module, held_out, size
                )
                rows.append(
                    {
                        "seed": seed,
                        "target trained by": "both losses" if joint else "next token",
                        "module trained": added,
                        "held_out": float(loss),
                        "module_ce": float(ce),
                        "alpha": [float(x) for x in alpha],
                        "tau": float(1 + survival.sum()),
                    }
                )
    return rows


if __name__ == "__main__":
    common.run(main, Config)
