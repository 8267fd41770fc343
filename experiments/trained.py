"""Drafters that several scripts compare: trained alike, and kept on disk.

Everything of one `Budget` learns from the same texts, which the target wrote itself, in
the same order of batches, for as many steps at the same rates. What was trained once is
found again by any script: the folder is named by the drafter's fields and the budget.
"""

import dataclasses
import hashlib
import json
import pathlib
import tempfile
import time
from typing import Any

import numpy as np

from specjax import corpus, targets, training
from specjax.corpus import Texts
from specjax.typing import Params

RUNS = pathlib.Path(__file__).parents[1] / "runs" / "block_drafters"


@dataclasses.dataclass(frozen=True)
class Budget:
    """What all drafters of a table get, and where their weights are kept."""

    target: str = "tiny"
    self_prompts: int = 1024  # chats that the target writes to learn from
    length: int = 128  # tokens of a text
    steps: int = 300
    batch_size: int = 8
    learning_rate: float = 4e-3
    runs: pathlib.Path | None = RUNS  # None: a folder that is thrown away


SMOKE = Budget(self_prompts=16, length=32, steps=2, batch_size=4, runs=None)


class Workshop:
    """The target, its texts, and whatever was trained on them under one budget."""

    def __init__(self, budget: Budget):
        self.budget = budget
        self.pretrained = targets.load(budget.target)
        self.folder = budget.runs or pathlib.Path(tempfile.mkdtemp(prefix="specjax-"))
        self.texts = self._texts()

    def _texts(self) -> Texts:
        b = self.budget
        path = self.folder / f"texts-{b.target}-{b.self_prompts}-{b.length}.npz"
        if not path.exists():
            made = corpus.self_made(self.pretrained, b.self_prompts, 0, b.length)
            texts = corpus.pack(made, b.length)
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, tokens=texts.tokens, mask=texts.mask)
        found = np.load(path)
        return Texts(found["tokens"], found["mask"])

    def make(self, cls: Any, **fields: Any) -> Any:
        """A drafter of the target's shape."""
        mask = getattr(self.pretrained.tokenizer, "mask_token_id", None)
        return cls.for_target(self.pretrained.target.config, mask, **fields)

    def settings(self, seed: int, learning_rate: float | None = None):
        b = self.budget
        return training.TrainConfig(
            steps=b.steps,
            batch_size=b.batch_size,
            learning_rate=learning_rate or b.learning_rate,
            seed=seed,
        )

    def features(self, drafter: Any) -> training.FeatureCache | None:
        """What the drafter reads of the texts; None if that is nothing."""
        if not drafter.taps:
            return None
        taps = "_".join(map(str, drafter.taps))
        folder = self.folder / f"features-{self.budget.target}-{taps}"
        return training.cache_features(
            folder, self.pretrained, drafter.taps, self.texts
        )

    def train(
        self,
        drafter: Any,
        seed: int = 0,
        params: Params | None = None,
        learning_rate: float | None = None,
    ) -> Params:
        """Trains a drafter, or finds it."""
        settings = self.settings(seed, learning_rate)
        began = time.perf_counter()
        trained = training.train(
            self.pretrained,
            drafter,
            self.texts,
            settings,
            cache=self.features(drafter),
            folder=self.folder / name_of(drafter, settings),
            params=params,
        )
        seconds = time.perf_counter() - began
        print(f"{name_of(drafter, settings)}: {seconds:.0f} s", flush=True)
        return trained


def name_of(drafter: Any, settings: training.TrainConfig) -> str:
    """A folder's name: the method, and a digest of all that a training depends on."""
    about = [dataclasses.asdict(drafter), dataclasses.asdict(settings)]
    digest = hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()
    return f"{type(drafter).__name__.lower()}-{digest[:12]}"
