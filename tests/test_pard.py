"""PARD against the numbers that its authors' code gave on closed-form weights.

The models are those of `test_draft_model`: target delta 0, drafter delta 0.02, mask 31.
"""

import functools

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_draft_model import CONFIG, GREEDY_TEXT, PROMPT, tensors

from specjax import testing
from specjax.commands.train import Train
from specjax.drafters import base, parallel
from specjax.drafters.base import Batch
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.parallel import IDLE, Rows
from specjax.drafters.pard import Pard
from specjax.generate import Model, Weights, autoregressive, generate
from specjax.sampling import GREEDY, Sampling
from specjax.targets.llama import Llama
from specjax.transformer import Shared, tables

MASK = 31
TEXT = [3, 7, 1, 9, 5, 27, 29]
DRAFTED = [  # logits of ids 0 to 3 behind the prompt: the anchor's row, two masks'
    (-0.929716, -1.022296, -0.656000, 0.004754),
    (1.381354, 0.238600, -1.011254, -1.807188),
    (1.275853, 0.089550, -1.136950, -1.853109),
]


@functools.cache
def weights(delta=0.02):
    return golden.to_jax(tensors(delta))


@functools.cache
def batch_of(*text):
    tokens = jnp.asarray([text], jnp.int32)
    hidden = jax.jit(Llama(CONFIG))(weights(0.0), tokens).hidden
    mask = jnp.ones(tokens.shape, bool)
    return Batch(tokens, mask, jnp.zeros((*tokens.shape, 0)), hidden)


@functools.partial(jax.jit, static_argnums=0)
def train_rows(drafter, params, batch, key):
    """The rows that a step draws and their logits."""
    rows = drafter.rows(key, batch.mask)
    states = drafter.states(params, batch, rows)
    return rows, tables(drafter.config, params).logits(states)


def rows_of(T=64, mask=None, seed=0, **fields):
    mask = jnp.ones((1, T), bool) if mask is None else mask
    draw = jax.jit(Pard(CONFIG, MASK, **fields).rows)
    return draw(jax.random.key(seed), mask)


def pairs_of(rows):
    """The real rows as pairs (anchor, depth)."""
    real = np.asarray(rows.real[0])
    columns = (np.asarray(x[0])[real].tolist() for x in rows)
    return list(zip(*columns, strict=True))


@jax.jit
def plain_logits(params, tokens):
    return DraftModel(CONFIG).forward(params, tokens)[0]


@jax.jit
def draft_after(text, params, target):
    """Three tokens drafted behind a text whose last token is the anchor."""
    drafter, shared = Pard(CONFIG, MASK, gamma=3), Llama(CONFIG).shared(target)
    *text, anchor = text
    text, nothing = jnp.array([text]), jnp.zeros((1, len(text), 0))
    lengths = jnp.array([text.shape[1]])
    state = drafter.prefill(params, shared, text, lengths, nothing, 16)
    keys = jax.random.split(jax.random.key(0), 1)
    args = params, shared, state, jnp.array([anchor])
    return drafter.draft(*args, Sampling(), keys)[0]


def test_a_draft_is_the_recorded_pass_over_anchor_and_masks():
    draft = draft_after(PROMPT, weights(), weights(0.0))
    assert jnp.argmax(draft.probs[0], -1).tolist() == [5, 8, 8]
    difference = np.log(draft.probs[0, :, :4]) - np.array(DRAFTED)
    np.testing.assert_allclose(difference - difference[:, :1], 0, atol=3e-5)


def test_greedy_text_and_accepted_counts_are_those_recorded():
    """Every round but the first feeds what the last one accepted as real tokens."""
    model = Model(Llama(CONFIG), Pard(CONFIG, MASK, gamma=3), GREEDY)
    run = generate(model, Weights(weights(0.0), weights()), [PROMPT], max_new_tokens=16)
    assert run.tokens[0] == GREEDY_TEXT
    assert run.trace.num_accepted.tolist() == [[1, 0, 1, 1, 1, 1, 1, 2]]


def test_the_loss_of_all_rows_is_that_recorded():
    drafter = Pard(CONFIG, MASK, gamma=3, blocks=3, rate=1.0)
    batch, shared = batch_of(*TEXT), tables(CONFIG, weights(0.0))
    rows, logits = train_rows(drafter, weights(), batch, jax.random.key(0))
    place = rows.position + 1
    ce = base.cross_entropy(logits, rows.read(batch.tokens, place))
    for depth, (count, right) in enumerate(
        [(6, 3.267303), (6, 3.461579), (5, 3.647475)]
    ):
        some = rows.read(batch.mask, place) & (rows.depth == depth)
        assert int(some.sum()) == count
        assert float(base.masked_mean(ce, some)) == pytest.approx(right, abs=2e-5)
    loss, _ = jax.jit(drafter.loss)(weights(), shared, batch, jax.random.key(0))
    assert float(loss) == pytest.approx(3.447686, abs=2e-5)


