"""DFlash 2 against numbers recorded from the reference code, and by loops."""

import dataclasses
import functools
from typing import Any
from unittest import mock

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_dflash as first

from specjax.drafters import dflash
from specjax.drafters.block import Net
from specjax.drafters.dflash2 import DFlash2, GroupedConv
from specjax.generate import Model, Weights, advance, finish, start
from specjax.sampling import GREEDY, Sampling

DRAFTER = DFlash2.for_target(
    first.CONFIG,
    31,
    num_layers=2,
    target_layer_ids=(0, 1, 2),
    gamma=3,
    decay=7.0,
    conv_group=4,
    rank=4,
    top_k=6,
)
K, D, GROUP, RANK = 2, 16, 4, 4
SHARED, IDS = first.SHARED, first.IDS


def conv(name):
    base = golden.named(name + "base_kernel", (2, K, D))  # 0.6 u
    base[:, 0] += 1
    shape = (2 * K * D // GROUP, D)
    projection = golden.named(name + "kernel_projection.weight", shape)
    return {"base": base, "projection": projection.reshape(2, K, D // GROUP, D)}


def layer(i):
    at = f"layers.{i}."
    return first.PARAMS[f"layer_{i}"] | {
        "attention_conv": conv(at + "attention_conv."),
        "mlp_conv": conv(at + "mlp_conv."),
    }


SELECTOR = {  # codebooks are 6 u
    "predecessor": 10
    * golden.named("candidate_selector.predecessor_codebook", (32, 4)),
    "successor": 10 * golden.named("candidate_selector.successor_codebook", (32, 4)),
    "projection": golden.named("candidate_selector.hidden_projection.weight", (4, 16)),
}
PARAMS = first.PARAMS | {"layer_0": layer(0), "layer_1": layer(1)}
WEIGHTS = golden.to_jax(PARAMS | {"selector": SELECTOR})


@functools.partial(jax.jit, static_argnums=0)
def train_slots(drafter, anchors):
    features = jnp.asarray(first.FEATURES, jnp.float32)[None]
    blocks = drafter.embed_blocks(SHARED, jnp.asarray(IDS)[anchors][None])
    return drafter.apply(WEIGHTS, Net.train, features, blocks, anchors[None])[0]


def test_slots_are_those_recorded():
    """Also beside another block, which must not leak through the convolutions."""
    right = [
        (-0.942460, -0.517145, -0.753137, -0.627343),
        (0.050974, 0.295712, 0.095955, -1.945502),
        (-0.280113, -1.857483, 1.055024, -0.839066),
        (0.287167, -1.531905, 1.591413, -1.621776),
    ]
    for anchors, at in (([5], 0), ([2, 5], 1)):
        x = train_slots(DRAFTER, jnp.array(anchors))[at]
        np.testing.assert_allclose(x[:, :4], right, atol=1e-5)
        assert float(x.sum()) == pytest.approx(-0.466829, abs=5e-5)


def test_a_window_both_ways_gives_the_slots_recorded():
    drafter = dataclasses.replace(DRAFTER, windows=(3, 3), is_causal=False)
    x = train_slots(drafter, jnp.array([5]))[0]
    assert float(x.sum()) == pytest.approx(6.475089, abs=5e-5)
    right = (-0.217598, -0.274251, -0.041127, -0.382007)
    np.testing.assert_allclose(x[0, :4], right, atol=1e-5)
    right = (0.377189, -0.541965, 0.302106, -0.529999)
    np.testing.assert_allclose(x[3, :4], right, atol=1e-5)


def test_a_convolution_equals_its_loops():
    n = golden.hashed(7, (4, D))
    params = PARAMS["layer_0"]["mlp_conv"]

    def run(x):
        args = {"params": golden.to_jax(params)}, jnp.asarray(x, jnp.float32)[None]
        conv: Any = GroupedConv(DRAFTER)
        out, close = conv.apply(*args)
        return out[0], close(out * 2)[0]

    def side(i, x):
        z = np.zeros((4, D))
        for t, o, c in np.ndindex(4, K, D):
            kernel = params["base"][i, o, c] + params["projection"][i, o, c // 4] @ n[t]
            z[t, c] += kernel * (x[t - o, c] if t >= o else 0)
        return z

    y, z = jax.jit(run)(n)
    np.testing.assert_allclose(y, side(0, n), atol=1e-5)
    np.testing.assert_allclose(z, side(1, 2 * side(0, n)), atol=1e-5)


PATH = [  # candidates of slots 1 to 3 and their scores, along the greedy path
    {13: 13.816229, 5: 6.444795, 30: -4.828173, 9: 1.094232, 20: 3.258468}
    | {22: 4.340833},
    {1: 1.006182, 19: 1.021033, 25: 1.118914, 15: -0.188650, 22: 0.289457}
    | {23: -1.791580},
    {1: 3.570719, 22: 2.693078, 15: -4.397447, 9: -2.085572, 5: -6.008996}
    | {25: -3.084844},
]


def test_the_path_is_the_one_recorded():
    x = train_slots(DRAFTER, jnp.array([5]))[0, 1:]
    logits = SHARED.logits(x)
    assert np.argmax(logits, axis=1).tolist() == [13, 1, 1]  # of U alone
    before = jnp.array([5, 13, 25])
    scores = jax.jit(DRAFTER.select)(WEIGHTS, SHARED, logits, before, x)
    for row, right in zip(np.asarray(scores), PATH, strict=True):
        assert set(np.flatnonzero(np.isfinite(row))) == set(right)
        np.testing.assert_allclose(row[list(right)], list(right.values()), atol=5e-5)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()], ids=["greedy", "drawn"])
def test_a_draft_walks_the_path(sampling):
    def draft(features):
        state = DRAFTER.prefill(
            WEIGHTS, SHARED, jnp.array([IDS[:5]]), jnp.array([5]), features, 16
        )
        keys = jax.random.split(jax.random.key(0), 1)
        args = WEIGHTS, SHARED, state, jnp.array([5]), sampling, keys
        return DRAFTER.draft(*args)[0]

    features = jnp.asarray(first.FEATURES[:5], jnp.float32)[None]
    found = jax.jit(draft)(features)
    if sampling.greedy:
        assert found.tokens.tolist() == [[13, 25, 1]]
        return
    x = train_slots(DRAFTER, jnp.array([5]))[0, 1:]
    before = jnp.array([5, *found.tokens[0, :2]])
    right = jax.nn.softmax(DRAFTER.select(WEIGHTS, SHARED, SHARED.logits(x), before, x))
    np.testing.assert_allclose(found.probs[0], right, atol=1e-5)


def test_the_loss_is_the_one_recorded():
    """Anchors 2 and 5 forced; labels that are no candidates have no second term."""
    forced = lambda *_: (jnp.array([[2, 5]]), jnp.ones((1, 2), bool))
    with mock.patch.object(dflash, "draw_anchors", forced):
        args = WEIGHTS, SHARED, first.batch(), jax.random.key(0)
        loss, logs = jax.jit(DRAFTER.loss)(*args)
        wide = dataclasses.replace(DRAFTER, top_k=16)
        _, wide_logs = jax.jit(wide.loss)(*args)
    assert float(logs["ce_selector"]) == pytest.approx(1.792200, abs=2e-5)
    assert float(loss) == pytest.approx(3.166924 + 1.792200, abs=2e-5)
    right = 30.843906 / 3.618355
    assert float(wide_logs["ce_selector"]) == pytest.approx(right, abs=5e-5)


def test_whole_rounds_are_those_recorded():
    llama, params = first.target()
    model = Model(llama, DRAFTER, GREEDY)
    weights = Weights(target=params, drafter=WEIGHTS)
    progress = start(model, weights, [[26, 7]], max_new_tokens=20)
    for _ in range(3):
        progress = advance(model, weights, progress, jnp.asarray(1))
    assert progress.trace.drafted[0, :3].tolist() == [
        [0, 0, 9],
        [15, 1, 15],
        [15, 26, 15],
    ]
    assert progress.trace.num_accepted[0, :3].tolist() == [0, 0, 0]
    assert finish(model, progress).tokens == [[27, 19, 19, 19]]


@pytest.mark.slow
def test_it_starts_as_dflash():
    """The convolutions are the identity and the path adds nothing at first."""
    params = jax.jit(DRAFTER.init)(jax.random.key(0), SHARED)
    plain = dflash.DFlash(**{f: vars(DRAFTER)[f] for f in vars(first.DRAFTER)})
    same = {k: v for k, v in params.items() if k != "selector"}
    features = jnp.asarray(first.FEATURES, jnp.float32)[None]
    anchors = jnp.array([[2, 5]])
    blocks = DRAFTER.embed_blocks(SHARED, jnp.array([[15, 5]]))
    run = jax.jit(
        lambda d, p: d.apply(p, Net.train, features, blocks, anchors), static_argnums=0
    )
    np.testing.assert_allclose(run(DRAFTER, same), run(plain, same), atol=1e-6)
    logits = SHARED.logits(run(DRAFTER, same))
    scores = DRAFTER.select(
        params, SHARED, logits, jnp.zeros(logits.shape[:3], int), run(DRAFTER, same)
    )
    kept = np.isfinite(scores)
    assert kept.sum(axis=-1).tolist() == np.full(logits.shape[:3], 6).tolist()
    np.testing.assert_array_equal(scores[kept], logits[kept])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 0}, "top_k >= 1"),
        ({"conv_group": 5}, "divide the width 16, got 5"),
        ({"inject": "input"}, "over blocks, not over the text"),
    ],
)
def test_bad_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DFlash2.for_target(first.CONFIG, 31, **fields)


