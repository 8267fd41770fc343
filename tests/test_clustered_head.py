"""The clustered head: recorded values, balanced clusters, and their orders."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp, softmax

from specjax import clustered_head, draft_vocab, testing
from specjax.certify import exact
from specjax.kernels.clustered_head import reference, shapes, token_scores
from specjax.kernels.clustered_head.shapes import Shape
from specjax.tree import Tree
from specjax.verify import RULES


def wave(t, *shape):
    """The closed form of the record, in [-1/2, 1/2)."""
    k = np.arange(1, np.prod(shape) + 1, dtype=np.float64)
    a = np.sin(12.9898 * k + 78.233 * (t + 1)) * 43758.5453
    return (a - np.floor(a) - 0.5).reshape(shape)


Z, TABLE, CENTROIDS = 2 * wave(600, 16), wave(601, 64, 16) / 2, wave(602, 8, 16) / 2
ORDER = ((27 * np.arange(64) + 5) % 64).reshape(8, 8)
CLUSTERS = (7, 5)
IDS = (45, 8, 35, 62, 25, 52, 15, 42, 61, 24, 51, 14, 41, 4, 31, 58)


def scored(z, num_scored=2, centroids=CENTROIDS):
    z, table, centroids = (jnp.asarray(x, jnp.float32) for x in (z, TABLE, centroids))
    clusters = clustered_head.in_clusters(table, ORDER)
    order = jnp.asarray(ORDER, jnp.int32)
    return clustered_head.score(z, centroids, clusters, order, num_scored)


def test_the_recorded_clusters_and_logits():
    """Two of eight clusters; the likeliest token of the whole head is missed."""
    z, centroids = (jnp.asarray(x, jnp.float32) for x in (Z, CENTROIDS))
    best = clustered_head.best_clusters(z, centroids, 2)
    assert tuple(best.tolist()) == CLUSTERS
    scores = [-0.104851, -0.249504, -0.340379, -0.653143]
    scores += [-0.344539, 0.118100, -0.054534, 0.898034]
    np.testing.assert_allclose(CENTROIDS @ Z, scores, atol=1e-6)
    found = scored(Z)
    assert found.ids.tolist() == list(IDS)
    logits = np.asarray(clustered_head.spread(found, 64))
    assert np.flatnonzero(np.isfinite(logits)).tolist() == sorted(IDS)
    dense = TABLE @ Z
    first = (-0.085810, 0.163854, -0.173897, 0.316589)
    np.testing.assert_allclose(dense[:4], first, atol=1e-6)
    assert dense.argmax() == 48 and logits.argmax() == 58
    np.testing.assert_allclose(logits[58], 0.658123, atol=1e-5)
    np.testing.assert_allclose(logsumexp(logits), 2.849176, atol=1e-5)
    held = np.exp(logsumexp(dense[list(IDS)]) - logsumexp(dense))
    np.testing.assert_allclose(held, 0.244232, atol=1e-6)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_law_is_the_targets_though_its_likeliest_token_is_never_drafted(rule):
    """Two drafts and all that may come of them; of p at the anchor 48 is the best."""
    states = np.concatenate([Z[None], Z + 2 * TABLE])  # at first, and after each token
    p = softmax(states @ TABLE.T, axis=1)
    found = clustered_head.spread(scored(states), 64)
    q = softmax(np.asarray(found, np.float64), axis=1)
    assert p[0].argmax() == 48 and q[0, 48] == 0
    assert np.mean(q[np.arange(65), p.argmax(1)] == 0) > 0.3
    last = lambda law: lambda text: law[text[-1] + 1 if text else 0]
    draft, chance, laws = exact.all_drafts(Tree.chain(2), last(q), last(p))
    joint = testing.joint_law(last(p), 3)
    args = RULES[rule], Tree.chain(2), draft, chance, laws, joint
    law, accepted = exact.commit_law(*args)
    assert accepted > 0.1
    assert exact.tv(law, joint) < exact.TOLERANCE


@pytest.mark.parametrize("k", [1, 3, 16])
def test_the_likeliest_have_the_probabilities_of_the_law_over_all_scored(k):
    z = np.random.default_rng(0).normal(size=(4, 16))
    ids, log_probs = clustered_head.top_k(scored(z), k)
    for row, state in enumerate(z):
        mine = ORDER[np.argsort(-(CENTROIDS @ state))[:2]].ravel()
        logits = TABLE[mine] @ state
        law = logits - logsumexp(logits)
        order = np.argsort(-logits)[:k]
        assert ids[row].tolist() == mine[order].tolist()
        np.testing.assert_allclose(log_probs[row], law[order], atol=1e-5)


def test_the_recorded_static_subset():
    """The same head over a fixed share of the ids, and its offsets."""
    ids = np.sort((11 * np.arange(20) + 3) % 64)
    d2t = [3, 4, 5, 6, 10, 11, 12, 13, 17, 18, 19, 25, 26, 27, 33, 34, 35, 41, 42, 43]
    assert draft_vocab.to_offsets(ids, 64)["d2t"].tolist() == d2t
    few = jnp.asarray(TABLE[ids] @ Z, jnp.float32)
    logits = np.asarray(draft_vocab.spread(few, ids, 64))
    assert few.argmax() == 2 and logits.argmax() == 7
    np.testing.assert_allclose(
        np.exp(logits[7] - logsumexp(logits)), 0.083209, atol=1e-6
    )
    np.testing.assert_allclose(logsumexp(TABLE @ Z), 4.258812, atol=1e-6)


def test_rows_of_a_batch_do_not_change_each_other():
    z = np.random.default_rng(0).normal(size=(5, 16))
    together = clustered_head.spread(scored(z), 64)
    for row, alone in zip(together, z, strict=True):
        single = clustered_head.spread(scored(alone), 64)
        np.testing.assert_allclose(row, single, atol=1e-6)


def test_mass_is_the_sum_of_each_clusters_tokens():
    p = np.random.default_rng(0).dirichlet(np.ones(64), 3)
    found = clustered_head.mass(jnp.asarray(p, jnp.float32), jnp.asarray(ORDER))
    by_hand = [[sum(row[t] for t in tokens) for tokens in ORDER] for row in p]
    np.testing.assert_allclose(found, by_hand, atol=1e-6)


def test_clusters_are_equal_in_size_and_find_well_parted_groups():
    rng = np.random.default_rng(0)
    centres = 10 * rng.normal(size=(4, 6))
    group = rng.permutation(np.repeat(np.arange(4), 8))
    rows = centres[group] + 0.1 * rng.normal(size=(32, 6))
    order, means = clustered_head.build(rows, 4)
    assert order.shape == (4, 8) and sorted(order.ravel()) == list(range(32))
    assert all(len(set(group[tokens])) == 1 for tokens in order)
    np.testing.assert_allclose(means, [rows[t].mean(0) for t in order], rtol=1e-5)


def test_a_full_cluster_sends_its_farthest_rows_elsewhere():
    rows = np.array([[0.0], [0.1], [0.2], [0.3], [5.0], [0.4]])
    owner = clustered_head._assign(rows, np.array([[0.0], [5.0]]), 3)
    assert owner.tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("order", "clusters", "message"),
    [
        (np.zeros(64), 8, "holds 1 ids of 64"),
        (np.arange(64) + 1, 8, "name each once"),
        (np.arange(64), 9, "numbers that do: 2, 4, 8"),
        (np.arange(64), 0, "numbers that do: 1, 2, 4"),
    ],
)
def test_what_is_no_order_is_refused(order, clusters, message):
    with pytest.raises(ValueError, match=message):
        clustered_head.check_order(order, 64, clusters)


def random_head(shape, dtype):
    rng, s = np.random.default_rng(0), shape
    normal = lambda *dims: jnp.asarray(rng.normal(size=dims), dtype)
    rows = [rng.permutation(s.clusters)[: s.scored] for _ in range(s.batch)]
    z, table = normal(s.batch, s.width), normal(s.clusters, s.rows, s.width)
    return z, jnp.asarray(np.stack(rows), jnp.int32), table


@pytest.mark.parametrize("name", shapes.SMALL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["reference", "pallas_tpu", "gathered"])
def test_token_scores_are_those_of_float64(way, dtype, name):
    """`gathered` is the reference of other platforms than this."""
    z, best, table = args = random_head(shapes.SMALL[name], dtype)
    if way == "gathered":
        ours = reference.gathered(*args)
    else:
        ours = token_scores(*args, implementation=way, interpret=True)
    exact = lambda x: np.asarray(x, np.float64)
    right = np.einsum("bd,byrd->byr", exact(z), exact(table)[np.asarray(best)])
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, right, atol=5e-5)


def test_rows_of_other_clusters_are_not_read():
    """NaN in them would reach the scores."""
    z, best, table = random_head(shapes.SMALL["odd"], "float32")
    others = np.setdiff1d(np.arange(11), np.asarray(best))
    assert len(others)
    spoilt = table.at[others].set(jnp.nan)
    kernel = functools.partial(
        token_scores, implementation="pallas_tpu", interpret=True
    )
    np.testing.assert_array_equal(kernel(z, best, table), kernel(z, best, spoilt))


@pytest.mark.parametrize("implementation", ["reference", "pallas_tpu"])
def test_scores_pass_no_gradient_on(implementation):
    z, best, table = random_head(shapes.SMALL["all"], "float32")

    def total(z, table):
        kernel = {"implementation": implementation, "interpret": True}
        return jnp.sum(token_scores(z, best, table, **kernel))

    for grad in jax.grad(total, argnums=(0, 1))(z, table):
        assert not np.any(grad)


@pytest.mark.parametrize(
    ("rows", "implementation", "says"),
    [
        (5000, "pallas_tpu", "clusters of 4194304 bytes, got 5000 rows of width 512"),
        (8, "triton", "unknown implementation 'triton'; known: reference"),
    ],
)
def test_what_a_kernel_does_not_take_is_refused(rows, implementation, says):
    args = random_head(Shape(1, 2, rows, 512, 1), "float32")
    with pytest.raises(ValueError, match=says):
        token_scores(*args, implementation=implementation)
    with pytest.raises(ValueError, match="interpret mode"):
        token_scores(
            *random_head(Shape(1, 2, 8, 16, 1), "float32"), implementation="pallas_tpu"
        )
