"""What a round costs: the floor, a plain round, and rounds of 2 to 32 nodes.

    python benchmarks/decode.py                          about a minute on 2 idle cores
    python benchmarks/decode.py --target tiny
    python benchmarks/decode.py --transformers PYTHON    PYTHON has torch, transformers
    python benchmarks/decode.py --smoke                  seconds, a random small model

The floor is the time to read every weight of a pass once. A plain round is one target
pass over the anchor; a round of N nodes is that over the anchor and G = N - 1 drafts
that cost nothing (`bench.FreeDrafter`), so its ratio to the plain one is what a drafter
must win back. With --transformers another Python decodes the same weights in the same
dtype, token by token, with as many threads as it likes. Everything is timed by turns in
one run, after the prefill; ratios are medians over turns.
"""

import contextlib
import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import timing
import tyro

from specjax import bench, targets, testing
from specjax.drafters.none import NoDrafter
from specjax.generate import Model, Weights, advance, start
from specjax.sampling import GREEDY
from specjax.targets.base import Pretrained
from specjax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "smollm2-135m"  # a ready name, a folder or a hub id
    num_nodes: tuple[int, ...] = (2, 4, 8, 16, 32)
    context: int = 128  # tokens before the first round
    rounds: int = 4  # in one timed call
    repeats: int = 15
    seed: int = 0
    transformers: pathlib.Path | None = None  # a Python with torch and transformers
    json: pathlib.Path | None = None
    smoke: bool = False  # a random small model, two turns


def read_all(pretrained: Pretrained) -> Callable[[], float]:
    """Seconds to read every weight of a pass once: a gathered table is not read."""
    params = dict(pretrained.params)
    if not pretrained.target.config.tie_embeddings:
        del params["embed"]
    sums = jax.jit(lambda weights: [jnp.sum(w) for w in weights])
    return lambda: timing.timed(lambda: sums(jax.tree.leaves(params)))


def round_of(
    pretrained: Pretrained, config: Config, num_nodes: int
) -> Callable[[], float]:
    """Seconds of a round of N nodes, from a fresh copy of the prefilled state."""
    drafter = (
        bench.FreeDrafter(tree=Tree.chain(num_nodes - 1))
        if num_nodes > 1
        else NoDrafter()
    )
    model = Model(pretrained.target, drafter, GREEDY)  # no stop ids: no row ends
    weights = Weights(pretrained.params, None)
    widest = max(config.num_nodes)
    prefilled = start(
        model,
        weights,
        [_prompt(pretrained, config)],
        max_new_tokens=config.rounds * widest + 1,
        cache_size=-(-(config.context + (config.rounds + 1) * widest + 1) // 128) * 128,
    )
    rounds = jnp.asarray(config.rounds)

    def run() -> float:
        progress = jax.block_until_ready(jax.tree.map(jnp.copy, prefilled))
        seconds = timing.timed(lambda: advance(model, weights, progress, rounds))
        return seconds / config.rounds

    return run


def _prompt(pretrained: Pretrained, config: Config) -> list[int]:
    rng = np.random.default_rng(config.seed)
    vocabulary = pretrained.target.config.vocab_size
    return rng.integers(0, vocabulary, config.context).tolist()


WORKER = """
import copy, json, sys, time
import torch, transformers
folder, prompt, rounds, dtype = json.loads(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=getattr(torch, dtype)).eval()
with torch.inference_mode():
    ids = torch.tensor([prompt])
    out = model(ids, use_cache=True)
    prefilled, first = out.past_key_values, out.logits[:, -1:].argmax(-1)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}",
          flush=True)
    for _ in sys.stdin:
        cache, token = copy.deepcopy(prefilled), first
        began = time.perf_counter()
        for _ in range(rounds):
            out = model(token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        print((time.perf_counter() - began) / rounds, flush=True)
"""


@contextlib.contextmanager
def other_python(pretrained: Pretrained, config: Config):
    """Yields (name, seconds of a token) of transformers in a process of its own."""
    assert config.transformers is not None
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "target"
        targets.save_pretrained(path, pretrained)
        prompt = _prompt(pretrained, config)
        job = json.dumps([str(path), prompt, config.rounds, str(pretrained.dtype)])
        with timing.other_python(config.transformers, WORKER, job) as found:
            yield found


def main(config: Config) -> list[dict]:
    if config.smoke:
        config = dataclasses.replace(
            config, num_nodes=(2, 4), context=8, rounds=2, repeats=2, transformers=None
        )
        target, params = testing.tiny_target()
        pretrained = Pretrained("random", target, params, None, ())
    else:
        pretrained = targets.load(config.target)
    ways = {"read all weights": read_all(pretrained)}
    for n in (1, *config.num_nodes):
        name = "plain round" if n == 1 else f"round of {n} nodes"
        ways[name] = round_of(pretrained, config, n)
    with contextlib.ExitStack() as stack:
        if config.transformers is not None:
            name, run = stack.enter_context(other_python(pretrained, config))
            ways[name] = run
        seconds = timing.by_turns(ways, config.repeats)

    read, plain = seconds["read all weights"], seconds["plain round"]
    rows = [
        {
            "way": name,
            "ms": float(np.median(s)) * 1e3,
            "ms min": float(s.min()) * 1e3,
            "/ read": float(np.median(s / read)),
            "/ plain": float(np.median(s / plain)),
            "min / plain min": float(s.min() / plain.min()),
        }
        for name, s in seconds.items()
    ]
    title = f"decode: {pretrained.name}, {pretrained.dtype}, context {config.context}"
    timing.report(title, rows, dataclasses.asdict(config), config.json)
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config))
