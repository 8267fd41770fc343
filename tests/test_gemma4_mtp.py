"""Gemma 4's MTP drafter against recorded drafts, and what is its own in training."""

import dataclasses
import functools

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from test_gemma import IDS, A, B, F, S, load

from specjax import checkpoints, feature_cache, kv_cache, testing
from specjax.drafters import base, gemma4_mtp
from specjax.drafters.gemma4_mtp import Gemma4MTP, with_clusters
from specjax.generate import Model, Weights, advance, autoregressive, generate, start
from specjax.mla import DeepSeekConfig
from specjax.sampling import GREEDY, Sampling
from specjax.tree import Tree

V = 64
ASSISTANT = {
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 32,
    "text_config": {
        "model_type": "gemma4_text",
        "vocab_size": V,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 4,
        "layer_types": [S, S, S, F],
        "max_position_embeddings": 128,
        "rope_parameters": B["rope_parameters"],
    },
}
CLUSTERS = {
    "use_ordered_embeddings": True,
    "num_centroids": 8,
    "centroid_intermediate_top_k": 2,
}
ORDER = (27 * np.arange(V) + 5) % V


def stored(config):
    """The tensors of an assistant, filled by the recorded rule."""
    shapes = folders.gemma_shapes(config["text_config"] | {"num_kv_shared_layers": 4})
    shapes["pre_projection.weight"] = (16, 64)
    shapes["post_projection.weight"] = (32, 16)
    if config.get("use_ordered_embeddings"):
        shapes["masked_embedding.centroids.weight"] = (8, 16)
    assert len(shapes) == 48 + ("masked_embedding.centroids.weight" in shapes)
    filled = folders.fill(shapes)
    if config.get("use_ordered_embeddings"):
        filled["masked_embedding.token_ordering"] = ORDER.astype(np.int64)
    return filled


def assistant(tmp_path, target, clustered=False, **fields):
    config = dict(ASSISTANT)
    if target.target.config.keys_as_values:
        equal = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
        config["text_config"] = config["text_config"] | equal
    config |= CLUSTERS if clustered else {}
    folder = folders.write(tmp_path / "a", config, stored(config))
    name, drafter, params = checkpoints.assistant(folder, target.target.config)
    assert name == "gemma4_mtp"
    return dataclasses.replace(drafter, gamma=3, **fields), params


@functools.partial(jax.jit, static_argnums=0)
def step(drafter, params, shared, tokens, h, n, slots):
    blocks = drafter.blocks(n, slots[0][0].shape[2])
    return drafter.step(params, shared, tokens, h, blocks, slots)


def draft(target, drafter, params, ids=IDS):
    """Greedy steps after the ids: tokens, the logits of each step, the last h'."""
    cache = target.target.init_cache(1, 16)
    run = jax.jit(functools.partial(target.target, taps=(-1,)))
    out = run(target.params, jnp.asarray([ids]), cache)
    root = target.target.logits(target.params, out.hidden[:, -1]).argmax(-1)
    cache = kv_cache.commit(out.cache, None, jnp.array([len(ids)]))
    shared = dataclasses.replace(target.target.shared(target.params), cache=cache)
    n = cache.length[:, None]
    slots = tuple((cache.k[i], cache.v[i]) for i in drafter.sources)
    tokens, h, steps = root[:, None], out.hidden[:, -1:], []
    for _ in range(drafter.gamma):
        z, h = step(drafter, params, shared, tokens, h, n, slots)
        steps.append(np.asarray(drafter.logits(params, z)[0, 0]))
        tokens = jnp.asarray([[steps[-1].argmax()]])
    keys = jax.random.split(jax.random.key(0), 1)
    lengths = jnp.array([len(ids)])
    state = drafter.prefill(
        params, shared, jnp.asarray([ids]), lengths, out.features, 16
    )
    drawn, _ = jax.jit(drafter.draft, static_argnums=4)(
        params, shared, state, root, GREEDY, keys
    )
    assert drawn.tokens[0].tolist() == [int(s.argmax()) for s in steps]
    return int(root[0]), drawn.tokens[0].tolist(), steps, np.asarray(h[0, 0])


