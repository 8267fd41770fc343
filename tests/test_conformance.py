"""One battery for every drafter of the registry, through the protocol alone.

States are private to a drafter, so two states are compared by what they lead to: the
laws and tokens drafted from them, and by their leaves, slots past a cache's length
masked.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import drafters, feature_cache, kv_cache, testing
from specjax.certify import engine
from specjax.drafters import base
from specjax.drafters.draft_model import DraftModel
from specjax.generate import (
    Model,
    Weights,
    advance,
    autoregressive,
    generate,
    prefill,
    start,
)
from specjax.kv_cache import KVCache
from specjax.sampling import GREEDY, Sampling
from specjax.tree import Tree
from specjax.verify import Verdict

SAMPLED = Sampling()
SLOTS, WIDTH = 40, 20  # cache slots; longest text
NAMES = list(drafters.REGISTRY)


def often(*names):
    """All names; those not given are tested with the slow tests, which CI runs too."""
    marks = lambda n: [] if n in names else pytest.mark.slow
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=marks(n)) for n in NAMES]
    )


TEXTS = np.random.default_rng(0).integers(0, 22, (3, WIDTH), np.int32)


class Kit:
    """A tiny target with one drafter and its compiled calls, shared by the tests."""

    def __init__(self, name, wrap=lambda drafter: drafter):
        self.target, self.params = testing.tiny_target()
        self.shared = self.target.shared(self.params)
        drafter, weights = testing.tiny_drafter(name, self.target, self.params)
        drafter = wrap(drafter)
        self.drafter, self.weights = drafter, testing.perturb(weights)
        self.pass_ = jax.jit(functools.partial(self.target, taps=drafter.taps))
        self.prefill = jax.jit(drafter.prefill, static_argnums=5)
        self.draft = jax.jit(drafter.draft, static_argnums=4)
        self.commit = jax.jit(drafter.commit)

        def loss(weights, params, batch, key):
            return drafter.loss(weights, self.target.shared(params), batch, key)

        self.grad = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        layers = base.kv_layers(drafter)
        self.look = jax.jit(
            functools.partial(
                feature_cache.features, self.target, drafter.taps, kv_layers=layers
            )
        )

    def run(self, tokens):
        """A target's pass over whole texts, into an empty cache."""
        cache = self.target.init_cache(len(tokens), SLOTS)
        return self.pass_(self.params, tokens, cache)

    def read(self, lengths, tokens=TEXTS):
        """The state after so many tokens, and what a draft then sees of the target."""
        lengths, out = jnp.asarray(lengths, jnp.int32), self.run(tokens)
        args = self.weights, self.shared, tokens, lengths, out.features, SLOTS
        return self.prefill(*args), self.seen(out, lengths)

    def seen(self, out, lengths):
        cache = kv_cache.commit(out.cache, None, lengths)
        return dataclasses.replace(self.shared, cache=cache)

    def propose(self, read, anchor, sampling=SAMPLED, seed=0):
        state, shared = read
        keys = jax.random.split(jax.random.key(seed), len(anchor))
        return self.draft(self.weights, shared, state, anchor, sampling, keys)

    def batch(self, tokens=TEXTS, mask=None):
        mask = np.arange(tokens.shape[1])[None] >= 3 if mask is None else mask
        return self.look(self.params, tokens, np.broadcast_to(mask, tokens.shape))

    def loss(self, batch, weights=None, seed=0):
        weights = self.weights if weights is None else weights
        (loss, logs), grads = self.grad(
            weights, self.params, batch, jax.random.key(seed)
        )
        return loss, logs, *grads


@functools.cache
def make_kit(name):
    return Kit(name)


# Those that share most of their code with another one: the slow tests have them.
VARIANTS = "hydra_plus", "medusa2", "dflash2", "pard2"


@pytest.fixture(
    params=[
        pytest.param(n, marks=pytest.mark.slow if n in VARIANTS else ()) for n in NAMES
    ]
)
def kit(request):
    return make_kit(request.param)


