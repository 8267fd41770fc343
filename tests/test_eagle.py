"""EAGLE-1 against numbers of the reference code, and against uncached forwards.

The numbers come from SafeAILab/EAGLE (4a9cf3a) run in float64 on closed-form weights.
"""

import dataclasses
import functools
from unittest import mock

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import layers, testing
from specjax.drafters import base, eagle
from specjax.drafters.base import Batch
from specjax.drafters.eagle import Eagle
from specjax.generate import Model, Weights, advance, finish, generate, start
from specjax.sampling import GREEDY, Sampling
from specjax.targets.llama import Llama
from specjax.transformer import TransformerConfig
from specjax.tree import DynamicTree, Tree

CONFIG = TransformerConfig(
    vocab_size=32,
    width=24,
    num_layers=7,
    num_heads=4,
    num_kv_heads=2,
    head_width=6,
    mlp_width=32,
    norm_eps=1e-5,
)
TARGET = Llama(CONFIG)
FORMULA = {"factor": 0.3, "quadratic": 0.3}
IDS = [3, 7, 1, 9, 4, 5, 11, 2]
AHEAD = [7, 1, 9, 4, 5, 11, 2, 6]  # the token of each pair
MASK = jnp.arange(8)[None] >= 3
TREE = Tree((-1, 0, 0, 1, 3, 2, 2, 5, 6))  # branches of unequal depth


@functools.cache
def weights():
    """The reference's names in its order; `golden.to_jax` of our layout."""
    tensor = golden.counted(100, delta=0.5, **FORMULA)
    fc, bias = tensor("fc.weight", (24, 48)), tensor("fc.bias", (24,))
    attention = golden.attention_of(tensor, "self_attn.", 24, 4, 2, 6, False)
    post = tensor("post_attention_layernorm.weight", (24,))
    layer = {
        "attention": attention,
        "post_norm": {"scale": post},
        "mlp": golden.mlp_of(tensor, "mlp.", 24, 32),
    }
    fc[:, 24:] += 4 * np.eye(24)
    params = golden.to_jax({"fc": fc, "fc_bias": bias, "layer": layer})
    llama = golden.llama(golden.counted(0, delta=1.25, **FORMULA), CONFIG)
    return Weights(target=golden.to_jax(llama), drafter=params)


def drafter_of(**fields):
    return Eagle.for_target(CONFIG, None, **fields)


@functools.cache
def pass_over_text():
    return features_of(TARGET, weights(), jnp.array([IDS]))


def outputs(drafter, params, tokens, features, steps=1):
    """`unroll` of one text whose first token is of no account."""
    run = jax.jit(functools.partial(drafter.unroll, every=1, steps=steps))
    shared = TARGET.shared(weights().target)
    return run(params, shared, jnp.array([tokens]), features)


def law(y):
    return jax.nn.log_softmax(TARGET.shared(weights().target).logits(y))


def test_the_layer_gives_the_recorded_outputs():
    f = pass_over_text()
    text = [3, *AHEAD, 13]
    padded = jnp.pad(f, ((0, 0), (0, 2), (0, 0)))
    both = outputs(drafter_of(), weights().drafter, text, padded, 2)
    first, second = (y[:, :8] for y in both)
    right = [3.173552, 12.131404, -5.528487, -1.700167]
    np.testing.assert_allclose(first[0, 7, :4], right, atol=2e-4)
    assert float(jnp.sum(jnp.abs(first))) == pytest.approx(1156.146637, abs=1e-2)
    right = [-10.284694, -4.609000, -19.970969, -15.297054]
    np.testing.assert_allclose(law(first[0, 7])[:4], right, atol=2e-4)
    assert np.argmax(law(first[0]), axis=1).tolist() == [5, 5, 17, 17, 22, 22, 5, 5]
    # Row 7 goes on with token 13 and its own output.
    right = [-19.838533, 56.490187, -33.348684, -33.056782]
    np.testing.assert_allclose(second[0, 7, :4], right, atol=2e-3)


