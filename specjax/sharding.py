"""Sharding as data: the axes of a mesh that each dimension of an array is split over.

    data    rows of a batch
    fsdp    rows of a batch, and parameters and optimiser state in storage
    tensor  heads, hidden units, experts and vocabulary

The same program runs on one device and on many: it names no device, `constrain` does
nothing outside `use`, and XLA's partitioner (GSPMD) puts the collectives in. A
dimension that its axes do not divide stays whole.
"""

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from specjax import distributed
from specjax.typing import Array, Params

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")
STACKED = "layers"  # a tree under this name has one more axis in front: the layers

Axis = str | tuple[str, ...] | None
_F, _T = "fsdp", "tensor"
# Axes of a parameter by its name, last dimensions last. Products contract the last one.
RULES: dict[str, Sequence[Axis]] = {
    "embed": (_T, _F),  # [V D]
    "head": (_T, _F),
    "vocab": (_T, _F),
    "clusters": (_T, None, _F),  # [C R D]
    "centroids": (_T, _F),
    "w1": (_T, _F),  # of DSpark [V r], of blockwise heads [G F D]
    "w2": (_T, _F),
    "predecessor": (_T, _F),
    "successor": (_T, _F),
    "u": (None, _T, _F),  # [G V D]
    "qkv": (_T, None, None, _F),  # [K G + 2 E D]
    "q": (_T, None, _F),  # [H E D]; of a Gemma layer [K G E D]
    "k": (_T, None, _F),
    "v": (_T, None, _F),
    "kv": (None, _T, None, _F),  # [2 K E D]
    "q_up": (_T, None, _F),  # [H E R]
    "kv_up": (_T, None, _F),
    "out": (_F, _T),  # [D H E]
    "gate_up": (None, _T, _F),  # [2 F D]
    "down": (_F, _T),  # [D F]
}
EXPERTS: dict[str, Sequence[Axis]] = {
    "gate_up": (_T, _F, None),  # [X D 2 F]
    "down": (_T, None, _F),  # [X F D]
}


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices along each axis."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self):
        for name, size in dataclasses.asdict(self).items():
            if size < 1:
                raise ValueError(f"a mesh needs {name} >= 1, got {size}.")

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """Reads "data=2,fsdp=4,tensor=4"; what is not named is 1."""
        sizes = {}
        for part in filter(None, text.split(",")):
            name, _, size = part.partition("=")
            if name not in AXES or not size.isdecimal() or name in sizes:
                raise ValueError(
                    f"mesh {text!r}: {part!r} is none of data=N, fsdp=N and tensor=N, "
                    "each once."
                )
            sizes[name] = int(size)
        return cls(**sizes)

    @property
    def size(self) -> int:
        return self.data * self.fsdp * self.tensor

    def make(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh over all devices, or over those given: exactly as many."""
        devices = jax.devices() if devices is None else devices
        if len(devices) != self.size:
            raise ValueError(
                f"a mesh of {self.data} x {self.fsdp} x {self.tensor} (data, fsdp, "
                f"tensor) needs {self.size} devices; there are {len(devices)}."
            )
        shape, kinds = (self.data, self.fsdp, self.tensor), (AxisType.Auto,) * 3
        return jax.make_mesh(shape, AXES, axis_types=kinds, devices=devices)


@contextlib.contextmanager
def use(mesh: Mesh | None) -> Iterator[None]:
    """`constrain` refers to this mesh; None leaves all as it is."""
    if mesh is None:
        yield
    else:
        with jax.set_mesh(mesh):
            yield


def in_use() -> bool:
    """Whether a mesh is in use."""
    return not jax.sharding.get_abstract_mesh().empty


def num_devices() -> int:
    """Of the mesh in use; 1 without one."""
    return jax.sharding.get_abstract_mesh().size if in_use() else 1


def fit(
    axes: Sequence[Axis], shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """`axes` of an array's dimensions, without those that do not divide them."""
    kept = []
    for axis, size in zip(axes, shape, strict=True):
        names = (axis,) if isinstance(axis, str) else axis or ()
        ways = math.prod(mesh.shape[name] for name in names)
        kept.append(axis if ways > 1 and size % ways == 0 else None)
    while kept and kept[-1] is None:  # as XLA writes it: else it would compile twice
        kept.pop()
    return PartitionSpec(*kept)


def constrain(x: Array, *axes: Axis) -> Array:
    """Asks for a split of x over the mesh in use; without one, x itself."""
    if not in_use():
        return x
    mesh = jax.sharding.get_abstract_mesh()
    axes = (*axes, *[None] * (x.ndim - len(axes)))
    return jax.lax.with_sharding_constraint(x, fit(axes, x.shape, mesh))


def row_axes(x: Any, batch_size: int) -> tuple[Axis, ...]:
    """Of an array kept a row: [B ..] over rows, a cache [B K S E] over heads too."""
    if x.ndim == 0 or x.shape[0] != batch_size:
        return (None,) * x.ndim
    heads = (_T, None, None) if x.ndim == 4 else (None,) * (x.ndim - 1)
    return ROWS, *heads


def constrain_rows(tree: Any, batch_size: int) -> Any:
    """`constrain` of every array of a cache or a drafter's state."""
    return jax.tree.map(lambda x: constrain(x, *row_axes(x, batch_size)), tree)


def axes_of(path: Sequence[str], shape: Sequence[int]) -> tuple[Axis, ...]:
    """Axes of a parameter by the names on its path; the optimiser's have the same.

    What no rule names is split over fsdp along its largest dimension.
    """
    lead = 1 if STACKED in path else 0
    inner, name = shape[lead:], path[-1] if path else ""
    rule = RULES.get(name)
    if name in EXPERTS and len(inner) == 3 and inner[0] != 2:
        rule = EXPERTS[name]
    if name == "q" and len(inner) == 4:
        rule = RULES["qkv"]
    if rule is None or len(rule) != len(inner):
        largest = int(np.argmax(inner)) if len(inner) > 1 else None
        rule = [_F if i == largest else None for i in range(len(inner))]
    return (*[None] * lead, *rule)


def _named(entry: Any) -> str:
    return str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", ""))))


def shardings(tree: Any, mesh: Mesh) -> Any:
    """A sharding for each leaf of parameters or of an optimiser's state."""

    def of(path, x):
        names = [_named(entry) for entry in path]
        return NamedSharding(mesh, fit(axes_of(names, x.shape), x.shape, mesh))

    return jax.tree_util.tree_map_with_path(of, tree)


def constrain_params(tree: Params) -> Params:
    """Keeps parameters where `shardings` puts them, inside a compiled step."""
    if not in_use():
        return tree
    of = lambda path, x: constrain(x, *axes_of([_named(e) for e in path], x.shape))
    return jax.tree_util.tree_map_with_path(of, tree)


def place(tree: Params, mesh: Mesh | None) -> Params:
    """Puts parameters on the mesh; each process holds the same and keeps its part."""
    if mesh is None:
        return tree

    def put(x, split):
        if isinstance(x, jax.Array) and x.sharding == split:
            return x
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, split, lambda i: host[i])

    return jax.tree.map(put, tree, shardings(tree, mesh))