# Recorded: back, more_keys, ids, logits[:4] of step 1 and step 3, state after step 3.
DENSE = [
    (
        0,
        1,
        (8, 45, 13),
        (-0.787303, 0.383254, -0.111620, 0.391976),
        (-0.261849, 0.174786, 0.069560, -0.811947),
        (0.833928, 0.293508, 0.003784, -0.710464),
    ),
    (
        1,
        1,
        (8, 12, 37),
        (-0.738575, 0.387566, -0.058862, 0.352662),
        (-0.144938, 1.090639, 0.539116, -0.790075),
        (1.267164, -0.136381, -0.152148, -0.268335),
    ),
    (
        0,
        0,
        (37, 1, 15),
        (-0.347343, 0.802154, 0.092880, 0.890229),
        (0.234195, 0.152441, 0.016923, 0.162008),
        (0.762093, 0.839449, 1.303749, -0.802288),
    ),
    (
        1,
        0,
        (37, 37, 13),
        (-0.345916, 0.725267, 0.102061, 0.554420),
        (-0.297671, 0.786853, 0.321890, -0.836848),
        (1.282818, 0.167198, -0.393390, -0.431136),
    ),
]
# A logit that the record fills is None here: it is not scored.
CLUSTERED = [
    (
        0,
        1,
        (1, 43, 47),
        (None, 1.641575, None, -0.219819),
        (None, 0.014416, None, 0.322588),
        (0.870394, -0.361108, -0.480308, 0.362493),
    ),
    (
        1,
        1,
        (26, 1, 10),
        (None, None, None, -0.397501),
        (None, 0.666407, None, 0.214288),
        (1.326632, -0.105710, -1.054446, 0.605661),
    ),
    (
        0,
        0,
        (62, 36, 30),
        (None, None, None, -0.350751),
        (None, None, None, -0.247350),
        (0.650048, -0.033850, 0.176370, 0.019681),
    ),
    (
        1,
        0,
        (36, 56, 48),
        (None, None, None, -0.522218),
        (-0.799711, 0.629320, None, None),
        (-0.569688, 0.189920, 0.133989, 0.652462),
    ),
]


def agree(logits, golden):
    for value, wanted in zip(logits, golden, strict=True):
        if wanted is None:
            assert value == -np.inf
        else:
            np.testing.assert_allclose(value, wanted, atol=1e-4)


SLOW = pytest.mark.slow  # one of each kind stays quick


@pytest.mark.parametrize(
    ("clustered", "row"),
    [
        pytest.param(kind, row, marks=[SLOW] if i else [])
        for kind, rows in ((False, DENSE), (True, CLUSTERED))
        for i, row in enumerate(rows)
    ],
)
def test_golden_drafts_after_the_target_of_one_full_kv_head(tmp_path, clustered, row):
    """Recorded from transformers 5.24, and from a float64 model for more_keys = 0."""
    back, more_keys, ids, first, third, state = row
    target = load(tmp_path, B)
    drafter, params = assistant(
        tmp_path, target, clustered, back=back, more_keys=more_keys
    )
    assert drafter.sources == (1, 1, 1, 2)
    root, found, steps, h = draft(target, drafter, params)
    assert root == 44 and tuple(found) == ids
    agree(steps[0][:4], first)
    agree(steps[2][:4], third)
    np.testing.assert_allclose(h[:4], state, atol=1e-4)


SHARED_TAIL = [
    (
        False,
        0,
        (51, 31, 13),
        {0: -0.415214, 1: -0.092152, 2: 0.501163, 3: -0.059133},
        (0.961658, 0.208503, -0.705632, -0.480146),
    ),
    (
        False,
        1,
        (31, 19, 47),
        {0: -0.413395, 1: 0.045461, 2: 0.757779, 3: -0.181336},
        (0.161391, -0.175156, -0.858342, -0.526711),
    ),
    (
        True,
        0,
        (56, 24, 34),
        {6: -0.185766, 9: -0.371468, 16: -0.487789, 19: 0.009220},
        (0.130189, -0.371378, 0.334102, 0.584903),
    ),
    (
        True,
        1,
        (47, 54, 49),
        {3: -0.449121, 9: -0.156743, 10: 0.531389, 13: -0.164237},
        (-0.071441, -0.295445, 0.268591, 0.154443),
    ),
]


