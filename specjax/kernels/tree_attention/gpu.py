"""Tree attention as a Pallas kernel for NVIDIA Hopper (Mosaic GPU).

Grid (tiles of the G N queries of a kv head, K, splits of the text, B). In a program
one warpgroup copies blocks of 64 slots into shared memory, as many ahead as fit, and
one or two others, 64 queries each, run the softmax over them in registers; [N S] scores
are nowhere. The committed text of a row is cut into equal splits, so that few rows and
kv heads fill the chip; the last split takes the nodes too. XLA joins the splits' sums
by their maxima.

Bytes moved: B K (length + M) (E + E_v) of the cache's dtype, once per 128 queries (64
for widths above 128), up to whole blocks; splits B H N E_v of float32 for the sums. The
nodes' slots begin anywhere and a copy at a multiple of 8, so what a query sees of those
blocks is an array laid to fit them, [B G N M]. Weights are rounded to the cache's dtype
before the second product: within 2e-2 of float64 in bfloat16.

Float32 caches are refused: the tensor cores have no product of that precision, and with
their tf32 the values would have to lie transposed. JAX's own kernels for this chip
(`jax.experimental.pallas.ops.gpu`): `attention_mgpu` has neither a mask nor lengths,
`decode_attention` takes one query and is deprecated with Triton.
"""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.kernels import mosaic
from specjax.typing import Array, Bool, Int

BLOCK = 64  # slots of a step; a cache must be a multiple of it
ROWS = 64  # queries of a warpgroup, the least that its matrix product takes
SHARED = 200_000  # bytes of shared memory a program may fill, of 227 KiB
PROGRAMS = 264  # two for each processor of an H100 or H200
ALIGNED = 8  # slots: where a copy to swizzled memory may begin
NOTHING = -1e30  # a score that is not visible; -inf would make NaN of -inf - -inf


def refusal(q, k, v) -> str | None:
    """What of these arrays the kernel does not take."""
    if q.dtype not in (jnp.bfloat16, jnp.float16) or {k.dtype, v.dtype} != {q.dtype}:
        return f"bfloat16 or float16, got {q.dtype}, {k.dtype} and {v.dtype}"
    if k.shape[2] % BLOCK:
        return f"caches of a multiple of {BLOCK} slots, got {k.shape[2]}"
    widths = q.shape[-1], v.shape[-1]
    if any(width % 64 or not 64 <= width <= 256 for width in widths):
        return f"heads of width 64, 128, 192 or 256, got {widths[0]} and {widths[1]}"
    return None


def read(ref, layout) -> Array:
    """A tile of device memory in registers; `load` lost an argument in jax 0.11."""
    at = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
    return plgpu.load(ref, *at, layout=layout, optimized=False)


