"""What the frozen target says about training texts: on the fly, or kept on disk.

Features pay on disk when several epochs make the target's pass the larger cost. A cache
is a folder:

    manifest.json   what it is of, and how many texts a shard has
    00003.npy       one shard, a row a text: the taps and the last state
    00003.sha256    its checksum, in the form that `sha256sum -c` reads

Shards are written beside and renamed, so a build that was killed goes on at the first
that is missing. Their content depends on nothing but the manifest. Numbers are
bfloat16, or int8 with a scale s for each token and tap x [D]:

    s = max|x| / 127,    q = round(x / s),    x' = s q,    so |x' - x| <= s / 2.

Logits of the target are not kept: its frozen head makes them anew of the last state.
"""

import dataclasses
import functools
import hashlib
import io
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from specjax import distributed, sharding
from specjax.corpus import Texts
from specjax.drafters.base import Batch
from specjax.targets.base import Pretrained, Target
from specjax.typing import Array, Float, Int, Params

Dtype = Literal["bfloat16", "int8"]
SHARD_BYTES = 2**28  # no shard is larger unless one batch is


def features(target: Target, taps, params, tokens, mask, *, kv_layers=()) -> Batch:
    """Runs the frozen target over a batch."""
    (B, T), cache = tokens.shape, None
    if kv_layers:
        cache = target.init_cache(B, max(T, 2), params["embed"].dtype)
    out = target(params, tokens, cache, taps=taps)
    of = lambda i: tuple(x[:, :, :T] for x in (out.cache.k[i], out.cache.v[i]))
    own, last = map(sharding.constrain_batch, (out.features, out.hidden))
    batch = Batch(tokens, mask, own, last, tuple(map(of, kv_layers)))
    return jax.lax.stop_gradient(batch)


def quantise(x: Float[Array, "*B D"]) -> tuple[Int[Array, "*B D"], Float[Array, "*B"]]:
    """q and s of the module's equation; of zeros s is 0."""
    scale = jnp.max(jnp.abs(x), axis=-1, initial=0.0) / 127
    divisor = jnp.where(scale > 0, scale, 1)[..., None]
    return jnp.round(x / divisor).astype(jnp.int8), scale


def _narrow(batch: Batch, M: int, dtype: Dtype) -> dict[str, Array]:
    """The fields of a shard's rows by name."""
    named = {"features": batch.features, "hidden": batch.hidden}
    for i, (k, v) in enumerate(batch.kv):
        named |= {f"keys_{i}": k, f"values_{i}": v}
    if dtype == "bfloat16":
        bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint16)
        return {name: bits(x.astype(jnp.bfloat16)) for name, x in named.items()}
    fields = {}
    for name, x in named.items():
        scales = M if name == "features" else 1
        parts = *x.shape[:-1], scales, x.shape[-1] // max(scales, 1)
        q, scale = quantise(x.astype(jnp.float32).reshape(parts))
        fields |= {name: q.reshape(x.shape), f"{name}_scale": scale}
    return fields


