"""The loader by files in Hugging Face form: numbers, spellings, refusals, text."""

import dataclasses
import functools
import itertools
import json
import math
import pathlib

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax import sharding, targets, testing
from specjax.layers import Rope
from specjax.targets import Tokenizer, convert
from specjax.targets.scanned import Scanned

IDS = [3, 17, 42, 5, 60, 11, 29]
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA = SHAPE | {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": LLAMA3,
}
QWEN2 = SHAPE | {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True}
QWEN3 = SHAPE | {"model_type": "qwen3", "rope_theta": 1e6, "head_dim": 16}
# Recorded from transformers 5.24 in float32: last row, row 2, sum, sum of absolutes;
# row 6 of H[0], H[1], H[L]; key and value of the last layer's first head there.
GOLDEN = {
    "llama": (
        LLAMA,
        21,
        (-0.535742, 0.109678, -0.402355, 0.922413, -0.476251, 0.206335),
        (-1.228729, 0.012697, -0.972966),
        (-1.58318, 204.22931),
        (0.107462, 0.085941, 0.023535),
        (0.291122, 0.191333, 0.122379),
        (1.374530, 0.867004, 0.684493),
        (-0.121370, -0.547753, -0.541402, 0.030427),
        (0.358068, -0.071447, -0.263864, 0.565392),
        (50, 6, 60, 45, 15, 50, 6),
    ),
    "qwen2": (
        QWEN2,
        26,
        (-0.088717, -0.098749, 0.385422, 0.401121, 0.025310, 0.511419),
        (-0.466412, -1.079026, 0.194707),
        (0.74963, 196.44627),
        (-0.156259, -0.168214, -0.004308),
        (-0.060577, -0.052894, -0.119108),
        (0.186722, 0.100651, 0.153623),
        (0.454993, -0.044246, 0.082418, -0.480920),
        (0.872760, 0.033285, 0.495083, 0.271976),
        (59, 36, 42, 5, 52, 21, 9),
    ),
    "qwen3": (
        QWEN3,
        25,
        (-0.225064, 0.281408, 0.606641, -0.308937, -0.825317, 0.246172),
        (-0.527138, -0.310321, 0.041663),
        (15.28761, 189.01189),
        (0.107462, 0.085941, 0.023535),
        (0.007031, -0.152573, 0.471348),
        (0.380201, 0.085129, 1.650641),
        (-0.496496, -0.560915, -1.589362, 1.256667),
        (-0.456927, 0.803704, -0.056947, -0.474344),
        (57, 6, 19, 37, 9, 20, 6),
    ),
}
PARITY = pathlib.Path(__file__).parent / "parity"
RECORDED = json.loads((PARITY / "targets.json").read_text())


@functools.partial(jax.jit, static_argnames=("target", "taps"))
def forward(target, params, ids, cache=None, taps=()):
    out = target(params, ids, cache, taps=taps)
    return target.logits(params, out.hidden)[0], out


def run(pretrained, ids, **options):
    """Logits [T V] of one text and the pass's output."""
    ids = jnp.asarray([ids])
    logits, out = forward(pretrained.target, pretrained.params, ids, **options)
    return np.asarray(logits), out


def load(tmp_path, config, tensors=None, **options):
    folder = folders.write(tmp_path / "m", config, tensors)
    return targets.from_folder(folder, **options)


def test_the_fill_rule_is_the_recorded_one():
    tensors = folders.fill(folders.shapes(LLAMA))
    first = lambda name: tensors[name].ravel()[:3]
    close = dict(atol=2e-6)
    np.testing.assert_allclose(
        first("lm_head.weight"), (0.084883, 0.022767, -0.015999), **close
    )
    np.testing.assert_allclose(
        first("model.norm.weight"), (1.058496, 1.056257, 0.920632), **close
    )


