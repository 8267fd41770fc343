"""Hugging Face configs and tensors to ours and back, for the Llama form.

Facts: `transformers` 5.24 modelling files of llama, qwen2 and qwen3, and the configs of
the released models. Everything in a file is either read or refused by its name.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.layers import Rope
from specjax.targets.llama import Llama
from specjax.transformer import TransformerConfig
from specjax.typing import Params

FAMILIES = ("llama", "qwen2", "qwen3")


def config_from_hf(config: Mapping[str, Any]) -> TransformerConfig:
    """Reads config.json; keys that are absent take the family's own defaults."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise NotImplementedError(
            f"model_type {family!r} is not supported; known: {', '.join(FAMILIES)}."
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise NotImplementedError(
            f"weights quantised by {method!r} are not read; load the plain ones."
        )
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise NotImplementedError(f"hidden_act {act!r} is not supported; only silu is.")
    try:
        heads, width = config["num_attention_heads"], config["hidden_size"]
        layers = config["num_hidden_layers"]
        kv = config.get("num_key_value_heads", heads if family == "llama" else None)
        if kv is None:
            raise KeyError("num_key_value_heads")
        head_width = config.get("head_dim") or (
            128 if family == "qwen3" else width // heads
        )
        return TransformerConfig(
            vocab_size=config["vocab_size"],
            width=width,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv,
            head_width=head_width,
            mlp_width=config["intermediate_size"],
            rope=_rope(config),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            qk_norm=family == "qwen3",
            qkv_bias=family == "qwen2" or bool(config.get("attention_bias", False)),
            out_bias=family != "qwen2" and bool(config.get("attention_bias", False)),
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_positions=config.get("max_position_embeddings", 2048),
            windows=_windows(config, layers),
        )
    except KeyError as error:
        raise ValueError(
            f"config.json of a {family} model lacks {error.args[0]}."
        ) from None


def _rope(config: Mapping[str, Any]) -> Rope:
    """Both spellings: rope_parameters, and rope_theta with rope_scaling."""
    nested = dict(config.get("rope_parameters") or {})
    scaling = nested or dict(config.get("rope_scaling") or {})
    theta = nested.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(theta=float(theta))
    if kind not in ("linear", "llama3", "yarn"):
        raise NotImplementedError(
            f"rope type {kind!r} is not supported; known: default, linear, llama3, "
            "yarn."
        )
    positions = config.get("max_position_embeddings", 2048)
    original = scaling.get("original_max_position_embeddings", positions)
    factor = scaling.get("factor")
    if factor is None:
        factor = positions / original
    if scaling.get("mscale") or scaling.get("mscale_all_dim"):
        raise NotImplementedError("yarn with mscale is not supported in this family.")
    optional = {
        key: scaling[key]
        for key in (
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "truncate",
        )
        if scaling.get(key) is not None
    }
    return Rope(
        theta=float(theta),
        scaling=kind,
        factor=float(factor),
        original_max_position=int(original),
        **optional,
    )


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Sliding layers of a Qwen config that turns them on; () where all see all."""
    kinds = config.get("layer_types")
    window = config.get("sliding_window")
    if config.get("use_sliding_window") and kinds is None:
        first = config.get("max_window_layers", layers)
        kinds = [
            "sliding_attention" if i >= first else "full_attention"
            for i in range(layers)
        ]
    unknown = set(kinds or ()) - {"sliding_attention", "full_attention"}
    if unknown:
        raise NotImplementedError(f"layer type {unknown.pop()!r} is not supported.")
    windows = tuple(window if k == "sliding_attention" else None for k in kinds or ())
    return windows if any(windows) else ()


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a stack, in the older spelling that every reader knows."""
    family = "qwen3" if config.qk_norm else "llama"
    if config.qkv_bias and not config.out_bias:
        family = "qwen2"
    rope: dict[str, Any] | None = None
    if config.rope.scaling != "none":
        r = config.rope
        rope = {"rope_type": r.scaling, "factor": r.factor}
        if r.scaling != "linear":
            rope["original_max_position_embeddings"] = r.original_max_position
        if r.scaling == "llama3":
            rope |= {
                "low_freq_factor": r.low_freq_factor,
                "high_freq_factor": r.high_freq_factor,
            }
        if r.scaling == "yarn":
            rope |= {
                "beta_fast": r.beta_fast,
                "beta_slow": r.beta_slow,
                "attention_factor": r.attention_factor,
                "truncate": r.truncate,
            }
    values = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.mlp_width,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": rope,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "attention_bias": config.out_bias,
        "mlp_bias": config.mlp_bias,
    }
    if config.windows:
        values |= {
            "use_sliding_window": True,
            "sliding_window": next(w for w in config.windows if w),
            "layer_types": [
                "sliding_attention" if w else "full_attention" for w in config.windows
            ],
        }
    return values


