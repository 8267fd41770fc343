"""Model folders in Hugging Face form with deterministic weights, without specjax.

The weights follow one rule of sines, so that a recorded output needs no recorded
weights; the tokenizer is byte-level BPE with a few merges and a chat template.
"""

import json
import pathlib
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|mask|>")
CHARACTERS = " !'*+,-.0123456789=?\nabcdefghijklmnopqrstuvwxyz"
MERGES = ("t h", "th e", "Ġ the", "a n", "i n", "Ġ a")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


ONES = ("layer_scalar", "router.scale", "per_expert_scale")  # near 1, as norms are


def fill(
    shapes: dict[str, tuple[int, ...]], norm: float = 1.0
) -> dict[str, np.ndarray]:
    """Weights by the rank of their sorted names; sines in float64, then float32.

    `norm` is what the weights of norms lie around: 0 in families that add 1.
    """
    tensors = {}
    for rank, name in enumerate(sorted(shapes)):
        shape = tuple(shapes[name])
        k = np.arange(1, np.prod(shape) + 1, dtype=np.float64)
        a = np.sin(12.9898 * k + 78.233 * (rank + 1)) * 43758.5453
        u = (a - np.floor(a) - 0.5).reshape(shape)
        if "norm" in name and name.endswith("weight"):
            u = norm + 0.2 * u
        elif name.endswith(ONES):
            u = 1 + 0.2 * u
        else:
            u = 0.2 * u if len(shape) == 1 else 2 * u / np.sqrt(shape[-1])
        tensors[name] = u.astype(np.float32)
    return tensors


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that Hugging Face stores for a config."""
    D, F, V = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    H, K = config["num_attention_heads"], config["num_key_value_heads"]
    E = config.get("head_dim", D // H)
    family, bias = config["model_type"], config.get("attention_bias", False)
    rows = {"q": (H * E, D), "k": (K * E, D), "v": (K * E, D), "o": (D, H * E)}
    found = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not config.get("tie_word_embeddings", False):
        found["lm_head.weight"] = (V, D)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        found |= {f"{at}{n}_layernorm.weight": (D,) for n in ("input",)}
        found[f"{at}post_attention_layernorm.weight"] = (D,)
        for x, shape in rows.items():
            found[f"{at}self_attn.{x}_proj.weight"] = shape
            if bias or (family == "qwen2" and x != "o"):
                found[f"{at}self_attn.{x}_proj.bias"] = shape[:1]
        if family == "qwen3":
            found |= {f"{at}self_attn.{x}_norm.weight": (E,) for x in "qk"}
        for x, shape in {"gate": (F, D), "up": (F, D), "down": (D, F)}.items():
            found[f"{at}mlp.{x}_proj.weight"] = shape
            if config.get("mlp_bias", False):
                found[f"{at}mlp.{x}_proj.bias"] = shape[:1]
    return found


def deepseek_shapes(
    config: dict[str, Any], num_modules: int
) -> dict[str, tuple[int, ...]]:
    """The same of DeepSeek-V3's form, with MTP modules as further layers."""
    c, D, H = config, config["hidden_size"], config["num_attention_heads"]
    Rq, R, Er = c["q_lora_rank"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    En, Ev, F = c["qk_nope_head_dim"], c["v_head_dim"], c["moe_intermediate_size"]
    found = {"lm_head.weight": (c["vocab_size"], D), "model.norm.weight": (D,)}
    found["model.embed_tokens.weight"] = (c["vocab_size"], D)

    def gates(name, width):
        for x, shape in (
            ("gate", (width, D)),
            ("up", (width, D)),
            ("down", (D, width)),
        ):
            found[f"{name}.{x}_proj.weight"] = shape

    for i in range(c["num_hidden_layers"] + num_modules):
        at = f"model.layers.{i}."
        if i >= c["num_hidden_layers"]:
            found[f"{at}eh_proj.weight"] = (D, 2 * D)
            for x in ("enorm", "hnorm", "shared_head.norm"):
                found[f"{at}{x}.weight"] = (D,)
        found |= {
            f"{at}input_layernorm.weight": (D,),
            f"{at}post_attention_layernorm.weight": (D,),
            f"{at}self_attn.kv_a_proj_with_mqa.weight": (R + Er, D),
            f"{at}self_attn.kv_a_layernorm.weight": (R,),
            f"{at}self_attn.kv_b_proj.weight": (H * (En + Ev), R),
            f"{at}self_attn.o_proj.weight": (D, H * Ev),
        }
        if Rq is None:
            found[f"{at}self_attn.q_proj.weight"] = (H * (En + Er), D)
        else:
            found[f"{at}self_attn.q_a_proj.weight"] = (Rq, D)
            found[f"{at}self_attn.q_a_layernorm.weight"] = (Rq,)
            found[f"{at}self_attn.q_b_proj.weight"] = (H * (En + Er), Rq)
        if i < c["first_k_dense_replace"]:
            gates(f"{at}mlp", c["intermediate_size"])
            continue
        found[f"{at}mlp.gate.weight"] = (c["n_routed_experts"], D)
        found[f"{at}mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        for e in range(c["n_routed_experts"]):
            gates(f"{at}mlp.experts.{e}", F)
        gates(f"{at}mlp.shared_experts", F * c["n_shared_experts"])
    return found


def gemma_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The same of Gemma 3's and 4's text form; a layer without own keys has none."""
    c, D, F, H = config, config["hidden_size"], config["intermediate_size"], 4
    L, four = c["num_hidden_layers"], c["model_type"] == "gemma4_text"
    P, shared = c.get("hidden_size_per_layer_input", 0), c.get("num_kv_shared_layers")
    found = {"model.norm.weight": (D,)}
    found["model.embed_tokens.weight"] = (c["vocab_size"], D)
    if P:
        found["model.embed_tokens_per_layer.weight"] = (64, L * P)
        found["model.per_layer_model_projection.weight"] = (L * P, D)
        found["model.per_layer_projection_norm.weight"] = (P,)
    for i, kind in enumerate(c["layer_types"]):
        at, full = f"model.layers.{i}.", kind == "full_attention"
        E = c["global_head_dim"] if four and full else c["head_dim"]
        equal = full and c.get("attention_k_eq_v", False)
        K = c["num_global_key_value_heads"] if equal else c["num_key_value_heads"]
        owns = i < L - (shared or 0)
        for x in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            found[f"{at}{x}_layernorm.weight"] = (D,)
        found[f"{at}self_attn.q_proj.weight"] = (H * E, D)
        found[f"{at}self_attn.q_norm.weight"] = (E,)
        found[f"{at}self_attn.o_proj.weight"] = (D, H * E)
        if owns:
            found[f"{at}self_attn.k_proj.weight"] = (K * E, D)
            found[f"{at}self_attn.k_norm.weight"] = (E,)
        if owns and not equal:
            found[f"{at}self_attn.v_proj.weight"] = (K * E, D)
        width = F if owns or not c.get("use_double_wide_mlp") else 2 * F
        for x, shape in (
            ("gate", (width, D)),
            ("up", (width, D)),
            ("down", (D, width)),
        ):
            found[f"{at}mlp.{x}_proj.weight"] = shape
        if four:
            found[f"{at}layer_scalar"] = (1,)
        if P:
            found[f"{at}per_layer_input_gate.weight"] = (P, D)
            found[f"{at}per_layer_projection.weight"] = (D, P)
            found[f"{at}post_per_layer_input_norm.weight"] = (D,)
        if c.get("enable_moe_block"):
            X, inner = c["num_experts"], c["moe_intermediate_size"]
            for x in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
                found[f"{at}{x}.weight"] = (D,)
            found[f"{at}pre_feedforward_layernorm_2.weight"] = (D,)
            found[f"{at}router.proj.weight"] = (X, D)
            found[f"{at}router.scale"] = (D,)
            found[f"{at}router.per_expert_scale"] = (X,)
            found[f"{at}experts.gate_up_proj"] = (X, 2 * inner, D)
            found[f"{at}experts.down_proj"] = (X, D, inner)
    return found


def toy_tokenizer(all_bytes: bool = False) -> tokenizers.Tokenizer:
    """Byte-level BPE over lower case and digits, or over every byte there is."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    if not all_bytes:
        split = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
        alphabet = sorted({c for x in CHARACTERS for w, _ in split(x) for c in w})
    merges = [tuple(m.split(" ")) for m in MERGES]
    pieces = [*SPECIAL, *alphabet, *("".join(m) for m in merges)]
    backend = tokenizers.Tokenizer(
        models.BPE({t: i for i, t in enumerate(pieces)}, merges)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIAL]
    )
    return backend


def write(
    folder: pathlib.Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray] | None = None,
    shards: int = 1,
) -> pathlib.Path:
    """A folder with config.json, safetensors (one file or sharded) and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = fill(shapes(config)) if tensors is None else tensors
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, str(folder / "model.safetensors"))
    else:
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            save_file({n: tensors[n] for n in names[i::shards]}, str(folder / file))
            weight_map |= {n: file for n in names[i::shards]}
        index = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index)
    toy_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE})
    )
    return folder
