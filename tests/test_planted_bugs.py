"""Wrong rules that look right: the statistical test must catch each, and name its law.

The numbers are those of the fixture's table. A wrong rule is the shipped one with one
line replaced wherever that can be done from outside. At a false-alarm rate of 1e-6 a
check the whole file fails a right program with probability 5e-5.
"""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from f4 import BUGS, JOINT, P, Q

from specjax import generate, testing, verify
from specjax.sampling import Sampling, categorical

ROWS = 30_000  # the hardest, row 11, needs 25,000
RIGHT = {name: getattr(verify, name) for name in ("residual", "accept_probs")}
unit = lambda law: law / jnp.sum(law, axis=-1, keepdims=True)
one_hot = lambda law: jax.nn.one_hot(jnp.argmax(law, -1), law.shape[-1])


def patched(target, **lines):
    """The shipped rule with functions of a module replaced while it is traced."""

    def rule(tokens, q, p, key, g):
        with mock.patch.multiple(target, **lines):
            return verify.verify_chain(tokens, q, p, key)

    return rule


shipped = patched(verify, PAD=verify.PAD)


def count_pairs(rule, gamma, *, drawn=Q, stored=Q, p=P, after=P):
    """Runs one round a row from the start; counts the first two tokens, 16 cells.

    Drafts are drawn from `drawn`, the rule is told `stored`, and a round of one token
    is continued from `after`.
    """
    drawn, stored, p, after = (
        jnp.asarray(x, jnp.float32) for x in (drawn, stored, p, after)
    )

    def row(key):
        noise_key, rule_key, next_key = jax.random.split(key, 3)
        g = jax.random.gumbel(noise_key, (gamma, 4))
        tokens, context = [], jnp.asarray(4)
        for k in range(gamma):
            context = jnp.argmax(jnp.log(drawn[context]) + g[k])
            tokens.append(context.astype(jnp.int32))
        tokens = jnp.stack(tokens)
        at = jnp.concatenate([jnp.array([4]), tokens])
        verdict = rule(tokens, stored[at[:-1]], p[at], rule_key, g)
        first, second = verdict.tokens[0], verdict.tokens[1]
        drawn_next = categorical(after[first], next_key)
        return 4 * first + jnp.where(verdict.num_accepted > 0, second, drawn_next)

    cells = jax.jit(jax.vmap(row))(jax.random.split(jax.random.key(7), ROWS))
    return np.bincount(np.asarray(cells), minlength=16)


def uniforms_and_prefix(tokens, q, p, key):
    u = jax.random.uniform(key, tokens.shape)
    drawn = jnp.take_along_axis(verify.accept_probs(q, p[:-1]), tokens[:, None], 1)
    accepted = u < drawn[:, 0]
    return u, accepted, jnp.sum(jnp.cumprod(accepted.astype(jnp.int32)))


def verdict(tokens, n, bonus):
    return verify._verdict(tokens, n, bonus.astype(jnp.int32), jnp.asarray(True))


def left(q, p, n):
    return verify.residual(jnp.pad(q, ((0, 1), (0, 0)))[n], p[n])


def first_residual_row(tokens, q, p, key, g):
    first = lambda qn, pn: RIGHT["residual"](jnp.where(jnp.any(qn > 0), q[0], qn), pn)
    return patched(verify, residual=first)(tokens, q, p, key, g)


def bonus_from_the_row_before(tokens, q, p, key, g):
    return shipped(tokens, q, p.at[-1].set(p[-2]), key, g)


def unprocessed_bonus(tokens, q, p, key, g):
    return shipped(tokens, q, p.at[-1].set(unit(jnp.sqrt(p[-1]))), key, g)


def goes_on_after_a_rejection(tokens, q, p, key, g):
    u_key, *keys = jax.random.split(key, 3)
    _, accepted, _ = uniforms_and_prefix(tokens, q, p, u_key)
    fixed = [categorical(left(q, p, k), keys[k]) for k in range(2)]
    tokens = jnp.where(accepted, tokens, jnp.stack(fixed))
    return verdict(tokens, jnp.asarray(2), tokens[0])


