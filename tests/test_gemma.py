"""Gemma 3 and 4 targets: recorded numbers, the cache of two kinds, files, spellings."""

import dataclasses

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from specjax import drafters, gemma, kv_cache, targets, testing
from specjax.generate import Model, Weights, autoregressive, generate
from specjax.layers import Rope, attend
from specjax.sampling import GREEDY
from specjax.targets import convert
from specjax.transformer import Shared
from specjax.tree import Tree

IDS = [3, 17, 42, 5, 60, 11, 29]
S, F = "sliding_attention", "full_attention"
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
}
GEMMA3 = SHAPE | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "layer_types": [S, S, F],
    "query_pre_attn_scalar": 16,
    "rope_local_base_freq": 1e4,
    "rope_theta": 1e6,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
GEMMA4 = SHAPE | {
    "model_type": "gemma4_text",
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        S: {"rope_type": "default", "rope_theta": 1e4},
        F: {"rope_type": "proportional", "rope_theta": 1e6}
        | {"partial_rotary_factor": 0.25},
    },
}
EQUAL = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
A = GEMMA4 | {
    "num_hidden_layers": 6,
    "layer_types": [S, S, F, S, S, F],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
B = GEMMA4 | EQUAL | {"num_hidden_layers": 3, "layer_types": [S, S, F]}
C = (
    GEMMA4
    | EQUAL
    | {
        "num_hidden_layers": 2,
        "layer_types": [S, F],
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    }
)
# Recorded from transformers 5.24 in float32: tensors; last row and row 2 of the logits,
# their sum and that of absolutes; of row 6 the states H[0], H[1], H[L], key and value
# of the first head of the last layer that has them; the likeliest ids.
GOLDEN = {
    "gemma3": (
        GEMMA3,
        41,
        (0.809269, 0.227455, 0.829690, 0.380811, 0.648430, 0.102594),
        (-0.062462, -0.876461, 0.933072),
        (5.12873, 213.10187),
        (-0.883932, -0.951561, -0.024368),
        (0.713655, -0.230047, 0.570935),
        (-0.747433, -1.558682, -1.369018),
        (0.398787, 0.747174, 2.282840, -0.479325),
        (0.237725, 0.985743, -0.110555, 1.023660),
        (53, 61, 49, 54, 53, 53, 29),
    ),
    "gemma4 a": (
        A,
        98,
        (-0.037243, -0.416510, 0.846007, -0.077180, -1.548168, 0.343037),
        (-0.692026, 0.411766, -0.010539),
        (14.36084, 206.07234),
        (-0.883932, -0.951561, -0.024368),
        (-0.538379, -2.079150, -0.705569),
        (0.089387, -0.138624, -1.134364),
        (0.637603, -1.419756, -0.175153, 1.410561),
        (-1.222663, 1.153459, -1.248109, -0.482696),
        (29, 61, 4, 61, 24, 18, 47),
    ),
    "gemma4 b": (
        B,
        43,
        (0.294439, -0.572665, 0.098470, 0.592650, 0.294766, -0.994570),
        (1.199590, -0.077268, 0.030440),
        (45.42178, 228.64387),
        (-0.883932, -0.951561, -0.024368),
        (-3.272431, -0.955647, -0.621532),
        (-0.428023, 0.275230, -0.180779),
        (-0.134806, -0.393896, -0.494580, 0.498061),
        (-0.213200, 0.307316, -0.524921, -0.100147),
        (3, 3, 25, 21, 22, 22, 44),
    ),
    "gemma4 c": (
        C,
        45,
        (0.233731, 0.538656, -0.117000, -0.937980, 0.196369, 0.672593),
        (0.945296, 0.194712, -0.624175),
        (42.20560, 208.67168),
        (-0.883932, -0.951561, -0.024368),
        (-1.718747, -0.180323, -1.008237),
        (-1.188706, -0.900979, -0.195509),
        (1.231453, 0.715404, 0.135365, -1.364985),
        (1.340125, -0.549656, -1.541347, -0.919516),
        (25, 25, 25, 25, 39, 61, 14),
    ),
}


def tensors(config):
    offset = 0.0 if config["model_type"] == "gemma3_text" else 1.0
    return folders.fill(folders.gemma_shapes(config), offset)


def load(tmp_path, config, stored=None):
    folder = folders.write(
        tmp_path / "m", config, tensors(config) if stored is None else stored
    )
    return targets.from_folder(folder)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_logits_states_and_cache(tmp_path, name):
    config, count, last, third, sums, *states, key, value, best = GOLDEN[name]
    assert len(tensors(config)) == count
    model = load(tmp_path, config)
    target, params = model.target, model.params

    @jax.jit
    def run(params, ids, cache):
        out = target(params, ids, cache, taps=(0, 1, -1))
        return target.logits(params, out.hidden)[0], out

    logits, out = run(params, jnp.asarray([IDS]), target.init_cache(1, 16))
    close = dict(atol=1e-4, rtol=0)
    np.testing.assert_allclose(logits[-1, :6], last, **close)
    np.testing.assert_allclose(logits[2, :3], third, **close)
    np.testing.assert_allclose((logits.sum(), np.abs(logits).sum()), sums, atol=2e-3)
    for state, golden in zip(np.split(out.features[0, -1], 3), states, strict=True):
        np.testing.assert_allclose(state[:3], golden, **close)
    np.testing.assert_allclose(out.cache.k[-1][0, 0, 6, :4], key, **close)
    np.testing.assert_allclose(out.cache.v[-1][0, 0, 6, :4], value, **close)
    assert tuple(logits.argmax(1)) == best


# --- the cache of two kinds, files, spellings


def test_chains_and_trees_through_the_cache_are_whole_texts(tmp_path):
    """Past the window, and with layers that share others' keys."""
    model = load(tmp_path, A)
    target, params = model.target, model.params
    run = jax.jit(lambda tokens, cache, **block: target(params, tokens, cache, **block))
    tree = Tree((-1, 0, 0, 1, 2))
    nodes = [7, 8, 9, 10, 12]
    cache = run(jnp.asarray([IDS]), target.init_cache(1, 16)).cache
    cache = kv_cache.commit(cache, None, jnp.array([7]))
    assert len(cache.k) == 3 and cache.k[2].shape == (1, 2, 16, 32)
    block = {"ancestors": tree.ancestors, "depths": tree.depths}
    found = target(params, jnp.asarray([nodes]), cache, **block).hidden[0]
    whole = jax.jit(lambda tokens: target(params, tokens).hidden[0])
    for leaf in (3, 4):
        path = np.flatnonzero(tree.ancestors[leaf])
        text = [*IDS, *(nodes[i] for i in path)]
        np.testing.assert_allclose(
            found[path], whole(jnp.asarray([text]))[7:], atol=2e-4
        )


# Both are deeper than the window: nodes that do not see the anchor.
TREES = {"chain": Tree.chain(5), "tree": Tree((-1, 0, 0, 1, 2, 4, 5))}


@pytest.mark.slow
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", ["gemma3", "gemma4 a", "gemma4 b"])
def test_a_kernel_that_is_named_gives_the_targets_logits(tmp_path, name, tree):
    """After 7 and 5 tokens, with local, full and sharing layers and one kv head."""
    model, block = load(tmp_path, GOLDEN[name][0]), TREES[tree]
    target, params = model.target, model.params
    cache = jax.jit(target)(params, jnp.asarray([IDS] * 2), target.init_cache(2, 128))
    cache = kv_cache.commit(cache.cache, None, jnp.array([7, 5]))
    nodes = np.random.default_rng(0).integers(0, 64, (2, block.num_nodes))
    where = {"ancestors": block.ancestors, "depths": block.depths}

    def logits(target):
        out = target(params, jnp.asarray(nodes, jnp.int32), cache, **where)
        return target.logits(params, out.hidden)

    right = jax.jit(logits, static_argnums=0)(target)
    with pltpu.force_tpu_interpret_mode():
        ours = logits(dataclasses.replace(target, attention="pallas_tpu"))
    np.testing.assert_allclose(ours, right, atol=1e-4)


@pytest.mark.parametrize(
    ("kernel", "size", "says"),
    [
        ("pallas_tpu", 128, "interpret mode"),
        ("pallas_tpu", 16, "multiple of 128 slots, got 16"),
        ("mosaic_gpu", 128, "bfloat16 or float16, got float32"),
    ],
)
def test_a_kernel_that_is_named_and_cannot_run_is_refused(tmp_path, kernel, size, says):
    model = load(tmp_path, B)
    named = dataclasses.replace(model.target, attention=kernel)
    with pytest.raises(ValueError, match=says):
        jax.jit(named)(model.params, jnp.asarray([IDS]), named.init_cache(1, size))


@pytest.mark.parametrize("name", GOLDEN)
def test_saving_and_loading_keeps_config_and_weights(tmp_path, name):
    config = GOLDEN[name][0]
    model = load(tmp_path, config)
    targets.save_pretrained(tmp_path / "again", model)
    again = targets.from_folder(tmp_path / "again")
    assert again.target == model.target
    for a, b in zip(
        jax.tree.leaves(again.params), jax.tree.leaves(model.params), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-7)


def test_the_sizes_of_full_layers_in_their_newer_spelling():
    newer = {k: v for k, v in B.items() if k != "num_global_key_value_heads"}
    del newer["global_head_dim"]
    newer["per_layer_config"] = {"2": {"head_dim": 32, "num_key_value_heads": 1}}
    assert convert.config_from_hf(newer) == convert.config_from_hf(B)


def test_a_multimodal_file_is_read_for_its_text(tmp_path):
    own = load(tmp_path, B)
    outer = {"model_type": "gemma4", "text_config": B, "eos_token_id": 0}
    stored = {
        n.replace("model.", "model.language_model.", 1): t
        for n, t in tensors(B).items()
    }
    untied = convert.config_from_hf(outer | {"tie_word_embeddings": False})
    assert own.target.config.tie_embeddings and not untied.tie_embeddings
    stored["model.vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
    folder = folders.write(tmp_path / "multi", outer, stored)
    found = targets.from_folder(folder)
    assert found.target == own.target
    np.testing.assert_array_equal(found.params["embed"], own.params["embed"])


def test_keys_that_a_file_holds_for_sharing_layers_are_ignored(tmp_path):
    stored = tensors(A)
    name = "model.layers.4.self_attn.k_proj.weight"
    folder = folders.write(
        tmp_path / "m", A, stored | {name: stored[name.replace("4", "0")]}
    )
    assert "k" not in targets.from_folder(folder).params["layer_4"]["attention"]


def test_defaults_are_those_of_the_classes():
    """The last layer of Gemma 4 is full whatever the list says; PLE is on."""
    bare = {k: v for k, v in SHAPE.items() if k not in ("head_dim", "sliding_window")}
    four = convert.config_from_hf(
        bare | {"model_type": "gemma4_text", "num_hidden_layers": 7}
    )
    assert [w is None for w in four.windows] == [False] * 5 + [True] * 2
    assert (four.head_width, four.full_head_width, four.per_layer_width) == (
        256,
        512,
        256,
    )
    assert four.rope == Rope(1e4) and four.full_rope == Rope(
        1e6, "proportional", partial=0.25
    )
    three = convert.config_from_hf(
        bare | {"model_type": "gemma3_text", "num_hidden_layers": 7}
    )
    assert [w is None for w in three.windows] == [False] * 5 + [True, False]
    assert three.query_scale == 256**-0.5 and three.softcap is None
    other = convert.config_from_hf(GEMMA3 | {"query_pre_attn_scalar": 64})
    assert other.query_scale == 1 / 8 and other.head_width == 16
    # Full layers with values of their own have as many kv heads as the local ones.
    apart = convert.config_from_hf(A | {"num_global_key_value_heads": 1})
    assert apart.kind(True).num_kv_heads == 2


def test_a_norm_multiplies_before_it_rounds():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(1, 0.2, s), jnp.float32) for s in ((8, 16), 16))
    found, right = (
        gemma.Norm(1e-6).apply({"params": {"scale": w}}, x)
        for x in (x.astype(jnp.bfloat16), x.astype(jnp.bfloat16).astype(jnp.float32))
    )
    np.testing.assert_array_equal(found, right.astype(jnp.bfloat16))