@pytest.mark.parametrize(
    "row", [SHARED_TAIL[3], *(pytest.param(r, marks=SLOW) for r in SHARED_TAIL[:3])]
)
def test_golden_drafts_after_a_target_whose_last_layers_have_no_keys(tmp_path, row):
    """The sources are the last layers that own keys, not the last layers."""
    clustered, back, ids, first, state = row
    target = load(tmp_path, A)
    drafter, params = assistant(tmp_path, target, clustered, back=back)
    assert drafter.sources == (1, 1, 1, 2)
    root, found, steps, h = draft(target, drafter, params)
    assert root == 47 and tuple(found) == ids
    lowest = np.flatnonzero(np.isfinite(steps[0]))[:4].tolist()
    assert lowest == list(first)
    np.testing.assert_allclose(steps[0][lowest], list(first.values()), atol=1e-4)
    np.testing.assert_allclose(h[:4], state, atol=1e-4)


# --- training and drafting on a random target

TEXT = jnp.asarray(np.random.default_rng(1).integers(0, 24, (2, 11)), jnp.int32)


@functools.cache
def kit(**fields):
    target, params = testing.tiny_target()
    drafter, weights = testing.tiny_drafter("gemma4_mtp", target, params, **fields)
    return target, params, drafter, testing.perturb(weights)


def batch_of(target, params, drafter, tokens=TEXT):
    mask = jnp.ones(tokens.shape, bool)
    look = functools.partial(feature_cache.features, target, drafter.taps)
    return look(params, tokens, mask, kv_layers=drafter.kv_layers)


@functools.partial(jax.jit, static_argnums=(0, 4))
def unrolled(drafter, params, shared, batch, steps):
    return drafter.states(params, shared, batch, steps)


def small_window(drafter, window):
    windows = (window,) * 3 + (None,)
    config = dataclasses.replace(drafter.config, windows=windows)
    return dataclasses.replace(drafter, config=config)


@pytest.mark.slow
def test_a_row_of_training_is_a_draft_from_that_place():
    """Step k of row t: anchor x_{t+1}, keys up to t, and no other row."""
    target, params, drafter, weights = kit()
    drafter = small_window(drafter, 3)
    shared, B = target.shared(params), len(TEXT)
    rows = unrolled(drafter, weights, shared, batch_of(target, params, drafter), 3)
    out = target(params, TEXT, target.init_cache(B, 16), taps=(-1,))
    for t in (0, 4, 7):
        cache = kv_cache.commit(out.cache, None, jnp.full(B, t + 1))
        slots = tuple((cache.k[i], cache.v[i]) for i in drafter.sources)
        h, n = out.features[:, t : t + 1], cache.length[:, None]
        for k in range(3):
            token = TEXT[:, t + 1 + k, None]
            z, h = step(drafter, weights, shared, token, h, n, slots)
            np.testing.assert_allclose(z[:, 0], rows[k][:, t], atol=1e-5)


@pytest.mark.slow
def test_a_step_sees_nothing_of_what_comes_after_it():
    target, params, drafter, weights = kit()
    shared = target.shared(params)
    other = TEXT.at[:, 8:].set((TEXT[:, 8:] + 5) % 24)
    one, two = (
        unrolled(drafter, weights, shared, batch_of(target, params, drafter, t), 2)
        for t in (TEXT, other)
    )
    # Row t of step k reads x_{t+k}; x_7 is the last that both texts have.
    np.testing.assert_allclose(one[0][:, :7], two[0][:, :7], atol=1e-6)
    np.testing.assert_allclose(one[1][:, :6], two[1][:, :6], atol=1e-6)
    assert np.any(np.abs(one[0][:, 7] - two[0][:, 7]) > 1e-3)
    assert np.any(np.abs(one[1][:, 6] - two[1][:, 6]) > 1e-3)


