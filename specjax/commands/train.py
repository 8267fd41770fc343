"""`specjax train`: a drafter for a target."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import sys
import zipfile
import zlib
from typing import Any, Literal

from tyro.conf import Positional

from specjax.commands import common

HELD_OUT = 0.0625  # share of the texts that judges a target that is trained too


@dataclasses.dataclass(frozen=True)
class Train:
    """Train a drafter for a target; with no data the target writes its own."""

    drafter: Positional[str]  # registry name
    target: str = "tiny"
    # .jsonl of `messages` or `text`; with --regenerate also `turns` or `prompt`
    data: tuple[pathlib.Path, ...] = ()
    regenerate: bool = False  # let the target write the answers to the data's prompts
    self_prompts: int = 1024  # chats that the target invents where no data is given
    length: int = 128  # tokens of a training text
    steps: int | None = None  # None: 300
    batch_size: int | None = None  # texts a step; None: 8
    learning_rate: float | None = None  # its peak; None: 0.004
    seed: int = 0
    remat: bool = False  # less memory for more time: see `training.TrainConfig`
    field: tuple[str, ...] = ()  # of the drafter as name=value, such as num_layers=2
    draft_vocab: int | None = None  # draft only so many ids, the texts' most frequent
    # Part the table of a trained gemma4_mtp (--init) into so many clusters, and train
    # the centroids alone
    clusters: int | None = None
    clusters_scored: int | None = None  # whose tokens a draft scores; None: 32
    init: pathlib.Path | None = None  # folder of a trained drafter to start from
    feature_cache: pathlib.Path | None = None  # folder; built once, read each epoch
    feature_dtype: Literal["bfloat16", "int8"] = "bfloat16"  # of the numbers in it
    out: pathlib.Path | None = None  # folder; a run found there goes on
    json: pathlib.Path | None = None  # last metrics
    mesh: str = ""  # data=2,fsdp=4,tensor=1: all devices, split so; empty: one device
    # Several processes, each with the same command: host:port of the first, or `auto`
    # where the cluster tells (Slurm, Kubernetes, TPU pods)
    coordinator: str | None = None
    num_processes: int | None = None  # how many; where the cluster does not tell
    process_id: int | None = None  # of this one, from 0; likewise

    def run(self) -> None:
        from specjax import corpus, drafters, preemption, sharding, training

        drafters.get(self.drafter)  # an unknown name says which are known
        common.check_writable(self.json)
        common.check_folder("--out", self.out)
        if not (self.feature_cache and self.feature_cache.is_dir()):
            common.check_folder("--feature-cache", self.feature_cache)
        if self.feature_dtype == "int8" and self.feature_cache is None:
            raise ValueError(
                "--feature-dtype int8 is of the numbers in a feature cache; give "
                "--feature-cache FOLDER too."
            )
        common.check_range("--length", self.length, corpus.MIN_ANSWER)
        common.check_range("--self-prompts", self.self_prompts, 1)
        common.check_seed(self.seed)
        if self.regenerate and not self.data:
            raise ValueError(
                "--regenerate lets the target answer the prompts of --data; give it "
                "too. Without data the target writes prompts and answers anyway."
            )
        mesh = self._mesh()
        settings = {
            name: getattr(self, name)
            for name in ("steps", "batch_size", "learning_rate", "seed")
            if getattr(self, name) is not None
        }
        config = training.TrainConfig(remat=self.remat, **settings)
        with preemption.watch() as watch, sharding.use(mesh):
            self._train(config, mesh, watch)

    def _mesh(self):
        """The mesh of the run, which this process has then joined; None: one device."""
        import jax

        from specjax import distributed
        from specjax.sharding import MeshShape

        shape = MeshShape.parse(self.mesh)
        distributed.start(self.coordinator, self.num_processes, self.process_id)
        if self.mesh:
            return shape.make()
        return MeshShape(data=jax.device_count()).make() if self.coordinator else None

    def _train(self, config, mesh, watch) -> None:
        from specjax import corpus, distributed, feature_cache, targets, training
        from specjax.drafters import base
        from specjax.targets.scanned import Scanned, arranged

        out = (
            self.out or pathlib.Path("runs") / "train" / f"{self.target}-{self.drafter}"
        )
        writes = self._writes(out)  # over a cache, one layer after the other
        load = functools.partial(targets.load, self.target, mesh=mesh)
        pretrained = load(scanned=not writes)
        positions = pretrained.target.config.max_positions
        common.check_range("--length", self.length, corpus.MIN_ANSWER, positions)
        drafter, params = self._start(pretrained)
        out.mkdir(parents=True, exist_ok=True)
        texts = self._texts(pretrained, out)
        target = arranged(pretrained.target, base.reads_states_alone(drafter))
        if target != pretrained.target:
            del pretrained  # both would be the weights twice
            pretrained = load(scanned=isinstance(target, Scanned))
        if self.draft_vocab is not None:
            drafter = _reduced(drafter, texts, self.draft_vocab)
        held = None
        if base.joint(drafter) is not None:
            texts, held = texts.part(HELD_OUT)
        cache = None
        if self.feature_cache:
            print(f"features of {len(texts)} texts -> {self.feature_cache}")
            cache = feature_cache.cache_features(
                self.feature_cache,
                pretrained,
                drafter.taps,
                texts,
                kv_layers=base.kv_layers(drafter),
                dtype=self.feature_dtype,
            )
        watch.waits = True
        with _TrainLog(out, config.steps) as log:
            params = training.train(
                pretrained,
                drafter,
                texts,
                config,
                folder=out,
                params=params,
                cache=cache,
                mesh=mesh,
                log=log.write,
                stop=watch,
            )
        about = {
            "target": pretrained.name,
            "texts": len(texts),
            "train": dataclasses.asdict(config),
            "data": [str(p.name) for p in self.data] or "written by the target itself",
        }
        if self.init:
            about["init"] = self.init.name
        if held is not None:
            about["quality"] = _quality(pretrained, drafter, params, held)
        self._save(out, drafter, params, about)
        if distributed.is_first():
            self._report(log, pretrained.name, out)

    def _save(self, out: pathlib.Path, drafter, params, about) -> None:
        import jax

        from specjax import checkpoints, distributed

        params = jax.tree.map(distributed.fetch, params)
        if distributed.is_first():
            checkpoints.save(
                out / "drafter", self.drafter, drafter, params, about=about
            )
        distributed.wait("saved")

    def _make(self, cls, make, pretrained):
        """`make` of a target, with the fields that were given."""
        fields = common.parse_fields(self.field)
        common.check_fields(self.drafter, cls, fields)
        if "draft_ids" in fields and self.draft_vocab is not None:
            raise ValueError(
                f"--draft-vocab {self.draft_vocab} chooses the ids that --field "
                "draft_ids names; give one of the two."
            )
        mask_token_id = getattr(pretrained.tokenizer, "mask_token_id", None)
        try:
            return make(pretrained.target.config, mask_token_id, **fields)
        except TypeError as error:
            raise ValueError(f"{self.drafter}: bad --field ({error}).") from None

    def _start(self, pretrained):
        """The drafter to train, and its weights if it starts from `init`."""
        import jax

        from specjax import drafters

        cls, params = drafters.get(self.drafter), None
        if self.init:
            name, drafter, params = common.load_drafter(
                str(self.init), self.target, pretrained
            )
            if name in getattr(cls, "adapts", ()):
                adapt = lambda *args, **fields: cls.adapt(drafter, *args, **fields)
                adapted = self._make(cls, adapt, pretrained)
                shared = pretrained.target.shared(pretrained.params)
                fresh = jax.jit(adapted.init)(jax.random.key(self.seed), shared)
                drafter, params = adapted, {**fresh, **params}
            elif name != self.drafter:
                raise ValueError(
                    f"{self.init} holds a {name} drafter, not {self.drafter}; name "
                    "that one or start from another folder."
                )
            elif self.field:
                raise ValueError(
                    f"--field {self.field[0]}: --init keeps the fields of the drafter "
                    "that it starts from; leave out one of the two."
                )
        else:
            drafter = self._make(cls, cls.for_target, pretrained)
        drafter, params = self._clustered(drafter, params)
        known = {f.name for f in dataclasses.fields(drafter)}
        if self.draft_vocab is not None and (self.init or "draft_ids" not in known):
            raise ValueError(
                f"--draft-vocab {self.draft_vocab}: {self.drafter} has no field "
                "draft_ids, or it starts from --init and keeps the ids it has."
            )
        V = pretrained.target.config.vocab_size
        common.check_range("--draft-vocab", self.draft_vocab, 1, V)
        return drafter, params

    def _clustered(self, drafter, params):
        from specjax.drafters import gemma4_mtp

        if self.clusters is None:
            if self.clusters_scored is not None:
                raise ValueError(
                    f"--clusters-scored {self.clusters_scored} is of the clusters that "
                    "--clusters makes; give it too."
                )
            return drafter, params
        if self.drafter != "gemma4_mtp" or params is None:
            raise ValueError(
                f"--clusters {self.clusters} parts the table of a trained drafter: "
                "specjax train gemma4_mtp --init FOLDER --clusters C."
            )
        scored = 32 if self.clusters_scored is None else self.clusters_scored
        return gemma4_mtp.with_clusters(drafter, params, self.clusters, scored)

    def _report(self, log: "_TrainLog", target: str, out: pathlib.Path) -> None:
        from specjax import console, figures

        if log.last and self.json:
            console.write_json(self.json, log.last | {"drafter": self.drafter})
        try:
            figures.training(
                log.read(), f"{self.drafter} for {target}", out / "training.png"
            )
        except ModuleNotFoundError as error:
            print(f"no figure: {error}", file=sys.stderr)
        if not log.last:
            print(
                f"{out} holds this run, done: nothing was trained. After a change of "
                "the drafter's code give a new --out."
            )
        tau = f"expected tau {log.last['tau']:.2f}, " if "tau" in log.last else ""
        folder = out / "drafter"
        print(
            f"{tau}wrote {folder}; measure it: specjax bench --target {self.target} "
            f"--drafters {folder}"
        )

    def _recipe(self) -> list:
        """What besides the files decides the training texts."""
        made = None if self.data else self.self_prompts
        return [self.regenerate, made, self.length, self.seed, self.target]

    def _writes(self, out: pathlib.Path) -> bool:
        """Whether the target is to write of the training texts in this run."""
        from specjax import distributed

        kept = distributed.agree((out / "texts.npz").exists())
        return not kept and (self.regenerate or not self.data)

    def _texts(self, pretrained, out: pathlib.Path):
        """The training rows, kept in the run's folder for a resumed run to find."""
        import numpy as np

        from specjax import corpus, distributed

        kept = out / "texts.npz"
        source = json.dumps([[str(p) for p in self.data], *self._recipe()])
        if distributed.agree(kept.exists()):
            return _kept_texts(kept, source)
        import jax

        if not self.data:
            print(
                f"{pretrained.name} writes {self.self_prompts} chats to learn from ..."
            )
            examples = corpus.self_made(
                pretrained, self.self_prompts, self.seed, self.length
            )
        elif self.regenerate:
            prompts = [p for path in self.data for p in corpus.read_prompts(path)]
            print(f"{pretrained.name} answers {len(prompts)} prompts ...")
            examples = corpus.answer(
                pretrained,
                prompts,
                max_new_tokens=self.length,
                key=jax.random.key(self.seed),
            )
        else:
            examples = [
                e for path in self.data for e in corpus.read_examples(path, pretrained)
            ]
        texts = corpus.pack(examples, self.length)
        if distributed.is_first():
            beside = out / "texts.partial.npz"
            np.savez_compressed(
                beside, tokens=texts.tokens, mask=texts.mask, source=np.array(source)
            )
            os.replace(beside, kept)
        learned = int(texts.mask.sum())
        print(f"{len(texts)} texts, {learned} tokens to learn")
        return texts


