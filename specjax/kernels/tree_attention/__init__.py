"""Attention of a tree's nodes to a long cache and to their own ancestors.

The cache holds `length` committed slots a row, and after them M uncommitted ones, the
nodes' own keys and values among them. A node sees the committed text and, of the
uncommitted slots, its ancestors; with a window only what is less than `window`
positions before it. Topology, lengths and depths are arrays: nothing is compiled anew
for another tree of the same size.

    reference   the meaning, in plain JAX on every platform; scores [N S] in memory
    pallas_tpu  Mosaic for TPU: a pass over the cache, slots past the nodes not read
"""

import jax

from specjax.kernels.tree_attention import reference, tpu
from specjax.typing import Array, Bool, Float, Int


def choose(implementation: str | None, nodes: int, slots: int) -> str:
    """The implementation that None stands for on this machine."""
    if implementation is not None:
        return implementation
    fits = slots % tpu.SLOTS == 0 and nodes <= tpu.NODES
    return "pallas_tpu" if jax.default_backend() == "tpu" and fits else "reference"


def tree_attention(
    q: Float[Array, "B N H E"],
    k: Float[Array, "B K S E"],
    v: Float[Array, "B K S _E"],
    length: Int[Array, "B"],
    ancestors: Bool[Array, "B N M"],
    depths: Int[Array, "B M"],
    positions: Int[Array, "B N"],
    *,
    window: int | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float[Array, "B N H _E"]:
    """Softmax attention in float32 of N nodes; see the module.

    Args:
      k, v: the whole cache of a layer, the M uncommitted entries written at `length`.
      length: committed slots of each row.
      ancestors: whether uncommitted slot m is visible to node n, itself included.
      depths: of an uncommitted slot: its position is length + depth.
      positions: of each node.
      scale: of the scores; None is E^-1/2.
      implementation: None chooses by platform; one that is named runs or raises.
      interpret: the kernel as plain JAX operations, for tests on other platforms.

    Raises ValueError for shapes that the named kernel does not take.
    """
    by = q.shape[-1] ** -0.5 if scale is None else scale
    chosen = choose(implementation, q.shape[1], k.shape[2])
    args = q, k, v, length, ancestors, depths, positions
    if chosen == "reference":
        return reference.tree_attention(*args, window=window, scale=by)
    if chosen != "pallas_tpu":
        raise ValueError(
            f"unknown implementation {chosen!r}; known: reference, pallas_tpu."
        )
    return tpu.tree_attention(*args, window=window, scale=by, interpret=interpret)
