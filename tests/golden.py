"""Closed-form weights, so that recorded numbers need no files."""

import numpy as np


def waves(k, shape, *, delta=0.0, factor=0.5, quadratic=0.0):
    """factor * sin(1 + k + 0.7 i + quadratic i^2 + delta), i the row-major index."""
    i = np.arange(np.prod(shape), dtype=np.float64)
    return factor * np.sin(1 + k + 0.7 * i + quadratic * i * i + delta).reshape(shape)


def hashed(n, shape):
    """Uniform in [-1/2, 1/2) from 32-bit integer mixing of the index."""
    x = np.arange(np.prod(shape), dtype=np.uint64) + 7919 * (n + 1)
    x &= 0xFFFFFFFF
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    x ^= x >> 16
    return (x / 2**32 - 0.5).reshape(shape)


def named(name, shape):
    """The tensor that a checkpoint of the DFlash fixture holds under a name."""
    u = hashed(sum((j + 1) * ord(c) for j, c in enumerate(name)), shape)
    return 1 + 0.4 * u if name.endswith("norm.weight") else 0.6 * u


def llama(tensor, config, names=None):
    """Parameters of `Transformer` from tensors in the layout of a torch checkpoint.

    `tensor(name, shape)` is called once a tensor, in the order of the checkpoint.
    """
    c = config
    H, K, E, D, F = c.num_heads, c.num_kv_heads, c.head_width, c.width, c.mlp_width
    params = {"embed": tensor("embed_tokens.weight", (c.vocab_size, D))}
    for i in range(c.num_layers):
        name = f"model.layers.{i}."
        norm = tensor(name + "input_layernorm.weight", (D,))
        attention = attention_of(tensor, name + "self_attn.", D, H, K, E, c.qk_norm)
        post = tensor(name + "post_attention_layernorm.weight", (D,))
        params[f"layer_{i}"] = {
            "input_norm": {"scale": norm},
            "attention": attention,
            "post_norm": {"scale": post},
            "mlp": mlp_of(tensor, name + "mlp.", D, F),
        }
    params["norm"] = {"scale": tensor("model.norm.weight", (D,))}
    params["head"] = tensor("lm_head.weight", (c.vocab_size, D)).T
    return params


def attention_of(tensor, name, D, H, K, E, qk_norm):
    q = tensor(name + "q_proj.weight", (H * E, D)).T.reshape(D, K, H // K, E)
    k = tensor(name + "k_proj.weight", (K * E, D)).T.reshape(D, K, 1, E)
    v = tensor(name + "v_proj.weight", (K * E, D)).T.reshape(D, K, 1, E)
    params = {"qkv": np.concatenate([q, k, v], axis=2)}
    params["out"] = tensor(name + "o_proj.weight", (D, H * E)).T
    if qk_norm:
        params["q_norm"] = {"scale": tensor(name + "q_norm.weight", (E,))}
        params["k_norm"] = {"scale": tensor(name + "k_norm.weight", (E,))}
    return params


def mlp_of(tensor, name, D, F):
    gate = tensor(name + "gate_proj.weight", (F, D)).T
    up = tensor(name + "up_proj.weight", (F, D)).T
    down = tensor(name + "down_proj.weight", (D, F)).T
    return {"gate_up": np.stack([gate, up], axis=1), "down": down}


def counted(first, **formula):
    """`tensor` for `llama`: numbers the tensors in the order they are asked for."""
    number = iter(range(first, first + 10_000))

    def tensor(name, shape):
        if name.endswith("norm.weight"):
            return 1 + waves(next(number), shape, **formula | {"factor": 0.1})
        return waves(next(number), shape, **formula)

    return tensor
