"""What tree attention means."""

import jax.numpy as jnp
from einops import rearrange

from specjax.typing import Array, Bool, Int


def visible(
    length: Int[Array, "B"],
    size: int,
    ancestors: Bool[Array, "B N M"],
    depths: Int[Array, "B M"],
    positions: Int[Array, "B N"],
    window: int | None,
) -> Bool[Array, "B N S"]:
    """Whether a node sees a slot of the cache."""
    B, N, M = ancestors.shape
    slot = jnp.arange(size, dtype=jnp.int32)
    node = slot[None] - length[:, None]  # [B S], below 0 for the committed text
    index = jnp.clip(node, 0, M - 1)
    wide = jnp.broadcast_to(index[:, None], (B, N, size))
    own = jnp.take_along_axis(ancestors, wide, axis=2) & (node < M)[:, None]
    seen = jnp.where((node < 0)[:, None], True, own)
    if window is None:
        return seen
    depth = jnp.take_along_axis(depths, index, axis=1)
    place = jnp.where(node < 0, slot[None], length[:, None] + depth)
    return seen & (positions[..., None] - place[:, None] < window)


def tree_attention(q, k, v, length, ancestors, depths, positions, *, window, scale):
    """See the package. A node that sees nothing gets zeros."""
    K = k.shape[1]
    mask = visible(length, k.shape[2], ancestors, depths, positions, window)
    q = rearrange(q, "B N (K G) E -> B K G N E", K=K)
    f32 = {"preferred_element_type": jnp.float32}
    scores = jnp.einsum("BKGNE,BKSE->BKGNS", q, k, **f32) * scale
    mask = mask[:, None, None]
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("BKGNS,BKSE->BKGNE", weights, v.astype(jnp.float32), **f32)
    out = out / jnp.where(total > 0, total, 1.0)
    return rearrange(out, "B K G N E -> B N (K G) E").astype(q.dtype)
