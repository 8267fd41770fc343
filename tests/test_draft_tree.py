"""Trees of drafts: golden expansion, the laws of what is drawn, search and storage."""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import draft_tree, search, testing, tree, verify
from specjax.certify import exact
from specjax.generate import Model, Weights
from specjax.sampling import GREEDY, Sampling
from specjax.transformer import Shared
from specjax.tree import DynamicTree, Tree
from specjax.verify import PAD

V = 8


def path_logits(path):
    """Logits after a path of drafted tokens, in closed form."""
    weight = sum((2 + i) * token for i, token in enumerate(path))
    return 3 * np.sin(1 + 0.9 * np.arange(V) + weight)


def grow_from_paths(topology, sampling=GREEDY, seeds=(0,)):
    """`grow` over a drafter that remembers the path of every node in its carry."""
    B = len(seeds)
    slots = max(draft_tree.num_slots(topology), 1)
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds))
    first = jnp.broadcast_to(jnp.asarray(path_logits(()), jnp.float32), (B, V))

    def step(held, tokens, sees, level):
        """`held`: the token of each slot; a path weighs what its slots add up to."""
        W = tokens.shape[1]
        held = jax.lax.dynamic_update_slice(held, tokens, (0, level * W))
        depth = jnp.arange(slots, dtype=jnp.int32) // W
        share = (held * (2 + depth)[None])[:, None]
        weight = jnp.sum(jnp.where(sees, share, 0), axis=2).astype(jnp.float32)
        base = 1 + 0.9 * jnp.arange(V, dtype=jnp.float32)
        angle = weight[..., None] + base[None, None]
        return 3 * jnp.sin(angle), held

    @jax.jit
    def run(first, held, keys):
        return draft_tree.grow(topology, first, step, held, sampling, keys)[0]

    return run(first, jnp.zeros((B, slots), jnp.int32), keys)


def test_expansion_and_reranking_give_the_golden_tree_of_eagle_2():
    draft = grow_from_paths(DynamicTree(num_nodes=10, depth=3, width=3), seeds=(0, 1))
    for row in range(2):
        assert draft.tokens[row].tolist() == [1, 7, 0, 5, 6, 6, 1, 7, 3]
        assert draft.parents[row].tolist() == [-1, 0, 0, 0, 1, 1, 2, 3, 3, 4]


def test_the_golden_tree_has_the_recorded_candidates_scores_and_rows():
    """Number of a candidate: the level's first, then beam times 3, then rank."""
    draft = grow_from_paths(DynamicTree(num_nodes=10, depth=3, width=3))
    parents, beams = draft.parents[0].tolist(), {1: 0, 2: 1, 3: 2, 4: 0}
    paths, numbers, scores = {0: ()}, [], {0: 0.0}
    for node, x in enumerate(draft.tokens[0].tolist(), 1):
        above = parents[node]
        logits, depth = path_logits(paths[above]), len(paths[above])
        rank = int(np.argsort(-logits).tolist().index(x))
        first = (0, 3, 12)[depth] + 3 * beams.get(above, 0) * (depth > 0)
        numbers.append(first + rank)
        scores[node] = scores[above] + logits[x] - np.log(np.exp(logits).sum())
        paths[node] = (*paths[above], x)
    assert numbers == [0, 1, 2, 3, 4, 6, 9, 10, 12]
    right = [-1.009757, -1.297347, -1.324244, -1.766880, -2.017083]
    right += [-2.016467, -2.334001, -2.621591, -2.414478]
    np.testing.assert_allclose([scores[n] for n in range(1, 10)], right, atol=1e-6)
    leaves = [n for n in range(10) if n not in parents]
    rows = [[n] for n in leaves]
    for row in rows:
        while row[0]:
            row.insert(0, parents[row[0]])
    right = [[0, 1, 5], [0, 2, 6], [0, 3, 7], [0, 3, 8], [0, 1, 4, 9]]
    assert rows == right


def test_slots_of_a_level_see_their_path_and_idle_ones_themselves():
    """Nodes 1 and 2, then 3 under 1 and an idle slot."""
    tree = Tree((-1, 0, 0, 1, 2, 3))
    keys = jax.random.split(jax.random.key(0), 1)

    def step(seen, tokens, sees, level):
        return jnp.zeros((*tokens.shape, V)), seen.at[level].set(sees[0])

    seen = jnp.zeros((2, 2, 4), bool)
    _, seen = draft_tree.grow(tree, jnp.zeros((1, V)), step, seen, GREEDY, keys)
    right = [[[1, 0, 0, 0], [0, 1, 0, 0]], [[1, 0, 1, 0], [0, 0, 0, 1]]]
    assert seen.astype(jnp.int32).tolist() == right


