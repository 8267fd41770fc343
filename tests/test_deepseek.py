"""Latent attention and experts: recorded numbers, a plain transcription, the engine."""

import dataclasses
import functools
import json
import pathlib

import folders
import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_conformance as battery

from specjax import checkpoints, drafters, mla, targets, testing
from specjax.commands import common
from specjax.drafters.mtp import MTP
from specjax.generate import Model, Weights, autoregressive, generate
from specjax.mla import DeepSeekConfig
from specjax.sampling import GREEDY, Sampling
from specjax.targets import convert, deepseek
from specjax.tree import DynamicTree, Tree

IDS = [3, 17, 42, 5, 60, 11, 29]
YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "rope_scaling": YARN,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
    "eos_token_id": 0,
}
CLOSE = {"atol": 1e-4, "rtol": 0}


@functools.cache
def model(num_modules=1, **change):
    """A target filled by the rule of `folders`, its modules, its states of IDS."""
    stored = CONFIG | change
    tensors = folders.fill(folders.deepseek_shapes(stored, num_modules))
    config = convert.config_from_hf(stored)
    params = convert.params_from_tensors(config, tensors, jnp.float32)
    weights = convert.module_params(config, tensors, jnp.float32)
    target = convert.target_of(config)
    hidden = jax.jit(lambda p, t: target(p, t).hidden)(params, jnp.array([IDS]))
    return target, params, weights, hidden


def rows_of(num_modules, carry="normed", steps=1):
    """Logits [7 V] of each teacher-forced depth, with the anchor 21 behind the text."""
    target, params, weights, hidden = model(num_modules)
    drafter = MTP.for_target(target.config, None, num_modules=num_modules, carry=carry)
    shared = target.shared(params)
    padded = jnp.pad(hidden, ((0, 0), (0, 1), (0, 0)))
    text = np.array([[*IDS, 21]])

    @jax.jit
    def run(weights, shared, h):
        logits = []
        for k in range(1, steps + 1):
            e = shared.embed[np.roll(text, -k, axis=1)]
            g, h, _ = drafter.module(weights, k, h, e)
            logits.append(shared.logits(g)[0, : 8 - k])
        return logits

    return list(map(np.asarray, run(weights, shared, padded)))


def test_the_file_has_the_recorded_number_of_tensors():
    assert len(folders.deepseek_shapes(CONFIG, 1)) == 95
    assert len(folders.deepseek_shapes(CONFIG, 2)) == 137


def test_rotary_frequencies_and_the_score_scale_are_those_recorded():
    config = convert.config_from_hf(CONFIG)
    right = [1, 0.1, 0.005125, 2.5e-5]
    np.testing.assert_allclose(config.rope.frequencies(8), right, rtol=1e-6)
    assert config.rope.magnitude == 1.0
    assert config.score_scale == pytest.approx(0.46846355, abs=1e-8)


def test_target_logits_are_those_recorded():
    target, params, _, hidden = model()
    logits = np.asarray(target.logits(params, hidden)[0])
    right = [0.188465, -1.333091, 0.429245, 0.335316, 0.003466, 0.111572]
    np.testing.assert_allclose(logits[-1, :6], right, **CLOSE)
    np.testing.assert_allclose(logits[2, :3], [0.673939, -0.597448, 0.784214], **CLOSE)
    sums = logits.sum(), np.abs(logits).sum()
    np.testing.assert_allclose(sums, [-4.82579, 209.51458], atol=2e-3)
    assert logits[-1].argmax() == 21


def test_rows_of_one_module_are_those_recorded():
    (logits,) = rows_of(1)
    right = [-0.529306, -0.165819, -0.117395, -0.862341, -1.011904, -0.054599]
    np.testing.assert_allclose(logits[-1, :6], right, **CLOSE)
    np.testing.assert_allclose(logits[2, :3], [-0.289522, -0.726933, 0.153811], **CLOSE)
    sums = logits.sum(), np.abs(logits).sum()
    np.testing.assert_allclose(sums, [-36.31318, 219.25282], atol=2e-3)
    assert logits[-1].argmax() == 21


