"""Reduced draft vocabularies: the map, its faults, and the law that stays."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import draft_vocab, testing, verify
from specjax.certify import exact
from specjax.sampling import Sampling
from specjax.tree import Tree

IDS = np.array([2, 5, 7, 11])


def test_offsets_and_mask_of_a_worked_example():
    tensors = draft_vocab.to_offsets(IDS, 12)
    assert tensors["d2t"].tolist() == [2, 4, 5, 8]
    assert np.flatnonzero(tensors["t2d"]).tolist() == IDS.tolist()
    ids = draft_vocab.from_offsets(tensors["d2t"], 4, 12, tensors["t2d"])
    assert ids.tolist() == IDS.tolist()


def test_draft_tokens_may_stand_in_any_order():
    """Files ordered by frequency: the ids are still offset + draft token."""
    ids = np.array([7, 2, 11, 5])
    d2t = draft_vocab.to_offsets(ids, 12)["d2t"]
    assert d2t.tolist() == [7, 1, 9, 2]
    assert draft_vocab.from_offsets(d2t, 4, 12).tolist() == ids.tolist()
    logits = draft_vocab.spread(jnp.arange(4.0), ids, 12)
    assert int(jnp.argmax(logits)) == 5 and int(jnp.isfinite(logits).sum()) == 4


@pytest.mark.parametrize(
    ("d2t", "size", "t2d", "message"),
    [
        (None, 4, None, "no d2t"),
        (np.zeros(4, int), 4, None, "all zeros"),
        (np.array([2, 1, 5, 8]), 4, None, "target id 2 comes 2 times"),
        (np.array([2, 4, 5]), 4, None, "3 entries"),
        (np.array([2, 4.5, 5, 8]), 4, None, "whole numbers, got 5.5"),
        (np.array([2, 4, 5, 9]), 4, None, "span 2 to 12"),
        (np.array([2, 4, 5, 8]), 4, np.arange(12) < 4, "t2d marks 4 of 12"),
    ],
)
def test_a_broken_map_is_named(d2t, size, t2d, message):
    with pytest.raises(ValueError, match=message):
        draft_vocab.from_offsets(d2t, size, 12, t2d)


@pytest.mark.parametrize("d2t", [None, np.zeros(12, int)])
def test_a_whole_vocabulary_needs_no_map(d2t):
    assert draft_vocab.from_offsets(d2t, 12, 12).tolist() == list(range(12))


def test_too_few_distinct_ids_are_filled_without_repeats():
    counts = np.zeros(12, int)
    counts[[3, 7, 9]] = 5, 9, 1
    assert draft_vocab.most_frequent(counts, 4).tolist() == [0, 3, 7, 9]
    with pytest.raises(ValueError, match="1 to 12"):
        draft_vocab.most_frequent(counts, 13)


@pytest.mark.parametrize("rule", ["token", "block", "recursive", "traversal", "match"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, min_p=0.02)])
def test_the_law_is_the_targets_though_it_reaches_beyond_the_draft_ids(rule, sampling):
    """All draws summed: the drafter names ids 1 and 3 of four, the target all."""
    tree = Tree.chain(2) if rule in ("token", "block") else Tree((-1, 0, 0, 1))
    rng = np.random.default_rng(0)

    def laws(logits):
        texts = [t for n in range(3) for t in np.ndindex((4,) * n)]
        rows = np.asarray(sampling.probs(jnp.asarray(logits, jnp.float32)))
        return dict(zip(texts, rows, strict=True)).__getitem__

    of_draft = rng.normal(size=(21, 2)).astype(np.float32)
    q_of = laws(draft_vocab.spread(jnp.asarray(of_draft), np.array([1, 3]), 4))
    p_of = laws(1.5 * rng.normal(size=(21, 4)))
    assert q_of(())[[0, 2]].max() == 0 and p_of(()).min() > 0
    draft, chance, p = exact.all_drafts(tree, q_of, p_of)
    joint = testing.joint_law(p_of, 3)
    law, accepted = exact.commit_law(verify.RULES[rule], tree, draft, chance, p, joint)
    assert 0.1 < accepted < 1
    np.testing.assert_allclose(law, joint, atol=1e-6)


def test_edges_of_a_draft_vocabulary():
    assert draft_vocab.from_offsets(np.zeros(1), 1, 4).tolist() == [0]
    with pytest.raises(ValueError, match="1 to 3 ids"):
        draft_vocab.most_frequent(np.ones(3), 0)
    too_long = np.array([0, 1, 1, 0, 0], bool)
    with pytest.raises(ValueError, match="t2d marks"):
        draft_vocab.from_offsets(np.array([1, 1]), 2, 4, too_long)
    counts = np.array([0, 5, 0], np.uint32)
    assert draft_vocab.most_frequent(counts, 1).tolist() == [1]