def _plan(config: TransformerConfig) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """Our leaf -> the stored tensors that make it up, with their shapes as stored."""
    c = config
    D, E, F, H, K = c.width, c.head_width, c.mlp_width, c.num_heads, c.num_kv_heads
    plan: dict[str, list[tuple[str, tuple[int, ...]]]] = {
        "embed": [("model.embed_tokens.weight", (c.vocab_size, D))],
        "norm.scale": [("model.norm.weight", (D,))],
    }
    if not c.tie_embeddings:
        plan["head"] = [("lm_head.weight", (c.vocab_size, D))]
    for i in range(c.num_layers):
        ours, theirs = f"layer_{i}", f"model.layers.{i}"
        attn, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        plan[f"{ours}.input_norm.scale"] = [(f"{theirs}.input_layernorm.weight", (D,))]
        plan[f"{ours}.post_norm.scale"] = [
            (f"{theirs}.post_attention_layernorm.weight", (D,))
        ]
        rows = {"q": H * E, "k": K * E, "v": K * E}
        plan[f"{ours}.attention.qkv"] = [
            (f"{attn}.{x}_proj.weight", (n, D)) for x, n in rows.items()
        ]
        plan[f"{ours}.attention.out"] = [(f"{attn}.o_proj.weight", (D, H * E))]
        gates = ("gate", "up")
        plan[f"{ours}.mlp.gate_up"] = [
            (f"{mlp}.{x}_proj.weight", (F, D)) for x in gates
        ]
        plan[f"{ours}.mlp.down"] = [(f"{mlp}.down_proj.weight", (D, F))]
        if c.qkv_bias:
            plan[f"{ours}.attention.qkv_bias"] = [
                (f"{attn}.{x}_proj.bias", (n,)) for x, n in rows.items()
            ]
        if c.out_bias:
            plan[f"{ours}.attention.out_bias"] = [(f"{attn}.o_proj.bias", (D,))]
        if c.qk_norm:
            for x in ("q", "k"):
                plan[f"{ours}.attention.{x}_norm.scale"] = [
                    (f"{attn}.{x}_norm.weight", (E,))
                ]
        if c.mlp_bias:
            plan[f"{ours}.mlp.gate_up_bias"] = [
                (f"{mlp}.{x}_proj.bias", (F,)) for x in gates
            ]
            plan[f"{ours}.mlp.down_bias"] = [(f"{mlp}.down_proj.bias", (D,))]
    return plan


def _join_qkv(config: TransformerConfig, q, k, v) -> np.ndarray:
    """[H E ..], [K E ..], [K E ..] -> [K G+2 E ..]: a kv head beside its queries."""
    K, E = config.num_kv_heads, config.head_width
    split = lambda x: x.reshape(K, -1, E, *x.shape[1:])
    return np.concatenate([split(q), split(k), split(v)], axis=1)


def _part_qkv(config: TransformerConfig, qkv: np.ndarray) -> list[np.ndarray]:
    G = config.num_heads // config.num_kv_heads
    join = lambda x: x.reshape(-1, *x.shape[3:])
    return [join(qkv[:, :G]), join(qkv[:, G : G + 1]), join(qkv[:, G + 1 :])]


def _paths(config: TransformerConfig):
    want = jax.eval_shape(lambda: Llama(config).init(jax.random.key(0)))
    leaves, structure = jax.tree_util.tree_flatten_with_path(want)
    return [".".join(k.key for k in path) for path, _ in leaves], structure


def params_from_tensors(
    config: TransformerConfig, tensors: Mapping[str, np.ndarray], dtype: Any
) -> Params:
    """Builds the parameter tree; names every tensor that is missing or not read."""
    plan = _plan(config)
    wanted = dict(pair for sources in plan.values() for pair in sources)
    ignored = {n for n in tensors if n.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        ignored |= {"lm_head.weight"} & set(tensors)  # the flag rules over the file
    missing = sorted(set(wanted) - set(tensors))
    unread = sorted(set(tensors) - set(wanted) - ignored)
    wrong = [
        f"{n} is {tuple(tensors[n].shape)}, config.json says {shape}"
        for n, shape in wanted.items()
        if n in tensors and tuple(tensors[n].shape) != shape
    ]
    for what, names in (
        ("lack tensors", missing),
        ("hold tensors that this model has no place for", unread),
        ("do not fit the config", wrong),
    ):
        if names:
            shown = ", ".join(names[:6]) + (" ..." if len(names) > 6 else "")
            raise ValueError(f"the weights {what} ({len(names)}): {shown}.")

    def leaf(path):
        parts = [np.asarray(tensors[name]) for name, _ in plan[path]]
        if path.endswith(("attention.qkv", "attention.qkv_bias")):
            array = _join_qkv(config, *parts)
        elif "gate_up" in path:
            array = np.stack(parts)
        else:
            (array,) = parts
        return jnp.asarray(array, dtype)

    paths, structure = _paths(config)
    return jax.tree_util.tree_unflatten(structure, [leaf(p) for p in paths])


def tensors_from_params(
    config: TransformerConfig, params: Params
) -> dict[str, np.ndarray]:
    """The inverse: tensors under their Hugging Face names, in the dtype of `params`."""
    plan, tensors = _plan(config), {}
    paths, _ = _paths(config)
    for path, array in zip(paths, jax.tree.leaves(params), strict=True):
        array = np.asarray(array)
        if path.endswith(("attention.qkv", "attention.qkv_bias")):
            parts = _part_qkv(config, array)
        else:
            parts = list(array) if "gate_up" in path else [array]
        for (name, _), part in zip(plan[path], parts, strict=True):
            tensors[name] = np.ascontiguousarray(part)
    return tensors
