"""Compiles the kernels, and rounds that use them, for chips that are not here.

    pip install --no-deps --target LIBTPU 'libtpu==0.0.42.*'        (jax 0.10.2)
    pip install --no-deps --target CUDA jax-cuda13-pjrt==0.10.2 \
        jax-cuda13-plugin==0.10.2
    python benchmarks/compile_kernels.py --libtpu LIBTPU --cuda CUDA    16 min, 1 core
    python benchmarks/compile_kernels.py --smoke                seconds, lowers only

The compilers are those of the vendors' own run time: of TPU v5e, v5p, v6e and 7x, and
of NVIDIA's Hopper, with `ptxas` of a CUDA 13 toolkit on the PATH. They find what
lowering does not, memory above all: VMEM that does not suffice, registers that spill.
Nothing is run. libtpu is not open source (Google Cloud Platform agreement): no part of
this project depends on it. The last result is beside this file.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import timing
import tyro

from specjax import drafters
from specjax.generate import Model, Weights, advance, prefill
from specjax.kernels import clustered_head
from specjax.kernels.clustered_head import shapes as head_shapes
from specjax.kernels.tree_attention import shapes as attention_shapes
from specjax.kernels.tree_attention import tree_attention
from specjax.sampling import GREEDY
from specjax.targets.llama import Llama
from specjax.transformer import TransformerConfig
from specjax.tree import Tree

RESULT = pathlib.Path(__file__).with_suffix(".json")
TOPOLOGIES = {
    "TPU v5e": "v5e:2x2",
    "TPU v5p": "v5p:2x2x1",
    "TPU v6e": "v6e:2x2",
    "TPU 7x": "tpu7x:2x2x1",
}
HOPPER = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
  l2_cache_size: 52428800
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""
# SmolLM2's shape, of whose 30 equal layers 4 are compiled.
SMOLLM2 = TransformerConfig(49152, 576, 4, 9, 3, 64, 1536, tie_embeddings=True)
TREE = Tree((-1, 0, 0, 0, 1, 1, 2, 4))
KERNEL = {"tpu": "pallas_tpu", "cuda": "mosaic_gpu"}
abstract = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Config:
    libtpu: pathlib.Path | None = None  # folder that holds libtpu; None: no TPU
    cuda: pathlib.Path | None = (
        None  # folder that holds JAX's CUDA plugin; None: no GPU
    )
    platform: str | None = None  # set by this script for the process that compiles
    json: pathlib.Path = RESULT  # a platform that is not compiled for keeps its rows
    smoke: bool = False


def attention_case(shape, dtype, kernel):
    s, i32 = shape, lambda *dims: abstract(dims, jnp.int32)
    kv = abstract((s.batch, s.kv_heads, s.slots, s.width), dtype)
    args = (
        abstract((s.batch, s.nodes, s.heads, s.width), dtype),
        *(kv, kv, i32(s.batch)),
        abstract((s.batch, s.nodes, s.nodes), bool),
        *(i32(s.batch, s.nodes), i32(s.batch, s.nodes)),
    )
    run = functools.partial(tree_attention, window=s.window, implementation=kernel)
    return jax.jit(run), args, {}


def head_case(shape, dtype, kernel):
    s = shape
    args = (
        abstract((s.batch, s.width), dtype),
        abstract((s.batch, s.scored), jnp.int32),
        abstract((s.clusters, s.rows, s.width), dtype),
    )
    return (
        jax.jit(functools.partial(clustered_head.token_scores, implementation=kernel)),
        args,
        {},
    )


def generate_cases(kernel, batch_size=4):
    """Prefill and rounds in bfloat16, on a chain and on a tree."""
    target = Llama(SMOLLM2, attention=kernel)
    params = jax.eval_shape(target.init, jax.random.key(0))
    for name, topology in (("medusa", None), ("eagle3", TREE)):
        drafter = drafters.get(name).for_target(SMOLLM2, None)
        if topology is not None:
            drafter = dataclasses.replace(drafter, topology=topology)
        shared = jax.eval_shape(target.shared, params)
        made = jax.eval_shape(drafter.init, jax.random.key(0), shared)
        weights = jax.tree.map(
            lambda x: abstract(
                x.shape, jnp.bfloat16 if x.dtype == jnp.float32 else x.dtype
            ),
            Weights(params, made),
        )
        model = Model(target, drafter, GREEDY)
        i32 = lambda *dims: abstract(dims, jnp.int32)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch_size))
        args = weights, i32(batch_size, 128), i32(batch_size), keys, i32(1)
        sizes = {"cache_size": 1024, "max_new_tokens": 512}
        state = jax.eval_shape(functools.partial(prefill, model, **sizes), *args)
        yield f"prefill, {name}", (prefill, (model, *args), sizes)
        yield f"rounds, {name}", (advance, (model, weights, state, i32()), {})


def cases(platform: str) -> Iterator[tuple[str, Any]]:
    """What is compiled for a chip: its name; the function, arguments, static ones."""
    kernel = KERNEL[platform]
    for dtype in ("bfloat16", "float32") if platform == "tpu" else ("bfloat16",):
        for name, shape in attention_shapes.LARGE.items():
            case = attention_case(shape, dtype, kernel)
            yield f"tree attention, {name}, {dtype}", case
        for name, shape in head_shapes.LARGE.items():
            if platform == "tpu" or shape.width <= clustered_head.gpu.WIDEST:
                case = head_case(shape, dtype, kernel)
                yield f"clustered head, {name}, {dtype}", case
    yield from generate_cases(kernel)


def chips(platform: str) -> Iterator[tuple[str, Any]]:
    """Names and compile-only devices."""
    from jax.experimental import topologies

    if platform == "cuda":
        importlib.import_module("jax_plugins.xla_cuda13")  # registers the platform

        found = topologies.get_topology_desc(
            platform="cuda", target_config=HOPPER, topology="1x1x1"
        )
        yield "NVIDIA H200", found.devices[0]
        return
    for name, topology in TOPOLOGIES.items():
        found = topologies.get_topology_desc(topology_name=topology, platform="tpu")
        yield name, found.devices[0]


def compile_for(platform: str) -> None:
    """Compiles every case for every chip; a line of JSON each, after the compiler's."""
    for chip, device in chips(platform):
        at = jax.sharding.SingleDeviceSharding(device)

        def place(x, at=at):
            if not isinstance(x, jax.ShapeDtypeStruct):
                return x
            return abstract(x.shape, x.dtype, sharding=at)

        for name, (run, args, static) in cases(platform):
            row: dict[str, Any] = {"chip": chip, "case": name}
            traced = run.trace(*jax.tree.map(place, args), **static)
            lowered = traced.lower(lowering_platforms=(platform,))
            try:
                done = lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                row |= {"result": str(error).partition("\n")[0][:300]}
            else:
                memory = done.memory_analysis()
                row |= {
                    "result": "compiled",
                    "temporary bytes": memory.temp_size_in_bytes,
                }
            print(json.dumps(row), flush=True)


