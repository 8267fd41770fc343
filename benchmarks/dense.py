"""Few rows times a matrix: `layers._few_rows` against the plain product.

    python benchmarks/dense.py            about 90 s on 2 idle cores
    python benchmarks/dense.py --smoke    seconds, numbers without meaning

A decoding pass multiplies 1 to 32 rows with every weight, so it is bound by reading
them. The weights here are rotated through more memory than the last cache holds. Both
products are timed by turns in one run; `gain` is the median over turns of plain / few.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import timing
import tyro

from specjax import layers

WAYS = {"plain": layers._product, "few": layers._few_rows}


@dataclasses.dataclass(frozen=True)
class Config:
    shapes: tuple[str, ...] = (  # outputs x inputs; the first four are SmolLM2-135M's
        "960x576",
        "3072x576",
        "576x1536",
        "49152x576",
        "2048x2048",
    )
    num_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    megabytes: int = 96  # of weights per timed call; 3 times the cache of our machine
    repeats: int = 9
    seed: int = 0
    json: pathlib.Path | None = None
    smoke: bool = False  # a small shape, two turns


def seconds_each(product, x, weights) -> float:
    """Seconds of one product, from a chain of one a weight."""
    return timing.timed(lambda: chain(product, x, weights)) / len(weights)


@functools.partial(jax.jit, static_argnums=0)
def chain(product, x, weights):
    """One product a weight, each waiting for the one before."""
    for w in weights:
        # max, not sum: XLA would move a sum into the product.
        x = x + 1e-6 * jnp.max(product(x, w))
    return x


def main(config: Config) -> list[dict]:
    if config.smoke:
        config = dataclasses.replace(
            config, shapes=("64x32",), num_rows=(1, 2), megabytes=0, repeats=2
        )
    rng = np.random.default_rng(config.seed)
    rows = []
    for shape in config.shapes:
        F, D = map(int, shape.split("x"))
        count = max(2, -(-config.megabytes * 2**20 // (F * D * 4)))
        draw = lambda *size: jnp.asarray(rng.normal(0, 0.02, size), jnp.float32)
        weights = [draw(F, D) for _ in range(count)]
        for R in config.num_rows:
            x = draw(R, D)
            ways = {
                name: functools.partial(seconds_each, product, x, weights)
                for name, product in WAYS.items()
            }
            seconds = timing.by_turns(ways, config.repeats)
            rows.append(_row(shape, R, F * D * 4, seconds))
    timing.report("dense: few rows", rows, dataclasses.asdict(config), config.json)
    return rows


def _row(shape: str, R: int, num_bytes: int, seconds) -> dict:
    plain, few = seconds["plain"], seconds["few"]
    used = few if R > 1 else plain  # what `layers.dense` runs
    return {
        "shape": shape,
        "rows": R,
        "plain ms": float(np.median(plain)) * 1e3,
        "few ms": float(np.median(few)) * 1e3,
        "plain ms min": float(plain.min()) * 1e3,
        "few ms min": float(few.min()) * 1e3,
        "gain": float(np.median(plain / few)),
        "gain of min": float(plain.min() / few.min()),
        "used GB/s": num_bytes / float(used.min()) / 1e9,
    }


if __name__ == "__main__":
    main(tyro.cli(Config))
