"""Scores of the tokens of a few clusters: step two of a clustered head.

The table lies in the order of the clusters, [C R D], so that a cluster is one block of
memory. Of each state's Y clusters R rows are read, and nothing of width V is made. What
the clusters are, and the law of their tokens, is in `specjax.clustered_head`.

    reference   a gather and a product in plain JAX; on a CPU a cluster at a time
    pallas_tpu  Mosaic for TPU: rows go from the table to the product once
    mosaic_gpu  Mosaic GPU for Hopper: the same; not in float32

Neither JAX nor tokamax 0.0.17 has such a product; their paged attention is the nearest,
with a softmax over all pages.
"""

import jax

from specjax import sharding
from specjax.kernels import mosaic
from specjax.kernels.clustered_head import gpu, reference, tpu
from specjax.typing import Array, Float, Int

STATES = 64  # of more states the clusters cover most of a table: left to XLA
KERNELS = {"pallas_tpu": tpu.token_scores, "mosaic_gpu": gpu.token_scores}


def choose(
    implementation: str | None, z: Float[Array, "B D"], clusters: Float[Array, "C R D"]
) -> str:
    """The implementation that None stands for on this machine."""
    if implementation is not None:
        return implementation
    # Of a table that is split over a mesh XLA would gather the whole for a kernel.
    if z.shape[0] > STATES or sharding.in_use():
        return "reference"
    if jax.default_backend() == "tpu" and tpu.in_place(clusters):
        return "pallas_tpu"
    if mosaic.on_hopper() and gpu.refusal(clusters) is None:
        return "mosaic_gpu"
    return "reference"


def token_scores(
    z: Float[Array, "B D"],
    best: Int[Array, "B Y"],
    clusters: Float[Array, "C R D"],
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float[Array, "B Y R"]:
    """clusters[best] . z in float32, without gradients: a choice has none to pass on.

    Args:
      best: clusters of each state.
      clusters: rows of the head, cluster by cluster.
      implementation: None chooses by platform; one that is named runs or raises.
      interpret: the kernel as plain JAX operations, for tests on other platforms.

    Raises ValueError for shapes that the named kernel does not take.
    """
    chosen = choose(implementation, z, clusters)
    args = jax.lax.stop_gradient((z, best, clusters))
    if chosen == "reference":
        return reference.token_scores(*args)
    if chosen not in KERNELS:
        known = ", ".join(["reference", *KERNELS])
        raise ValueError(f"unknown implementation {chosen!r}; known: {known}.")
    return KERNELS[chosen](*args, interpret=interpret)
