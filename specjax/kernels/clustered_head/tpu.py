"""Scores of chosen clusters as a Pallas kernel for TPU (Mosaic).

Grid (B, Y / P): a step multiplies P clusters with one state. The chosen indices are
scalars that are there before the grid starts, and the table is an input P times, each
with the block of its own cluster: the blocks of the next step are fetched while this
one is multiplied, and no other row of the table leaves HBM.

Bytes moved: B Y R D of the table's dtype, and B Y R float32 back. Interpreted, within
1e-5 of float64 in both dtypes; products of a float32 table have the precision that JAX
is set to, as elsewhere.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.typing import Array

AT_ONCE = 8  # clusters of a step, at most
FAST = 2**23  # bytes of VMEM that the blocks of a step may take, twice over
SUBLANES = 16  # rows of a bfloat16 tile: a state is repeated as often


def at_once(clusters) -> int:
    """P, the clusters of a step; 0 if one is too large."""
    R, D = clusters.shape[1:]
    fits = FAST // (2 * R * D * clusters.dtype.itemsize)
    return max((p for p in (1, 2, 4, AT_ONCE) if p <= fits), default=0)


def refusal(clusters) -> str | None:
    """What of this table the kernel does not take."""
    if at_once(clusters):
        return None
    R, D = clusters.shape[1:]
    return f"clusters of {FAST // 2} bytes, got {R} rows of width {D}"


def in_place(clusters) -> bool:
    """Whether the kernel takes the table as it lies; XLA copies the whole otherwise."""
    tiled = clusters.shape[1] % 8 == 0 and clusters.shape[2] % 128 == 0
    return tiled and refusal(clusters) is None


def kernel(best, z, *refs):
    """Rows of P clusters times one state."""
    del best  # read by the index maps
    *tables, out = refs
    for j, table in enumerate(tables):
        scores = lax.dot_general(
            z[0],
            table[0],
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        out[0, 0, j] = scores[0]


def token_scores(z, best, clusters, *, interpret: bool = False) -> Array:
    """See the package."""
    refused = refusal(clusters)
    if refused:
        raise ValueError(
            f"the TPU kernel takes {refused}. Make more clusters, or use "
            "implementation='reference'."
        )
    (B, D), Y, R = z.shape, best.shape[1], clusters.shape[1]
    P = min(at_once(clusters), Y)
    steps = -(-Y // P)
    best = jnp.pad(best, ((0, 0), (0, steps * P - Y)), mode="edge").ravel()
    z = jnp.broadcast_to(z.astype(clusters.dtype)[:, None], (B, SUBLANES, D))

    def block_of(j):
        return lambda b, i, best: (best[(b * steps + i) * P + j], 0, 0)

    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, steps),
            in_specs=[
                pl.BlockSpec((1, SUBLANES, D), lambda b, i, best: (b, 0, 0)),
                *(pl.BlockSpec((1, R, D), block_of(j)) for j in range(P)),
            ],
            out_specs=pl.BlockSpec((1, 1, P, R), lambda b, i, best: (b, i, 0, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((B, steps, P, R), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary")
        ),
        interpret=interpret,
    )(best, z, *(clusters,) * P)
    return out.reshape(B, steps * P, R)[:, :Y]