@pytest.mark.parametrize("family", GOLDEN)
def test_golden_logits_states_and_cache(tmp_path, family):
    config, count, last, third, sums, *states, key, value, best = GOLDEN[family]
    assert len(folders.shapes(config)) == count
    pretrained = load(tmp_path, config)
    cache = pretrained.target.init_cache(1, 16)
    logits, out = run(pretrained, IDS, cache=cache, taps=(0, 1, 2))
    close = dict(atol=1e-4, rtol=0)
    np.testing.assert_allclose(logits[-1, :6], last, **close)
    np.testing.assert_allclose(logits[2, :3], third, **close)
    np.testing.assert_allclose((logits.sum(), np.abs(logits).sum()), sums, atol=2e-3)
    for state, golden in zip(np.split(out.features[0, -1], 3), states, strict=True):
        np.testing.assert_allclose(state[:3], golden, **close)
    np.testing.assert_array_equal(out.hidden, out.features[..., -32:])
    np.testing.assert_allclose(out.cache.k[-1][0, 0, 6, :4], key, **close)
    np.testing.assert_allclose(out.cache.v[-1][0, 0, 6, :4], value, **close)
    assert tuple(logits.argmax(1)) == best


ROPES = {
    "llama3 d=8": (
        Rope(5e5, "llama3", 8.0),
        8,
        {0: 1, 1: 0.0376060309, 2: 5.24846161e-4, 3: 6.64786987e-6},
    ),
    "llama3 d=128": (
        Rope(5e5, "llama3", 8.0),
        128,
        {
            20: 0.0165604,
            28: 0.00321145,
            29: 0.00216657,
            30: 0.00137189,
            31: 8.56751e-4,
            34: 1.78508e-4,
            35: 9.55621e-5,
            40: 3.4281e-5,
            63: 3.06893e-7,
        },
    ),
    "llama3 f=32": (
        Rope(5e5, "llama3", 32.0),
        64,
        {
            10: 0.0165604,
            15: 0.00129055,
            16: 4.29557e-4,
            17: 9.70829e-5,
            18: 1.94616e-5,
            31: 9.41831e-8,
        },
    ),
    "linear": (Rope(1e4, "linear", 8.0), 4, {0: 0.125, 1: 0.00125}),
    "yarn deepseek": (
        Rope(1e4, "yarn", 40.0, 4096),
        64,
        {
            9: 0.0749894,
            10: 0.0562341,
            11: 0.0390069,
            16: 0.0055,
            22: 1.77828e-4,
            23: 3.33380e-5,
            24: 2.5e-5,
            31: 3.33380e-6,
        },
    ),
    "yarn qwen": (
        Rope(1e6, "yarn", 4.0, 32768),
        128,
        {
            15: 0.0392419,
            20: 0.0133352,
            25: 0.00413174,
            30: 0.00106436,
            35: 2.46258e-4,
            40: 4.4457e-5,
            63: 3.10234e-7,
        },
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_frequencies_are_the_published_ones(name):
    rope, width, golden = ROPES[name]
    found = rope.frequencies(width)[list(golden)]
    np.testing.assert_allclose(found, list(golden.values()), rtol=1e-5)
    magnitude = 1.1386294 if name == "yarn qwen" else None
    if rope.scaling != "yarn":
        assert rope.magnitude == 1.0
    elif magnitude:
        assert rope.magnitude == pytest.approx(magnitude, rel=1e-6)


def older(config):
    """rope_parameters as hub files of older models spell it."""
    config = dict(config)
    rope = dict(config.pop("rope_parameters"))
    theta = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    scaling = None if rope == {"type": "default"} else rope
    return config | {"rope_theta": theta, "rope_scaling": scaling}


@pytest.mark.parametrize("case", RECORDED["cases"])
def test_parity_with_transformers(tmp_path, case):
    """Config as transformers 5.24 wrote it, every tensor name as it stored them."""
    recorded = RECORDED["cases"][case]
    arrays = np.load(PARITY / "targets.npz")
    pretrained = load(tmp_path, recorded["config"], folders.fill(recorded["shapes"]))
    layers = pretrained.target.config.num_layers
    logits, out = run(pretrained, RECORDED["ids"], taps=tuple(range(layers + 1)))
    np.testing.assert_allclose(logits, arrays[f"{case}.logits"], atol=2e-5)
    states = np.stack(np.split(out.features[0], layers + 1, axis=-1))
    np.testing.assert_allclose(states[..., :4], arrays[f"{case}.hidden"], atol=2e-5)


@pytest.mark.parametrize("case", RECORDED["cases"])
def test_both_spellings_and_our_own_give_one_config(case):
    config = RECORDED["cases"][case]["config"]
    ours = convert.config_from_hf(config)
    assert convert.config_from_hf(older(config)) == ours
    assert convert.config_from_hf(convert.config_to_hf(ours)) == ours


def test_the_parity_window_is_seen_by_two_of_three_layers():
    config = RECORDED["cases"]["qwen2_window"]["config"]
    assert convert.config_from_hf(config).windows == (None, 5, 5)
    old = {k: v for k, v in config.items() if k != "layer_types"}
    assert convert.config_from_hf(old).windows == (None, 5, 5)
    assert convert.config_from_hf(old | {"use_sliding_window": False}).windows == ()


def test_absent_keys_take_the_defaults_of_the_family():
    bare = {k: v for k, v in SHAPE.items() if k != "max_position_embeddings"}
    llama = convert.config_from_hf(bare | {"model_type": "llama"})
    assert (llama.head_width, llama.rope.theta, llama.norm_eps) == (8, 1e4, 1e-6)
    assert convert.config_from_hf(bare | {"model_type": "qwen3"}).head_width == 128
    del bare["num_key_value_heads"]
    assert convert.config_from_hf(bare | {"model_type": "llama"}).num_kv_heads == 4
    with pytest.raises(ValueError, match="num_key_value_heads"):
        convert.config_from_hf(bare | {"model_type": "qwen3"})


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"model_type": "mamba"}, "'mamba'.*llama, qwen2, qwen3"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.*yarn"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": 1}}, "mscale"),
        ({"layer_types": ["linear_attention"] * 2}, "'linear_attention'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(change, names):
    with pytest.raises(NotImplementedError, match=names):
        convert.config_from_hf(LLAMA | change)


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_rope_that_lacks_a_key_says_which(key):
    scaling = {k: v for k, v in LLAMA3.items() if k != key}
    with pytest.raises(ValueError, match=f"lacks {key} of rope type 'llama3'"):
        convert.config_from_hf(LLAMA | {"rope_scaling": scaling})


def test_sliding_layers_need_the_switch():
    kinds = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}
    with pytest.raises(ValueError, match="use_sliding_window is off"):
        convert.config_from_hf(QWEN2 | kinds)
    assert convert.config_from_hf(QWEN2 | {"use_sliding_window": True}).windows == ()


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_attention_heads"])
def test_a_config_that_lacks_a_key_says_which(key):
    config = {k: v for k, v in LLAMA.items() if k != key}
    with pytest.raises(ValueError, match=f"lacks {key}"):
        convert.config_from_hf(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lack.*1.mlp.up_proj"),
        (lambda t: t.update({"model.layers.0.extra": np.ones(2)}), "no place.*0.extra"),
        (
            lambda t: t.update({"model.norm.weight": np.ones(31, np.float32)}),
            r"model.norm.weight is \(31,\), config.json says \(32,\)",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(32)}),
            "no place.*q_proj.bias",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, message):
    tensors = folders.fill(folders.shapes(LLAMA))
    change(tensors)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, LLAMA, tensors)


