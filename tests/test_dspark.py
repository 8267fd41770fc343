"""DSpark against numbers recorded from the reference code.

All were made by DeepSpec's modules (afdfa7c; transformers 5.10.2, CPU) on closed-form
weights and again by a float64 NumPy program; whole rounds by its evaluator.
"""

import dataclasses
import functools
from unittest import mock

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_dflash as backbone

from specjax import testing
from specjax.drafters import dflash
from specjax.drafters.dspark import DSpark, SequentialHead
from specjax.generate import Model, Weights, advance, finish, start
from specjax.sampling import GREEDY, Sampling
from specjax.scheduler import Threshold
from specjax.tree import DynamicTree, Tree
from specjax.verify import PAD

# The vanilla head always; the others with the slow tests, which CI runs too.
SLOW = [pytest.param(head, marks=pytest.mark.slow) for head in ("gated", "rnn")]
HEADS = ["vanilla", *SLOW]
fast = functools.partial(jax.jit, compiler_options=testing.FAST)
R, D, V = 4, 16, 32
SHARED, IDS = backbone.SHARED, backbone.IDS


def drafter(head="vanilla", **fields):
    defaults = {
        "num_layers": 2,
        "target_layer_ids": (0, 1, 2),
        "gamma": 4,
        "rank": R,
        "num_anchors": 2,
    }
    return DSpark.for_target(backbone.CONFIG, 31, **defaults | {"head": head} | fields)


@functools.cache
def weights(head="vanilla"):
    named = golden.named
    sequential = {
        "w1": markov("markov_head.markov_w1.weight"),
        "w2": markov("markov_head.markov_w2.weight"),
        "confidence": named("confidence_head.proj.weight", (D + R,)),
        "confidence_bias": named("confidence_head.proj.bias", (1,)),
    }
    if head == "gated":
        at = "markov_head.gate_proj."
        sequential["gate"] = named(at + "weight", (R, D + R))
        sequential["gate_bias"] = named(at + "bias", (R,))
    if head == "rnn":
        at = "markov_head.joint_proj."
        joint = named(at + "weight", (3 * R, 2 * R + D))
        sequential["joint"] = joint.reshape(3, R, 2 * R + D)
        sequential["joint_bias"] = named(at + "bias", (3 * R,)).reshape(3, R)
    return golden.to_jax(backbone.PARAMS | {"sequential": sequential})


def markov(name):
    return 2 * golden.hashed(sum((j + 1) * ord(c) for j, c in enumerate(name)), (V, R))


@functools.cache
def step(head):
    return fast(drafter(head).draft, static_argnums=4)


@functools.cache
def context(head="vanilla"):
    """The state after five tokens, as all recorded drafts start."""
    d, features = drafter(head), jnp.asarray(backbone.FEATURES, jnp.float32)[None]
    text = jnp.array([IDS[:5]])
    return d.prefill(weights(head), SHARED, text, jnp.array([5]), features[:, :5], 16)


def propose(head="vanilla", sampling=GREEDY, d=None):
    draft = step(head) if d is None else fast(d.draft, static_argnums=4)
    keys = jax.random.split(jax.random.key(0), 1)
    args = weights(head), SHARED, context(head), jnp.array([5]), sampling, keys
    return draft(*args)[0]


@functools.cache
def teacher(head="vanilla"):
    """Logits [G V] and confidence [G] after given tokens, the anchor first."""
    d = drafter(head)

    def forced(state, before):
        h, _ = d.fill(weights(head), SHARED, state, before[:1])
        correction, z = d.sequential(
            weights(head), SHARED, SequentialHead.train, before[None], h
        )
        return (SHARED.logits(h) + correction)[0], z[0]

    compiled = fast(forced)
    return lambda state, before: compiled(state, jnp.asarray(before))


def logit(p):
    return np.log(p) - np.log1p(-np.asarray(p))


def test_weights_follow_the_rule():
    head = weights()["sequential"]
    assert float(head["w1"].sum()) == pytest.approx(0.859346, abs=1e-5)
    assert float(head["w2"].sum()) == pytest.approx(-4.640540, abs=1e-5)


