"""P-EAGLE against the numbers that SpecForge's module gave on closed-form weights.

Two layers of width 8, a head of its own, the features, tokens and target logits given
by formulas; recorded in float64 with float32 norms.
"""

import dataclasses
import functools

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_draft_model import CONFIG

from specjax import testing
from specjax.drafters import base, parallel
from specjax.drafters.base import Batch
from specjax.drafters.p_eagle import PEagle, mask_table
from specjax.sampling import Sampling
from specjax.transformer import Shared

MASK = 31
PAIRS = [3, 7, 1, 9, 4, 2]  # the tokens of six pairs, x_1 to x_6
LAWS = {  # norm_before_residual -> logits of ids 0 to 3 at the last pair and two masks
    False: [
        (-0.373389, 0.445795, 1.064876, 1.205968),
        (0.484276, 0.712527, 0.620948, 0.250645),
        (0.017078, -1.012852, -1.588145, -1.450570),
    ],
    True: [
        (-0.224869, 0.835664, 1.521095, 1.523754),
        (0.386677, 0.819311, 0.884182, 0.552172),
        (0.262888, -0.598962, -1.191956, -1.249919),
    ],
}
LIKELIEST = {False: [12, 29, 7], True: [30, 20, 7]}
# Laws come from `hidden` themselves.
SHARED = Shared(embed=jnp.zeros((32, 32)), head=jnp.eye(32))


def drafter_of(**fields):
    fields = {"gamma": 3, "blocks": 3, "rate": 1.0, "share_head": False} | fields
    return PEagle(CONFIG, (0, 1, 2), MASK, **fields)


@functools.cache
def weights():
    tensor, (D, F, V) = golden.counted(0), (8, 12, 32)
    scale = lambda: {"scale": tensor("norm.weight", (D,))}
    params = {
        "embed": tensor("embed_tokens", (V, D)),
        "fc": tensor("fc", (D, 3 * D)),
        "mask_feature": tensor("mask_hidden", (3 * D,)),
    }
    layer = {"input_norm": scale(), "hidden_norm": scale()}
    qkv = [tensor("qkv", (n, 4, 2 * D)) for n in (2, 1, 1)]  # twice as wide as the rest
    qkv = np.concatenate(qkv)[None]
    layer["attention"] = {"qkv": qkv, "out": tensor("o_proj", (D, D))}
    params["layer"] = layer | {
        "post_norm": scale(),
        "mlp": golden.mlp_of(tensor, "", D, F),
    }
    layer = {"input_norm": scale()}
    layer["attention"] = golden.attention_of(tensor, "", D, 2, 1, 4, False)
    params["deeper_0"] = layer | {
        "post_norm": scale(),
        "mlp": golden.mlp_of(tensor, "", D, F),
    }
    params["norm"] = scale()
    params["head"] = tensor("lm_head", (V, D))
    return golden.to_jax(params)


def batch_of():
    """Seven tokens, of which the first stands in no pair and the last has no state."""
    i, j = np.mgrid[:6, :24]
    p, v = np.mgrid[:6, :32]
    pad = lambda x, before: np.pad(x, ((before, 1 - before), (0, 0)))[None]
    features = jnp.asarray(pad(np.sin(0.3 * i + 0.05 * j), 0), jnp.float32)
    hidden = jnp.asarray(pad(3 * np.sin(0.9 * p + 0.4 * v), 1), jnp.float32)
    tokens = jnp.array([[5, *PAIRS]])
    return Batch(tokens, jnp.ones((1, 7), bool), features, hidden)


@functools.partial(jax.jit, static_argnums=0)
def run_rows(drafter, params, batch):
    """All rows that a step draws, and their logits."""
    rows = drafter.rows(jax.random.key(0), batch.mask)
    x = drafter.states(params, batch, rows, parallel.visible(rows, rows))
    return rows, drafter.logits(params, SHARED, x)