def test_a_stored_head_is_ignored_where_the_flag_ties_it(tmp_path):
    tensors = folders.fill(folders.shapes(QWEN2))
    plain, _ = run(load(tmp_path / "a", QWEN2, tensors), IDS)
    tensors["lm_head.weight"] = np.full((64, 32), np.nan, np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    stored, _ = run(load(tmp_path / "b", QWEN2, tensors), IDS)
    np.testing.assert_array_equal(stored, plain)


def test_sharded_files_are_one_model(tmp_path):
    whole = load(tmp_path / "a", LLAMA)
    folder = folders.write(tmp_path / "b", LLAMA, shards=3)
    sharded = targets.from_folder(folder)
    np.testing.assert_array_equal(run(sharded, IDS)[0], run(whole, IDS)[0])
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="lacks model-00002-of-00003"):
        targets.from_folder(folder)


def test_bfloat16_files_keep_their_values(tmp_path):
    tensors = folders.fill(folders.shapes(LLAMA))
    tensors = {n: t.astype(jnp.bfloat16) for n, t in tensors.items()}
    pretrained = load(tmp_path, LLAMA, tensors, dtype=jnp.bfloat16)
    assert pretrained.dtype == jnp.bfloat16
    found = convert.tensors_from_params(pretrained.target.config, pretrained.params)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor)