DRAFTS = {  # tokens, corrected logits of slots 0 and 3, their whole sum, confidence
    "vanilla": (
        [22, 5, 22, 5],
        (-0.443916, -0.614479, -0.306213),
        (0.301023, 1.351154, -1.048174),
        26.398632,
        (-0.108620, -0.331225, -0.417687, -0.424947),
    ),
    "gated": (
        [22, 5, 22, 5],
        (-0.196887, 0.014975, -0.241092),
        (0.052591, 1.292719, -0.669902),
        19.903353,
        (-0.108620, -0.331225, -0.417687, -0.424947),
    ),
    "rnn": (
        [5, 5, 5, 5],
        (-0.235557, -0.605777, -0.999522),
        (-0.195980, 0.359315, -1.040778),
        31.457098,
        (-0.108620, -0.261993, -0.417687, -0.355714),
    ),
}


@pytest.mark.parametrize("head", HEADS)
def test_drafts_are_those_recorded(head):
    tokens, first, last, total, sure = DRAFTS[head]
    draft = propose(head)
    assert draft.tokens.tolist() == [tokens]
    np.testing.assert_allclose(logit(draft.confidence[0]), sure, atol=2e-5)

    logits, z = teacher(head)(context(head), [5, *tokens[:-1]])
    np.testing.assert_allclose(logits[0, :3], first, atol=2e-5)
    np.testing.assert_allclose(logits[3, :3], last, atol=2e-5)
    assert float(logits.sum()) == pytest.approx(total, abs=2e-4)
    np.testing.assert_allclose(z, sure, atol=2e-5)


@pytest.mark.parametrize("head", HEADS)
def test_q_is_the_law_after_the_correction_of_the_tokens_that_were_drawn(head):
    """Drawn drafts carry softmax(U + W2 c) of their own prefix, one slot at a time."""
    draft = propose(head, Sampling(0.7))
    logits, z = teacher(head)(context(head), [5, *draft.tokens[0, :-1].tolist()])
    np.testing.assert_allclose(draft.probs[0], jax.nn.softmax(logits / 0.7), atol=1e-6)
    np.testing.assert_allclose(draft.confidence[0], jax.nn.sigmoid(z), atol=1e-6)


LOSSES = {  # total, CE, L1, BCE
    "vanilla": (1.807876, 3.232664, 0.857128, 0.713195),
    "gated": (1.698011, 3.243977, 0.723073, 0.722848),
    "rnn": (1.718139, 3.010071, 0.775186, 0.719465),
}
TAUS = {"vanilla": 1.879296, "gated": 2.038076, "rnn": 1.988195}
# Norms of gradients: all, fc, w1, w2, confidence.
NORMS = {
    "vanilla": (1.593721, 0.381173, 0.204420, 0.127460, 0.438887),
    "gated": (2.093269, 0.534433, 0.077153, 0.057359, 0.688046),
    "rnn": (2.450384, 0.776073, 0.044918, 0.112668, 0.591179),
}


@functools.cache
def graded(head, anchors=((2, 5, 0),), real=((True, True, False),)):
    forced = lambda *_: (jnp.array(anchors), jnp.array(real))
    with mock.patch.object(dflash, "draw_anchors", forced):
        run = fast(jax.value_and_grad(drafter(head).loss, has_aux=True))
        return run(weights(head), SHARED, backbone.batch(), jax.random.key(0))


@pytest.mark.parametrize("head", HEADS)
def test_losses_and_gradients_are_those_recorded(head):
    """Anchors 2 and 5 and a dropped block; the hole at 7 ends the block at 5 early."""
    (loss, logs), grads = graded(head)
    found = [loss, logs["ce"], logs["l1"], logs["bce"]]
    np.testing.assert_allclose(found, LOSSES[head], atol=1e-5)
    norm = lambda tree: np.sqrt(sum(np.sum(g * g) for g in jax.tree.leaves(tree)))
    head_grads = grads["sequential"]
    parts = [grads, grads["fc"], *(head_grads[k] for k in ("w1", "w2", "confidence"))]
    np.testing.assert_allclose([norm(g) for g in parts], NORMS[head], atol=2e-5)
    # The mean over the two blocks of 1 + sum of products; of block 5 one slot counts.
    s = np.asarray(logs["survival"]) * [2, 1, 1, 1] / 2
    assert 1 + s.sum() == pytest.approx(TAUS[head], abs=1e-5)


