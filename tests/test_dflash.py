"""DFlash against numbers recorded from the reference code, and a transcription."""

import dataclasses
import functools
from unittest import mock

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import testing
from specjax.drafters import dflash
from specjax.drafters.base import Batch
from specjax.drafters.block import Net, draw_anchors
from specjax.drafters.dflash import DFlash
from specjax.generate import Model, Weights, advance, finish, start
from specjax.sampling import GREEDY, Sampling
from specjax.targets.llama import Llama
from specjax.transformer import Shared, TransformerConfig
from specjax.verify import Verdict

CONFIG = TransformerConfig(
    vocab_size=32,
    width=16,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_width=8,
    mlp_width=24,
    qk_norm=True,
)
DRAFTER = DFlash.for_target(
    CONFIG, 31, num_layers=2, target_layer_ids=(0, 1, 2), gamma=3, decay=7.0
)
AT_INPUT = dataclasses.replace(DRAFTER, inject="input")
IDS = [3, 14, 15, 9, 26, 5, 8, 22, 7]
MASK = np.array([0, 0, 1, 1, 1, 1, 1, 0, 1], bool)
FEATURES = 2 * golden.hashed(1001, (9, 48))
HIDDEN = 2 * golden.hashed(1002, (9, 16))
SLOTS = [
    (0.928046, -0.876750, 0.533500, -1.240857),
    (0.544604, -1.052501, 0.796089, -2.026824),
    (0.680636, -1.208460, 0.899514, -1.745962),
    (0.825630, -1.206451, 0.986396, -1.665947),
]
LOGITS = [
    (0.110079, 0.627507, -0.144980),
    (0.029316, 1.349275, -0.105919),
    (-0.222806, 1.331341, -0.163696),
    (-0.111695, 1.318718, -0.184199),
]


def block_layer(i):
    name, (D, H, K, E) = f"layers.{i}.", (16, 4, 2, 8)
    at = name + "self_attn."
    k = golden.named(at + "k_proj.weight", (K * E, D)).reshape(K, E, D)
    v = golden.named(at + "v_proj.weight", (K * E, D)).reshape(K, E, D)
    norm = lambda n, width=D: {"scale": golden.named(n + "norm.weight", (width,))}
    return {
        "input_norm": norm(name + "input_layer"),
        "post_norm": norm(name + "post_attention_layer"),
        "mlp": golden.mlp_of(golden.named, name + "mlp.", D, 24),
        "attention": {
            "q": golden.named(at + "q_proj.weight", (H * E, D)).reshape(H, E, D),
            "kv": np.stack([k, v]),
            "out": golden.named(at + "o_proj.weight", (D, H * E)),
            "q_norm": norm(at + "q_", E),
            "k_norm": norm(at + "k_", E),
        },
    }


PARAMS = {
    "fc": golden.named("fc.weight", (16, 48)),
    "hidden_norm": {"scale": golden.named("hidden_norm.weight", (16,))},
    "norm": {"scale": golden.named("norm.weight", (16,))},
    "layer_0": block_layer(0),
    "layer_1": block_layer(1),
}
WEIGHTS = golden.to_jax(PARAMS)
EMBED = golden.named("embed_tokens.weight", (32, 16))
HEAD = golden.named("lm_head.weight", (32, 16))
SHARED = Shared(*golden.to_jax((EMBED, HEAD)))