def test_a_dropped_bias_would_be_seen():
    """What engines that ignore `fc.bias` compute, recorded too."""
    params = {k: v for k, v in weights().drafter.items() if k != "fc_bias"}
    text = [3, *AHEAD]
    padded = jnp.pad(pass_over_text(), ((0, 0), (0, 1), (0, 0)))
    y = outputs(drafter_of(fc_bias=False), params, text, padded)[0]
    wrong = [-9.693052, -4.492779, -20.532121]
    np.testing.assert_allclose(law(y[0, 7])[:3], wrong, atol=2e-4)


def batch(tokens=IDS, mask=MASK):
    f = pass_over_text()
    return Batch(jnp.array([tokens]), mask, f, f)


@pytest.mark.parametrize(
    ("noise", "right"),
    [(0.0, (4.970583, 14.636460, 6.434229)), (0.1, (5.017266, 14.637126, 6.480978))],
)
def test_losses_are_those_recorded(noise, right):
    """Rows 3 to 6 count: the last row's next feature does not exist."""
    waves = noise * jnp.sin(jnp.arange(8.0 * 24)).reshape(1, 8, 24)
    shared = TARGET.shared(weights().target)
    with mock.patch.object(eagle, "draw_noise", lambda *_: waves):
        total, logs = jax.jit(drafter_of(gamma=1).loss)(
            weights().drafter, shared, batch(), jax.random.key(0)
        )
    # The reference adds 1e-5 to the number of rows.
    ours = [logs["regression"], logs["ce"], total]
    np.testing.assert_allclose(ours, right, atol=1e-4)


def test_smooth_l1_by_hand():
    d = base.smooth_l1(jnp.array([[0.0], [0.5], [1.0], [-3.0]]), jnp.zeros((4, 1)))
    assert d.tolist() == [0.0, 0.125, 0.5, 2.5]


def test_noise_has_the_width_of_its_text_and_padding_moves_none():
    long = Batch(
        jnp.zeros((2, 12), jnp.int32),
        jnp.arange(12)[None] < jnp.array([[4], [8]]),
        jnp.zeros((2, 12, 64)),
        jnp.zeros((2, 12, 64)),
    )
    noise = eagle.draw_noise(jax.random.key(0), long, 0.2)
    for row, length in zip(noise, (4, 8), strict=True):
        bound = 0.1 * 512 / length
        assert 0.95 * bound < float(jnp.max(jnp.abs(row))) <= bound
        assert abs(float(jnp.mean(row))) < 0.1 * bound
    short = jax.tree.map(lambda x: x[:, :8], long)
    fewer = eagle.draw_noise(jax.random.key(0), short, 0.2)
    np.testing.assert_array_equal(noise[:, :8], fewer)


CYCLES = [  # tokens and parents of the tree, path, fed again with which feature sums
    (
        [17, 22, 17, 8, 19, 22, 17, 22, 17, 22, 22, 22, 17, 22, 22, 22],
        [-1, 0, 0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 5, 7, 9, 10],
        [17, 5],
        (5.301131, 6.063473),
    ),
    (
        [5, 5, 22, 17, 11, 5, 17, 5, 17, 5, 17, 5, 11, 11, 11, 11],
        [-1, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 7, 9, 6],
        [17, 24],
        (3.642843, 3.904826),
    ),
    (
        [24, 17, 24, 4, 22, 17, 24, 17, 24, 17, 24, 17, 17, 17, 17, 17],
        [-1, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 7, 9, 11],
        [17, 24, 5],
        (4.550789, 2.920428, 5.016904),
    ),
    (
        [5, 5, 11, 31, 17, 5, 11, 5, 11, 5, 11, 5, 5, 5, 5, 5],
        [-1, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 7, 9, 11],
        [24],
        (2.925668,),
    ),
]


