"""Hugging Face configs and tensors to ours and back.

Facts: `transformers` 5.24 modelling files of llama, qwen2, qwen3, deepseek_v3, gemma3
and gemma4, and the configs of the released models. Everything in a file is either read
or refused by its name. What is a family's own stands in `deepseek.py` and `gemma.py`.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax import sharding
from specjax.gemma import GemmaConfig
from specjax.layers import Rope
from specjax.mla import DeepSeekConfig
from specjax.targets import deepseek, gemma
from specjax.targets.base import Leaf
from specjax.targets.llama import Llama
from specjax.transformer import TransformerConfig
from specjax.typing import Params

FAMILIES = ("llama", "qwen2", "qwen3", "deepseek_v3", *gemma.FAMILIES)
ORIGINAL = "original_max_position_embeddings"
ROPE_KEYS = {  # rope type -> keys that it needs, keys that have defaults
    "linear": (("factor",), ()),
    "proportional": (("partial_rotary_factor",), ("factor",)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", ORIGINAL), ()),
    "yarn": (
        (),
        ("factor", ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "truncate"),
    ),
}


def config_from_hf(config: Mapping[str, Any]) -> TransformerConfig:
    """Reads config.json; keys that are absent take the family's own defaults."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise NotImplementedError(
            f"model_type {family!r} is not supported; known: {', '.join(FAMILIES)}."
        )
    _refuse_quantised(config)
    if family in gemma.FAMILIES:
        try:
            return gemma.config_from_hf(config, _rope)
        except KeyError as error:
            raise ValueError(
                f"config.json of a {family} model lacks {error.args[0]}."
            ) from None
    _refuse(config)
    if family == "deepseek_v3":
        return _deepseek(config)
    bias = bool(config.get("attention_bias", False))
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
            qkv_bias=family == "qwen2" or bias,
            out_bias=family != "qwen2" and bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_positions=_max_positions(config),
            windows=_windows(config, layers),
        )
    except KeyError as error:
        raise ValueError(
            f"config.json of a {family} model lacks {error.args[0]}."
        ) from None


def _deepseek(config: Mapping[str, Any]) -> DeepSeekConfig:
    try:
        plain, all_dim = deepseek.without_mscale(config)
        return deepseek.config_from_hf(
            config, _rope(plain), all_dim, _max_positions(config)
        )
    except KeyError as error:
        raise ValueError(
            f"config.json of a deepseek_v3 model lacks {error.args[0]}."
        ) from None


def target_of(config: TransformerConfig) -> Llama:
    """The target that a config describes."""
    if isinstance(config, DeepSeekConfig):
        return deepseek.DeepSeek(config)
    if isinstance(config, GemmaConfig):
        return gemma.Gemma(config)
    return Llama(config)


def _refuse_quantised(config: Mapping[str, Any]) -> None:
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise NotImplementedError(
            f"weights quantised by {method!r} are not read; load the plain ones."
        )


def _refuse(config: Mapping[str, Any]) -> None:
    """Names what changes the forward pass and is not built here."""
    rope = config.get("rope_parameters") or {}
    if nested := [k for k, v in rope.items() if isinstance(v, Mapping)]:
        raise NotImplementedError(
            f"rope_parameters per layer type ({', '.join(nested)}) are not supported; "
            "only one set for all layers is."
        )
    for key, value, only in (
        ("hidden_act", config.get("hidden_act"), "silu"),
        ("rope_interleaved", config.get("rope_interleaved"), False),
        ("partial_rotary_factor", config.get("partial_rotary_factor"), 1.0),
        ("partial_rotary_factor", rope.get("partial_rotary_factor"), 1.0),
    ):
        if value not in (None, only):
            raise NotImplementedError(
                f"{key} {value!r} is not supported; only {only!r} is."
            )


def _max_positions(config: Mapping[str, Any]) -> int:
    default = 2048 if config["model_type"] == "llama" else 32768
    return config.get("max_position_embeddings", default)


