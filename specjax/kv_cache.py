"""A fixed-size key/value cache: write a block, commit an accepted path, rewind.

A slot exists for a row when its index is below that row's `length`; slots past it hold
whatever an earlier round left there; the attention mask hides them, none is cleared.
The cache is a tuple over layers, each `[B K S E]`: on the CPU this layout reads fastest
and is updated in place inside a loop that carries it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.pytree import pytree
from specjax.typing import Array, Float, Int


@pytree
class KVCache:
    # Keys after rotary embedding, one per layer; K and E may differ between layers.
    k: tuple[Float[Array, "B _K S _E"], ...]
    v: tuple[Float[Array, "B _K S _E"], ...]  # no width where the values lie within k
    length: Int[Array, "B"]  # slots that exist, = position of the next token

    @property
    def size(self) -> int:
        """Slots per row, S."""
        return self.k[0].shape[2]


def init(
    num_layers: int,
    batch_size: int,
    num_kv_heads: int,
    size: int,
    head_width: int,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> KVCache:
    """Builds an empty cache; its leaves are distinct buffers, so it can be donated."""
    shape = (batch_size, num_kv_heads, size, head_width)
    return KVCache(
        k=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        v=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        length=jnp.zeros((batch_size,), jnp.int32),
    )


def write(
    slots: Float[Array, "B K S E"], new: Float[Array, "B K T E"], start: Int[Array, "B"]
) -> Float[Array, "B K S E"]:
    """Writes T new entries of each row at that row's `start`.

    The caller guarantees start + max(T, 2) <= S: XLA would move a block that does not
    fit. A single entry is written with a zero behind it, in a slot that does not exist
    yet: XLA's CPU compiler copies the whole cache around an update of one slot (240
    copies a pass at SmolLM2's shape, none around an update of two).
    """
    new = new.astype(slots.dtype)
    if new.shape[2] == 1:
        new = jnp.pad(new, ((0, 0), (0, 0), (0, 1), (0, 0)))
    if (
        slots.shape[0] == 1
    ):  # stays in place inside a loop, where the vmapped form copies
        return jax.lax.dynamic_update_slice(slots, new, (0, 0, start[0], 0))
    update = jax.vmap(lambda s, n, i: jax.lax.dynamic_update_slice(s, n, (0, i, 0)))
    return update(slots, new, start)


def commit(
    cache: KVCache, path: Int[Array, "B P"] | None, num_committed: Int[Array, "B"]
) -> KVCache:
    """Keeps the accepted path of the block at `length` and makes it permanent.

    `path[b, i]` is the node whose entry becomes slot length + i; None says the nodes
    are already in order (a chain): nothing is moved. Keys were rotated by depth, and
    slot length + i has depth i, so no key is rotated again.
    """
    length = cache.length + num_committed
    if path is None:
        return dataclasses.replace(cache, length=length)

    def compact(slots):
        source = (cache.length[:, None] + path)[:, None, :, None]
        return write(slots, jnp.take_along_axis(slots, source, axis=2), cache.length)

    return KVCache(
        k=tuple(compact(k) for k in cache.k),
        v=tuple(compact(v) for v in cache.v),
        length=length,
    )


def rewind(cache: KVCache, length: Int[Array, "B"]) -> KVCache:
    """Forgets every slot at or past `length`."""
    return dataclasses.replace(cache, length=jnp.minimum(cache.length, length))
