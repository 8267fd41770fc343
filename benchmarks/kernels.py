"""Bytes and arithmetic a second of each kernel beside the ceilings of the same chip.

    python benchmarks/kernels.py                 a minute on 2 cores
    python benchmarks/kernels.py --smoke         seconds, shapes of the tests

By turns in one run: as ceilings a copy of a large array (bytes read and written a
second) and a square matrix product (operations a second); tree attention as the
reference, as the models have it without a kernel (`layers.attend`) and as
`jax.nn.dot_product_attention`, all three through XLA, the latter two with their mask
ready made, and as the kernel of this platform; the clustered head as reference and
kernel, beside the whole table. A way's bytes are those it must move, the full cache
once or the rows scored, its operations those of its products. The shares are of the
ceilings of the same turn, medians over turns.

The kernels run on TPU and Hopper alone. Neither was at hand so far: no figure of a GPU
or TPU exists yet, and what this prints on a CPU is XLA's path.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing
import tyro

from specjax.kernels import clustered_head, tree_attention
from specjax.kernels.clustered_head import shapes as head_shapes
from specjax.kernels.tree_attention import reference
from specjax.kernels.tree_attention import shapes as attention_shapes
from specjax.layers import attend, dense, group_queries

KERNELS = {"tpu": "pallas_tpu", "gpu": "mosaic_gpu"}
ON_CPU = ("smollm2, 2k", "gemma 4 e2b")  # shapes that a small machine has room for


@dataclasses.dataclass(frozen=True)
class Config:
    shapes: tuple[str, ...] = ()  # names in the shapes' tables; (): all that fit
    dtype: str | None = None  # None: float32 on a CPU, else bfloat16
    copied: int = 2**28  # bytes of the array that is copied
    squared: int | None = None  # rows of the matrices; None: 1024 on a CPU, else 8192
    calls: int = 20  # in one program
    cudnn: bool = False  # `dot_product_attention` as cuDNN has it too, on GPUs
    repeats: int = 15
    seed: int = 0
    json: pathlib.Path | None = None
    smoke: bool = False


@dataclasses.dataclass(frozen=True)
class Way:
    """One computation and what it must at least move and multiply in a call."""

    what: str
    name: str
    run: Callable[..., Any]  # returns what the next call takes as its first input
    args: tuple[Any, ...]
    bytes: float
    flops: float


def program(way: "Way", calls: int) -> Callable[[], float]:
    """Seconds of `calls` calls in one program, each on what the one before returned.

    A program of one call is bound by its launch, and on a CPU by new memory.
    """

    @jax.jit
    def run(x, *rest):
        return jax.lax.fori_loop(0, calls, lambda _, x: way.run(x, *rest), x)

    return lambda: timing.timed(lambda: run(*way.args))


def carried(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with its first input returned, changed by far less than its precision."""

    def next_(x, *rest):
        out = run(x, *rest)
        if out.shape != x.shape:
            out = jnp.sum(out)
        return x + (out * 1e-30).astype(x.dtype)

    return next_


def ceilings(config: Config, dtype: Any) -> list[Way]:
    n, on_cpu = config.squared, jax.default_backend() == "cpu"
    n = n or (1024 if on_cpu else 8192)
    key = jax.random.key(config.seed)
    size = jnp.dtype(dtype).itemsize
    x = jnp.zeros((config.copied // size,), dtype)
    square = jax.random.normal(key, (n, n), dtype)
    unit = (square * n**-0.5).astype(dtype)  # products keep their size
    copy = lambda x: x + jnp.ones((), x.dtype)
    return [
        Way("ceiling", "copy", copy, (x,), 2 * x.nbytes, x.size),
        Way("ceiling", "product", jnp.dot, (square, unit), 3 * square.nbytes, 2 * n**3),
    ]


def attention(name: str, config: Config, dtype: Any) -> list[Way]:
    """Every implementation of tree attention at one shape, on full caches."""
    s = (attention_shapes.SMALL | attention_shapes.LARGE)[name]
    rng = np.random.default_rng(config.seed)
    normal = lambda *dims: jnp.asarray(rng.standard_normal(dims, np.float32), dtype)
    q = normal(s.batch, s.nodes, s.heads, s.width)
    k, v = (normal(s.batch, s.kv_heads, s.slots, s.width) for _ in range(2))
    depths = np.arange(s.nodes, dtype=np.int32)
    length = np.full(s.batch, s.slots - s.nodes, np.int32)
    nodes = (
        jnp.asarray(length),
        jnp.asarray(
            np.broadcast_to(np.tri(s.nodes, dtype=bool), (s.batch,) + (s.nodes,) * 2)
        ),
        jnp.asarray(np.broadcast_to(depths, (s.batch, s.nodes))),
        jnp.asarray(length[:, None] + depths),
    )
    seen = s.slots if s.window is None else min(s.window + s.nodes, s.slots)
    bytes_ = 2 * s.batch * s.kv_heads * seen * s.width * q.dtype.itemsize + 2 * q.nbytes
    flops = 4 * s.batch * s.heads * s.nodes * seen * s.width
    ours = lambda chosen: functools.partial(
        tree_attention.tree_attention, window=s.window, implementation=chosen
    )
    seen_by = reference.visible(nodes[0], s.slots, *nodes[1:], s.window)
    grouped = group_queries(q, s.kv_heads)
    mask = jnp.tile(seen_by, (1, s.heads // s.kv_heads, 1))
    ways: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("XLA", ours("reference"), (q, k, v, *nodes)),
        ("XLA, layers.attend", attend, (grouped, k, v, mask)),
    ]
    kernel = KERNELS.get(jax.default_backend())
    if kernel is not None:
        ways.append((kernel, ours(kernel), (q, k, v, *nodes)))
    theirs = (q, k.swapaxes(1, 2), v.swapaxes(1, 2), seen_by[:, None])
    for implementation in ("xla", "cudnn") if config.cudnn else ("xla",):
        call = functools.partial(_theirs, implementation=implementation)
        ways.append((f"jax.nn, {implementation}", call, theirs))
    return [Way(name, n, carried(f), args, bytes_, flops) for n, f, args in ways]


def _theirs(q, k, v, mask, implementation):
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, implementation=implementation
    )


def head(name: str, config: Config, dtype: Any) -> list[Way]:
    """The clustered head's second step, beside a product with the whole table."""
    s = (head_shapes.SMALL | head_shapes.LARGE)[name]
    rng = np.random.default_rng(config.seed)
    normal = lambda *dims: jnp.asarray(rng.standard_normal(dims, np.float32), dtype)
    z, table = normal(s.batch, s.width), normal(s.clusters, s.rows, s.width)
    best = [rng.permutation(s.clusters)[: s.scored] for _ in range(s.batch)]
    args = z, jnp.asarray(np.stack(best), jnp.int32), table
    whole = z, table.reshape(-1, s.width)
    numbers = s.batch * s.scored * s.rows * s.width
    ours = lambda chosen: functools.partial(
        clustered_head.token_scores, implementation=chosen
    )
    ways = [("XLA", ours("reference"))]
    kernel = clustered_head.choose(None, z, table)
    if kernel != "reference":  # a shape that the kernel takes as it is
        ways.append((kernel, ours(kernel)))
    size, flops = table.dtype.itemsize * numbers, 2 * numbers
    dense_flops = 2 * s.batch * table.size
    return [
        Way(name, "whole table", carried(dense), whole, table.nbytes, dense_flops),
        *(Way(name, n, carried(f), args, size, flops) for n, f in ways),
    ]


def main(config: Config) -> list[dict]:
    on_cpu = jax.default_backend() == "cpu"
    dtype = config.dtype or ("float32" if on_cpu else "bfloat16")
    names = config.shapes
    if config.smoke:
        config = dataclasses.replace(
            config, copied=2**20, squared=128, calls=2, repeats=2
        )
        names = ("a window", "odd")
    everything = [*attention_shapes.LARGE, *head_shapes.LARGE]
    names = names or (ON_CPU if on_cpu else everything)
    rows = []
    for name in names:
        of = head if name in head_shapes.SMALL | head_shapes.LARGE else attention
        ways = [*ceilings(config, dtype), *of(name, config, dtype)]
        turns = {i: program(way, config.calls) for i, way in enumerate(ways)}
        times = timing.by_turns(turns, config.repeats)
        rows += compare(ways, [times[i] / config.calls for i in turns])
    title = f"kernels, {dtype}"
    if on_cpu:
        title += "; no figure of a GPU or TPU exists yet"
    timing.report(title, rows, dataclasses.asdict(config), config.json)
    return rows


def compare(ways: list[Way], times: list[np.ndarray]) -> list[dict]:
    """A row for each way; the first two are the ceilings of their turns."""
    copy = ways[0].bytes / times[0]
    product = ways[1].flops / times[1]
    median = lambda x: float(np.median(x))
    return [
        {
            "shape": ways[2].what,
            "way": way.name,
            "ms": median(seconds) * 1e3,
            "GB/s": median(way.bytes / seconds) / 1e9,
            "of the copy %": median(way.bytes / seconds / copy) * 100,
            "GFLOP/s": median(way.flops / seconds) / 1e9,
            "of the product %": median(way.flops / seconds / product) * 100,
        }
        for way, seconds in zip(ways, times, strict=True)
    ]


if __name__ == "__main__":
    main(tyro.cli(Config))