def _rope(config: Mapping[str, Any]) -> Rope:
    """Both spellings: rope_parameters, and rope_theta with rope_scaling."""
    nested = dict(config.get("rope_parameters") or {})
    scaling = nested or dict(config.get("rope_scaling") or {})
    theta = nested.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(theta=float(theta))
    if kind not in ROPE_KEYS:
        raise NotImplementedError(
            f"rope type {kind!r} is not supported; known: default, "
            f"{', '.join(ROPE_KEYS)}."
        )
    if scaling.get("mscale") or scaling.get("mscale_all_dim"):
        raise NotImplementedError(
            "yarn with mscale is not supported; give its attention_factor instead."
        )
    required, optional = ROPE_KEYS[kind]
    for key in required:
        if scaling.get(key) is None:
            raise KeyError(f"{key} of rope type {kind!r}")
    fields: dict[str, Any] = {k: scaling[k] for k in required}
    fields |= {k: scaling[k] for k in optional if scaling.get(k) is not None}
    if kind == "proportional":
        fields["partial"] = fields.pop("partial_rotary_factor")
    elif kind != "linear":
        original = int(fields.pop(ORIGINAL, _max_positions(config)))
        fields["original_max_position"] = original
        fields.setdefault("factor", _max_positions(config) / original)
    for key in set(fields) - {"original_max_position", "truncate"}:
        fields[key] = float(fields[key])
    return Rope(theta=float(theta), scaling=kind, **fields)


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Sliding layers of a Qwen config that turns them on; () where all see all."""
    kinds = config.get("layer_types") or []
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise NotImplementedError(f"layer type {unknown.pop()!r} is not supported.")
    if not config.get("use_sliding_window"):
        if "sliding_attention" in kinds:
            raise ValueError(
                "layer_types has sliding layers but use_sliding_window is off; "
                "config.json must say one or the other."
            )
        return ()
    if config["model_type"] == "llama":
        raise NotImplementedError("use_sliding_window is not supported in llama.")
    window = config.get("sliding_window", 4096)
    if kinds:
        slides = [kind == "sliding_attention" for kind in kinds]
    else:
        slides = [i >= config.get("max_window_layers", 28) for i in range(layers)]
    return tuple(window if s else None for s in slides) if any(slides) else ()


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a stack, in the older spelling that every reader knows."""
    c = config
    if isinstance(c, DeepSeekConfig):
        return deepseek.config_to_hf(c, _rope_to_hf(c.rope))
    if isinstance(c, GemmaConfig):
        return _checked(gemma.config_to_hf(c, _rope_parameters), c)
    family = "qwen3" if c.qk_norm else "llama"
    if c.qkv_bias and not c.out_bias:
        family = "qwen2"
    values: dict[str, Any] = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_width,
        "intermediate_size": c.mlp_width,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope.theta,
        "rope_scaling": _rope_to_hf(c.rope),
        "tie_word_embeddings": c.tie_embeddings,
        "max_position_embeddings": c.max_positions,
        "attention_bias": c.out_bias,
        "mlp_bias": c.mlp_bias,
    }
    if c.windows:
        kinds = ["sliding_attention" if w else "full_attention" for w in c.windows]
        values |= {
            "use_sliding_window": True,
            "sliding_window": next(w for w in c.windows if w),
            "layer_types": kinds,
        }
    return _checked(values, c)


def _checked(values: dict[str, Any], config: TransformerConfig) -> dict[str, Any]:
    """A config.json, or the error that it does not say what the config says."""
    if config_from_hf(values) != config:
        raise NotImplementedError(
            f"no {values['model_type']} config.json says what {config} says: its "
            "biases, norms or windows are not those of any Hugging Face family."
        )
    return values


def _rope_parameters(rope: Rope) -> dict[str, Any]:
    """The newer spelling, which has the base among the parameters."""
    scaling = _rope_to_hf(rope) or {"rope_type": "default"}
    return {"rope_theta": rope.theta} | scaling


def _rope_to_hf(rope: Rope) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    required, optional = ROPE_KEYS[rope.scaling]
    known = dataclasses.asdict(rope)
    known[ORIGINAL] = rope.original_max_position
    known["partial_rotary_factor"] = rope.partial
    return {"rope_type": rope.scaling} | {k: known[k] for k in (*required, *optional)}


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


def _leaves(config: TransformerConfig) -> dict[str, Leaf]:
    """Every leaf of the parameters with how stored tensors make it up."""
    if isinstance(config, DeepSeekConfig):
        return deepseek.plan(config)
    if isinstance(config, GemmaConfig):
        return gemma.plan(config)
    leaves = {}
    for path, sources in _plan(config).items():
        leaves[path] = Leaf(sources)
        if path.endswith(("attention.qkv", "attention.qkv_bias")):
            leaves[path] = Leaf(
                sources,
                lambda parts: _join_qkv(config, *parts),
                lambda array: _part_qkv(config, array),
            )
        elif "gate_up" in path:
            leaves[path] = Leaf(sources, np.stack, list)
    return leaves