def accept_uniform_again(tokens, q, p, key, g):
    u, _, n = uniforms_and_prefix(tokens, q, p, key)
    u = jnp.append(u, jax.random.uniform(jax.random.fold_in(key, 1)))[n]
    return verdict(tokens, n, jnp.sum(jnp.cumsum(left(q, p, n)) < u))


def draft_noise_again(tokens, q, p, key, g):
    _, _, n = uniforms_and_prefix(tokens, q, p, key)
    g = jnp.concatenate([g, jax.random.gumbel(jax.random.fold_in(key, 1), (1, 4))])
    return verdict(tokens, n, jnp.argmax(jnp.log(left(q, p, n)) + g[n]))


def unsure_token_removed(tokens, q, p, key, g, kept=0):
    unsure = jnp.take_along_axis(q, tokens[:, None], 1)[:, 0] < 0.3
    sure = 1 - unsure.astype(jnp.int32)
    num_drafts = jnp.minimum(jnp.sum(jnp.cumprod(sure)) + kept, len(tokens))
    u_key, bonus_key = jax.random.split(key)
    _, _, n = uniforms_and_prefix(tokens, q, p, u_key)
    n = jnp.minimum(n, num_drafts)
    law = jnp.where(n == num_drafts, p[n], left(q, p, n))
    return verdict(tokens, n, categorical(law, bonus_key))


def new_sample_after_a_mismatch(tokens, q, p, key, g):
    keys = jax.random.split(key)
    n = (categorical(p[0], keys[0]) == tokens[0]).astype(jnp.int32)
    return verdict(tokens, n, categorical(p[n], keys[1]))


def one_gumbel_for_both_rows(tokens, q, p, key, g):
    y = jnp.argmax(jnp.log(p) + jax.random.gumbel(key, (1, 4)), axis=1)
    n = (y[0] == tokens[0]).astype(jnp.int32)
    return verdict(tokens, n, y[n])


def typical_acceptance(tokens, q, p, key, g):
    entropy = -jnp.sum(p[:-1] * jnp.log(p[:-1] + 1e-5), axis=1)
    drawn = jnp.take_along_axis(p[:-1], tokens[:, None], 1)[:, 0]
    accepted = drawn > jnp.minimum(0.09, 0.3 * jnp.exp(-entropy))
    n = jnp.sum(jnp.cumprod(accepted.astype(jnp.int32)))
    return verdict(tokens, n, categorical(p[n], key))


ratio_inverted = lambda q, p: jnp.minimum(1.0, q / p)
p_itself = lambda q, p: p
uniform = jax.random.uniform
ARGMAX = np.eye(4)[Q.argmax(1)]
HALVED = P * (1 - 0.5 * np.eye(5, 4))  # row 41: a token that was drafted counts half
HALVED = HALVED / HALVED.sum(1, keepdims=True)
RIGHT_41 = (P[4][:, None] * HALVED[:4]).ravel()

