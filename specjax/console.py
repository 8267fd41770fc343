"""What a person sees in the terminal: tables, marked text, progress."""

import html as markup
import json
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specjax.generate import Generation

ACCEPTED, OWN, REJECTED = "accepted", "own", "rejected"
STYLES = {ACCEPTED: "green", OWN: "bold", REJECTED: "red dim strike"}
CSS = {
    ACCEPTED: "background:#c6efce;color:black",
    OWN: "font-weight:bold",
    REJECTED: "color:#c00000;text-decoration:line-through;opacity:.7",
}
TAU = ["gamma", "tau [95 %]", "acceptance by position"]  # columns of bench
WORTH = ["c", "v", "predicted", "measured", "lossless"]
BRACKETS = {ACCEPTED: ("{", "}"), OWN: ("", ""), REJECTED: ("~", "~")}


def write_json(path: str | pathlib.Path, value: Any) -> None:
    """Writes beside and renames; numbers that JSON lacks become null."""
    path = pathlib.Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"no folder {path.parent} to write {path.name} in; create it first."
        )
    beside = path.with_name(path.name + ".partial")
    beside.write_text(json.dumps(finite(value), indent=2) + "\n", "utf-8")
    os.replace(beside, path)


def finite(value: Any) -> Any:
    """The value with None for every number that JSON lacks."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def fates(result: Generation, row: int = 0) -> list[tuple[int, str]]:
    """Each token of a row with its fate, rejected drafts where they were refused.

    The first token is the prefill's and the target's own; of a round, accepted drafts
    come first, then the draft that was refused and all after it, then the bonus.
    """
    trace, tokens = result.trace, result.tokens[row]
    told, at = [(t, OWN) for t in tokens[:1]], 1
    for accepted, committed, refused, drafted in zip(
        trace.num_accepted[row],
        trace.num_committed[row],
        trace.rejected[row],
        trace.drafted[row],
        strict=True,
    ):
        if committed == 0:
            break
        new = tokens[at : at + committed]
        at += committed
        told += [(t, ACCEPTED) for t in new[:accepted]]
        if refused:
            told += [(int(t), REJECTED) for t in drafted[accepted:] if t >= 0]
        told += [(t, OWN) for t in new[accepted:]]
    return told


class Marker:
    """Prints a growing text piece by piece, each token in the style of its fate."""

    def __init__(self, tokenizer: Any, console: Console, marks: str):
        self.console, self.marks, self.tokenizer = console, marks, tokenizer
        self.stream = tokenizer.stream()
        self.shown = 0

    def show(self, told: Sequence[tuple[int, str]]) -> None:
        """Prints what is new in `told`, whole characters only."""
        for kind, group in _groups(told[self.shown :]):
            if kind == REJECTED:
                text = self.tokenizer.decode(group)
                if self.marks != "none":
                    self._print(text, kind)
            else:
                self._print(self.stream.push(group), kind)
        self.shown = len(told)

    def close(self) -> None:
        self._print(self.stream.close() + "\n", OWN)

    def _print(self, text: str, kind: str) -> None:
        if not text:
            return
        if self.marks == "colour":
            self.console.print(Text(text, STYLES[kind]), end="", soft_wrap=True)
        else:
            left, right = BRACKETS[kind] if self.marks == "brackets" else ("", "")
            self.console.out(left + text + right, end="", highlight=False)


def html(told: Sequence[tuple[int, str]], tokenizer: Any) -> str:
    """`fates` as HTML for a notebook: a span a run of one fate, its name on hover."""
    stream, spans = tokenizer.stream(), []
    for kind, group in _groups(told):
        kept = kind != REJECTED
        text = stream.push(group) if kept else tokenizer.decode(group)
        spans.append(_span(text, kind))
    spans.append(_span(stream.close(), OWN))
    return f'<div style="white-space:pre-wrap">{"".join(spans)}</div>'


def _span(text: str, kind: str) -> str:
    style = f'<span style="{CSS[kind]}" title="{kind}">{markup.escape(text)}</span>'
    return style if text else ""


def _groups(told) -> Iterator[tuple[str, list[int]]]:
    kind, group = None, []
    for token, fate in told:
        if fate != kind and group:
            yield str(kind), group
            group = []
        kind = fate
        group.append(token)
    if group:
        yield str(kind), group


def bench_tables(
    rows: Sequence[dict[str, Any]], title: str, screen: Console
) -> list[Table]:
    """The main job's table; in two parts where the screen is too narrow."""
    whole = _bench_table(rows, title, [*TAU, *WORTH])
    if fits(whole, screen):
        return [whole]
    halves = [(title, TAU), (None, WORTH)]
    return [_bench_table(rows, name, columns, box.SIMPLE) for name, columns in halves]


