"""Draft trees: node 0 is the anchor, parents come before children.

A `Tree` is static, and its ancestor mask is a constant of the pass. A `DynamicTree`
fixes only how many nodes a round has and how deep they may lie; the drafter names each
node's parent at run time, and mask and depths are computed from that.
"""

import dataclasses
import functools
import json
import os
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.typing import Array, Bool, Int


@dataclasses.dataclass(frozen=True)
class Tree:
    """A static topology, hashable. Siblings are numbered in the order of their draw."""

    parents: tuple[int, ...]  # parents[0] == -1 (the anchor), parents[i] < i
    replacement: bool = False  # siblings are drawn independently, so they may repeat

    def __post_init__(self):
        if not self.parents or self.parents[0] != -1:
            raise ValueError(
                f"a tree starts with its anchor, parents[0] == -1; got {self.parents}."
            )
        for node, parent in enumerate(self.parents[1:], 1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"node {node} has parent {parent}; number parents before children."
                )

    @classmethod
    def chain(cls, gamma: int) -> "Tree":
        """The anchor followed by gamma tokens, one under the other."""
        return cls(tuple(range(-1, gamma)))

    @classmethod
    def of_paths(cls, paths) -> "Tree":
        """The tree whose nodes are these paths of ranks, with all that leads to them.

        (0, 2) is the third choice under the first one. Nodes are numbered level by
        level and, under one parent, by rank; ranks left out are closed up.
        """
        nodes = {tuple(p[:i]) for p in paths for i in range(1, len(p) + 1)}
        ordered = [(), *sorted(nodes, key=lambda p: (len(p), p))]
        index = {path: i for i, path in enumerate(ordered)}
        return cls((-1, *(index[path[:-1]] for path in ordered[1:])))

    @classmethod
    def full(cls, *widths: int) -> "Tree":
        """Every node at depth d has widths[d] children."""
        paths = [()]
        for width in widths:
            paths = [(*p, rank) for p in paths for rank in range(width)]
        return cls.of_paths(paths)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tree":
        """Reads what `save` wrote."""
        try:
            fields = json.loads(pathlib.Path(path).read_text("utf-8"))
            parents, again = fields["parents"], fields.get("replacement", False)
            whole = all(type(p) is int for p in parents) and type(again) is bool
        except (ValueError, KeyError, TypeError, AttributeError):
            parents, again, whole = [], False, False
        if not whole or len(parents) < 2:
            raise ValueError(
                f'{path} is no tree: it needs {{"parents": [-1, 0, ...]}}, the anchor '
                "and at least one node under it, all integers."
            )
        return cls(tuple(parents), again)

    def save(self, path: str | os.PathLike, **notes) -> None:
        """Writes the topology as JSON, `notes` beside it; whole or not at all."""
        beside = pathlib.Path(f"{path}.partial")
        fields = {"parents": self.parents, "replacement": self.replacement}
        beside.write_text(json.dumps(fields | notes) + "\n")
        beside.replace(path)

    @property
    def num_nodes(self) -> int:
        """N, the anchor included."""
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @functools.cached_property
    def depths(self) -> np.ndarray:
        """Depth of each node [N]; the anchor is at 0."""
        depths = np.zeros(self.num_nodes, np.int32)
        for node, parent in enumerate(self.parents[1:], 1):
            depths[node] = depths[parent] + 1
        return depths

    @property
    def depth(self) -> int:
        """Most tokens one round can accept, D."""
        return int(self.depths.max())

    @functools.cached_property
    def ancestors(self) -> np.ndarray:
        """[N N] bool: True where the column's node is the row's node or above it."""
        mask = np.eye(self.num_nodes, dtype=bool)
        for node, parent in enumerate(self.parents[1:], 1):
            mask[node] |= mask[parent]
        return mask

    @functools.cached_property
    def children(self) -> np.ndarray:
        """[N C] node ids in draw order, -1 where a node has fewer than C children."""
        lists = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            lists[parent].append(node)
        table = np.full((self.num_nodes, max(map(len, lists))), -1, np.int32)
        for node, kids in enumerate(lists):
            table[node, : len(kids)] = kids
        return table

    @functools.cached_property
    def inner(self) -> np.ndarray:
        """[I] nodes that have children, ascending: the rows of `Draft.probs`."""
        return np.unique(np.array(self.parents[1:], np.int32))

    @functools.cached_property
    def inner_row(self) -> np.ndarray:
        """[N] a node's row among `inner`; 0 for a leaf, which nobody reads."""
        rows = np.zeros(self.num_nodes, np.int32)
        rows[self.inner] = np.arange(len(self.inner))
        return rows

    @functools.cached_property
    def ranks(self) -> np.ndarray:
        """[N] place of each node among its siblings; 0 for the anchor."""
        ranks = np.zeros(self.num_nodes, np.int32)
        for kids in self.children:
            kids = kids[kids >= 0]
            ranks[kids] = np.arange(len(kids))
        return ranks