PLANTED = {
    1: (patched(verify, residual=lambda q, p: p), 2, {}),
    2: (patched(verify, residual=lambda q, p: unit(jnp.abs(p - q))), 2, {}),
    3: (first_residual_row, 2, {}),
    4: (bonus_from_the_row_before, 1, {}),
    5: (patched(verify, accept_probs=p_itself), 2, {}),
    6: (patched(verify, accept_probs=ratio_inverted), 2, {}),
    7: (patched(jnp, cumprod=lambda x: x), 2, {}),
    8: (goes_on_after_a_rejection, 2, {}),
    9: (patched(jax.random, uniform=lambda k, s: jnp.full(s, uniform(k))), 2, {}),
    10: (accept_uniform_again, 2, {}),
    11: (draft_noise_again, 2, {}),
    12: (shipped, 2, {"drawn": ARGMAX}),
    13: (patched(verify, accept_probs=p_itself), 2, {"drawn": ARGMAX}),
    14: (shipped, 2, {"drawn": np.sqrt(Q)}),
    15: (unsure_token_removed, 2, {}),
    16: (unprocessed_bonus, 1, {}),
    32: (new_sample_after_a_mismatch, 1, {"drawn": ARGMAX}),
    33: (one_gumbel_for_both_rows, 1, {"drawn": ARGMAX}),
    40: (typical_acceptance, 2, {"drawn": ARGMAX}),
    41: (shipped, 1, {"after": HALVED}),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_wrong_rule_is_caught_and_has_the_law_computed_for_it(bug):
    rule, gamma, tables = PLANTED[bug]
    counts = count_pairs(rule, gamma, **tables)
    right = RIGHT_41 if bug == 41 else JOINT
    assert testing.chi_square(counts, right) < testing.FALSE_ALARM
    assert testing.chi_square(counts, np.array(BUGS[bug])) > testing.FALSE_ALARM


SOFTENED = np.sqrt(Q) / np.sqrt(Q).sum(1, keepdims=True)
CONTROLS = {
    "one token": (shipped, 1, {}),
    "two tokens": (shipped, 2, {}),
    "three tokens": (shipped, 3, {}),
    "argmax draft as one-hot": (shipped, 2, {"drawn": ARGMAX, "stored": ARGMAX}),
    "draft temperature 2": (shipped, 2, {"drawn": SOFTENED, "stored": SOFTENED}),
    "cut after its unsure token": (
        lambda *a: unsure_token_removed(*a, kept=1),
        2,
        {},
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_right_rule_passes(control):
    rule, gamma, tables = CONTROLS[control]
    counts = count_pairs(rule, gamma, **tables)
    assert testing.chi_square(counts, JOINT) > testing.FALSE_ALARM


def test_the_first_token_alone_would_miss_a_bonus_from_the_wrong_row():
    """Why the joint is tested: this rule's first token has exactly the right law."""
    counts = count_pairs(bonus_from_the_row_before, 1).reshape(4, 4).sum(1)
    assert testing.chi_square(counts, P[4]) > testing.FALSE_ALARM


def test_a_hit_on_an_impossible_text_fails_outright():
    assert testing.chi_square(np.array([9_999, 1]), np.array([1.0, 0.0])) == 0


def one_key(keys, position):
    draft_keys, _ = round_keys(keys, position)
    return draft_keys, draft_keys


round_keys = generate._round_keys
ENGINE_BUGS = {
    "residual from p": (verify, {"residual": lambda q, p: p}),
    "inverted ratio": (verify, {"accept_probs": ratio_inverted}),
    "count instead of prefix": (jnp, {"cumprod": lambda x: x}),
    "one uniform for all": (jax.random, {"uniform": None}),
    "bonus from the wrong row": (verify, {"verify_chain": None}),
    "draft key used again": (generate, {"_round_keys": one_key}),
}


OFTEN = ("residual from p", "bonus from the wrong row")


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(b, marks=[] if b in OFTEN else pytest.mark.slow)
        for b in ENGINE_BUGS
    ],
)
def test_the_certificate_catches_a_broken_engine(bug):
    module, lines = ENGINE_BUGS[bug]
    chain = verify.verify_chain
    if bug == "one uniform for all":
        lines = {"uniform": lambda k, s: jnp.full(s, uniform(k))}
    if bug == "bonus from the wrong row":
        wrong = lambda t, q, p, k: chain(t, q, p.at[-1].set(p[-2]), k)
        lines = {"verify_chain": wrong}
    # A temperature of its own, so that JAX traces the engine with the bug inside.
    sampling = Sampling(temperature=1 + 1e-3 * list(ENGINE_BUGS).index(bug))
    with mock.patch.multiple(module, **lines):
        assert not testing.certify("draft_model", sampling).passed


def test_the_certificate_is_for_sampling_only():
    with pytest.raises(ValueError, match="needs a sampled law"):
        testing.certify("medusa", Sampling(temperature=0.0))