PARITY = pathlib.Path(__file__).parent / "parity"
RECORDED = json.loads((PARITY / "deepseek.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("case", RECORDED["cases"])
def test_parity_with_transformers(case):
    """Other shapes and switches, configs as transformers wrote them, its drafts."""
    recorded, arrays = RECORDED["cases"][case], np.load(PARITY / "deepseek.npz")
    tensors = folders.fill(folders.deepseek_shapes(recorded, 3))
    config = convert.config_from_hf(recorded)
    assert convert.config_from_hf(convert.config_to_hf(config)) == config
    params = convert.params_from_tensors(config, tensors, jnp.float32)
    target, ids = convert.target_of(config), jnp.array([RECORDED["ids"]])
    out = target(params, ids, taps=tuple(range(config.num_layers + 1)))
    logits = target.logits(params, out.hidden)[0]
    np.testing.assert_allclose(logits, arrays[f"{case}.logits"], atol=3e-5)
    states = np.stack(np.split(out.features[0], config.num_layers + 1, axis=-1))
    np.testing.assert_allclose(states[..., :4], arrays[f"{case}.hidden"], atol=3e-5)

    weights = convert.module_params(config, tensors, jnp.float32)
    drafter = MTP.for_target(config, None, num_modules=3, gamma=3)
    shared, (n, drafts) = (
        target.shared(params),
        (ids.shape[1], arrays[f"{case}.drafts"]),
    )
    state = drafter.prefill(weights, shared, ids, jnp.array([n]), out.hidden, 24)
    anchor, keys = jnp.array([int(drafts[0])]), jax.random.split(jax.random.key(0), 1)
    ours, _ = jax.jit(drafter.draft, static_argnums=4)(
        weights, shared, state, anchor, GREEDY, keys
    )
    assert ours.tokens[0].tolist() == drafts[1:].tolist()
    # The same rows over the text with its drafts: the last one of each depth.
    text = jnp.concatenate([ids, jnp.asarray(drafts, jnp.int32)[None]], axis=1)
    rows = jnp.pad(out.hidden, ((0, 0), (0, len(drafts)), (0, 0)))
    for g, right in zip(
        drafter.steps(weights, shared, text, rows, 3),
        arrays[f"{case}.draft_logits"],
        strict=True,
    ):
        np.testing.assert_allclose(shared.logits(g)[0, n - 1], right, atol=3e-5)


SECOND = {
    "normed": (-0.197898, -0.390460, -0.823330, -1.076575, -0.069904, -1.314142),
    "raw": (-0.180133, -0.354284, -0.801996, -1.142785, -0.076950, -1.305700),
}


def draft_of(num_modules, sampling, **fields):
    target, params, weights, hidden = model(num_modules)
    values = {"num_modules": num_modules} | fields
    drafter = MTP.for_target(target.config, None, **values)
    shared = target.shared(params)
    state = jax.jit(drafter.prefill, static_argnums=5)(
        weights, shared, jnp.array([IDS]), jnp.array([7]), hidden, 16
    )
    keys = jax.random.split(jax.random.key(0), 1)
    draft = jax.jit(drafter.draft, static_argnums=4)
    return draft(weights, shared, state, jnp.array([21]), sampling, keys)[0]


@pytest.mark.slow
@pytest.mark.parametrize("carry", SECOND)
def test_the_second_draft_by_reuse_is_the_one_recorded(carry):
    draft = draft_of(1, GREEDY, gamma=2, carry=carry)
    assert draft.tokens[0].tolist() == [21, 31]
    check_law_after_21(1, carry, SECOND[carry])


def check_law_after_21(num_modules, carry, right):
    """Seen on a tree: the drafted 21 must be among the first children."""
    tree = Tree((-1, *[0] * 8, *range(1, 9)))  # drawn without replacement
    run = jitted(num_modules, carry, tree)
    for seed in range(40):
        draft = run(jax.random.split(jax.random.key(seed), 1))
        at = np.flatnonzero(np.asarray(draft.tokens[0, :8]) == 21)
        if at.size:
            law = np.asarray(draft.probs[0, 1 + at[0], :6])
            difference = np.log(law) - np.array(right)
            np.testing.assert_allclose(difference, difference[0], atol=1e-4)
            return
    raise AssertionError("21 was never drawn")


def jitted(num_modules, carry, tree):
    target, params, weights, hidden = model(num_modules)
    fields = {"num_modules": num_modules, "carry": carry, "topology": tree}
    drafter, shared = (
        MTP.for_target(target.config, None, **fields),
        target.shared(params),
    )

    @jax.jit
    def draw(keys):
        text, length = jnp.array([IDS]), jnp.array([7])
        state = drafter.prefill(weights, shared, text, length, hidden, 16)
        anchor = jnp.array([21])
        return drafter.draft(weights, shared, state, anchor, Sampling(), keys)[0]

    return draw


@pytest.mark.slow
def test_two_chained_modules_are_those_recorded():
    target, params, _, hidden = model(2)
    last = target.logits(params, hidden)[0, -1, :6]
    right = [0.180509, -1.312555, 0.448690, 0.356961, 0.001453, 0.129338]
    np.testing.assert_allclose(last, right, **CLOSE)

    first, second = rows_of(2, steps=2)
    right = [-0.546325, -0.153168, -0.170302, -0.915794, -0.921284, -0.068834]
    np.testing.assert_allclose(first[-1, :6], right, **CLOSE)
    assert first.argmax(1).tolist() == [52, 21, 36, 14, 21, 23, 21]
    right = [0.268122, -0.205773, 0.075964, -0.612353, -0.878494, -0.139443]
    np.testing.assert_allclose(second[-1, :6], right, **CLOSE)
    np.testing.assert_allclose(second[2, :3], [0.193263, -0.402690, -0.599552], **CLOSE)
    sums = second.sum(), np.abs(second).sum()
    np.testing.assert_allclose(sums, [-4.14940, 171.12476], atol=2e-3)
    assert second.argmax(1).tolist() == [15, 60, 56, 56, 26, 56]

    raw = rows_of(2, "raw", steps=2)[1]
    right = [0.266525, -0.245519, 0.074578, -0.630389, -0.875959, -0.177242]
    np.testing.assert_allclose(raw[-1, :6], right, **CLOSE)


@pytest.mark.slow
def test_the_draft_of_two_chained_modules_is_the_one_recorded():
    draft = draft_of(2, GREEDY, gamma=2)
    assert draft.tokens[0].tolist() == [21, 9]
    right = [-0.453622, -0.419211, 0.814338, 0.019165, -0.404531, -0.429915]
    check_law_after_21(2, "normed", right)


TINY = DeepSeekConfig(
    vocab_size=24,
    width=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=1,
    head_width=4,
    mlp_width=24,
    max_positions=256,
    q_rank=6,
    kv_rank=8,
    nope_width=6,
    value_width=5,
    num_dense_layers=1,
    num_experts=6,
    experts_per_token=3,
    expert_width=7,
    num_shared_experts=2,
    num_groups=3,
    groups_per_token=2,
)


@functools.cache
def tiny(**change):
    """A random target with no weight at zero, and laws that are far from flat."""
    target = convert.target_of(dataclasses.replace(TINY, **change))
    params = jax.jit(target.init)(jax.random.key(0))
    grow = lambda path, x: x if "scale" in jax.tree_util.keystr(path) else x * 6
    params = jax.tree_util.tree_map_with_path(grow, params)
    return target, testing.perturb(params, 0, 0.05)


def plain(params, c, tokens):
    """Logits in NumPy: keys and values of every head expanded, no cache, no mask."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = [params["embed"][t] for t in tokens]
    for i in range(c.num_layers):
        layer, seen, rows = params[f"layer_{i}"], [], []
        p, H, En, R = layer["attention"], c.num_heads, c.nope_width, c.kv_rank
        for t, row in enumerate(x):
            a = golden.rms(row, layer["input_norm"]["scale"], c.norm_eps)
            q = a if c.q_rank is None else p["q_down"] @ a
            if c.q_rank is not None:
                q = golden.rms(q, p["q_norm"]["scale"], 1e-6)
            q = p["q" if c.q_rank is None else "q_up"] @ q  # [H En+Er]
            down = p["kv_down"] @ a
            latent = golden.rms(down[:R], p["kv_norm"]["scale"], 1e-6)
            up = p["kv_up"] @ latent  # [H En+Ev]
            turn = lambda y, t=t: golden.rope(y, t, c.rope.theta)
            shared = turn(down[R:])
            seen.append(([np.append(k, shared) for k in up[:, :En]], up[:, En:]))
            heads = []
            for h in range(H):
                query = np.append(q[h, :En], turn(q[h, En:]))
                scores = np.array([query @ k[h] for k, _ in seen]) * c.score_scale
                w = np.exp(scores - scores.max())
                heads.append(sum(a * v[h] for a, (_, v) in zip(w / w.sum(), seen)))  # noqa: B905
            y = row + p["out"] @ np.concatenate(heads)
            m = golden.rms(y, layer["post_norm"]["scale"], c.norm_eps)
            rows.append(
                y
                + (experts if i >= c.num_dense_layers else golden.mlp)(
                    m, layer["mlp"], *([c] if i >= c.num_dense_layers else [])
                )
            )
        x = rows
    hidden = [golden.rms(row, params["norm"]["scale"], c.norm_eps) for row in x]
    return np.array(hidden) @ params["head"].T


def experts(m, p, c):
    """Eq. 6 for one token, expert by expert."""
    scores = 1 / (1 + np.exp(-p["router"] @ m))
    biased = (scores + p["router_bias"]).reshape(c.num_groups, -1)
    best = np.sort(biased, axis=1)[:, -2:].sum(1)
    shut = np.argsort(-best)[c.groups_per_token :]
    biased[shut] = -np.inf
    chosen = np.argsort(-biased.ravel())[: c.experts_per_token]
    total, out = scores[chosen].sum(), golden.mlp(m, p["shared"])
    for e in chosen:
        gate, up = np.split(p["gate_up"][e].T @ m, 2)
        share = scores[e] / total if c.normalise_experts else scores[e]
        out = out + c.routed_scale * share * (p["down"][e].T @ (golden.silu(gate) * up))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("change", [{}, {"q_rank": None}, {"normalise_experts": False}])
def test_the_absorbed_stack_equals_the_plain_one(change):
    target, params = tiny(**change)
    text = [3, 1, 20, 1, 5, 9, 7]
    right = plain(params, target.config, text)
    ours = target.logits(params, target(params, jnp.array([text])).hidden)[0]
    np.testing.assert_allclose(ours, right, atol=2e-4, rtol=1e-4)


def test_a_bias_changes_who_is_chosen_and_never_the_weights():
    scores = jnp.array([[0.5, 0.1, 0.4, 0.3, 0.2, 0.6]])
    free = dataclasses.replace(TINY, experts_per_token=2, routed_scale=1.0)
    chosen, weights = mla.route(free, scores, jnp.zeros(6))
    # Groups (0.5, 0.1), (0.4, 0.3), (0.2, 0.6): the last two have the largest sums.
    assert sorted(chosen[0].tolist()) == [2, 5]
    np.testing.assert_allclose(weights[0], [0.6, 0.4], atol=1e-6)
    bias = jnp.array([0.4, 0.0, 0.0, 0.0, 0.0, 0.0])
    chosen, weights = mla.route(free, scores, bias)
    assert chosen[0].tolist() == [0, 5]
    np.testing.assert_allclose(weights[0], [5 / 11, 6 / 11], atol=1e-6)


@pytest.mark.slow
def test_a_cached_pass_and_a_tree_equal_whole_texts():
    target, params = tiny()
    text, branch = [3, 1, 20, 1, 5], [9, 7, 8]
    cache = target.init_cache(1, 16)
    assert cache.k[0].shape == (1, 1, 16, 12) and cache.v[0].shape == (1, 1, 16, 0)
    out = target(params, jnp.array([text]), cache)
    cache = dataclasses.replace(out.cache, length=jnp.array([5]))
    tree = Tree((-1, 0, 0))
    out = target(
        params,
        jnp.array([branch]),
        cache,
        ancestors=tree.ancestors,
        depths=np.asarray(tree.depths, np.int32),
    )
    for row, path in ((0, [9]), (1, [9, 7]), (2, [9, 8])):
        whole = target(params, jnp.array([[*text, *path]])).hidden[0, -1]
        np.testing.assert_allclose(out.hidden[0, row], whole, atol=2e-4, rtol=1e-4)


TOPOLOGIES = [None, Tree((-1, 0, 0, 1, 1, 2, 3)), DynamicTree(7, 3, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=["chain", "tree", "dynamic"])
def test_greedy_text_is_the_targets_own(topology):
    target, params = tiny()
    drafter = MTP.for_target(target.config, None, topology=topology, num_modules=2)
    assert drafter.config == dataclasses.replace(TINY, num_layers=1)
    weights = drafter.init(jax.random.key(1), target.shared(params))
    weights = Weights(target=params, drafter=testing.perturb(weights, 0, 0.2))
    model = Model(target, drafter, GREEDY, stop_ids=(5,))
    prompts = [[1, 2, 3, 9, 8, 7, 6, 4], [3], [20, 11]]
    ours = generate(model, weights, prompts, max_new_tokens=17)
    other = generate(autoregressive(model), weights, prompts, max_new_tokens=17)
    assert ours.tokens == other.tokens


@pytest.fixture(scope="module")
def kit():
    """The battery's kit of `mtp` with a module of latent attention and experts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "tiny_target", tiny)
        return battery.Kit("mtp")


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        battery.test_a_state_keeps_its_shapes_and_dtypes_over_a_round,
        battery.test_rows_are_independent_of_their_place_neighbours_and_padding,
        battery.test_padding_and_masked_rows_do_not_change_the_loss,
        battery.test_a_few_adam_steps_lower_the_loss,
        battery.test_every_method_works_on_shapes_alone_and_in_bf16,
        battery.test_greedy_text_is_the_targets_own,
    ],
)
def test_the_battery_holds_for_the_family(kit, check):
    check(kit)


