"""Wrong rules that look right; a certificate that misses one of them is worth nothing.

Numbers and laws are those of the bank in `f4`: on that fixture every bug shows in the
joint of two tokens, while the first token alone would hide ten of them. A bug counts as
caught only if it is caught on `f4` and on one of two further random fixtures. Where the
law of a wrong rule can be summed it is (`exact`), else it is sampled.

A wrong rule is the shipped one with a line replaced wherever that can be done.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from specjax import scheduler, testing, verify
from specjax.certify import exact, f4
from specjax.sampling import categorical
from specjax.tree import Tree
from specjax.verify import RULES, Draft, Rule

ROWS = 30_000  # enough for the hardest sampled bug, 11, on two of three fixtures

ONE, TWO = Tree.chain(1), Tree.chain(2)
WIDE, BUSHY = Tree.full(2), Tree.full(2, 2)


def patched(name: str, **lines: Any) -> Rule:
    """A shipped rule with functions of `verify` replaced while it is traced."""
    right = RULES[name]

    def decide(*args):
        with mock.patch.multiple(verify, **lines):
            return right.decide(*args)

    return dataclasses.replace(right, decide=decide)


def wrapped(name: str, before=None, after=None) -> Rule:
    """A shipped rule whose input or decision is changed."""
    right = RULES[name]

    def decide(draft, p, tree, u, *params):
        if before is not None:
            draft, p = before(draft, p)
        decision = right.decide(draft, p, tree, u, *params)
        return decision if after is None else after(decision, draft, p)

    return dataclasses.replace(right, decide=decide)


unit = lambda law: law / law.sum(-1, keepdims=True)
one_hot = lambda table: np.eye(table.shape[1])[table.argmax(1)]
softer = lambda table: unit(np.sqrt(table))
with_law = lambda change: (
    lambda decision, draft, p: dataclasses.replace(
        decision, law=change(decision, draft, p)
    )
)
from_p = with_law(lambda decision, draft, p: p[decision.node])
with_tokens = lambda change: (
    lambda draft, p: (
        dataclasses.replace(draft, tokens=change(draft)),
        p,
    )
)


def sorted_by(key):
    """Siblings under the anchor in another order than that of their draw."""

    def decide(draft, p, tree, u):
        order = jnp.argsort(key(draft), stable=True)
        moved = dataclasses.replace(draft, tokens=draft.tokens[order])
        p = p.at[1:].set(p[1:][order])
        decision = verify.recursive(moved, p, tree, u)
        node = jnp.pad(order + 1, (1, 0))[decision.node]  # its number before
        return dataclasses.replace(decision, node=node)

    return dataclasses.replace(RULES["recursive"], decide=decide)


def first_residual_row(draft, p, tree, u):
    first = lambda q, p: verify_residual(
        jnp.where(jnp.any(q > 0), draft.probs[0], q), p
    )
    verify_residual = verify.residual
    with mock.patch.object(verify, "residual", first):
        return verify.token(draft, p, tree, u)


def unsure_removed(draft):
    q = jnp.take_along_axis(draft.probs, draft.tokens[:, None], 1)[:, 0]
    sure = jnp.cumprod((q >= 0.3).astype(jnp.int32)) > 0
    return jnp.where(sure, draft.tokens, verify.PAD)


def stopped(rule: str, lengths: Callable[..., Any]) -> Rule:
    """Two drafts, stopped by how likely each is accepted: by sum min(p, q) of its row.

    `lengths(confidence [1 2], live)` as in `scheduler`.
    """

    def tokens(draft, p):
        c = jnp.sum(jnp.minimum(p[:2], draft.probs), axis=1)
        batch = Draft(tokens=draft.tokens[None], probs=None)
        cut = scheduler.cut(batch, lengths(c[None], jnp.ones((1,), bool)))
        return dataclasses.replace(draft, tokens=cut.tokens[0]), p

    return wrapped(rule, tokens)


def ahead(confidence, live):
    """Both drafts, or none if the second is unsure: that depends on the first."""
    del live
    return jnp.where(confidence[:, 1] >= 0.7, 2, 0)


def searched(confidence, live):
    """Algorithm 1 without its stop at the first candidate that does not pay."""
    passes = (1.0, 0.5, 1 / 2.4)
    count = scheduler.capacity(confidence, passes, live)
    return scheduler.top(confidence, count, live)


def unclipped_residual(decision, draft, p):
    q = jnp.pad(draft.probs, ((0, 1), (0, 0)))
    return verify.residual(q[decision.num_accepted], p[decision.num_accepted])


def divided_by_the_rest(pi, p, q, x):
    excess = jnp.maximum(pi * p - q, 0.0)
    pi = jnp.minimum(1.0, jnp.sum(excess) / (1 - q[x]))
    return pi, verify.normalise(excess, p), verify.without(q, x)


def entered_at_the_start(draft, p, tree, u):
    """pi of all nodes from the laws as they were before any failure."""
    pi = [jnp.ones(())]
    for node, parent in enumerate(tree.parents[1:], 1):
        q = draft.probs[tree.inner_row[parent]]
        pi.append(verify.enter(pi[parent], p[parent], q, draft.tokens[node - 1]))
    order: list[int] = []

    def walk(node):
        for kid in tree.children[node]:
            if kid >= 0:
                order.append(int(kid))
                walk(int(kid))

    walk(0)
    entered = iter([pi[node] for node in order])
    with mock.patch.object(verify, "enter", lambda *args: next(entered)):
        return verify.traversal(draft, p, tree, u)


@dataclasses.dataclass(frozen=True)
class Bug:
    """A wrong rule, or right rule fed wrongly, on a tree."""

    name: str
    tree: Tree
    rule: Rule | None = None  # summed exactly
    sample: Callable[..., Any] | None = None  # or (draft, p, key, noise) -> n, tokens
    outcomes: Callable[..., Any] | None = None  # or as `exact.traversal_outcomes`
    drawn: Callable[[np.ndarray], np.ndarray] = lambda table: table  # drafts' own law
    top: bool = False  # children are the likeliest of q instead of drawn
    halved: bool = False  # the target halves what was already drafted


def uniforms(draft, p, key):
    u = jax.random.uniform(key, draft.tokens.shape)
    return u, verify.token(draft, p, TWO, u)


def goes_on_after_a_rejection(draft, p, key, noise):
    del noise
    u_key, *keys = jax.random.split(key, 3)
    drawn = verify.accept_probs(
        verify._pick(draft.probs, np.arange(2), draft.tokens),
        verify._pick(p, np.arange(2), draft.tokens),
    )
    accepted = jax.random.uniform(u_key, drawn.shape) < drawn
    fixed = [
        categorical(verify.residual(draft.probs[k], p[k]), keys[k]) for k in range(2)
    ]
    return 2, jnp.where(accepted, draft.tokens, jnp.stack(fixed))


def one_uniform(rule):
    def sample(draft, p, key, noise):
        del noise
        u_key, bonus_key = jax.random.split(key)
        u = jnp.full(draft.tokens.shape, jax.random.uniform(u_key))
        decision = rule(draft, p, TWO, u)
        return _emit(draft, decision, categorical(decision.law, bonus_key))

    return sample


def accept_uniform_again(draft, p, key, noise):
    del noise
    u, decision = uniforms(draft, p, key)
    u = jnp.append(u, jax.random.uniform(jax.random.fold_in(key, 1)))
    u = u[decision.num_accepted]
    bonus = jnp.sum(jnp.cumsum(decision.law) < u)
    return _emit(draft, decision, bonus)


def draft_noise_again(draft, p, key, noise):
    _, decision = uniforms(draft, p, key)
    more = jax.random.gumbel(jax.random.fold_in(key, 1), (1, 4))
    g = jnp.concatenate([noise, more])[decision.num_accepted]
    log = jnp.log(jnp.maximum(decision.law, 1e-30))
    return _emit(draft, decision, jnp.argmax(log + g))


def one_gumbel_for_both_rows(draft, p, key, noise):
    del noise
    y = jnp.argmax(jnp.log(p) + jax.random.gumbel(key, (1, 4)), axis=1)
    n = (y[0] == draft.tokens[0]).astype(jnp.int32)
    return n, jnp.where(n > 0, y, jnp.stack([y[0], y[0]]))


def _emit(draft, decision, bonus):
    n = decision.num_accepted
    kept = jnp.pad(draft.tokens, (0, 1))[:2]
    return n, jnp.where(jnp.arange(2) == n, bonus.astype(jnp.int32), kept)


swap_rows = lambda draft, p: (draft, p.at[2].set(p[1]))
BUGS: dict[int, Bug] = {
    1: Bug(
        "after a rejection draw from p", TWO, patched("token", residual=lambda q, p: p)
    ),
    2: Bug(
        "residual of |p - q|",
        TWO,
        patched("token", residual=lambda q, p: unit(jnp.abs(p - q))),
    ),
    3: Bug(
        "residual always with q of position 1",
        TWO,
        dataclasses.replace(RULES["token"], decide=first_residual_row),
    ),
    4: Bug(
        "bonus from the row before",
        ONE,
        wrapped("token", lambda draft, p: (draft, p.at[-1].set(p[-2]))),
    ),
    5: Bug(
        "drawn draft accepted with probability p",
        TWO,
        patched("token", accept_probs=lambda q, p: p),
    ),
    6: Bug(
        "accept with min(1, q / p)",
        TWO,
        patched("token", accept_probs=lambda q, p: jnp.minimum(1.0, q / p)),
    ),
    7: Bug(
        "count of passing tests, not their prefix",
        TWO,
        patched("token", _prefix=lambda mask: jnp.sum(mask.astype(jnp.int32))),
    ),
    8: Bug("goes on after a rejection", TWO, sample=goes_on_after_a_rejection),
    9: Bug("one uniform for all positions", TWO, sample=one_uniform(verify.token)),
    10: Bug("accept uniform draws the residual too", TWO, sample=accept_uniform_again),
    11: Bug("draft noise draws the residual too", TWO, sample=draft_noise_again),
    12: Bug("argmax draft tested with its softmax", TWO, RULES["token"], drawn=one_hot),
    13: Bug(
        "argmax draft accepted with p, softmax residual",
        TWO,
        patched("token", accept_probs=lambda q, p: p),
        drawn=one_hot,
    ),
    14: Bug("drawn at another temperature", TWO, RULES["token"], drawn=softer),
    15: Bug(
        "unsure token removed after it was drawn (look-ahead)",
        TWO,
        wrapped("token", with_tokens(unsure_removed)),
    ),
    16: Bug(
        "bonus from unprocessed logits",
        ONE,
        wrapped("token", lambda draft, p: (draft, p.at[-1].set(unit(p[-1] ** 0.5)))),
    ),
    17: Bug("block: passes with pi", TWO, patched("block", passes=lambda Z, pi: pi)),
    18: Bug(
        "block: stops at the first failure",
        TWO,
        patched("block", _last=verify._prefix),
    ),
    19: Bug(
        "block: residual without pi",
        TWO,
        wrapped("block", after=with_law(unclipped_residual)),
    ),
    20: Bug(
        "block: pi not clipped at 1",
        TWO,
        patched(
            "block",
            extend=lambda pi, ratio: pi * ratio,
            passes=lambda Z, pi: jnp.where(pi >= 1, 1.0, Z / (Z + 1 - pi)),
        ),
    ),
    21: Bug(
        "block: one uniform for all lengths", TWO, sample=one_uniform(verify.block)
    ),
    22: Bug(
        "siblings: q not renormalised",
        WIDE,
        patched(
            "recursive",
            without=lambda law, x: jnp.where(jnp.arange(len(law)) == x, 0.0, law),
        ),
    ),
    23: Bug(
        "siblings sorted by q",
        WIDE,
        sorted_by(lambda draft: -draft.probs[0, draft.tokens]),
    ),
    24: Bug(
        "siblings sorted by id",
        WIDE,
        sorted_by(lambda draft: draft.tokens),
    ),
    25: Bug(
        "siblings: p not reduced", WIDE, patched("recursive", residual=lambda q, p: p)
    ),
    26: Bug("siblings: bonus from p", WIDE, wrapped("recursive", after=from_p)),
    27: Bug(
        "siblings: q never changed",
        WIDE,
        patched("recursive", without=lambda law, x: law),
    ),
    28: Bug(
        "siblings drawn with replacement, tested as without",
        dataclasses.replace(WIDE, replacement=True),
        RULES["recursive"],
    ),
    29: Bug(
        "next row read under the first child",
        WIDE,
        wrapped("recursive", swap_rows),
    ),
    30: Bug(
        "likeliest siblings tested with softmax q", WIDE, RULES["recursive"], top=True
    ),
    31: Bug(
        "likeliest siblings tried without renormalising p",
        WIDE,
        patched("match", _share=lambda px, left: px),
        top=True,
    ),
    32: Bug(
        "match: a new sample after a mismatch",
        ONE,
        wrapped("match", after=from_p),
        drawn=one_hot,
    ),
    33: Bug(
        "match: one noise for two rows",
        ONE,
        sample=one_gumbel_for_both_rows,
        drawn=one_hot,
    ),
    34: Bug(
        "traversal: q not reduced",
        BUSHY,
        patched("traversal", without=lambda law, x: law),
    ),
    35: Bug(
        "traversal: pi over the rest of q",
        BUSHY,
        patched("traversal", lose=divided_by_the_rest),
    ),
    36: Bug(
        "traversal: pi not updated",
        BUSHY,
        patched("traversal", passes=lambda Z, pi: pi),
    ),
    37: Bug(
        "traversal: pi of later nodes not recomputed",
        BUSHY,
        dataclasses.replace(RULES["traversal"], decide=entered_at_the_start),
    ),
    38: Bug(
        "traversal: likeliest leaf first",
        BUSHY,
        outcomes=functools.partial(exact.traversal_outcomes, likeliest_first=True),
    ),
    39: Bug("traversal: bonus from p", BUSHY, wrapped("traversal", after=from_p)),
    40: Bug("typical acceptance", TWO, RULES["lossy_typical"], drawn=one_hot),
    41: Bug("penalty on the first row only", ONE, RULES["token"], halved=True),
    42: Bug(
        "draft stopped by what follows it (look-ahead)", TWO, stopped("token", ahead)
    ),
    43: Bug("scheduler searches this round's drafts", TWO, stopped("token", searched)),
}


def tables(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Laws p and q after each token and at the start [5 4]; seed 0 is F4."""
    if seed == 0:
        return f4.P, f4.Q
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(4, 2.0), (2, 5)) + 0.03
    return unit(p), unit(q)


