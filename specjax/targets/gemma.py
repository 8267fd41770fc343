"""Targets of the Gemma 3 and Gemma 4 text form (`gemma.py`), and their files.

Names, shapes and defaults follow `transformers` 5.24. A multimodal file is read for its
text model alone.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import gemma
from specjax.gemma import GemmaConfig
from specjax.kv_cache import KVCache
from specjax.layers import Rope
from specjax.targets.base import Leaf
from specjax.targets.llama import Llama
from specjax.transformer import Output, Shared
from specjax.typing import Params, PRNGKey

FAMILIES = (
    "gemma3",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_text",
)
# What a file leaves out: multimodal Gemma 3 files say little more than their sizes.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "max_position_embeddings": 131_072,
    },
    "gemma4": {
        "sliding_window": 512,
        "max_position_embeddings": 131_072,
        "hidden_size_per_layer_input": 256,
    },
    "gemma4_unified": {
        "sliding_window": 1024,
        "max_position_embeddings": 262_144,
        "hidden_size_per_layer_input": 0,
    },
}
KINDS = {"sliding_attention": False, "full_attention": True}
PREFIXES = ("model.language_model.", "language_model.model.")
OTHER = (  # parts of a multimodal file that no text goes through
    "vision",
    "audio",
    "multi_modal_projector",
    "model.vision",
    "model.audio",
    "model.embed_vision",
    "model.embed_audio",
    "model.multi_modal_projector",
)


@dataclasses.dataclass(frozen=True)
class Gemma(Llama):
    """See `targets.base.Target`."""

    config: GemmaConfig

    def init(self, key: PRNGKey) -> Params:
        """Random float32 weights; under `jax.eval_shape` only their shapes."""
        tokens = jnp.zeros((1, 1), jnp.int32)
        return gemma.Stack(self.config).init(key, tokens)["params"]

    def init_cache(self, batch_size: int, size: int, dtype=jnp.float32) -> KVCache:
        return gemma.init_cache(self.config, batch_size, size, dtype)

    def __call__(self, params: Params, tokens, cache=None, **block) -> Output:
        return gemma.Stack(self.config, self.attention).apply(
            {"params": params}, tokens, cache, **block
        )  # pyright: ignore[reportReturnType]

    def shared(self, params: Params) -> Shared:
        return jax.lax.stop_gradient(gemma.shared(self.config, params))


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's part of a config.json, whose tie flag may stand outside."""
    inner = config.get("text_config")
    if inner is not None:
        tie = config.get("tie_word_embeddings", True)
        family = config["model_type"]  # which the inner part may leave out
        config = {"tie_word_embeddings": tie, "model_type": family} | dict(inner)
    family = config["model_type"].removesuffix("_text")
    return DEFAULTS[family] | dict(config)


def text_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's tensors under the names of a text-only file."""
    found = {}
    for name, tensor in tensors.items():
        if name.startswith(OTHER):
            continue
        for prefix in PREFIXES:
            if name.startswith(prefix):
                name = "model." + name.removeprefix(prefix)
        found[name.replace("language_model.lm_head", "lm_head")] = tensor
    return found


def config_from_hf(
    config: Mapping[str, Any], rope: Callable[[Mapping[str, Any]], Rope]
) -> GemmaConfig:
    """Reads config.json; `rope` reads the rotary part of a config of one kind."""
    config = text_config(config)
    is_four = config["model_type"].startswith("gemma4")
    for key, only in (
        ("hidden_activation", "gelu_pytorch_tanh"),
        ("attention_bias", False),
        ("attn_logit_softcapping", None),
    ):
        if config.get(key, only) != only:
            raise NotImplementedError(
                f"{key} {config[key]!r} is not supported; only {only!r} is."
            )
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        found = config["use_bidirectional_attention"]
        raise NotImplementedError(
            f"use_bidirectional_attention {found!r} is not supported; only attention "
            "to what came before is, images aside."
        )
    L, W = config["num_hidden_layers"], config["sliding_window"]
    windows = tuple(None if full else W for full in _full_layers(config, L, is_four))
    local, full = (_rope_of(config, kind, is_four) for kind in KINDS)
    fields: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "width": config["hidden_size"],
        "num_layers": L,
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_width": config.get("head_dim", 256),
        "mlp_width": config["intermediate_size"],
        "rope": rope(local),
        "full_rope": rope(full),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
        "max_positions": config["max_position_embeddings"],
        "windows": windows,
        "softcap": config.get("final_logit_softcapping"),
    }
    if not is_four:
        scale = config.get("query_pre_attn_scalar", 256)
        return GemmaConfig(**fields, query_scale=scale**-0.5)
    return GemmaConfig(**fields, **_four(config, windows))


