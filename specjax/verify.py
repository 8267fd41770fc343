"""Verification: which drafted tokens stay, and the token that follows them.

Written for one sequence and vmapped by the caller; knows no model, cache or drafter.
A rule looks at a draft, at the law q that each token was drawn from and at the target's
law p at every node, and decides by uniforms u. For one token x drawn from q,

    accept with probability min(1, p(x) / q(x))                       (1)
    after a rejection draw from norm(max(0, p - q))                   (2)
    after a full accept draw from p at the next position              (3)

commits tokens that follow the target's law exactly. The rules of `RULES`:

    token      eq. 1 to 3 along a chain (Leviathan et al. 2023, arXiv:2211.17192;
               Chen et al. 2023, arXiv:2302.01318)
    block      a chain as a whole; never accepts less (Sun et al., arXiv:2403.10444)
    recursive  a tree, siblings tried in the order of their draw, q renormalised after
               each (SpecInfer, arXiv:2305.09781; EAGLE, arXiv:2401.15077)
    traversal  a tree from the leaves up, siblings drawn without replacement; on a chain
               it is `block` (Weng et al., arXiv:2505.12398)
    match      any chain or tree however made, chosen at run time or not: a child is
               accepted with probability p(child); needs no q. The same law as drawing
               from p at each node and walking while a child matches.
    lossy_typical  accepts what p finds plausible (Medusa, arXiv:2401.10774, section
               2.3.1): the output is NOT the target's law.

`lossy_*` rules are never a default. At temperature 0 all rules are one: keep the path
that equals the target's argmax.

Each rule returns the thresholds its uniforms were compared with, and the law of the
bonus instead of a bonus: so its law can be summed over all outcomes of all draws
(`certify`). Comparisons are strict: what has p = 0 is rejected also by u = 0.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.pytree import pytree
from specjax.sampling import Sampling, categorical
from specjax.tree import DynamicTree, Tree, ancestors_of
from specjax.typing import Array, Bool, Float, Int, PRNGKey

PAD = -1  # fills token arrays past the last committed token, and nodes not drafted


@pytree
class Draft:
    """What a drafter proposes; G = N - 1 tokens, node i + 1 holds token i.

    A token of PAD is a node that does not exist, and neither does anything under it.
    """

    tokens: Int[Array, "*B G"]
    # The law that the children of each inner node were drawn from, in the order of
    # `Tree.inner` (of a chain: the law of each token). None: they were not drawn.
    probs: Float[Array, "*B I V"] | None
    parents: Int[Array, "*B N"] | None = None  # of a `DynamicTree`
    # How likely the first child of each inner node is accepted, if the node was; None:
    # the drafter does not say. May depend on the tokens down to the node, never on its
    # children: a draft that is stopped by it keeps the target's law (`scheduler`).
    confidence: Float[Array, "*B I"] | None = None

    @property
    def laws(self) -> Float[Array, "*B I V"]:
        """`probs` of a draft that was drawn."""
        assert self.probs is not None, "this rule needs the laws of the draft"
        return self.probs


@pytree
class Verdict:
    """What a round commits. -1 accepted marks a finished row: nothing is committed."""

    num_accepted: Int[Array, "*B"]  # drafted tokens kept, bonus excluded
    tokens: Int[Array, "*B P"]  # accepted tokens, then the bonus, then PAD; P = D + 1
    valid: Bool[Array, "*B"]  # False if a drafted token has q = 0: a broken drafter
    # Nodes accepted, the anchor first, the last one repeated; None on a chain, where
    # node i is at depth i.
    path: Int[Array, "*B P"] | None = None

    @property
    def num_committed(self) -> Int[Array, "*B"]:
        """Nodes whose cache entries stay: the anchor and the accepted tokens."""
        return self.num_accepted + 1


@pytree
class Decision:
    """A verdict before the bonus is drawn."""

    num_accepted: Int[Array, ""]
    node: Int[Array, ""]  # the last node accepted
    law: Float[Array, "V"]  # of the bonus
    thresholds: Float[Array, "U"]  # uniform i accepted by falling under threshold i


@dataclasses.dataclass(frozen=True)
class Rule:
    """A way to decide. `decide(draft, p, tree, u, *params)` sees one sequence.

    p, the target's laws at the nodes, is an array [N V] or `Laws`.
    """

    decide: Callable[..., Decision]
    num_uniforms: Callable[[Any], int]  # of a topology
    drawn: bool = True  # drafts must have been drawn, and come with their laws
    chain_only: bool = False
    dynamic: bool = False  # also topologies chosen at run time
    lossless: bool = True
    params: tuple[float, ...] = ()


def accept_probs(q: Float[Array, "*V"], p: Float[Array, "*V"]) -> Array:
    """min(1, p / q) entry by entry, eq. 1; 0 where q is 0."""
    ratio = p / jnp.where(q > 0, q, 1.0)
    return jnp.where(q > 0, jnp.minimum(1.0, ratio), 0.0)


def residual(q: Float[Array, "V"], p: Float[Array, "V"]) -> Float[Array, "V"]:
    """norm(max(0, p - q)), the law of the token that replaces a rejected one, eq. 2."""
    return normalise(jnp.maximum(p - q, 0.0), p)


def normalise(weights: Float[Array, "V"], otherwise: Float[Array, "V"]) -> Array:
    """weights over their sum; `otherwise` if there is none left (only by rounding)."""
    mass = jnp.sum(weights)
    return jnp.where(mass > 0, weights / jnp.where(mass > 0, mass, 1.0), otherwise)


def without(law: Float[Array, "V"], token: Int[Array, ""]) -> Float[Array, "V"]:
    """`law` with one token taken out; it is its own fallback if that was all."""
    return normalise(jnp.where(jnp.arange(law.shape[0]) == token, 0.0, law), law)


@pytree
class Laws:
    """Laws of N nodes that are computed where they are looked at: rows and entries.

    A pass over all of [N V] costs more than most rules; `laws[i]` is one row.
    """

    scores: Float[Array, "N V"]  # logarithms up to a constant a row
    log_sum: Float[Array, "N"]

    @classmethod
    def of(cls, scores: Float[Array, "N V"]) -> "Laws":
        return cls(scores, jax.nn.logsumexp(scores, axis=-1))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.scores.shape

    @property
    def dtype(self):
        return self.scores.dtype

    def __getitem__(self, rows) -> Array:
        return jnp.exp(self.scores[rows] - self.log_sum[rows][..., None])

    def pick(self, rows, tokens) -> Array:
        return jnp.exp(self.scores[rows, tokens] - self.log_sum[rows])


def _pick(laws, rows, tokens: Int[Array, "G"]) -> Float[Array, "G"]:
    """laws[rows[k], tokens[k]]; 0 where the token is PAD."""
    at = jnp.maximum(tokens, 0)
    picked = laws.pick(rows, at) if isinstance(laws, Laws) else laws[rows, at]
    return jnp.where(tokens >= 0, picked, 0.0)


def _row(laws: Float[Array, "G V"], k: Array, length: Array) -> Float[Array, "V"]:
    """laws[k], and zeros from row `length` on: past the draft nothing was drawn."""
    if laws.shape[0] == 0:
        return jnp.zeros(laws.shape[1:], laws.dtype)
    row = laws[jnp.minimum(k, laws.shape[0] - 1)]
    return jnp.where(k < length, row, 0.0)


def _prefix(mask: Bool[Array, "G"]) -> Int[Array, ""]:
    """How many entries from the first on are True."""
    return jnp.sum(jnp.cumprod(mask.astype(jnp.int32)))


def _last(mask: Bool[Array, "G"]) -> Int[Array, ""]:
    """Length of the prefix that ends with the last True entry."""
    lengths = jnp.arange(1, len(mask) + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(mask, lengths, 0), initial=0)


def token(draft: Draft, p, tree: Tree, u: Array) -> Decision:
    """Keeps the longest accepted prefix of a chain, eq. 1 to 3."""
    del tree
    tokens, q = draft.tokens, draft.laws
    rows = np.arange(len(tokens))
    drawn = accept_probs(_pick(q, rows, tokens), _pick(p, rows, tokens))
    n = _prefix(u < drawn)
    # A zero row past the draft makes the residual there equal p: the free bonus token.
    left = residual(_row(q, n, _prefix(tokens >= 0)), p[n])
    return Decision(n, n, left, drawn)


def block(draft: Draft, p, tree: Tree, u: Array) -> Decision:
    """Keeps the longest prefix whose own test passes, whether or not others did.

    pi_k = min(1, pi_{k-1} p(x_k) / q(x_k)) and, with Z_k = sum max(0, pi_k p - q) in
    the row after k tokens, the prefix of k passes with probability
    h_k = Z_k / (Z_k + 1 - pi_k), the whole draft with pi_G. The bonus is drawn from
    norm(max(0, pi_n p - q)).
    """
    del tree
    tokens, q = draft.tokens, draft.laws
    G = tokens.shape[0]
    rows = np.arange(G)
    qx, px = _pick(q, rows, tokens), _pick(p, rows, tokens)
    ratio = px / jnp.where(qx > 0, qx, 1.0)

    def step(pi, ratio):
        pi = extend(pi, ratio)
        return pi, pi

    _, pi = jax.lax.scan(step, jnp.ones(()), jnp.where(qx > 0, ratio, 0.0))
    pi = jnp.pad(pi, (1, 0), constant_values=1.0)  # [N], pi_0 = 1
    length = _prefix(tokens >= 0)
    Z = jnp.sum(jnp.maximum(pi[:-1, None] * p[:-1] - q, 0.0), axis=1)
    h = passes(jnp.pad(Z, (0, 1)), pi)
    k = jnp.arange(G + 1)
    h = jnp.where(k < length, h, jnp.where(k == length, pi, 0.0))[1:]
    n = _last(u < h)
    left = jnp.maximum(pi[n] * p[n] - _row(q, n, length), 0.0)
    return Decision(n, n, normalise(left, p[n]), h)


def recursive(draft: Draft, p, tree: Tree, u: Array) -> Decision:
    """Walks down from the anchor and tries the children of a node in draw order.

    A rejected child takes q out of p, eq. 2, and itself out of q (siblings drawn with
    replacement leave q as it was). If none is accepted the bonus is drawn from what is
    left of p.
    """
    children, rows = jnp.asarray(tree.children), jnp.asarray(tree.inner_row)
    D, C = tree.depth, tree.children.shape[1]
    u = u.reshape(D, C)

    def level(carry, u):
        node, n, done, law = carry
        pt, qt = p[node], draft.laws[rows[node]]
        took, thresholds = jnp.asarray(False), []
        below = node
        for c in range(C):
            kid = children[node, c]
            x = draft.tokens[kid - 1]
            live = ~done & ~took & (kid >= 0) & (x >= 0)
            at = jnp.maximum(x, 0)
            h = jnp.where(live, accept_probs(qt[at], pt[at]), 0.0)
            ok = u[c] < h
            thresholds.append(h)
            below, took = jnp.where(ok, kid, below), took | ok
            rejected = live & ~ok
            pt = jnp.where(rejected, residual(qt, pt), pt)
            if not tree.replacement:
                qt = jnp.where(rejected, without(qt, at), qt)
        law = jnp.where(done, law, pt)
        stop = done | ~took
        n = n + took.astype(jnp.int32)
        return (below, n, stop, law), jnp.stack(thresholds)

    zero = jnp.zeros((), jnp.int32)
    start = (zero, zero, jnp.asarray(False), p[0])
    (node, n, done, law), thresholds = jax.lax.scan(level, start, u)
    return Decision(n, node, jnp.where(done, law, p[node]), thresholds.ravel())


def passes(Z: Array, pi: Array) -> Array:
    """Z / (Z + 1 - pi), how likely a path passes that is kept for what Z is left."""
    below = Z + 1.0 - pi
    return jnp.where(below > 0, Z / jnp.where(below > 0, below, 1.0), 1.0)


def extend(pi, ratio) -> Array:
    """pi of a path that is one token longer; ratio is p / q of that token."""
    return jnp.minimum(1.0, pi * ratio)


def enter(pi, p: Float[Array, "V"], q: Float[Array, "V"], x) -> Array:
    """pi of the child x of a node: min(1, pi p(x) / q(x))."""
    ratio = p[x] / jnp.where(q[x] > 0, q[x], 1.0)
    return jnp.where(q[x] > 0, extend(pi, ratio), 0.0)


def lose(pi, p: Float[Array, "V"], q: Float[Array, "V"], x) -> tuple[Array, ...]:
    """What pi, p and q of a node become when its child x has failed."""
    excess = jnp.maximum(pi * p - q, 0.0)
    return passes(jnp.sum(excess), pi), normalise(excess, p), without(q, x)


def traversal(draft: Draft, p, tree: Tree, u: Array) -> Decision:
    """Tries whole root paths, leaf first, in the static post-order of the tree.

    The path to node v passes with probability pi(v), pi(child x of m) = min(1, pi(m)
    p_m(x) / q_m(x)). If it fails, m loses x: with R = max(0, pi(m) p_m - q_m) and Z its
    sum, p_m = R / Z, pi(m) = Z / (Z + 1 - pi(m)), and q_m is renormalised without x.
    A later sibling enters with what its parent has become. The anchor always passes.
    """
    rows = tree.inner_row
    one = jnp.ones((), p.dtype)
    # (pi, p, q) of the nodes on the way down to the current one, by depth.
    stack: list[Any] = [(one, p[0], draft.laws[0])] + [None] * tree.depth
    done, node, law = jnp.asarray(False), jnp.zeros((), jnp.int32), p[0]
    thresholds: list[Any] = [None] * (tree.num_nodes - 1)

    def visit(v):
        nonlocal done, node, law
        d, x = int(tree.depths[v]), draft.tokens[v - 1]
        at = jnp.maximum(x, 0)
        pi, left, q = stack[d - 1]
        stack[d] = enter(pi, left, q, at), p[v], draft.laws[rows[v]]
        for kid in tree.children[v]:
            if kid >= 0:
                visit(int(kid))

        here = (x >= 0) & ~done
        pi, left, q = stack[d]
        thresholds[v - 1] = jnp.where(here, pi, 0.0)
        ok = u[v - 1] < thresholds[v - 1]
        node, law = jnp.where(ok, v, node), jnp.where(ok, left, law)
        done = done | ok
        pi, left, q = lose(*stack[d - 1], at)  # pyright: ignore[reportCallIssue]
        lost = (one if d == 1 else pi), left, q
        keep = lambda new, old: jnp.where(here & ~ok, new, old)
        stack[d - 1] = tuple(map(keep, lost, stack[d - 1]))

    for kid in tree.children[0]:
        if kid >= 0:
            visit(int(kid))
    law = jnp.where(done, law, stack[0][1])
    return Decision(jnp.asarray(tree.depths)[node], node, law, jnp.stack(thresholds))


def topology(draft: Draft, tree: Tree | DynamicTree) -> tuple[Array, Array, Array]:
    """Parents [N], ancestors [N N] and depths [N] of one sequence's draft."""
    if isinstance(tree, Tree):
        constants = np.asarray(tree.parents, np.int32), tree.ancestors, tree.depths
        parents, ancestors, depths = map(jnp.asarray, constants)
        return parents, ancestors, depths
    assert draft.parents is not None, "a DynamicTree comes with Draft.parents"
    ancestors = ancestors_of(draft.parents[None], tree.depth)[0]
    depths = jnp.sum(ancestors, axis=1, dtype=jnp.int32) - 1
    return draft.parents, ancestors, depths