@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """A topology that the drafter chooses anew each round (EAGLE-2, arXiv:2406.16858).

    Of the nodes it could propose it keeps the `num_nodes - 1` whose path is likeliest.
    The published runs have width 10 and 60 nodes.
    """

    num_nodes: int  # N, the anchor included
    depth: int  # most tokens one round can accept, D
    width: int = 8  # nodes expanded a level, and children looked at under each

    is_chain = False

    def __post_init__(self):
        if self.depth < 1 or self.width < 1:
            raise ValueError(
                f"a dynamic tree needs depth and width >= 1, got {self.depth} and "
                f"{self.width}."
            )
        if not 2 <= self.num_nodes <= self.num_candidates + 1:
            raise ValueError(
                f"a dynamic tree of depth {self.depth} and width {self.width} has 2 to "
                f"{self.num_candidates + 1} nodes, got num_nodes={self.num_nodes}."
            )

    @property
    def num_candidates(self) -> int:
        """Nodes looked at: a level of `width` each, `width` children under each."""
        return self.width + (self.depth - 1) * self.width**2


def ancestors_of(parents: Int[Array, "B N"], depth: int) -> Bool[Array, "B N N"]:
    """`Tree.ancestors` of topologies known at run time, at most `depth` deep."""
    N = parents.shape[1]
    up = jnp.maximum(parents, 0)
    own = jnp.broadcast_to(jnp.eye(N, dtype=bool), (*parents.shape, N))
    mask = own
    for _ in range(depth):
        mask = own | jnp.take_along_axis(mask, up[..., None], axis=1)
    root = own[:, :1]  # the anchor's row sees itself alone
    return jnp.concatenate([root, mask[:, 1:]], axis=1)


def best_tree(accept: np.ndarray, num_nodes: int) -> Tree:
    """The tree of `num_nodes` that keeps most tokens if depths are independent.

    `accept[d, r]` is the probability that the drafter's guess of rank r at depth d + 1
    is right once its parent is. A path is worth the product of its guesses, and a
    round keeps as many tokens as the values of all nodes add up to: the likeliest paths
    are taken one by one (Medusa, arXiv:2401.10774, section 2.3.3).
    """
    accept = np.asarray(accept, np.float64)

    def worth(path):
        return float(np.prod([accept[d, rank] for d, rank in enumerate(path)]))

    return _take_best(worth, accept.shape, num_nodes)


def best_observed_tree(ranks: np.ndarray, num_nodes: int, num_ranks: int) -> Tree:
    """The tree of `num_nodes` that keeps most tokens on the rounds observed.

    `ranks[i, d]` is the rank that the drafter gave to the token that really came at
    depth d + 1 of round i. A node is worth the share of rounds whose ranks begin with
    its path, so guesses that tend to be right together count together: unlike
    `best_tree` it assumes no independence. Paths seen equally often are told apart by
    that product.
    """
    ranks = np.asarray(ranks)
    accept = rank_rates(ranks, num_ranks)
    seen: dict[tuple[int, ...], int] = {}
    for row in ranks.tolist():
        for d in range(len(row)):
            path = tuple(row[: d + 1])
            seen[path] = seen.get(path, 0) + 1

    def worth(path):
        product = np.prod([accept[d, rank] for d, rank in enumerate(path)])
        return seen.get(path, 0), float(product)

    return _take_best(worth, accept.shape, num_nodes)


def _take_best(worth, shape: tuple[int, ...], num_nodes: int) -> Tree:
    """Adds nodes best first; a guess comes only after its parent and lower ranks."""
    depth, num_ranks = shape
    chosen: list[tuple[int, ...]] = []
    options: dict[tuple[int, ...], Any] = {(0,): worth((0,))}
    while len(chosen) < num_nodes - 1:
        if not options:
            raise ValueError(
                f"{depth} depths of {num_ranks} ranks hold fewer than {num_nodes} "
                "nodes. Measure more ranks or ask for fewer nodes."
            )
        best = max(options, key=lambda path: (options[path], -len(path)))
        del options[best]
        chosen.append(best)
        if best[-1] + 1 < num_ranks:
            sibling = (*best[:-1], best[-1] + 1)
            options[sibling] = worth(sibling)
        if len(best) < depth:
            options[*best, 0] = worth((*best, 0))
    return Tree.of_paths(chosen)


def rank_rates(ranks: np.ndarray, num_ranks: int) -> np.ndarray:
    """[D R]: of rounds that reach depth d + 1, how often rank r was the right one.

    A round reaches a depth if all ranks before it are below `num_ranks`.
    """
    ranks = np.asarray(ranks)
    reached = np.ones(len(ranks), bool)
    rates = np.zeros((ranks.shape[1], num_ranks))
    for d in range(ranks.shape[1]):
        total = max(int(reached.sum()), 1)
        hits = ranks[reached, d]
        rates[d] = np.bincount(hits[hits < num_ranks], minlength=num_ranks) / total
        reached &= ranks[:, d] < num_ranks
    return rates


def expected_tau(tree: Tree, ranks: np.ndarray) -> float:
    """Mean tokens per round, bonus included, that a tree keeps on observed rounds."""
    kept = np.ones(len(ranks))
    at = np.zeros(len(ranks), np.int32)
    for d in range(min(tree.depth, ranks.shape[1])):
        rank = np.minimum(ranks[:, d], tree.children.shape[1])
        table = np.pad(tree.children, ((0, 1), (0, 1)), constant_values=-1)
        at = table[at, rank]
        kept += at >= 0
        at = np.where(at >= 0, at, tree.num_nodes)
    return float(kept.mean())
