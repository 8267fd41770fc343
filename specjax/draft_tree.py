"""Trees of drafted tokens: from the laws of a block, or grown level by level.

`from_laws` serves drafters whose law at a depth does not depend on the tokens drafted
before it (heads, blocks); `grow` those that need a pass over one level to know the laws
of the next. Both make static trees, whose children are drawn without replacement from
their parent's law (Gumbel-top-k: the descending order is that of successive draws) or,
under greedy settings, are the likeliest; and dynamic ones, EAGLE-2's expansion by path
confidence and re-ranking (Li et al. 2024, arXiv:2406.16858, section 4).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.sampling import Sampling, categorical
from specjax.tree import DynamicTree, Tree
from specjax.typing import Array, Bool, Float, Int, Keys
from specjax.verify import PAD, Draft

# (carry, tokens [B W], sees [B W M], level) -> (logits [B W V], carry): one pass over
# the W nodes of a level, which see the anchor and those of the M = levels * W nodes of
# this and earlier levels that `sees` names; the nodes stand `level` + 1 deep.
Step = Callable[[Any, Array, Array, Array], tuple[Array, Any]]


def draw_children(
    scores: Float[Array, "W V"],
    probs: Float[Array, "W V"],
    key: Array,
    num_children: int,
    *,
    likeliest: bool = False,
    replacement: bool = False,
) -> Int[Array, "W C"]:
    """Draws the children of W nodes of one row, in draw order.

    PAD stands where a law has fewer tokens than children are asked for. `likeliest`
    takes the best of `scores` instead.
    """
    if likeliest:
        pass
    elif replacement:
        keys = jax.random.split(key, num_children)
        return jax.vmap(lambda k: categorical(probs, k), out_axes=1)(keys)
    else:
        log = jnp.log(jnp.where(probs > 0, probs, 1.0))
        noise = jax.random.gumbel(key, probs.shape)
        scores = jnp.where(probs > 0, log + noise, -jnp.inf)
    best, tokens = jax.lax.top_k(scores, num_children)
    return jnp.where(best > -jnp.inf, tokens, PAD).astype(jnp.int32)


def _draw_rows(tree: Tree, sampling, logits, keys):
    """`draw_children` of a batch: tokens [B W C], laws [B W V]."""
    how = {"likeliest": sampling.greedy, "replacement": tree.replacement}
    C, probs = tree.children.shape[1], sampling.probs(logits)
    draw = lambda z, p, k: draw_children(z, p, k, C, **how)
    return jax.vmap(draw)(sampling.possible(logits), probs, keys), probs


def _place(tree: Tree, kids: Int[Array, "B I C"]) -> Int[Array, "B G"]:
    """Tokens of all nodes from the children drawn at the inner ones."""
    above, rank = np.asarray(tree.parents[1:]), tree.ranks[1:]
    tokens = kids[:, tree.inner_row[above], rank]
    alive = [jnp.ones(tokens.shape[:1], bool)]  # under PAD nothing exists
    for node, parent in enumerate(above, 1):
        alive.append(alive[parent] & (tokens[:, node - 1] >= 0))
    return jnp.where(jnp.stack(alive[1:], axis=1), tokens, PAD)


def from_laws(
    tree: Tree | DynamicTree,
    logits: Float[Array, "B D V"],
    sampling: Sampling,
    keys: Keys,
) -> Draft:
    """A draft whose children at depth d + 1 all come from the law `logits[:, d]`."""
    depth = tree.depth
    if logits.shape[1] < depth:
        raise ValueError(
            f"the drafter knows {logits.shape[1]} positions, the tree is {depth} deep."
        )
    if isinstance(tree, DynamicTree):
        W = tree.width
        at_level = lambda carry, tokens, sees, level: (
            jnp.repeat(logits[:, level + 1][:, None], W, axis=1),
            carry,
        )
        return _grow_best(tree, logits[:, 0], at_level, None, sampling)[0]
    kids, probs = _draw_rows(tree, sampling, logits[:, tree.depths[tree.inner]], keys)
    return Draft(tokens=_place(tree, kids), probs=probs)


def grow(
    tree: Tree | DynamicTree,
    logits: Float[Array, "B V"],
    step: Step,
    carry: Any,
    sampling: Sampling,
    keys: Keys,
) -> tuple[Draft, Any]:
    """A draft by one pass a level; `logits` are those after the anchor."""
    if tree.depth == 1:
        return from_laws(tree, logits[:, None], sampling, keys), carry
    if isinstance(tree, DynamicTree):
        return _grow_best(tree, logits, step, carry, sampling)
    return _grow_static(tree, logits, step, carry, sampling, keys)


def grow_from(
    tree: Tree | DynamicTree,
    logits: Float[Array, "B V"],
    output: Float[Array, "B *D"],
    step: Callable[..., tuple[Array, Array, Any]],
    carry: Any,
    sampling: Sampling,
    keys: Keys,
) -> tuple[Draft, Any]:
    """`grow` for a drafter that feeds a node with its parent's output.

    Args:
      output: of the pass that gave `logits`, at the anchor.
      step: as `Step`, but also takes the parents' outputs [B W *D] after the tokens and
        returns its own after the logits.
    """
    rows, slots = jnp.arange(output.shape[0])[:, None], num_slots(tree)
    behind = [(0, 0), (0, slots)] + [(0, 0)] * (output.ndim - 1)
    outputs = jnp.pad(output[:, None], behind)  # by slot, the anchor's first

    def one(carry, tokens, sees, level):
        inner, outputs = carry
        g = outputs[rows, above(sees, level)]
        logits, new, inner = step(inner, tokens, g, sees, level)
        at = 1 + level * tokens.shape[1]
        outputs = jax.lax.dynamic_update_slice_in_dim(outputs, new, at, axis=1)
        return logits, (inner, outputs)

    draft, (carry, _) = grow(tree, logits, one, (carry, outputs), sampling, keys)
    return draft, carry


def above(sees: Bool[Array, "B W M"], level: Array) -> Int[Array, "B W"]:
    """Slot of each node's parent plus 1 at a `Step`; 0 for the anchor."""
    slots = jnp.arange(sees.shape[2], dtype=jnp.int32)
    earlier = sees & (slots < level * sees.shape[1])[None, None]
    return jnp.max(jnp.where(earlier, slots + 1, 0), axis=2, initial=0)