def cut(path, keep):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.6])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_truncated_file_is_named_in_one_line(tmp_path, file, keep):
    folder = folders.write(tmp_path / "m", LLAMA)
    cut(folder / file, keep)
    with pytest.raises(ValueError, match=rf"{file} is damaged") as error:
        targets.from_folder(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_without_a_file_says_so(tmp_path, file):
    folder = folders.write(tmp_path / "m", LLAMA)
    (folder / file).unlink()
    with pytest.raises(FileNotFoundError, match=file):
        targets.from_folder(folder)


def test_a_padded_vocabulary_is_kept_and_a_short_one_refused(tmp_path):
    size = folders.toy_tokenizer().get_vocab_size()
    padded = load(tmp_path / "a", LLAMA | {"vocab_size": size + 7})
    assert padded.tokenizer.vocab_size == size
    assert run(padded, IDS)[0].shape == (7, size + 7)
    with pytest.raises(ValueError, match=f"{size} ids and the model {size - 1} rows"):
        load(tmp_path / "b", LLAMA | {"vocab_size": size - 1})


@pytest.mark.parametrize(
    ("config", "generation", "stop"),
    [
        (5, None, (0, 5)),
        ([5, 7], None, (0, 5, 7)),
        (None, None, (0,)),
        ([5], {"eos_token_id": [9, 5]}, (0, 5, 9)),
        (5, {"eos_token_id": 8}, (0, 5, 8)),
    ],
)
def test_stop_ids_come_from_both_files_and_the_template(
    tmp_path, config, generation, stop
):
    folder = folders.write(tmp_path / "m", LLAMA | {"eos_token_id": config})
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert targets.from_folder(folder).stop_ids == stop  # 0 is the template's <|end|>


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", ["llama3_biases", "yarn", "qwen2_window"])
def test_what_is_saved_comes_back_bit_by_bit(tmp_path, case, dtype):
    recorded = RECORDED["cases"][case]
    first = load(
        tmp_path, recorded["config"], folders.fill(recorded["shapes"]), dtype=dtype
    )
    targets.save_pretrained(tmp_path / "saved", first)
    again = targets.load(str(tmp_path / "saved"), dtype)
    assert again.target == first.target
    assert again.stop_ids == first.stop_ids
    before, after = (
        convert.tensors_from_params(p.target.config, p.params) for p in (first, again)
    )
    stored = load_file(str(tmp_path / "saved" / "model.safetensors"))
    assert before.keys() == after.keys() == stored.keys()
    for name in before:
        assert before[name].tobytes() == after[name].tobytes() == stored[name].tobytes()
    text = "the thin cat"
    assert again.tokenizer.encode(text) == first.tokenizer.encode(text)
    assert again.tokenizer.chat_template == first.tokenizer.chat_template


def test_saving_replaces_a_model_and_leaves_nothing_beside_it(tmp_path):
    pretrained = load(tmp_path, LLAMA)
    folders.write(tmp_path / "out", QWEN2, shards=2)
    targets.save_pretrained(tmp_path / "out", pretrained)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]
    assert not list((tmp_path / "out").glob("*.index.json"))
    assert targets.from_folder(tmp_path / "out").target == pretrained.target