def kernel(q, k, v, bounds, places, own, out, top_out, total_out, *scratch, **static):
    """One split of the text of one row, for some queries of one kv head."""
    queries, keys, values, weights, q_full, k_full, v_full, free = scratch
    groups, stages, window = static["groups"], static["stages"], static["window"]
    b, h = lax.axis_index("batch"), lax.axis_index("head")
    split, group = lax.axis_index("split"), lax.axis_index("group")
    first, count, length, reach = (bounds[b, split, i] for i in range(4))
    is_last = split == static["splits"] - 1
    steps = count + jnp.where(is_last, static["tiles"], 0)
    W = plgpu.Layout.WGMMA
    wide = lambda x, like: lax.broadcast_in_dim(x, like.shape, [0])

    @pl.when(group == groups)
    def _copy():
        if groups > 1:
            plgpu.set_max_registers(40, action="decrease")

        def step(i, _):
            at = lax.rem(i, stages)

            @pl.when(i >= stages)
            def _wait():
                plgpu.barrier_wait(free.at[at])

            node = reach + (i - count) * BLOCK
            node = jnp.minimum(node, static["slots"] - BLOCK)
            start = jnp.where(i < count, (first + i) * BLOCK, node)
            block = b, h, pl.ds(pl.multiple_of(start, ALIGNED), BLOCK)
            plgpu.copy_gmem_to_smem(k.at[block], keys.at[at], k_full.at[at])
            plgpu.copy_gmem_to_smem(v.at[block], values.at[at], v_full.at[at])
            return 0

        lax.fori_loop(0, steps, step, 0)

    @pl.when(group < groups)
    def _attend():
        if groups > 1:
            plgpu.set_max_registers(232, action="increase")
        row = (lax.axis_index("tile") * groups + group) * ROWS
        rows = pl.ds(row, ROWS)
        plgpu.copy_gmem_to_smem(q.at[b, h, rows], queries.at[group], q_full.at[group])
        plgpu.barrier_wait(q_full.at[group])
        place = read(places.at[b, rows], W.reduce(1))
        E = values.shape[-1]
        part = E if E <= 128 else 64  # columns of a product that are in registers
        parts = [pl.ds(i, part) for i in range(0, E, part)]

        def step(i, carry, seen_at):
            acc, top, total = carry
            at = lax.rem(i, stages)
            plgpu.barrier_wait(k_full.at[at])

            def score(ref):
                plgpu.wgmma(ref, queries.at[group], keys.at[at].transpose((1, 0)))
                return ref[...]

            scores = pl.run_scoped(
                score, plgpu.WGMMAAccumulatorRef((ROWS, BLOCK), jnp.float32)
            )
            seen = seen_at(i)
            scores = jnp.where(seen, scores * static["scale"], NOTHING)
            new = jnp.maximum(top, jnp.max(scores, axis=1))
            shares = jnp.where(seen, jnp.exp2(scores - wide(new, scores)), 0.0)
            shrink = jnp.exp2(top - new)
            total = total * shrink + jnp.sum(shares, axis=1)
            # Through shared memory: the interpreter has no product with registers.
            weights[group] = shares.astype(weights.dtype)
            plgpu.commit_smem()
            plgpu.barrier_wait(v_full.at[at])

            def weigh(ref, columns):
                plgpu.wgmma(ref, weights.at[group], values.at[at, :, columns])
                return ref[...]

            into = plgpu.WGMMAAccumulatorRef((ROWS, part), jnp.float32)
            acc = tuple(
                old * wide(shrink, old)
                + pl.run_scoped(functools.partial(weigh, columns=columns), into)
                for old, columns in zip(acc, parts, strict=True)
            )
            plgpu.barrier_arrive(free.at[at])
            return acc, new, total

        def text(i):
            place_of = functools.partial(plgpu.broadcasted_iota, jnp.int32, layout=W)
            slot = (first + i) * BLOCK + place_of((ROWS, BLOCK), 1)
            seen = slot < length
            return (
                seen if window is None else seen & (wide(place, slot) - slot < window)
            )

        def node(i):
            tile = b, rows, pl.ds((i - count) * BLOCK, BLOCK)
            return read(own.at[tile], W) > 0

        row_of = lambda x: plgpu.layout_cast(
            jnp.full((ROWS,), x, jnp.float32), W.reduce(1)
        )
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, part), jnp.float32), W)
        carry = (zeros,) * len(parts), row_of(NOTHING), row_of(0.0)
        carry = lax.fori_loop(0, count, functools.partial(step, seen_at=text), carry)
        carry = lax.fori_loop(
            count, steps, functools.partial(step, seen_at=node), carry
        )
        acc, top, total = carry
        for sums, columns in zip(acc, parts, strict=True):
            out[b, split, h, rows, columns] = sums
        top_out[b, split, h, rows] = top
        total_out[b, split, h, rows] = total


