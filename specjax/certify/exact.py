"""The law of what a rule commits, with every random draw summed over.

A draft has finitely many outcomes. Each rule compares uniforms with thresholds h and
leaves the law of the bonus, so the law of a round is

    sum over drafts q(draft)  sum over outcomes prod (h or 1 - h)  law of the bonus

extended by the target's own law to a fixed number of tokens. The shipped rule computes
every term: only its random numbers are replaced, by 0 (under any h > 0) and by 1.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax.testing import FAST
from specjax.tree import DynamicTree, Tree
from specjax.verify import Draft, Rule

# TV of a law summed in float32: right rules are below 2e-7, wrong ones above 3e-3.
TOLERANCE = 1e-5

NextLaw = Callable[[tuple[int, ...]], np.ndarray]


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=FAST)
def _decide(rule: Rule, tree, draft: Draft, p, u):
    one = lambda d, p, u: rule.decide(d, p, tree, u, *rule.params)
    over_outcomes = jax.vmap(one, in_axes=(None, None, 0))
    return jax.vmap(over_outcomes, in_axes=(0, 0, None))(draft, p, u)


def commit_law(
    rule: Rule,
    tree: Tree | DynamicTree,
    draft: Draft,
    chance: np.ndarray,
    p: np.ndarray,
    joint: np.ndarray,
) -> tuple[np.ndarray, float]:
    """Law of the first tokens after one round, and the mean number accepted.

    Args:
      draft: the R drafts that may be proposed.
      chance: their probabilities [R].
      p: the target's laws at their nodes [R N V].
      joint: the target's law of T tokens, [V ... V]; a shorter round is continued by
        it and a longer one cut.
    """
    U = rule.num_uniforms(tree)
    u = np.array(list(np.ndindex((2,) * U)), np.float32).reshape(2**U, U)
    out = _decide(rule, tree, draft, jnp.asarray(p, jnp.float32), jnp.asarray(u))
    n, node, law, h = (
        np.asarray(x) for x in (out.num_accepted, out.node, out.law, out.thresholds)
    )
    h = np.clip(np.asarray(h, np.float64), 0, 1)
    weight = chance[:, None] * np.prod(np.where(u[None] == 0, h, 1 - h), axis=2)
    accepted = float(np.sum(weight * n))

    row, outcome = np.nonzero(weight > 0)
    found = (row, *(x[row, outcome] for x in (weight, n, node, law)))
    return add_up(tree, draft, found, joint), accepted


def add_up(tree, draft: Draft, outcomes, joint: np.ndarray) -> np.ndarray:
    """Law of T tokens from outcomes: which draft, how likely, what was accepted.

    That is arrays of the draft's row, the probability, the number accepted, the last
    node and the law of the bonus.
    """
    row, weight, n, node, law = outcomes
    T, V = joint.ndim, joint.shape[0]
    parents = tree.parents if draft.parents is None else np.asarray(draft.parents)
    parents = np.broadcast_to(parents, (len(draft.tokens), tree.num_nodes))
    texts = _texts(np.asarray(draft.tokens)[row], parents[row], node, n)
    total = np.zeros(joint.shape)
    for depth in np.unique(n):
        here = n == depth
        bonus = weight[here, None] * np.asarray(law[here], np.float64)
        if depth + 1 > T:  # cut: the text is all accepted tokens
            np.add.at(total, tuple(texts[here, :T].T), weight[here])
            continue
        head = np.zeros((V,) * (depth + 1))
        place = texts[here, :depth] @ V ** np.arange(depth)[::-1]
        np.add.at(head.reshape(-1, V), place.astype(np.int64), bonus)
        prefix = joint.sum(axis=tuple(range(depth + 1, T)))
        shape = head.shape + (1,) * (T - depth - 1)
        after = np.where(
            prefix.reshape(shape) > 0,
            joint / np.where(prefix > 0, prefix, 1).reshape(shape),
            1.0 / V ** (T - depth - 1),
        )
        total += head.reshape(shape) * after
    return total


def traversal_outcomes(
    tree: Tree,
    draft: Draft,
    chance: np.ndarray,
    p: np.ndarray,
    likeliest_first: bool = False,
):
    """Traversal verification as its paper states it, one leaf after the other.

    The plain reference of `verify.traversal`. Returns what `add_up` takes. With
    `likeliest_first` it descends to the child of largest pi: a wrong rule.
    """
    assert draft.probs is not None
    kids = {v: [int(k) for k in tree.children[v] if k >= 0] for v in range(len(p[0]))}

    def recompute(v, left, pi, ps, qs, tokens):
        for k in left[v]:
            x = tokens[k - 1]
            pi[k] = min(1.0, pi[v] * ps[v, x] / qs[v, x]) if qs[v, x] > 0 else 0.0
            recompute(k, left, pi, ps, qs, tokens)

    found = []
    for row, tokens in enumerate(np.asarray(draft.tokens)):
        ps = np.array(p[row], np.float64)
        qs = np.array(draft.probs[row], np.float64)[tree.inner_row]
        left = {v: list(k) for v, k in kids.items()}
        pi = np.ones(tree.num_nodes)
        state = left, pi, ps, qs, tokens
        recompute(0, *state)
        alive = chance[row]
        while left[0] and alive > 0:
            leaf, above = 0, 0
            while left[leaf]:
                above = leaf
                options = left[leaf]
                leaf = (
                    max(options, key=lambda k: pi[k]) if likeliest_first else options[0]
                )
            depth = tree.depths[leaf]
            found.append((row, alive * pi[leaf], depth, leaf, ps[leaf].copy()))
            alive *= 1 - pi[leaf]
            left[above].remove(leaf)
            excess = np.maximum(pi[above] * ps[above] - qs[above], 0)
            Z, x = excess.sum(), tokens[leaf - 1]
            ps[above] = excess / Z if Z > 0 else ps[above]
            if above:
                pi[above] = Z / (Z + 1 - pi[above]) if Z + 1 - pi[above] > 0 else 1.0
            rest = np.where(np.arange(ps.shape[1]) == x, 0, qs[above])
            qs[above] = rest / rest.sum() if rest.sum() > 0 else qs[above]
            recompute(above, *state)
        found.append((row, alive, 0, 0, ps[0].copy()))
    return tuple(np.array(column) for column in zip(*found, strict=True))


def _texts(tokens, parents, node, n) -> np.ndarray:
    """Tokens from the anchor down to `node` [rows D], what is past n is 0."""
    rows = np.arange(len(node))
    texts = np.zeros((len(node), max(int(n.max(initial=0)), 1)), np.int64)
    for back in range(texts.shape[1]):
        at = n - 1 - back
        real = at >= 0
        texts[rows[real], at[real]] = tokens[rows[real], node[real] - 1]
        node = np.where(real, parents[rows, node], node)
    return texts


def all_drafts(
    tree: Tree, next_q: NextLaw, next_p: NextLaw
) -> tuple[Draft, np.ndarray, np.ndarray]:
    """Every draft of a static tree, with its probability and p at its nodes.

    The laws are functions of the tokens so far, () after the anchor.
    """
    found: list[tuple[dict[int, tuple[int, ...]], float]] = [({0: ()}, 1.0)]
    for inner in tree.inner:
        kids = [int(k) for k in tree.children[inner] if k >= 0]
        longer = []
        for texts, chance in found:
            q = np.asarray(next_q(texts[int(inner)]), np.float64)
            for drawn, share in _draws(q, len(kids), tree.replacement):
                more = {
                    kid: (*texts[int(inner)], x)
                    for kid, x in zip(kids, drawn, strict=True)
                }
                longer.append((texts | more, chance * share))
        found = longer
    texts = [[t[node] for node in range(tree.num_nodes)] for t, _ in found]
    tokens = np.array([[t[-1] for t in row[1:]] for row in texts], np.int32)
    q = np.array([[next_q(row[i]) for i in tree.inner] for row in texts], np.float32)
    p = np.array([[next_p(t) for t in row] for row in texts], np.float32)
    draft = Draft(tokens=jnp.asarray(tokens), probs=jnp.asarray(q))
    return draft, np.array([chance for _, chance in found]), p


def _draws(q: np.ndarray, num: int, replacement: bool):
    """Ordered draws of `num` tokens from q, each with its probability."""
    if num == 0:
        yield (), 1.0
        return
    for x in np.flatnonzero(q > 0):
        left = q if replacement else np.where(np.arange(len(q)) == x, 0, q)
        if num > 1 and left.sum() <= 0:
            continue
        left = left / left.sum() if left.sum() > 0 else left
        for rest, share in _draws(left, num - 1, replacement):
            yield (int(x), *rest), float(q[x]) * share


def chance_of(tree: Tree, draft: Draft) -> np.ndarray:
    """Probability that each of R drafts is drawn from the laws it carries [R]."""
    tokens = np.asarray(draft.tokens)
    assert draft.probs is not None
    probs = np.asarray(draft.probs, np.float64)
    chance = np.ones(len(tokens))
    for i, inner in enumerate(tree.inner):
        q = probs[:, i].copy()
        for kid in tree.children[inner]:
            if kid < 0:
                continue
            x = tokens[:, kid - 1]
            rows = np.arange(len(x))
            drawn = np.where(x >= 0, q[rows, x] / q.sum(1), 1.0)
            chance *= drawn
            if not tree.replacement:
                q[rows[x >= 0], x[x >= 0]] = 0
                q = np.where(q.sum(1, keepdims=True) > 0, q, 1.0)
    return chance


def tv(a: np.ndarray, b: np.ndarray) -> float:
    """Total variation distance."""
    return float(np.abs(np.asarray(a) - np.asarray(b)).sum() / 2)
