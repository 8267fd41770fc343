"""`@pytree`: the only record decorator, a frozen dataclass that JAX can walk."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(**kwargs: Any) -> Any:
    """Marks a field as part of the tree's structure: hashable, never traced."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def pytree(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen dataclass and registers it as a pytree with named leaves.

    JAX rebuilds records around placeholders that are no arrays, so unflattening goes
    past `__init__`: shapes are checked when we build a record, not when JAX does.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    names = [f.name for f in fields if not f.metadata.get("static")]
    fixed = [f.name for f in fields if f.metadata.get("static")]

    def flatten(record):
        children = [(jax.tree_util.GetAttrKey(n), getattr(record, n)) for n in names]
        return children, tuple(getattr(record, n) for n in fixed)

    def unflatten(aux, children):
        record = object.__new__(cls)
        for name, value in zip(names, children, strict=True):
            object.__setattr__(record, name, value)
        for name, value in zip(fixed, aux, strict=True):
            object.__setattr__(record, name, value)
        return record

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls
