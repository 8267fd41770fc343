"""Memory of training on one long text, split over a mesh: the compiler's own figures.

A text of up to 32k tokens goes through a target of published shape and a P-EAGLE step,
compiled from shapes alone for eight devices of which each holds an eighth of the
weights and of the tokens (`plan`). In the table, GB on one device:

    features     target's pass beside its arguments
    step         drafter's step beside its arguments, forward and gradient
    arguments    of the step: weights, optimiser, tables, the features of the text
    whole        scores of all query heads of one layer of the target at once, on one
                 device: what neither program holds

The figures are those of XLA for the CPU, which orders a program less sparingly than for
TPU or GPU; from the shortest text to the longest they must not grow as the square.

    python experiments/long_context.py         4 minutes on 2 cores
"""

import contextlib
import dataclasses

import common
import jax

from specjax import figures, plan, roofline
from specjax.sharding import MeshShape

SMOKE = {"model": "smollm2-135m", "cases": ((256, 1), (256, 2))}
GB = 1e9


@dataclasses.dataclass(frozen=True)
class Config:
    model: str = "qwen3-8b"
    # tokens of the text, segments of the step
    cases: tuple[tuple[int, int], ...] = (
        (2048, 1),
        (2048, 4),
        (8192, 4),
        (8192, 16),
        (32768, 16),
        (32768, 64),
    )
    devices: int = 8


def main(config: Config) -> list[dict]:
    with contextlib.suppress(RuntimeError):  # it has started: with as many as it has
        jax.config.update("jax_num_cpu_devices", config.devices)
    shape, rows = roofline.MODELS[config.model], []
    mesh = MeshShape(fsdp=config.devices)
    looked: dict[int, plan.Program] = {}
    for length, segments in config.cases:
        job = plan.Job(
            shape,
            "p_eagle",
            mesh,
            batch_size=1,
            length=length,
            context=min(4096, shape.max_positions),
            fields=(("segments", segments),),
        )
        made = plan.Plan(job)
        if length not in looked:
            looked[length] = made.features
        step = made.step
        rows.append(
            {
                "tokens": length,
                "segments": segments,
                "features": looked[length].temporary / GB,
                "step": step.temporary / GB,
                "arguments": step.arguments / GB,
                "whole": 4 * shape.num_heads * length**2 / GB,
            }
        )
        print(rows[-1], flush=True)
    return rows


def figure(rows: list[dict], path) -> None:
    """GB against tokens, of the fewest segments that were compiled and the most."""
    plt = figures.pyplot()
    fig, axis = plt.subplots(figsize=(4.5, 3.2), layout="constrained")
    lengths = sorted({r["tokens"] for r in rows})
    at = lambda n: sorted(
        (r for r in rows if r["tokens"] == n), key=lambda r: r["segments"]
    )
    lines = {
        "target's pass": [at(n)[0]["features"] for n in lengths],
        "step, fewest segments": [at(n)[0]["step"] for n in lengths],
        "step, most segments": [at(n)[-1]["step"] for n in lengths],
        "scores of one layer": [at(n)[0]["whole"] for n in lengths],
    }
    for colour, (name, values) in zip(figures.COLOURS, lines.items(), strict=False):
        axis.plot(lengths, values, color=colour, marker="o", ms=4, label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("tokens of the text")
    axis.set_ylabel("GB on one of 8 devices")
    axis.legend(frameon=False, fontsize=8)
    fig.savefig(path, dpi=120)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
