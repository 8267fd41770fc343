"""Trains the tiny target on the shards of `data.py` and exports it as a HF folder.

A plain loop: Muon and Adam on every token of packed rows, documents hidden from each
other and each counted from position 0, as a prompt is at inference. The schedule
follows the wall-clock, because the machine is shared: `minutes` is the whole run, the
learning rate warms up, stays, and decays linearly over the last `decay` of the time;
phase 2 of the data starts at `switch`. A killed run resumes from its last checkpoint.

    python train.py --data runs/tiny --out runs/tiny/run --minutes 55
"""

import dataclasses
import functools
import json
import pathlib
import pickle
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
import tyro

from specjax.layers import Rope
from specjax.targets import Pretrained, Tokenizer, save_pretrained
from specjax.targets.llama import Llama
from specjax.transformer import TransformerConfig

TINY = TransformerConfig(
    vocab_size=2048,
    width=160,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_width=32,
    mlp_width=448,
    rope=Rope(10_000.0),
    norm_eps=1e-5,
    tie_embeddings=True,
    max_positions=1024,
)
TEMPLATE = """\
{% for message in messages %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|assistant|>\\n' }}
{%- endif %}
"""


@dataclasses.dataclass(frozen=True)
class Config:
    data: pathlib.Path
    out: pathlib.Path
    minutes: float = 55.0
    tokens: int = 2048  # of a step
    peak: float = 4e-3  # learning rate
    warmup: float = 0.02  # share of the minutes
    decay: float = 0.4
    switch: float = 0.6
    weight_decay: float = 0.05
    save_every: float = 4.0  # minutes
    preview_every: float = 10.0
    seed: int = 0


def learning_rate(config: Config, progress: float) -> float:
    up = min(1.0, progress / config.warmup)
    down = min(1.0, max(0.0, (1 - progress) / config.decay))
    return config.peak * up * max(down, 0.01)


def token_losses(params, tokens, segments):
    """Sum and number of next-token losses within the documents of packed rows [B T]."""
    T = tokens.shape[1]
    index = jnp.arange(T)
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    first = jax.lax.cummax(jnp.where(starts, index[None], 0), axis=1)
    visible = (segments[:, :, None] == segments[:, None]) & (index[:, None] >= index)[
        None
    ]
    target = Llama(TINY)
    out = target(params, tokens, ancestors=visible, depths=index[None] - first)
    logits = jnp.dot(
        out.hidden[:, :-1], params["embed"].T, preferred_element_type=jnp.float32
    )
    counted = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.sum(jnp.where(counted, losses, 0.0)), jnp.sum(counted)


def mean_loss(params, tokens, segments):
    total, count = token_losses(params, tokens, segments)
    return total / count


