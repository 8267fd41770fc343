"""The command line: `specjax bench | generate | train | drafters | info`.

Each command is a frozen dataclass whose fields are its flags. Bad input ends in one
line on stderr and exit status 2.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
from typing import Annotated, Any, Literal

import tyro

Positional = tyro.conf.Positional
EXPECTED = (
    ValueError,
    KeyError,
    FileNotFoundError,
    FloatingPointError,
    ModuleNotFoundError,
    NotImplementedError,
    PermissionError,
    ConnectionError,
)


def _console(stderr: bool = False):
    from rich.console import Console

    wide = None if sys.stdout.isatty() else 150
    return Console(stderr=stderr, width=wide, highlight=False)


def _fields(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Parses name=value; values are JSON where they can be, else text."""
    fields = {}
    for pair in pairs:
        name, found, value = pair.partition("=")
        if not found or not name.isidentifier():
            raise ValueError(f"a field is name=value, got {pair!r}.")
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
        fields[name] = tuple(value) if isinstance(value, list) else value
    return fields


def _load_drafter(spec: str, target_name: str, pretrained: Any):
    """A shipped drafter by its name, or any by its folder."""
    from specjax import checkpoints, drafters

    shipped = checkpoints.shipped(target_name)
    if spec in shipped:
        folder = shipped[spec]
    elif os.sep in spec or pathlib.Path(spec).is_dir():
        folder = pathlib.Path(spec)
    else:
        drafters.get(spec)  # an unknown name says which are known
        raise FileNotFoundError(
            f"no trained {spec} for target {target_name!r} is shipped "
            f"(shipped: {', '.join(shipped) or 'none'}). Train one with `specjax train "
            f"{spec} --target {target_name}` and give its folder."
        )
    shared = pretrained.target.shared(pretrained.params)
    name, drafter, params = checkpoints.load(folder, shared, pretrained.dtype)
    return name, drafter, params


def _with_gamma(drafter: Any, gamma: int | None) -> Any:
    """Drafts another number of tokens; the drafter refuses what its weights cannot."""
    if gamma is None or gamma == drafter.gamma:
        return drafter
    return dataclasses.replace(drafter, gamma=gamma)


