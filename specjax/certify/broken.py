"""A broken engine: what `engine.sampled` has to notice, a line replaced at a time."""

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax.numpy as jnp

from specjax import generate, kv_cache, sampling
from specjax.certify import engine
from specjax.sampling import Sampling
from specjax.testing import FALSE_ALARM

round_keys, commit = generate._round_keys, kv_cache.commit


def _one_key(keys, position):
    draft_keys, _ = round_keys(keys, position)
    return draft_keys, draft_keys


def _first_rows_key(keys, position):
    return round_keys(jnp.broadcast_to(keys[0], keys.shape), position)


def _wrong_path(cache, path, n):
    """The sibling's entry. (The right entries in another order would do no harm.)"""
    if path is not None:
        path = jnp.where(path == 1, 2, jnp.where(path == 2, 1, path))
    return commit(cache, path, n)


def _draw_from_untruncated(self, probs, key):
    return sampling.categorical(jnp.maximum(probs, 0.02), key)


@dataclasses.dataclass(frozen=True)
class Broken:
    """`lines` of a module or class replaced; drafts of a topology show it."""

    name: str
    topology: str
    owner: Any
    lines: dict[str, Callable[..., Any]]


ENGINES = (
    Broken("draft key used again", "chain", generate, {"_round_keys": _one_key}),
    Broken("wrong path committed", "tree", kv_cache, {"commit": _wrong_path}),
    Broken(
        "path not gathered",
        "tree",
        kv_cache,
        {"commit": lambda cache, path, n: commit(cache, None, n)},
    ),
    Broken(
        "stale slot",
        "chain",
        kv_cache,
        {"commit": lambda cache, path, n: commit(cache, path, jnp.maximum(n - 1, 0))},
    ),
    Broken("one key for all rows", "chain", generate, {"_round_keys": _first_rows_key}),
    Broken(
        "processors on the laws, not on the draws",
        "chain",
        Sampling,
        {"pick": _draw_from_untruncated},
    ),
)


def margin(bug: Broken) -> float:
    """The false-alarm rate over the second smallest p-value of three fixtures.

    Above 1 it is caught on two.
    """
    # A temperature of its own, so that JAX traces the engine with the bug inside.
    own = Sampling(1 + 1e-3 * (1 + ENGINES.index(bug)), top_k=3)
    lines: dict[str, Any] = dict(bug.lines)
    p_values = []
    with mock.patch.multiple(bug.owner, **lines):
        for fixture in range(3):
            try:
                found = engine.sampled(
                    "draft_model", own, topology=bug.topology, fixture=fixture
                )
                p_values.append(min(found.p_value, found.pair_p_value))
            except ValueError:  # a token that its own law excludes is refused
                p_values.append(0.0)
    return FALSE_ALARM / max(sorted(p_values)[1], 1e-300)


def report() -> list[dict[str, Any]]:
    """Rows as those of `planted.report`."""
    rows = []
    for bug in ENGINES:
        found = margin(bug)
        rows.append(
            {
                "name": f"engine: {bug.name}",
                "method": "sampled",
                "caught": bool(found > 1),
                "margin": float(found),
            }
        )
    return rows
