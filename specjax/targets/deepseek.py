"""Targets of the DeepSeek-V3 form: latent attention and experts (`mla.py`).

Names and shapes follow the released weights. In a file the rotary rows of queries and
of the shared key alternate between the two halves of a pair; here the halves lie behind
each other, so those rows are reordered on the way in and back on the way out.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax import mla
from specjax.kv_cache import KVCache
from specjax.layers import Rope
from specjax.mla import DeepSeekConfig
from specjax.targets.base import Leaf
from specjax.targets.llama import Llama
from specjax.transformer import Output
from specjax.typing import Params, PRNGKey

YARN = ("mscale", "mscale_all_dim")


@dataclasses.dataclass(frozen=True)
class DeepSeek(Llama):
    """See `targets.base.Target`."""

    config: DeepSeekConfig

    def __post_init__(self):
        if self.attention not in (None, "reference"):
            raise NotImplementedError(
                f"attention={self.attention!r}: no kernel attends to latents. Use None."
            )

    def init(self, key: PRNGKey) -> Params:
        """Random float32 weights; under `jax.eval_shape` only their shapes."""
        tokens = jnp.zeros((1, 1), jnp.int32)
        return mla.Stack(self.config).init(key, tokens)["params"]

    def init_cache(self, batch_size: int, size: int, dtype=jnp.float32) -> KVCache:
        return mla.init_cache(
            self.config, self.config.num_layers, batch_size, size, dtype
        )

    def __call__(self, params: Params, tokens, cache=None, **block) -> Output:
        return mla.Stack(self.config).apply({"params": params}, tokens, cache, **block)  # pyright: ignore[reportReturnType]


def without_mscale(config: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """The config with YaRN's two scales as the attention factor, and the second one."""
    config, all_dim = dict(config), 0.0
    for key in ("rope_parameters", "rope_scaling"):
        rope = dict(config.get(key) or {})
        one, all_ = (rope.pop(name, None) or 0.0 for name in YARN)
        if one and all_ and rope.get("attention_factor") is None:
            factor = rope.get("factor") or (
                config["max_position_embeddings"]
                / rope["original_max_position_embeddings"]
            )
            g = lambda m, f=factor: 0.1 * m * math.log(f) + 1 if f > 1 else 1.0
            rope["attention_factor"] = g(one) / g(all_)
        all_dim = float(all_) or all_dim
        config[key] = rope or None
    return config, all_dim


def config_from_hf(
    config: Mapping[str, Any], rope: Rope, mscale_all_dim: float, max_positions: int
) -> DeepSeekConfig:
    """Reads config.json, of which the positions are read already."""
    for key, only in (
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
        ("rope_interleave", True),
        ("attention_bias", False),
    ):
        if config.get(key, only) != only:
            raise NotImplementedError(
                f"{key} {config[key]!r} is not supported; only {only!r} is."
            )
    return DeepSeekConfig(
        vocab_size=config["vocab_size"],
        width=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=1,
        head_width=config["qk_rope_head_dim"],
        mlp_width=config["intermediate_size"],
        rope=rope,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_positions=max_positions,
        q_rank=config["q_lora_rank"],
        kv_rank=config["kv_lora_rank"],
        nope_width=config["qk_nope_head_dim"],
        value_width=config["v_head_dim"],
        num_dense_layers=config["first_k_dense_replace"],
        num_experts=config["n_routed_experts"],
        experts_per_token=config["num_experts_per_tok"],
        expert_width=config["moe_intermediate_size"],
        num_shared_experts=config["n_shared_experts"],
        num_groups=config["n_group"],
        groups_per_token=config["topk_group"],
        routed_scale=float(config["routed_scaling_factor"]),
        normalise_experts=bool(config.get("norm_topk_prob", True)),
        mscale_all_dim=mscale_all_dim,
    )


def config_to_hf(config: DeepSeekConfig, rope: dict[str, Any] | None):
    """The config.json of a stack; the inverse of `config_from_hf`."""
    c = config
    if rope is not None:
        rope = rope | {"mscale_all_dim": c.mscale_all_dim}
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_heads,
        "intermediate_size": c.mlp_width,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope.theta,
        "rope_scaling": rope,
        "rope_interleave": True,
        "tie_word_embeddings": c.tie_embeddings,
        "max_position_embeddings": c.max_positions,
        "attention_bias": False,
        "q_lora_rank": c.q_rank,
        "kv_lora_rank": c.kv_rank,
        "qk_nope_head_dim": c.nope_width,
        "qk_rope_head_dim": c.head_width,
        "v_head_dim": c.value_width,
        "first_k_dense_replace": c.num_dense_layers,
        "n_routed_experts": c.num_experts,
        "num_experts_per_tok": c.experts_per_token,
        "moe_intermediate_size": c.expert_width,
        "n_shared_experts": c.num_shared_experts,
        "n_group": c.num_groups,
        "topk_group": c.groups_per_token,
        "routed_scaling_factor": c.routed_scale,
        "norm_topk_prob": c.normalise_experts,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _halves(x: np.ndarray, fixed: int, axis: int) -> np.ndarray:
    """Rows past the first `fixed`, even ones then odd ones."""
    head, tail = np.split(x, [fixed], axis)
    pairs = np.moveaxis(tail, axis, 0)
    order = np.concatenate([pairs[0::2], pairs[1::2]])
    return np.concatenate([head, np.moveaxis(order, 0, axis)], axis)


def _pairs(x: np.ndarray, fixed: int, axis: int) -> np.ndarray:
    """The inverse of `_halves`."""
    head, tail = np.split(x, [fixed], axis)
    rows = np.moveaxis(tail, axis, 0)
    pairs = np.stack(np.split(rows, 2), axis=1).reshape(rows.shape)
    return np.concatenate([head, np.moveaxis(pairs, 0, axis)], axis)