def test_what_is_logged_of_the_loss_is_what_was_recorded():
    (_, logs), _ = graded("vanilla")
    right = [0.525708, 0.604483, 0.689888, 0.558472]
    np.testing.assert_allclose(logs["alpha"], right, atol=1e-5)
    assert float(logs["confidence_error"]) == pytest.approx(0.111494, abs=1e-5)
    assert float(logs["confidence_bias"]) == pytest.approx(-0.111494, abs=1e-5)
    assert float(logs["confidence_prefix_bias"]) == pytest.approx(-0.091909, abs=1e-5)


# Of anchor 2's slots 0 to 3 and anchor 5's slot 0: CE, L1, c*, BCE.
SLOTS = {
    "vanilla": (
        (3.725178, 3.617618, 2.854668, 2.951748, 2.802308),
        (0.872491, 0.791035, 0.620225, 0.883056, 1.024679),
        (0.563755, 0.604483, 0.689888, 0.558472, 0.487660),
        (0.719691, 0.679393, 0.759949, 0.737302, 0.693281),
    ),
    "gated": (
        (3.569890, 3.854656, 2.799857, 2.968856, 2.841798),
        (0.796692, 0.660698, 0.583053, 0.673770, 0.806246),
        (0.601654, 0.669651, 0.708473, 0.663115, 0.596877),
        (0.729994, 0.668728, 0.765428, 0.779755, 0.705144),
    ),
    "rnn": (
        (3.030221, 4.359449, 2.750037, 2.721382, 2.233111),
        (0.781616, 0.701509, 0.679118, 0.706058, 0.917057),
        (0.609192, 0.649246, 0.660441, 0.646971, 0.541472),
        (0.732044, 0.672067, 0.751269, 0.773206, 0.699126),
    ),
}


@pytest.mark.parametrize("head", HEADS)
def test_each_slot_has_the_terms_recorded(head):
    """One block and one slot at a time, by a weight of 1 for it alone."""

    def one(anchor, weight):
        forced = lambda *_: (anchor[None, None], jnp.ones((1, 1), bool))
        with (
            mock.patch.object(dflash, "draw_anchors", forced),
            mock.patch.object(DSpark, "slot_weights", weight),
        ):
            args = weights(head), SHARED, backbone.batch(), jax.random.key(0)
            _, logs = drafter(head).loss(*args)
        return logs["ce"], logs["l1"], jnp.sum(logs["alpha"] * weight), logs["bce"]

    slots = jnp.array([0, 1, 2, 3, 0])
    anchors = jnp.array([2, 2, 2, 2, 5])
    found = fast(jax.vmap(one))(anchors, jnp.eye(4)[slots])
    for ours, right in zip(found, SLOTS[head], strict=True):
        np.testing.assert_allclose(ours, right, atol=1e-5)


@pytest.mark.slow
def test_four_anchors_give_the_loss_recorded():
    """All candidates of the text, with 4, 3, 2 and 1 labels that count."""
    (loss, logs), _ = graded("vanilla", ((2, 3, 4, 5),), ((True,) * 4,))
    found = [loss, logs["ce"], logs["l1"], logs["bce"]]
    right = [1.758288, 2.936519, 0.839945, 0.708685]
    np.testing.assert_allclose(found, right, atol=1e-5)


@pytest.mark.slow
def test_without_a_head_it_is_the_dflash_that_was_trained_beside_it():
    """Cross-entropy alone and W2 = 0: `dflash_*_block7`; the anchor's slot predicts."""
    d = drafter(w_ce=1.0, w_l1=0.0, w_conf=0.0)
    params = weights() | {"sequential": dict(weights()["sequential"])}
    params["sequential"]["w2"] = jnp.zeros((V, R))
    forced = lambda *_: (jnp.array([[2, 5]]), jnp.ones((1, 2), bool))
    with mock.patch.object(dflash, "draw_anchors", forced):
        run = fast(jax.value_and_grad(d.loss, has_aux=True))
        (loss, _), grads = run(params, SHARED, backbone.batch(), jax.random.key(0))
    assert float(loss) == pytest.approx(3.351005, abs=1e-5)
    del grads["sequential"]  # that drafter has none
    key, down = grads["layer_0"]["attention"]["kv"][0], grads["layer_1"]["mlp"]["down"]
    parts = [grads[k] for k in ("hidden_norm", "norm", "fc")] + [key, down, grads]
    norm = lambda tree: np.sqrt(sum(np.sum(g * g) for g in jax.tree.leaves(tree)))
    right = [0.400576, 0.372721, 2.012720, 1.638844, 0.800686, 6.674674]
    np.testing.assert_allclose([norm(g) for g in parts], right, atol=2e-5)