def test_saving_never_deletes_what_is_no_model(tmp_path):
    pretrained = load(tmp_path, LLAMA)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="home holds other things than a model"):
        targets.save_pretrained(tmp_path / "home", pretrained)
    assert (tmp_path / "home" / "thesis.txt").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"out_bias": True},
        {"qkv_bias": True, "mlp_bias": True},
        {"qk_norm": True, "mlp_bias": True},
        {"windows": (4, 8), "qk_norm": True},
    ],
)
def test_what_no_hugging_face_family_can_say_is_not_saved(change):
    config = dataclasses.replace(convert.config_from_hf(LLAMA), **change)
    with pytest.raises(NotImplementedError, match=r"no \w+ config\.json says"):
        convert.config_to_hf(config)


def test_names_that_are_no_target_list_what_is():
    with pytest.raises(ValueError, match=r"unknown target 'gpt'.*tiny, smollm2"):
        targets.load("gpt")
    with pytest.raises(FileNotFoundError, match=r"no file nowhere\.gguf"):
        targets.load("nowhere.gguf")


# --- GGUF


def write_gguf(path, config, tensors, pre="smollm", **fields):
    """A llama file as converters write it: q and k rows of each head interleaved."""
    import gguf

    writer = gguf.GGUFWriter(str(path), fields.get("architecture", "llama"))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    backend = json.loads(folders.toy_tokenizer().to_str())
    tokens = sorted(backend["model"]["vocab"], key=backend["model"]["vocab"].get)
    tokens += [f"[PAD{i}]" for i in range(len(tokens), config["vocab_size"])]
    writer.add_tokenizer_model(fields.get("model", "gpt2"))
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in folders.SPECIAL else 1 for t in tokens])
    writer.add_token_merges(list(folders.MERGES))
    writer.add_eos_token_id(0)
    writer.add_chat_template(folders.TEMPLATE)
    if "scaling" in fields:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    short = {v: k for k, v in GGUF_NAMES.items()}
    for name, tensor in tensors.items():
        stem, _, rest = name.removeprefix("model.layers.").partition(".")
        if name.startswith("model.layers."):
            theirs = f"blk.{stem}.{short[rest]}"
        else:
            theirs = short[name]
        if "q_proj" in name or "k_proj" in name:
            heads = tensor.reshape(-1, 2, 4, tensor.shape[-1])  # head width 8
            tensor = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(tensor.shape)
        writer.add_tensor(theirs, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GGUF_NAMES = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
PLAIN = LLAMA | {"rope_scaling": None}


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_is_the_same_model_as_the_folder(tmp_path, tied):
    config = PLAIN | {"tie_word_embeddings": tied}
    tensors = folders.fill(folders.shapes(config))
    folder = load(tmp_path, config, tensors)
    write_gguf(tmp_path / "m.gguf", config, tensors)
    file = targets.load(str(tmp_path / "m.gguf"))
    stacked = targets.load(str(tmp_path / "m.gguf"), scanned=True)
    alone = sharding.unstack(stacked.params)
    assert jax.tree.all(jax.tree.map(np.array_equal, alone, file.params))
    assert file.target.config.tie_embeddings == tied
    np.testing.assert_allclose(run(file, IDS)[0], run(folder, IDS)[0], atol=1e-6)
    assert file.stop_ids == folder.stop_ids == (0,)
    chat = [{"role": "user", "content": "the thin ant, and a cat"}]
    assert file.tokenizer.chat(chat) == folder.tokenizer.chat(chat)
    assert file.tokenizer.decode(file.tokenizer.encode("a 12")) == "a 12"
    assert len(file.tokenizer.encode("12")) == 2  # digits stand alone


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "gemma3"}, "'gemma3'"),
        ({"model": "llama"}, "tokenizer of kind 'llama'"),
        ({"pre": "llama-bpe"}, "'llama-bpe'"),
        ({"scaling": True}, "scales its rotary"),
    ],
)
def test_a_gguf_file_of_another_kind_is_refused(tmp_path, fields, message):
    tensors = folders.fill(folders.shapes(PLAIN))
    if fields.get("architecture"):
        tensors = {}
    write_gguf(tmp_path / "m.gguf", PLAIN, tensors, **fields)
    with pytest.raises(NotImplementedError, match=message):
        targets.load(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.95])
