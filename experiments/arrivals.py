"""What users wait for as more of them come: latency against the rate of arrivals.

Requests arrive at random (Poisson) and wait for one of `slots` slots; nobody waits for
an answer to send the next. On the computed machine and drafts of `serving_at_scale.py`
`wait` is the mean time in seconds until the first token, all of it spent in the queue,
`per_token` that between tokens in milliseconds, `live` the slots in use. Above the rate
that a way of drafting can serve the queue only grows, and `wait` is as long as the run.

    python experiments/arrivals.py                                about 2 minutes
"""

import dataclasses
import pathlib
from typing import Any

import common
import numpy as np
import serving_at_scale as scale

from specjax import figures
from specjax.scheduler import Delayed, Prefix
from specjax.serving import poisson, serve, summary
from specjax.simulate import Modelled, Simulator

SMOKE = {"rates": (20.0,), "slots": 8, "requests": 20, "tokens": 16, "seeds": (0,)}


@dataclasses.dataclass(frozen=True)
class Config:
    rates: tuple[float, ...] = (30.0, 60.0, 90.0, 120.0, 140.0, 160.0)  # a second
    slots: int = 256
    gammas: tuple[int, ...] = (0, 2, 7)
    requests: int = 1000
    tokens: int = 256  # of a text, from half to one and a half times so many
    spread: float = 2.0
    seeds: tuple[int, ...] = (0, 1)


def main(config: Config) -> list[dict]:
    alphas = scale.ALPHAS.values()
    drafts = scale.Mixed(tuple(Modelled(a, config.spread) for a in alphas))
    machine = scale.costs(scale.Config(), config.slots, drafts.gamma)
    passes = machine.passes(config.slots)
    ways: dict[str, dict[str, Any]]
    ways = {f"gamma {g}": {"gamma": g} for g in config.gammas} | {
        "prefix": {"policy": Prefix(passes)},
        "delayed": {"policy": Delayed(passes, first=4 * config.slots)},
    }
    rows = []
    for rate in config.rates:
        for way, how in ways.items():
            found = []
            for seed in config.seeds:
                server = Simulator(drafts, machine, config.slots, seed=seed, **how)
                found.append(summary(serve(server, asked(config, rate, seed))))
            waits = [f["first_token"] for f in found]
            rows.append(
                {
                    "way": way,
                    "rate": rate,
                    "wait": float(np.mean(waits)),
                    "wait_sd": float(np.std(waits, ddof=min(1, len(waits) - 1))),
                    "per_token": 1e3 * float(np.mean([f["per_token"] for f in found])),
                    "live": float(np.mean([f["live"] for f in found])),
                    "verified": float(np.mean([f["verified"] for f in found])),
                }
            )
    return rows


def asked(config: Config, rate: float, seed: int):
    """The same texts for every rate, arriving faster."""
    texts = scale.Config(tokens=config.tokens, rounds_of_requests=1)
    requests = scale.asked(texts, config.requests, seed)
    times = poisson(rate, config.requests, seed)
    return [
        dataclasses.replace(r, arrival=float(t))
        for r, t in zip(requests, times, strict=True)
    ]


def figure(rows: list[dict], path: pathlib.Path) -> None:
    plt = figures.pyplot()
    fig, axes = plt.subplots(1, 3, figsize=(10.5, 3.2), layout="constrained")
    ways = list(dict.fromkeys(r["way"] for r in rows))
    named = zip(
        axes,
        ("wait", "per_token", "verified"),
        ("seconds to the first token", "ms between tokens", "verified a round"),
        strict=True,
    )
    for axis, name, label in named:
        for way, colour in zip(ways, figures.COLOURS, strict=False):
            mine = [r for r in rows if r["way"] == way]
            rates, values = [r["rate"] for r in mine], [r[name] for r in mine]
            axis.plot(rates, values, "o-", ms=3.5, color=colour, label=way)
        axis.set_xlabel("requests a second")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[0].legend(frameon=False, fontsize=8)
    fig.savefig(path, dpi=120)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