def num_slots(tree: Tree | DynamicTree) -> int:
    """M, uncommitted entries that the passes of `grow` leave in a drafter's cache."""
    if isinstance(tree, DynamicTree):
        return (tree.depth - 1) * tree.width
    return int(np.prod(_levels(tree).shape))


def _levels(tree: Tree) -> np.ndarray:
    """[D-1 W] inner nodes of each depth from 1 on, -1 where a level has fewer."""
    depths = tree.depths[tree.inner]
    lists = [tree.inner[depths == d] for d in range(1, tree.depth)]
    width = max(map(len, lists), default=1)
    fill = lambda nodes: np.pad(nodes, (0, width - len(nodes)), constant_values=-1)
    table = np.array([fill(nodes) for nodes in lists], np.int32)
    return table.reshape(len(lists), width)


def _grow_static(tree: Tree, logits, step, carry, sampling, keys):
    B, V = logits.shape
    levels = _levels(tree)
    num_levels, W = levels.shape
    C = tree.children.shape[1]
    order = levels.ravel()  # node of each slot
    # An idle slot, -1, reads as the last node, a leaf: above none of these.
    seen = tree.ancestors[np.maximum(order, 0)][:, order]
    seen |= np.eye(len(order), dtype=bool)  # an idle slot sees itself: no empty softmax
    seen = seen.reshape(num_levels, W, num_levels * W)
    level_keys = jax.vmap(lambda k: jax.random.split(k, num_levels + 1))(keys)

    first, q0 = _draw_rows(tree, sampling, logits[:, None], level_keys[:, 0])
    kids = jnp.full((B, tree.num_nodes, C), PAD, jnp.int32).at[:, 0].set(first[:, 0])
    parents = jnp.asarray(tree.parents)
    ranks = jnp.asarray(tree.ranks)

    def one(carry, xs):
        kids, inner = carry
        nodes, sees, level, keys = xs
        at = jnp.maximum(nodes, 0)
        tokens = jnp.maximum(kids[:, parents[at], ranks[at]], 0)
        z, inner = step(inner, tokens, jnp.broadcast_to(sees, (B, *sees.shape)), level)
        new, probs = _draw_rows(tree, sampling, z, keys)
        where = jnp.where(nodes >= 0, nodes, tree.num_nodes)
        return (kids.at[:, where].set(new, mode="drop"), inner), probs

    xs = (
        jnp.asarray(levels),
        jnp.asarray(seen),
        jnp.arange(num_levels, dtype=jnp.int32),
        level_keys[:, 1:].swapaxes(0, 1),
    )
    (kids, carry), laws = jax.lax.scan(one, (kids, carry), xs)
    laws = laws.transpose(1, 0, 2, 3).reshape(B, num_levels * W, V)
    slot = {int(node): i for i, node in enumerate(order) if node >= 0}
    rows = np.array([slot[int(node)] for node in tree.inner[1:]], np.int32)
    probs = jnp.concatenate([q0, laws[:, rows]], axis=1)
    return Draft(tokens=_place(tree, kids[:, tree.inner]), probs=probs), carry


