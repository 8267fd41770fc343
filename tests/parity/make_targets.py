"""Records what `transformers` says, for tests/test_targets.py. Needs torch; run apart:

    python -m venv torch-venv
    torch-venv/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors
    torch-venv/bin/python tests/parity/make_targets.py            # targets.json, .npz
    python -c "import pathlib; from specjax import targets as t; \
        t.save_pretrained(pathlib.Path('smollm2'), t.load('smollm2-135m'))"
    torch-venv/bin/python tests/parity/make_targets.py smollm2    # smollm2_greedy.json

Tiny models have the weights of `folders.fill`; the real one those of its GGUF file.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import folders  # noqa: E402

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e3,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama3_biases": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_parameters": LLAMA3,
    },
    "linear_tied": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    },
    "yarn": {"model_type": "qwen3", "head_dim": 16, "rope_parameters": YARN},
    "qwen2_window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3_biases": {
        "model_type": "qwen3",
        "head_dim": 16,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}
QUESTIONS = (
    "Write a Python function that returns the factorial of n.",
    "Explain why the sky is blue to a child.",
    "What is 17 times 23? Show the steps.",
    "Give me three names for a small grey cat.",
    "Translate 'good morning' into French and Spanish.",
    "What should I pack for a week of hiking in the rain?",
    "Sort the list [5, 2, 9, 1] in Python and explain the code.",
    "Who wrote Romeo and Juliet, and when?",
    "Tom has 12 apples and gives away a third of them. How many are left?",
    "Write a haiku about the first snow.",
)


def tiny() -> None:
    recorded, arrays = {}, {}
    ids = np.random.default_rng(0).integers(0, TINY["vocab_size"], 12)
    for name, fields in CASES.items():
        fields = TINY | fields
        config = transformers.AutoConfig.for_model(**fields)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        state = model.state_dict()
        if config.tie_word_embeddings:
            state.pop("lm_head.weight")
        shapes = {n: tuple(t.shape) for n, t in state.items()}
        weights = {n: torch.from_numpy(t) for n, t in folders.fill(shapes).items()}
        model.load_state_dict(weights, strict=False)
        model.tie_weights()
        with torch.no_grad():
            out = model(torch.from_numpy(ids[None]), output_hidden_states=True)
        arrays[f"{name}.logits"] = out.logits[0].numpy()
        arrays[f"{name}.hidden"] = torch.cat(out.hidden_states)[:, :, :4].numpy()
        recorded[name] = {"config": json.loads(config.to_json_string(use_diff=False))}
        recorded[name]["shapes"] = shapes
    kept = {"versions": versions(), "ids": ids.tolist(), "cases": recorded}
    (HERE / "targets.json").write_text(json.dumps(kept, separators=(",", ":")) + "\n")
    np.savez_compressed(HERE / "targets.npz", **arrays)


def smollm2(folder: str, new_tokens: int = 64) -> None:
    """Greedy tokens by transformers, with the gap of the two largest logits at each."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    rows = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        given, cache, tokens, gaps = torch.tensor([prompt]), None, [], []
        with torch.no_grad():
            for _ in range(new_tokens):
                out = model(given, past_key_values=cache, use_cache=True)
                cache, last = out.past_key_values, out.logits[0, -1]
                if not tokens:
                    first = [round(float(x), 5) for x in last[:8]]
                best = torch.topk(last, 2)
                tokens.append(int(best.indices[0]))
                gaps.append(round(float(best.values[0] - best.values[1]), 5))
                given = best.indices[:1][None]
        print(question, min(gaps))
        rows.append({"question": question, "prompt": prompt, "first_logits": first})
        rows[-1] |= {"tokens": tokens, "gaps": gaps}
    kept = {"versions": versions(), "rows": rows}
    path = HERE / "smollm2_greedy.json"
    path.write_text(json.dumps(kept, separators=(",", ":")) + "\n")


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__}


if __name__ == "__main__":
    smollm2(sys.argv[1]) if len(sys.argv) > 1 else tiny()