def node_tiles(
    length: Int[Array, "B"], ancestors: Bool[Array, "B N M"], slots: int
) -> Bool[Array, "B N X"]:
    """What each node sees of the blocks that the kernel reads for the nodes.

    They begin at the length, rounded down to where a copy may begin, or as late as the
    cache allows. A slot that an earlier block held already is not seen again.
    """
    B, N, M = ancestors.shape
    tiles = -(-(M + ALIGNED - 1) // BLOCK)
    start = (length // ALIGNED * ALIGNED)[:, None]
    start = start + BLOCK * jnp.arange(tiles, dtype=jnp.int32)[None]
    start = jnp.minimum(start, slots - BLOCK) - length[:, None]
    before = jnp.pad(start[:, :-1] + BLOCK, ((0, 0), (1, 0)))
    node = start[..., None] + jnp.arange(BLOCK, dtype=jnp.int32)[None, None]
    new = (node >= jnp.maximum(before, 0)[..., None]) & (node < M)
    index = jnp.clip(node, 0, M - 1).reshape(B, 1, -1)
    index = jnp.broadcast_to(index, (B, N, index.shape[2]))
    return jnp.take_along_axis(ancestors, index, axis=2) & new.reshape(B, 1, -1)


def split_text(
    length: Int[Array, "B"], first: Int[Array, "B"], splits: int
) -> Int[Array, "B X 4"]:
    """First block and number of blocks of each split; the length, exact and aligned."""
    blocks = -(-length // BLOCK) - first
    each = -(-blocks // splits)
    ends = jnp.arange(splits + 1, dtype=jnp.int32)[None] * each[:, None]
    ends = jnp.minimum(ends, blocks[:, None])
    same = lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], splits))
    begin, count = first[:, None] + ends[:, :-1], ends[:, 1:] - ends[:, :-1]
    whole = length // ALIGNED * ALIGNED
    return jnp.stack([begin, count, same(length), same(whole)], axis=-1)


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
    mosaic.check("tree attention", refusal(q, k, v), interpret)
    (B, N, H, E), (_, K, S, _), Ev = q.shape, k.shape, v.shape[-1]
    G = H // K
    groups = min(2 if max(E, Ev) <= 128 else 1, -(-G * N // ROWS))
    R = -(-G * N // (ROWS * groups)) * ROWS * groups
    first = jnp.zeros_like(length)
    if window is not None:
        apart = positions[..., None] - (length[:, None] + depths)[:, None]
        ancestors = ancestors & (apart < window)
        oldest = jnp.min(positions, axis=1) - window + 1
        first = jnp.clip(oldest, 0, length) // BLOCK
    own = node_tiles(length, ancestors, S)

    whole = lambda x: jnp.pad(x, ((0, 0), (0, R - G * N), *((0, 0),) * (x.ndim - 2)))
    grouped = rearrange(q, "B N (K G) E -> (B K) (G N) E", K=K)
    grouped = whole(grouped).reshape(B, K, R, E)
    own = whole(jnp.tile(own.astype(jnp.float32), (1, G, 1)))
    places = whole(jnp.tile(positions, (1, G)))

    size = q.dtype.itemsize
    stage = BLOCK * (E + Ev) * size
    stages = min((SHARED - groups * ROWS * (E + BLOCK) * size) // stage, 8)
    programs = B * K * R // (ROWS * groups)
    splits = max(min(PROGRAMS // programs, S // (4 * BLOCK)), 1)
    shared = lambda *shape: plgpu.SMEM(shape, q.dtype, transforms=mosaic.SWIZZLED)
    sums = jax.ShapeDtypeStruct((B, splits, K, R), jnp.float32)
    out, top, total = plgpu.kernel(
        functools.partial(
            kernel,
            groups=groups,
            stages=stages,
            splits=splits,
            tiles=own.shape[2] // BLOCK,
            slots=S,
            window=window,
            scale=scale * math.log2(math.e),  # exp2 is what the chip computes
        ),
        out_type=(
            jax.ShapeDtypeStruct((B, splits, K, R, Ev), jnp.float32),
            sums,
            sums,
        ),
        scratch_types=[
            shared(groups, ROWS, E),
            shared(stages, BLOCK, E),
            shared(stages, BLOCK, Ev),
            shared(groups, ROWS, BLOCK),
            plgpu.Barrier(num_barriers=groups),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        ],
        grid=(R // (ROWS * groups), K, splits, B),
        grid_names=("tile", "head", "split", "batch"),
        num_threads=groups + 1,
        thread_name="group",
        kernel_name="tree_attention",
        **({"interpret": mosaic.interpreter()} if interpret else {}),
    )(grouped, k, v, split_text(length, first, splits), places, own)
    share = jnp.exp2(top - jnp.max(top, axis=1, keepdims=True))
    total = jnp.sum(share * total, axis=1)[..., None]
    out = jnp.sum(share[..., None] * out, axis=1) / jnp.where(total > 0, total, 1.0)
    out = out[:, :, : G * N].astype(q.dtype)
    return rearrange(out, "B K (G N) E -> B N (K G) E", G=G)
