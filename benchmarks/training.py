"""Training tokens/s of EAGLE's layer, beside the same layer in PyTorch.

    python benchmarks/training.py --reference PYTHON     PYTHON has torch, transformers
    python benchmarks/training.py                        ours alone, against the peak
    python benchmarks/training.py --smoke                seconds, a random small model

Optimiser steps of `eagle` on given features of a batch, ten at a time: what `specjax
train` does, the acceptance that it logs once in ten steps included. The reference is
built as the public code is: a linear that joins token and feature, `transformers` Llama
layer without its input norm, the frozen head, smooth L1 and soft cross-entropy,
clipping and AdamW, in float32 and eager as its authors run it; it logs nothing. Both
are timed by turns in one run, with as many threads as they like. FLOP/s count 6 a
weight and token of the layer and 4 of the frozen head; the peak is that of a matrix
product in the same run.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import timing
import tyro

from specjax import drafters, targets, testing, training
from specjax.drafters.base import Batch
from specjax.targets.base import Pretrained


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "tiny"  # a ready name, a folder or a hub id
    batch_size: int = 8
    length: int = 128  # tokens of a text
    repeats: int = 11
    seed: int = 0
    reference: pathlib.Path | None = None  # a Python with torch and transformers
    json: pathlib.Path | None = None
    smoke: bool = False  # a random small model, two turns


def make_batch(pretrained: Pretrained, config: Config) -> Batch:
    """Random tokens and features: what is in them changes no time."""
    c, rng = pretrained.target.config, np.random.default_rng(config.seed)
    shape = config.batch_size, config.length
    tokens = jnp.asarray(rng.integers(0, c.vocab_size, shape), jnp.int32)
    hidden = jnp.asarray(rng.normal(size=(*shape, c.width)), jnp.float32)
    return Batch(tokens, jnp.ones(shape, bool), hidden, hidden)


def our_step(pretrained: Pretrained, batch: Batch) -> tuple[Callable[[], float], int]:
    """Seconds of a step, and the weights that it trains."""
    shared = pretrained.target.shared(pretrained.params)
    shared = jax.tree.map(lambda x: x.astype(jnp.float32), shared)
    drafter = drafters.get("eagle").for_target(pretrained.target.config, None)
    settings = training.TrainConfig()
    params = jax.jit(drafter.init)(jax.random.key(0), shared)
    state = settings.optimiser().init(params)
    held = [params, state]

    def steps():
        given = shared, batch, jax.random.key(0)
        logs = training.measure(drafter, held[0], *given)
        for _ in range(STEPS):
            *held[:], logs["step"] = training.train_step(
                drafter, settings, *held, *given
            )
        return logs

    size = sum(x.size for x in jax.tree.leaves(params))
    return lambda: timing.timed(steps) / STEPS, size


STEPS = training.TrainConfig().log_every

WORKER = """
import json, sys, time
import torch, transformers
from torch import nn
from transformers.models.llama import modeling_llama as llama
V, D, H, K, E, F, B, T, STEPS = json.loads(sys.argv[1])
config = transformers.LlamaConfig(
    vocab_size=V, hidden_size=D, num_attention_heads=H, num_key_value_heads=K,
    head_dim=E, intermediate_size=F, num_hidden_layers=1,
    attn_implementation="sdpa")
fc = nn.Linear(2 * D, D)
layer, rotary = llama.LlamaDecoderLayer(config, 0), llama.LlamaRotaryEmbedding(config)
layer.input_layernorm = nn.Identity()
embed, head = torch.randn(V, D), torch.randn(V, D)
params = [*fc.parameters(), *layer.parameters()]
optimiser = torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95))
tokens, hidden = torch.randint(0, V, (B, T)), torch.randn(B, T, D)
at = torch.arange(T)[None]
print(f"transformers {transformers.__version__}, torch {torch.__version__}", flush=True)

def step():
    noisy = hidden + (torch.rand_like(hidden) - 0.5) * 0.2 * 512 / T
    following = torch.roll(tokens, -1, 1)
    u = fc(torch.cat([embed[following], noisy], -1))
    y = layer(u, position_embeddings=rotary(u, at), attention_mask=None)
    y = y[0] if isinstance(y, tuple) else y
    feature = torch.roll(hidden, -1, 1)
    regression = nn.functional.smooth_l1_loss(y, feature)
    with torch.no_grad():
        p = torch.softmax(feature @ head.T, -1)
    ce = -(p * torch.log_softmax(y @ head.T, -1)).sum(-1).mean()
    optimiser.zero_grad(set_to_none=True)
    (regression + 0.1 * ce).backward()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimiser.step()

for _ in sys.stdin:
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    print((time.perf_counter() - began) / STEPS, flush=True)
"""


def reference_job(pretrained: Pretrained, config: Config) -> str:
    c = pretrained.target.config
    shape = (c.vocab_size, c.width, c.num_heads, c.num_kv_heads, c.head_width)
    return json.dumps((*shape, c.mlp_width, config.batch_size, config.length, STEPS))


def peak(size: int) -> tuple[Callable[[], float], float]:
    """Seconds of a large matrix product, and its FLOP."""
    a = jnp.asarray(np.random.default_rng(0).normal(size=(size, size)), jnp.float32)
    product = jax.jit(lambda x: x @ x)
    return lambda: timing.timed(lambda: product(a)), 2.0 * size**3


def main(config: Config) -> list[dict]:
    if config.smoke:
        config = dataclasses.replace(
            config, batch_size=2, length=16, repeats=2, reference=None
        )
        target, params = testing.tiny_target()
        pretrained = Pretrained("random", target, params, None, ())
    else:
        pretrained = targets.load(config.target)
    c, rows = pretrained.target.config, config.batch_size * config.length
    ours, num_weights = our_step(pretrained, make_batch(pretrained, config))
    product, flop = peak(128 if config.smoke else 2048)
    ways = {"specjax": ours, "matrix product": product}
    with contextlib.ExitStack() as stack:
        if config.reference is not None:
            job = reference_job(pretrained, config)
            beside = timing.other_python(config.reference, WORKER, job)
            name, run = stack.enter_context(beside)
            ways[name] = run
        seconds = timing.by_turns(ways, config.repeats)

    step_flop = rows * (6.0 * num_weights + 4.0 * c.vocab_size * c.width)
    rates = {name: step_flop / s for name, s in seconds.items()}
    rates["matrix product"] = flop / seconds["matrix product"]
    table = []
    for name, s in seconds.items():
        trains = name != "matrix product"
        table.append(
            {
                "way": name,
                "ms": float(np.median(s)) * 1e3,
                "tokens/s": float(np.median(rows / s)) if trains else None,
                "specjax / it": float(np.median(s / seconds["specjax"])),
                "GFLOP/s": float(np.median(rates[name])) / 1e9,
                "/ peak": float(np.median(rates[name] / rates["matrix product"])),
            }
        )
        if not trains:
            table[-1]["specjax / it"] = None
    title = (
        f"training eagle for {pretrained.name}, {num_weights} weights, {rows} tokens"
    )
    timing.report(title, table, dataclasses.asdict(config), config.json)
    return table


if __name__ == "__main__":
    main(tyro.cli(Config))
