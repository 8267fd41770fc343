"""Closed-form weights and loop-by-loop float64 models: recorded numbers without files.

The models are written one position and one head at a time, with no cache and no mask:
what a query sees is the list of rows it is given.
"""

import jax
import jax.numpy as jnp
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


def llama(tensor, config):
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
    params["head"] = tensor("lm_head.weight", (c.vocab_size, D))
    return params


def attention_of(tensor, name, D, H, K, E, qk_norm):
    q = tensor(name + "q_proj.weight", (H * E, D)).reshape(K, H // K, E, D)
    k = tensor(name + "k_proj.weight", (K * E, D)).reshape(K, 1, E, D)
    v = tensor(name + "v_proj.weight", (K * E, D)).reshape(K, 1, E, D)
    params = {"qkv": np.concatenate([q, k, v], axis=1)}
    params["out"] = tensor(name + "o_proj.weight", (D, H * E))
    if qk_norm:
        params["q_norm"] = {"scale": tensor(name + "q_norm.weight", (E,))}
        params["k_norm"] = {"scale": tensor(name + "k_norm.weight", (E,))}
    return params


def mlp_of(tensor, name, D, F):
    gate = tensor(name + "gate_proj.weight", (F, D))
    up = tensor(name + "up_proj.weight", (F, D))
    down = tensor(name + "down_proj.weight", (D, F))
    return {"gate_up": np.stack([gate, up]), "down": down}


def counted(first, **formula):
    """`tensor` for `llama`: numbers the tensors in the order they are asked for."""
    number = iter(range(first, first + 10_000))

    def tensor(name, shape):
        if name.endswith("norm.weight"):
            return 1 + waves(next(number), shape, **formula | {"factor": 0.1})
        return waves(next(number), shape, **formula)

    return tensor


def to_jax(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def rope(x, position, theta):
    half = len(x) // 2
    angle = position * theta ** (-np.arange(half) / half)
    first, second = x[:half], x[half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin])


def attend(queries, keys, values, out, group):
    """One position: queries [H E], keys and values a list of [K E] rows."""
    heads = []
    for h, q in enumerate(queries):
        scores = np.array([q @ k[h // group] for k in keys]) / np.sqrt(len(q))
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        heads.append(sum(w * v[h // group] for w, v in zip(weights, values)))  # noqa: B905
    return out @ np.concatenate(heads)


def mlp(x, p):
    gate, up = p["gate_up"]
    return p["down"] @ (silu(gate @ x) * (up @ x))


def decode(params, config, tokens):
    """A Llama or Qwen3 decoder: the states of every layer and the logits, [T ...]."""
    c, group = config, config.num_heads // config.num_kv_heads
    x = [params["embed"][t] for t in tokens]
    states = [np.array(x)]
    for i in range(c.num_layers):
        layer, rows = params[f"layer_{i}"], []
        p, keys, values = layer["attention"], [], []
        for t in range(len(tokens)):
            a = rms(x[t], layer["input_norm"]["scale"], c.norm_eps)
            qkv = p["qkv"] @ a  # [K, group + 2, E]
            q, k = list(qkv[:, :group].reshape(c.num_heads, -1)), list(qkv[:, group])
            if c.qk_norm:
                q = [rms(h, p["q_norm"]["scale"], c.norm_eps) for h in q]
                k = [rms(h, p["k_norm"]["scale"], c.norm_eps) for h in k]
            keys.append([rope(h, t, c.rope.theta) for h in k])
            values.append(qkv[:, group + 1])
            q = [rope(h, t, c.rope.theta) for h in q]
            y = x[t] + attend(q, keys, values, p["out"], group)
            y = y + mlp(rms(y, layer["post_norm"]["scale"], c.norm_eps), layer["mlp"])
            rows.append(y)
        x = rows
        states.append(np.array(x))
    hidden = np.array([rms(row, params["norm"]["scale"], c.norm_eps) for row in x])
    states[-1] = hidden
    return states, hidden @ params["head"].T