def _full_layers(config, L: int, is_four: bool) -> list[bool]:
    kinds = config.get("layer_types")
    if kinds:
        if unknown := set(kinds) - set(KINDS):
            raise NotImplementedError(f"layer type {unknown.pop()!r} is not supported.")
        full = [KINDS[k] for k in kinds]
    else:
        default = config.get("_sliding_window_pattern", 6)
        pattern = config.get("sliding_window_pattern", default)
        full = [(i + 1) % pattern == 0 for i in range(L)]
    if len(full) != L:
        raise ValueError(f"layer_types has {len(full)} entries for {L} layers.")
    if is_four:
        full[-1] = True  # whatever the list says
    return full


def _rope_of(config, kind: str, is_four: bool) -> dict[str, Any]:
    """The rotary part of one kind, spelled as a config of that kind alone."""
    full = KINDS[kind]
    base: dict[str, Any] = {
        "model_type": config["model_type"],
        "max_position_embeddings": config["max_position_embeddings"],
    }
    nested = config.get("rope_parameters") or {}
    if nested and not set(nested) <= set(KINDS):
        raise NotImplementedError(
            f"rope_parameters of a Gemma model stand under {' and '.join(KINDS)}, got "
            f"{', '.join(map(str, nested))}."
        )
    if kind in nested:
        own = dict(nested[kind])
    elif is_four:
        own = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
        own = own if full else {}
    else:
        own = dict(config.get("rope_scaling") or {}) if full else {}
        theta = "rope_theta" if full else "rope_local_base_freq"
        own |= {"rope_theta": config[theta]} if theta in config else {}
    return base | {"rope_parameters": {"rope_theta": 1e6 if full else 1e4} | own}


def _four(config, windows) -> dict[str, Any]:
    """What only Gemma 4 has; absent keys take the class's defaults."""
    each = config.get("per_layer_config") or {}
    own = next(iter(each.values()), {})
    full = {str(i) for i, w in enumerate(windows) if w is None}
    known = {"head_dim", "num_key_value_heads"}
    if each and (set(each) != full or any(e != own for e in each.values())):
        raise NotImplementedError(
            f"per_layer_config must say the same of all full layers ({', '.join(full)})"
            f" and of no other; it has {', '.join(each)}."
        )
    if more := set(own) - known:
        raise NotImplementedError(
            f"{more.pop()} of per_layer_config is not supported; only "
            f"{' and '.join(sorted(known))} are."
        )
    equal = bool(config.get("attention_k_eq_v", False))
    kv = own.get("num_key_value_heads", config.get("num_global_key_value_heads"))
    experts = bool(config.get("enable_moe_block", False))
    shared, wide = (
        config.get("num_kv_shared_layers", 0),
        2 * config["intermediate_size"],
    )
    doubled = bool(shared and config.get("use_double_wide_mlp", False))
    P = config["hidden_size_per_layer_input"] or 0
    return {
        "full_kv_heads": kv if equal else None,
        "full_head_width": own.get("head_dim", config.get("global_head_dim", 512)),
        "query_scale": 1.0,
        "value_norm": True,
        "keys_as_values": equal,
        "num_shared_layers": shared,
        "shared_mlp_width": wide if doubled else None,
        "layer_scale": True,
        "per_layer_width": P,
        "per_layer_vocab": config.get("vocab_size_per_layer_input", 262_144)
        if P
        else 0,
        "num_experts": config["num_experts"] if experts else 0,
        "experts_per_token": config["top_k_experts"] if experts else 0,
        "expert_width": config["moe_intermediate_size"] if experts else 0,
    }