def test_a_truncated_gguf_file_is_refused_in_one_line(tmp_path, keep):
    write_gguf(tmp_path / "m.gguf", PLAIN, folders.fill(folders.shapes(PLAIN)))
    cut(tmp_path / "m.gguf", keep)
    with pytest.raises(ValueError, match=r"m\.gguf is no whole GGUF file") as error:
        targets.load(str(tmp_path / "m.gguf"))
    assert "\n" not in str(error.value)


# --- text


def tokenizer(all_bytes=True, template=folders.TEMPLATE):
    return Tokenizer(folders.toy_tokenizer(all_bytes), template, None, "<|end|>")


TEXTS = (
    "the cat in the hat",
    "h\u00e9ll\u00f6 w\u00f6rld",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 family",
    "\u4f60\u597d, the end \U0001f680\U0001f680",
    "a\ufffdb",
    "\n\n  ",
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(4))
def test_a_stream_gives_the_whole_text_in_whole_characters(text, seed):
    rng, tok = np.random.default_rng(seed), tokenizer()
    ids, stream, pieces = tok.encode(text), tok.stream(), []
    while ids:
        n = 1 if seed == 0 else int(rng.integers(0, 4))
        pieces.append(stream.push(ids[:n]))
        ids = ids[n:]
    pieces.append(stream.close())
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_stream_gives_text_out_as_soon_as_it_is_certain():
    tok = tokenizer()
    rocket = tok.encode("\U0001f680")
    stream = tok.stream()
    assert stream.push(tok.encode("the")) == "the"
    assert [stream.push([t]) for t in rocket] == ["", "", "", "\U0001f680"]
    assert stream.push([*tok.encode("the"), *rocket[:2]]) == "the"
    assert stream.push([*rocket[2:], *rocket[:1]]) == "\U0001f680"
    assert stream.push(rocket[1:]) == "\U0001f680"


def test_a_stream_cut_inside_a_character_closes_with_the_broken_one():
    tok = tokenizer()
    stream = tok.stream()
    assert stream.push(tok.encode("a")) == "a"
    assert stream.push(tok.encode("\U0001f680")[:2]) == ""
    assert set(stream.close()) == {"\ufffd"}
    assert stream.close() == ""


def test_a_stream_skips_special_tokens():
    tok = tokenizer()
    stream = tok.stream()
    assert "".join(stream.push([t]) for t in [*tok.encode("an ant"), 0]) == "an ant"


def test_chat_with_mask_marks_the_answers_and_their_end():
    tok = tokenizer()
    chat = [
        {"role": "user", "content": "the"},
        {"role": "assistant", "content": "cat"},
        {"role": "user", "content": "in"},
        {"role": "assistant", "content": "a hat"},
    ]
    ids, mask = tok.chat_with_mask(chat)
    assert ids == tok.chat(chat, add_generation_prompt=False)
    learned = [t for t, m in zip(ids, mask, strict=True) if m]
    assert tok.decode(learned, skip_special=False) == "cat<|end|>a hat<|end|>"
    assert mask[-1] is False  # the newline behind the last end mark


