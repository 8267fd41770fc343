"""Records what `transformers` says, for tests/test_deepseek.py. Needs torch; run apart,
in the environment of make_targets.py:

    torch-venv/bin/python tests/parity/make_deepseek.py     # deepseek.json, .npz

Models have the weights of `folders.fill` under the names of the released files, their
MTP modules included, and are read back by transformers itself.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import folders  # noqa: E402

MODULES = 3
BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 10,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "max_position_embeddings": 128,
    "num_nextn_predict_layers": MODULES,
}
CASES = {
    "no_query_rank": {"q_lora_rank": None, "norm_topk_prob": False},
    "yarn": {
        "first_k_dense_replace": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "original_max_position_embeddings": 32,
        },
    },
}


def main() -> None:
    # The class names layer 61 alone, that of the released model.
    mine = [r"model\.layers\.[345]\..*"]
    transformers.DeepseekV3ForCausalLM._keys_to_ignore_on_load_unexpected = mine
    recorded, arrays = {}, {}
    ids = np.random.default_rng(0).integers(0, BASE["vocab_size"], 12)
    for name, fields in CASES.items():
        config = transformers.DeepseekV3Config(**BASE | fields)
        config._attn_implementation = "eager"
        stored = json.loads(config.to_json_string(use_diff=False))
        stored |= {"num_nextn_predict_layers": MODULES}
        stored |= {"architectures": ["DeepseekV3ForCausalLM"]}
        with tempfile.TemporaryDirectory() as folder:
            tensors = folders.fill(folders.deepseek_shapes(stored, MODULES))
            path = folders.write(pathlib.Path(folder) / "m", stored, tensors)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            modules = MtpModel.from_pretrained(model, dtype=torch.float32).eval()
        text = torch.from_numpy(ids[None])
        with torch.no_grad():
            out = model(text, output_hidden_states=True)
            root = out.logits[:, -1:].argmax(-1)
            drafts, logits, _ = modules(
                input_ids=torch.cat([text[:, 1:], root], 1),
                last_hidden_states=out.hidden_states[-1],
                attention_mask=None,
                position_ids=torch.arange(1, 1 + len(ids))[None],
                mtp_cache=MtpCache(config=modules.config),
            )
        arrays[f"{name}.logits"] = out.logits[0].numpy()
        arrays[f"{name}.hidden"] = torch.cat(out.hidden_states)[:, :, :4].numpy()
        arrays[f"{name}.drafts"] = torch.cat([root, drafts], 1)[0].numpy()
        arrays[f"{name}.draft_logits"] = logits[0].numpy()
        recorded[name] = stored
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    kept = {"versions": versions, "ids": ids.tolist(), "cases": recorded}
    (HERE / "deepseek.json").write_text(json.dumps(kept, separators=(",", ":")) + "\n")
    np.savez_compressed(HERE / "deepseek.npz", **arrays)


if __name__ == "__main__":
    main()