@pytest.mark.parametrize(("more_keys", "first"), [(0, 5), (1, 4)])
def test_local_layers_see_the_window_and_full_ones_all(more_keys, first):
    """A value has a gradient where it is seen."""
    target, params, drafter, weights = kit()
    assert drafter.sources == (2, 2, 2, 3)  # the last layer but one, and the last
    drafter = dataclasses.replace(small_window(drafter, 3), more_keys=more_keys)
    rng, n = np.random.default_rng(0), jnp.array([[8]])
    slots = jnp.asarray(rng.normal(size=(4, 2, 1, 2, 12, 8)), jnp.float32)
    h, shared = (
        jnp.asarray(rng.normal(size=(1, 1, 16)), jnp.float32),
        target.shared(params),
    )
    total = lambda slots: step(drafter, weights, shared, n, h, n, slots)[0].sum()
    grads = jax.grad(total)(tuple((k, v) for k, v in slots))
    for layer, (_, grad) in enumerate(grads):
        seen = np.flatnonzero(np.abs(grad).sum((0, 1, 3)))
        assert seen.tolist() == list(range(first if layer < 3 else 0, 8))


@pytest.mark.slow
def test_drafts_through_the_kernel_of_tree_attention_have_the_same_laws(monkeypatch):
    """As on a TPU, where it is chosen; a window of 3 after 9 and 5 tokens."""
    target, params, drafter, weights = kit()
    tree = Tree((-1, 0, 0, 1, 1, 2))
    drafter = dataclasses.replace(small_window(drafter, 3), topology=tree)
    cache = jax.jit(target)(params, TEXT, target.init_cache(2, 128)).cache
    cache = kv_cache.commit(cache, None, jnp.array([9, 5]))
    shared = dataclasses.replace(target.shared(params), cache=cache)
    state = gemma4_mtp.State(jnp.ones((2, 16)))
    args = state, TEXT[:, 0], Sampling(1.0), jax.random.split(jax.random.key(0), 2)
    run = lambda: drafter.draft(weights, shared, *args)[0]
    right = jax.jit(run)()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pltpu.force_tpu_interpret_mode():
        program = jax.make_jaxpr(lambda: run())()
        ours = jax.jit(lambda: run())()
    assert str(program).count("pallas_call") == 8  # layers, of the first step and later
    np.testing.assert_array_equal(ours.tokens, right.tokens)
    np.testing.assert_allclose(ours.probs, right.probs, atol=1e-5)


def test_loss_and_acceptance_by_hand():
    """Eq. 5 with weights 1 and 0.8, over the rows whose label is learned."""
    target, params, drafter, weights = kit(gamma=2)
    shared = target.shared(params)
    batch = batch_of(target, params, drafter)
    mask = np.zeros(TEXT.shape, bool)
    mask[0, 2:4], mask[0, 5:9], mask[1, 10] = True, True, True
    batch = dataclasses.replace(batch, mask=jnp.asarray(mask))
    loss, logs = jax.jit(drafter.loss)(weights, shared, batch, jax.random.key(0))

    softmax = lambda x: np.exp(x) / np.exp(x).sum()
    law = lambda b, t: softmax(np.asarray(shared.logits(batch.hidden[b, t])))
    means = []
    for k, z in enumerate(unrolled(drafter, weights, shared, batch, 2), 1):
        q = np.asarray(drafter.logits(weights, jnp.asarray(z)))
        rows = np.argwhere(mask[:, 1 + k :]).tolist()
        seen = [(b, t) for b, t in rows if t % base.THIN == 0]
        both = [np.minimum(law(b, t + k), softmax(q[b, t])).sum() for b, t in seen]
        assert len(seen) == 3 - k  # of both texts, then of the first
        np.testing.assert_allclose(logs["alpha"][k - 1], np.mean(both), rtol=1e-5)
        ce = [-(law(b, t + k) * np.log(softmax(q[b, t]))).sum() for b, t in rows]
        means.append(np.mean(ce))
    np.testing.assert_allclose(loss, (means[0] + 0.8 * means[1]) / 1.8, rtol=1e-5)
    np.testing.assert_allclose(logs["ce"], means, rtol=1e-5)