def test_greedy_rounds_of_a_dynamic_tree_are_those_recorded():
    """EAGLE-2: trees, accepted tokens, and the features that are fed again."""
    drafter = drafter_of(topology=DynamicTree(num_nodes=16, depth=3, width=4))
    model, committed = Model(TARGET, drafter, GREEDY), 5
    draft = jax.jit(drafter.draft, static_argnums=4)
    run = start(model, weights(), [[3, 7, 1, 9, 4]], max_new_tokens=11)
    shared, keys = TARGET.shared(weights().target), jax.random.split(jax.random.key(0))
    for tokens, parents, emitted, sums in CYCLES:
        found, _ = draft(
            weights().drafter, shared, run.state, run.anchor, GREEDY, keys[:1]
        )
        assert [int(run.anchor[0]), *found.tokens[0].tolist()] == tokens
        assert found.parents[0].tolist() == parents
        before = int(run.num_tokens[0])
        run = advance(model, weights(), run, jnp.asarray(1))
        after = int(run.num_tokens[0])
        assert run.tokens[0, before:after].tolist() == emitted
        committed += len(emitted)
        n = int(run.state.num_fresh[0])
        assert int(run.state.cache.length[0]) + n == committed
        fed = jnp.sum(run.state.features[0, n - len(sums) : n], axis=1)
        np.testing.assert_allclose(fed, sums, atol=2e-4)
    text = finish(model, run).tokens[0]
    assert text[:9] == [17, 17, 5, 17, 24, 17, 24, 5, 24]


@pytest.mark.parametrize(
    ("prompt", "right"),
    [
        ([3, 7, 1, 9, 4, 17], (-0.011427, -4.480227, -11.301510)),
        # Two tokens later, the accepted pair fed again: kept as drafted its scores
        # would be -0.491242 -0.962741 -5.315226.
        ([3, 7, 1, 9, 4, 17, 17, 5], (-0.070180, -3.235724, -3.726461)),
    ],
)
def test_first_levels_scores_are_those_recorded(prompt, right):
    f = features_of(TARGET, weights(), jnp.array([prompt]))
    y = outputs(drafter_of(), weights().drafter, prompt, f)[0]
    scores = jax.lax.top_k(law(y[0, -2]), 3)[0]
    np.testing.assert_allclose(scores, right, atol=3e-4)


def test_the_pair_of_a_token_is_the_feature_it_was_drawn_from():
    """A B C D, then E: the draft is the output of (f_3, E) at position 3."""
    text, e = IDS[:4], 5
    f, shared = pass_over_text()[:, :4], TARGET.shared(weights().target)
    drafter = drafter_of(gamma=2)
    state = jax.jit(drafter.prefill, static_argnums=5)(
        weights().drafter, shared, jnp.array([text]), jnp.array([4]), f, 16
    )
    # Pairs (f_1, C) and (f_2, D) are fed again with (f_3, E); only (f_0, B) is cached.
    assert state.tokens.tolist() == [text[1:]] and state.cache.length.tolist() == [1]
    np.testing.assert_array_equal(state.features[0], f[0, 1:])
    keys = jax.random.split(jax.random.key(0), 1)
    draft, _ = jax.jit(drafter.draft, static_argnums=4)(
        weights().drafter, shared, state, jnp.array([e]), Sampling(), keys
    )
    d = int(draft.tokens[0, 0])
    padded = jnp.pad(f, ((0, 0), (0, 2), (0, 0)))
    ys = outputs(drafter, weights().drafter, [*text, e, d], padded, 2)
    for q, y in zip(draft.probs[0], ys, strict=True):
        np.testing.assert_allclose(q, jnp.exp(law(y[0, 3])), atol=1e-5)


@functools.cache
def tiny(topology=None):
    target, params = testing.tiny_target()
    drafter, start_ = testing.tiny_drafter("eagle", target, params)
    drafter = dataclasses.replace(drafter, topology=topology)
    return target, drafter, Weights(params, testing.perturb(start_, scale=0.3))


WIDE = 16  # what follows a row changes nothing in it: all texts are padded, one compile


@functools.partial(jax.jit, static_argnums=(0, 1))
def uncached(target, drafter, params, tokens, f):
    """Outputs of one pass over pairs, no cache; `f` are target or own features."""
    e = target.shared(params.target).embed[jnp.roll(tokens, -1, axis=1)]
    block = eagle.locate(drafter.config, e.shape[:2], None, None, None)
    return drafter.step(params.drafter, e, f, block, None)[0]


@functools.partial(jax.jit, static_argnums=0)
def features_of(target, params, tokens):
    return target(params.target, tokens, taps=(-1,)).features