def play_round(kit, lengths, accepted):
    """A round that accepts so many drafts: its state, and the text it has committed.

    The anchor is what `TEXTS` holds at each row's length; the bonus is the token 3.
    """
    # In NumPy: op by op JAX would compile each of these lines for every drafter.
    lengths = np.asarray(lengths, np.int32)
    accepted = np.asarray(accepted, np.int32)
    rows, node = np.arange(3)[:, None], np.arange(kit.drafter.gamma + 1)[None]
    draft, state = kit.propose(kit.read(lengths), TEXTS[rows[:, 0], lengths])
    nodes = np.concatenate([TEXTS[rows, lengths[:, None]], draft.tokens], axis=1)
    at, text = lengths[:, None] + node, TEXTS.copy()
    text[rows, at] = nodes
    features = np.asarray(kit.run(text).features)[rows, at]

    kept = np.where(node < accepted[:, None], np.roll(nodes, -1, 1), -1)
    kept = np.where(node == accepted[:, None], 3, kept).astype(np.int32)
    verdict = Verdict(*map(jnp.asarray, (accepted, kept, np.ones(3, bool))))
    state = kit.commit(kit.weights, kit.shared, state, verdict, nodes, features)
    after = lengths + accepted + 1
    text[np.flatnonzero(after < WIDTH), after[after < WIDTH]] = 3
    return (state, kit.seen(kit.run(text), jnp.asarray(after))), text


def visible(tree):
    """The leaves with every cache's slots past its length set to zero."""

    def hide(x):
        if not isinstance(x, KVCache):
            return x
        exists = np.arange(x.size)[None] < np.asarray(x.length)[:, None]
        keep = lambda s: np.where(exists[:, None, :, None], s, np.zeros_like(s))
        return list(map(keep, x.k)), list(map(keep, x.v)), x.length

    is_cache = lambda x: isinstance(x, KVCache)
    return leaves(jax.tree.map(hide, tree, is_leaf=is_cache))


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def assert_same(a, b, **tolerance):
    for x, y in zip(visible(a), visible(b), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(x, y, **{"atol": 2e-5, "rtol": 2e-5} | tolerance)


def test_shapes_and_dtypes_are_those_of_the_protocol(kit):
    G, V = kit.drafter.gamma, kit.target.config.vocab_size
    draft, _ = kit.propose(kit.read([20, 7, 5]), TEXTS[:, 0])
    assert draft.tokens.shape == (3, G) and draft.tokens.dtype == jnp.int32
    assert draft.probs.shape == (3, G, V) and draft.probs.dtype == jnp.float32
    probs, tokens = np.asarray(draft.probs), np.asarray(draft.tokens)
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-5)
    drawn = np.take_along_axis(probs, tokens[..., None], -1)
    assert np.all(drawn > 0) and np.all(tokens >= 0) and np.all(tokens < V)
    assert kit.drafter.tree.depth == G
    assert kit.run(TEXTS).features.shape[-1] == len(kit.drafter.taps) * 16


def test_a_state_keeps_its_shapes_and_dtypes_over_a_round(kit):
    """Or the engine's loop could not carry it."""
    before = jax.tree.map(jnp.shape, kit.read([5, 6, 7]))
    after, _ = play_round(kit, [1, 4, 3], [0, 1, 0])
    assert before == jax.tree.map(jnp.shape, after)


@pytest.mark.slow
def test_jit_equals_eager(kit):
    read, anchor = kit.read([20, 7, 5]), TEXTS[:, 0]
    state, shared = read
    keys = jax.random.split(jax.random.key(0), 3)
    with jax.disable_jit():
        args = kit.weights, shared, state, jnp.asarray(anchor)
        draft, _ = kit.drafter.draft(*args, SAMPLED, keys)
    assert_same(draft, kit.propose(read, anchor)[0])


def test_the_same_key_draws_the_same_draft_and_another_key_another(kit):
    state, anchor = kit.read([20, 7, 5]), TEXTS[:, 0]
    first, _ = kit.propose(state, anchor)
    again, _ = kit.propose(state, anchor)
    assert_same(first, again, atol=0, rtol=0)
    others = [kit.propose(state, anchor, seed=s)[0].tokens for s in range(1, 6)]
    one_hot = bool(np.all(np.asarray(first.probs).max(-1) > 1 - 1e-6))
    assert one_hot or any(o.tolist() != first.tokens.tolist() for o in others)


