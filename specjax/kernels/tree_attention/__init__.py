"""Attention of a tree's nodes to a long cache and to their own ancestors.

The cache holds `length` committed slots a row, and after them M uncommitted ones, the
nodes' own keys and values among them. A node sees the committed text and, of the
uncommitted slots, its ancestors; with a window only what is less than `window`
positions before it. Topology, lengths and depths are arrays: nothing is compiled anew
for another tree of the same size.

    reference   the meaning, in plain JAX on every platform; scores [N S] in memory
    pallas_tpu  Mosaic for TPU: a pass over the cache, slots past the nodes not read
    mosaic_gpu  Mosaic GPU for Hopper: the same, the text in splits; not in float32

Neither kernel has a gradient: no target or drafter is trained through a cache. Looked
at and not used, as they take a tree only as an [N S] mask in device memory: Splash
attention and `jax.nn.dot_product_attention` of JAX, `dot_product_attention` of tokamax
0.0.17. Their ragged paged attention for TPU is causal, and wants a cache in pages.
"""

import functools

import jax

from specjax import sharding
from specjax.kernels import mosaic
from specjax.kernels.tree_attention import gpu, reference, tpu
from specjax.typing import Array, Bool, Float, Int

NODES = 128  # more, as in a prefill, are left to XLA unless a kernel is named
KERNELS = {"pallas_tpu": tpu.tree_attention, "mosaic_gpu": gpu.tree_attention}


def choose(
    implementation: str | None,
    q: Float[Array, "B N H E"],
    k: Float[Array, "B K S E"],
    v: Float[Array, "B K S _E"],
) -> str:
    """The implementation that None stands for on this machine."""
    if implementation is not None:
        return implementation
    if q.shape[1] > NODES:
        return "reference"
    if jax.default_backend() == "tpu" and tpu.refusal(q, k, v) is None:
        return "pallas_tpu"
    if mosaic.on_hopper() and gpu.refusal(q, k, v) is None:
        return "mosaic_gpu"
    return "reference"


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
    chosen = choose(implementation, q, k, v)
    args = q, k, v, length, ancestors, depths, positions
    if chosen == "reference":
        return reference.tree_attention(*args, window=window, scale=by)
    if chosen not in KERNELS:
        known = ", ".join(["reference", *KERNELS])
        raise ValueError(f"unknown implementation {chosen!r}; known: {known}.")
    kernel = functools.partial(
        KERNELS[chosen], window=window, scale=by, interpret=interpret
    )
    return _on_mesh(kernel, *args)


def _on_mesh(kernel, q, k, v, *nodes):
    """Each device computes its rows and kv heads: XLA would gather a kernel's cache."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return kernel(q, k, v, *nodes)
    cache = sharding.fit(sharding.row_axes(k, k.shape[0]), k.shape, mesh)
    rows, heads = (*cache, None, None)[:2]
    spec = jax.sharding.PartitionSpec
    queries = spec(rows, None, heads)
    return jax.shard_map(
        kernel,
        in_specs=(queries, cache, cache, *(spec(rows) for _ in nodes)),
        out_specs=queries,
        check_vma=False,  # a kernel's output does not say over what it varies
    )(q, k, v, *nodes)