def test_a_chat_that_cannot_be_learned_from_is_refused():
    with pytest.raises(ValueError, match="needs an assistant message"):
        tokenizer().chat_with_mask([{"role": "user", "content": "the"}])
    rewriting = "{{ messages | length }}" + folders.TEMPLATE
    chat = [{"role": r, "content": "a"} for r in ("user", "assistant")]
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        tokenizer(template=rewriting).chat_with_mask(chat * 2)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (folders.TEMPLATE, 0),
        (None, None),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", None),
        ("{% for m in messages %}{{ m['content'] }}<|mask|> {% endfor %}", 3),
    ],
)
def test_the_end_of_a_turn_is_read_off_the_template(template, end):
    assert tokenizer(template=template).end_of_turn == end


def test_templates_say_what_they_refuse():
    with pytest.raises(ValueError, match=r"no chat template.*--raw"):
        tokenizer(template=None).render([])
    refusing = "{{ raise_exception('only users') }}"
    with pytest.raises(ValueError, match="refuses this chat: only users"):
        tokenizer(template=refusing).render([])


def test_named_templates_and_token_objects_are_read(tmp_path):
    folder = folders.write(tmp_path / "m", LLAMA)
    named = {"tool_use": "x", "default": "d"}
    named = [{"name": n, "template": t} for n, t in named.items()]
    stored = {"chat_template": named, "eos_token": {"content": "<|end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(stored))
    read = Tokenizer.from_folder(folder)
    assert (read.chat_template, read.eos_token) == ("d", "<|end|>")
    (folder / "chat_template.jinja").write_text("beside")
    assert Tokenizer.from_folder(folder).chat_template == "beside"


def test_the_mask_token_is_found():
    assert tokenizer().mask_token_id == folders.SPECIAL.index("<|mask|>")


# --- a real model


def smollm2():
    path = targets.cache_folder() / f"{targets.SMOLLM2_NAME}.gguf"
    if not path.is_file():
        pytest.skip('SmolLM2 is not cached; run targets.load("smollm2-135m") once')
    return targets.load("smollm2-135m")


FACTORIAL = (
    "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 "
    "19712 8182 2 198 1 4093 198 19161 253 5905 1517 338 6765 260 4186 409 282 304 "
    "30 2 198 1 520 9531 198"
)


@pytest.mark.slow
def test_smollm2_gives_the_recorded_first_logits():
    """Float64 values of an independent NumPy model."""
    pretrained = smollm2()
    question = "Write a Python function that returns the factorial of n."
    ids = [int(i) for i in FACTORIAL.split()]
    assert pretrained.tokenizer.chat([{"role": "user", "content": question}]) == ids
    logits, out = run(pretrained, ids)
    first = (13.42549, 3.41447, 6.32224, 2.11761, 3.44073, 3.01397, -3.36324, 3.01442)
    last = (18.73863, 17.44305, 19.26663, 14.35138, 13.84187, 14.13522, 6.17485)
    state = (-0.373195, -0.620467, -0.648472, 0.257836)
    np.testing.assert_allclose(logits[0, :8], first, atol=5e-4)
    np.testing.assert_allclose(logits[41, :7], last, atol=5e-4)
    np.testing.assert_allclose(out.hidden[0, 41, :4], state, atol=5e-5)
    assert np.argsort(-logits[41])[:5].tolist() == [3725, 4590, 2683, 1604, 2068]


@pytest.mark.slow
def test_smollm2_writes_the_greedy_text_of_transformers():
    """A token may differ only where the two largest logits are within 1e-3."""
    from specjax.drafters.none import NoDrafter
    from specjax.generate import Model, Weights, generate
    from specjax.sampling import GREEDY

    pretrained = smollm2()
    rows = json.loads((PARITY / "smollm2_greedy.json").read_text())["rows"]
    for row in rows:
        chat = [{"role": "user", "content": row["question"]}]
        assert pretrained.tokenizer.chat(chat) == row["prompt"]
    model = Model(pretrained.target, NoDrafter(), GREEDY)  # end marks do not end it
    result = generate(
        model,
        Weights(pretrained.params, None),
        [row["prompt"] for row in rows],
        max_new_tokens=64,
    )
    for row, tokens in zip(rows, result.tokens, strict=True):
        pairs = zip(tokens, row["tokens"], row["gaps"], strict=True)
        gap = next((g for a, b, g in pairs if a != b), 0.0)
        assert gap < 1e-3, row["question"]


def test_a_tiny_random_target_is_saved_and_loaded_too(tmp_path):
    """What `testing.tiny_target` makes is a full model folder with a tokenizer."""
    target, params = testing.tiny_target(vocab_size=72)
    made = targets.Pretrained("t", target, params, tokenizer(False), (0,))
    targets.save_pretrained(tmp_path / "t", made)
    read = targets.from_folder(tmp_path / "t")
    np.testing.assert_array_equal(run(read, IDS)[0], run(made, IDS)[0])
    assert math.isfinite(float(run(read, IDS)[0].sum()))


def test_float16_and_float32_files_are_cast_to_what_is_asked(tmp_path):
    folder = folders.write(tmp_path / "m", LLAMA)
    tensors = load_file(str(folder / "model.safetensors"))
    half = {n: t.astype(np.float16) for n, t in tensors.items()}
    save_file(half, str(folder / "model.safetensors"))
    assert targets.from_folder(folder).dtype == jnp.float32


def test_a_folder_is_read_onto_a_mesh_array_by_array(tmp_path, monkeypatch):
    """Nothing is read before it is placed, and each device gets its part."""
    tiny = targets.load("tiny")
    targets.save_pretrained(tmp_path / "m", tiny)
    order, get, put = [], targets.Stored.__array__, sharding.put
    monkeypatch.setattr(
        targets.Stored,
        "__array__",
        lambda self, *args, **more: order.append("read") or get(self, *args, **more),
    )
    monkeypatch.setattr(sharding, "put", lambda *x: order.append("put") or put(*x))
    mesh = sharding.MeshShape(fsdp=2, tensor=2).make(jax.devices()[:4])
    found = targets.load(str(tmp_path / "m"), mesh=mesh)
    wanted = sharding.shardings(tiny.params, mesh)
    same = lambda x, y, at: bool((x == y).all()) and x.sharding == at
    assert jax.tree.all(jax.tree.map(same, found.params, tiny.params, wanted))
    runs = [len(list(g)) for k, g in itertools.groupby(order) if k == "read"]
    assert max(runs) <= 3  # q, k and v are one array here


@pytest.mark.parametrize("mesh", [None, sharding.MeshShape(2, 2, 2)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equal_layers_are_read_stacked(tmp_path, monkeypatch, mesh, dtype):
    """Each tensor once, those of one array of all layers behind each other."""
    config = LLAMA | {"num_hidden_layers": 11}
    folder = str(folders.write(tmp_path / "m", config))
    single = targets.load(folder, dtype)
    order, get = [], targets.Stored.__array__
    monkeypatch.setattr(
        targets.Stored,
        "__array__",
        lambda self, *args, **more: order.append(self.name) or get(self, *args, **more),
    )
    mesh = mesh and mesh.make()
    found = targets.load(folder, dtype, mesh, scanned=True)
    assert sorted(order) == sorted(folders.shapes(config))
    kinds = [name.split(".")[-2] for name in order if ".layers." in name]
    downs = [i for i, kind in enumerate(kinds) if kind == "down_proj"]
    assert downs == list(range(downs[0], downs[0] + 11))
    assert found.target == Scanned(single.target) and found.dtype == dtype
    wanted = Scanned(single.target).stack(single.params)
    equal = lambda x, y: x.dtype == y.dtype and bool((x == y).all())
    assert jax.tree.all(jax.tree.map(equal, found.params, wanted))
    if mesh is not None:
        split = sharding.shardings(wanted, mesh)
        assert jax.tree.all(
            jax.tree.map(lambda x, at: x.sharding == at, found.params, split)
        )