def _versions() -> dict[str, str]:
    names = ("specjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    found = {n: importlib.metadata.version(n) for n in names}
    return found | {"python": platform.python_version()}


def _device() -> str:
    import jax

    device = jax.devices()[0]
    kind = device.device_kind if device.platform != "cpu" else platform.machine()
    return f"{jax.device_count()} x {device.platform} ({kind}), {os.cpu_count()} cores"


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measure drafters on held-out prompts: tau, acceptance, cost, speedup, law."""

    target: str = "tiny"  # tiny, smollm2-135m, a hub id or a folder
    drafters: str = ""  # names or folders, comma-separated; all shipped ones if empty
    tasks: str = "code,math,chat"  # of the shipped prompts
    prompts: pathlib.Path | None = None  # .jsonl with `turns` or `prompt` instead
    temperature: tuple[float, ...] = (0.0, 1.0)
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    gamma: int | None = (
        None  # drafted tokens per round; each drafter's own if not given
    )
    num_prompts: int = 8  # prompts a task
    max_new_tokens: int = 96
    batch_size: int = 1
    seed: int = 0
    quick: bool = False  # 3 prompts a task, temperature 1 only for the certificate
    out: pathlib.Path | None = None  # folder for bench.json and bench.png
    json: pathlib.Path | None = None  # the JSON goes here instead

    def run(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from specjax import bench, checkpoints, console, targets, testing

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
            timing_repeats=3 if self.quick else 5,
        )
        names = self.drafters.split(",") if self.drafters else []
        names = names or list(checkpoints.shipped(self.target))
        if not names:
            raise FileNotFoundError(
                f"no drafter is shipped for target {self.target!r}; train one with "
                f"`specjax train NAME --target {self.target}`, give --drafters FOLDER."
            )
        loaded = [_load_drafter(n, self.target, pretrained) for n in names]
        loaded = [(n, _with_gamma(d, self.gamma), p) for n, d, p in loaded]
        runner = bench.Bench(
            pretrained,
            {t: p[: settings.num_prompts] for t, p in tasks.items()},
            settings,
        )
        certificates: dict[tuple[str, float], bool] = {}

        def lossless(name: str, temperature: float) -> bool:
            """One certificate a drafter and sampling, from the real engine."""
            at = (name, temperature)
            if at not in certificates:
                sampling = settings.sampling(temperature)
                certificates[at] = testing.certify(name, sampling).passed
            return certificates[at]

        rows: list[dict[str, Any]] = []
        total = len(loaded) * len(settings.temperatures) * (len(tasks) + 1)
        with Progress(
            TextColumn("{task.description:<32}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            console=_console(stderr=True),
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

    def _tasks(self) -> dict[str, list[str]]:
        from specjax import corpus

        if self.prompts is not None:
            return {self.prompts.stem: corpus.read_prompts(self.prompts)}
        folder = pathlib.Path(__file__).parent / "data" / "prompts"
        known = sorted(p.stem for p in folder.glob("*.jsonl"))
        names = [t for t in self.tasks.split(",") if t]
        unknown = [t for t in names if t not in known]
        if unknown or not names:
            raise ValueError(
                f"unknown task {', '.join(unknown) or '(none given)'}; the shipped "
                f"ones are {', '.join(known)}; --prompts FILE.jsonl takes your own."
            )
        return {t: corpus.read_prompts(folder / f"{t}.jsonl") for t in names}

    def _report(self, pretrained, settings, rows, console) -> None:
        from specjax import figures

        where = f"{pretrained.name} on {_device()}"
        _console().print(console.bench_table(rows, where))
        result = {
            "target": pretrained.name,
            "settings": dataclasses.asdict(settings),
            "rows": rows,
            "versions": _versions(),
            "device": _device(),
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
        if lossy:
            raise ValueError(
                f"{len(lossy)} of {len(rows)} rows are not lossless; see the table."
            )


@dataclasses.dataclass(frozen=True)
class Generate:
    """Answer one prompt; drafted tokens are marked as accepted or rejected."""

    prompt: str
    target: str = "tiny"
    drafter: str = ""  # name or folder; the first shipped one if empty, `none` for none
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    gamma: int | None = None
    seed: int = 0
    raw: bool = False  # continue the prompt as it stands, without the chat template
    marks: Literal["auto", "colour", "brackets", "none"] = "auto"  # auto: by terminal
    json: pathlib.Path | None = None

    def run(self) -> None:
        import jax

        from specjax import checkpoints, console, metrics, targets
        from specjax.drafters.none import NoDrafter
        from specjax.generate import Model, Weights, stream
        from specjax.sampling import Sampling

        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.min_p)
        pretrained = targets.load(self.target)
        tokenizer = pretrained.tokenizer
        chat = [{"role": "user", "content": self.prompt}]
        tokens = tokenizer.encode(self.prompt) if self.raw else tokenizer.chat(chat)
        shipped = checkpoints.shipped(self.target)
        spec = self.drafter or next(iter(shipped), "none")
        name, drafter, params = "none", NoDrafter(), None
        if spec != "none":
            name, drafter, params = _load_drafter(spec, self.target, pretrained)
            drafter = _with_gamma(drafter, self.gamma)

        model = Model(pretrained.target, drafter, sampling, pretrained.stop_ids)
        out = _console()
        marks = self.marks
        if marks == "auto":
            marks = "colour" if out.is_terminal else "brackets"
        marker = console.Marker(tokenizer, out, "none" if name == "none" else marks)
        result = None
        for result in stream(
            model,
            Weights(pretrained.params, params),
            [tokens],
            max_new_tokens=self.max_new_tokens,
            key=jax.random.key(self.seed),
        ):
            marker.show(console.fates(result))
        assert result is not None
        marker.close()

        rounds = int(metrics.num_rounds(result.trace)[0])
        accepted = int(result.trace.num_accepted.sum())
        legend = "" if marks == "none" or name == "none" else _legend(marks)
        print(
            f"[{pretrained.name}, drafter {name}: {len(result.tokens[0])} tokens in "
            f"{rounds} rounds, {accepted} drafted tokens accepted, tau "
            f"{metrics.tau(result.trace):.2f}, ended by {result.finish_reasons[0]}"
            f"{legend}]",
            file=sys.stderr,
        )
        if self.json:
            stop = set(pretrained.stop_ids)
            text = tokenizer.decode([t for t in result.tokens[0] if t not in stop])
            console.write_json(
                self.json,
                {
                    "tokens": result.tokens[0],
                    "text": text,
                    "finish_reason": result.finish_reasons[0],
                    "rounds": rounds,
                    "accepted": accepted,
                },
            )


def _legend(marks: str) -> str:
    if marks == "colour":
        return "; green: accepted draft, red: rejected draft, bold: the target's own"
    return "; {accepted draft} ~rejected draft~, unmarked: the target's own"


@dataclasses.dataclass(frozen=True)
class Train:
    """Train a drafter for a target; with no data the target writes its own."""

    drafter: Positional[str]  # registry name
    target: str = "tiny"
    data: tuple[pathlib.Path, ...] = ()  # .jsonl of `messages`, `text` or `turns`
    regenerate: bool = False  # let the target write the answers to the data's prompts
    self_prompts: int = 1536  # chats that the target invents where no data is given
    length: int = 256  # tokens of a training text
    steps: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    seed: int = 0
    field: tuple[
        str, ...
    ] = ()  # drafter fields as name=value, for example num_layers=2
    init: pathlib.Path | None = None  # folder of a trained drafter to start from
    feature_cache: pathlib.Path | None = None  # folder; built once, read each epoch
    out: pathlib.Path | None = None  # folder; a run found there goes on
    json: pathlib.Path | None = None  # last metrics

    def run(self) -> None:
        from specjax import checkpoints, drafters, figures, targets, training

        cls = drafters.get(self.drafter)
        pretrained = targets.load(self.target)
        settings = {
            name: getattr(self, name)
            for name in ("steps", "batch_size", "learning_rate", "seed")
            if getattr(self, name) is not None
        }
        config = training.TrainConfig(**settings)
        target = pretrained.target
        mask_token_id = getattr(pretrained.tokenizer, "mask_token_id", None)
        params = None
        if self.init:
            _, drafter, params = _load_drafter(str(self.init), self.target, pretrained)
        else:
            fields = _fields(self.field)
            known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
            unknown = sorted(set(fields) - known)
            if unknown:
                raise ValueError(
                    f"{self.drafter} has no field {', '.join(unknown)}; it has "
                    f"{', '.join(sorted(known))}."
                )
            drafter = cls.for_target(target.config, mask_token_id, **fields)

        out = (
            self.out or pathlib.Path("runs") / "train" / f"{self.target}-{self.drafter}"
        )
        out.mkdir(parents=True, exist_ok=True)
        texts = self._texts(pretrained, out)
        cache = None
        if self.feature_cache:
            print(f"features of {len(texts)} texts -> {self.feature_cache}")
            cache = training.cache_features(
                self.feature_cache, pretrained, drafter.taps, texts
            )
        with _TrainLog(out, config.steps) as log:
            params = training.train(
                pretrained,
                drafter,
                texts,
                config,
                folder=out,
                params=params,
                cache=cache,
                log=log.write,
            )
        about = {
            "target": pretrained.name,
            "texts": len(texts),
            "train": dataclasses.asdict(config),
            "data": [str(p.name) for p in self.data] or "written by the target itself",
        }
        folder = out / "drafter"
        checkpoints.save(folder, self.drafter, drafter, params, about=about)
        if log.last and self.json:
            from specjax import console

            console.write_json(self.json, log.last | {"drafter": self.drafter})
        try:
            figures.training(
                log.read(),
                f"{self.drafter} for {pretrained.name}",
                out / "training.png",
            )
        except ModuleNotFoundError as error:
            print(f"no figure: {error}", file=sys.stderr)
        tau = f"expected tau {log.last['tau']:.2f}, " if "tau" in log.last else ""
        print(
            f"{tau}wrote {folder}; measure it: specjax bench --target {self.target} "
            f"--drafters {folder}"
        )

    def _texts(self, pretrained, out: pathlib.Path):
        """The training rows, kept in the run's folder for a resumed run to find."""
        import numpy as np

        from specjax import corpus

        kept = out / "texts.npz"
        if kept.exists():
            stored = np.load(kept)
            return corpus.Texts(stored["tokens"], stored["mask"])
        import jax

        if not self.data:
            print(
                f"{pretrained.name} writes {self.self_prompts} chats to learn from ..."
            )
            examples = corpus.self_made(pretrained, self.self_prompts, self.seed)
        elif self.regenerate:
            prompts = [p for path in self.data for p in corpus.read_prompts(path)]
            print(f"{pretrained.name} answers {len(prompts)} prompts ...")
            examples = corpus.answer(pretrained, prompts, key=jax.random.key(self.seed))
        else:
            examples = [
                e for path in self.data for e in corpus.read_examples(path, pretrained)
            ]
        texts = corpus.pack(examples, self.length)
        beside = out / "texts.partial.npz"
        np.savez_compressed(beside, tokens=texts.tokens, mask=texts.mask)
        os.replace(beside, kept)
        learned = int(texts.mask.sum())
        print(f"{len(texts)} texts, {learned} tokens to learn")
        return texts


class _TrainLog:
    """Metrics to JSONL, TensorBoard where it is installed, and a progress bar."""

    def __init__(self, out: pathlib.Path, steps: int):
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.path, self.steps, self.last = out / "metrics.jsonl", steps, {}
        self.progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=_console(stderr=True),
        )
        self.bar = self.progress.add_task("compiling", total=steps)
        try:
            from tensorboardX import SummaryWriter

            self.board = SummaryWriter(str(out / "tensorboard"))
        except ModuleNotFoundError:
            self.board = None

    def __enter__(self):
        if sys.stderr.isatty():
            self.progress.start()
        return self

    def __exit__(self, *error):
        self.progress.stop()
        if self.board:
            self.board.close()

    def write(self, step: int, values: dict[str, float]) -> None:
        self.last = {"step": step} | values
        with self.path.open("a") as file:
            file.write(json.dumps(self.last) + "\n")
        if self.board:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)
        line = f"loss {values['loss']:.3f}"
        if "tau" in values:
            line += f", expected tau {values['tau']:.2f}"
        line += f", {values['tokens_per_s']:.0f} tokens/s"
        self.progress.update(self.bar, completed=step, description=line)
        if not sys.stderr.isatty() and (step % 100 == 0 or step == self.steps):
            print(f"step {step}/{self.steps}: {line}", file=sys.stderr)

    def read(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@dataclasses.dataclass(frozen=True)
class Drafters:
    """List the registered drafters: what each reads, its passes, what is trained."""

    json: pathlib.Path | None = None

    def run(self) -> None:
        from rich.table import Table

        from specjax import console, drafters

        cards = [
            {"name": name} | dataclasses.asdict(cls.card)
            for name, cls in drafters.REGISTRY.items()
        ]
        table = Table(header_style="bold")
        for column in cards[0]:
            table.add_column(column)
        for card in cards:
            table.add_row(*(str(value) for value in card.values()))
        _console().print(table)
        if self.json:
            console.write_json(self.json, {"drafters": cards})


@dataclasses.dataclass(frozen=True)
class Info:
    """Print devices, versions, targets and shipped drafters."""

    json: pathlib.Path | None = None

    def run(self) -> None:
        from specjax import checkpoints, console, targets

        facts = {
            "device": _device(),
            "versions": _versions(),
            "targets": list(targets.NAMES),
            "shipped": {t: list(checkpoints.shipped(t)) for t in targets.NAMES},
        }
        for name, version in facts["versions"].items():
            print(f"{name:<18}{version}")
        print(f"{'device':<18}{facts['device']}")
        for target, names in facts["shipped"].items():
            print(f"{'target ' + target:<22}drafters: {', '.join(names) or 'none'}")
        if self.json:
            console.write_json(self.json, facts)


Command = (
    Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Drafters, tyro.conf.subcommand("drafters")]
    | Annotated[Info, tyro.conf.subcommand("info")]
)


def main(args: list[str] | None = None) -> None:
    """Entry point of the `specjax` command."""
    command = tyro.cli(
        Command,  # type: ignore[arg-type]
        prog="specjax",
        description="Trained drafters for speculative decoding on one exact verifier.",
        args=args,
        config=(tyro.conf.OmitSubcommandPrefixes,),
    )
    import jax

    from specjax import targets

    jax.config.update("jax_compilation_cache_dir", str(targets.cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    try:
        command.run()
    except EXPECTED as error:
        message = error.args[0] if isinstance(error, KeyError) else error
        print(f"specjax: {message}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
