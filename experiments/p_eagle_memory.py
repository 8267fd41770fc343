"""Peak memory of one training step of P-EAGLE against the number of segments.

P-EAGLE (arXiv:2602.01469) trains K placeholders behind every place of a text in one
pass and cuts a long text into segments whose gradients are added, where the memory of
attention over all rows would not do. Here the gradient of the loss over one text is
compiled for the tiny target's drafter, and the table has

    rows       of one pass: all real pairs and a segment's placeholders
    peak_mib   temporaries of the compiled program (`memory_analysis`), MiB; weights,
               gradients and the batch come on top and do not change
    share      of the peak of one pass over the same text
    difference of the gradient from that of one pass, over its largest entry
    seconds    of one gradient, the shortest of three

at rate 0.7 (the code's conditional drop of tokens) and, compiled only, at rate 1 (no
row dropped). The paper gives no numbers for this; the code divides the placeholders
too, and keeps all real pairs up to a segment as keys.

    python experiments/p_eagle_memory.py         2 minutes on 2 cores
"""

import dataclasses
import time

import common
import jax
import jax.numpy as jnp
import numpy as np

from specjax import figures, targets
from specjax.drafters.base import Batch
from specjax.drafters.p_eagle import PEagle

SMOKE = {"lengths": (48,), "segments": (1, 3), "whole": 32}


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "tiny"
    lengths: tuple[int, ...] = (256, 512)  # tokens of the text, all learned
    segments: tuple[int, ...] = (1, 2, 4, 8, 16)
    whole: int = 256  # tokens of the text at rate 1
    blocks: int = 8
    seed: int = 0


def compiled(drafter: PEagle, *args):
    """The gradient of the loss's sum, compiled for arguments of these shapes."""

    def step(params, shared, batch, key):
        rows = drafter.rows(key, batch.mask)
        return jax.value_and_grad(drafter.total)(params, shared, batch, rows)

    return jax.jit(step).lower(*args).compile()


def num_rows(drafter: PEagle, length: int) -> int:
    """Of one pass: the text's, a segment's share of masks, those of a cut chain."""
    mask = jax.ShapeDtypeStruct((1, length), bool)
    slots = jax.eval_shape(drafter.rows, jax.random.key(0), mask).anchor.shape[1]
    cut = 0 if drafter.segments == 1 else drafter.blocks - 2
    return length + -(-(slots - length) // drafter.segments) + cut


def main(config: Config) -> list[dict]:
    pretrained = targets.load(config.target)
    shared = pretrained.target.shared(pretrained.params)
    one = PEagle.for_target(
        pretrained.target.config,
        getattr(pretrained.tokenizer, "mask_token_id", None),
        blocks=config.blocks,
    )
    key = jax.random.key(config.seed)
    params = jax.jit(one.init)(key, shared)

    def batch_of(length: int) -> Batch:
        rng = np.random.default_rng(config.seed)
        tokens = rng.integers(0, shared.embed.shape[0], (1, length))
        tokens, mask = jnp.asarray(tokens, jnp.int32), jnp.ones((1, length), bool)
        out = pretrained.target(pretrained.params, tokens, taps=one.taps)
        return Batch(tokens, mask, out.features, out.hidden)

    rows = []
    for rate, lengths in ((one.rate, config.lengths), (1.0, (config.whole,))):
        for length in lengths:
            args, whole = (params, shared, batch_of(length), key), {}
            for segments in config.segments:
                drafter = dataclasses.replace(one, rate=rate, segments=segments)
                program = compiled(drafter, *args)
                analysis = program.memory_analysis()
                assert analysis is not None  # every backend that we know has one
                peak = analysis.temp_size_in_bytes / 2**20
                ran = measure(program, args) if rate < 1 else (None, None)
                whole = whole or {"peak": peak, "grads": ran[1]}
                row = {
                    "rate": rate,
                    "length": length,
                    "segments": segments,
                    "rows": num_rows(drafter, length),
                    "peak_mib": peak,
                    "share": peak / whole["peak"],
                    "difference": difference(ran[1], whole["grads"]),
                    "seconds": ran[0],
                }
                rows.append(row)
    return rows


def measure(program, args):
    """Seconds of a run, and the gradient."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        _, grads = jax.block_until_ready(program(*args))
        times.append(time.perf_counter() - began)
    return min(times), jax.tree.map(np.asarray, grads)


def difference(ours, right) -> float | None:
    if ours is None:
        return None
    pairs = list(zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True))
    largest = max(float(np.max(np.abs(y))) for _, y in pairs)
    return max(float(np.max(np.abs(x - y))) for x, y in pairs) / largest


def figure(rows, path) -> None:
    plt = figures.pyplot()
    fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    for rate, length in sorted({(r["rate"], r["length"]) for r in rows}):
        some = [r for r in rows if (r["rate"], r["length"]) == (rate, length)]
        label = f"{length} tokens" + (", none dropped" if rate == 1 else "")
        ax.plot(
            [r["segments"] for r in some],
            [r["peak_mib"] for r in some],
            "o--" if rate == 1 else "o-",
            label=label,
        )
    ax.set(xscale="log", yscale="log", xlabel="segments", ylabel="peak, MiB")
    ax.set_xticks(sorted({r["segments"] for r in rows}))
    ax.get_xaxis().set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.legend()
    fig.savefig(path, dpi=120)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