def test_a_dynamic_tree_of_all_candidates_is_the_whole_beam():
    topology = DynamicTree(num_nodes=3 + 9 + 1, depth=2, width=3)
    draft = grow_from_paths(topology)
    assert sorted(np.bincount(draft.parents[0, 1:])) == [3, 3, 3, 3]


@pytest.mark.parametrize("topology", [Tree.full(2, 2, 1), Tree((-1, 0, 0, 1, 2, 2, 4))])
def test_a_static_tree_of_likeliest_children_is_what_a_loop_over_its_nodes_makes(
    topology,
):
    draft = grow_from_paths(topology)
    paths = {0: ()}
    for node, parent in enumerate(topology.parents[1:], 1):
        order = np.argsort(-path_logits(paths[parent]), kind="stable")
        paths[node] = (*paths[parent], int(order[topology.ranks[node]]))
    right = [paths[node][-1] for node in range(1, topology.num_nodes)]
    assert draft.tokens[0].tolist() == right


@pytest.mark.parametrize("topology", [Tree.full(3), DynamicTree(4, depth=1, width=3)])
def test_a_tree_of_one_level_is_grown_without_a_pass(topology):
    logits = jnp.asarray(path_logits(()), jnp.float32)[None]
    keys = jax.random.split(jax.random.key(0), 1)
    draft, carry = draft_tree.grow(topology, logits, pytest.fail, 5, GREEDY, keys)
    best = np.argsort(-path_logits(()))[:3].tolist()
    assert draft.tokens[0].tolist() == best and carry == 5
    assert draft_tree.num_slots(topology) == 0


def test_laws_of_a_grown_tree_are_those_of_its_inner_nodes():
    for parents in ((-1, 0, 0, 1, 2, 2, 4), (-1, 0, 1, 1, 2, 3), (-1, 0, 0)):
        check_laws(Tree(parents))


def check_laws(topology):
    draft = grow_from_paths(topology, Sampling(), seeds=range(4))
    for row in range(4):
        paths = {0: ()}
        for node, parent in enumerate(topology.parents[1:], 1):
            paths[node] = (*paths[parent], int(draft.tokens[row, node - 1]))
        for i, inner in enumerate(topology.inner):
            right = jax.nn.softmax(jnp.asarray(path_logits(paths[int(inner)])))
            np.testing.assert_allclose(draft.probs[row, i], right, atol=2e-5)


@pytest.mark.parametrize("replacement", [False, True])
def test_children_are_drawn_in_order_from_what_earlier_ones_left(replacement):
    topology = Tree((-1, 0, 0, 1), replacement)
    laws = jnp.asarray([[0.6, 0.25, 0.15], [0.2, 0.3, 0.5]])
    logits = jnp.broadcast_to(jnp.log(laws), (20_000, 2, 3))
    keys = jax.random.split(jax.random.key(0), 20_000)
    make = jax.jit(draft_tree.from_laws, static_argnums=(0, 2))
    draft = make(topology, logits, Sampling(), keys)
    drafts, chance, _ = exact.all_drafts(
        topology, lambda s: laws[len(s)], lambda s: laws[0]
    )
    np.testing.assert_allclose(exact.chance_of(topology, drafts), chance, atol=1e-6)
    law = np.zeros((3, 3, 3))
    np.add.at(law, tuple(np.asarray(drafts.tokens).T), chance)
    counts = testing.count(np.asarray(draft.tokens), 3)
    assert testing.chi_square(counts, law) > testing.FALSE_ALARM


def test_a_law_of_fewer_tokens_than_children_leaves_nodes_out():
    topology = Tree.full(3, 1)
    logits = jnp.log(jnp.asarray([[[0.9, 0.1, 0, 0], [0.25, 0.25, 0.25, 0.25]]]))
    for sampling in (Sampling(), GREEDY):
        draft = draft_tree.from_laws(
            topology, logits, sampling, jax.random.split(jax.random.key(0), 1)
        )
        tokens = draft.tokens[0].tolist()
        assert sorted(tokens[:2]) == [0, 1] and tokens[2] == PAD
        assert tokens[5] == PAD and PAD not in tokens[3:5]