def rows_of(platform: str, folder: pathlib.Path) -> list[dict]:
    """The rows of one platform, from a process of its own that finds the compiler."""
    names = [str(folder), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, names)),
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_LIBRARY_PATH": str(folder / "libtpu" / "libtpu.so"),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a second process would wait on a lock
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, __file__, "--platform", platform],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    rows, said = [], ""
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith('{"chip"'):
            said += line
            continue
        row = json.loads(line)
        # What ptxas said since the last case is of this one.
        used = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
        spilt = [int(n) for n in re.findall(r"(\d+) bytes spill stores", said)]
        if used:
            row |= {"registers": max(used), "spilt bytes": max(spilt)}
        print(row, flush=True)
        rows.append(row)
        said = ""
    if process.wait():
        raise SystemExit(f"compiling for {platform} ended early: {said[-2000:]}")
    return rows


def main(config: Config) -> list[dict]:
    if config.platform is not None:
        compile_for(config.platform)
        return []
    if config.smoke:
        return lower()
    given = {"tpu": config.libtpu, "cuda": config.cuda}
    if not any(given.values()):
        raise SystemExit("nothing to compile with: give --libtpu, --cuda or both.")
    made = json.loads(config.json.read_text()) if config.json.exists() else {}
    for name, folder in given.items():
        if folder is not None:
            rows = rows_of(name, folder.resolve())
            used = {"jax": jax.__version__, "compiler": stated(folder, name)}
            made[name] = used | {"rows": rows}
            config.json.write_text(json.dumps(made, indent=1) + "\n")
    rows = [row for platform in made.values() for row in platform["rows"]]
    failed = [row for row in rows if row["result"] != "compiled"]
    print(f"{len(rows) - len(failed)} compiled, {len(failed)} not")
    return rows


def stated(folder: pathlib.Path, platform: str) -> str:
    """The compiler's package and its version."""
    name = {"tpu": "libtpu", "cuda": "jax-cuda13-pjrt"}[platform]
    found = importlib.metadata.distributions(name=name, path=[str(folder)])
    return f"{name} {next(iter(found)).version}"


def lower() -> list[dict]:
    """One case of each kind, without the vendors' compilers."""
    rows = []
    for platform in KERNEL:
        kinds = {name.partition(",")[0]: case for name, case in cases(platform)}
        for kind, (run, args, static) in kinds.items():
            run.trace(*args, **static).lower(lowering_platforms=(platform,))
            rows.append({"platform": platform, "case": kind, "result": "lowered"})
    timing.report("kernels, lowered only", rows, {}, None)
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config))
