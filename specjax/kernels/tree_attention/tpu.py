"""Tree attention as a Pallas kernel for TPU (Mosaic).

Grid (B, K, blocks of the cache), the last one in order. A program reads a block of keys
and values of one kv head and keeps maximum, normaliser and sum of a running softmax for
the G N queries of that head in VMEM; [N S] scores are never in HBM. Blocks that no node
sees, past the nodes or before the window, are not fetched: their index is that of the
block before.

Bytes moved: B K (length + M) (E + E_v) of the cache's dtype, once, up to whole blocks.
A cache of a width that is no multiple of 128 lies otherwise outside a program: XLA
copies it when one begins and ends, and not between rounds (compiled for v5p).
Which uncommitted slots a query sees comes as bits, 32 slots a word, that a shift picks:
neither a gather nor a mask of [N S] is needed. Within 1e-5 of the reference in float32;
in bfloat16 the weights are rounded to it before the second product, as the products of
the reference's caller are.
"""

import functools

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.typing import Array, Bool, Int

SLOTS = 128  # a cache must be a multiple of so many slots
BLOCK = 512  # slots of a block, if the cache is a multiple of it
NOTHING = -1e30  # a score that is not visible; -inf would make NaN of -inf - -inf


def refusal(q, k, v) -> str | None:
    """What of these arrays the kernel does not take."""
    del q, v
    if k.shape[2] % SLOTS:
        return f"caches of a multiple of {SLOTS} slots, got {k.shape[2]}"
    return None


def words(visible: Bool[Array, "B N M"]) -> Int[Array, "B N W"]:
    """Bits of 32 slots a word, the lowest first."""
    B, N, M = visible.shape
    W = -(-M // 32)
    bits = jnp.pad(visible, ((0, 0), (0, 0), (0, 32 * W - M))).reshape(B, N, W, 32)
    value = (
        bits.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)[None, None, None]
    )
    total = jnp.sum(value, axis=-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(total, jnp.int32)


def kernel(first, last, length, q, k, v, bits, places, out, top, total, acc, **static):
    """One block of one kv head; `first` to `length` are scalars in memory."""
    scale, window, block = static["scale"], static["window"], static["block"]
    b, i = pl.program_id(0), pl.program_id(2)

    @pl.when(i == 0)
    def _start():
        top[...] = jnp.full(top.shape, NOTHING, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    at = first[b] + i

    @pl.when(at <= last[b])
    def _block():
        queries, keys = q[0, 0], k[0, 0]
        scores = jax.lax.dot_general(
            queries,
            keys,
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        scores = scores * scale
        slot = at * block + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        node = slot - length[b]
        seen = node < 0
        if window is not None:
            seen &= places[0] - slot < window
        for w in range(bits.shape[2]):
            inside = (node >= 32 * w) & (node < 32 * w + 32)
            shift = jnp.clip(node - 32 * w, 0, 31)
            bit = jax.lax.shift_right_logical(
                jnp.broadcast_to(bits[0, :, w : w + 1], scores.shape), shift
            )
            seen |= inside & (bit & 1 == 1)

        scores = jnp.where(seen, scores, NOTHING)
        new = jnp.maximum(top[...], jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - new), 0.0)
        shrink = jnp.exp(top[...] - new)
        total[...] = total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        values = v[0, 0]
        acc[...] = acc[...] * shrink + jax.lax.dot_general(
            weights.astype(values.dtype),
            values,
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        top[...] = new

    @pl.when(i == pl.num_programs(2) - 1)
    def _end():
        sums = total[...]
        out[0, 0] = (acc[...] / jnp.where(sums > 0, sums, 1.0)).astype(out.dtype)


def tree_attention(
    q,
    k,
    v,
    length,
    ancestors,
    depths,
    positions,
    *,
    window: int | None,
    scale: float,
    interpret: bool = False,
) -> Array:
    """See the package."""
    (B, N, H, E), (_, K, S, _), Ev = q.shape, k.shape, v.shape[-1]
    refused = refusal(q, k, v)
    if refused:
        raise ValueError(
            f"the TPU kernel takes {refused}. Use implementation='reference'."
        )
    if window is not None:
        apart = positions[..., None] - (length[:, None] + depths)[:, None]
        ancestors = ancestors & (apart < window)
    G, block = H // K, next(x for x in (BLOCK, 256, SLOTS) if S % x == 0)
    M = ancestors.shape[2]
    rows = -(-G * N // 16) * 16  # sublanes of a bfloat16 tile
    whole = lambda x: jnp.pad(x, ((0, 0), (0, rows - G * N), (0, 0)))
    grouped = rearrange(q, "B N (K G) E -> (B K) (G N) E", K=K)
    grouped = whole(grouped).reshape(B, K, rows, E)
    bits = whole(jnp.tile(words(ancestors), (1, G, 1)))
    places = whole(jnp.tile(positions[..., None], (1, G, 1)))

    last = jnp.minimum((length + M - 1) // block, S // block - 1)
    first = jnp.zeros_like(length)
    if window is not None:  # the oldest slot that the first node may see
        oldest = jnp.min(positions, axis=1) - window + 1
        first = jnp.clip(oldest, 0, length) // block
    of_head = lambda b, h, i, *_: (b, h, 0, 0)
    of_row = lambda b, h, i, *_: (b, 0, 0)

    def of_block(b, h, i, first, last, length):
        del length
        return b, h, jnp.minimum(first[b] + i, last[b]), 0

    out = pl.pallas_call(
        functools.partial(kernel, scale=scale, window=window, block=block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B, K, S // block),
            in_specs=[
                pl.BlockSpec((1, 1, rows, E), of_head),
                pl.BlockSpec((1, 1, block, E), of_block),
                pl.BlockSpec((1, 1, block, Ev), of_block),
                pl.BlockSpec((1, rows, bits.shape[2]), of_row),
                pl.BlockSpec((1, rows, 1), of_row),
            ],
            out_specs=pl.BlockSpec((1, 1, rows, Ev), of_head),
            scratch_shapes=[
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, Ev), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((B, K, rows, Ev), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
    )(first, last, length, grouped, k, v, bits, places)
    return rearrange(out[:, :, : G * N], "B K (G N) E -> B N (K G) E", G=G)