def _gates(name: str, F: int, D: int) -> dict[str, Leaf]:
    """A dense gated MLP under a stored name."""
    gate_up = [(f"{name}.{x}_proj.weight", (F, D)) for x in ("gate", "up")]
    return {
        "gate_up": Leaf(gate_up, np.stack, list),
        "down": Leaf([(f"{name}.down_proj.weight", (D, F))]),
    }


def _attention(c: DeepSeekConfig, name: str) -> dict[str, Leaf]:
    H, D, R, En, Er = c.num_heads, c.width, c.kv_rank, c.nope_width, c.head_width
    one = lambda x, *shape: Leaf([(f"{name}.{x}.weight", shape)])

    def heads(x, width, rank, fixed):
        """[H * width, rank] as stored, its rotary rows reordered."""
        return Leaf(
            [(f"{name}.{x}.weight", (H * width, rank))],
            lambda parts: _halves(parts[0].reshape(H, width, rank), fixed, 1),
            lambda array: [_pairs(array, fixed, 1).reshape(H * width, rank)],
        )

    found = {
        "kv_down": Leaf(
            [(f"{name}.kv_a_proj_with_mqa.weight", (R + Er, D))],
            lambda parts: _halves(parts[0], R, 0),
            lambda array: [_pairs(array, R, 0)],
        ),
        "kv_norm.scale": one("kv_a_layernorm", R),
        "kv_up": heads("kv_b_proj", En + c.value_width, R, En + c.value_width),
        "out": one("o_proj", D, H * c.value_width),
    }
    if c.q_rank is None:
        return found | {"q": heads("q_proj", En + Er, D, En)}
    return found | {
        "q_down": one("q_a_proj", c.q_rank, D),
        "q_norm.scale": one("q_a_layernorm", c.q_rank),
        "q_up": heads("q_b_proj", En + Er, c.q_rank, En),
    }


def _experts(c: DeepSeekConfig, name: str) -> dict[str, Leaf]:
    D, F, X = c.width, c.expert_width, c.num_experts
    each = lambda x, *shape: [
        (f"{name}.experts.{e}.{x}_proj.weight", shape) for e in range(X)
    ]

    def join(parts):
        rows = np.concatenate([np.stack(parts[:X]), np.stack(parts[X:])], axis=1)
        return rows.swapaxes(1, 2)

    def part(array):
        return [*array[..., :F].swapaxes(1, 2), *array[..., F:].swapaxes(1, 2)]

    shared = _gates(f"{name}.shared_experts", F * c.num_shared_experts, D)
    return {
        "router": Leaf([(f"{name}.gate.weight", (X, D))]),
        # What only shifts the choice of experts is small beside the scores.
        "router_bias": Leaf(
            [(f"{name}.gate.e_score_correction_bias", (X,))], dtype=jnp.float32
        ),
        "gate_up": Leaf([*each("gate", F, D), *each("up", F, D)], join, part),
        "down": Leaf(
            each("down", D, F),
            lambda parts: np.stack(parts).swapaxes(1, 2),
            lambda array: list(array.swapaxes(1, 2)),
        ),
    } | {f"shared.{x}": leaf for x, leaf in shared.items()}


def _layer(c: DeepSeekConfig, name: str, has_experts: bool) -> dict[str, Leaf]:
    mlp = f"{name}.mlp"
    inner = _experts(c, mlp) if has_experts else _gates(mlp, c.mlp_width, c.width)
    norm = lambda x: Leaf([(f"{name}.{x}_layernorm.weight", (c.width,))])
    attention = _attention(c, f"{name}.self_attn")
    return (
        {"input_norm.scale": norm("input"), "post_norm.scale": norm("post_attention")}
        | {f"attention.{x}": leaf for x, leaf in attention.items()}
        | {f"mlp.{x}": leaf for x, leaf in inner.items()}
    )


def plan(config: DeepSeekConfig) -> dict[str, Leaf]:
    """Our leaf -> the stored tensors that make it up."""
    c, table = config, (config.vocab_size, config.width)
    found = {
        "embed": Leaf([("model.embed_tokens.weight", table)]),
        "norm.scale": Leaf([("model.norm.weight", (c.width,))]),
    }
    if not c.tie_embeddings:
        found["head"] = Leaf([("lm_head.weight", table)])
    for i in range(c.num_layers):
        layer = _layer(c, f"model.layers.{i}", i >= c.num_dense_layers)
        found |= {f"layer_{i}.{x}": leaf for x, leaf in layer.items()}
    return found


def is_module(config: DeepSeekConfig, name: str) -> bool:
    """Whether a stored tensor belongs to a layer past the last: an MTP module."""
    _, _, rest = name.partition("model.layers.")
    number = rest.partition(".")[0]
    return number.isdigit() and int(number) >= config.num_layers


def module_plan(config: DeepSeekConfig, k: int) -> dict[str, Leaf]:
    """Leaves of MTP module k = 1, 2, ..: layer L + k - 1 of the file.

    They are those of `drafters.mtp`. The copies of embedding and head that a file may
    hold there are the target's own tables and are not read.
    """
    c, name = config, f"model.layers.{config.num_layers + k - 1}"
    one = lambda x, *shape: Leaf([(f"{name}.{x}.weight", shape)])
    return {
        "embed_norm.scale": one("enorm", c.width),
        "hidden_norm.scale": one("hnorm", c.width),
        "proj": one("eh_proj", c.width, 2 * c.width),
        "norm.scale": one("shared_head.norm", c.width),
    } | {f"layer.{x}": leaf for x, leaf in _layer(c, name, True).items()}