def test_commit_equals_prefill_for_the_family(kit):
    battery.test_commit_equals_prefill_of_the_longer_text(kit, (0, 1, 2))
    battery.test_commit_equals_prefill_of_the_longer_text(kit, (99, 99, 99))


@pytest.mark.slow
def test_gradients_reach_every_weight_but_the_routers_bias(kit):
    _, _, grads, target = kit.loss(kit.batch())
    found = jax.tree_util.tree_leaves_with_path(grads)
    still = [jax.tree_util.keystr(p) for p, g in found if not np.asarray(g).any()]
    assert [name.split("'")[-2] for name in still] == ["router_bias"]
    assert not any(g.any() for g in battery.leaves(target))


def write(tmp_path, num_modules=1, **fields):
    tensors = folders.fill(folders.deepseek_shapes(CONFIG | fields, num_modules))
    return folders.write(tmp_path / "m", CONFIG | fields, tensors)


def test_a_saved_folder_is_the_one_that_was_read(tmp_path):
    first = targets.from_folder(write(tmp_path))
    targets.save_pretrained(tmp_path / "again", first)
    again = targets.from_folder(tmp_path / "again")
    assert again.target == first.target
    stored = convert.tensors_from_params(first.target.config, first.params)
    right = folders.fill(folders.deepseek_shapes(CONFIG, 1))
    assert set(right) - set(stored) == {n for n in right if ".layers.2." in n}
    for name, tensor in stored.items():
        np.testing.assert_array_equal(tensor, right[name])
    same = jax.tree.map(np.array_equal, first.params, again.params)
    assert all(jax.tree.leaves(same))