def plain_law(target, drafter, params, tokens, path):
    """The law after `tokens` and a drafted path, one uncached pass a token."""
    text = np.zeros((1, WIDE), np.int32)
    n, whole = len(tokens), [*tokens, *path]
    text[0, : len(whole)] = whole
    f = features_of(target, params, jnp.asarray(text))
    for i in range(n - 2, len(whole) - 1):
        y = uncached(target, drafter, params, jnp.asarray(text), f)
        f = f.at[:, i + 1].set(y[:, i])
    return jax.nn.softmax(target.shared(params.target).logits(y[0, len(whole) - 2]))


@pytest.mark.parametrize(
    ("tree", "length"),
    [
        (TREE, 2),
        pytest.param(TREE, 9, marks=pytest.mark.slow),
        pytest.param(Tree((-1, 0, 0)), 5, marks=pytest.mark.slow),
    ],
)
def test_laws_of_a_trees_nodes_are_those_of_their_paths(tree, length):
    """Every node's cache entry, parent and position, also in texts below a window."""
    target, drafter, params = tiny(tree)
    tokens = np.random.default_rng(1).integers(0, 22, length + 1).tolist()
    f = features_of(target, params, jnp.array([tokens]))
    shared = target.shared(params.target)
    state = jax.jit(drafter.prefill, static_argnums=5)(
        params.drafter, shared, jnp.array([tokens]), jnp.array([length]), f, 32
    )
    keys = jax.random.split(jax.random.key(3), 1)
    draft, _ = jax.jit(drafter.draft, static_argnums=4)(
        params.drafter, shared, state, jnp.array(tokens[-1:]), Sampling(), keys
    )
    for row, node in enumerate(tree.inner):
        above = [i for i in range(1, tree.num_nodes) if tree.ancestors[node, i]]
        path = draft.tokens[0, np.array(above, int) - 1].tolist() if above else []
        right = plain_law(target, drafter, params, tokens, path)
        np.testing.assert_allclose(draft.probs[0, row], right, atol=2e-5)


def test_a_text_that_fills_the_cache_leaves_room_to_draft():
    target, drafter, params = tiny()
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 22, (1, 9)), jnp.int32)
    f, shared = features_of(target, params, tokens), target.shared(params.target)
    keys, laws = jax.random.split(jax.random.key(3), 1), []
    prefill = jax.jit(drafter.prefill, static_argnums=5)
    draft = jax.jit(drafter.draft, static_argnums=4)
    for size in (9, 16):
        args = params.drafter, shared
        state = prefill(*args, tokens, jnp.array([9]), f, size)
        laws.append(draft(*args, state, tokens[0, :1], Sampling(), keys)[0].probs)
    np.testing.assert_allclose(*laws, atol=1e-6)


def test_an_unrolled_row_is_the_same_tokens_drafted_from_it():
    target, drafter, params = tiny()
    tokens = np.random.default_rng(2).integers(0, 22, 9).tolist()
    f = features_of(target, params, jnp.array([tokens]))
    shared = target.shared(params.target)
    unroll = jax.jit(functools.partial(drafter.unroll, every=3, steps=4))
    outs = unroll(params.drafter, shared, jnp.array([tokens]), f)
    for r, t in enumerate((0, 3)):
        for i, y in enumerate(outs):
            path = tokens[t + 2 : t + 2 + i]
            right = plain_law(target, drafter, params, tokens[: t + 2], path)
            ours = jax.nn.softmax(shared.logits(y[0, r]))
            np.testing.assert_allclose(ours, right, atol=2e-5)


@pytest.mark.parametrize("size", [1.0, 200.0])
def test_keys_of_a_place_alone_are_keys_that_no_other_place_sees(size):
    """Values and gradients, also where a place's own score is far above all others."""
    rng = np.random.default_rng(0)
    q, k, v, key, value = jnp.asarray(rng.normal(size=(5, 1, 1, 3, 4)), jnp.float32)
    key, mask = size * q + key, np.tri(3, k=-1, dtype=bool)[None]  # the first sees none

    def beside(q, k, v, key, value):
        return layers.attend(q, k, v, jnp.asarray(mask), own=((key, value),))

    def joined(q, k, v, key, value):
        keys, values = (jnp.concatenate(x, axis=2) for x in ((k, key), (v, value)))
        seen = np.concatenate([mask, np.eye(3, dtype=bool)[None]], axis=2)
        scores = jnp.where(seen[:, None], q @ keys.mT / 2, -jnp.inf)
        return jax.nn.softmax(scores) @ values

    def both(f):
        square = jax.value_and_grad(lambda *x: jnp.sum(f(*x) ** 2), range(5))
        return jax.jit(lambda *x: (f(*x), square(*x)))(q, k, v, key, value)

    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, both(beside), both(joined))