def test_a_block_shallower_than_its_tree_is_refused():
    with pytest.raises(ValueError, match="knows 1 positions, the tree is 2 deep"):
        keys = jax.random.split(jax.random.key(0), 1)
        draft_tree.from_laws(Tree.chain(2), jnp.zeros((1, 1, 4)), GREEDY, keys)


def brute_force(accept, num_nodes):
    """The best tree by trying all sets of paths."""
    depths, ranks = accept.shape
    paths = [
        p
        for d in range(1, depths + 1)
        for p in itertools.product(range(ranks), repeat=d)
    ]
    worth = {p: np.prod([accept[i, r] for i, r in enumerate(p)]) for p in paths}
    best = 0.0
    for chosen in itertools.combinations(paths, num_nodes - 1):
        if all(len(p) == 1 or p[:-1] in chosen for p in chosen):
            best = max(best, sum(worth[p] for p in chosen))
    return best


def test_the_greedy_search_finds_the_best_tree():
    accept = np.array([[0.6, 0.2, 0.05], [0.5, 0.3, 0.1]])
    for num_nodes in (2, 4, 6):
        found = tree.best_tree(accept, num_nodes)
        worth = [1.0]
        for node, parent in enumerate(found.parents[1:], 1):
            at = accept[found.depths[node] - 1, found.ranks[node]]
            worth.append(worth[parent] * at)
        assert found.num_nodes == num_nodes
        assert sum(worth[1:]) == pytest.approx(brute_force(accept, num_nodes))


def test_a_tree_of_observed_paths_beats_one_that_assumes_independence():
    """Rank 1 is right at depth 2 exactly after rank 1 at depth 1."""
    ranks = np.array([[0, 0]] * 5 + [[1, 1]] * 5)
    by_rate = tree.best_tree(tree.rank_rates(ranks, 2), 5)
    observed = tree.best_observed_tree(ranks, 6, 2)
    assert tree.expected_tau(observed, ranks) == pytest.approx(3.0)
    assert tree.expected_tau(by_rate, ranks) < 3.0


def test_rates_and_expected_tau_count_what_reaches_a_depth():
    ranks = np.array([[0, 1], [0, 0], [1, 0], [5, 0]])
    rates = tree.rank_rates(ranks, 2)
    np.testing.assert_allclose(rates, [[0.5, 0.25], [2 / 3, 1 / 3]])
    chain = Tree.chain(2)
    assert tree.expected_tau(chain, ranks) == pytest.approx(1 + (2 + 1) / 4)


def test_a_rank_counts_likelier_ids_and_equal_ones_below():
    laws = jnp.array([[0.1, 0.4, 0.4, 0.1], [0.7, 0.1, 0.1, 0.1]])

    class Guess:
        def draft(self, params, shared, state, anchor, sampling, keys):
            both = jnp.broadcast_to(laws, (2, 2, 4))
            return verify.Draft(jnp.zeros((2, 2), jnp.int32), both), state

    one = jnp.ones((1, 1))
    target = types.SimpleNamespace(shared=lambda params: Shared(one, one))
    model, weights = Model(target, Guess(), GREEDY), Weights({}, {})
    here = {"anchor": jnp.zeros(2), "num_tokens": jnp.array([1, 0])}
    here |= {"state": None, "cache": None}
    rank = search._ranks.__wrapped__
    texts = jnp.array([[0, 2, 3, 1], [0, 2, 3, 1]])  # of row 0 come 2 3, of row 1 0 2
    ranks = rank(model, weights, types.SimpleNamespace(**here), texts)
    assert ranks.tolist() == [[1, 3], [2, 2]]


def test_a_tree_is_saved_and_loaded(tmp_path):
    for replacement in (False, True):
        topology = Tree(Tree.full(2, 2).parents, replacement)
        topology.save(tmp_path / "tree.json", drafter="medusa")
        assert Tree.load(tmp_path / "tree.json") == topology
    wrong = ('{"parents": [-1, 0.9]}', '{"parents": [-1]}', '{"parents": [-1, "0"]}')
    for text in ("{}", "no json", '{"parents": [0, 1]}', *wrong):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match="parents"):
            Tree.load(tmp_path / "bad.json")


