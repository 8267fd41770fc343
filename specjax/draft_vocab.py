"""A draft vocabulary smaller than the target's: R target ids, ascending or not.

A drafter with a reduced head scores R tokens. `spread` lays its logits over the
target's V ids, -inf where nothing can be drafted; from there on drawing, trees and
rules are what they are for a whole head, and as exact: a token outside is emitted by
the target.
Checkpoints hold the ids as offsets, d2t[k] = id_k - k, and as a mask t2d [V].
"""

import jax.numpy as jnp
import numpy as np

from specjax.typing import Array, Float, Int


def spread(
    logits: Float[Array, "*B R"], ids: Int[Array, "R"] | np.ndarray, vocab_size: int
) -> Float[Array, "*B V"]:
    """Logits of draft token k at target id `ids[k]`, -inf elsewhere."""
    everywhere = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, logits.dtype)
    return everywhere.at[..., ids].set(logits)


def most_frequent(counts: np.ndarray, size: int) -> np.ndarray:
    """The `size` most frequent ids, ascending; of equals the lower id.

    Args:
      counts: occurrences of each target id [V] in the tokens to learn; ids that never
        occur fill up what is missing, lowest first.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(
            f"a draft vocabulary has 1 to {len(counts)} ids, those of the target; got "
            f"{size}."
        )
    order = np.argsort(-np.asarray(counts, np.int64), kind="stable")
    return np.sort(order[:size]).astype(np.int32)


def check(ids: np.ndarray, vocab_size: int, size: int | None = None) -> np.ndarray:
    """`ids` as int32, or the error that says what is wrong with them."""
    given = np.asarray(ids)
    ids = given.astype(np.int64)
    if np.any(ids != given):
        raise ValueError(f"draft ids are whole numbers, got {given[ids != given][0]}.")
    if size is not None and len(ids) != size:
        raise ValueError(f"{len(ids)} draft ids for a draft vocabulary of {size}.")
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(
            f"draft ids span {ids.min()} to {ids.max()}; the target knows 0 to "
            f"{vocab_size - 1}. Are these the file's offsets, and is it this target's?"
        )
    values, times = np.unique(ids, return_counts=True)
    if np.any(times > 1):
        raise ValueError(
            f"draft ids repeat: target id {values[times > 1][0]} comes "
            f"{times.max()} times. Two draft tokens cannot be one target token."
        )
    return ids.astype(np.int32)


def to_offsets(ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint: d2t [R] int64 offsets, t2d [V] bool."""
    ids = check(ids, vocab_size)
    t2d = np.zeros(vocab_size, bool)
    t2d[ids] = True
    return {"d2t": ids.astype(np.int64) - np.arange(len(ids)), "t2d": t2d}


def from_offsets(
    d2t: np.ndarray | None,
    size: int,
    vocab_size: int,
    t2d: np.ndarray | None = None,
) -> np.ndarray:
    """Target ids [size] of a checkpoint's draft tokens.

    A draft vocabulary as large as the target's needs no map, and files that carry zeros
    then mean the identity; a smaller one without a map, or with zeros, is refused: its
    tokens would be read as the first ids.
    """
    if size == vocab_size and (d2t is None or not np.any(d2t)):
        return np.arange(size, dtype=np.int32)
    if d2t is None:
        raise ValueError(
            f"the checkpoint has a draft vocabulary of {size} of {vocab_size} ids and "
            "no d2t: which ids these are is lost. Export it again with its buffers."
        )
    if size < vocab_size and size > 1 and not np.any(d2t):
        raise ValueError(
            f"d2t is all zeros though only {size} of {vocab_size} ids are drafted: it "
            "was saved before it was filled."
        )
    if len(d2t) != size:
        raise ValueError(f"d2t has {len(d2t)} entries, the draft vocabulary {size}.")
    ids = check(np.asarray(d2t) + np.arange(size), vocab_size)
    if t2d is not None and (
        len(t2d) != vocab_size or not np.array_equal(np.flatnonzero(t2d), np.sort(ids))
    ):
        raise ValueError(
            f"t2d marks {int(np.sum(t2d))} of {len(t2d)} ids, which are not the "
            f"{size} that d2t names of {vocab_size}."
        )
    return ids