def test_logged_acceptance_is_the_overlap_of_drafts_on_the_text():
    target, drafter, params = tiny()
    tokens = np.random.default_rng(4).integers(0, 22, 12).tolist()
    f = features_of(target, params, jnp.array([tokens]))
    one = Batch(jnp.array([tokens]), jnp.ones((1, 12), bool), f, f)
    shared = target.shared(params.target)
    _, logs = jax.jit(drafter.loss)(params.drafter, shared, one, jax.random.key(0))
    p = jax.nn.softmax(shared.logits(f[0]))
    for k in range(1, 4):  # rows 0 and 8 are judged, row 8 while its labels exist
        values = []
        for t in (0, 8):
            if t + 1 + k < 12:
                path = tokens[t + 2 : t + 1 + k]
                q = plain_law(target, drafter, params, tokens[: t + 2], path)
                values.append(np.minimum(q, p[t + k]).sum())
        assert float(logs["alpha"][k - 1]) == pytest.approx(np.mean(values), abs=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology",
    [
        DynamicTree(num_nodes=12, depth=4, width=3),
        DynamicTree(4, 1, 3),
    ],
)
def test_greedy_text_of_a_dynamic_tree_is_the_targets_own(topology):
    target, drafter, params = tiny(topology)
    prompts = [[3, 1, 4], [2], [5, 6, 7, 8, 9]]
    run = generate(Model(target, drafter, GREEDY), params, prompts, max_new_tokens=12)
    step = jax.jit(lambda p, t: target.logits(p, target(p, t).hidden))
    for prompt, ours in zip(prompts, run.tokens, strict=True):
        text = np.zeros((1, 20), np.int32)
        text[0, : len(prompt)] = prompt
        for n in range(len(prompt), len(prompt) + 12):
            logits = step(params.target, jnp.asarray(text))
            text[0, n] = int(jnp.argmax(logits[0, n - 1]))
        assert ours == text[0, len(prompt) : len(prompt) + 12].tolist()


def test_the_public_tree_is_the_published_one():
    """Named after 63 nodes it has 25 and the anchor, and takes 5 passes a round."""
    tree = eagle.PUBLIC_TREE
    assert np.bincount(tree.depths).tolist() == [1, 4, 8, 8, 3, 2]
    children = [int(np.sum(tree.children[node] >= 0)) for node in range(26)]
    assert children[:13] == [4, 3, 2, 2, 1, 3, 2, 2, 1, 0, 0, 0, 0]


def test_inputs_left_out_are_not_read():
    target, drafter, params = tiny()
    shared = target.shared(params.target)
    text = jnp.array([[1, 2, 3, 4]])
    f = features_of(target, params, text)
    for inputs, same in (("token", (text, -f)), ("feature", (text + 5, f))):
        less = dataclasses.replace(drafter, inputs=inputs)
        run = jax.jit(functools.partial(less.unroll, every=1, steps=1))
        out = run(params.drafter, shared, text, f)[0]
        np.testing.assert_array_equal(out, run(params.drafter, shared, *same)[0])
        assert np.any(run(params.drafter, shared, text + 1, 2 * f)[0] != out)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gamma": 0}, "gamma >= 1, got 0"),
        ({"noise": -1.0}, "noise >= 0, got -1.0"),
    ],
)
def test_bad_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        drafter_of(**fields)


def test_a_stack_and_another_targets_layer_are_refused():
    with pytest.raises(ValueError, match=r"one layer, got config.num_layers=7"):
        Eagle(CONFIG)
    target, params = testing.tiny_target()
    with pytest.raises(ValueError, match="32 ids of width 24; the target has 24"):
        drafter_of().init(jax.random.key(0), target.shared(params))