def _at(path: Sequence[str], shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, fit(axes_of(path, shape), shape, mesh))


def put(path: Sequence[str], x: np.ndarray, dtype: Any, mesh: Mesh) -> Array:
    """One parameter on the mesh, cast part by part."""
    part = lambda index: x[index].astype(dtype)
    return jax.make_array_from_callback(x.shape, _at(path, x.shape, mesh), part)


def put_layers(
    path: Sequence[str],
    layers: Sequence[Callable[[], np.ndarray]],
    dtype: Any,
    mesh: Mesh | None,
) -> Array:
    """One parameter [L ..], read layer by layer; until it is placed the host holds it,
    or of many hosts each its part."""
    first = layers[0]()
    shape = (len(layers), *first.shape)
    split = None if mesh is None else _at(path, shape, mesh)
    spread: Any = split and split.addressable_devices_indices_map(shape).values()
    # By name, since several devices may hold the same part.
    held = {str(index): index[1:] for index in spread or [()]}
    part = lambda at: np.empty((len(layers), *first[at].shape), dtype)
    parts = {name: part(at) for name, at in held.items()}
    for i, read in enumerate([lambda: first, *layers[1:]]):
        x = read()
        for name, at in held.items():
            parts[name][i] = x[at]
    if split is None:
        whole = jnp.asarray(parts["()"])
    else:
        whole = jax.make_array_from_callback(shape, split, lambda i: parts[str(i)])
    return jax.block_until_ready(whole)  # then the host's copy is not needed