def _quality(pretrained, drafter, params, held) -> dict[str, float]:
    """What a target that was trained too still agrees on, said and returned."""
    from specjax import joint

    moved = joint.tuned(pretrained, drafter, params)
    quality = joint.quality(pretrained, moved, held)
    print(
        "the target was trained too: on {} held-out texts KL {kl:.4f} nats a token "
        "from what it was, the same choice at {agreement:.1%}, loss "
        "{loss_before:.4f} -> {loss_after:.4f}".format(len(held), **quality)
    )
    return quality


def _kept_texts(path: pathlib.Path, source: str):
    """The texts that this run began with."""
    import numpy as np

    from specjax import corpus

    try:
        with path.open("rb") as raw, np.load(raw) as file:
            stored = {name: file[name] for name in ("source", "tokens", "mask")}
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is damaged ({error}); delete it, it is made anew."
        ) from None
    if str(stored["source"]) != source:
        raise ValueError(
            f"{path} was made from other data or settings ({stored['source']}); use a "
            "new --out folder."
        )
    return corpus.Texts(stored["tokens"], stored["mask"])


def _reduced(drafter, texts, size: int):
    """The drafter with the most frequent ids of the tokens to learn as its own."""
    import numpy as np

    from specjax import draft_vocab

    learned = texts.tokens[texts.mask]
    counts = np.bincount(learned, minlength=drafter.config.vocab_size)
    ids = draft_vocab.most_frequent(counts, size)
    share = counts[ids].sum() / counts.sum()
    print(f"draft vocabulary of {size} ids: {share:.2%} of the tokens to learn")
    return dataclasses.replace(drafter, draft_ids=tuple(ids.tolist()))


