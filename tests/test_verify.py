"""The verification rule by exact enumeration, its edge cases and the greedy rule."""

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from f4 import ACCEPTED, JOINT, P, Q

from specjax import testing, verify
from specjax.sampling import GREEDY, Sampling


def random_dists(seed, V, zeros=0.0):
    rng = np.random.default_rng(seed)
    laws = rng.dirichlet(np.full(V, 0.7), 2) * (rng.random((2, V)) >= zeros)
    laws[:, 0] += 1e-3  # never all zero
    return jnp.asarray(laws / laws.sum(1, keepdims=True), jnp.float32)


def random_tables(seed, V, depth):
    """One law a prefix: p and q as functions of the tokens so far, with exact zeros."""
    rng = np.random.default_rng(seed)
    tables = {}
    for n in range(depth + 1):
        for prefix in np.ndindex((V,) * n):
            pair = rng.dirichlet(np.ones(V), 2) * (rng.random((2, V)) > 0.15)
            pair[:, n % V] += 0.05
            tables[prefix] = (pair / pair.sum(1, keepdims=True)).astype(np.float32)
    return lambda s: tables[s][0], lambda s: tables[s][1]


@jax.jit
@jax.vmap
def forced(tokens, q, p, u):
    """`verify_chain` with its uniforms forced: accepted drafts and the bonus's law."""
    laws = []
    uniform = lambda key, shape: u
    categorical = lambda law, key: laws.append(law) or jnp.zeros((), jnp.int32)
    with (
        mock.patch.object(jax.random, "uniform", uniform),
        mock.patch.object(verify, "categorical", categorical),
    ):
        verdict = verify.verify_chain(tokens, q, p, jax.random.key(0))
    return verdict.num_accepted, laws[0]


def chain_law(p_of, q_of, V, gamma):
    """The law of gamma + 1 tokens that the shipped rule gives, and E[accepted]."""
    drafts = np.array(list(np.ndindex((V,) * gamma)))
    q = np.array([[q_of(tuple(d[:k])) for k in range(gamma)] for d in drafts])
    p = np.array([[p_of(tuple(d[:k])) for k in range(gamma + 1)] for d in drafts])
    drawn = np.take_along_axis(q, drafts[:, :, None], 2)[..., 0].astype(np.float64)
    a = np.asarray(verify.accept_probs(jnp.asarray(q), jnp.asarray(p[:, :gamma])))
    a = np.take_along_axis(a, drafts[:, :, None], 2)[..., 0].astype(np.float64)

    law, accepted = np.zeros((V,) * (gamma + 1)), 0.0
    for n in range(gamma + 1):  # force the round to accept exactly n drafts
        u = np.where(np.arange(gamma) < n, a / 2, (1 + a) / 2).astype(np.float32)
        got, bonus = map(np.asarray, forced(*map(jnp.asarray, (drafts, q, p, u))))
        weight = drawn.prod(1) * a[:, :n].prod(1)
        weight = weight * (1 - a[:, n] if n < gamma else 1)
        assert np.all(got[weight > 1e-9] == n)
        accepted += n * weight.sum()
        for draft, w, last in zip(
            drafts[weight > 0], weight[weight > 0], bonus[weight > 0], strict=True
        ):
            for y in range(V):
                head = (*map(int, draft[:n]), y)
                rest = (
                    testing.joint_law(lambda s, h=head: p_of(h + s), gamma - n)
                    if n < gamma
                    else 1.0
                )
                law[head] += w * last[y] * rest
    return law, accepted


@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(8))
def test_one_position_is_lossless(seed, zeros):
    """q a + P(reject) r = p token by token: exact, so no seed or tolerance to tune."""
    q, p = random_dists(seed, 7, zeros)
    kept = q * verify.accept_probs(q, p)
    law = kept + (1 - jnp.sum(kept)) * verify.residual(q, p)
    np.testing.assert_allclose(law, p, atol=1e-6)


@pytest.mark.parametrize(("V", "gamma"), [(3, 1), (3, 2), (4, 2), (3, 3)])
def test_a_chain_has_the_targets_joint_law(V, gamma):
    p_of, q_of = random_tables(V * 10 + gamma, V, gamma)
    law, _ = chain_law(p_of, q_of, V, gamma)
    np.testing.assert_allclose(law, testing.joint_law(p_of, gamma + 1), atol=1e-6)


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_the_f4_chain_has_the_right_law_and_accepts_as_many_as_computed(gamma):
    first_order = lambda table: lambda s: table[s[-1] if s else 4].astype(np.float32)
    law, accepted = chain_law(first_order(P), first_order(Q), 4, gamma)
    pairs = law.reshape(4, 4, -1).sum(2).ravel()
    np.testing.assert_allclose(pairs, JOINT, atol=1e-6)
    assert accepted == pytest.approx(ACCEPTED[gamma], abs=1e-6)


@pytest.mark.parametrize(
    ("p", "q", "alpha", "left"),
    [
        ((0.5, 0.3, 0.2), (0.2, 0.5, 0.3), 0.7, (1, 0, 0)),
        ((0.3, 0.25, 0.25, 0.2), (0.55, 0.25, 0.15, 0.05), 0.75, (0, 0, 0.4, 0.6)),
    ],
)
def test_golden_acceptance_and_residual(p, q, alpha, left):
    p, q = jnp.array(p), jnp.array(q)
    assert jnp.sum(q * verify.accept_probs(q, p)) == pytest.approx(alpha, abs=1e-6)
    np.testing.assert_allclose(verify.residual(q, p), left, atol=1e-6)