def test_all_drafted_steps_are_judged_however_few_are_trained():
    target, params, drafter, weights = kit(gamma=2)
    drafter, of = dataclasses.replace(drafter, unroll=1), jax.eval_shape
    batch = of(lambda: batch_of(target, params, drafter))
    key = jax.random.key(0)
    _, logs = of(drafter.loss, weights, target.shared(params), batch, key)
    assert logs["ce"].shape == (1,) and logs["alpha"].shape == (2,)


# --- clusters


def test_all_clusters_scored_are_the_whole_head():
    _, _, drafter, weights = kit()
    clustered, more = with_clusters(drafter, weights, 6, 6)
    z = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 8)), jnp.float32)
    dense, found = drafter.logits(weights, z), clustered.logits(more, z)
    np.testing.assert_allclose(found, dense, atol=1e-5)
    rows = np.asarray(weights["head"])[clustered.tokens]
    np.testing.assert_array_equal(more["clusters"], rows)
    np.testing.assert_allclose(more["centroids"], rows.mean(1), atol=1e-6)
    few = dataclasses.replace(clustered, num_scored=2).logits(more, z)
    assert np.all(np.isfinite(few).sum(-1) == 2 * 4)
    kept = np.isfinite(few)
    np.testing.assert_allclose(few[kept], dense[kept], atol=1e-5)


def test_centroids_learn_the_targets_mass_of_their_own_cluster():
    _, _, drafter, weights = kit()
    drafter, weights = with_clusters(drafter, weights, 6, 2)
    rng = np.random.default_rng(0)
    z, p = rng.normal(size=(1, 2, 8)), rng.dirichlet(np.ones(24), (1, 2))
    scores = z @ np.asarray(weights["centroids"]).T
    log = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    right = -(p[..., np.asarray(drafter.tokens)].sum(-1) * log).sum(-1)
    z, p = jnp.asarray(z, jnp.float32), jnp.asarray(p, jnp.float32)
    np.testing.assert_allclose(drafter._distance(weights, z, p), right, rtol=1e-5)


@pytest.mark.slow
def test_a_drafter_with_clusters_trains_its_centroids_alone():
    target, params, drafter, weights = kit()
    drafter, weights = with_clusters(drafter, weights, 6, 2)
    batch, shared = batch_of(target, params, drafter), target.shared(params)

    def loss(weights):
        return drafter.loss(weights, shared, batch, jax.random.key(0))

    grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, logs), grads = grad(weights)
    assert np.any(grads.pop("centroids") != 0)
    assert not any(np.any(g != 0) for g in jax.tree.leaves(grads))
    assert value < np.log(6) * 2 and np.all(logs["alpha"] < 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [Sampling(0.8, top_p=0.9), pytest.param(GREEDY, marks=SLOW)]
)
def test_tokens_outside_the_scored_clusters_are_not_drafted(sampling):
    """q is what was sampled from: 0 outside, and the sum over the rest is 1."""
    target, params, drafter, weights = kit()
    drafter, weights = with_clusters(drafter, weights, 6, 2)
    model = Model(target, drafter, sampling)
    arrays = Weights(target=params, drafter=weights)
    prompts = [[3, 1 + i] for i in range(4)]
    run = start(model, arrays, prompts, max_new_tokens=12)
    shared = dataclasses.replace(target.shared(params), cache=run.cache)
    keys = jax.random.split(jax.random.key(0), 4)
    draft = jax.jit(drafter.draft, static_argnums=4)
    draft, _ = draft(weights, shared, run.state, run.anchor, sampling, keys)
    if not sampling.greedy:
        np.testing.assert_allclose(draft.probs.sum(-1), 1, atol=1e-5)
        assert np.all((draft.probs > 0).sum(-1) <= 8)
    plain = autoregressive(model)
    ended = advance(model, arrays, run, jnp.asarray(12))
    assert np.all(ended.valid)
    if sampling.greedy:
        own = generate(plain, arrays, prompts, max_new_tokens=12)
        assert np.asarray(ended.tokens).tolist() == own.tokens


# --- what is refused