def optimiser(config: Config, rate: float | jax.Array) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) on the matrices of the layers, Adam on the rest.

    Each matrix is orthogonalised alone, its update scaled to Adam's usual size
    (Liu et al. 2025, arXiv:2502.16982), so that both share one learning rate.
    """
    axes = {"qkv": (0, 1, 2), "out": (0,), "gate_up": (1,), "down": (0,)}
    numbers = optax.contrib.MuonDimensionNumbers

    def spec(path, leaf):
        out = axes.get(path[-1].key)
        return out and numbers(reduction_axis=leaf.ndim - 1, output_axis=out)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            rate,
            weight_decay=config.weight_decay,
            adam_b2=0.95,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=lambda params: (
                jax.tree_util.tree_map_with_path(spec, params)
            ),
        ),
    )


@functools.partial(jax.jit, static_argnames="config", donate_argnums=(1, 2))
def train_step(config: Config, params, state, tokens, segments, rate):
    loss, gradients = jax.value_and_grad(mean_loss)(params, tokens, segments)
    updates, state = optimiser(config, rate).update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def init(seed: int):
    """Normal(0.02), the two matrices that write to the residual stream scaled down."""
    params = Llama(TINY).init(jax.random.key(seed))
    scale = (2 * TINY.num_layers) ** -0.5

    def shrink(path, leaf):
        return leaf * scale if path[-1].key in ("out", "down") else leaf

    return jax.tree_util.tree_map_with_path(shrink, params)


def perplexities(params, folder: pathlib.Path, batch: int = 8) -> dict[str, float]:
    """Held-out perplexity per token of each domain."""
    losses = jax.jit(token_losses)
    found = {}
    for path in sorted(folder.glob("held_out_*.npz")):
        shard = np.load(path)
        fill = -len(shard["tokens"]) % batch  # empty rows count nothing
        pad = lambda x, fill=fill: np.pad(x, ((0, fill), (0, 0))).astype(np.int32)
        tokens, segments = pad(shard["tokens"]), pad(shard["segments"])
        sums = [
            losses(params, tokens[i : i + batch], segments[i : i + batch])
            for i in range(0, len(tokens), batch)
        ]
        total, count = np.sum(jax.device_get(sums), axis=0)
        found[path.stem.removeprefix("held_out_")] = float(np.exp(total / count))
    return found


def export(folder: pathlib.Path, params, data: pathlib.Path) -> None:
    """The HF folder, bfloat16; answers end at <|end|> (4), raw text at id 0."""
    backend = tokenizers.Tokenizer.from_file(str(data / "tokenizer.json"))
    tokenizer = Tokenizer(backend, TEMPLATE, "<|endoftext|>", "<|end|>")
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    model = Pretrained("tiny", Llama(TINY), params, tokenizer, (0, 4))
    save_pretrained(folder, model)


def save(path: pathlib.Path, record: dict) -> None:
    """Whole or not at all: a run killed while saving keeps its last checkpoint."""
    path.with_suffix(".part").write_bytes(pickle.dumps(jax.device_get(record)))
    path.with_suffix(".part").rename(path)


def main(config: Config) -> None:
    config.out.mkdir(parents=True, exist_ok=True)
    phases = [np.load(config.data / f"phase{i}.npz") for i in (1, 2)]
    phases = [(p["tokens"], p["segments"]) for p in phases]
    checkpoint = config.out / "checkpoint.pkl"
    if checkpoint.exists():
        run = pickle.loads(checkpoint.read_bytes())
    else:
        params = init(config.seed)
        state = optimiser(config, config.peak).init(params)
        run = {"params": params, "state": state, "step": 0, "rows": [0, 0]}
        run |= {"tokens": 0, "spent": 0.0}
    began = time.time() - run["spent"]
    log = (config.out / "log.jsonl").open("a")
    saved = previewed = time.time()

    while (progress := (time.time() - began) / (60 * config.minutes)) < 1:
        phase = int(progress >= config.switch)
        tokens, segments = phases[phase]
        batch = config.tokens // tokens.shape[1]
        index = (run["rows"][phase] + np.arange(batch)) % len(tokens)
        run["rows"][phase] += batch
        rate = learning_rate(config, progress)
        run["params"], run["state"], loss = train_step(
            config,
            run["params"],
            run["state"],
            tokens[index].astype(np.int32),
            segments[index].astype(np.int32),
            jnp.float32(rate),
        )
        run["step"] += 1
        run["tokens"] += int(np.count_nonzero(segments[index]))
        run["spent"] = time.time() - began
        if run["step"] % 10 == 0:
            record = {k: run[k] for k in ("step", "tokens", "spent")}
            record |= {"loss": float(loss), "rate": rate, "phase": phase + 1}
            log.write(json.dumps(record) + "\n")
            log.flush()
        if time.time() - saved > 60 * config.save_every:
            saved = time.time()
            save(checkpoint, run)
        if time.time() - previewed > 60 * config.preview_every:
            previewed = time.time()
            export(config.out / "preview", run["params"], config.data)

    save(checkpoint, run)
    export(config.out / "final", run["params"], config.data)
    results = {k: run[k] for k in ("step", "rows", "tokens", "spent")}
    results["perplexity"] = perplexities(run["params"], config.data)
    (config.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