def rows(mesh: Mesh, shape: Sequence[int]) -> NamedSharding:
    """Of a batch [B T ..]: rows over data and fsdp, or the tokens of too few rows."""
    return NamedSharding(mesh, fit(_batch_axes(mesh, shape), shape, mesh))


def _batch_axes(mesh: Mesh | AbstractMesh, shape: Sequence[int]) -> list[Axis]:
    axes: list[Axis] = [None] * len(shape)
    ways = math.prod(mesh.shape[name] for name in ROWS)
    by_tokens = len(shape) > 1 and shape[0] % ways and shape[1] % ways == 0
    axes[1 if by_tokens else 0] = ROWS
    return axes


def constrain_batch(x: Array) -> Array:
    """Keeps a batch [B T ..] where `rows` puts it."""
    if not in_use():
        return x
    mesh = jax.sharding.get_abstract_mesh()
    return constrain(x, *_batch_axes(mesh, x.shape))


FEW = 1024  # ids, as of a round: less to move than a table


def look_up(table: Array, ids: Array) -> Array:
    """table[ids]. For many ids the table's width is gathered first, since they may be
    split over the same devices; its rows stay split."""
    return constrain(table, _T)[ids] if ids.size >= FEW else table[ids]


def sequence_ways(batch_size: int, length: int) -> int:
    """Parts that the mesh in use splits each text into: 1 unless rows are too few."""
    if not in_use():
        return 1
    mesh = jax.sharding.get_abstract_mesh()
    axes = _batch_axes(mesh, (batch_size, length))
    return math.prod(mesh.shape[name] for name in axes[1] or ())


def load(
    mesh: Mesh | None, shape: Sequence[int], read: Callable[[slice], np.ndarray]
) -> Array:
    """A batch [B ..] of which each process reads only its own rows, by slices."""
    if mesh is None:
        return jnp.asarray(read(slice(0, shape[0])))

    def part(index):
        return read(index[0])[(slice(None), *index[1:])]

    return jax.make_array_from_callback(tuple(shape), rows(mesh, shape), part)


def unstack(tree: Params) -> Params:
    """Stacked layers as `layer_0`, `layer_1`, ..; see `targets.scanned`."""
    alone = {name: x for name, x in tree.items() if name != STACKED}
    runs, i = tree.get(STACKED, {}), 0
    for n in sorted(runs, key=int):
        for at in range(len(jax.tree.leaves(runs[n])[0])):
            alone[f"layer_{i}"] = jax.tree.map(lambda x, at=at: x[at], runs[n])
            i += 1
    return alone


@jax.jit
def _mixed(tree: Params) -> Params:
    """Sums of hashed bits: integers, so equal in whatever order they are added."""

    def mix(x, seed):
        width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        bits = jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)
        place = jnp.full(x.shape, seed, jnp.uint32)
        for axis in range(x.ndim):
            iota = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
            place = (place ^ iota) * jnp.uint32(0x9E3779B1)
        for factor in (0x85EBCA6B, 0xC2B2AE35):
            bits = (bits ^ place) * jnp.uint32(factor)
            bits = bits ^ (bits >> jnp.uint32(15))
        return jnp.sum(bits, dtype=jnp.uint32)

    def both(path, x):
        of = lambda x: jnp.stack([mix(x, seed) for seed in (1, 2)])
        return jax.vmap(of)(x) if STACKED in map(_named, path) else of(x)

    return jax.tree_util.tree_map_with_path(both, tree)


def fingerprint(tree: Params) -> str:
    """64 bits for each array by its content, wherever its parts lie, as one hash.

    Layers that are stacked have the one that they have one by one.
    """
    mixed = jax.tree.map(distributed.fetch, _mixed(tree))
    every = np.array(jax.tree.leaves(unstack(mixed)))
    return hashlib.sha256(every.tobytes()).hexdigest()
