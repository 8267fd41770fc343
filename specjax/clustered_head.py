"""An output head in two steps: score clusters of tokens, then the tokens of the best.

The V tokens lie in C clusters of R = V / C each, `order[c, r]` the token in slot r of
cluster c. For a state z, with a centroid a cluster and the table of the head,

    best = the Y clusters with the largest centroid . z                       (1)
    logits[token] = table[token] . z   for the Y R tokens in them             (2)

and every other token has probability 0: a draft law with that support is verified as
exactly as any, and its normaliser is the sum over Y R tokens. What is read of the
weights falls from V to C + Y R rows. The table is kept in the order of the clusters,
[C R D], so that those rows are Y blocks (`kernels.clustered_head`).

A centroid that is the mean of its rows loses to others when one token of its cluster
stands out, as the mean of products is below their maximum. So the centroids are trained
against the target's own mass of each cluster; top-k itself has no gradient:

    loss = -sum_c m_c log softmax(centroids z)_c,  m_c = sum of p over cluster c  (3)

Layout of the released weights: Gemma 4's `masked_embedding` (C 2048, R 128, Y 32).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.kernels.clustered_head import token_scores
from specjax.layers import dense
from specjax.typing import Array, Float, Int


class Scored(NamedTuple):
    """The tokens of the best clusters, X = Y R of them, and their logits."""

    ids: Int[Array, "*B X"]
    logits: Float[Array, "*B X"]  # float32


def best_clusters(
    z: Float[Array, "*B D"], centroids: Float[Array, "C D"], num_scored: int
) -> Int[Array, "*B Y"]:
    """Eq. 1, best first."""
    return jax.lax.top_k(dense(z, centroids, jnp.float32), num_scored)[1]


def score(
    z: Float[Array, "*B D"],
    centroids: Float[Array, "C D"],
    clusters: Float[Array, "C R D"],
    order: Int[Array, "C R"],
    num_scored: int,
) -> Scored:
    """Eq. 2. It has no gradients: what is drafted is a choice."""
    best = best_clusters(z, centroids, num_scored)
    flat = z.reshape(-1, z.shape[-1]), best.reshape(-1, num_scored)
    shape = *z.shape[:-1], -1
    found = token_scores(*flat, clusters)
    return Scored(order[best].reshape(shape), found.reshape(shape))


def spread(scored: Scored, vocab_size: int) -> Float[Array, "*B V"]:
    """Logits of all ids, -inf where none was scored."""
    everywhere = jnp.full((*scored.ids.shape[:-1], vocab_size), -jnp.inf)
    return jnp.put_along_axis(
        everywhere, scored.ids, scored.logits, axis=-1, inplace=False
    )


def top_k(scored: Scored, k: int) -> tuple[Int[Array, "*B K"], Float[Array, "*B K"]]:
    """The likeliest tokens, best first, and their log probabilities.

    The same as of `spread`, and nothing as wide as the vocabulary is made.
    """
    logits, at = jax.lax.top_k(scored.logits, k)
    ids = jnp.take_along_axis(scored.ids, at, axis=-1)
    total = jax.nn.logsumexp(scored.logits, axis=-1, keepdims=True)
    return ids, logits - total


def in_clusters(
    table: Float[Array, "V D"] | np.ndarray, order: Int[Array, "C R"] | np.ndarray
) -> Array:
    """The rows of a head in the order of the clusters, [C R D]."""
    return jnp.asarray(table)[jnp.asarray(order)]


def mass(probs: Float[Array, "*B V"], order: Int[Array, "C R"]) -> Float[Array, "*B C"]:
    """m of eq. 3."""
    return jnp.sum(probs[..., order], axis=-1)


def check_order(order: np.ndarray, vocab_size: int, num_clusters: int) -> np.ndarray:
    """`order` as [C R], or the error that says why it is none."""
    order = np.asarray(order).ravel().astype(np.int64)
    if num_clusters < 1 or vocab_size % num_clusters:
        near = [c for c in range(1, vocab_size + 1) if vocab_size % c == 0]
        near = sorted(near, key=lambda c: abs(c - num_clusters))[:3]
        raise ValueError(
            f"{num_clusters} clusters of one size do not hold {vocab_size} ids; "
            f"numbers that do: {', '.join(map(str, sorted(near)))}."
        )
    if not np.array_equal(np.sort(order), np.arange(vocab_size)):
        raise ValueError(
            f"the token order holds {len(np.unique(order))} ids of {vocab_size}; it "
            "must name each once (an order of zeros was never filled)."
        )
    return order.reshape(num_clusters, -1).astype(np.int32)


def build(
    table: np.ndarray, num_clusters: int, seed: int = 0, rounds: int = 20
) -> tuple[np.ndarray, np.ndarray]:
    """Balanced k-means of a head's rows: `order` [C R], and the mean of each cluster.

    Rows, not directions, as scores are products. Each round fills clusters to their
    equal size, nearest pairs first, and takes the means anew.
    """
    table = np.asarray(table, np.float32)
    V, R = len(table), len(table) // max(num_clusters, 1)
    check_order(np.arange(V), V, num_clusters)
    centroids = table[np.random.default_rng(seed).permutation(V)[:num_clusters]]
    owner = np.zeros(V, np.int64)
    for _ in range(rounds):
        before, owner = owner, _assign(table, centroids, R)
        order = np.argsort(owner, kind="stable").reshape(num_clusters, R)
        centroids = table[order].mean(axis=1)
        if np.array_equal(before, owner):
            break
    return order.astype(np.int32), centroids


def _assign(table: np.ndarray, centroids: np.ndarray, R: int) -> np.ndarray:
    """The cluster of each row: in turns, each takes its nearest that has room."""
    V, C = len(table), len(centroids)
    owner, room = np.full(V, -1), np.full(C, R)
    squares = np.sum(centroids * centroids, axis=1)
    while len(free := np.flatnonzero(owner < 0)):
        open_ = np.flatnonzero(room)
        choice, distance = np.empty(len(free), np.int64), np.empty(len(free))
        for start in range(0, len(free), 8192):
            rows = table[free[start : start + 8192]]
            far = squares[open_][None] - 2 * rows @ centroids[open_].T
            nearest = np.argmin(far, axis=1)
            choice[start : start + 8192] = open_[nearest]
            own = np.take_along_axis(far, nearest[:, None], 1)[:, 0]
            distance[start : start + 8192] = own + np.sum(rows * rows, axis=1)
        by_cluster = np.lexsort((distance, choice))
        sorted_choice = choice[by_cluster]
        first = np.searchsorted(sorted_choice, sorted_choice)
        fits = np.arange(len(free)) - first < room[sorted_choice]
        taken = by_cluster[fits]
        owner[free[taken]] = choice[taken]
        room -= np.bincount(choice[taken], minlength=C)
    return owner