def test_a_sparse_multimodal_config_takes_the_classes_defaults():
    """As the released Gemma 3 4B's config.json has it."""
    sparse = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    found = convert.config_from_hf({"model_type": "gemma3", "text_config": sparse})
    shape = found.vocab_size, found.num_heads, found.num_kv_heads, found.head_width
    assert shape == (262_208, 8, 4, 256) and found.windows[4:7] == (1024, None, 1024)
    assert found.full_rope == Rope(1e6, "linear", 8.0)
    del sparse["sliding_window"], sparse["model_type"]
    found = convert.config_from_hf({"model_type": "gemma3", "text_config": sparse})
    assert found.windows[0] == 4096


def test_a_unified_gemma_4_has_no_per_layer_inputs_unless_it_says_so():
    bare = {k: v for k, v in SHAPE.items() if k != "sliding_window"}
    bare |= {"model_type": "gemma4_unified_text", "num_hidden_layers": 6}
    outer = {"model_type": "gemma4_unified", "text_config": bare}
    found = convert.config_from_hf(outer)
    assert (found.per_layer_width, found.windows[0]) == (0, 1024)
    assert found.max_positions == 128 and found == convert.config_from_hf(bare)


def test_a_tied_head_and_ids_of_a_multimodal_file_are_taken_as_they_are(tmp_path):
    outer = {"model_type": "gemma4", "text_config": B | {"eos_token_id": [1, 5]}}
    stored = tensors(B)
    stored = {f"language_model.{n}": t for n, t in stored.items()}
    stored["language_model.lm_head.weight"] = np.ones((64, 32), np.float32)
    stored["language_model.model.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    found = targets.from_folder(folders.write(tmp_path / "m", outer, stored))
    assert "head" not in found.params and {1, 5} <= set(found.stop_ids)


def test_marks_of_images_past_the_rows_do_not_matter(tmp_path):
    folder = folders.write(tmp_path / "m", B, tensors(B))
    backend = folders.toy_tokenizer()
    rows = 64 - backend.get_vocab_size()
    backend.add_special_tokens([f"<image{i}>" for i in range(rows + 1)])
    backend.save(str(folder / "tokenizer.json"))
    assert targets.from_folder(folder).tokenizer.vocab_size == 65


def test_scores_are_scaled_in_float32():
    """In half precision 1.0 stays 1.0 at any head width."""
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 2, 512)), jnp.bfloat16)
    mask, v = jnp.ones((1, 2, 2), bool), jnp.eye(2, 512)[None, None]
    found = attend(q, q, v.astype(jnp.bfloat16), mask, scale=0.01)[0, 0, :, :2]
    x = np.asarray(q[0, 0], np.float32)
    right = np.exp(0.01 * x @ x.T)
    right /= right.sum(1, keepdims=True)
    np.testing.assert_allclose(found.astype(jnp.float32), right, atol=4e-3)