def test_rows_are_independent_of_their_place_neighbours_and_padding(kit):
    lengths, anchor = np.array([9, 7, 5]), TEXTS[:, 0]
    keys = jax.random.split(jax.random.key(0), 3)
    garbled = np.where(np.arange(WIDTH)[None] < lengths[:, None], TEXTS, 21)
    order = np.array([2, 0, 1])
    drafts = []
    for rows, tokens in ((np.arange(3), TEXTS), (order, garbled.astype(np.int32))):
        state, shared = kit.read(lengths[rows], tokens[rows])
        draft, _ = kit.draft(
            kit.weights, shared, state, anchor[rows], SAMPLED, keys[rows]
        )
        drafts.append(draft)
    assert_same(jax.tree.map(lambda x: np.asarray(x)[order], drafts[0]), drafts[1])


def test_greedy_text_is_the_targets_own(kit):
    """Ragged prompts, stop ids and the limit included."""
    model = Model(kit.target, kit.drafter, GREEDY, stop_ids=(5,))
    weights = Weights(target=kit.params, drafter=kit.weights)
    prompts = [TEXTS[0, :9].tolist(), TEXTS[1, :2].tolist(), TEXTS[2].tolist(), [3]]
    ours = generate(model, weights, prompts, max_new_tokens=17)
    plain = generate(autoregressive(model), weights, prompts, max_new_tokens=17)
    assert ours.tokens == plain.tokens
    assert ours.finish_reasons == plain.finish_reasons


@pytest.mark.parametrize("accepted", [(0, 1, 2), (1, 0, 0), (99, 99, 99)])
def test_commit_equals_prefill_of_the_longer_text(kit, accepted):
    lengths = np.array([1, 4, 3])
    accepted = np.minimum(accepted, kit.drafter.gamma)
    ours, text = play_round(kit, lengths, accepted)
    longer = lengths + accepted + 1
    fresh = kit.read(longer, text)
    assert_same(ours, fresh)
    anchor = np.full(3, 3, np.int32)
    assert_same(kit.propose(ours, anchor)[0], kit.propose(fresh, anchor)[0])


@pytest.mark.slow
def test_gradients_are_finite_and_in_the_drafter_alone(kit):
    loss, logs, drafter, target = kit.loss(kit.batch())
    assert loss.shape == () and loss.dtype == jnp.float32 and np.isfinite(loss)
    assert all(np.isfinite(g).all() and g.any() for g in leaves(drafter))
    assert not any(g.any() for g in leaves(target))
    alpha, survival = np.asarray(logs["alpha"]), np.asarray(logs["survival"])
    assert alpha.shape == (kit.drafter.gamma,)
    assert np.all((alpha >= 0) & (alpha <= 1 + 1e-6))
    assert np.all(survival <= alpha + 1e-6)
    assert np.all(np.diff(survival) <= 1e-2)  # masks differ by position


@pytest.mark.slow
def test_losses_of_a_few_places_at_a_time_are_those_of_all(kit, monkeypatch):
    """As of a vocabulary and a text whose scores would be too many."""
    right = kit.loss(kit.batch())

    def traced():  # anew: JAX keeps what it has traced
        args = kit.shared, kit.batch(), jax.random.key(0)
        loss = lambda weights: kit.drafter.loss(weights, *args)
        return jax.jit(jax.value_and_grad(loss, has_aux=True)).trace(kit.weights)

    scans = lambda traced: str(traced.jaxpr).count("scan[")
    whole = traced()
    monkeypatch.setattr(base, "SCORES", 200)
    parts = traced()
    assert scans(parts) >= scans(whole) + 2
    (value, _), gradient = parts.lower().compile()(kit.weights)
    assert value == pytest.approx(float(right[0]), rel=1e-5)
    for x, y in zip(leaves(gradient), leaves(right[2]), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-7 + 1e-5 * np.abs(y).max(), rtol=1e-4)