def config_to_hf(
    config: GemmaConfig, rope: Callable[[Rope], dict[str, Any]]
) -> dict[str, Any]:
    """The config.json of a stack; the inverse of `config_from_hf`."""
    c = config
    family = "gemma4_text" if c.layer_scale else "gemma3_text"
    names = {full: kind for kind, full in KINDS.items()}
    window = next((w for w in c.windows if w is not None), 512)
    values = {
        "architectures": [f"Gemma{family[5]}ForCausalLM"],
        "model_type": family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_width,
        "intermediate_size": c.mlp_width,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": c.norm_eps,
        "rope_parameters": {
            names[False]: rope(c.rope),
            names[True]: rope(c.full_rope),
        },
        "tie_word_embeddings": c.tie_embeddings,
        "max_position_embeddings": c.max_positions,
        "attention_bias": False,
        "sliding_window": window,
        "layer_types": [names[w is None] for w in c.windows],
        "final_logit_softcapping": c.softcap,
    }
    if not c.layer_scale:
        return values | {"query_pre_attn_scalar": round(c.query_scale**-2, 6)}
    return values | {
        "global_head_dim": c.full_head_width,
        "num_global_key_value_heads": c.full_kv_heads,
        "attention_k_eq_v": c.keys_as_values,
        "num_kv_shared_layers": c.num_shared_layers,
        "use_double_wide_mlp": c.shared_mlp_width is not None,
        "hidden_size_per_layer_input": c.per_layer_width,
        "vocab_size_per_layer_input": c.per_layer_vocab,
        "enable_moe_block": bool(c.num_experts),
        "num_experts": c.num_experts or None,
        "top_k_experts": c.experts_per_token or None,
        "moe_intermediate_size": c.expert_width or None,
    }


def _norm(config: GemmaConfig, name: str, width: int) -> Leaf:
    """A norm's weights in float32; Gemma 3's files hold them less 1."""
    more = 0.0 if config.layer_scale else 1.0
    return Leaf(
        [(f"{name}.weight", (width,))],
        lambda parts: np.asarray(parts[0], np.float32) + np.float32(more),
        lambda array: [np.asarray(array, np.float32) - np.float32(more)],
        jnp.float32,
    )


def layer_plan(c: GemmaConfig, i: int, name: str) -> dict[str, Leaf]:
    """Leaves of layer i, stored under a name."""
    is_full, owns = c.windows[i] is None, i < c.num_owners
    kind, D, P, X = c.kind(is_full), c.width, c.per_layer_width, c.num_experts
    K, E, G = kind.num_kv_heads, kind.head_width, c.num_heads // kind.num_kv_heads
    F = c.mlp_width if owns else c.shared_mlp_width or c.mlp_width
    attn, mlp = f"{name}.self_attn", f"{name}.mlp"

    def one(stored: str, *shape: int, as_: tuple[int, ...] | None = None) -> Leaf:
        join = lambda parts: parts[0].reshape(as_ or shape)
        return Leaf([(stored, shape)], join, lambda array: [array.reshape(shape)])

    found = {
        "input_norm.scale": _norm(c, f"{name}.input_layernorm", D),
        "post_attention_norm.scale": _norm(c, f"{name}.post_attention_layernorm", D),
        "pre_mlp_norm.scale": _norm(c, f"{name}.pre_feedforward_layernorm", D),
        "post_mlp_norm.scale": _norm(c, f"{name}.post_feedforward_layernorm", D),
        "attention.q": one(f"{attn}.q_proj.weight", K * G * E, D, as_=(K, G, E, D)),
        "attention.q_norm.scale": _norm(c, f"{attn}.q_norm", E),
        "attention.out": one(f"{attn}.o_proj.weight", D, K * G * E),
        "mlp.gate_up": Leaf(
            [(f"{mlp}.{x}_proj.weight", (F, D)) for x in ("gate", "up")], np.stack, list
        ),
        "mlp.down": one(f"{mlp}.down_proj.weight", D, F),
    }
    if owns:
        found["attention.k"] = one(f"{attn}.k_proj.weight", K * E, D, as_=(K, E, D))
        found["attention.k_norm.scale"] = _norm(c, f"{attn}.k_norm", E)
        if not (c.keys_as_values and is_full):
            found["attention.v"] = one(f"{attn}.v_proj.weight", K * E, D, as_=(K, E, D))
    if c.layer_scale:
        found["layer_scale"] = one(f"{name}.layer_scalar", 1)
    if P:
        found["per_layer_gate"] = one(f"{name}.per_layer_input_gate.weight", P, D)
        found["per_layer_proj"] = one(f"{name}.per_layer_projection.weight", D, P)
        norm = _norm(c, f"{name}.post_per_layer_input_norm", D)
        found["per_layer_norm.scale"] = norm
    if X:
        F, post = c.expert_width, f"{name}.post_feedforward_layernorm"
        turn = lambda parts: parts[0].swapaxes(1, 2)
        back = lambda array: [array.swapaxes(1, 2)]
        found |= {
            "dense_norm.scale": _norm(c, f"{post}_1", D),
            "experts_norm.scale": _norm(c, f"{post}_2", D),
            "pre_experts_norm.scale": _norm(
                c, f"{name}.pre_feedforward_layernorm_2", D
            ),
            "experts.router": one(f"{name}.router.proj.weight", X, D),
            "experts.router_scale": one(f"{name}.router.scale", D),
            "experts.expert_scale": one(f"{name}.router.per_expert_scale", X),
            "experts.gate_up": Leaf(
                [(f"{name}.experts.gate_up_proj", (X, 2 * F, D))], turn, back
            ),
            "experts.down": Leaf(
                [(f"{name}.experts.down_proj", (X, D, F))], turn, back
            ),
        }
    return found