ROUNDS = {  # head: prompt, first token, [(start, drafts, confidence, accepted, next)]
    "vanilla": (
        [17, 24],
        5,
        [
            (2, [22, 13, 9, 9], (0.185504, 0.221422, 0.309903, 0.299405), 0, 5),
            (3, [17, 27, 9, 9], (0.245658, 0.289347, 0.417453, 0.314919), 0, 9),
            (4, [9, 9, 9, 9], (0.833860, 0.481791, 0.415922, 0.368407), 3, 5),
        ],
    ),
    "gated": (
        [21, 18],
        19,
        [
            (2, [19, 19, 8, 19], (0.460521, -0.283529, -0.525560, -0.573271), 2, 19),
            (5, [19, 8, 30, 30], (0.029942, -1.020119, -1.372825, -1.277657), 1, 19),
        ],
    ),
    "rnn": (
        [31, 0],
        28,
        [
            (2, [22, 22, 22, 22], (0.252962, -0.176607, -0.267241, -0.291079), 1, 28),
            (4, [22, 22, 22, 22], (0.283958, -0.197546, -0.236982, -0.223454), 4, 22),
            (9, [15, 22, 22, 22], (0.099684, -0.386907, -0.286979, -0.215924), 0, 28),
        ],
    ),
}


@pytest.mark.parametrize("head", HEADS)
def test_whole_rounds_are_those_recorded(head):
    llama, params = backbone.target()
    prompt, first, rounds = ROUNDS[head]
    model = Model(llama, drafter(head), GREEDY)
    arrays = Weights(target=params, drafter=weights(head))
    progress = start(model, arrays, [prompt], max_new_tokens=20)
    text = [first]
    keys = jax.random.split(jax.random.key(0), 1)
    for place, drafts, sure, accepted, following in rounds:
        assert progress.cache.length.tolist() == [place]
        draft, _ = step(head)(
            weights(head), SHARED, progress.state, progress.anchor, GREEDY, keys
        )
        np.testing.assert_allclose(logit(draft.confidence[0]), sure, atol=1e-4)
        progress = advance(model, arrays, progress, jnp.asarray(1))
        text += [*drafts[:accepted], following]
    run = finish(model, progress)
    assert run.tokens == [text]
    assert run.trace.drafted[0].tolist() == [r[1] for r in rounds]
    assert run.trace.num_accepted[0].tolist() == [r[3] for r in rounds]


def test_a_correction_matches_its_closed_form():
    """Another recorded fixture: rank 4, 64 ids, one state for all slots, anchor 17."""
    z, table = 2 * sines(600, (16,)), 2 * sines(601, (64, 16)) / 4
    w1, w2 = sines(603, (64, 4)), sines(604, (64, 4))
    base = table @ z
    np.testing.assert_allclose(
        base[:4], [-0.085810, 0.163854, -0.173897, 0.316589], atol=1e-6
    )
    params = {
        "w1": w1,
        "w2": w2,
        "confidence": np.zeros(20),
        "confidence_bias": np.zeros(1),
    }
    head, args = SequentialHead("vanilla", 4, 16, 64), {"params": golden.to_jax(params)}
    step = lambda token: np.asarray(
        head.apply(
            args, jnp.zeros(4), jnp.asarray(token), jnp.zeros(16), method="step"
        )[1]
    )
    right = [-0.127062, -0.062836, 0.022870, -0.145672]
    np.testing.assert_allclose(step(17)[:4], right, atol=1e-6)
    right = [-0.212872, 0.101018, -0.151026, 0.170916]
    np.testing.assert_allclose((base + step(17))[:4], right, atol=1e-6)
    for scale, chain in ((1, [53, 58, 51, 53]), (4, [14, 38, 14, 38])):
        token, drafted = 17, []
        for _ in range(4):
            token = int(np.argmax(base + scale * step(token)))
            drafted.append(token)
        assert drafted == chain