def test_the_bias_of_the_router_stays_in_float32(tmp_path):
    half = targets.from_folder(write(tmp_path), jnp.bfloat16)
    mlp = half.params["layer_1"]["mlp"]
    assert mlp["router_bias"].dtype == jnp.float32
    assert mlp["router"].dtype == half.dtype == jnp.bfloat16
    out = jax.eval_shape(half.target, half.params, jnp.array([IDS]))
    assert out.hidden.dtype == jnp.bfloat16


def test_interleaved_rows_go_in_and_out_in_order():
    rows = np.arange(8)
    halves = deepseek._halves(rows, 2, 0)
    assert halves.tolist() == [0, 1, 2, 4, 6, 3, 5, 7]
    assert deepseek._pairs(halves, 2, 0).tolist() == rows.tolist()


def test_copies_of_the_tables_in_a_module_must_be_the_targets_own(tmp_path):
    config = convert.config_from_hf(CONFIG)
    tensors = folders.fill(folders.deepseek_shapes(CONFIG, 1))
    head = "model.layers.2.shared_head.head.weight"
    tensors[head] = tensors["lm_head.weight"]
    plain = convert.module_params(config, tensors, jnp.float32)
    _, _, weights, _ = model()
    same = jax.tree.map(np.array_equal, plain, weights)
    assert all(jax.tree.leaves(same))
    tensors[head] = 2 * tensors[head]
    with pytest.raises(NotImplementedError, match=f"{head} differs from lm_head"):
        convert.module_params(config, tensors, jnp.float32)