def _share(px: Array, left: Array) -> Array:
    """px / left, at most 1."""
    return jnp.where(px < left, px / jnp.where(px < left, left, 1.0), 1.0)


def match(draft: Draft, p, tree, u: Array) -> Decision:
    """Accepts child x of a node with the probability that p gives it.

    Children are tried in order, each against what the earlier ones left of p; a
    repeated sibling has nothing left. The bonus is drawn from p without the children.
    """
    parents, ancestors, depths = topology(draft, tree)
    above, x = parents[1:], draft.tokens
    earlier = _earlier(above)
    repeated = jnp.any(earlier & (x[:, None] == x[None]), axis=1)
    px = jnp.where(repeated, 0.0, _pick(p, above, x))
    left = 1.0 - jnp.sum(jnp.where(earlier, px[None], 0.0), axis=1)
    h = jnp.where(px > 0, _share(px, left), 0.0)
    n, node = _deepest(u < h, earlier, ancestors, depths)
    tested = jnp.where(above == node, x, PAD)
    law = p[node].at[jnp.where(tested >= 0, tested, p.shape[1])].set(0.0, mode="drop")
    return Decision(n, node, normalise(law, p[node]), h)


def _earlier(above: Int[Array, "G"]) -> Bool[Array, "G G"]:
    """True where the column's node is an earlier sibling of the row's."""
    siblings = above[:, None] == above[None]
    return siblings & np.tri(above.shape[0], k=-1, dtype=bool)