def test_a_row_sees_the_text_up_to_its_anchor_and_its_own_masks():
    """Blocks and positions as (b, p), five tokens and three blocks."""
    anchor, depth = np.array([(p - b, b) for b in range(3) for p in range(5)]).T
    sees = parallel.visible((anchor, depth), (anchor, depth))
    seen = lambda b, p: [divmod(int(i), 5) for i in np.flatnonzero(sees[5 * b + p])]
    assert seen(0, 2) == [(0, 0), (0, 1), (0, 2)]
    assert seen(1, 3) == [(0, 0), (0, 1), (0, 2), (1, 3)]
    assert seen(2, 3) == [(0, 0), (0, 1), (1, 2), (2, 3)]
    assert seen(2, 4) == [(0, 0), (0, 1), (0, 2), (1, 3), (2, 4)]
    assert seen(1, 0) == [(1, 0)]  # a mask alone


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({}, [512, 358, 250, 175, 122, 102, 102, 102]),
        (
            {"blocks": 16, "floor": 0.1},
            [512, 358, 250, 175, 122, 86, 60, *[51] * 9],
        ),
        ({"floor": 0.0}, [512, 358, 250, 175, 122, 86, 60, 42]),
        ({"rate": 0.8}, [512, 409, 327, 262, 209, 167, 134, 107]),
    ],
)
def test_a_text_has_as_many_slots_as_published(fields, counts):
    """A chain that runs out of the text leaves a slot idle (the code wraps around)."""
    rows = rows_of(512, **fields)
    assert np.bincount(rows.depth[0]).tolist() == counts
    real = np.bincount(np.array(pairs_of(rows))[:, 1])
    assert np.all(real >= np.array(counts) - np.arange(len(counts)))
    assert real[:3].tolist() == counts[:3]


@pytest.mark.parametrize("seed", range(3))
def test_every_key_that_a_kept_row_needs_is_kept(seed):
    mask = jnp.arange(64)[None] >= 20
    kept = pairs_of(rows_of(mask=mask, seed=seed))
    assert len(set(kept)) == len(kept)
    assert {(a, 0) for a in range(64)} <= set(kept)
    for a, d in kept:
        assert d == 0 or ((a, d - 1) in kept or a == -1)
        assert d == 0 or 20 <= a + d + 1 < 64  # it predicts a token to learn
    sizes = np.bincount([d for _, d in kept])
    assert sizes[:5].tolist() == [64, 30, 21, 15, 10]  # of 44 tokens to learn
    assert np.all(sizes[5:] <= 8)


def test_a_text_of_few_tokens_to_learn_leaves_slots_idle():
    rows = rows_of(mask=jnp.arange(64)[None] >= 60)
    real = np.asarray(rows.real[0])
    assert not real.all() and np.all(np.asarray(rows.anchor[0])[~real] == IDLE)
    mine = Rows(rows.anchor[:, real], rows.depth[:, real])
    idle = Rows(rows.anchor[:, ~real], rows.depth[:, ~real])
    assert not np.any(parallel.visible(mine, idle))
    other = rows_of(mask=jnp.arange(64)[None] >= 60, seed=1)
    assert pairs_of(other) != pairs_of(rows)  # drawn anew


