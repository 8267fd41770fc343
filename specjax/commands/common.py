"""What the commands share."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import sys
from typing import Any


def terminal(stderr: bool = False, colour: bool = False):
    """The console; `colour` also through a pipe."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() else 150
    force = True if colour else None
    return Console(stderr=stderr, width=wide, highlight=False, force_terminal=force)


def parse_fields(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Parses name=value; values are JSON where they can be, else text."""
    fields = {}
    for pair in pairs:
        name, found, value = pair.partition("=")
        if not found or not name.isidentifier():
            raise ValueError(f"a field is name=value, got {pair!r}.")
        if name in fields:
            raise ValueError(f"--field {pair}: {name} is given twice; leave out one.")
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
        fields[name] = tuple(value) if isinstance(value, list) else value
    return fields


def check_fields(drafter: str, cls: type, fields: dict[str, Any]) -> None:
    """Refuses fields that a drafter has not, and values that are not of their type."""
    from specjax.checkpoints import fits

    known = {f.name: f.type for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    known.pop("topology", None)  # of a run, not of a training
    for name, value in fields.items():
        if name not in known:
            raise ValueError(
                f"{drafter} has no field {name}; it has {', '.join(sorted(known))}."
            )
        if not fits(value, known[name]):
            kind = known[name]
            kind = kind.__name__ if isinstance(kind, type) else str(kind)
            kind = kind.replace("typing.", "")
            raise ValueError(
                f"--field {name}={value}: {drafter} needs {kind} there; lists are "
                "written [1,2]."
            )


def names_in(flag: str, text: str) -> list[str]:
    """The names of a comma-separated list, each given once."""
    names = [name.strip() for name in text.split(",")]
    if "" in names:
        raise ValueError(f"{flag} {text!r} has an empty name; write it as a,b,c.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{flag} {text!r} names {', '.join(twice)} twice.")
    return names


def check_range(
    flag: str, value: int | float | None, low: int, high: int | None = None
):
    """Refuses a number that is too small or too large."""
    if value is None or (low <= value and (high is None or value <= high)):
        return
    limits = f"{low} or more" if high is None else f"{low} to {high}"
    raise ValueError(f"{flag} {value} is out of range; give {limits}.")


def check_seed(seed: int) -> None:
    """Refuses what JAX would not take or would cut to 32 bits."""
    check_range("--seed", seed, 0, 2**32 - 1)


def check_rule(rule: str | None) -> None:
    """Refuses an unknown rule and says which are known."""
    from specjax import verify

    if rule is not None:
        verify.get(rule)


def drafter_folder(spec: str, target_name: str) -> pathlib.Path | None:
    """The folder of a shipped drafter or of one that is named by it; None: neither."""
    from specjax import checkpoints

    shipped = checkpoints.shipped(target_name)
    if spec in shipped:
        return shipped[spec]
    if os.sep not in spec and not pathlib.Path(spec).is_dir():
        return None
    folder = pathlib.Path(spec)
    inside = folder / "drafter"  # what `specjax train --out` makes
    if not (folder / "drafter.json").is_file() and inside.is_dir():
        return inside
    return folder


def load_drafter(spec: str, target_name: str, pretrained: Any):
    """A shipped drafter by its name, any by its folder, `mtp` of the target's own."""
    from specjax import checkpoints, drafters, joint

    folder = drafter_folder(spec, target_name)
    if folder is None:
        shipped = checkpoints.shipped(target_name)
        config, dtype = pretrained.target.config, pretrained.dtype
        if spec == "mtp" and (own := checkpoints.inside(target_name, config, dtype)):
            return own
        drafters.get(spec)  # an unknown name says which are known
        raise FileNotFoundError(
            f"no trained {spec} for target {target_name!r} is shipped "
            f"(shipped: {', '.join(shipped) or 'none'}). Train one with `specjax train "
            f"{spec} --target {target_name}` and give its folder."
        )
    if (folder / "config.json").is_file() and not (folder / "drafter.json").is_file():
        config = pretrained.target.config
        return checkpoints.assistant(folder, config, pretrained.dtype)
    shared = pretrained.target.shared(pretrained.params)
    name, drafter, params = checkpoints.load(folder, shared, pretrained.dtype)
    joint.check(pretrained, params)
    return name, drafter, params


def with_gamma(drafter: Any, gamma: int | None) -> Any:
    """Drafts another number of tokens; the drafter refuses what its weights cannot."""
    if gamma is None or gamma == drafter.gamma:
        return drafter
    return dataclasses.replace(drafter, gamma=gamma)


def with_tree(drafter: Any, spec: str | None) -> Any:
    """Drafts a tree: of a `Tree.save` file, or dynamic:NODES:DEPTH[:WIDTH]."""
    from specjax.tree import DynamicTree, Tree

    if spec is None:
        return drafter
    if not any(f.name == "topology" for f in dataclasses.fields(drafter)):
        raise ValueError(
            f"{type(drafter).__name__} drafts chains only; leave out --tree."
        )
    if spec.lower().partition(":")[0] == "dynamic":
        if not re.fullmatch(r"dynamic(:\d+){2,3}", spec):
            raise ValueError(
                f"--tree {spec}: a dynamic tree is dynamic:NODES:DEPTH[:WIDTH] in "
                "whole numbers, such as dynamic:16:4."
            )
        tree = DynamicTree(*map(int, spec.split(":")[1:]))
    elif not pathlib.Path(spec).is_file():
        raise FileNotFoundError(
            f"--tree {spec!r} is no file; give one that `specjax tree` wrote, or "
            "dynamic:NODES:DEPTH[:WIDTH], such as dynamic:16:4."
        )
    else:
        tree = Tree.load(spec)
    return dataclasses.replace(drafter, topology=tree)


def _check_permission(flag: str, path: pathlib.Path | None, folder: pathlib.Path):
    if not os.access(folder, os.W_OK):
        raise PermissionError(
            f"{flag} {path}: nothing may be written in {folder}; choose another place."
        )


def check_folder(flag: str, path: pathlib.Path | None) -> None:
    """Refuses a folder that cannot be made, before the work and not after it."""
    for place in (path, *path.absolute().parents) if path else ():
        if place.exists() and not place.is_dir():
            raise NotADirectoryError(
                f"{flag} {path} needs a folder; {place} is a file."
            )
        if place.is_dir():
            _check_permission(flag, path, place)
            return


def check_writable(path: pathlib.Path | None, flag: str = "--json") -> None:
    """Refuses a file that cannot be written, before the work and not after it."""
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; {flag} needs a file.")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"no folder {path.parent} to write {path.name} in; create it first."
        )
    _check_permission(flag, path, path.parent)


def versions() -> dict[str, str]:
    names = ("specjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    found = {n: importlib.metadata.version(n) for n in names}
    return found | {"python": platform.python_version()}


def device() -> str:
    import jax

    device = jax.devices()[0]
    kind = device.device_kind if device.platform != "cpu" else platform.machine()
    return f"{jax.device_count()} x {device.platform} ({kind}), {os.cpu_count()} cores"
