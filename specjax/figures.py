"""Figures of results: what one would rather look at than read."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

COLOURS = ("#3366aa", "#dd7733", "#338855", "#aa3377", "#777777", "#998800")


def pyplot():
    """matplotlib without a display; one clear error where it is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "figures need matplotlib: pip install 'specjax[plot]'."
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def bench(rows: Sequence[dict[str, Any]], title: str, path: str | pathlib.Path) -> None:
    """Speedup and tau by task on top, acceptance by position below, per temperature."""
    plt = pyplot()
    temperatures = sorted({r["temperature"] for r in rows})
    names = list(dict.fromkeys(r["drafter"] for r in rows))
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    fig, axes = plt.subplots(
        3,
        len(temperatures),
        figsize=(1.5 + 4.2 * len(temperatures), 8.4),
        squeeze=False,
        sharex="row",
        sharey="row",
        constrained_layout=True,
    )
    for column, temperature in enumerate(temperatures):
        chosen = [r for r in rows if r["temperature"] == temperature]
        top, middle, low = axes[:, column]
        for i, name in enumerate(names):
            colour = COLOURS[i % len(COLOURS)]
            mine = [r for r in chosen if r["drafter"] == name]
            at = np.arange(len(mine)) + (i - (len(names) - 1) / 2) * 0.8 / len(names)
            tau = np.array([r["tau"] for r in mine])
            ends = np.array([[r["tau_low"], r["tau_high"]] for r in mine])
            span = np.abs(ends - tau[:, None]).T
            width = 0.75 / len(names)
            top.bar(at, tau, width, yerr=span, color=colour, label=name, capsize=2)
            speed = [r["speedup_measured"] for r in mine]
            middle.bar(at, speed, width, color=colour)
            middle.plot(at, [r["speedup_predicted"] for r in mine], "k_", ms=9)
            alphas = [r["alpha_by_position"] for r in mine]
            depth = max(map(len, alphas))
            table = np.full((len(alphas), depth), np.nan)
            for j, alpha in enumerate(alphas):
                table[j, : len(alpha)] = [np.nan if a is None else a for a in alpha]
            seen = ~np.all(np.isnan(table), axis=0)
            low.plot(
                np.arange(1, depth + 1)[seen],
                np.nanmean(table[:, seen], axis=0),
                "o-",
                color=colour,
                ms=4,
            )
        top.set_title(f"temperature {temperature:g}")
        for axis in (top, middle):
            axis.set_xticks(range(len(tasks)), tasks)
            axis.set_xlim(-0.6, len(tasks) - 0.4)
            axis.axhline(1, color="black", lw=0.8)
        low.set_ylim(0, 1.05)
        low.xaxis.get_major_locator().set_params(integer=True)
        low.set_xlabel("position in the draft")
    axes[0, 0].set_ylabel("tau (tokens per round)")
    axes[1, 0].set_ylabel("speedup\nbar measured, dash predicted")
    axes[2, 0].set_ylabel("acceptance, given all before\n(mean over tasks)")
    axes[0, 0].legend(frameon=False, fontsize=8)
    fig.suptitle(title)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def training(
    records: Sequence[dict[str, Any]], title: str, path: str | pathlib.Path
) -> None:
    """Loss, and the tau that the acceptance on the training texts promises."""
    plt = pyplot()
    fig, (left, right) = plt.subplots(1, 2, figsize=(8, 3), constrained_layout=True)
    steps = [r["step"] for r in records]
    left.plot(steps, [r["loss"] for r in records], color=COLOURS[0])
    left.set_ylabel("loss")
    right.plot(steps, [r["tau"] for r in records], color=COLOURS[1])
    right.set_ylabel("expected tau (teacher forced)")
    for axis in (left, right):
        axis.set_xlabel("step")
    fig.suptitle(title)
    fig.savefig(path, dpi=130)
    plt.close(fig)
