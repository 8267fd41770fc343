"""What the frozen target says about training texts: on the fly, or kept on disk.

Features pay on disk when several epochs make the target's pass the larger cost.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from specjax import sharding
from specjax.corpus import Texts
from specjax.drafters.base import Batch
from specjax.targets.base import Pretrained, Target


def features(target: Target, taps, params, tokens, mask, *, kv_layers=()) -> Batch:
    """Runs the frozen target over a batch."""
    (B, T), cache = tokens.shape, None
    if kv_layers:
        cache = target.init_cache(B, max(T, 2), params["embed"].dtype)
    out = target(params, tokens, cache, taps=taps)
    of = lambda i: tuple(x[:, :, :T] for x in (out.cache.k[i], out.cache.v[i]))
    return jax.lax.stop_gradient(
        Batch(tokens, mask, out.features, out.hidden, tuple(map(of, kv_layers)))
    )


@dataclasses.dataclass(frozen=True)
class FeatureCache:
    """Features of all texts on disk, bfloat16: the taps and the last state."""

    features: np.ndarray  # [X T MD] as uint16, a memory map
    hidden: np.ndarray  # [X T D]
    kv: tuple[tuple[np.ndarray, np.ndarray], ...] = ()  # [X K T E] of each `kv_layers`

    def batch(self, texts: Texts, index: np.ndarray, mesh: Mesh | None = None) -> Batch:
        """The texts of these numbers; a process reads only the rows of its devices."""

        def read(x, wide=lambda x: x):
            shape = len(index), *x.shape[1:]
            return sharding.load(mesh, shape, lambda part: wide(x[index[part]]))

        wide = lambda x: x.view(ml_dtypes.bfloat16).astype(np.float32)
        return Batch(
            tokens=read(texts.tokens),
            mask=read(texts.mask),
            features=read(self.features, wide),
            hidden=read(self.hidden, wide),
            kv=tuple((read(k, wide), read(v, wide)) for k, v in self.kv),
        )


def digest(tree: Any) -> str:
    """SHA-256 of all numbers in a tree."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def cache_features(
    folder: str | pathlib.Path,
    pretrained: Pretrained,
    taps: tuple[int, ...],
    texts: Texts,
    batch_size: int = 8,
    progress: Callable[[int], None] = lambda done: None,
    kv_layers: tuple[int, ...] = (),
) -> FeatureCache:
    """Opens the cache of exactly these texts, taps and target, or builds it."""
    folder = pathlib.Path(folder)
    X, T = texts.tokens.shape
    D = pretrained.target.config.width
    manifest = {
        "target": pretrained.name,
        "weights": sharding.fingerprint(
            pretrained.params
        ),  # a name may outlive its weights
        "taps": list(taps),
        "texts": digest(texts.tokens),
        "shape": [X, T, D],
    } | ({"kv_layers": list(kv_layers)} if kv_layers else {})
    if folder.exists():
        found = folder / "manifest.json"
        if not found.is_file() or found.read_text() != json.dumps(manifest):
            raise ValueError(
                f"{folder} is no feature cache of these texts and taps {taps} for "
                f"{pretrained.name}; name a new folder or delete it."
            )
        return _open_cache(folder, X, T, D, len(taps), len(kv_layers))

    beside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    run = jax.jit(
        functools.partial(features, pretrained.target, taps, kv_layers=kv_layers)
    )
    files: dict[str, np.memmap] = {}
    for start in range(0, X, batch_size):
        rows = np.minimum(np.arange(start, start + batch_size), X - 1)
        batch = run(pretrained.params, texts.tokens[rows], texts.mask[rows])
        for name, array in _arrays(batch.features, batch.hidden, batch.kv).items():
            narrow = np.asarray(array).astype(ml_dtypes.bfloat16).view(np.uint16)
            if name not in files:
                files[name] = np.lib.format.open_memmap(
                    beside / f"{name}.npy", "w+", np.uint16, (X, *narrow.shape[1:])
                )
            files[name][rows] = narrow
        progress(int(rows[-1]) + 1)
    for file in files.values():
        file.flush()
    (beside / "manifest.json").write_text(json.dumps(manifest))
    os.replace(beside, folder)
    return _open_cache(folder, X, T, D, len(taps), len(kv_layers))


def _arrays(features, hidden, kv) -> dict[str, Any]:
    """Names of a cache's files, and what they hold."""
    named = {"features": features, "hidden": hidden}
    for i, (k, v) in enumerate(kv):
        named |= {f"keys_{i}": k, f"values_{i}": v}
    return named


def _open_cache(folder, X, T, D, M, num_kv) -> FeatureCache:
    open_ = lambda name: np.load(folder / f"{name}.npy", mmap_mode="r")
    try:
        stored, hidden = open_("features"), open_("hidden")
        whole = stored.shape == (X, T, M * D) and hidden.shape == (X, T, D)
        kv = tuple((open_(f"keys_{i}"), open_(f"values_{i}")) for i in range(num_kv))
        whole = whole and all(x.shape[::2] == (X, T) for pair in kv for x in pair)
    except (ValueError, EOFError, FileNotFoundError):  # cut short, empty or gone
        raise _damaged(folder) from None
    if not whole:
        raise _damaged(folder)
    return FeatureCache(stored, hidden, kv)


def _damaged(folder) -> ValueError:
    return ValueError(f"the feature cache in {folder} is damaged; delete it.")