def sines(t, shape):
    k = np.arange(1, np.prod(shape) + 1)
    a = np.sin(12.9898 * k + 78.233 * (t + 1)) * 43758.5453
    return (a - np.floor(a) - 0.5).reshape(shape)


@pytest.mark.slow
def test_a_threshold_stops_the_rounds_as_recorded():
    """At 1/2: one draft, one draft, none; each round commits the target's 19."""
    llama, params = backbone.target()
    model = Model(llama, drafter("gated"), GREEDY, policy=Threshold(0.5))
    arrays = Weights(target=params, drafter=weights("gated"))
    progress = start(model, arrays, [[21, 18]], max_new_tokens=20)
    run = finish(model, advance(model, arrays, progress, jnp.asarray(3)))
    assert np.sum(run.trace.drafted[0] != PAD, axis=1).tolist() == [1, 1, 0]
    assert run.trace.num_accepted[0].tolist() == [1, 1, 0]
    assert run.tokens == [[19] * 6]


@pytest.mark.slow
def test_laws_of_a_drawn_round_are_those_recorded():
    """Drafts 6, 19, 26, 4 behind [17, 24] and 14, by draws .3, .6, .9 and .2."""
    llama, params = backbone.target()
    text, drafts = [17, 24, 14], [6, 19, 26, 4]
    d, tokens = drafter(), jnp.array([text + drafts])
    out = llama(params, tokens, taps=d.taps)
    p = jax.nn.softmax(llama.logits(params, out.hidden))[0, 2:6]
    two = jnp.array([2])
    state = d.prefill(weights(), SHARED, tokens, two, out.features, 16)
    q, _ = teacher()(state, [14, *drafts[:-1]])
    q = np.asarray(jax.nn.softmax(q), np.float64)
    at = np.arange(4), drafts
    right = [0.033800, 0.084266, 0.026335, 0.005428]
    np.testing.assert_allclose(q[at], right, atol=2e-6)
    right = [0.008215, 0.021010, 0.060642, 0.039753]
    np.testing.assert_allclose(p[at], right, atol=2e-6)
    u = np.array([[0.3], [0.6], [0.9], [0.2]])
    drawn = np.sum(np.cumsum(q, axis=1) <= u, axis=1)
    assert drawn.tolist() == drafts
    assert p[0, 6] / q[0, 6] <= 0.5  # refused
    left = np.maximum(np.asarray(p[0], np.float64) - q[0], 0)
    assert np.sum(np.cumsum(left) <= 0.4 * left.sum()) == 19


@pytest.mark.slow
def test_the_mean_runs_over_all_blocks_of_a_batch():
    """One block a row: the loss of both together, not the mean of two means."""
    forced = lambda *_: (jnp.array([[2], [5]]), jnp.ones((2, 1), bool))
    twice = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), backbone.batch())
    with mock.patch.object(dflash, "draw_anchors", forced):
        loss, _ = fast(drafter().loss)(weights(), SHARED, twice, jax.random.key(0))
    assert float(loss) == pytest.approx(1.807876, abs=1e-5)


@pytest.mark.parametrize("head", ["rnn", SLOW[0]])
def test_a_node_of_a_tree_has_the_law_of_its_own_path(head):
    """Law and confidence at each inner node are those of a chain of these tokens."""
    tree = Tree((-1, 0, 0, 1, 1, 2, 3, 6))
    draft = propose(head, Sampling(), drafter(head, topology=tree))
    nodes = np.array([5, *draft.tokens[0].tolist()])
    for row, inner in enumerate(tree.inner):
        path = np.flatnonzero(tree.ancestors[inner])
        last = len(path) - 1
        logits, z = teacher(head)(context(head), np.resize(nodes[path], 4))
        law, sure = jax.nn.softmax(logits[last]), jax.nn.sigmoid(z[last])
        np.testing.assert_allclose(draft.probs[0, row], law, atol=1e-6)
        np.testing.assert_allclose(draft.confidence[0, row], sure, atol=1e-6)