def test_paths_are_numbered_by_level_and_rank():
    assert Tree.of_paths([(0, 1), (1,), (0, 0)]).parents == (-1, 0, 0, 1, 1)
    assert Tree.full(2, 2).parents == (-1, 0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [((1, 2, 2), "2 to 7 nodes"), ((9, 2, 2), "2 to 7 nodes"), ((2, 0, 1), "depth")],
)
def test_an_impossible_dynamic_tree_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DynamicTree(*fields)


def test_ids_that_no_text_holds_are_no_nodes_of_a_dynamic_tree():
    logits = jnp.asarray([[[1.0, 2.0, 9.0, 8.0]]])
    topology, keys = DynamicTree(4, 1, 3), jax.random.split(jax.random.key(0), 1)
    draft = draft_tree.from_laws(topology, logits, Sampling(num_ids=2), keys)
    assert draft.tokens.tolist() == [[1, 0, PAD]]


def test_of_equal_trees_the_search_takes_the_shallower_and_lower_rank():
    accept = np.full((3, 2), 0.5)
    assert tree.best_tree(accept, 3).parents == (-1, 0, 0)
    assert tree.best_tree(accept[:1], 2).ranks.tolist()[1] == 0
    ranks = np.array([[0, 1], [1, 0]])
    assert tree.best_observed_tree(ranks, 3, 2).parents == (-1, 0, 0)


def test_what_is_shown_ends_where_the_accepted_branch_ends():
    """Node 2 is a leaf above the full depth."""
    topology = Tree((-1, 0, 0, 1))
    draft = verify.Draft(tokens=jnp.array([4, 5, 6]), probs=None)
    verdict = verify.Verdict(
        jnp.array(1), jnp.array([5, 9, -1]), jnp.array(True), jnp.array([0, 2, 2])
    )
    assert verify.followed(draft, verdict, topology).tolist() == [5, PAD]
    refused = dataclasses.replace(
        verdict, num_accepted=jnp.array(0), path=jnp.array([0, 0, 0])
    )
    assert verify.followed(draft, refused, topology).tolist() == [4, 6]


def test_levels_of_a_grown_tree_are_drawn_independently():
    rows, laws = 20_000, np.array([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]])
    log = jnp.log(jnp.asarray(laws, jnp.float32))
    step = lambda carry, tokens, sees, level: (
        jnp.broadcast_to(log[1], (*tokens.shape, 3)),
        carry,
    )
    keys = jax.random.split(jax.random.key(0), rows)
    first = jnp.broadcast_to(log[0], (rows, 3))
    grow = lambda first, keys: draft_tree.grow(
        Tree.chain(2), first, step, None, Sampling(), keys
    )
    draft, _ = jax.jit(grow)(first, keys)
    counts = testing.count(np.asarray(draft.tokens), 3)
    assert testing.chi_square(counts, np.outer(*laws)) > testing.FALSE_ALARM


def test_a_node_is_fed_the_output_of_its_own_parent_and_row():
    """The output is the path as a number, by which the law is known."""
    tree, anchor = Tree((-1, 0, 0, 1, 2, 2, 4, 5, 7)), np.float32([1, 2])

    def law(code):
        base = np.arange(V, dtype=np.float32).reshape(*[1] * code.ndim, V)
        return 3 * jnp.sin(1 + 0.9 * base + code[..., None])

    def step(carry, tokens, above, sees, level):
        code = V * above + tokens.astype(jnp.float32)
        return law(code), code, carry

    args = jnp.asarray(anchor), step, None, Sampling()
    grow = lambda keys: draft_tree.grow_from(tree, law(args[0]), *args, keys)[0]
    draft = jax.jit(grow)(jax.random.split(jax.random.key(0), 2))
    for b, code in enumerate(anchor):
        codes = [code]
        for parent, token in zip(tree.parents[1:], draft.tokens[b], strict=True):
            codes.append(V * codes[parent] + float(token))
        right = jax.nn.softmax(law(jnp.asarray(codes)), axis=-1)
        np.testing.assert_allclose(draft.probs[b], right[tree.inner], atol=1e-5)


def test_the_node_above_is_an_earlier_slot():
    sees = jnp.asarray([[[1, 0, 0, 0], [0, 1, 0, 0]]], bool)
    assert draft_tree.above(sees, jnp.asarray(0)).tolist() == [[0, 0]]
    sees = jnp.asarray([[[0, 1, 1, 0], [1, 0, 0, 1]]], bool)
    assert draft_tree.above(sees, jnp.asarray(1)).tolist() == [[2, 1]]
