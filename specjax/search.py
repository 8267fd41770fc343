"""Sparse trees from measured acceptance: which guesses of a drafter come true.

Along greedy texts, at every round, the drafter's law of each of the next D tokens is
asked for the rank of the token that really came. `tree.best_tree` and
`tree.best_observed_tree` make trees of the ranks (Medusa, arXiv:2401.10774, section
2.3.3). Only for drafters whose law at a depth does not depend on what they drafted
before it; the others choose their trees at run time (`tree.DynamicTree`).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.generate import RUNNING, Model, Weights, advance, start
from specjax.sampling import GREEDY, Sampling
from specjax.targets.base import Pretrained
from specjax.typing import Array


def measure_ranks(
    pretrained: Pretrained,
    drafter: Any,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 96,
) -> np.ndarray:
    """Ranks [rounds D] of the tokens that came, 0 the likeliest; D is the chain's.

    Rounds are those of the drafter's own greedy run; a round that stands within D
    tokens of its text's end is left out.
    """
    if drafter.card.passes != "1":
        raise ValueError(
            f"{type(drafter).__name__} needs {drafter.card.passes} passes a draft: its "
            "laws depend on what it drafted. Use a dynamic tree (dynamic:NODES:DEPTH)."
        )
    model = Model(pretrained.target, drafter, GREEDY, pretrained.stop_ids)
    weights = Weights(pretrained.params, params)
    # The texts of this very run: near-ties may part those of the plain loop from them.
    begin = functools.partial(
        start, model, weights, prompts, max_new_tokens=max_new_tokens
    )
    ended = advance(model, weights, begin(), jnp.asarray(max_new_tokens))
    texts, lengths = np.asarray(ended.tokens), np.asarray(ended.num_tokens)

    D = drafter.tree.depth
    found = []
    progress = begin()
    while np.any(running := np.asarray(progress.reason) == RUNNING):
        ranks = np.asarray(_ranks(model, weights, progress, jnp.asarray(texts)))
        whole = running & (np.asarray(progress.num_tokens) + D <= lengths)
        found.append(ranks[whole])
        progress = advance(model, weights, progress, jnp.asarray(1))
    return np.concatenate(found) if found else np.zeros((0, D), int)


@functools.partial(jax.jit, static_argnames=("model",))
def _ranks(model: Model, weights: Weights, progress: Any, texts: Array) -> Array:
    """Rank of the coming D tokens under the drafter's laws at temperature 1 [B D].

    How many ids are likelier; of equally likely ones those of lower id.
    """
    keys = jax.random.split(jax.random.key(0), len(progress.anchor))
    shared = model.target.shared(weights.target)
    shared = dataclasses.replace(shared, cache=progress.cache)
    draft, _ = model.drafter.draft(
        weights.drafter, shared, progress.state, progress.anchor, Sampling(), keys
    )
    D, V = draft.laws.shape[1:]
    at = progress.num_tokens[:, None] + jnp.arange(D, dtype=jnp.int32)[None]
    at = jnp.minimum(at, texts.shape[1] - 1)
    coming = jnp.maximum(jnp.take_along_axis(texts, at, axis=1), 0)[..., None]
    own = jnp.take_along_axis(draft.laws, coming, axis=-1)
    first = jnp.arange(V, dtype=jnp.int32)[None, None] < coming
    before = (draft.laws > own) | ((draft.laws == own) & first)
    return jnp.sum(before, axis=-1)
