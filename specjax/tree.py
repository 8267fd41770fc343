"""Draft trees of fixed shape: node 0 is the anchor, parents come before children."""

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Tree:
    """A static topology, hashable: its ancestor mask is a constant of a pass."""

    parents: tuple[int, ...]  # parents[0] == -1 (the anchor), parents[i] < i

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
        """Most tokens one round can accept."""
        return int(self.depths.max())

    @functools.cached_property
    def ancestors(self) -> np.ndarray:
        """[N N] bool: True where the column's node is the row's node or above it."""
        mask = np.eye(self.num_nodes, dtype=bool)
        for node, parent in enumerate(self.parents[1:], 1):
            mask[node] |= mask[parent]
        return mask