def fits(table: Table, screen: Console) -> bool:
    """Whether all columns keep their width on a screen."""
    wide = screen.options.update(max_width=1000)
    return screen.measure(table, options=wide).maximum <= screen.width


def _bench_table(
    rows: Sequence[dict[str, Any]],
    title: str | None,
    columns: Sequence[str],
    edges: box.Box = box.HEAVY_HEAD,
) -> Table:
    """One row per drafter, task and temperature."""
    table = Table(title=title, title_justify="left", header_style="bold", box=edges)
    if edges is box.SIMPLE:
        table.padding, table.pad_edge, table.show_edge = (0, 1, 0, 0), False, False
    names = ["drafter", "task", "T", *columns]
    for name in names:
        left = name in ("drafter", "task", "acceptance by position")
        justify = "center" if name == "lossless" else "left" if left else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    before = None
    for r in rows:
        group = (r["drafter"], r["temperature"])
        if before not in (None, group):
            table.add_section()
        before = group
        cells = {
            "drafter": r["drafter"],
            "task": r["task"],
            "T": f"{r['temperature']:g}",
            "gamma": str(r["gamma"]),
            "tau [95 %]": f"{r['tau']:.2f} [{r['tau_low']:.2f}, {r['tau_high']:.2f}]",
            "acceptance by position": " ".join(map(_alpha, r["alpha_by_position"])),
            "c": f"{r['draft_cost']:.2f}",
            "v": f"{r['verify_ratio']:.2f}",
            "predicted": f"{r['speedup_predicted']:.2f}x",
            "measured": f"{r['speedup_measured']:.2f}x",
            "lossless": "yes" if r["lossless"] else "[bold red]NO[/]",
        }
        table.add_row(*(cells[name] for name in names))
    return table


def _alpha(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.2f}".removeprefix("0")


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The same table for a README: means over tasks, one row per drafter and T."""
    lines = [
        "| drafter | T | gamma | tau code / math / chat | c | v | predicted | measured "
        "| lossless |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for r in rows:
        groups.setdefault((r["drafter"], r["temperature"]), []).append(r)
    for (name, temperature), mine in groups.items():
        mean = lambda key, mine=mine: float(np.mean([r[key] for r in mine]))
        lines.append(
            f"| `{name}` | {temperature:g} | {mine[0]['gamma']} | "
            + " / ".join(f"{r['tau']:.2f}" for r in mine)
            + f" | {mean('draft_cost'):.2f} | {mean('verify_ratio'):.2f} | "
            f"{mean('speedup_predicted'):.2f}x | {mean('speedup_measured'):.2f}x | "
            f"{'yes' if all(r['lossless'] for r in mine) else '**no**'} |"
        )
    return "\n".join(lines)


def certificate_table(rows: Sequence[dict[str, Any]]) -> Table:
    """`specjax certify`: one row per check."""
    table = Table(title="certificate", title_justify="left", header_style="bold")
    for name in ("drafter", "topology", "rule", "sampling", "method"):
        table.add_column(name, no_wrap=True)
    table.add_column("max TV", justify="right")
    table.add_column("p-value", justify="right")
    table.add_column("passed", justify="center")
    before = None
    for r in rows:
        if before not in (None, r["drafter"]):
            table.add_section()
        before = r["drafter"]
        table.add_row(
            r["drafter"],
            r["topology"],
            r["rule"],
            r["sampling"],
            r["method"],
            f"{r['max_tv']:.1e}" if "max_tv" in r else "",
            f"{r['p_value']:.3f}" if "p_value" in r else "",
            "yes" if r["passed"] else "[bold red]NO[/]",
        )
    return table


def bugs_table(bugs: Sequence[dict[str, Any]]) -> Table:
    """Planted bugs: the margin is how many times over the limit each one is."""
    title = "planted bugs: each must be caught on two fixtures"
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in ("bug", "method"):
        table.add_column(name, no_wrap=True)
    table.add_column("times over the limit", justify="right")
    table.add_column("caught", justify="center")
    for b in bugs:
        margin = b["margin"]
        table.add_row(
            b["name"],
            b["method"],
            f"{margin:,.0f}" if margin < 1e6 else f"{margin:.0e}",
            "yes" if b["caught"] else "[bold red]NO[/]",
        )
    return table