@pytest.mark.parametrize("rate", [pytest.param(1.0, marks=pytest.mark.slow), 0.6])
def test_a_row_of_training_is_the_row_of_the_draft(rate):
    """Kept or all: the logits are those of a plain pass over text and masks."""
    drafter = Pard(CONFIG, MASK, blocks=4, rate=rate)
    batch = batch_of(*TEXT, 2, 4, 8)
    rows, logits = train_rows(drafter, weights(), batch, jax.random.key(1))
    some = [i for i in range(10, rows.anchor.shape[1]) if rows.real[0, i]]
    assert {int(rows.depth[0, i]) for i in some} == {1, 2, 3}
    for i in some[:: len(some) // 6]:
        a, d = int(rows.anchor[0, i]), int(rows.depth[0, i])
        text = [*batch.tokens[0, : a + 1].tolist(), *[MASK] * 12][:12]
        right = plain_logits(weights(), jnp.array([text]))[0, a + d]
        np.testing.assert_allclose(logits[0, i], right, atol=2e-5)


@pytest.mark.parametrize("offset", [0, 1])
def test_what_is_logged_is_the_overlap_with_the_law_of_each_label(offset):
    """Anchors 0 and 8 of 10 tokens; behind 8 some labels lie past the text."""
    (B, T, D, V), rng = (2, 10, 3, 5), np.random.default_rng(offset)
    guess, hidden = rng.normal(size=(T, D, V)), rng.normal(size=(B, T, V))
    mask = (np.arange(T) != [[2], [T]]).tolist()  # the first text has a hole
    law = lambda x: np.exp(x) / np.exp(x).sum()
    alphas, survivals = [[] for _ in range(D)], [[] for _ in range(D)]
    for b, a in ((b, a) for b in range(B) for a in (0, 8)):
        kept = 1.0
        for d, label in enumerate(range(a + 1 + offset, min(a + D + 1 + offset, T))):
            both = np.minimum(law(guess[a, d]), law(hidden[b, label - 1])).sum()
            kept *= both * mask[b][label]
            alphas[d] += [both] * mask[b][label]
            survivals[d] += [kept] * mask[b][label]
    as_jax = lambda x: jnp.asarray(x, jnp.float32)
    mask, hidden = jnp.asarray(mask), as_jax(hidden)
    batch = Batch(jnp.zeros((B, T), jnp.int32), mask, hidden, hidden)
    logits = lambda rows, at: as_jax(guess)[rows.anchor[:, at], rows.depth[:, at]]
    shared = Shared(jnp.eye(V), jnp.eye(V))
    logs = jax.jit(lambda: parallel.judge(logits, shared, batch, D, offset))()
    mean = lambda lists: [np.mean(x) if x else 0 for x in lists]
    np.testing.assert_allclose(logs["alpha"], mean(alphas), rtol=1e-5)
    np.testing.assert_allclose(logs["survival"], mean(survivals), rtol=1e-5)


def test_a_draft_may_be_longer_than_what_was_trained():
    """All masks are one id, so that offset 5 exists for a drafter of 3 blocks."""
    drafter = Pard(CONFIG, MASK, gamma=5, blocks=3)
    shared = tables(CONFIG, weights(0.0))
    args = weights(), shared, batch_of(*TEXT), jax.random.key(0)
    _, logs = jax.jit(drafter.loss)(*args)
    assert logs["alpha"].shape == (5,) and logs["alpha"][2] > 0


def test_one_drafter_serves_two_targets_and_reads_nothing_of_either():
    drafter = Pard(CONFIG, MASK, gamma=3)
    assert drafter.taps == ()
    for delta in (0.0, 0.05):
        model = Model(Llama(CONFIG), drafter, GREEDY)
        both = Weights(weights(delta), weights())
        run = generate(model, both, [PROMPT], max_new_tokens=16)
        plain = generate(autoregressive(model), both, [PROMPT], max_new_tokens=16)
        assert run.tokens == plain.tokens
        assert run.trace.num_accepted.sum() > 0
    drafts = [draft_after(PROMPT, weights(), weights(delta)) for delta in (0.0, 0.05)]
    jax.tree.map(np.testing.assert_array_equal, *drafts)


@pytest.mark.slow
def test_training_starts_from_the_shipped_draft_model():
    from specjax import checkpoints, targets

    tiny = targets.load("tiny")
    folder = checkpoints.shipped("tiny")["draft_model"]
    job = Train("pard", init=folder, field=("blocks=3",))
    drafter, params = job._start(tiny)
    shared = tiny.target.shared(tiny.params)
    _, model, started = checkpoints.load(folder, shared, tiny.dtype)
    assert isinstance(drafter, Pard) and drafter.config == model.config
    assert drafter.blocks == 3
    assert drafter.mask_token_id == tiny.tokenizer.mask_token_id
    jax.tree.map(np.testing.assert_array_equal, params, started)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gamma": 0}, "gamma >= 1, got 0"),
        ({"blocks": 0}, "blocks >= 1, got 0"),
        ({"rate": 1.5}, "rate=1.5 must be in"),
        ({"floor": -0.1}, "floor=-0.1 in"),
        ({"mask_token_id": 32}, "mask_token_id=32; choose an unused one of the 32"),
    ],
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Pard(**{"config": CONFIG, "mask_token_id": MASK} | fields)


def test_a_target_without_a_mask_token_is_refused():
    target, _ = testing.tiny_target()
    with pytest.raises(ValueError, match="give mask_token_id"):
        Pard.for_target(target.config, None)
