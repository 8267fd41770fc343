"""What a step of a draft costs beside reading its weights once.

    python benchmarks/draft.py                     a minute on 2 idle cores
    python benchmarks/draft.py --target smollm2-135m --drafters eagle mtp --drafts 2
    python benchmarks/draft.py --smoke             seconds

For drafters that go step by step. A step is the difference of drafts of 1 and of N
tokens, by N - 1, on a prefilled text, batch 1, greedy; what it reads is the drafter's
weights and the head it shares with the target, an embedding table being gathered from
and not read. All are timed by turns in one run; ratios are medians over turns.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing
import tyro

from specjax import checkpoints, drafters, kv_cache, targets
from specjax.sampling import GREEDY

OWN_HEAD = ("draft_model", "gemma4_mtp", "eagle3")  # theirs is among their weights


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "tiny"
    drafters: tuple[str, ...] = ("draft_model", "eagle", "eagle3", "mtp", "gemma4_mtp")
    num_steps: int = 5  # N
    context: int = 96  # tokens before the draft
    drafts: int = 20  # in one timed call
    repeats: int = 15
    json: pathlib.Path | None = None
    smoke: bool = False  # two drafters, two turns


def draft_of(config: Config, pretrained, drafter, params, gamma: int):
    """Seconds of a draft of gamma tokens."""
    target, rng = pretrained.target, np.random.default_rng(0)
    drafter = dataclasses.replace(drafter, gamma=gamma)
    V, T = target.config.vocab_size, config.context
    tokens = jnp.asarray(rng.integers(0, V, (1, T)), jnp.int32)
    lengths = jnp.full((1,), T, jnp.int32)
    size = T + 64
    cache = target.init_cache(1, size, pretrained.dtype)
    out = target(pretrained.params, tokens, cache, taps=drafter.taps)
    cache = kv_cache.commit(out.cache, None, lengths)
    shared = target.shared(pretrained.params)
    state = drafter.prefill(params, shared, tokens, lengths, out.features, size)
    shared = dataclasses.replace(shared, cache=cache)
    keys = jax.random.split(jax.random.key(0), 1)

    @jax.jit
    def many(params, shared, state):
        def one(_, carry):
            state, anchor = carry
            draft, state = drafter.draft(params, shared, state, anchor, GREEDY, keys)
            return state, jnp.maximum(draft.tokens[:, 0], 0)

        start = state, jnp.zeros((1,), jnp.int32)
        return jax.lax.fori_loop(0, config.drafts, one, start)[1]

    run = functools.partial(many, params, shared, state)
    return lambda: timing.timed(run) / config.drafts


def read_of(config: Config, name: str, pretrained, params):
    """Seconds to read what a step reads once, and its bytes."""
    params = dict(params)
    if name != "draft_model":  # whose table is its head too
        params.pop("embed", None)
    read = jax.tree.leaves(params)
    if name not in OWN_HEAD:
        read.append(pretrained.target.shared(pretrained.params).head)

    @jax.jit
    def many(arrays):
        def one(_, total):
            # What is read depends on the turn, or it would be read once.
            return total + sum(jnp.sum(x * (1 + 0 * total)) for x in arrays)

        return jax.lax.fori_loop(0, config.drafts, one, jnp.float32(0))

    size = sum(x.size * x.dtype.itemsize for x in read)
    return lambda: timing.timed(lambda: many(read)) / config.drafts, size


def load(config: Config, name: str, pretrained, shared):
    """The shipped drafter, or one of random weights: what they are changes no time."""
    shipped = checkpoints.shipped(config.target)
    if name in shipped:
        return checkpoints.load(shipped[name], shared, pretrained.dtype)[1:]
    drafter = drafters.get(name).for_target(pretrained.target.config, None)
    params = jax.jit(drafter.init)(jax.random.key(0), shared)
    return drafter, jax.tree.map(lambda x: x.astype(pretrained.dtype), params)


def main(config: Config) -> list[dict]:
    if config.smoke:
        config = dataclasses.replace(
            config, drafters=("eagle", "gemma4_mtp"), repeats=2, drafts=2
        )
    pretrained = targets.load(config.target)
    shared = pretrained.target.shared(pretrained.params)
    ways: dict[Any, Any] = {}
    sizes = {}
    for name in config.drafters:
        drafter, params = load(config, name, pretrained, shared)
        for gamma in (1, config.num_steps):
            ways[name, gamma] = draft_of(config, pretrained, drafter, params, gamma)
        ways[name, "read"], sizes[name] = read_of(config, name, pretrained, params)
    seconds = timing.by_turns(ways, config.repeats)
    rows = []
    for name in config.drafters:
        first, whole = seconds[name, 1], seconds[name, config.num_steps]
        step, read = (whole - first) / (config.num_steps - 1), seconds[name, "read"]
        rows.append(
            {
                "way": name,
                "first step us": 1e6 * float(np.median(first)),
                "step us": 1e6 * float(np.median(step)),
                "reads MB": sizes[name] / 1e6,
                "read us": 1e6 * float(np.median(read)),
                "step / read": float(np.median(step / read)),
            }
        )
    title = f"draft: {pretrained.name}, {pretrained.dtype}, context {config.context}"
    timing.report(title, rows, dataclasses.asdict(config), config.json)
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config))
