"""Runs an experiment script: flags, the results on disk, the table.

A script has a frozen `Config`, `main(config) -> rows` and ends with

    if __name__ == "__main__":
        common.run(main, Config)

Beside them it may have, at the top level:

    SMOKE = {"num_prompts": 1}      fields that --smoke changes, to end in seconds
    PAPER = [{"gamma": 4, "tau": 3.2}]   numbers of the paper: floats are shown beside
                                    the row whose other values are the same
    HIDDEN = ("bins",)              fields of rows that the printed table leaves out
    def figure(rows, path): ...     draws `path`, a .png

Rows are dicts of strings, integers, floats and lists of them.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from specjax import checkpoints, corpus, targets
from specjax.commands.common import check_range
from specjax.console import finite, write_json
from specjax.drafters import base

HERE = pathlib.Path(__file__).parent
PACKAGES = ("specjax", "jax", "jaxlib", "flax", "optax", "numpy")
Rows = list[dict[str, Any]]
# What numbers of these names, without a plural's s, may be in every script.
LIMITS = {
    "seed": (0, 2**32 - 1),
    "temperature": (0, None),
    "threshold": (0, 1),
    "weight": (0, None),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """How to run and where to write, for every script alike."""

    smoke: bool = False  # shrink it to seconds; results go to a temporary folder
    name: str = "default"  # results/<script>/<name>
    out: pathlib.Path | None = None  # write here instead


def run(main: Callable[[Any], Rows], Config: type[Any]) -> None:
    """Parses the flags, runs `main`, writes its results and prints them."""
    script = sys.modules[main.__module__]
    file = pathlib.Path(str(script.__file__))
    smoke = getattr(script, "SMOKE", {}) if "--smoke" in sys.argv else {}
    config, how = tyro.cli(
        tuple[
            Annotated[Config, tyro.conf.arg(name="")],
            Annotated[Run, tyro.conf.arg(name="")],
        ],
        description=script.__doc__,
        default=(Config(**smoke), Run()),
    )
    try:
        check(config)
    except ValueError as error:
        raise SystemExit(f"{file.name}: {error}") from None
    folder = how.out or HERE / "results" / file.stem / how.name
    if how.smoke and how.out is None:
        folder = pathlib.Path(tempfile.mkdtemp(prefix="specjax-smoke-"))
    folder.mkdir(parents=True, exist_ok=True)
    _keep_compiled()
    load, began = os.getloadavg()[0], time.perf_counter()
    try:
        rows = main(config)
    except FileNotFoundError as error:  # a name or a path of the flags
        raise SystemExit(f"{file.name}: {error}") from None
    seconds = time.perf_counter() - began

    fields = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    write_json(folder / "config.json", fields)
    lines = (json.dumps(finite(row)) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text("".join(lines), "utf-8")
    about = {"seconds": round(seconds, 1), "load_before": round(load, 2)}
    write_json(folder / "environment.json", environment() | about)
    hidden = getattr(script, "HIDDEN", ())
    shown = [{k: v for k, v in row.items() if k not in hidden} for row in rows]
    Console(width=None if sys.stdout.isatty() else 150).print(
        table(shown, getattr(script, "PAPER", ()))
    )
    if hasattr(script, "figure"):
        script.figure(rows, folder / "figure.png")
    print(f"{seconds:.0f} s; wrote {os.path.relpath(folder)}")


def check(config: Any, prefix: str = "--") -> None:
    """Refuses numbers that no script can use, before any work.

    But for `LIMITS`, whole numbers are 1 or more, or 0 where the field's default has a
    0; others are above 0.
    """
    for field in dataclasses.fields(config):
        value, known = getattr(config, field.name), [*_numbers(field.default)]
        flag = prefix + field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            check(value, f"{flag}.")
        elif value == () and known:
            raise ValueError(f"{flag} needs at least one value, such as {known[0]}.")
        least = int(0 not in known)
        low, high = LIMITS.get(field.name.removesuffix("s"), (least, None))
        for number in _numbers(value):
            if low == 1 and isinstance(number, float):
                if not number > 0:
                    raise ValueError(
                        f"{flag} {number:g} is out of range; give more than 0."
                    )
            else:
                check_range(flag, number, low, high)


def _numbers(value: Any) -> Iterator[int | float]:
    """The numbers of a field, those of tuples one by one."""
    if isinstance(value, tuple):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _keep_compiled() -> None:
    """Programs are compiled once for all runs, as the command line does."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(targets.cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def environment() -> dict[str, Any]:
    """Commit, versions and device: what a number depends on besides the config."""
    import jax

    def git(*words: str) -> str:
        command = ["git", "-C", str(HERE), *words]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    device = jax.devices()[0]
    return {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "commit": git("rev-parse", "HEAD") or None,
        "changed": git("status", "--porcelain", "--", "../specjax") != "",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "device": f"{jax.device_count()} x {device.platform} ({device.device_kind})",
        "cores": os.cpu_count(),
    }


def table(rows: Rows, paper: Sequence[dict[str, Any]] = ()) -> Table:
    """Columns are the rows' fields; a paper's numbers stand right of ours."""
    result = Table(header_style="bold")
    known = {k for row in paper for k, v in row.items() if isinstance(v, float)}
    for name in rows[0]:
        result.add_column(name, justify="right")
        if name in known:
            result.add_column("(paper)", justify="right")
    for row in rows:
        theirs = next((p for p in paper if _same(p, row)), {})
        cells = []
        for name, value in row.items():
            cells.append(_cell(value))
            if name in known:
                cells.append(_cell(theirs.get(name)))
        result.add_row(*cells)
    return result


def _same(paper: dict[str, Any], row: dict[str, Any]) -> bool:
    named = {k: v for k, v in paper.items() if not isinstance(v, float)}
    return all(row.get(k) == v for k, v in named.items())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(_cell(v) for v in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def read(script: str, name: str = "default") -> Rows:
    """Rows of a run on disk, for notebooks."""
    path = HERE / "results" / script / name / "rows.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def load_drafters(
    names: Sequence[str], target: str, pretrained: targets.Pretrained
) -> dict[str, tuple[Any, Any]]:
    """Drafters with parameters, by shipped name or folder; all shipped if none.

    But for those that were trained together with their target.
    """
    shipped = checkpoints.shipped(target)
    given, names = names, names or list(shipped)
    if not names:
        raise FileNotFoundError(
            f"no drafter is shipped for target {target!r}; train one with "
            f"`specjax train NAME --target {target}` and give --drafters FOLDER."
        )
    shared = pretrained.target.shared(pretrained.params)
    loaded = {}
    for spec in names:
        folder = shipped.get(spec, pathlib.Path(spec))
        name, drafter, params = checkpoints.load(folder, shared, pretrained.dtype)
        if base.joint(drafter) is None:
            loaded[name] = (drafter, params)
        elif spec in given:
            raise ValueError(
                f"{spec} was trained together with its target, here all share one; "
                "measure it with `specjax bench`."
            )
    return loaded


def load_prompts(
    tasks: Sequence[str], count: int, file: pathlib.Path | None = None
) -> dict[str, list[str]]:
    """`count` shipped prompts of each task, or those of a .jsonl, evenly spread."""
    found = (
        corpus.shipped_prompts(",".join(tasks))
        if file is None
        else {file.stem: corpus.read_prompts(file)}
    )
    return {task: corpus.spread(prompts, count) for task, prompts in found.items()}