@dataclasses.dataclass(frozen=True)
class FeatureCache:
    """Features of all texts in the shards of a folder."""

    folder: pathlib.Path
    row: np.dtype  # fields of a text
    shard_texts: int

    @property
    def dtype(self) -> Dtype:
        return "bfloat16" if self.row["hidden"].base == np.uint16 else "int8"

    def rows(self, index: np.ndarray) -> dict[str, np.ndarray]:
        """The stored fields of these texts, [X ..] each; a shard is opened once."""
        kinds = {name: self.row[name] for name in self.row.names or ()}
        found = {n: np.empty((len(index), *k.shape), k.base) for n, k in kinds.items()}
        for shard in np.unique(index // self.shard_texts):
            stored = np.load(_path(self.folder, int(shard)), mmap_mode="r")
            for place in np.flatnonzero(index // self.shard_texts == shard):
                for name, array in found.items():
                    array[place] = stored[name][index[place] % self.shard_texts]
        return found

    def batch(self, texts: Texts, index: np.ndarray, mesh: Mesh | None = None) -> Batch:
        """The texts of these numbers; a process reads only the rows of its devices."""
        stored = functools.cache(lambda start, stop: self.rows(index[start:stop]))

        def load(shape, of):
            return sharding.load(mesh, (len(index), *shape), of)

        def read(name):
            of = lambda part: _wide(stored(part.start, part.stop), name)
            return load(self.row[name].shape, of)

        num_kv = sum(
            name.removeprefix("keys_").isdecimal() for name in self.row.names or ()
        )
        return Batch(
            tokens=load(texts.tokens.shape[1:], lambda part: texts.tokens[index[part]]),
            mask=load(texts.mask.shape[1:], lambda part: texts.mask[index[part]]),
            features=read("features"),
            hidden=read("hidden"),
            kv=tuple((read(f"keys_{i}"), read(f"values_{i}")) for i in range(num_kv)),
        )


def _wide(rows: dict[str, np.ndarray], name: str) -> np.ndarray:
    """A field in float32."""
    stored = rows[name]
    if stored.dtype == np.uint16:
        return stored.view(ml_dtypes.bfloat16).astype(np.float32)
    scale = rows[f"{name}_scale"]  # one for each D numbers in turn
    each = stored.shape[-1] // max(scale.shape[-1], 1)
    return stored * np.repeat(scale, each, axis=-1)


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
    dtype: Dtype = "bfloat16",
    shard_bytes: int = SHARD_BYTES,
) -> FeatureCache:
    """Opens the cache of exactly these texts, taps and target; builds what is missing.

    Every shard is read once and checked. In a run of several processes, which all see
    the folder, each writes and checks its share of the shards; it computes those alone
    unless the target's weights are split over processes.

    Args:
      batch_size: texts a pass of the target; a cache that was begun keeps its own, as
        it does `shard_bytes`.
      progress: called with the number of the last text done, + 1.
    """
    folder, (X, T) = pathlib.Path(folder), texts.tokens.shape

    def run(params, tokens, mask):
        of = functools.partial(features, pretrained.target, taps, kv_layers=kv_layers)
        return _narrow(of(params, tokens, mask), len(taps), dtype)

    of_one = jax.eval_shape(run, pretrained.params, texts.tokens[:1], texts.mask[:1])
    row = np.dtype([(name, x.dtype, x.shape[1:]) for name, x in of_one.items()])
    about = {
        "target": pretrained.name,
        "weights": sharding.fingerprint(pretrained.params),  # a name may outlive them
        "taps": list(taps),
        "texts": digest(texts.tokens),
        "shape": [X, T],
        "fields": {n: [str(x.dtype), *x.shape[1:]] for n, x in of_one.items()},
        "kv_layers": list(kv_layers),
    }
    batches = max(1, shard_bytes // (row.itemsize * batch_size))
    begun = about | {"shard_texts": batches * batch_size, "batch_size": batch_size}
    if distributed.is_first():
        _begin(folder, begun)
    distributed.wait("feature cache")
    manifest = _manifest(folder, about)
    S, B = manifest["shard_texts"], manifest["batch_size"]
    shards = range(-(-X // S))
    mine = shards[jax.process_index() :: jax.process_count()]
    # What the first process sees: all have to run the same batches of a split target.
    missing = [i for i in shards if not distributed.agree(_path(folder, i).exists())]
    sizes = (min(S, X - i * S) for i in missing if i in mine)
    _check_space(folder, row.itemsize * sum(sizes))
    compute = functools.partial(jax.jit(run), pretrained.params)
    for shard in missing:
        first, end = shard * S, min(X, (shard + 1) * S)
        blocks = _blocks(compute, texts, row, range(first, end, B), end, progress)
        if shard in mine:
            _write(_path(folder, shard), row, end - first, blocks)
        elif _split(pretrained.params):
            for _ in blocks:
                pass
    _check_shards([_path(folder, shard) for shard in mine])
    return FeatureCache(folder, row, S)


def _blocks(compute, texts, row, starts: range, end, progress) -> Iterator[np.ndarray]:
    """Rows of a shard, a batch at a time; the last one is filled with its last text."""
    for start in starts:
        index = np.minimum(np.arange(start, start + starts.step), end - 1)
        found = compute(texts.tokens[index], texts.mask[index])
        block = np.empty(min(starts.step, end - start), row)
        for name, x in found.items():
            block[name] = distributed.fetch(x)[: len(block)]
        yield block
        progress(start + len(block))


def _split(params: Params) -> bool:
    """Whether no process has all weights, so that all have to run the target."""
    arrays = (x for x in jax.tree.leaves(params) if isinstance(x, jax.Array))
    return not all(x.is_fully_addressable for x in arrays)


def _path(folder: pathlib.Path, shard: int) -> pathlib.Path:
    return folder / f"{shard:05}.npy"


def _begin(folder: pathlib.Path, manifest: dict[str, Any]) -> None:
    """Makes the folder unless it is there."""
    if folder.is_dir() and any(folder.iterdir()):
        return
    beside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    (beside / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    os.replace(beside, folder)


def _manifest(folder: pathlib.Path, about: dict[str, Any]) -> dict[str, Any]:
    """What the folder says of itself, if it is the cache that is asked for."""
    try:
        found = json.loads((folder / "manifest.json").read_text())
        differ = [name for name, value in about.items() if found.get(name) != value]
        differ += [n for n in ("shard_texts", "batch_size") if not found.get(n)]
    except (OSError, ValueError, AttributeError):
        differ = ["no manifest that can be read"]
    hint = ""
    if differ == ["fields"]:
        kinds = [
            "int8" if any(n.endswith("_scale") for n in each["fields"]) else "bfloat16"
            for each in (found, about)
        ]
        if kinds[0] != kinds[1]:
            hint = f" Its numbers are {kinds[0]}: --feature-dtype {kinds[0]} reads it."
    if differ:
        raise ValueError(
            f"{folder} is no feature cache of these texts, taps and target (it differs "
            f"in: {', '.join(differ)}); name a new folder or delete it.{hint}"
        )
    return found


def _check_space(folder: pathlib.Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"the features need {needed / 1e6:.1f} MB more in {folder}, where "
            f"{free / 1e6:.1f} MB are free; free some, or take fewer texts or int8."
        )


def _write(
    path: pathlib.Path, row: np.dtype, count: int, blocks: Iterable[np.ndarray]
) -> None:
    """Writes a shard and its checksum: first the checksum, for a shard never lacks it.

    By `write`, not through a memory map, where a full disk would be a fatal signal.
    """
    descr = np.lib.format.dtype_to_descr(row)
    header, found = io.BytesIO(), hashlib.sha256()
    np.lib.format.write_array_header_1_0(
        header, {"descr": descr, "fortran_order": False, "shape": (count,)}
    )
    beside, sums = path.with_suffix(".partial"), path.with_suffix(".sha256")

    def parts() -> Iterator[bytes]:
        yield header.getvalue()
        yield from (block.tobytes() for block in blocks)

    try:
        with beside.open("wb") as file:
            for part in parts():
                file.write(part)
                found.update(part)
            file.flush()
            os.fsync(file.fileno())
        sums.write_text(f"{found.hexdigest()}  {path.name}\n")
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(
            f"cannot write {path} ({error.strerror}); free space and run again: the "
            "shards before it stay."
        ) from None


def _check_shards(paths: list[pathlib.Path]) -> None:
    """Compares each shard with its checksum."""

    def whole(path: pathlib.Path) -> bool:
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            return path.with_suffix(".sha256").read_text().split() == [found, path.name]
        except (OSError, ValueError):
            return False

    damaged = [str(path) for path in paths if not whole(path)]
    if distributed.everywhere(not damaged):
        return
    if not damaged:
        raise ValueError("another process found a damaged shard; its message names it.")
    raise ValueError(
        f"the feature cache is damaged, checksums differ: {', '.join(damaged)}. Delete "
        "what is named and run again: only that is made anew."
    )