@functools.partial(jax.jit, static_argnums=0)
def gradient(drafter, params, batch):
    """Of the sum over all rows."""
    rows = drafter.rows(jax.random.key(0), batch.mask)
    return jax.value_and_grad(drafter.total)(params, SHARED, batch, rows)


def row_of(rows, anchor, depth):
    here = np.asarray((rows.anchor[0] == anchor) & (rows.depth[0] == depth))
    return int(np.flatnonzero(here)[0])


@pytest.mark.parametrize(
    "norm_before_residual", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_a_draft_is_the_recorded_pass_over_pairs_and_placeholders(norm_before_residual):
    drafter, batch = drafter_of(norm_before_residual=norm_before_residual), batch_of()

    @jax.jit
    def draft(params):
        text, features = batch.tokens[:, :6], batch.features[:, :6]
        args = text, jnp.array([6]), features, 16
        state = drafter.prefill(params, SHARED, *args)
        keys = jax.random.split(jax.random.key(0), 1)
        anchor = batch.tokens[:, 6]
        return drafter.draft(params, SHARED, state, anchor, Sampling(), keys)[0].probs

    probs = draft(weights())[0]
    assert jnp.argmax(probs, -1).tolist() == LIKELIEST[norm_before_residual]
    difference = np.log(probs[:, :4]) - np.array(LAWS[norm_before_residual])
    np.testing.assert_allclose(difference - difference[:, :1], 0, atol=3e-5)


def test_rows_of_training_are_the_rows_of_the_draft_and_those_recorded():
    batch = batch_of()
    rows, logits = run_rows(drafter_of(), weights(), batch)
    right = [-0.130270, 0.030009, 0.176818, 0.244259]
    at = row_of(rows, 2, 2)
    np.testing.assert_allclose(logits[0, at, :4], right, atol=2e-5)
    # With one more pair to learn from, the last pair has two masks behind it.
    longer = jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0), (0, 2), (0, 0))[: x.ndim]), batch
    )
    longer = dataclasses.replace(longer, mask=jnp.ones((1, 9), bool))
    rows, logits = run_rows(drafter_of(), weights(), longer)
    for depth, law in enumerate(LAWS[False]):
        at = row_of(rows, 5, depth)
        np.testing.assert_allclose(logits[0, at, :4], law, atol=2e-5)


def test_the_loss_over_all_rows_is_that_recorded():
    batch = batch_of()
    rows, logits = run_rows(drafter_of(), weights(), batch)
    place = rows.position + 1
    target = SHARED.logits(rows.read(batch.hidden, place))
    p = jax.nn.softmax(target, axis=-1)
    ce = base.soft_cross_entropy(logits, p)
    wanted = rows.read(batch.mask, place)
    for depth, (count, right) in enumerate(
        [(6, 3.699758), (5, 3.788682), (4, 3.670132)]
    ):
        some = wanted & (rows.depth == depth)
        assert int(some.sum()) == count
        assert float(base.masked_mean(ce, some)) == pytest.approx(right, abs=2e-5)
    kl = ce - base.soft_cross_entropy(target, p)
    assert float(base.masked_mean(kl, wanted)) == pytest.approx(1.097805, abs=2e-5)
    args = weights(), SHARED, batch, jax.random.key(0)
    loss, logs = jax.jit(drafter_of().loss)(*args)
    assert float(loss) == pytest.approx(3.721499, abs=2e-5)
    mine = logits[0, jnp.array([row_of(rows, 0, d) for d in range(3)])]
    alpha = base.overlap(mine, SHARED.logits(batch.hidden[0, 1:4]))
    np.testing.assert_allclose(logs["alpha"][:3], alpha, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("segments", [9, 2, 3])
def test_gradients_of_segments_add_up_to_that_of_one_pass(segments):
    """Two ragged texts with dropped rows; chains are cut, the last segment is short."""
    B, T = 2, 23
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 30, (B, T)), jnp.int32)
    place = jnp.arange(T)[None]
    mask = (place >= 3) & (place < jnp.array([[T], [17]]))
    batch = Batch(tokens, mask, draw(B, T, 24), draw(B, T, 32))
    drafter = drafter_of(blocks=5, rate=0.8)
    whole = gradient(drafter, weights(), batch)
    parts = gradient(dataclasses.replace(drafter, segments=segments), weights(), batch)
    for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        largest = float(jnp.max(jnp.abs(x)))
        np.testing.assert_allclose(x, y, atol=1e-5 * largest, rtol=0)
        assert largest > 0


