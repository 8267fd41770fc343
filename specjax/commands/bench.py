"""`specjax bench`: the main job."""

import dataclasses
import datetime
import os
import pathlib
import sys
from typing import Any

from specjax.commands import common

# A language model, heads, a block: what is measured unless drafters are named.
KINDS = ("draft_model", "medusa", "dflash")


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measure drafters on held-out prompts: tau, acceptance, cost, speedup, law."""

    target: str = "tiny"  # tiny, smollm2-135m, a hub id or a folder
    # Names or folders, comma-separated, or "all" that are shipped; three if empty.
    drafters: str = ""
    tasks: str = "code,math,chat"  # of the shipped prompts
    prompts: pathlib.Path | None = None  # .jsonl with `turns` or `prompt` instead
    temperature: tuple[float, ...] = (0.0, 1.0)
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    gamma: int | None = (
        None  # drafted tokens per round; each drafter's own if not given
    )
    tree: str | None = None  # FILE.json, or dynamic:NODES:DEPTH[:WIDTH]; else a chain
    rule: str | None = None  # of `specjax certify`; None: the exact one that suits
    num_prompts: int = 8  # prompts a task, spread evenly over its list
    max_new_tokens: int = 96
    batch_size: int = 1
    seed: int = 0
    quick: bool = False  # 3 prompts a task, 48 tokens, fewer repeats
    out: pathlib.Path | None = None  # folder for bench.json and bench.png
    json: pathlib.Path | None = None  # the JSON goes here instead

    def run(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from specjax import bench, console, corpus, targets, verify

        common.check_writable(self.json)
        if self.rule is not None:
            verify.get(self.rule)  # an unknown name says which are known
        if not self.temperature:
            raise ValueError("--temperature needs at least one number, such as 0 or 1.")
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise FileExistsError(f"--out needs a folder; {self.out} is a file.")
        pretrained = targets.load(self.target)
        tasks = self._tasks()
        settings = bench.Settings(
            temperatures=tuple(self.temperature),
            num_prompts=3 if self.quick else self.num_prompts,
            max_new_tokens=48 if self.quick else self.max_new_tokens,
            batch_size=self.batch_size,
            seed=self.seed,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            rule=self.rule,
            timing_repeats=3 if self.quick else 5,
        )
        loaded = self._load(pretrained)
        runner = bench.Bench(
            pretrained,
            {t: corpus.spread(p, settings.num_prompts) for t, p in tasks.items()},
            settings,
        )
        drafters = {name: (name, drafter, params) for name, drafter, params in loaded}
        certificates: dict[tuple[str, float], bool] = {}

        def lossless(name: str, temperature: float) -> bool:
            """One certificate a drafter and temperature."""
            at = (name, temperature)
            if at not in certificates:
                certificates[at] = runner.keeps_the_law(*drafters[name], temperature)
            return certificates[at]

        rows: list[dict[str, Any]] = []
        total = len(loaded) * len(settings.temperatures) * (len(tasks) + 1)
        with Progress(
            TextColumn("{task.description:<32}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            console=common.terminal(stderr=True),
            disable=not sys.stderr.isatty(),
        ) as progress:
            bar = progress.add_task("", total=total)

            def tick(what: str) -> None:
                progress.update(bar, description=what, advance=1)

            for temperature in settings.temperatures:
                for name, drafter, params in loaded:
                    rows += runner.rows(
                        name, drafter, params, temperature, lossless, tick
                    )

        self._report(pretrained, settings, rows, console)

    def _load(self, pretrained) -> list[tuple[str, Any, Any]]:
        """Name, drafter and weights of each."""
        from specjax import checkpoints

        shipped = list(checkpoints.shipped(self.target))
        names = [n for n in shipped if n in KINDS] or shipped
        if self.drafters:
            names = shipped if self.drafters == "all" else self.drafters.split(",")
        if not names:
            raise FileNotFoundError(
                f"no drafter is shipped for target {self.target!r}; train one with "
                f"`specjax train NAME --target {self.target}`, give --drafters FOLDER."
            )
        loaded = [common.load_drafter(n, self.target, pretrained) for n in names]
        return [
            (n, common.with_tree(common.with_gamma(d, self.gamma), self.tree), p)
            for n, d, p in loaded
        ]

    def _tasks(self) -> dict[str, list[str]]:
        from specjax import corpus

        if self.prompts is not None:
            return {self.prompts.stem: corpus.read_prompts(self.prompts)}
        return corpus.shipped_prompts(self.tasks)

    def _report(self, pretrained, settings, rows, console) -> None:
        from specjax import figures, verify

        where = f"{pretrained.name} on {common.device()}"
        common.terminal().print(console.bench_table(rows, where))
        result = {
            "target": pretrained.name,
            "settings": dataclasses.asdict(settings),
            "rows": rows,
            "versions": common.versions(),
            "device": common.device(),
        }
        stamp = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
        out = self.out or pathlib.Path(
            "runs"
        ) / "bench" / f"{self.target}-{stamp}".replace(os.sep, "_")
        out.mkdir(parents=True, exist_ok=True)
        path = self.json or out / "bench.json"
        console.write_json(path, result)
        written = [str(path)]
        try:
            figures.bench(rows, where, out / "bench.png")
            written.append(str(out / "bench.png"))
        except ModuleNotFoundError as error:
            print(f"no figure: {error}", file=sys.stderr)
        print(f"wrote {' and '.join(written)}")
        lossy = [r for r in rows if not r["lossless"]]
        meant = self.rule is not None and not verify.get(self.rule).lossless
        if lossy and not meant:
            raise ValueError(
                f"{len(lossy)} of {len(rows)} rows are not lossless; see the table."
            )