def right_joint(p: np.ndarray, halved: bool = False) -> np.ndarray:
    """The target's law of two tokens [4 4]."""
    after = unit(p[:4] * (1 - 0.5 * np.eye(4))) if halved else p[:4]
    return p[4][:, None] * after


def law_of(bug: Bug, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Joint law of two tokens [4 4] that a summed bug gives on first-order tables."""
    at = lambda table: lambda text: table[text[-1] if text else 4]
    tree = bug.tree
    if bug.top:
        best = np.argsort(-q[4], kind="stable")[: tree.num_nodes - 1].astype(np.int32)
        draft = Draft(
            tokens=jnp.asarray(best[None]),
            probs=jnp.asarray(q[4][None, None], jnp.float32),
        )
        chance, rows = np.ones(1), p[np.r_[4, best]][None]
    else:
        draft, chance, rows = exact.all_drafts(tree, at(bug.drawn(q)), at(p))
        tokens = np.asarray(draft.tokens)
        texts = np.concatenate([np.full((len(tokens), 1), 4), tokens], axis=1)
        stored = jnp.asarray(q[texts[:, tree.inner]], jnp.float32)
        draft = dataclasses.replace(draft, probs=stored)
    tree = Tree(tree.parents)
    joint = right_joint(p, bug.halved)
    if tree.depth > 1:
        joint = joint[:, :, None] * p[None, :4]
    if bug.outcomes is not None:
        outcomes = bug.outcomes(tree, draft, chance, rows)
        law = exact.add_up(tree, draft, outcomes, joint)
    else:
        assert bug.rule is not None
        law, _ = exact.commit_law(bug.rule, tree, draft, chance, rows, joint)
    return law if law.ndim == 2 else law.sum(2)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=testing.FAST)
def _sample(sample, drawn_gamma: int, rows: int, drawn, p, q, key):
    def row(key):
        noise_key, rule_key, next_key = jax.random.split(key, 3)
        g = jax.random.gumbel(noise_key, (drawn_gamma, 4))
        tokens, at = [], jnp.asarray(4)
        for k in range(drawn_gamma):
            at = jnp.argmax(jnp.log(jnp.maximum(drawn[at], 1e-30)) + g[k])
            tokens.append(at.astype(jnp.int32))
        tokens = jnp.stack(tokens)
        at = jnp.concatenate([jnp.array([4]), tokens])
        n, new = sample(Draft(tokens, q[at[:-1]]), p[at], rule_key, g)
        after = categorical(p[new[0]], next_key)
        return 4 * new[0] + jnp.where(n > 0, new[1], after)

    return jax.vmap(row)(jax.random.split(key, rows))


def counts_of(bug: Bug, p: np.ndarray, q: np.ndarray, seed: int = 7) -> np.ndarray:
    """How often a sampled bug gives each pair of tokens, 16 cells."""
    arrays = (jnp.asarray(x, jnp.float32) for x in (bug.drawn(q), p, q))
    key = jax.random.key(seed)
    cells = _sample(bug.sample, bug.tree.depth, ROWS, *arrays, key)
    return np.bincount(np.asarray(cells), minlength=16)


def margins(bug: Bug, seeds=(0, 1, 2)) -> list[float]:
    """By what factor a bug is over what a right rule may show, a fixture each.

    Of a summed law TV over the tolerance; of a sampled one the false-alarm rate over
    the p-value. Above 1 it is caught.
    """
    found = []
    for seed in seeds:
        p, q = tables(seed)
        right = right_joint(p, bug.halved)
        if bug.sample is None:
            found.append(exact.tv(law_of(bug, p, q), right) / exact.TOLERANCE)
        else:
            p_value = testing.chi_square(counts_of(bug, p, q), right)
            found.append(testing.FALSE_ALARM / max(p_value, 1e-300))
    return found


def report() -> list[dict[str, Any]]:
    """Runs the bank: rows with name, caught and margin (the second best of three)."""
    rows = []
    for number, bug in BUGS.items():
        found = margins(bug)
        margin = min(found[0], max(found[1:]))
        rows.append(
            {
                "name": f"{number} {bug.name}",
                "method": "exact" if bug.sample is None else "chi-square",
                "caught": bool(margin > 1),
                "margin": float(margin),
            }
        )
    return rows