def plan(config: GemmaConfig) -> dict[str, Leaf]:
    """Our leaf -> the stored tensors that make it up."""
    c, LP = config, config.num_layers * config.per_layer_width
    found = {
        "embed": Leaf([("model.embed_tokens.weight", (c.vocab_size, c.width))]),
        "norm.scale": _norm(c, "model.norm", c.width),
    }
    if not c.tie_embeddings:
        found["head"] = Leaf([("lm_head.weight", (c.vocab_size, c.width))])
    if LP:
        table, name = (c.per_layer_vocab, LP), "model.per_layer"
        found["embed_per_layer"] = Leaf(
            [("model.embed_tokens_per_layer.weight", table)]
        )
        found["per_layer_proj"] = Leaf(
            [(f"{name}_model_projection.weight", (LP, c.width))]
        )
        norm = _norm(c, f"{name}_projection_norm", c.per_layer_width)
        found["per_layer_norm.scale"] = norm
    for i in range(c.num_layers):
        layer = layer_plan(c, i, f"model.layers.{i}")
        found |= {f"layer_{i}.{x}": leaf for x, leaf in layer.items()}
    return found


def assistant_config(
    config: Mapping[str, Any], rope: Callable[[Mapping[str, Any]], Rope]
) -> GemmaConfig:
    """The layers of an assistant's config.json: none has keys of its own."""
    inner = dict(config["text_config"])
    for key in ("hidden_size_per_layer_input", "enable_moe_block"):
        if inner.get(key):
            raise NotImplementedError(
                f"{key} {inner[key]!r} of an assistant is not supported; the released "
                "ones have none."
            )
    if config.get("tie_word_embeddings", True) is False:
        raise NotImplementedError(
            "an assistant whose head is not its table (tie_word_embeddings false) is "
            "not supported; the released ones are tied."
        )
    inner |= {
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": inner["num_hidden_layers"],
    }
    return config_from_hf(inner, rope)


def assistant_plan(c: GemmaConfig, target_width: int, num_clusters: int):
    """Leaves of `drafters.gemma4_mtp`; the order of the tokens is none of them."""
    table = (c.vocab_size, c.width)
    found = {
        "net.pre": Leaf([("pre_projection.weight", (c.width, 2 * target_width))]),
        "net.post": Leaf([("post_projection.weight", (target_width, c.width))]),
        "net.norm.scale": _norm(c, "model.norm", c.width),
        "head": Leaf([("model.embed_tokens.weight", table)]),
    }
    if num_clusters:
        shape = (num_clusters, c.width)
        found["centroids"] = Leaf([("masked_embedding.centroids.weight", shape)])
    for i in range(c.num_layers):
        layer = layer_plan(c, i, f"model.layers.{i}")
        found |= {f"net.layer_{i}.{x}": leaf for x, leaf in layer.items()}
    return found


def unused(config: GemmaConfig) -> set[str]:
    """Keys and values that a file may hold for layers that share others'."""
    return {
        f"model.layers.{i}.self_attn.{x}.weight"
        for i in range(config.num_owners, config.num_layers)
        for x in ("k_proj", "v_proj", "k_norm")
    }