def test_the_mask_of_a_shorter_text_is_a_corner_of_the_longer_ones():
    table = mask_table(8, 3)
    np.testing.assert_array_equal(mask_table(5, 3), table[:15, :15])
    # From each place the same: moved by one place, a chain sees as much of itself.
    for a in range(7):
        own, after = slice(3 * a, 3 * a + 3), slice(3 * a + 3, 3 * a + 6)
        np.testing.assert_array_equal(table[own, own], np.tri(3, dtype=bool))
        np.testing.assert_array_equal(table[after, own], [[True, False, False]] * 3)
        assert not table[own, after].any()


@pytest.mark.parametrize(
    ("prompt", "counts"),
    [
        (0, [512, 357, 249, 174, 121, 101, 101, 101]),
        (200, [512, 217, 151, 105, 73, 61, 61, 61]),
    ],
)
def test_as_many_rows_are_kept_as_published(prompt, counts):
    """Of a text with a prompt; pair t is to be learned if x_{t+1} is."""
    drafter = PEagle(CONFIG, (0, 1, 2), MASK)
    mask = jnp.arange(513)[None] > prompt
    rows = jax.jit(drafter.rows)(jax.random.key(0), mask)
    sizes = np.bincount(rows.depth[0][rows.real[0]]).tolist()
    assert sizes[:5] == [513, *counts[1:5]]  # the last token is a row without a label
    assert all(
        n - 4 <= size <= n for size, n in zip(sizes[5:], counts[5:], strict=True)
    )


@pytest.mark.parametrize("seed", range(3))
def test_no_chain_lacks_a_row_or_starts_before_the_text(seed):
    mask = (jnp.arange(40) < 22)[None]
    rows = jax.jit(PEagle(CONFIG, (0, 1, 2), MASK).rows)(jax.random.key(seed), mask)
    real = np.asarray(rows.real[0])
    columns = (np.asarray(x[0])[real].tolist() for x in rows)
    kept = list(zip(*columns, strict=True))
    masked = kept[40:]
    assert len(set(kept)) == len(kept) and masked == sorted(masked)
    assert {d for _, d in masked} == set(range(1, 8))
    for a, d in masked:
        assert a >= 0 and (a, d - 1) in kept and a + d + 1 < 22


def test_the_published_shape_of_a_target_is_scaled():
    target, params = testing.tiny_target()
    deep = dataclasses.replace(target.config, num_layers=16)
    drafter = PEagle.for_target(deep, 21)
    assert drafter.config.num_layers == 4 and drafter.taps == (2, 8, 13)
    shared = target.shared(params)
    weights = jax.eval_shape(drafter.init, jax.random.key(0), shared)
    assert "deeper_2" in weights
    assert weights["mask_feature"].shape == (48,)
    assert weights["embed"].shape == (24, 16) and "head" not in weights


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gamma": 0}, "gamma >= 1, got 0"),
        ({"segments": 0}, "segments >= 1, got 0"),
        ({"rate": 0.0}, "rate=0.0 must be in"),
        ({"mask_token_id": 99}, "mask_token_id=99; choose an unused one of the 32"),
        ({"target_states": (2, 1)}, r"must ascend from 0 on, got \(2, 1\)"),
        ({"norm_before_fc": True, "fc_norm": True}, "choose one"),
    ],
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(drafter_of(), **fields)


def test_a_target_without_a_mask_token_is_refused():
    target, _ = testing.tiny_target()
    with pytest.raises(ValueError, match="give mask_token_id"):
        PEagle.for_target(target.config, None)
