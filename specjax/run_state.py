"""Checkpoints of a training: parameters and optimiser state by step, through orbax.

Orbax writes a step beside its place and renames it when it is whole, so a killed save
leaves the step before. What it does not do is notice a flipped bit: it restores other
numbers without a word. So before the rename the SHA-256 of every file goes into
`sums.sha256`, in the form that `sha256sum -c` reads, and nothing is restored from files
that differ from it.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import IO, Any

import jax

from specjax import distributed
from specjax.corpus import Texts
from specjax.feature_cache import digest
from specjax.typing import Params

SUMS = "sums.sha256"
ITEMS = ("tree", "about")  # folders of a step; beside them orbax keeps its own notes


def describe(pretrained, drafter, texts: Texts, config, weights) -> dict[str, Any]:
    """What a run must share with the one that left a checkpoint, to go on from it."""
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    shapes = [f"{jax.tree_util.keystr(path)} {x.shape}" for path, x in leaves]
    return {
        "drafter": type(drafter).__name__,
        "fields": json.loads(json.dumps(dataclasses.asdict(drafter))),
        "config": dataclasses.asdict(config),
        "texts": digest((texts.tokens, texts.mask)),
        "target": pretrained.name,
        "shapes": hashlib.sha256(str(shapes).encode()).hexdigest(),
    }


class Checkpoints:
    """The last two steps of a run in a folder that no other run may write to."""

    def __init__(self, folder: pathlib.Path, about: dict[str, Any]):
        import orbax.checkpoint as ocp

        _hush()
        self.ocp, self.about, self.folder = ocp, about, folder.absolute()
        self.writing: int | None = None
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = _lock(self.folder.with_name("lock"))
        self.manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=2,
                cleanup_tmp_directories=True,
                # Runs before a step is renamed to its place, whatever its name says.
                async_options=ocp.AsyncOptions(post_finalization_callback=self._sign),
            ),
        )

    def save(self, step: int, params: Params, state: Any) -> None:
        """Returns when the arrays are copied; they are written in the background."""
        tree = self.ocp.args.StandardSave({"params": params, "state": state})
        about = self.ocp.args.JsonSave(self.about)
        args = self.ocp.args.Composite(tree=tree, about=about)
        with self._explained():
            self.manager.wait_until_finished()
            self.writing = step
            self.manager.save(step, args=args)

    def restore(self, params: Params, state: Any) -> tuple[int, Params, Any]:
        """The last step, or step 0 with what was given if there is none."""
        step = self.manager.latest_step()
        if step is None:
            return 0, params, state
        self._check(step)
        stored = self._read(step, about=self.ocp.args.JsonRestore())["about"]
        if stored != self.about:
            differ = [k for k in self.about if stored.get(k) != self.about[k]]
            raise ValueError(
                f"the checkpoint at step {step} was made with other settings "
                f"({', '.join(differ)}); use a new --out folder or the old settings."
            )
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            {"params": params, "state": state},
        )
        args = self.ocp.args.StandardRestore(abstract)
        tree = self._read(step, tree=args)["tree"]
        return step, tree["params"], tree["state"]

    def _read(self, step: int, **items: Any) -> Any:
        return self.manager.restore(step, args=self.ocp.args.Composite(**items))

    def close(self) -> None:
        """Waits for what is being written."""
        with self.lock, contextlib.closing(self.manager), self._explained():
            self.manager.wait_until_finished()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """What went wrong in writing, in one line."""
        try:
            yield
        except (OSError, ValueError) as error:
            said = re.search(r"os_error_code='(\d+)'", str(error))
            number = int(said[1]) if said else getattr(error, "errno", None)
            cause = os.strerror(number) if number else str(error)[:120]
            kept = [int(p.name) for p in self.folder.iterdir() if p.name.isdecimal()]
            raise OSError(
                f"the checkpoint of step {self.writing} cannot be written to "
                f"{self.folder} ({cause}); mend that and run again, it goes on from "
                f"step {max(kept, default=0)}."
            ) from None

    def _sign(self) -> None:
        """Writes the checksums of a step that is whole but not yet in its place.

        In the background, by one process for all.
        """
        for folder in self.folder.glob(f"{self.writing}.orbax-checkpoint-tmp*"):
            lines = [f"{found}  {name}\n" for name, found in _sums(folder).items()]
            (folder / SUMS).write_text("".join(lines))

    def _check(self, step: int) -> None:
        """Refuses a step whose files are not those that were written."""
        folder, wrong = self.folder / str(step), ""
        if jax.process_index() == 0:
            wrong = _wrong(folder)
        if distributed.everywhere(not wrong):
            return
        raise ValueError(
            f"the checkpoint {folder} is damaged ({wrong or 'says process 0'}); delete "
            "it to go on from the one before."
        )


def _sums(folder: pathlib.Path) -> dict[str, str]:
    """SHA-256 of each file of content: not of the notes that orbax adds at the end."""
    sums = {}
    for path in sorted(p for item in ITEMS for p in (folder / item).rglob("*")):
        if path.is_file() and path.name != "commit_success.txt":
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            sums[path.relative_to(folder).as_posix()] = found
    return sums


def _wrong(folder: pathlib.Path) -> str:
    """The first file of a step that is not as it was written; empty if all are."""
    try:
        lines = (folder / SUMS).read_text().splitlines()
        wanted = {name: found for found, name in (x.split("  ") for x in lines)}
    except (OSError, ValueError):
        return f"{SUMS} cannot be read"
    found = _sums(folder)
    differ = [n for n in wanted | found if wanted.get(n) != found.get(n)]
    return differ[0] if differ else ""


def _lock(path: pathlib.Path) -> IO:
    """Holds a file until it is closed or the process ends: a lock is never stale."""
    file = path.open("a")
    if jax.process_index() > 0:
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(
            f"another run is training in {path.parent}; wait for its end or use a new "
            "--out folder."
        ) from None
    except OSError:
        pass  # a file system without locks: then the user sees to it
    return file


@functools.cache
def _hush() -> None:
    """Drops what orbax prints of errors, pages of it, beside raising them."""
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    shown = sys.unraisablehook

    def hook(seen: Any, /) -> None:
        if str(seen.exc_value) != "Event loop is closed":
            shown(seen)

    sys.unraisablehook = hook
