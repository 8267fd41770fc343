"""Throughput against the speed of one, and budget against load, of a large target.

A computed server (`specjax.simulate`): nothing of it was measured. Its machine is what
data sheets say of eight H100 (3.35 TB/s and 989 Tflop/s in bfloat16 each, all of it
reached), its target a dense model of 70 G weights in bfloat16 with 80 layers, so that a
pass takes max(5.2 ms, 18 us a token) and, a guess, 2 ms beside; a DSpark drafter of 5
such layers and the head takes max(0.4 ms, 1.3 us a token) and 1 ms. Keys and values are
not counted. A pass holds what all rows verify, packed.

Drafts are accepted as the paper prints by position (arXiv:2607.05147, figure 2, Qwen3-
4B), in equal shares of math, code and chat. How far the probabilities of single drafts
lie apart is not printed: a beta distribution of `spread` 2 has an AUC of .80 to .86 on
chat, the paper (figure 6) .81 to .91, and its confidences are calibrated.

`gain` is throughput over that of plain decoding with as many users. Beside it stands
what others measured (vLLM on ROCm, DeepSeek-V4-Flash, ShareGPT): seven drafts always,
and as many as the load allows, over none; another target, drafter and machine. Figure 7
of the paper has the axes of the left panel, figure 8 those of the right.

    python experiments/serving_at_scale.py                               2 minutes
    python experiments/serving_at_scale.py --step 64 --name stairs       padded passes
"""

import dataclasses
import pathlib
from typing import Any

import common
import numpy as np
import serving

from specjax.scheduler import Delayed, Prefix, Threshold
from specjax.serving import Request, serve
from specjax.simulate import Costs, Modelled, Simulator, roofline, stairs

SMOKE = {"users": (4,), "tokens": 16, "rounds_of_requests": 2, "seeds": (0,)}
ALPHAS = {
    "math": (0.905, 0.890, 0.888, 0.885, 0.887, 0.891, 0.882),
    "code": (0.886, 0.872, 0.860, 0.861, 0.858, 0.859, 0.851),
    "chat": (0.735, 0.738, 0.740, 0.744, 0.758, 0.766, 0.761),
}
USERS = (4, 8, 16, 32, 64, 128, 256)
OTHERS = {  # tokens a second: none, seven drafts, adaptive
    4: (382, 970, 903),
    8: (729, 1763, 1617),
    16: (1343, 2910, 2774),
    32: (2393, 4756, 4501),
    64: (4095, 6712, 7144),
    128: (6341, 8779, 10356),
    256: (8879, 7852, 13325),
}
PAPER = [
    {"way": way, "users": users, "gain": speeds[i] / speeds[0]}
    for i, way in ((1, "gamma 7"), (2, "prefix"))
    for users, speeds in OTHERS.items()
]


@dataclasses.dataclass(frozen=True)
class Config:
    users: tuple[int, ...] = (*USERS, 512)
    gammas: tuple[int, ...] = (0, 1, 2, 4, 7)
    threshold: float = 0.5
    spread: float = 2.0
    tokens: int = 256  # of each text
    prompt: int = 0  # tokens that are read between rounds; 0: elsewhere
    step: int = 1  # tokens of a pass are padded to a multiple of it
    rounds_of_requests: int = 3  # requests a user
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Every request has the drafts of one domain, by its seed."""

    domains: tuple[Modelled, ...]

    @property
    def gamma(self) -> int:
        return self.domains[0].gamma

    def draw(self, rng, sources):
        drawn = [domain.draw(rng, sources) for domain in self.domains]
        sure, accepted = (np.stack(x) for x in zip(*drawn, strict=True))
        which, rows = sources % len(self.domains), np.arange(len(sources))
        return sure[which, rows], accepted[which, rows]


def costs(config: Config, rows: int, gamma: int) -> Costs:
    """The machine of the module's docstring."""
    chips, weights, layer, head = 8, 70e9, 0.85e9, 1.05e9
    read = lambda n: 2 * n / (chips * 3.35e12)
    work = lambda n: 2 * n / (chips * 989e12)
    most = rows * (gamma + 1)
    verify = roofline(most, read=read(weights), token=work(weights), fixed=2e-3)
    small = 5 * layer + head
    block = roofline(rows * 7, read=read(small), token=work(small), fixed=1e-3)
    begin = config.prompt * work(weights)
    return Costs(stairs(verify, config.step), block[6::7], begin)


def main(config: Config) -> list[dict]:
    drafts = Mixed(tuple(Modelled(a, config.spread) for a in ALPHAS.values()))
    rows = []
    for users in config.users:
        machine = costs(config, users, drafts.gamma)
        passes = machine.passes(users)
        ways: dict[str, dict[str, Any]]
        ways = {f"gamma {g}": {"gamma": g} for g in config.gammas} | {
            f"threshold {config.threshold:g}": {"policy": Threshold(config.threshold)},
            "prefix": {"policy": Prefix(passes)},
            "delayed": {"policy": Delayed(passes, first=4 * users)},
        }
        for way, how in ways.items():
            reports = []
            for seed in config.seeds:
                server = Simulator(drafts, machine, users, seed=seed, **how)
                reports.append(serve(server, asked(config, users, seed), users))
            rows.append({"way": way, "users": users} | serving.means(reports))
    for row in rows:
        plain = next(
            r["throughput"]
            for r in rows
            if r["users"] == row["users"] and r["way"] == f"gamma {config.gammas[0]}"
        )
        row["gain"] = row["throughput"] / plain
    return rows


def asked(config: Config, users: int, seed: int) -> list[Request]:
    """Texts from half to one and a half times `tokens` long: users do not march."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(
        config.tokens // 2,
        3 * config.tokens // 2 + 1,
        users * config.rounds_of_requests,
    )
    return [Request((), int(n), seed=i) for i, n in enumerate(lengths)]


HIDDEN = ("first_token", "first_token_95", "per_token", "live", "paid")


def figure(rows: list[dict], path: pathlib.Path) -> None:
    serving.draw(rows, path, "computed: 70 G weights on 8 chips")


if __name__ == "__main__":
    common.run(main, Config)
