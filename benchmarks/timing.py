"""What the benchmarks share: timing by turns, another Python beside, the report."""

import contextlib
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one call, blocking on its result."""
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def by_turns(
    ways: dict[Any, Callable[[], float]], repeats: int
) -> dict[Any, np.ndarray]:
    """Seconds of each way [repeats]; all ways once, then all again.

    What else the machine does then falls on all alike, and turn i of one way may be
    divided by turn i of another. The first turn compiles and is thrown away.
    """
    turns = [{name: way() for name, way in ways.items()} for _ in range(repeats + 1)]
    return {name: np.array([t[name] for t in turns[1:]]) for name in ways}


@contextlib.contextmanager
def other_python(python: pathlib.Path, code: str, job: str):
    """Yields (name, seconds of a turn) of code that another Python runs.

    The code gets `job` as its argument, prints a name, then for every line that it
    reads what a turn took. It waits on its standard input while ours are timed, and we
    wait on its output.
    """
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [str(python), "-c", code, job],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | quiet,
    )
    ours, theirs = process.stdin, process.stdout
    assert ours is not None and theirs is not None
    name = theirs.readline().strip()
    if not name:
        raise SystemExit(
            f"{python} ended with status {process.wait()}; it needs torch and "
            "transformers."
        )

    def run() -> float:
        ours.write("go\n")
        ours.flush()
        return float(theirs.readline())

    yield name, run
    ours.close()
    process.wait()


def machine() -> dict[str, Any]:
    """Where the numbers come from; the load says how far to trust them."""
    device = jax.devices()[0]
    return {
        "device": f"{device.platform} ({device.device_kind})",
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def report(
    title: str,
    rows: Sequence[dict[str, Any]],
    config: dict[str, Any],
    path: pathlib.Path | None,
) -> None:
    """Prints the rows as a table, and writes them with the machine to `path`."""
    about = machine()
    where = ", ".join(f"{name} {value}" for name, value in about.items())
    table = Table(title=f"{title}\n{where}", title_justify="left", header_style="bold")
    for name in rows[0]:
        table.add_column(name, justify="right" if name != "way" else "left")
    before = None
    for row in rows:
        first = next(iter(row.values()))
        if "rows" in row and before not in (None, first):
            table.add_section()
        before = first
        table.add_row(*(_cell(value) for value in row.values()))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if path is not None:
        result = {"config": config, "machine": about, "rows": list(rows)}
        path.write_text(json.dumps(result, indent=2, default=str) + "\n", "utf-8")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:#.3g}".rstrip(".") if isinstance(value, float) else str(value)