def transcription(anchor, context, first, inject="every_layer"):
    """Slots of one block: `context` rows before position `first`, masks after it."""
    eps, theta = 1e-6, 10_000.0
    h = [
        golden.rms(PARAMS["fc"] @ f, PARAMS["hidden_norm"]["scale"], eps)
        for f in context
    ]
    x = [EMBED[t] for t in (anchor, 31, 31, 31)]
    for i in range(2):
        layer = PARAMS[f"layer_{i}"]
        p = layer["attention"]
        normed = lambda rows, norm=layer["input_norm"]["scale"]: [
            golden.rms(row, norm, eps) for row in rows
        ]
        n = [*(h if inject == "every_layer" else normed(h)), *normed(x)]
        keys, values = [], []
        for position, row in enumerate(n):
            k, v = p["kv"] @ row
            k = [golden.rms(head, p["k_norm"]["scale"], eps) for head in k]
            keys.append([golden.rope(head, position, theta) for head in k])
            values.append(v)
        rows = []
        for j, row in enumerate([*h, *x]):
            q = [golden.rms(head, p["q_norm"]["scale"], eps) for head in p["q"] @ n[j]]
            q = [golden.rope(head, j, theta) for head in q]
            seen = len(n) if j >= first else j + 1
            y = row + golden.attend(q, keys[:seen], values[:seen], p["out"], 2)
            z = golden.rms(y, layer["post_norm"]["scale"], eps)
            rows.append(y + golden.mlp(z, layer["mlp"]))
        h, x = h if inject == "every_layer" else rows[:first], rows[first:]
    return np.array([golden.rms(row, PARAMS["norm"]["scale"], eps) for row in x])


@functools.partial(jax.jit, static_argnums=0)
def train_slots(drafter, features, anchors, tokens):
    """Slots of the blocks at `anchors` [A] of one text, by the training pass."""
    blocks = drafter.embed_blocks(SHARED, tokens[anchors][None])
    out = drafter.apply(WEIGHTS, Net.train, features[None], blocks, anchors[None])
    return out[0]


def slots(anchors, features=FEATURES, tokens=IDS, drafter=DRAFTER):
    return train_slots(
        drafter,
        jnp.asarray(features, jnp.float32),
        jnp.asarray(anchors),
        jnp.asarray(tokens),
    )


def test_weights_follow_the_rule():
    right = [0.0490313, 0.1609248, -0.003225]
    np.testing.assert_allclose(golden.hashed(0, (3,)), right, atol=1e-6)
    assert EMBED.sum() == pytest.approx(1.417436, abs=1e-5)
    assert HEAD.sum() == pytest.approx(-3.050519, abs=1e-5)
    assert PARAMS["fc"].sum() == pytest.approx(2.766476, abs=1e-5)
    assert PARAMS["hidden_norm"]["scale"].sum() == pytest.approx(16.205521, abs=1e-5)
    q = PARAMS["layer_1"]["attention"]["q"]
    assert q.sum() == pytest.approx(-9.330137, abs=1e-5)


def test_slots_are_those_recorded():
    x = slots([5])[0]
    np.testing.assert_allclose(x[:, :4], SLOTS, atol=1e-5)
    assert float(x.sum()) == pytest.approx(12.057447, abs=5e-5)
    logits = SHARED.logits(x)
    np.testing.assert_allclose(logits[:, :3], LOGITS, atol=1e-5)
    assert np.argmax(logits, axis=1).tolist() == [5] * 4