def two_windows(config):
    return dataclasses.replace(config, windows=(3, 4, 3, None))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gamma": 0}, "gamma >= 1, got 0"),
        ({"unroll": 0}, "unroll >= 1, got 0"),
        ({"decay": 0.0}, "decay <= 1, got 0"),
        ({"back": 2}, "back is 0 or 1, got 2"),
        ({"sources": (1, 1)}, "2 sources"),
        ({"num_clusters": 6}, "without an order"),
        ({"config": two_windows}, "one window for all local layers"),
        ({"order": (0,) * 24, "num_clusters": 6}, "holds 1 ids of 24"),
        ({"order": tuple(range(24)), "num_clusters": 5}, "numbers that do: 3, 4, 6"),
        ({"order": tuple(range(24)), "num_clusters": 6, "num_scored": 7}, "1 to 6"),
    ],
)
def test_bad_settings_are_refused(fields, message):
    _, _, drafter, _ = kit()
    if callable(fields.get("config")):
        fields = {"config": fields["config"](drafter.config)}
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(drafter, **fields)


@pytest.mark.slow
def test_other_targets_are_refused():
    _, _, drafter, weights = kit()
    latent = DeepSeekConfig(24, 16, 2, 2, 1, 8, 24)
    with pytest.raises(ValueError, match="Use mtp"):
        Gemma4MTP.for_target(latent, None)
    other, tables = testing.tiny_target(width=32)
    with pytest.raises(ValueError, match="24 ids of width 16"):
        drafter.init(jax.random.key(0), other.shared(tables))
    other, tables = testing.tiny_target(num_kv_heads=1)
    model = Model(other, drafter, GREEDY)
    with pytest.raises(ValueError, match="2 kv heads of width 8; layer 2"):
        generate(model, Weights(tables, weights), [[1, 2]], max_new_tokens=4)
    one, x = (jnp.zeros((1, 1, 3, 8)),) * 2, jnp.zeros((1, 3, 16))
    batch = base.Batch(TEXT[:1, :3], TEXT[:1, :3] > 0, x, x, (one, one))
    with pytest.raises(ValueError, match="2 kv heads of width 8; layer 2"):
        drafter.states(weights, other.shared(tables), batch, 1)


def test_an_assistant_without_its_order_and_another_model_are_refused(tmp_path):
    config, tensors = ASSISTANT | CLUSTERS, stored(ASSISTANT | CLUSTERS)
    del tensors["masked_embedding.token_ordering"]
    folder = folders.write(tmp_path / "a", config, tensors)
    own = kit()[0].config
    with pytest.raises(ValueError, match="token_ordering: which tokens"):
        checkpoints.assistant(folder, own)
    folder = folders.write(tmp_path / "b", {"model_type": "llama"}, tensors)
    with pytest.raises(ValueError, match="'llama', no drafter"):
        checkpoints.assistant(folder, own)


def test_an_assistant_of_another_target_is_refused_when_it_is_read(tmp_path):
    folder = folders.write(tmp_path / "a", ASSISTANT, stored(ASSISTANT))
    with pytest.raises(ValueError, match="64 ids of width 32; the target has 24 of"):
        checkpoints.assistant(folder, kit()[0].config)
    for change, error, message in (
        ({"text_config": None}, ValueError, "lacks text_config"),
        ({"tie_word_embeddings": False}, NotImplementedError, "tie_word_embeddings"),
    ):
        config = {k: v for k, v in (ASSISTANT | change).items() if v is not None}
        folder = folders.write(tmp_path / "b", config, {})
        with pytest.raises(error, match=message):
            checkpoints.assistant(folder, kit()[0].config)


@pytest.mark.parametrize(
    ("windows", "sources", "own"),
    [
        ((8, None, 8, None), (2, 2, 2, 3), (8, 8, 8, None)),
        ((8, 8, 8, 8), (3, 3, 3, 3), (8, 8, 8, None)),
        ((), (2, 2, 2, 3), (512, 512, 512, None)),
    ],
)
def test_sources_and_windows_on_targets_of_other_families(windows, sources, own):
    config = dataclasses.replace(kit()[0].config, windows=windows)
    drafter = Gemma4MTP.for_target(config, None)
    assert (drafter.sources, drafter.config.windows) == (sources, own)