def test_codes_of_the_gated_and_of_the_recurrent_head_by_hand():
    rng = np.random.default_rng(0)
    w1, w2, gate = (rng.normal(size=s) for s in ((V, R), (V, R), (R, D + R)))
    joint, bias, h, s = (rng.normal(size=x) for x in ((3, R, 2 * R + D), (3, R), D, R))
    sigmoid, w = lambda x: 1 / (1 + np.exp(-x)), w1[7]
    gated = sigmoid(gate @ [*h, *w] + bias[0]) * w
    g, u, o = joint @ [*s, *w, *h] + bias
    right = {
        "gated": (s, gated),
        "rnn": (sigmoid(g) * s + (1 - sigmoid(g)) * np.tanh(u), np.tanh(o)),
    }
    params = {"w1": w1, "w2": w2, "gate": gate, "gate_bias": bias[0]}
    params |= {"joint": joint, "joint_bias": bias}
    params |= {"confidence": np.zeros(D + R), "confidence_bias": np.zeros(1)}
    params, h, s = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, h, s))
    for kind, wanted in right.items():
        head = SequentialHead(kind, R, D, V)
        args = {"params": params}, s[None], jnp.array([7]), h[None]
        found = head.apply(*args, method=SequentialHead.code)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a[0], b, atol=1e-5)


def test_a_dynamic_tree_has_no_confidence_and_the_tree_of_the_laws():
    d = drafter(topology=DynamicTree(num_nodes=6, depth=3, width=2))
    draft = propose("vanilla", GREEDY, d)
    assert draft.confidence is None and draft.tokens.shape == (1, 5)
    assert draft.tokens[0, 0] == propose("vanilla").tokens[0, 0]


def test_temperatures_divide_the_confidence_and_nothing_else():
    """The fourth slot has the third one's."""
    plain, scaled = propose(), propose(d=drafter(temperatures=(2.0, 0.5, 4.0)))
    assert plain.tokens.tolist() == scaled.tokens.tolist()
    np.testing.assert_allclose(
        logit(scaled.confidence[0]),
        logit(plain.confidence[0]) / [2.0, 0.5, 4.0, 4.0],
        atol=1e-5,
    )


def test_labels_behind_a_hole_in_the_mask_change_nothing():
    """Of the block at 5 one label counts: tokens and states behind it may be any."""
    batch = backbone.batch()
    garbled = dataclasses.replace(
        batch,
        tokens=batch.tokens.at[0, 7:].set(3),
        hidden=batch.hidden.at[0, 6:].set(9.0),
        features=batch.features.at[0, 5:].set(9.0),
    )
    forced = lambda *_: (jnp.array([[5]]), jnp.ones((1, 1), bool))
    with mock.patch.object(dflash, "draw_anchors", forced):
        grad = fast(jax.grad(drafter().loss, has_aux=True))
        runs = [
            grad(weights(), SHARED, b, jax.random.key(0))[0] for b in (batch, garbled)
        ]
    for a, b in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "rank >= 1"),
        ({"w_ce": 0.0, "w_l1": 0.0}, "one of the first two"),
        ({"temperatures": ()}, "one a slot"),
        ({"temperatures": (1.0, 1.0, 0.0, 1.0)}, "temperatures are > 0"),
        ({"gamma": 0}, "gamma >= 1"),
    ],
)
def test_bad_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        drafter(**fields)


def test_a_recurrent_head_in_float32_reads_states_in_half_precision():
    """As it does where a drafter is trained on a target in bfloat16."""
    head = SequentialHead("rnn", 4, 8, 11)
    before, h = jnp.zeros((1, 3), jnp.int32), jnp.zeros((1, 3, 8))
    train = SequentialHead.train
    params = head.init(jax.random.key(0), before, h, method=train)
    with jax.numpy_dtype_promotion("standard"):  # as outside the tests
        out = head.apply(params, before, h.astype(jnp.bfloat16), method=train)
    assert out[0].shape == (1, 3, 11) and out[0].dtype == jnp.float32