WINDOWED = {  # fields: sum of the slots, the first and the last one
    "window, causal in the block": (
        {"windows": (3, 3)},
        16.844406,
        (1.018341, -1.161447, 1.163956, -0.807890),
        (0.367441, 0.588078, 0.460307, -1.115084),
    ),
    "causal": (
        {"is_causal": True},
        7.781041,
        (1.087585, -1.675828, 1.716369, -0.265761),
        (0.776679, -1.295045, 1.137493, -1.694859),
    ),
    "window both ways": (
        {"windows": (3, 3), "is_causal": False},
        22.602347,
        (0.810351, -0.176808, -0.042882, -0.968593),
        (0.552950, 0.517367, 0.204159, -0.979104),
    ),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_and_the_causal_flag_give_the_slots_recorded(name):
    """In training, beside another block, and in drafting."""
    fields, total, first, last = WINDOWED[name]
    drafter = DFlash(**vars(DRAFTER) | fields)
    features = jnp.asarray(FEATURES, jnp.float32)[None]

    def both(features):
        anchors = jnp.array([[5, 2]])
        blocks = drafter.embed_blocks(SHARED, jnp.array([[5, 15]]))
        trained = drafter.apply(WEIGHTS, Net.train, features, blocks, anchors)
        text = jnp.array([IDS[:5]])
        state = drafter.prefill(
            WEIGHTS, SHARED, text, jnp.array([5]), features[:, :5], 16
        )
        drafted, _ = drafter.fill(WEIGHTS, SHARED, state, jnp.array([5]))
        return trained[0, 0], drafted[0]

    for x in jax.jit(both, compiler_options=testing.FAST)(features):
        assert float(x.sum()) == pytest.approx(total, abs=5e-5)
        np.testing.assert_allclose(x[0, :4], first, atol=1e-5)
        np.testing.assert_allclose(x[3, :4], last, atol=1e-5)


def test_a_wide_window_both_ways_is_none_at_all():
    drafter = DFlash(**vars(DRAFTER) | {"windows": (None, 99), "is_causal": False})
    places = jnp.arange(9)[None]
    assert drafter.near(0, places[:, 5:], places) is None
    assert np.all(drafter.near(1, places[:, 5:], places))


@pytest.mark.parametrize("anchor", [1, 2, 5, 8])
def test_a_block_equals_its_transcription(anchor):
    right = transcription(IDS[anchor], FEATURES[:anchor], anchor)
    np.testing.assert_allclose(slots([anchor])[0], right, atol=2e-5)


def test_blocks_see_neither_each_other_nor_the_text_from_their_anchor_on():
    """The visibility of training, also for overlapping blocks (anchors 5 and 6)."""
    together = slots([2, 5, 6])
    for row, anchor in zip(together, [2, 5, 6], strict=True):
        changed = np.where(np.arange(9)[:, None] < anchor, FEATURES, 9.0)
        np.testing.assert_allclose(row, slots([anchor], changed)[0], atol=1e-5)


def test_a_text_given_to_the_first_layer_alone_runs_through_the_others():
    right = transcription(IDS[5], FEATURES[:5], 5, "input")
    np.testing.assert_allclose(slots([2, 5], drafter=AT_INPUT)[1], right, atol=2e-5)


@pytest.mark.parametrize("inject", ["every_layer", "input"])
def test_a_cached_draft_equals_the_uncached_block(inject):
    """Two rows of context, a draft, three rows more: the recorded block at start 5."""
    drafter = dataclasses.replace(DRAFTER, propose="sample", inject=inject)
    features = jnp.asarray(FEATURES, jnp.float32)[None]
    keys, args = jax.random.split(jax.random.key(0), 1), (WEIGHTS, SHARED)
    draft = jax.jit(drafter.draft, static_argnums=4)
    state = jax.jit(drafter.prefill, static_argnums=5)(
        *args, jnp.array([IDS[:2]]), jnp.array([2]), features[:, :2], 16
    )
    _, state = draft(*args, state, jnp.array([15]), Sampling(), keys)
    verdict = Verdict(jnp.array([2]), jnp.zeros((1, 4), jnp.int32), jnp.ones(1, bool))
    state = jax.jit(drafter.commit)(
        *args, state, verdict, jnp.zeros((1, 4), jnp.int32), features[:, 2:6]
    )
    assert state.cache.length.tolist() == [5]
    proposal, _ = draft(*args, state, jnp.array([5]), Sampling(), keys)
    block = slots([5], drafter=DRAFTER if inject == "every_layer" else AT_INPUT)
    right = jax.nn.softmax(SHARED.logits(block[0, 1:]))
    np.testing.assert_allclose(proposal.probs[0], right, atol=1e-6)


def batch():
    as_row = lambda x, dtype=jnp.float32: jnp.asarray(x, dtype)[None]
    return Batch(
        as_row(IDS, jnp.int32), as_row(MASK, bool), as_row(FEATURES), as_row(HIDDEN)
    )


def test_the_loss_is_the_one_recorded():
    """Anchors 2 and 5 forced; the hole in the mask at position 7 skips one label."""
    forced = lambda *_: (jnp.array([[2, 5]]), jnp.ones((1, 2), bool))
    with mock.patch.object(dflash, "draw_anchors", forced):
        loss, logs = jax.jit(DRAFTER.loss)(WEIGHTS, SHARED, batch(), jax.random.key(0))
    assert float(loss) == pytest.approx(3.579484, abs=1e-5)
    nll = [[3.234919, 3.333378], [4.315227], [2.428441, 4.667816]]
    np.testing.assert_allclose(logs["ce"], [np.mean(x) for x in nll], atol=1e-5)


def test_the_target_says_what_was_recorded_of_a_label():
    """Read from the state one place before it: anchor 2, first slot."""
    right = [-0.447490, -0.100397, 0.168089]
    np.testing.assert_allclose((HEAD @ HIDDEN[2])[:3], right, atol=1e-6)


def test_anchors_that_do_not_exist_change_nothing():
    """4 candidates; asked for 4 or for 9, the loss and its gradient are one."""
    run = []
    for count in (4, 9):
        drafter = DFlash(**vars(DRAFTER) | {"num_anchors": count})
        grad = jax.jit(jax.value_and_grad(drafter.loss, has_aux=True))
        (loss, _), grads = grad(WEIGHTS, SHARED, batch(), jax.random.key(0))
        run.append((loss, grads))
    for a, b in zip(*map(jax.tree.leaves, run), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_anchors_are_answer_tokens_before_an_answer_token():
    anchors, real = draw_anchors(jax.random.key(0), jnp.asarray(MASK)[None], 6)
    assert anchors.tolist() == [[2, 3, 4, 5, 0, 0]]
    assert real.tolist() == [[True] * 4 + [False] * 2]


def test_anchors_are_uniform_and_without_replacement():
    keys = jax.random.split(jax.random.key(1), 3000)
    draw = jax.jit(jax.vmap(lambda k: draw_anchors(k, jnp.asarray(MASK)[None], 2)))
    anchors, real = draw(keys)
    assert np.all(real) and np.all(anchors[:, 0, 0] < anchors[:, 0, 1])
    counts = np.bincount(np.ravel(anchors), minlength=9)
    np.testing.assert_allclose(counts[2:6], 1500, atol=150)
    assert counts.sum() == counts[2:6].sum()


@functools.cache
def target():
    def tensor(name, shape):
        return golden.named(name, shape)

    return Llama(CONFIG), golden.to_jax(golden.llama(tensor, CONFIG))


@functools.partial(jax.jit, static_argnums=0)
def pass_of(model, params, tokens):
    return model(params, tokens, taps=DRAFTER.taps)


def test_the_target_of_the_rounds_is_the_one_recorded():
    model, params = target()
    out = pass_of(model, params, jnp.array([[26, 7]]))
    logits = model.logits(params, out.hidden)[0]
    right = [
        [1.451291, -0.519506, -0.504184, 0.571760],
        [1.141976, -0.440484, -0.290327, 0.718593],
    ]
    np.testing.assert_allclose(logits[:, :4], right, atol=1e-5)
    assert float(logits.sum()) == pytest.approx(8.347909, abs=5e-5)
    assert float(out.features.sum()) == pytest.approx(32.949626, abs=5e-5)
    assert float(out.hidden.sum()) == pytest.approx(12.708758, abs=5e-5)
    right = [1.310868, 0.391126, 0.873292, 2.138466]
    np.testing.assert_allclose(out.features[0, 1, 16:20], right, atol=1e-5)


ROUNDS = [  # start, drafts, accepted, sum of cached keys, slots' sum, logits of id 0
    (2, [19, 19, 19], 3, -7.121392, 23.373693, (1.022874, 0.946580, 1.092420)),
    (6, [19, 1, 1], 1, -31.969923, 15.541373, (0.435024, 0.362269, 0.417853)),
    (8, [1, 1, 1], 0, -38.058213, 13.023535, (0.303161, 0.282670, 0.381080)),
]


def test_whole_rounds_are_those_recorded():
    llama, params = target()
    model = Model(llama, DRAFTER, GREEDY)
    weights = Weights(target=params, drafter=WEIGHTS)
    progress = start(model, weights, [[26, 7]], max_new_tokens=20)
    for first, _, _, keys, _, _ in ROUNDS:
        assert progress.cache.length.tolist() == [first]
        cached = sum(k[0, :, :first].sum() for k in progress.state.cache.k)
        assert float(cached) == pytest.approx(keys, abs=1e-4)
        progress = advance(model, weights, progress, jnp.asarray(1))
    run = finish(model, progress)
    assert run.tokens == [[27] + [19] * 7]
    assert run.trace.drafted[0].tolist() == [r[1] for r in ROUNDS]
    assert run.trace.num_accepted[0].tolist() == [r[2] for r in ROUNDS]


def test_slots_of_the_rounds_are_those_recorded():
    """Uncached, from the features of the whole committed text."""
    llama, params = target()
    text = [26, 7, 27] + [19] * 7
    features = pass_of(llama, params, jnp.array([text])).features[0]
    for first, _, _, _, total, logits in ROUNDS:
        x = slots([first], features, text)[0]
        assert float(x.sum()) == pytest.approx(total, abs=1e-4)
        np.testing.assert_allclose(SHARED.logits(x)[1:, 0], logits, atol=2e-5)
    sums = [features[2:6].sum(), features[6:8].sum(), features[8:9].sum()]
    np.testing.assert_allclose(sums, [35.058273, 13.784193, 8.415253], atol=1e-4)


def inverse(law, u):
    """The smallest index whose running sum exceeds u of the whole."""
    return int(np.sum(np.cumsum(law) <= u * np.sum(law)))


@pytest.mark.parametrize(
    ("drafts", "sampled", "accepted", "last"),
    [([19, 19, 5], False, 0, 12), ([8, 18, 28], True, 3, 14)],
    ids=["argmax", "sample"],
)
def test_a_drawn_round_is_the_one_recorded(drafts, sampled, accepted, last):
    """T = 1 by draws .5 (the anchor), .3 .6 .9 (drafts), .5 .2 .8 and .4 (bonus)."""
    llama, params = target()
    text = [26, 7, 18, *drafts]
    out = pass_of(llama, params, jnp.array([text]))
    p = np.asarray(jax.nn.softmax(llama.logits(params, out.hidden))[0], np.float64)
    assert inverse(p[1], 0.5) == text[2]
    q = jax.nn.softmax(SHARED.logits(slots([2], out.features[0], text)[0, 1:]))
    q, at = np.asarray(q, np.float64), np.arange(3)
    if sampled:
        drawn = [inverse(*pair) for pair in zip(q, (0.3, 0.6, 0.9), strict=True)]
    else:
        drawn, q = np.argmax(q, axis=1).tolist(), np.eye(32)[np.argmax(q, axis=1)]
    assert drawn == drafts
    kept = np.array([0.5, 0.2, 0.8]) * q[at, drafts] < p[2 + at, drafts]
    assert int(np.sum(np.cumprod(kept))) == accepted
    left = p[5] if accepted == 3 else np.maximum(p[2 + accepted] - q[accepted], 0)
    assert inverse(left, 0.4) == last


@pytest.mark.parametrize(
    ("layers", "ids"),
    [
        (24, (1, 6, 11, 16, 21)),
        (28, (1, 7, 13, 19, 25)),
        (32, (1, 8, 15, 22, 29)),
        (36, (1, 9, 17, 25, 33)),
        (40, (1, 10, 19, 28, 37)),
        (48, (1, 12, 23, 34, 45)),
        (64, (1, 16, 31, 46, 61)),
    ],
)
def test_taps_spread_as_published(layers, ids):
    config = TransformerConfig(**vars(CONFIG) | {"num_layers": layers})
    drafter = DFlash.for_target(config, 31)
    assert drafter.target_layer_ids == ids
    assert drafter.taps == tuple(i + 1 for i in ids)


@pytest.mark.parametrize(
    ("mask", "fields", "message"),
    [
        (None, {}, "needs a mask token"),
        (31, {"gamma": 0}, "gamma >= 1"),
        (31, {"decay": 0.0}, "decay > 0"),
        (31, {"target_layer_ids": (2, 1)}, "must ascend"),
        (31, {"windows": (4,), "num_layers": 2}, "1 entries for 2 layers"),
        (31, {"windows": (0,), "num_layers": 1}, "window is >= 1"),
        (31, {"target_layer_ids": (0, 3)}, "reach past layer 2"),
    ],
)
def test_bad_settings_are_refused(mask, fields, message):
    with pytest.raises(ValueError, match=message):
        DFlash.for_target(CONFIG, mask, **fields)
