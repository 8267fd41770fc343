"""GGUF files of the llama architecture: config, weights and tokenizer in one file.

GGUF stores the rows of each q and k head interleaved for rotary on pairs (2i, 2i + 1);
they are put back in the half-split order of the Hugging Face files.
"""

import pathlib
from typing import Any, NamedTuple

import numpy as np


class GGUF(NamedTuple):
    """A file's content in the terms of a Hugging Face folder."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]  # float32
    tokens: list[str]
    merges: list[tuple[str, str]]
    special: list[str]  # control tokens, matched whole and skipped in decoding
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None


BLOCK = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
CONTROL = 3  # the token type of control tokens


def read(path: pathlib.Path) -> GGUF:
    """Reads and dequantises a whole file."""
    import gguf

    try:
        reader = gguf.GGUFReader(str(path))
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path} is no whole GGUF file: {error}.") from None

    def field(name: str, default: Any = None) -> Any:
        entry = reader.fields.get(name)
        return default if entry is None else entry.contents()

    architecture = field("general.architecture")
    if architecture != "llama":
        raise NotImplementedError(
            f"{path.name} holds a {architecture!r} model; only llama is read from GGUF."
        )
    if field("llama.rope.scaling.type", "none") != "none":
        raise NotImplementedError(
            f"{path.name} scales its rotary embedding; load the Hugging Face folder."
        )
    kind, rules = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")
    if (kind, rules) != ("gpt2", "smollm"):  # others split text by other rules
        raise NotImplementedError(
            f"{path.name} has a tokenizer of kind {kind!r} with rules {rules!r}; only "
            "'gpt2' with 'smollm' is read from GGUF. Load the Hugging Face folder."
        )

    heads, width = field("llama.attention.head_count"), field("llama.embedding_length")
    kv_heads = field("llama.attention.head_count_kv", heads)
    tokens = field("tokenizer.ggml.tokens")
    tensors = {}
    for tensor in reader.tensors:
        array = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        name = _name(tensor.name, path)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            array = _half_split(array, heads if ".q_proj." in name else kv_heads)
        tensors[name] = array

    config = {
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": width,
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": field("llama.attention.key_length", width // heads),
        "intermediate_size": field("llama.feed_forward_length"),
        "rms_norm_eps": float(field("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(field("llama.rope.freq_base", 10_000.0)),
        "max_position_embeddings": field("llama.context_length"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    token = lambda key: tokens[i] if (i := field(key)) is not None else None
    return GGUF(
        config=config,
        tensors=tensors,
        tokens=tokens,
        merges=[tuple(m.split(" ", 1)) for m in field("tokenizer.ggml.merges")],
        special=[
            t
            for t, kind in zip(tokens, field("tokenizer.ggml.token_type"), strict=True)
            if kind == CONTROL
        ],
        chat_template=field("tokenizer.chat_template"),
        bos_token=token("tokenizer.ggml.bos_token_id"),
        eos_token=token("tokenizer.ggml.eos_token_id"),
    )


def _name(name: str, path: pathlib.Path) -> str:
    if name in TOP:
        return TOP[name]
    kind, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    if kind == "blk" and rest in BLOCK:
        return f"model.layers.{layer}.{BLOCK[rest]}"
    raise ValueError(f"{path.name} holds a tensor {name!r} that this model lacks.")


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row 2j of a head becomes row j, row 2j + 1 becomes row j + E/2."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
