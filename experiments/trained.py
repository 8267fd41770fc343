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

import common
import conditional_acceptance
import numpy as np

from specjax import corpus, drafters, feature_cache, targets, training
from specjax.corpus import Texts
from specjax.generate import Model, Weights
from specjax.sampling import Sampling
from specjax.typing import Params

RUNS = pathlib.Path("runs") / "block_drafters"  # of the folder one works in

# EAGLE-3 with the norms of 3.1 and a later state, without which it is behind EAGLE-1
# here (LOG), unrolled as often as it drafts.
EAGLE3 = {
    "ttt_steps": 7,
    "fc_norm": True,
    "norm_before_residual": True,
    "norm_output": True,
    "target_states": (2, 4, 7),
}
LINEUP: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", EAGLE3),
    "dflash": ("dflash", {"propose": "sample"}),
    "dflash at input": ("dflash", {"propose": "sample", "inject": "input"}),
    "dflash2": ("dflash2", {}),
    "dspark": ("dspark", {"head": "vanilla"}),
    "dspark gated": ("dspark", {"head": "gated"}),
    "dspark rnn": ("dspark", {"head": "rnn"}),
    "p_eagle": ("p_eagle", {"blocks": 8}),
}


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


FULL = Budget()
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

    def make(self, name: str, cls: Any = None, **fields: Any) -> Any:
        """A drafter of `LINEUP` for the target, or of another class with its fields."""
        method, of_name = LINEUP[name]
        mask = getattr(self.pretrained.tokenizer, "mask_token_id", None)
        cls = cls or drafters.get(method)
        return cls.for_target(self.pretrained.target.config, mask, **of_name | fields)

    def settings(self, seed: int, learning_rate: float | None = None):
        b = self.budget
        return training.TrainConfig(
            steps=b.steps,
            batch_size=b.batch_size,
            learning_rate=learning_rate or b.learning_rate,
            seed=seed,
        )

    def features(
        self, drafter: Any, dtype: feature_cache.Dtype = "bfloat16"
    ) -> feature_cache.FeatureCache | None:
        """What the drafter reads of the texts; None if that is nothing."""
        if not drafter.taps:
            return None
        taps = "_".join(map(str, drafter.taps))
        folder = self.folder / f"features-{self.budget.target}-{taps}-{dtype}"
        return feature_cache.cache_features(
            folder, self.pretrained, drafter.taps, self.texts, dtype=dtype
        )

    def train(
        self,
        drafter: Any,
        seed: int = 0,
        params: Params | None = None,
        learning_rate: float | None = None,
        dtype: feature_cache.Dtype = "bfloat16",
    ) -> Params:
        """Trains a drafter, or finds it; `dtype` is of the features it learns from."""
        settings = self.settings(seed, learning_rate)
        name = name_of(drafter, settings) + ("" if dtype == "bfloat16" else f"-{dtype}")
        began = time.perf_counter()
        trained = training.train(
            self.pretrained,
            drafter,
            self.texts,
            settings,
            cache=self.features(drafter, dtype),
            folder=self.folder / name,
            params=params,
        )
        seconds = time.perf_counter() - began
        print(f"{name}: {seconds:.0f} s", flush=True)
        return trained

    def prompts(self, tasks, count: int) -> dict[str, list[list[int]]]:
        """Held-out prompts of each task, as the target reads them."""
        chat = lambda p: self.pretrained.tokenizer.chat(
            [{"role": "user", "content": p}]
        )
        found = common.load_prompts(tasks, count)
        return {task: [chat(p) for p in prompts] for task, prompts in found.items()}

    def model(self, drafter: Any, temperature: float) -> Model:
        target, stop = self.pretrained.target, self.pretrained.stop_ids
        return Model(target, drafter, Sampling(temperature), stop)

    def ask(self, config: Any, drafter: Any, params, prompts, T: float) -> np.ndarray:
        """The sums of `conditional_acceptance.ask`, [2 B G]."""
        weights = Weights(self.pretrained.params, params)
        model = self.model(drafter, T)
        return conditional_acceptance.run(config, model, weights, prompts)


def tau(counts: np.ndarray, depth: int | None = None) -> np.ndarray:
    """1 + sum of survival, of sums over texts [2 .. G]: rounds that start anywhere."""
    alpha = counts[0] / np.maximum(counts[1], 1e-9)
    return 1 + np.cumprod(alpha, axis=-1)[..., :depth].sum(-1)


def compare(
    counts: np.ndarray, first: np.ndarray, depth: int | None = None
) -> dict[str, float]:
    """tau and its gain over `first`, each with a 95 % bootstrap over the same texts."""
    B = counts.shape[1]
    draws = np.random.default_rng(0).integers(0, B, (2000, B))
    of = lambda x: tau(x[:, draws].sum(2), depth)
    mine = of(counts)
    ends = lambda x: np.percentile(x, [2.5, 97.5])
    (low, high), (worst, best) = ends(mine), ends(mine - of(first))
    mean, other = tau(counts.sum(1), depth), tau(first.sum(1), depth)
    row = {"tau": mean, "low": low, "high": high, "gain": mean - other}
    row |= {"gain_low": worst, "gain_high": best}
    return {name: float(value) for name, value in row.items()}


def name_of(drafter: Any, settings: training.TrainConfig) -> str:
    """A folder's name: the method, and a digest of all that a training depends on."""
    about = [dataclasses.asdict(drafter), dataclasses.asdict(settings)]
    digest = hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()
    return f"{type(drafter).__name__.lower()}-{digest[:12]}"