def _close(board) -> None:
    """Closes a TensorBoard file; on a full disk it would fail again, aloud, at exit."""
    try:
        board.close()
    except OSError:
        writer = board.file_writer.event_writer
        writer.add_event(object())  # ends its thread
        writer.close = lambda: None


class _TrainLog:
    """Metrics to JSONL, TensorBoard where it is installed, and a progress bar."""

    def __init__(self, out: pathlib.Path, steps: int):
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        from specjax import distributed

        self.writes = distributed.is_first()
        self.path, self.steps, self.last = out / "metrics.jsonl", steps, {}
        self.progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=common.terminal(stderr=True),
        )
        self.bar = self.progress.add_task("compiling", total=steps)
        self.board = None
        with contextlib.suppress(ModuleNotFoundError):
            from tensorboardX import SummaryWriter

            if self.writes:
                self.board = SummaryWriter(str(out / "tensorboard"))

    def __enter__(self):
        if self.writes and sys.stderr.isatty():
            self.progress.start()
        return self

    def __exit__(self, *error):
        self.progress.stop()
        if self.board:
            _close(self.board)

    def write(self, step: int, values: dict[str, float]) -> None:
        begins, self.last = not self.last, {"step": step} | values
        if not self.writes:
            return
        if begins:
            self._forget(step)
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

    def _forget(self, step: int) -> None:
        """Drops what a run that was killed wrote of this step and later ones."""
        if self.path.exists():
            kept = []
            for line in self.path.read_text().splitlines(keepends=True):
                with contextlib.suppress(json.JSONDecodeError):  # the last may be cut
                    kept += [line] if json.loads(line)["step"] < step else []
            beside = self.path.with_suffix(".partial")
            beside.write_text("".join(kept))
            os.replace(beside, self.path)

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]