def params_from_tensors(
    config: TransformerConfig,
    tensors: Mapping[str, Any],
    dtype: Any,
    mesh: Mesh | None = None,
    runs: Sequence[tuple[int, int]] = (),
) -> Params:
    """Builds the parameter tree; names every tensor that is missing or not read.

    The layers of `runs`, first and end, are stacked.
    """
    if isinstance(config, GemmaConfig):
        tensors = gemma.text_tensors(tensors)
    ignored = {n for n in tensors if n.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        ignored |= {"lm_head.weight"} & set(tensors)  # the flag rules over the file
    if isinstance(config, DeepSeekConfig):
        ignored |= {n for n in tensors if deepseek.is_module(config, n)}
    if isinstance(config, GemmaConfig):
        ignored |= gemma.unused(config)
    return _read(_leaves(config), tensors, dtype, ignored, mesh, runs)


def module_params(
    config: DeepSeekConfig, tensors: Mapping[str, Any], dtype: Any
) -> Params:
    """Parameters of the MTP modules that a target's file holds; {} if it holds none.

    The tables that a module's layer may carry must be the target's own.
    """
    found, k = {}, 1
    last = config.num_layers
    while f"model.layers.{last + k - 1}.eh_proj.weight" in tensors:
        name = f"model.layers.{last + k - 1}."
        mine = {n: t for n, t in tensors.items() if n.startswith(name)}
        for copy, table in (
            ("embed_tokens.weight", "model.embed_tokens.weight"),
            ("shared_head.head.weight", "lm_head.weight"),
        ):
            stored = mine.pop(name + copy, None)
            own = tensors.get(table, tensors["model.embed_tokens.weight"])
            if stored is not None and not np.array_equal(stored, own):
                raise NotImplementedError(
                    f"{name}{copy} differs from {table}; only a module that shares the "
                    "target's tables is read."
                )
        found[f"module_{k}"] = _read(
            deepseek.module_plan(config, k), mine, dtype, set()
        )
        k += 1
    return found


def assistant(
    config: Mapping[str, Any], tensors: Mapping[str, Any], dtype: Any
) -> tuple[dict[str, Any], Params]:
    """Fields and parameters of the drafter in a Gemma 4 assistant's files."""
    _refuse_quantised(config)
    try:
        layers = gemma.assistant_config(config, _rope)
    except KeyError as error:
        raise ValueError(
            f"config.json of an assistant lacks {error.args[0]}."
        ) from None
    unified = "unified" in config["model_type"]
    width = config.get("backbone_hidden_size", 3840 if unified else 1536)
    fields: dict[str, Any] = {"config": layers, "target_width": width}
    if config.get("use_ordered_embeddings", False):
        order = tensors.get("masked_embedding.token_ordering")
        if order is None:
            raise ValueError(
                "config.json says use_ordered_embeddings but the weights lack "
                "masked_embedding.token_ordering: which tokens a cluster holds is lost."
            )
        fields |= {
            "order": tuple(np.asarray(order).astype(int).tolist()),
            "num_clusters": config.get("num_centroids", 2048),
            "num_scored": config.get("centroid_intermediate_top_k", 32),
        }
    leaves = gemma.assistant_plan(layers, width, fields.get("num_clusters", 0))
    ignored = {"lm_head.weight", "masked_embedding.token_ordering"} & set(tensors)
    return fields, _read(leaves, tensors, dtype, ignored)


def _read(
    leaves: Mapping[str, Leaf],
    tensors: Mapping[str, Any],
    dtype: Any,
    ignored: set[str],
    mesh: Mesh | None = None,
    runs: Sequence[tuple[int, int]] = (),
) -> Params:
    """The tree of these leaves; names what is missing, left over or misshapen."""
    wanted = dict(pair for leaf in leaves.values() for pair in leaf.sources)
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
    params: Params = {}
    for path, layers in _stacked(leaves, runs).items():
        *parents, last = names = path.split(".")
        at = params
        for parent in parents:
            at = at.setdefault(parent, {})

        def read(leaf):
            return leaf.join([np.asarray(tensors[name]) for name, _ in leaf.sources])

        kind = layers[0].dtype or dtype
        if sharding.STACKED in parents:
            reads = [functools.partial(read, leaf) for leaf in layers]
            at[last] = sharding.put_layers(names, reads, kind, mesh)
        elif mesh is None:
            at[last] = jnp.asarray(read(layers[0]), kind)
        else:
            at[last] = sharding.put(names, read(layers[0]), kind, mesh)
    return params


def _stacked(
    leaves: Mapping[str, Leaf], runs: Sequence[tuple[int, int]]
) -> dict[str, list[Leaf]]:
    """Leaves by the path of the array they make: each alone, or those of a run."""
    run_of = {f"layer_{i}": n for n, run in enumerate(runs) for i in range(*run)}
    found: dict[str, list[Leaf]] = {}
    for path, leaf in leaves.items():
        layer, _, rest = path.partition(".")
        if layer in run_of:
            path = f"{sharding.STACKED}.{run_of[layer]}.{rest}"
        found.setdefault(path, []).append(leaf)
    return found


def tensors_from_params(
    config: TransformerConfig, params: Params
) -> dict[str, np.ndarray]:
    """The inverse: tensors under their Hugging Face names, in the dtype of `params`."""
    tensors = {}
    for path, leaf in _leaves(config).items():
        array: Any = params
        for key in path.split("."):
            array = array[key]
        parts = leaf.part(np.asarray(array))
        for (name, _), part in zip(leaf.sources, parts, strict=True):
            tensors[name] = np.ascontiguousarray(part)
    return tensors