def test_more_candidates_than_ids_are_refused():
    drafter = dataclasses.replace(DRAFTER, top_k=33)
    with pytest.raises(ValueError, match="the target has 32 ids"):
        drafter.init(jax.random.key(0), SHARED)


def test_the_selector_of_a_fresh_drafter_learns_and_counts_as_much_as_it_is_told():
    """Two tables of zeros would be a gradient of zero for ever."""
    params = jax.jit(DRAFTER.init)(jax.random.key(0), SHARED)
    plain = dataclasses.replace(DRAFTER, w_selector=0.0)

    @jax.jit
    def losses(selector):
        args = params | {"selector": selector}, SHARED, first.batch()
        whole, logs = DRAFTER.loss(*args, jax.random.key(0))
        return whole, (logs["ce_selector"], plain.loss(*args, jax.random.key(0))[0])

    (whole, (path, backbone)), grads = jax.value_and_grad(losses, has_aux=True)(
        params["selector"]
    )
    assert np.any(grads["successor"])
    assert float(whole) == pytest.approx(float(backbone + path), rel=1e-5)


def test_the_published_rank_is_that_of_large_vocabularies():
    of = lambda V: DFlash2.for_target(
        dataclasses.replace(first.CONFIG, vocab_size=V), 31, num_layers=1
    )
    assert [(of(V).rank, of(V).top_k) for V in (12, 320, 150_000)] == [
        (4, 12),
        (10, 16),
        (256, 16),
    ]