def _deepest(accepted, earlier, ancestors, depths):
    """End of the one path whose nodes are each the first accepted of their siblings."""
    first = accepted & ~jnp.any(earlier & accepted[None], axis=1)
    chosen = jnp.pad(first, (1, 0), constant_values=True)
    reached = ~jnp.any(ancestors & ~chosen[None], axis=1)
    depth = jnp.where(reached, depths, -1)
    return jnp.max(depth), jnp.argmax(depth).astype(jnp.int32)


def lossy_typical(
    draft: Draft,
    p,
    tree,
    u: Array,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Decision:
    """Accepts x if p(x) > min(epsilon, delta exp(-H(p))); the longest such path stays.

    H is the entropy of p, nats; ties go to the likelier path. The bonus is drawn from
    p. Not the target's law.
    """
    parents, ancestors, depths = topology(draft, tree)
    p = p[:]
    entropy = -jnp.sum(p * jnp.log(p + 1e-5), axis=1)
    threshold = jnp.minimum(epsilon, delta * jnp.exp(-entropy))
    px = _pick(p, parents[1:], draft.tokens)
    plausible = jnp.pad(px > threshold[parents[1:]], (1, 0), constant_values=True)
    reached = ~jnp.any(ancestors & ~plausible[None], axis=1)
    log = jnp.pad(jnp.log(jnp.maximum(px, 1e-30)), (1, 0))
    worth = jnp.sum(jnp.where(ancestors, log[None], 0.0), axis=1)
    depth = jnp.where(reached, depths, -1)
    n = jnp.max(depth)
    node = jnp.argmax(jnp.where(depth == n, worth, -jnp.inf)).astype(jnp.int32)
    return Decision(n, node, p[node], u)


RULES: dict[str, Rule] = {
    "token": Rule(token, lambda tree: tree.depth, chain_only=True),
    "block": Rule(block, lambda tree: tree.depth, chain_only=True),
    "recursive": Rule(recursive, lambda t: t.depth * t.children.shape[1]),
    "traversal": Rule(traversal, lambda tree: tree.num_nodes - 1),
    "match": Rule(match, lambda tree: tree.num_nodes - 1, drawn=False, dynamic=True),
    "lossy_typical": Rule(
        lossy_typical,
        lambda tree: 0,
        drawn=False,
        dynamic=True,
        lossless=False,
        params=(0.09, 0.3),
    ),
}


def get(name: str) -> Rule:
    """A rule by name."""
    if name not in RULES:
        raise KeyError(f"unknown rule {name!r}; known: {', '.join(RULES)}.")
    return RULES[name]


def default_rule(tree: Tree | DynamicTree, draft_sampling: Sampling) -> str:
    """The exact rule that suits how a draft was made."""
    if isinstance(tree, DynamicTree) or draft_sampling.greedy:
        return "match"
    return "token" if tree.is_chain else "recursive"


def check(name: str, tree: Tree | DynamicTree, draft_sampling: Sampling) -> None:
    """Refuses a rule that would not be exact on such drafts, or cannot read them."""
    rule = get(name)
    dynamic = isinstance(tree, DynamicTree)
    if dynamic and not rule.dynamic:
        raise ValueError(
            f"rule {name!r} needs a tree that does not depend on the drafted tokens; "
            "a dynamic tree is verified by match."
        )
    if rule.chain_only and not tree.is_chain:
        raise ValueError(
            f"rule {name!r} verifies a chain, the draft is a tree of {tree.num_nodes} "
            "nodes. Use recursive, traversal or match."
        )
    if rule.drawn and draft_sampling.greedy and not tree.is_chain:
        raise ValueError(
            f"rule {name!r} needs children drawn from a law, and these are the "
            "likeliest ones. Use match, or a draft temperature above 0."
        )
    if name == "traversal" and isinstance(tree, Tree) and tree.replacement:
        raise ValueError(
            "rule 'traversal' is for siblings drawn without replacement; use recursive."
        )


def path_to(
    node: Int[Array, ""], n: Int[Array, ""], ancestors, depths, depth: int
) -> Int[Array, "P"]:
    """Nodes from the anchor to `node`, which is then repeated up to `depth`."""
    level = jnp.arange(depth + 1)
    above = ancestors[node][None] & (depths[None] == level[:, None])  # [P N]
    return jnp.where(level <= n, jnp.argmax(above, axis=1), node).astype(jnp.int32)


def verify_tokens(
    draft: Draft, best: Int[Array, "N"], tree: Tree | DynamicTree
) -> tuple[Array, Array]:
    """Accepted count and last node when p is one-hot at `best`."""
    if isinstance(tree, Tree) and tree.is_chain:
        n = _prefix(draft.tokens == best[:-1])
        return n, n
    parents, ancestors, depths = topology(draft, tree)
    above = parents[1:]
    hits = draft.tokens == best[above]
    return _deepest(hits, _earlier(above), ancestors, depths)


def verify(
    draft: Draft,
    scores: Float[Array, "N V"],
    sampling: Sampling,
    key: PRNGKey,
    tree: Tree | DynamicTree,
    rule: Rule,
) -> Verdict:
    """Judges one sequence's draft by a rule. The key is consumed.

    `scores[i]` are `sampling.scores` of the target's logits at node i; at temperature 0
    the logits themselves, and no rule is needed: the path that equals the argmax stays.
    """
    valid = jnp.asarray(True)
    if sampling.greedy:
        best = sampling.best(scores)
        n, node = verify_tokens(draft, best, tree)
        bonus = best[node]
    else:
        accept_key, bonus_key = jax.random.split(key)
        u = jax.random.uniform(accept_key, (rule.num_uniforms(tree),))
        decision = rule.decide(draft, Laws.of(scores), tree, u, *rule.params)
        n, node = decision.num_accepted, decision.node
        bonus = categorical(decision.law, bonus_key)
        if rule.drawn and isinstance(tree, Tree):
            valid = _was_drawn(draft, tree)

    chain = isinstance(tree, Tree) and tree.is_chain
    slot = jnp.arange(tree.depth + 1)
    path = None
    kept = jnp.pad(draft.tokens, (0, 1))
    if not chain:
        _, ancestors, depths = topology(draft, tree)
        path = path_to(node, n, ancestors, depths, tree.depth)
        kept = jnp.pad(draft.tokens[path[1:] - 1], (0, 1))
    kept = jnp.where(slot < n, kept, PAD)
    return Verdict(n, jnp.where(slot == n, bonus, kept), valid, path)


def followed(
    draft: Draft, verdict: Verdict, tree: Tree | DynamicTree
) -> Int[Array, "D"]:
    """One sequence's drafted tokens down the accepted path and on, first child first.

    What a person is shown of a round: the tokens that were accepted, then those that
    were refused in their place; PAD where the draft has no more.
    """
    if isinstance(tree, Tree) and tree.is_chain:
        return draft.tokens
    assert verdict.path is not None
    parents, _, _ = topology(draft, tree)
    n, node = verdict.num_accepted, verdict.path[-1]
    tokens = jnp.pad(draft.tokens, (1, 0))
    seen = []
    for d in range(tree.depth):
        below = (parents == node) & (tokens != PAD)
        past = d >= n
        node = jnp.where(past, jnp.argmax(below), node)
        ended = past & ~jnp.any(below)
        seen.append(
            jnp.where(past, jnp.where(ended, PAD, tokens[node]), verdict.tokens[d])
        )
        tokens = jnp.where(ended, PAD, tokens)  # nothing follows an end
    return jnp.stack(seen)


def _was_drawn(draft: Draft, tree: Tree) -> Bool[Array, ""]:
    """Whether every token has q > 0 in the law it is said to come from."""
    rows = jnp.asarray(tree.inner_row)[np.array(tree.parents[1:], np.int32)]
    q = _pick(draft.laws, rows, draft.tokens)
    return jnp.all((q > 0) | (draft.tokens < 0))