def test_a_uniform_of_zero_does_not_accept_a_token_of_probability_zero():
    tokens = jnp.array([[0]])
    q, p = jnp.array([[[1.0, 0.0]]]), jnp.array([[[0.0, 1.0], [0.5, 0.5]]])
    n, law = forced(tokens, q, p, jnp.zeros((1, 1)))
    assert n[0] == 0
    np.testing.assert_array_equal(law[0], [0, 1])


def test_equal_laws_accept_everything_even_at_the_largest_uniform():
    p = jnp.tile(random_dists(0, 5)[0], (1, 4, 1))
    below_one = jnp.full((1, 3), np.nextafter(np.float32(1), np.float32(0)))
    n, law = forced(jnp.array([[0, 3, 1]]), p[:, :3], p, below_one)
    assert n[0] == 3
    np.testing.assert_array_equal(law[0], p[0, 3])


def test_the_residual_of_equal_laws_is_finite():
    p, _ = random_dists(1, 6)
    np.testing.assert_array_equal(verify.residual(p, p), p)


def test_disjoint_supports_always_reject_and_emit_from_p():
    q, p = jnp.array([0.5, 0.5, 0, 0]), jnp.array([0, 0, 0.25, 0.75])
    assert not np.any(verify.accept_probs(q, p))
    np.testing.assert_allclose(verify.residual(q, p), p)


def test_a_drafted_token_that_its_own_law_excludes_is_reported():
    q, p = jnp.array([[0.0, 1.0]]), jnp.full((2, 2), 0.5)
    verdict = verify.verify_chain(jnp.array([0]), q, p, jax.random.key(0))
    assert not verdict.valid and verdict.num_accepted == 0
    assert np.all(np.isfinite(verify.accept_probs(q, p[:1])))


@pytest.mark.parametrize(
    ("q", "acceptance"), [((1, 0, 0), 0.5), ((0.6, 0.3, 0.1), 0.9), ((0, 0, 1), 0.2)]
)
def test_any_true_draft_law_keeps_the_targets_law(q, acceptance):
    """C5: an argmax draft has a one-hot q, a drawn one the law it was drawn from."""
    p, q = jnp.array([0.5, 0.3, 0.2]), jnp.array(q, jnp.float32)
    kept = q * verify.accept_probs(q, p)
    np.testing.assert_allclose(
        kept + (1 - kept.sum()) * verify.residual(q, p), p, atol=1e-6
    )
    assert float(kept.sum()) == pytest.approx(acceptance)


def test_an_argmax_draft_verified_with_its_softmax_is_caught():
    """C5's wrong law (0.8333, 0, 0.1667): what storing the softmax as q would give."""
    p, q = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.6, 0.3, 0.1])
    accept = verify.accept_probs(q, p)[0]
    law = accept * jnp.array([1.0, 0, 0]) + (1 - accept) * verify.residual(q, p)
    np.testing.assert_allclose(law, [0.833333, 0, 0.166667], atol=1e-5)


def test_greedy_keeps_the_matching_prefix_and_adds_the_targets_token():
    best = jnp.array([4, 7, 2, 9])
    for drafts in itertools.product([4, 5], [7, 8], [2, 3]):
        verdict = verify.verify_greedy(jnp.array(drafts), best)
        n = next(
            (
                i
                for i, (d, b) in enumerate(zip(drafts, [4, 7, 2], strict=True))
                if d != b
            ),
            3,
        )
        right = [4, 7, 2, 9][: n + 1] + [verify.PAD] * (3 - n)
        assert int(verdict.num_accepted) == n
        assert verdict.tokens.tolist() == right


def test_temperature_zero_is_the_general_rule_with_a_one_hot_target():
    logits = jax.random.normal(jax.random.key(3), (4, 6))
    tokens = jnp.argmax(logits[:3], -1).astype(jnp.int32).at[2].set(0)
    q = jax.nn.one_hot(tokens, 6)
    greedy = verify.verify(tokens, q, logits, GREEDY, jax.random.key(0))
    general = verify.verify_chain(tokens, q, GREEDY.probs(logits), jax.random.key(0))
    assert greedy.tokens.tolist() == general.tokens.tolist()


def test_the_bonus_obeys_the_sampling_settings():
    """Row 16 of the planted bugs: the row after the draft is processed as others."""
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]]))
    q, sampling = jnp.array([[1.0, 0, 0]]), Sampling(temperature=0.5, top_k=2)
    keys = jax.random.split(jax.random.key(0), 4000)
    run = jax.vmap(lambda k: verify.verify(jnp.array([0]), q, logits, sampling, k))
    verdict = jax.jit(run)(keys)
    bonus = np.asarray(verdict.tokens)[np.asarray(verdict.num_accepted) == 1, 1]
    law = np.array([0.36, 0.09, 0]) / 0.45
    assert testing.chi_square(np.bincount(bonus, minlength=3), law) > 1e-6


def test_no_draft_means_one_token_of_the_target():
    p = jnp.array([[0.0, 1.0, 0.0]])
    empty = jnp.zeros((0,), jnp.int32), jnp.zeros((0, 3))
    verdict = verify.verify_chain(*empty, p, jax.random.key(0))
    assert verdict.tokens.tolist() == [1] and verdict.num_accepted == 0