def _grow_best(tree: DynamicTree, logits, step, carry, sampling):
    """EAGLE-2: expand the `width` likeliest paths of a level, keep the best of all."""
    B, W, num_levels = logits.shape[0], tree.width, tree.depth - 1
    logp = lambda z: jax.nn.log_softmax(sampling.possible(z), axis=-1)
    score, tokens = jax.lax.top_k(logp(logits), W)  # [B W]
    rows = jnp.arange(B)[:, None]
    number = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32), (B, W))  # of a candidate
    first = (tokens, score, jnp.full((B, W), -1, jnp.int32))
    sees = jnp.zeros((B, W, num_levels * W), bool)

    def one(carry, level):
        (tokens, score, number, sees), inner = carry
        slots = jnp.arange(num_levels * W)
        own = slots[None] == (level * W + jnp.arange(W))[:, None]
        sees = sees | own[None]
        z, inner = step(inner, tokens, sees, level)
        best, kids = jax.lax.top_k(logp(z), W)  # [B W W]
        total = (score[..., None] + best).reshape(B, W * W)
        kids = kids.reshape(B, W * W)
        parent = jnp.repeat(number, W, axis=1)
        score, chosen = jax.lax.top_k(total, W)
        number = W + level * W * W + chosen
        beam = kids[rows, chosen], score, number, sees[rows, chosen // W]
        return (beam, inner), (kids, total, parent)

    start = ((tokens, score, number, sees), carry)
    (_, carry), later = jax.lax.scan(
        one, start, jnp.arange(num_levels, dtype=jnp.int32)
    )
    tokens, score, parent = (
        jnp.concatenate([a, b.swapaxes(0, 1).reshape(B, -1)], axis=1)
        for a, b in zip(first, later, strict=True)
    )
    # A child is never likelier than its parent, and of equals the lower number wins.
    kept_score, kept = jax.lax.top_k(score, tree.num_nodes - 1)
    order = jnp.argsort(kept, axis=1)
    kept, kept_score = kept[rows, order], kept_score[rows, order]
    parent = parent[rows, kept]
    above = jnp.argmax(parent[..., None] == kept[:, None], axis=2) + 1
    above = jnp.where(parent < 0, 0, above).astype(jnp.int32)
    tokens = jnp.where(kept_score > -jnp.inf, tokens[rows, kept], PAD)
    return Draft(
        tokens=tokens.astype(jnp.int32),
        probs=None,
        parents=jnp.pad(above, ((0, 0), (1, 0)), constant_values=-1),
    ), carry
