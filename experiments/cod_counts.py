"""Conditional drop of tokens (COD): rows that a text becomes, and what a step costs.

PARD (arXiv:2504.18583) and P-EAGLE train K copies of a text flattened into one; of
depth d they keep floor(n max(r^d, floor)) rows (`drafters/parallel.py`, eq. 2; P-EAGLE
has n - d for n). `rows` counts those that `Drafter.rows` draws for a text of n tokens
to learn: the rows themselves and not the formula, which is `closed_form`. Beside ours
stand the counts of the authors' collators. A chain that leaves the text ends here,
where PARD's code goes on with rows that have no label: ours may have a few rows fewer.

`mbytes` (temporary memory) and `gflops` are of the gradient of one text of `length`
tokens, from the compiled program; `seconds` is the median of repeats. What the dropped
rows cost in acceptance is in `cod_acceptance.py`.

    python experiments/cod_counts.py      a minute
"""

import dataclasses
import time

import common
import jax
import jax.numpy as jnp
import numpy as np
import trained

from specjax import drafters, feature_cache
from specjax.drafters import parallel

SMOKE = {"settings": ("pard:4:0.7:0.2",), "length": 32, "repeats": 1}
PAPER = [
    {"method": "pard", "K": 8, "rate": "0.7", "floor": "0.2", "rows": 1723.0},
    {"method": "pard", "K": 16, "rate": "0.7", "floor": "0.1", "rows": 2022.0},
    {"method": "pard", "K": 8, "rate": "0.8", "floor": "0.2", "rows": 2127.0},
    {"method": "pard", "K": 8, "rate": "1", "floor": "0", "rows": 4096.0},
    {"method": "p_eagle", "K": 8, "rate": "0.7", "floor": "0.2", "rows": 1716.0},
]


@dataclasses.dataclass(frozen=True)
class Config:
    settings: tuple[str, ...] = (  # method:K:rate:floor
        "pard:8:1:0",
        "pard:4:0.7:0.2",
        "pard:8:0.7:0.2",
        "pard:8:0.8:0.2",
        "pard:8:0.7:0",
        "pard:16:0.7:0.1",
        "p_eagle:8:1:0",
        "p_eagle:8:0.7:0.2",
    )
    n: int = 512  # tokens to learn, of the counts
    length: int = 128  # tokens, of the step
    repeats: int = 5
    seed: int = 0
    target: str = "tiny"


def main(config: Config) -> list[dict]:
    shop = trained.Workshop(trained.SMOKE)
    rows = []
    for spec in config.settings:
        method, K, rate, floor = spec.split(":")
        fields = {"blocks": int(K), "rate": float(rate), "floor": float(floor)}
        mask = shop.pretrained.tokenizer.mask_token_id
        drafter = drafters.get(method).for_target(
            shop.pretrained.target.config, mask, gamma=4, **fields
        )
        row = {"method": method, "K": int(K), "rate": rate, "floor": floor}
        rows.append(row | counts(config, drafter) | cost(config, shop, drafter))
    return rows


def counts(config: Config, drafter) -> dict:
    """Rows of a text that is all tokens to learn: one more place gives it n of them."""
    n, pard = config.n, hasattr(drafter, "adapts")
    mask = jnp.ones((1, n + (not pard)), bool)  # P-EAGLE's first token is in no pair
    drawn = jax.jit(drafter.rows)(jax.random.key(config.seed), mask)
    depth = np.asarray(drawn.depth)[np.asarray(drawn.real)]
    by_depth = np.bincount(depth, minlength=drafter.blocks)
    by_depth[0] = n  # the text's own rows, in order
    formula = [n] + [
        parallel.num_kept(n if pard else n - d, d, drafter.rate, drafter.floor)
        for d in range(1, drafter.blocks)
    ]
    return {
        "rows": float(by_depth.sum()),
        "closed_form": sum(formula),
        "a_token": float(by_depth.sum() / n),
        "by_depth": by_depth.tolist(),
    }


def cost(config: Config, shop, drafter) -> dict:
    """Of the gradient of one text's loss."""
    target, weights = shop.pretrained.target, shop.pretrained.params
    shared, key = target.shared(weights), jax.random.key(config.seed)
    tokens = jax.random.randint(key, (1, config.length), 6, target.config.vocab_size)
    every = jnp.ones(tokens.shape, bool)
    look = jax.jit(
        lambda w: feature_cache.features(target, drafter.taps, w, tokens, every)
    )
    batch, params = look(weights), jax.jit(drafter.init)(key, shared)
    gradient = jax.grad(lambda p, b, k: drafter.loss(p, shared, b, k)[0])
    compiled = jax.jit(gradient).lower(params, batch, key).compile()
    call = lambda: jax.block_until_ready(compiled(params, batch, key))
    call()
    times = []
    for _ in range(config.repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    memory, flops = compiled.memory_analysis(), compiled.cost_analysis()
    assert memory is not None and flops is not None  # other backends have none
    return {
        "mbytes": memory.temp_size_in_bytes / 1e6,
        "gflops": float(flops["flops"]) / 1e9,
        "seconds": float(np.median(times)),
    }


HIDDEN = ("by_depth",)

if __name__ == "__main__":
    common.run(main, Config)
