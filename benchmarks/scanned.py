"""A frozen target's layers scanned against the same layers one by one.

    python benchmarks/scanned.py                  SmolLM2's shape, 3 minutes on 2 cores
    python benchmarks/scanned.py --mesh fsdp=8    compiled for faked devices, a minute
    python benchmarks/scanned.py --smoke          seconds, a small model of two layers

What `specjax train` runs of the target: the features of a batch, and once the
fingerprint of its weights. Compiling includes tracing and is done anew in every turn,
both ways by turns; the ratio is one by one / scanned. Weights are random. Temporary
bytes are the compiler's own figure for one device.
"""

import dataclasses
import functools
import os
import pathlib
import sys
import time
from typing import Any

if "--mesh" in sys.argv:  # before JAX counts its devices
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import timing
import tyro

from specjax import feature_cache, sharding
from specjax.targets.llama import Llama
from specjax.targets.scanned import Scanned
from specjax.transformer import TransformerConfig

SMOLLM2 = TransformerConfig(
    vocab_size=49152,
    width=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_width=64,
    mlp_width=1536,
    tie_embeddings=True,
)
SMALL = TransformerConfig(64, 32, 2, 4, 4, 8, 32, tie_embeddings=True)


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int = 30
    batch_size: int = 8
    length: int = 128  # tokens of a text
    mesh: str = ""  # data=2,fsdp=4: compiled for so many of eight devices, not run
    repeats: int = 3
    json: pathlib.Path | None = None
    smoke: bool = False


def weights(target: Any, mesh) -> Any:
    """Random weights, or their shapes on a mesh."""
    shapes = jax.eval_shape(lambda: target.init(jax.random.key(0)))
    if mesh is not None:
        split = sharding.shardings(shapes, mesh)
        put = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
        return jax.tree.map(put, shapes, split)
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.normal(0, 0.02, x.shape), x.dtype)
    return jax.tree.map(draw, shapes)


def texts(config: Config, mesh) -> Any:
    shape = config.batch_size, config.length
    if mesh is None:
        return jnp.zeros(shape, jnp.int32), jnp.ones(shape, bool)
    split = sharding.rows(mesh, shape)
    of = lambda dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=split)
    return of(jnp.int32), of(jnp.bool_)


def main(config: Config) -> list[dict]:
    shape = dataclasses.replace(SMOLLM2, num_layers=config.layers)
    if config.smoke:
        config = dataclasses.replace(config, length=8, repeats=1)
        shape = SMALL
    mesh = None
    if config.mesh:
        wanted = sharding.MeshShape.parse(config.mesh)
        mesh = wanted.make(jax.devices()[: wanted.size])
    alone, L = Llama(shape), shape.num_layers
    taps = (1, L // 2, L - 1)
    ways: dict[str, Any] = {"one by one": alone, "scanned": Scanned(alone)}
    held = {name: weights(target, mesh) for name, target in ways.items()}
    args, programs = texts(config, mesh), {}

    def look(name: str) -> float:
        jax.clear_caches()
        began = time.perf_counter()
        of = functools.partial(feature_cache.features, ways[name], taps)
        with sharding.use(mesh):
            programs[name] = jax.jit(of).lower(held[name], *args).compile()
        return time.perf_counter() - began

    def fingerprint(name: str) -> float:
        jax.clear_caches()
        return timing.timed(lambda: sharding.fingerprint(held[name]))

    def run(name: str) -> float:
        return timing.timed(lambda: programs[name](held[name], *args))

    parts = {"compile the pass, s": look}
    if mesh is None:
        parts |= {"run the pass, s": run, "first fingerprint, s": fingerprint}
    found = {}
    for what, measure in parts.items():
        of = {name: functools.partial(measure, name) for name in ways}
        found[what] = timing.by_turns(of, config.repeats)
    analyses: dict[str, Any] = {n: p.memory_analysis() for n, p in programs.items()}
    temporary = {n: np.array([x.temp_size_in_bytes / 1e6]) for n, x in analyses.items()}
    table = [
        {
            "way": what,
            **{name: float(np.median(x)) for name, x in each.items()},
            "ratio": float(np.median(each["one by one"] / each["scanned"])),
        }
        for what, each in (found | {"temporary of the pass, MB": temporary}).items()
    ]
    title = f"{L} layers one by one and scanned {config.mesh}"
    timing.report(title.strip(), table, dataclasses.asdict(config), config.json)
    return table


if __name__ == "__main__":
    main(tyro.cli(Config))
