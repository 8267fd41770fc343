"""What it costs that a drafter is too sure: errors multiply along a draft.

A confidence that is 10 % too high at each of seven positions promises the seventh draft
1.1^7 = 1.95 times as often as it comes true, as long as no confidence reaches 1; those
that do are cut there, so that a sure drafter is wrong by less. `said` is what the
product of the first k confidences promises on average, `was` how often it came true,
`ratio` the former over the latter at the last position and `closed_form` the factor to
the seventh power.

The prefix scheduler admits drafts by these products. `lost` is the throughput that it
loses to the same scheduler told the truth, on the computed machine and drafts of
`serving_at_scale.py`; `mended` what it still loses after sequential temperatures
(`specjax.calibration`) fitted on other rounds. `verified` and `verified_true` are
tokens a request and round, told wrong and told right. Means and deviations over seeds.

The paper gives no number for this: its scheduler is only shown calibrated.

    python experiments/overestimate.py                           about 3 minutes
"""

import dataclasses
import pathlib

import common
import numpy as np
import serving_at_scale as scale

from specjax import calibration, figures
from specjax.scheduler import Prefix
from specjax.serving import serve, summary
from specjax.simulate import Modelled, Simulator

SMOKE = {
    "factors": (1.1,),
    "users": (8,),
    "fitted_on": 200,
    "tokens": 16,
    "seeds": (0,),
}
HIDDEN = ("said", "was", "temperatures")


@dataclasses.dataclass(frozen=True)
class Config:
    factors: tuple[float, ...] = (0.9, 1.05, 1.1, 1.2)  # confidence over truth
    users: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    spread: float | None = 2.0  # None: all drafts of a position are alike
    tokens: int = 256
    fitted_on: int = 5000  # rounds
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Tempered:
    """Drafts whose confidence before its sigmoid is divided by a number a position."""

    drafts: scale.Mixed
    temperatures: tuple[float, ...]

    @property
    def gamma(self) -> int:
        return self.drafts.gamma

    def draw(self, rng, sources):
        sure, accepted = self.drafts.draw(rng, sources)
        z = logits(sure) / np.array(self.temperatures)[None]
        return calibration.sigmoid(z), accepted


def logits(confidence: np.ndarray) -> np.ndarray:
    p = np.clip(confidence, 1e-6, 1 - 1e-6)
    return np.log(p / (1 - p))


def drafts_of(config: Config, factor: float) -> scale.Mixed:
    alphas = scale.ALPHAS.values()
    return scale.Mixed(tuple(Modelled(a, config.spread, factor) for a in alphas))


def main(config: Config) -> list[dict]:
    right = drafts_of(config, 1.0)
    best = {u: speeds(config, right, u) for u in config.users}
    rows = []
    for factor in config.factors:
        wrong = drafts_of(config, factor)
        rng, sources = np.random.default_rng(99), np.arange(config.fitted_on)
        sure, accepted = wrong.draw(rng, sources)
        temperatures = calibration.fit(logits(sure), accepted)
        mended = Tempered(wrong, temperatures)
        said = np.cumprod(sure, axis=1).mean(axis=0)
        was = calibration.survived(accepted, wrong.gamma).mean(axis=0)
        for users in config.users:
            told, fitted = (speeds(config, d, users) for d in (wrong, mended))
            lost = 1 - told[:, 0] / best[users][:, 0]
            still = 1 - fitted[:, 0] / best[users][:, 0]
            rows.append(
                {
                    "factor": factor,
                    "ratio": float(said[-1] / was[-1]),
                    "closed_form": float(factor ** len(said)),
                    "users": users,
                    "lost": float(lost.mean()),
                    "lost_sd": deviation(lost),
                    "mended": float(still.mean()),
                    "mended_sd": deviation(still),
                    "verified": float(told[:, 1].mean()),
                    "verified_true": float(best[users][:, 1].mean()),
                    "said": said.tolist(),
                    "was": was.tolist(),
                    "temperatures": list(temperatures),
                }
            )
    return rows


def deviation(values: np.ndarray) -> float:
    return float(np.std(values, ddof=min(1, len(values) - 1)))


def speeds(config: Config, drafts, users: int) -> np.ndarray:
    """Throughput and tokens verified of each seed [seeds 2]."""
    machine = scale.costs(scale.Config(), users, drafts.gamma)
    policy = Prefix(machine.passes(users))
    asked = scale.Config(tokens=config.tokens)
    found = []
    for seed in config.seeds:
        server = Simulator(drafts, machine, users, policy=policy, seed=seed)
        found.append(summary(serve(server, scale.asked(asked, users, seed), users)))
    return np.array([(f["throughput"], f["verified"]) for f in found])


def figure(rows: list[dict], path: pathlib.Path) -> None:
    """Promises over truth by position, and throughput lost by load."""
    plt = figures.pyplot()
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    factors = list(dict.fromkeys(r["factor"] for r in rows))
    for factor, colour in zip(factors, figures.COLOURS, strict=False):
        mine = [r for r in rows if r["factor"] == factor]
        said, was = np.array(mine[0]["said"]), np.array(mine[0]["was"])
        k = np.arange(1, len(said) + 1)
        left.plot(k, said / was, "o-", color=colour, ms=4, label=f"x {factor:g}")
        left.plot(k, factor**k, ":", color=colour)
        users = [r["users"] for r in mine]
        percent = lambda name, mine=mine: [100 * r[name] for r in mine]
        bar = {"yerr": percent("lost_sd"), "capsize": 2}
        right.errorbar(users, percent("lost"), fmt="o-", ms=4, color=colour, **bar)
        right.plot(users, percent("mended"), "--", color=colour)
    left.set_xlabel("position k")
    left.set_ylabel("first k accepted: said / was\n(dotted: factor^k)")
    left.legend(frameon=False, fontsize=8, title="confidence")
    right.axhline(0, color="black", lw=0.7)
    right.set_xscale("log", base=2)
    ticks = sorted({r["users"] for r in rows})
    right.set_xticks(ticks, [str(u) for u in ticks])
    right.set_xlabel("users")
    right.set_ylabel("throughput lost, %\n(dashed: after temperatures)")
    fig.savefig(path, dpi=120)
    plt.close(fig)


if __name__ == "__main__":
    common.run(main, Config)
