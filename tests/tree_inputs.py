"""Random inputs of tree attention, and what it means one query at a time."""

import jax.numpy as jnp
import numpy as np


def inputs(shape, dtype=jnp.float32, seed=0, lengths=None):
    """Random trees in a cache whose dead slots hold NaN-free rubbish."""
    rng, s = np.random.default_rng(seed), shape
    normal = lambda *dims: jnp.asarray(rng.normal(size=dims), dtype)
    q = normal(s.batch, s.nodes, s.heads, s.width)
    k, v = (normal(s.batch, s.kv_heads, s.slots, s.width) for _ in range(2))
    room = s.slots - s.nodes
    if lengths is None:
        lengths = [0, room, room // 2][: s.batch] + [7] * (s.batch - 3)
    ancestors = np.zeros((s.batch, s.nodes, s.nodes), bool)
    depths = np.zeros((s.batch, s.nodes), np.int32)
    for b in range(s.batch):
        for n in range(s.nodes):
            if n:
                parent = rng.integers(max(0, n - 3), n)
                ancestors[b, n], depths[b, n] = (
                    ancestors[b, parent],
                    depths[b, parent] + 1,
                )
            ancestors[b, n, n] = True
    length = np.array(lengths, np.int32)
    positions = length[:, None] + depths
    return q, k, v, *map(jnp.asarray, (length, ancestors, depths, positions))


def by_hand(q, k, v, length, ancestors, depths, positions, window):
    """One query at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    length, ancestors, depths, positions = map(
        np.asarray, (length, ancestors, depths, positions)
    )
    B, N, H, E = q.shape
    out = np.zeros((B, N, H, v.shape[-1]))
    for b, n, h in np.ndindex(B, N, H):
        own = np.flatnonzero(ancestors[b, n])
        text = np.arange(length[b])
        slots = np.concatenate([text, length[b] + own])
        places = np.concatenate([text, length[b] + depths[b, own]])
        if window is not None:
            slots = slots[positions[b, n] - places < window]
        head = h * k.shape[1] // H
        scores = k[b, head, slots] @ q[b, n, h] / np.sqrt(E)
        weights = np.exp(scores - scores.max())
        out[b, n, h] = weights @ v[b, head, slots] / weights.sum()
    return out