def test_the_modules_of_a_targets_folder_are_its_drafter(tmp_path):
    """By the name `mtp`, on a target that is named by its folder."""
    folder = write(tmp_path, num_modules=2, num_nextn_predict_layers=2)
    pretrained = targets.from_folder(folder)
    name, drafter, weights = common.load_drafter("mtp", str(folder), pretrained)
    assert (name, drafter.num_modules, drafter.gamma) == ("mtp", 2, 4)
    _, _, right, _ = model(2)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, weights, right)))
    with pytest.raises(FileNotFoundError, match="no trained medusa"):
        common.load_drafter("medusa", str(folder), pretrained)
    bare = folders.fill(folders.deepseek_shapes(CONFIG, 0))
    folder = folders.write(tmp_path / "bare", CONFIG, bare)
    assert checkpoints.inside(folder, pretrained.target.config) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'.*'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"rope_interleave": False}, "rope_interleave False"),
        ({"attention_bias": True}, "attention_bias True"),
    ],
)
def test_what_is_not_built_is_refused_by_name(change, message):
    with pytest.raises(NotImplementedError, match=message):
        convert.config_from_hf(CONFIG | change)


@pytest.mark.parametrize("key", ["kv_lora_rank", "n_group", "hidden_size"])
def test_a_config_that_lacks_a_key_says_which(key):
    stored = {k: v for k, v in CONFIG.items() if k != key}
    with pytest.raises(ValueError, match=f"deepseek_v3 model lacks {key}"):
        convert.config_from_hf(stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads is 1, not 2"),
        ({"num_groups": 4}, "num_experts=6 is no multiple of num_groups=4"),
        ({"experts_per_token": 5}, "5 experts a token do not fit"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


def test_a_drafter_of_the_family_is_saved_and_read_back(tmp_path):
    target, params = tiny()
    shared = target.shared(params)
    drafter = MTP.for_target(target.config, None)
    weights = jax.jit(drafter.init)(jax.random.key(1), shared)
    checkpoints.save(tmp_path / "d", "mtp", drafter, weights, dtype=jnp.float32)
    name, found, again = checkpoints.load(tmp_path / "d", shared)
    assert (name, found) == ("mtp", drafter)
    same = jax.tree.map(np.array_equal, weights, again)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize(
    "name", ["draft_model", "hydra_plus", "eagle", "eagle3", "dflash"]
)
def test_a_drafter_with_plain_layers_gets_them_from_a_latent_target(name):
    """Not one kv head of the rotary width, which would be nobody's layer."""
    config = dataclasses.replace(TINY, num_heads=4, value_width=6)
    drafter = drafters.get(name).for_target(config, 1)
    layer = {"hydra_plus": "prefix", "dflash": None}.get(name, "config")
    layer = getattr(drafter, layer) if layer else drafter
    assert not isinstance(layer, DeepSeekConfig)
    assert (layer.num_kv_heads, layer.head_width) == (4, 6)


def test_a_kernel_that_is_named_is_refused():
    target = deepseek.DeepSeek(convert.config_from_hf(CONFIG))
    with pytest.raises(NotImplementedError, match="'pallas_tpu': no kernel"):
        dataclasses.replace(target, attention="pallas_tpu")


@pytest.mark.parametrize("field", [{"qk_norm": True}, {"windows": (4,) * 3}])
def test_what_latent_attention_lacks_is_refused(field):
    with pytest.raises(ValueError, match="has no"):
        dataclasses.replace(TINY, num_layers=3, **field)


def test_a_yarn_factor_that_a_file_leaves_out_is_that_of_its_positions():
    rope = {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5, "factor": None}
    rope |= {"original_max_position_embeddings": 64}
    stored = {"max_position_embeddings": 256, "rope_scaling": rope}
    plain, all_dim = deepseek.without_mscale(stored)
    g = lambda m: 0.1 * m * np.log(4) + 1
    assert plain["rope_scaling"]["attention_factor"] == pytest.approx(g(1) / g(0.5))
    assert all_dim == 0.5
