"""The verification rules by exact enumeration, their edge cases and the greedy rule."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import draft_tree, testing, verify
from specjax.certify import exact
from specjax.certify.f4 import ACCEPTED, JOINT, P, Q
from specjax.sampling import GREEDY, Sampling
from specjax.tree import DynamicTree, Tree
from specjax.verify import PAD, RULES, Draft

TOKEN = RULES["token"]
D3 = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
D4 = np.array([0.3, 0.25, 0.25, 0.2]), np.array([0.55, 0.25, 0.15, 0.05])


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


def committed(name, tree, p_of, q_of):
    """The law of depth + 1 tokens that a shipped rule gives, and E[accepted]."""
    draft, chance, p = exact.all_drafts(tree, q_of, p_of)
    joint = testing.joint_law(p_of, tree.depth + 1)
    return exact.commit_law(RULES[name], tree, draft, chance, p, joint), joint


def decide(tokens, q, p, u, rule="token"):
    """One chain, its uniforms given."""
    draft = Draft(jnp.asarray(tokens, jnp.int32), jnp.asarray(q, jnp.float32))
    tree = Tree.chain(len(tokens))
    p, u = jnp.asarray(p, jnp.float32), jnp.asarray(u, jnp.float32)
    return decide_of(draft, p, tree, u, RULES[rule])


# Compiled whole: op by op each test would compile dozens of programs.
@functools.partial(jax.jit, static_argnums=(2, 4))
def decide_of(draft, p, tree, u, rule):
    return rule.decide(draft, p, tree, u, *rule.params)


verify_of = jax.jit(verify.verify, static_argnums=(2, 4, 5))


@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(8))
def test_one_position_is_lossless(seed, zeros):
    """q a + P(reject) r = p token by token: exact, so no seed or tolerance to tune."""
    q, p = random_dists(seed, 7, zeros)
    kept = q * verify.accept_probs(q, p)
    law = kept + (1 - jnp.sum(kept)) * verify.residual(q, p)
    np.testing.assert_allclose(law, p, atol=1e-6)


SHAPES = [(3, (1,)), (3, (1, 1)), (4, (1, 1)), (3, (1, 1, 1))]
TREES = [(3, (2,)), (4, (3,)), (3, (2, 2)), (4, (2, 1)), (3, (2, 1, 1))]


@pytest.mark.parametrize("name", ["token", "block", "match", "recursive", "traversal"])
@pytest.mark.parametrize(("V", "widths"), SHAPES)
def test_a_chain_has_the_targets_joint_law(name, V, widths):
    p_of, q_of = random_tables(V * 10 + len(widths), V, len(widths))
    (law, _), joint = committed(name, Tree.full(*widths), p_of, q_of)
    np.testing.assert_allclose(law, joint, atol=1e-6)


@pytest.mark.parametrize("name", ["recursive", "traversal", "match"])
@pytest.mark.parametrize(("V", "widths"), TREES)
def test_a_tree_has_the_targets_joint_law(name, V, widths):
    p_of, q_of = random_tables(V * 10 + sum(widths), V, len(widths))
    (law, _), joint = committed(name, Tree.full(*widths), p_of, q_of)
    np.testing.assert_allclose(law, joint, atol=1e-6)


@pytest.mark.parametrize("name", ["recursive", "match"])
def test_siblings_drawn_with_replacement_have_the_targets_law_too(name):
    tree = Tree(Tree.full(2, 2).parents, replacement=True)
    p_of, q_of = random_tables(5, 3, 2)
    (law, _), joint = committed(name, tree, p_of, q_of)
    np.testing.assert_allclose(law, joint, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "widths"), [(name, w) for name in ACCEPTED for w in ACCEPTED[name]]
)
def test_f4_has_the_right_law_and_accepts_as_many_as_computed(name, widths):
    first_order = lambda table: lambda s: table[s[-1] if s else 4]
    drawn = np.eye(4)[Q.argmax(1)] if name == "argmax" else Q
    (law, accepted), _ = committed(
        name, Tree.full(*widths), first_order(P), first_order(drawn)
    )
    pairs = law.reshape(4, 4, -1).sum(2).ravel()
    if len(widths) > 1 or law.ndim > 1:
        np.testing.assert_allclose(pairs, JOINT, atol=1e-6)
    assert accepted == pytest.approx(ACCEPTED[name][widths], abs=1e-6)


@pytest.mark.parametrize(
    ("laws", "name", "accepted"),
    [
        (D3, "token", (0.7, 1.19, 1.533)),
        (D3, "block", (0.7, 1.25, 1.72)),
        (D4, "token", (0.75, 1.3125, 1.734375)),
        (D4, "block", (0.75, 1.355, 1.859625)),
    ],
)
def test_context_free_chains_accept_as_many_as_computed(laws, name, accepted):
    p, q = laws
    for gamma, right in enumerate(accepted, 1):
        (_, got), _ = committed(name, Tree.chain(gamma), lambda s: p, lambda s: q)
        assert got == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "accepted"),
    [("traversal", (1.64, 1.5581)), ("recursive", (1.6026, 1.4624))],
)
def test_context_free_trees_accept_as_many_as_computed(name, accepted):
    for (p, q), right in zip((D4, D3), accepted, strict=True):
        laws = (lambda s, p=p: p), (lambda s, q=q: q)
        (_, got), _ = committed(name, Tree.full(2, 2), *laws)
        assert got == pytest.approx(right, abs=6e-5)


def test_two_children_without_replacement_beat_two_with():
    p, q = D4
    for tree, right in ((Tree.full(2), 0.8611), (Tree((-1, 0, 0), True), 0.8)):
        (_, got), _ = committed("recursive", tree, lambda s: p, lambda s: q)
        assert got == pytest.approx(right, abs=6e-5)


def test_likeliest_children_are_accepted_with_their_own_probability():
    p, q = D4
    tree, best = Tree.full(2), np.argsort(-q)[:2].astype(np.int32)
    draft = Draft(tokens=jnp.asarray(best[None]), probs=None)
    law, got = exact.commit_law(
        RULES["match"], tree, draft, np.ones(1), np.tile(p, (1, 3, 1)), p
    )
    assert got == pytest.approx(0.55, abs=1e-6)
    np.testing.assert_allclose(law, p, atol=1e-6)


def test_traversal_is_what_its_paper_states_leaf_by_leaf():
    p_of, q_of = random_tables(11, 3, 3)
    tree = Tree((-1, 0, 0, 1, 1, 2, 3))
    draft, chance, p = exact.all_drafts(tree, q_of, p_of)
    joint = testing.joint_law(p_of, 4)
    ours, _ = exact.commit_law(RULES["traversal"], tree, draft, chance, p, joint)
    stated = exact.traversal_outcomes(tree, draft, chance, p)
    np.testing.assert_allclose(
        ours, exact.add_up(tree, draft, stated, joint), atol=1e-6
    )


def test_traversal_of_a_chain_is_block_verification():
    p_of, q_of = random_tables(3, 4, 3)
    (_, block), _ = committed("block", Tree.chain(3), p_of, q_of)
    (_, traversal), _ = committed("traversal", Tree.chain(3), p_of, q_of)
    assert block == pytest.approx(traversal, abs=1e-6)


@pytest.mark.parametrize("name", ["block", "token", "match"])
def test_a_chain_that_is_cut_short_before_it_is_drawn_keeps_the_law(name):
    """PAD ends a draft; the bonus there is drawn from p itself."""
    p_of, q_of = random_tables(21, 3, 2)
    draft, chance, p = exact.all_drafts(Tree.chain(2), q_of, p_of)
    cut = Draft(tokens=draft.tokens.at[:, 1].set(PAD), probs=draft.probs)
    joint = testing.joint_law(p_of, 3)
    law, _ = exact.commit_law(RULES[name], Tree.chain(2), cut, chance, p, joint)
    np.testing.assert_allclose(law, joint, atol=1e-6)


@pytest.mark.parametrize("name", ["recursive", "traversal", "match"])
def test_a_node_that_does_not_exist_and_a_repeated_sibling_are_never_accepted(name):
    """C6: siblings (0, PAD) and, for `match`, (0, 0): the law stays p."""
    p, q = D4
    tree = Tree.full(2)
    for second in (PAD, 0) if name == "match" else (PAD,):
        tokens = jnp.asarray([[first, second] for first in range(4)], jnp.int32)
        probs = jnp.asarray(np.tile(q, (4, 1, 1)), jnp.float32)
        rows = np.tile(p, (4, 3, 1))
        law, _ = exact.commit_law(RULES[name], tree, Draft(tokens, probs), q, rows, p)
        if second == PAD:
            np.testing.assert_allclose(law, p, atol=1e-6)
    if name == "match":
        decision = decide_of(
            Draft(jnp.array([0, 0]), None),
            jnp.asarray(rows[0], jnp.float32),
            tree,
            jnp.array([1.0, 0.0]),
            RULES[name],
        )
        assert decision.num_accepted == 0 and decision.law[0] == 0


def test_forgetting_to_renormalise_q_after_a_sibling_gives_the_wrong_law_of_c6():
    p, q = np.array([0.1, 0.4, 0.3, 0.2]), np.array([0.6, 0.2, 0.1, 0.1])
    (law, _), _ = committed("recursive", Tree.full(2), lambda s: p, lambda s: q)
    np.testing.assert_allclose(law.sum(1), p, atol=1e-6)


def test_typical_acceptance_keeps_the_longest_plausible_path_and_is_named_lossy():
    rule = RULES["lossy_typical"]
    assert not rule.lossless and all(
        r.lossless for n, r in RULES.items() if n[:5] != "lossy"
    )
    tree = Tree((-1, 0, 0, 1, 2))  # two paths of two; the second is likelier
    p = jnp.full((5, 4), 0.25).at[0].set(jnp.array([0.2, 0.6, 0.1, 0.1]))
    draft = Draft(jnp.array([0, 1, 2, 3]), None)
    decision = decide_of(draft, p, tree, jnp.zeros(0), rule)
    assert decision.num_accepted == 2 and decision.node == 4
    unlikely = Draft(jnp.array([3, 2, 2, 3]), None)
    p = p.at[0].set(jnp.array([0.97, 0.01, 0.01, 0.01]))
    assert decide_of(unlikely, p, tree, jnp.zeros(0), rule).num_accepted == 0


def test_a_run_time_topology_gives_what_the_same_static_tree_gives():
    tree = Tree((-1, 0, 0, 1, 2, 2))
    dynamic = DynamicTree(num_nodes=6, depth=2, width=4)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 5, 5), jnp.int32)
    logits = jnp.asarray(rng.normal(size=(6, 5)), jnp.float32)
    parents = jnp.asarray(tree.parents, jnp.int32)
    for seed in range(20):
        key = jax.random.key(seed)
        for sampling in (Sampling(), GREEDY):
            rule = RULES["match"]
            a = verify_of(Draft(tokens, None), logits, sampling, key, tree, rule)
            b = verify_of(
                Draft(tokens, None, parents), logits, sampling, key, dynamic, rule
            )
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.path.tolist() == b.path.tolist()


def test_the_greedy_walk_takes_the_first_of_twins_and_goes_past_rejected_siblings():
    tree = Tree((-1, 0, 0, 0, 2, 3))
    draft = Draft(jnp.array([1, 4, 4, 7, 7]), None)
    best = jnp.array([4, 9, 7, 7, 2, 3])
    n, node = verify.verify_tokens(draft, best, tree)
    assert (int(n), int(node)) == (2, 4)


@pytest.mark.parametrize(
    ("rule", "tree", "drafting", "message"),
    [
        ("token", Tree.full(2), Sampling(), "verifies a chain"),
        ("recursive", DynamicTree(3, 1, 2), Sampling(), "verified by match"),
        ("traversal", Tree.full(2), GREEDY, "drawn from a law"),
        ("traversal", Tree((-1, 0, 0), True), Sampling(), "without replacement"),
    ],
)
def test_a_rule_that_would_not_be_exact_is_refused(rule, tree, drafting, message):
    with pytest.raises(ValueError, match=message):
        verify.check(rule, tree, drafting)


def test_an_unknown_rule_names_the_known_ones():
    with pytest.raises(KeyError, match="token, block, recursive, traversal, match"):
        verify.get("rejection")


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
    for rule in ("token", "block", "match", "traversal"):
        got = decide([0], [[1.0, 0.0]], [[0.0, 1.0], [0.5, 0.5]], [0.0], rule)
        assert got.num_accepted == 0
        np.testing.assert_array_equal(got.law, [0, 1])


def test_equal_laws_accept_everything_even_at_the_largest_uniform():
    p = jnp.tile(random_dists(0, 5)[0], (4, 1))
    below_one = jnp.full(3, np.nextafter(np.float32(1), np.float32(0)))
    for rule in ("token", "block"):
        got = decide([0, 3, 1], p[:3], p, below_one, rule)
        assert got.num_accepted == 3
        np.testing.assert_allclose(got.law, p[3], atol=1e-7)


def test_the_residual_of_equal_laws_is_finite():
    p, _ = random_dists(1, 6)
    np.testing.assert_array_equal(verify.residual(p, p), p)


def test_disjoint_supports_always_reject_and_emit_from_p():
    q, p = jnp.array([0.5, 0.5, 0, 0]), jnp.array([0, 0, 0.25, 0.75])
    assert not np.any(verify.accept_probs(q, p))
    np.testing.assert_allclose(verify.residual(q, p), p)


def test_a_drafted_token_that_its_own_law_excludes_is_reported():
    q, p = jnp.array([[0.0, 1.0]]), jnp.full((2, 2), 0.5)
    draft = Draft(jnp.array([0]), q)
    verdict = verify_of(
        draft, jnp.log(p), Sampling(), jax.random.key(0), Tree.chain(1), TOKEN
    )
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
        n_accepted, node = verify.verify_tokens(
            Draft(jnp.array(drafts), None), best, Tree.chain(3)
        )
        n = next(
            (
                i
                for i, (d, b) in enumerate(zip(drafts, [4, 7, 2], strict=True))
                if d != b
            ),
            3,
        )
        assert int(n_accepted) == n == int(node)


def test_temperature_zero_is_the_general_rule_with_a_one_hot_target():
    logits = jax.random.normal(jax.random.key(3), (4, 6))
    tokens = jnp.argmax(logits[:3], -1).astype(jnp.int32).at[2].set(0)
    q = jax.nn.one_hot(tokens, 6)
    greedy = verify_of(
        Draft(tokens, q), logits, GREEDY, jax.random.key(0), Tree.chain(3), TOKEN
    )
    general = decide(tokens, q, GREEDY.probs(logits), [0.5, 0.5, 0.5])
    n = int(general.num_accepted)
    assert greedy.num_accepted == n
    assert greedy.tokens.tolist()[:n] == tokens.tolist()[:n]
    assert greedy.tokens[n] == jnp.argmax(general.law)


def test_greedy_takes_no_nan_and_no_id_beyond_the_tokenizer():
    logits = jnp.array([[0.0, jnp.nan, 1.0, 9.0]])
    empty = Draft(jnp.zeros((0,), jnp.int32), jnp.zeros((0, 4)))
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature, num_ids=3)
        scores = sampling.scores(logits) if temperature else logits
        drawn = [
            verify_of(
                empty, scores, sampling, jax.random.key(s), Tree.chain(0), TOKEN
            ).tokens[0]
            for s in range(20)
        ]
        assert {int(x) for x in drawn} <= ({2} if temperature == 0 else {0, 2})


def test_the_bonus_obeys_the_sampling_settings():
    """Row 16 of the planted bugs: the row after the draft is processed as others."""
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]]))
    q, sampling = jnp.array([[1.0, 0, 0]]), Sampling(temperature=0.5, top_k=2)
    keys = jax.random.split(jax.random.key(0), 4000)
    draft, tree = Draft(jnp.array([0]), q), Tree.chain(1)
    scores = sampling.scores(logits)
    judge = lambda k: verify.verify(draft, scores, sampling, k, tree, TOKEN)
    run = jax.vmap(judge)
    verdict = jax.jit(run)(keys)
    bonus = np.asarray(verdict.tokens)[np.asarray(verdict.num_accepted) == 1, 1]
    law = np.array([0.36, 0.09, 0]) / 0.45
    assert testing.chi_square(np.bincount(bonus, minlength=3), law) > 1e-6


def test_no_draft_means_one_token_of_the_target():
    for name in ("token", "block", "match"):
        got = decide([], np.zeros((0, 3)), [[0.0, 1.0, 0.0]], [], name)
        assert got.num_accepted == 0 and got.law.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("accepted", "right"), [([0, 2], [2, 3, 0]), ([0], [1, PAD, PAD])]
)
def test_what_is_shown_of_a_tree_is_the_path_and_what_was_refused_after_it(
    accepted, right
):
    """Nodes 1 and 2 under the anchor, 3 under 2, 4 under 3."""
    tree = Tree((-1, 0, 0, 2, 3))
    draft = Draft(jnp.array([1, 2, 3, 0]), None)
    n = len(accepted) - 1
    path = jnp.asarray((accepted + [accepted[-1]] * 4)[:4], jnp.int32)
    tokens = jnp.asarray(([*[2][:n], 7, PAD, PAD, PAD])[:4], jnp.int32)
    verdict = verify.Verdict(jnp.asarray(n), tokens, jnp.asarray(True), path)
    assert verify.followed(draft, verdict, tree).tolist() == right


@pytest.mark.parametrize("name", ["token", "block", "recursive", "traversal", "match"])
def test_what_verify_draws_has_the_targets_joint_law(name):
    """Its own keys and its laws of scores that differ by a constant a row."""
    chain = name in ("token", "block")
    tree, rows = Tree.chain(2) if chain else Tree((-1, 0, 0, 1)), 20_000
    q = np.array([[0.6, 0.25, 0.15], [0.2, 0.3, 0.5]])
    p = np.array([[0.3, 0.5, 0.2], [0.5, 0.1, 0.4], [0.2, 0.2, 0.6]])
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(q, jnp.float32)), (rows, 2, 3))
    keys = jax.random.split(jax.random.key(0), rows)
    draft = draft_tree.from_laws(tree, logits, Sampling(), keys)
    scores = np.log(p)[tree.depths] + 1.5 * tree.depths[:, None]
    scores = jnp.asarray(scores, jnp.float32)
    judge = lambda d, k: verify.verify(d, scores, Sampling(), k, tree, RULES[name])
    keys = jax.random.split(jax.random.key(1), rows)
    verdict = jax.jit(jax.vmap(judge))(draft, keys)
    texts, n = np.array(verdict.tokens), np.asarray(verdict.num_accepted)[:, None]
    assert np.all((texts == PAD) == (np.arange(3) > n))
    rng = np.random.default_rng(0)
    for d in range(3):  # what the next rounds would draw
        more = rng.choice(3, rows, p=p[d])
        texts[:, d] = np.where(texts[:, d] == PAD, more, texts[:, d])
    law = np.einsum("i,j,k->ijk", *p)
    assert testing.chi_square(testing.count(texts, 3), law) > testing.FALSE_ALARM
