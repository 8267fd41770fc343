"""`specjax bench`: the main job."""

import dataclasses
import datetime
import json
import os
import pathlib
import sys
from typing import Any

from specjax.commands import common


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measure drafters on held-out prompts: tau, acceptance, cost, speedup, law."""

    target: str = "tiny"  # tiny, smollm2-135m, a hub id or a folder
    drafters: str = "all"  # that are shipped; or names or folders, comma-separated
    tasks: str = "code,math,chat"  # of the shipped prompts
    prompts: pathlib.Path | None = None  # .jsonl with `turns` or `prompt` instead
    # 0 and 1 if none is given; with --quick 0 alone, where a text proves itself.
    temperature: tuple[float, ...] | None = None

    top_k: int | None = None  # likeliest tokens that are kept; None: all
    top_p: float = 1.0
    min_p: float = 0.0
    # drafted tokens per round; each drafter's own if not given
    gamma: int | None = None

    tree: str | None = None  # FILE.json, or dynamic:NODES:DEPTH[:WIDTH]; else a chain
    rule: str | None = None  # of `specjax certify`; None: the exact one that suits
    num_prompts: int = 8  # prompts a task, spread evenly over its list
    max_new_tokens: int = 96
    batch_size: int = 1
    seed: int = 0
    quick: bool = False  # 3 prompts a task, 48 tokens, fewer repeats, T = 0
    out: pathlib.Path | None = None  # folder for bench.json and bench.png
    json: pathlib.Path | None = None  # the JSON goes here instead

    def run(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from specjax import bench, console, corpus, generate, targets

        common.check_writable(self.json)
        common.check_rule(self.rule)
        common.check_seed(self.seed)
        temperatures = self.temperature
        if temperatures is None:
            temperatures = (0.0,) if self.quick else (0.0, 1.0)
        if not temperatures:
            raise ValueError("--temperature needs at least one number, such as 0 or 1.")
        common.check_folder("--out", self.out)
        pretrained = targets.load(self.target)
        tasks = self._tasks()
        settings = bench.Settings(
            temperatures=tuple(temperatures),
            num_prompts=3 if self.quick else self.num_prompts,
            max_new_tokens=48 if self.quick else self.max_new_tokens,
            batch_size=self.batch_size,
            seed=self.seed,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            rule=self.rule,
            timing_repeats=5 if self.quick else 9,
        )
        loaded = self._load(pretrained)
        runner = bench.Bench(
            pretrained,
            {t: corpus.spread(p, settings.num_prompts) for t, p in tasks.items()},
            settings,
        )
        for _, _, drafter, _ in loaded:
            for temperature in settings.temperatures:
                generate.check(runner.model(drafter, temperature))
        drafters = {label: (name, d, p) for label, name, d, p in loaded}
        runners = {label: runner.on_target_of(d, p) for label, _, d, p in loaded}
        certificates: dict[tuple[str, float], bool] = {}

        def lossless(label: str, temperature: float) -> bool:
            """One certificate a drafter and temperature."""
            at = (label, temperature)
            if at not in certificates:
                run = runners[label]
                certificates[at] = run.keeps_the_law(*drafters[label], temperature)
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
                for label, _, drafter, params in loaded:
                    rows += runners[label].rows(
                        label, drafter, params, temperature, lossless, tick
                    )

        self._report(pretrained, settings, rows, console)

    def _load(self, pretrained) -> list[tuple[str, str, Any, Any]]:
        """Label, name, drafter and weights of each; labels differ, names need not."""
        names = self._names()
        if not names:
            raise FileNotFoundError(
                f"no drafter is shipped for target {self.target!r}; train one with "
                f"`specjax train NAME --target {self.target}`, give --drafters FOLDER."
            )
        loaded = [common.load_drafter(n, self.target, pretrained) for n in names]
        kinds = [name for name, _, _ in loaded]
        return [
            (
                name if kinds.count(name) == 1 else spec,
                name,
                common.with_tree(common.with_gamma(drafter, self.gamma), self.tree),
                params,
            )
            for spec, (name, drafter, params) in zip(names, loaded, strict=True)
        ]

    def _names(self) -> list[str]:
        from specjax import checkpoints

        names = common.names_in("--drafters", self.drafters)
        if "all" in names and len(names) > 1:
            raise ValueError(
                f"--drafters {self.drafters}: all are all; leave out the others."
            )
        return list(checkpoints.shipped(self.target)) if names == ["all"] else names

    def _tuned_targets(self, target_name: str) -> list[str]:
        """How far from the target those are that drafters were trained with."""
        notes = []
        for spec in self._names():
            folder = common.drafter_folder(spec, self.target)
            path = None if folder is None else folder / "drafter.json"
            if path is None or not path.is_file():
                continue
            quality = json.loads(path.read_text()).get("about", {}).get("quality")
            if quality:
                notes.append(
                    f"{spec}: lossless to the target that was trained with it, which "
                    f"chooses as {target_name} does at {quality['agreement']:.1%} of "
                    f"held-out tokens (KL {quality['kl']:.4f} nats)."
                )
        return notes

    def _tasks(self) -> dict[str, list[str]]:
        from specjax import corpus

        if self.prompts is not None:
            return {self.prompts.stem: corpus.read_prompts(self.prompts)}
        common.names_in("--tasks", self.tasks)
        return corpus.shipped_prompts(self.tasks)

    def _report(self, pretrained, settings, rows, console) -> None:
        from specjax import figures, verify

        where = f"{pretrained.name} on {common.device()}"
        screen = common.terminal()
        for table in console.bench_tables(rows, where, screen):
            screen.print(table)
        notes = self._tuned_targets(pretrained.name)
        print("".join(f"{note}\n" for note in notes), end="")
        result = {
            "target": pretrained.name,
            "settings": dataclasses.asdict(settings)
            | {"gamma": self.gamma, "tree": self.tree},
            "rows": rows,
            "notes": notes,
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