@pytest.mark.slow
def test_a_few_adam_steps_lower_the_loss(kit):
    batch, optimizer = kit.batch(), optax.adam(1e-2)
    update = jax.jit(optimizer.update)
    weights, state, losses = kit.weights, optimizer.init(kit.weights), []
    for _ in range(8):
        loss, _, grads, _ = kit.loss(batch, weights)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes int and float
            updates, state = update(grads, state)
        weights = jax.tree.map(jnp.add, weights, updates)
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def test_every_method_works_on_shapes_alone_and_in_bf16(kit):
    """`jax.eval_shape`, on half-precision weights: no array, no silent promotion."""
    half = lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x
    drafter, keys = kit.drafter, jax.random.split(jax.random.key(0), 3)

    def everything(weights, shared, batch):
        weights, shared, batch = jax.tree.map(half, (weights, shared, batch))
        lengths, G = jnp.array([5, 6, 7]), drafter.gamma
        args = weights, shared
        state = drafter.prefill(*args, batch.tokens, lengths, batch.features, SLOTS)
        anchor = batch.tokens[:, 0]
        draft, state = drafter.draft(*args, state, anchor, SAMPLED, keys)
        nodes = jnp.pad(draft.tokens, ((0, 0), (1, 0)))
        verdict = Verdict(jnp.zeros(3, jnp.int32), nodes, jnp.ones(3, bool))
        features = batch.features[:, : G + 1]
        after = drafter.commit(*args, state, verdict, nodes, features)
        return state, after, drafter.loss(*args, batch, jax.random.key(0))

    state, after, (loss, _) = jax.eval_shape(
        everything, kit.weights, kit.read([5, 6, 7])[1], kit.batch()
    )
    assert state == after and loss.dtype == jnp.float32


@pytest.mark.slow
def test_a_batch_with_nothing_to_learn_has_zero_loss_and_gradient(kit):
    """C19: all masked; and only first tokens unmasked, which nothing predicts."""
    for mask in (np.zeros(WIDTH, bool), np.arange(WIDTH) == 0):
        loss, logs, grads, _ = kit.loss(kit.batch(mask=mask[None]))
        assert np.isfinite(loss) and np.all(np.isfinite(logs["alpha"]))
        assert not any(g.any() for g in leaves(grads))


@pytest.mark.slow
def test_padding_and_masked_rows_do_not_change_the_loss(kit):
    """C19: the mean runs over real tokens only, whatever stands beside them."""
    mask = (np.arange(WIDTH) >= 3) & (np.arange(WIDTH) < 12)
    mask = mask[None] & (np.arange(3) == 0)[:, None]
    loss, _, grads, _ = kit.loss(kit.batch(mask=mask))

    garbled = np.where(np.arange(WIDTH)[None] < 12, TEXTS, (TEXTS + 7) % 22)
    garbled[1:] = 4
    other = kit.batch(garbled.astype(np.int32), mask)
    loss_garbled, _, grads_garbled, _ = kit.loss(other)
    np.testing.assert_allclose(loss, loss_garbled, rtol=1e-5)
    assert_same(grads, grads_garbled)


@pytest.mark.slow
def test_extra_columns_and_rows_do_not_change_the_loss(kit):
    mask = (np.arange(WIDTH) >= 3) & (np.arange(WIDTH) < 12)
    batch = kit.batch(mask=mask[None])
    at = lambda axis: (
        lambda x: jnp.pad(x, [(0, {0: 1, axis: 5}.get(i, 0)) for i in range(x.ndim)])
    )
    wider = jax.tree.map(at(1), dataclasses.replace(batch, kv=()))
    wider = dataclasses.replace(wider, kv=jax.tree.map(at(2), batch.kv))
    loss, logs, _, _ = kit.loss(batch)
    args = kit.weights, kit.shared, wider, jax.random.key(0)
    wide, wide_logs = jax.jit(kit.drafter.loss)(*args)
    np.testing.assert_allclose(loss, wide, rtol=1e-5)
    np.testing.assert_allclose(logs["alpha"], wide_logs["alpha"], rtol=1e-4)


def test_rebuilding_a_drafter_does_not_recompile(kit):
    weights = Weights(target=kit.params, drafter=kit.weights)
    prompts = [[1, 2, 3], [4], [5, 6], [7]]

    def run(drafter):
        model = Model(kit.target, drafter, GREEDY, stop_ids=(5,))
        generate(model, weights, prompts, max_new_tokens=17)
        return prefill._cache_size(), advance._cache_size()

    twin = dataclasses.replace(kit.drafter)
    assert twin == kit.drafter and hash(twin) == hash(kit.drafter)
    assert twin is not kit.drafter
    assert run(kit.drafter) == run(twin)


class Forgetful(DraftModel):
    """Planted bug: d_G is never fed, so after a full accept its slot holds nothing."""

    def forward(self, params, tokens, cache=None, **block):
        if cache is None or tokens.shape[1] != 2:
            return super().forward(params, tokens, cache, **block)
        later = dataclasses.replace(cache, length=cache.length + 1)
        logits, later = super().forward(params, tokens[:, 1:], later)
        later = dataclasses.replace(later, length=cache.length)
        return jnp.pad(logits, ((0, 0), (1, 0), (0, 0))), later