def test_proportional_angles_turn_the_first_quarter_of_the_pairs():
    found = Rope(1e6, "proportional", partial=0.25).frequencies(32)
    right = [1, 0.4216965, 0.1778279, 0.0749894, *[0] * 12]
    np.testing.assert_allclose(found, right, atol=1e-6)
    slower = Rope(1e6, "proportional", 4.0, partial=0.25).frequencies(32)
    np.testing.assert_allclose(slower, np.array(right) / 4, atol=1e-6)


@pytest.mark.parametrize(
    ("width", "scale"),
    [
        (640, 25.25),
        (1152, 34.0),
        (2560, 50.5),
        (2816, 53.0),
        (3840, 62.0),
        (5376, 73.5),
    ],
)
def test_the_embeddings_scale_is_rounded_to_the_tables_dtype(width, scale):
    table = jnp.ones((2, 1))
    tables = Shared(table, table, embed_scale=width**0.5)
    half = dataclasses.replace(tables, embed=table.astype(jnp.bfloat16))
    np.testing.assert_allclose(tables.embedding(jnp.array([0])), width**0.5, rtol=1e-6)
    assert half.embedding(jnp.array([0])).item() == scale


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden_activation": "silu"}, NotImplementedError, "'silu' is not supported"),
        ({"layer_types": [S, "mamba", F]}, NotImplementedError, "'mamba'"),
        ({"layer_types": [S, F]}, ValueError, "2 entries for 3 layers"),
        ({"use_bidirectional_attention": True}, NotImplementedError, "bidirectional"),
        ({"num_key_value_heads": None}, ValueError, "lacks num_key_value_heads"),
        ({"rope_parameters": {"rope_theta": 1e4}}, NotImplementedError, "rope_theta"),
        (
            {"per_layer_config": {"1": {"head_dim": 32}}},
            NotImplementedError,
            "all full layers",
        ),
        (
            {"per_layer_config": {"2": {"head_dim": 32, "window": 3}}},
            NotImplementedError,
            "window of per_layer_config",
        ),
        (
            {"num_kv_shared_layers": 2},
            ValueError,
            "none of the first 1 layers is of its kind",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(change, error, message):
    config = {k: v for k, v in (B | change).items() if v is not None}
    with pytest.raises(error, match=message):
        convert.config_from_hf(config)


def test_logits_stay_within_the_cap_and_it_is_the_targets_law(tmp_path):
    model = load(tmp_path, B)
    shared = model.target.shared(model.params)
    hidden = 40 * jnp.ones((1, 32))
    raw = dataclasses.replace(shared, softcap=None).logits(hidden)
    assert np.abs(raw).max() > 30
    right = 30 * np.tanh(np.asarray(raw) / 30)
    np.testing.assert_allclose(
        model.target.logits(model.params, hidden), right, rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gemma4_mtp",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in drafters.REGISTRY
            if n != "gemma4_mtp"
        ),
    ],
)
def test_greedy_text_with_any_drafter_is_the_targets_own(tmp_path, name):
    model = load(tmp_path, A)
    drafter, weights = testing.tiny_drafter(name, model.target, model.params, gamma=3)
    run = Model(model.target, drafter, GREEDY)
    arrays = Weights(target=model.params, drafter=weights)
    prompts = [IDS, IDS[:2]]
    ours = generate(run, arrays, prompts, max_new_tokens=12)
    plain = generate(autoregressive(run), arrays, prompts, max_new_tokens=12)
    assert ours.tokens == plain.tokens
