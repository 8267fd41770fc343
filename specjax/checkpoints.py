"""Drafters on disk: a folder with `drafter.json` and `drafter.safetensors`.

Written beside and renamed, so that a reader never meets half a drafter.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import types
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import drafters, joint, targets
from specjax.drafters import base, gemma4_mtp
from specjax.drafters.gemma4_mtp import Gemma4MTP
from specjax.drafters.mtp import MTP
from specjax.mla import DeepSeekConfig
from specjax.targets import convert
from specjax.targets.tokenizer import read_json
from specjax.transformer import Shared, TransformerConfig
from specjax.typing import Params

ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")


def flatten(params: Params) -> dict[str, np.ndarray]:
    """Arrays by their path, joined with dots."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {
        ".".join(str(getattr(k, "key", k)) for k in path): np.asarray(leaf)
        for path, leaf in leaves
    }


def record_from(cls: Any, values: dict[str, Any]) -> Any:
    """Builds a frozen dataclass, nested ones included, from its JSON form.

    Fields that `cls` lacks may be those of a subclass, which is then built.
    """
    fields = lambda c: {f.name for f in dataclasses.fields(c)}
    kinds = (cls, *cls.__subclasses__())
    cls = next((c for c in kinds if set(values) <= fields(c)), cls)
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(values) - fields(cls))
    if unknown:
        raise ValueError(
            f"{cls.__name__} has no field {', '.join(unknown)}; its fields are "
            f"{', '.join(sorted(fields(cls)))}."
        )

    def convert(hint, value):
        if dataclasses.is_dataclass(hint):
            return record_from(hint, value)
        origin = typing.get_origin(hint)
        if origin is tuple and value is not None:
            return tuple(value)
        if origin in (types.UnionType, typing.Union):
            records = filter(dataclasses.is_dataclass, typing.get_args(hint))
            if isinstance(value, dict) and (record := next(records, None)):
                return record_from(record, value)
            return tuple(value) if isinstance(value, list) else value
        return value

    made = {k: convert(hints[k], v) for k, v in values.items()}
    for name, value in made.items():
        if not fits(value, hints[name]):
            raise TypeError(f"{cls.__name__} has no {name}={value!r}")
    return cls(**made)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value read from JSON may stand in a field of a type."""
    inner = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if typing.get_origin(kind) is typing.Literal:
        return value in inner
    if typing.get_origin(kind) is tuple:
        return type(value) is tuple and all(fits(x, inner[0]) for x in value)
    if kind is float:
        return type(value) in (int, float)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return isinstance(value, kind)  # or of a subclass
    return type(value) is kind


def save(
    folder: str | pathlib.Path,
    name: str,
    drafter: Any,
    params: Params,
    *,
    dtype: Any = jnp.bfloat16,
    about: dict[str, Any] | None = None,
) -> None:
    """Writes a drafter; `about` is kept beside it (target, data, steps)."""
    from safetensors.numpy import save_file

    folder = pathlib.Path(folder)
    beside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    fields = dataclasses.asdict(drafter)
    fields.pop("topology", None)  # a choice of the run, not of the weights
    config = {"name": name, "config": fields, "about": about or {}}
    (beside / "drafter.json").write_text(json.dumps(config, indent=2) + "\n")
    # A router chooses by small differences: its bias stays in float32, as in files.
    kept = lambda k, v: v if k.endswith("router_bias") else v.astype(dtype)
    tensors = {k: kept(k, v) for k, v in flatten(params).items()}
    save_file(tensors, str(beside / "drafter.safetensors"))
    (beside / "drafter.safetensors").chmod(0o644)  # the library writes 0600
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)  # what a killed save may have left
    if folder.exists():
        os.replace(folder, old)
    os.replace(beside, folder)
    shutil.rmtree(old, ignore_errors=True)


def load(
    folder: str | pathlib.Path, shared: Shared, dtype: Any = jnp.float32
) -> tuple[str, Any, Params]:
    """Reads a drafter for a target: its registry name, the drafter, its parameters."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    folder = pathlib.Path(folder)
    files = (folder / "drafter.json", folder / "drafter.safetensors")
    if not all(file.is_file() for file in files):
        raise FileNotFoundError(
            f"no drafter in {folder}: it needs drafter.json and drafter.safetensors, "
            "as `specjax train` writes them, or a published assistant's config.json "
            "and weights."
        )
    try:
        stored = json.loads((folder / "drafter.json").read_text())
        name, config = stored["name"], stored["config"]
        tensors = load_file(str(folder / "drafter.safetensors"))
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(f"the drafter in {folder} is damaged: {error}.") from None
    cls = drafters.get(name)
    try:
        drafter = record_from(cls, config)
    except TypeError as error:  # a field is absent or of another type
        raise ValueError(f"the drafter in {folder} is damaged: {error}.") from None
    moved, together = {}, base.joint(drafter)
    if together is not None:
        try:
            tensors, moved = joint.part(tensors, together.rank)
        except ValueError as error:
            raise ValueError(f"the drafter in {folder} is damaged: {error}.") from None
    want = jax.eval_shape(lambda s: drafter.init(jax.random.key(0), s), shared)
    leaves, structure = jax.tree_util.tree_flatten_with_path(want)
    paths = [".".join(str(getattr(k, "key", k)) for k in path) for path, _ in leaves]
    missing, extra = set(paths) - set(tensors), set(tensors) - set(paths)
    wrong = [
        f"{p} {tensors[p].shape}, not {leaf.shape}"
        for p, (_, leaf) in zip(paths, leaves, strict=True)
        if p in tensors and tensors[p].shape != leaf.shape
    ]
    if missing or extra or wrong:
        raise ValueError(
            f"the drafter in {folder} does not fit this target: missing "
            f"{sorted(missing)}, not used {sorted(extra)}, other shapes {wrong}."
        )
    broken = [p for p in paths if not np.all(np.isfinite(np.float32(tensors[p])))]
    if broken:
        raise ValueError(
            f"the drafter in {folder} has weights that are no finite numbers in "
            f"{', '.join(broken)}; train it again at a lower rate."
        )
    arrays = [jnp.asarray(tensors[p], dtype) for p in paths]
    params = jax.tree_util.tree_unflatten(structure, arrays)
    return name, drafter, params | jax.tree.map(lambda x: jnp.asarray(x, dtype), moved)