def test_the_battery_sees_a_draft_model_that_lost_a_token():
    wrap = lambda drafter: Forgetful(**vars(drafter))
    kit = Kit("draft_model", wrap)
    test_commit_equals_prefill_of_the_longer_text(kit, (0, 1, 2))
    with pytest.raises(AssertionError):
        test_commit_equals_prefill_of_the_longer_text(kit, (99, 99, 99))


def test_greedy_text_of_a_dynamic_tree_is_the_targets_own():
    """One that drafts by passes; `specjax certify` does it for all."""
    assert engine.greedy_difference("draft_model", "dynamic") == 0


@often("draft_model", "hydra", "eagle", "mtp")
def test_the_law_after_a_path_is_that_of_a_chain_with_the_same_tokens(name):
    """Wrong positions or wrongly seen branches cost acceptance only; here they show.

    Four ids, so that a thousand drafts hold every path.
    """
    target, params = engine.target_kit()
    drafter, weights = testing.tiny_drafter(name, target, params, gamma=3)
    args = params, testing.perturb(weights), jnp.asarray([engine.PROMPT], jnp.int32)
    tables = []
    for topology in (None, Tree((-1, 0, 0, 1, 3, 2, 2, 5, 6))):
        d = dataclasses.replace(drafter, topology=topology)
        draft = engine.draw_many(target, d, SAMPLED, 1024, *args, jax.random.key(0))
        tokens, laws = np.asarray(draft.tokens), np.asarray(draft.laws)
        table = {}
        for i, inner in enumerate(d.tree.inner):
            path = np.flatnonzero(d.tree.ancestors[inner])[1:]
            for text, law in zip(tokens[:, path - 1].tolist(), laws[:, i], strict=True):
                law_seen = table.setdefault(tuple(text), law)
                np.testing.assert_allclose(law, law_seen, atol=1e-5)
        tables.append(table)
    both = tables[0].keys() & tables[1].keys()
    assert len(both) > 15
    for text in both:
        np.testing.assert_allclose(tables[0][text], tables[1][text], atol=1e-5)


@often("draft_model", "eagle", "mtp")
def test_after_rounds_of_a_tree_a_state_is_that_of_a_prefill_of_the_text(name):
    """Features and entries of the accepted path, whichever branch it took."""
    kit = make_kit(name)
    drafter = dataclasses.replace(kit.drafter, topology=Tree.full(3, 2))
    weights = jax.tree.map(lambda x: jnp.asarray(3 * np.asarray(x)), kit.weights)
    model = Model(kit.target, drafter, SAMPLED, draft_sampling=GREEDY)
    arrays = Weights(target=kit.params, drafter=weights)
    prompts = [[3, 1 + i] for i in range(16)]
    run = start(model, arrays, prompts, max_new_tokens=16, cache_size=SLOTS)
    run = advance(model, arrays, run, jnp.asarray(4))
    assert np.asarray(run.trace.num_accepted).max() > 0

    text = np.concatenate([np.array(prompts), np.maximum(run.tokens, 0)], axis=1)
    text, lengths = text.astype(np.int32), run.cache.length
    out = kit.run(text)
    read = jax.jit(drafter.prefill, static_argnums=5)
    fresh = read(weights, kit.shared, text, lengths, out.features, SLOTS)
    keys = jax.random.split(jax.random.key(0), 16)
    draft = jax.jit(drafter.draft, static_argnums=4)
    own = dataclasses.replace(kit.shared, cache=run.cache)
    laws = [
        np.asarray(draft(weights, shared, state, run.anchor, SAMPLED, keys)[0].probs)
        for shared, state in ((own, run.state), (kit.seen(out, lengths), fresh))
    ]
    going = np.asarray(run.reason) == 0
    assert going.any()
    np.testing.assert_allclose(laws[0][going], laws[1][going], atol=1e-4)


@pytest.mark.slow
def test_sampled_text_has_the_targets_law():
    """A chain under truncated settings; `specjax certify` does T = 1 and trees."""
    certificate = engine.sampled("medusa", Sampling(0.7, top_k=3, top_p=0.9))
    assert certificate.passed and certificate.accepted > 0.1
