"""Training steps of drafters: FLOP/s against the peak, EAGLE's beside PyTorch's.

    python benchmarks/training.py                        every drafter, against the peak
    python benchmarks/training.py --drafters eagle --reference PYTHON
                                            PYTHON has torch, transformers
    python benchmarks/training.py --target smollm2-135m --batch-size 2 --repeats 3
    python benchmarks/training.py --smoke                seconds, a random small model

Optimiser steps on given features of a batch, ten at a time: what `specjax train` does,
the acceptance that it logs once in ten steps included. FLOP are those of the matrix
products of the traced programs (`work.count`), the frozen head's among them; the peak
is that of a matrix product just before and just after. The reference is EAGLE built as
the public code is: a linear that joins token and feature, `transformers` Llama layer
without its input norm, the frozen head, smooth L1 and soft cross-entropy, clipping and
AdamW, in float32 and eager as its authors run it; it logs nothing. All are timed by
turns in one run, with as many threads as they like.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing
import tyro

from specjax import drafters, joint, targets, testing, training, work
from specjax.drafters import base
from specjax.drafters.base import Batch
from specjax.targets.base import Pretrained


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "tiny"  # a ready name, a folder or a hub id
    drafters: tuple[str, ...] = tuple(drafters.REGISTRY)
    batch_size: int = 8
    length: int = 128  # tokens of a text
    repeats: int = 11
    seed: int = 0
    reference: pathlib.Path | None = None  # a Python with torch and transformers
    json: pathlib.Path | None = None
    smoke: bool = False  # a random small model, two turns


def make_batch(pretrained: Pretrained, drafter: Any, config: Config) -> Batch:
    """Random tokens and features: what is in them changes no time."""
    c, rng = pretrained.target.config, np.random.default_rng(config.seed)
    shape = config.batch_size, config.length
    tokens = jnp.asarray(rng.integers(0, c.vocab_size, shape), jnp.int32)
    wide = lambda n: jnp.asarray(rng.normal(size=(*shape, n * c.width)), jnp.float32)
    slots = config.batch_size, c.num_kv_heads, config.length, c.head_width
    kv = lambda: jnp.asarray(rng.normal(size=slots), jnp.float32)
    pairs = tuple((kv(), kv()) for _ in base.kv_layers(drafter))
    mask = jnp.ones(shape, bool)
    return Batch(tokens, mask, wide(len(drafter.taps)), wide(1), pairs)


def our_step(
    pretrained: Pretrained, name: str, config: Config
) -> tuple[Callable[[], float], float]:
    """Seconds of a step, and its FLOP."""
    target, settings = pretrained.target, training.TrainConfig()
    mask = target.config.vocab_size - 1
    drafter = drafters.get(name).for_target(target.config, mask)
    batch, key = make_batch(pretrained, drafter, config), jax.random.key(0)
    shared = target.shared(pretrained.params)
    shared = jax.tree.map(lambda x: x.astype(jnp.float32), shared)
    learner: Any = drafter
    if base.joint(drafter) is None:
        params, context = jax.jit(drafter.init)(key, shared), shared
    else:
        learner = joint.Learner(drafter, target)
        params = learner.start(key, shared, pretrained.params, None)
        context = joint.Context(shared, pretrained.params, jnp.float32(1))
    held = [params, settings.optimiser().init(params)]

    def steps():
        logs = training.measure(learner, held[0], context, batch, key)
        for _ in range(STEPS):
            *held[:], logs["step"] = training.train_step(
                learner, settings, *held, context, batch, key
            )
        return logs

    def flop(function, *args) -> float:
        whole = lambda weights, cache, *args: function(*args)
        found = work.count(whole, work.Ends(set()), (), (), *args)
        return found.flops + found.cache_flops

    given = context, batch, key
    step = functools.partial(training.train_step, learner, settings)
    judge = functools.partial(training.measure, learner)
    total = STEPS * flop(step, *held, *given) + flop(judge, held[0], *given)
    return lambda: timing.timed(steps) / STEPS, total / STEPS


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
            config,
            drafters=("eagle", "medusa2"),
            batch_size=2,
            length=16,
            repeats=2,
            reference=None,
        )
        target, params = testing.tiny_target()
        pretrained = Pretrained("random", target, params, None, ())
    else:
        pretrained = targets.load(config.target)
    rows = config.batch_size * config.length
    made = {name: our_step(pretrained, name, config) for name in config.drafters}
    product, product_flop = peak(128 if config.smoke else 2048)
    ways = {name: run for name, (run, _) in made.items()}
    flops = {name: n for name, (_, n) in made.items()}
    with contextlib.ExitStack() as stack:
        if config.reference is not None:
            job = reference_job(pretrained, config)
            beside = timing.other_python(config.reference, WORKER, job)
            name, run = stack.enter_context(beside)
            ways[name], flops[name] = run, flops["eagle"]
        # A product before each and after the last: the machine's speed drifts.
        turns: dict = {}
        for name, run in ways.items():
            turns |= {("before", name): product, name: run}
        seconds = timing.by_turns(turns | {"after": product}, config.repeats)

    products = [s for name, s in seconds.items() if name not in ways]
    table = []
    for name, before, after in zip(ways, products[:-1], products[1:], strict=True):
        s, beside = seconds[name], name not in made
        rate, ceiling = flops[name] / s, product_flop * 2 / (before + after)
        table.append(
            {
                "way": name,
                "ms": float(np.median(s)) * 1e3,
                "tokens/s": float(np.median(rows / s)),
                "eagle / it": float(np.median(s / seconds["eagle"]))
                if beside
                else None,
                "GFLOP": flops[name] / 1e9,
                "GFLOP/s": float(np.median(rate)) / 1e9,
                "peak": float(np.median(ceiling)) / 1e9,
                "/ peak": float(np.median(rate / ceiling)),
            }
        )
    title = f"training steps for {pretrained.name}, {rows} tokens"
    timing.report(title, table, dataclasses.asdict(config), config.json)
    return table


if __name__ == "__main__":
    main(tyro.cli(Config))