def inside(
    folder: str | pathlib.Path, config: TransformerConfig, dtype: Any = jnp.float32
) -> tuple[str, MTP, Params] | None:
    """The MTP modules that a target's own folder holds; None if there are none."""
    folder = pathlib.Path(folder)
    if not isinstance(config, DeepSeekConfig) or not folder.is_dir():
        return None
    params = convert.module_params(config, targets.read_tensors(folder), dtype)
    if not params:
        return None
    return "mtp", MTP.for_target(config, None, num_modules=len(params)), params


def assistant(
    folder: str | pathlib.Path, config: TransformerConfig, dtype: Any = jnp.float32
) -> tuple[str, Gemma4MTP, Params]:
    """The MTP drafter of a Gemma 4 target from the folder it is published as."""
    folder = pathlib.Path(folder)
    stored = read_json(folder / "config.json")
    if stored.get("model_type") not in ASSISTANTS:
        raise ValueError(
            f"{folder} holds a model of type {stored.get('model_type')!r}, no drafter; "
            f"of Hugging Face folders {', '.join(ASSISTANTS)} are read as drafters."
        )
    fields, params = convert.assistant(stored, targets.read_tensors(folder), dtype)
    drafter = dataclasses.replace(Gemma4MTP.for_target(config, None), **fields)
    drafter.check_target(config.vocab_size, config.width)
    if drafter.order:
        params = gemma4_mtp.clustered(drafter, params)
    return "gemma4_mtp", drafter, params


def shipped(target: str) -> dict[str, pathlib.Path]:
    """Folders of the drafters that come with the package for a named target."""
    folder = pathlib.Path(__file__).parent / "data" / "drafters" / target
    found = {p.parent.name: p.parent for p in folder.glob("*/drafter.json")}
    return {n: found[n] for n in drafters.REGISTRY if n in found}
