"""Lets SmolLM2-135M-Instruct (Apache-2.0) answer the chat prompts, many rows at once.

A plain sampler and not `specjax.generate`: no drafter is wanted here, rows are many,
and min-p (Nguyen et al. 2024, arXiv:2407.01082) needs no sort of the 49,152 tokens.
Answers are appended to a JSONL file batch by batch; a second call goes on where the
first ended.

    python answers.py --out runs/tiny/answers.jsonl --minutes 22
"""

import dataclasses
import functools
import json
import pathlib
import time

import chat_prompts
import jax
import jax.numpy as jnp
import numpy as np
import tyro

from specjax import targets
from specjax.targets.base import Pretrained, Target

SYSTEM = "You are a helpful assistant. Answer in two or three short, simple sentences."


@dataclasses.dataclass(frozen=True)
class Config:
    out: pathlib.Path
    minutes: float = 22.0  # no batch is started later than this
    batch: int = 64  # prompts
    max_new: int = 112  # tokens
    finished: float = 0.75  # share of ended rows at which a batch stops
    temperature: float = 0.8
    min_p: float = 0.1  # tokens below this share of the likeliest are dropped
    seed: int = 0


@functools.partial(jax.jit, static_argnames=("target", "config", "stop_ids"))
def sample(target: Target, config: Config, stop_ids, params, tokens, lengths, key):
    """Answers of right-padded prompts [B T] as ids [B max_new], -1 after the end."""
    B, T = tokens.shape
    cache = target.init_cache(B, T + config.max_new)
    out = target(params, tokens, cache)
    cache = dataclasses.replace(out.cache, length=lengths)
    hidden = out.hidden[jnp.arange(B), lengths - 1]

    def choose(hidden, key):
        logits = target.logits(params, hidden)
        floor = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(config.min_p)
        logits = jnp.where(logits < floor, -jnp.inf, logits / config.temperature)
        return jax.random.categorical(key, logits).astype(jnp.int32)

    def running(state):
        step, alive = state[0], state[1]
        return (step < config.max_new) & (jnp.mean(~alive) < config.finished)

    def step(state):
        i, alive, hidden, cache, answers = state
        token = choose(hidden, jax.random.fold_in(key, i))
        alive = alive & ~jnp.isin(token, jnp.array(stop_ids))
        answers = answers.at[:, i].set(jnp.where(alive, token, -1))
        out = target(params, token[:, None], cache)
        cache = dataclasses.replace(out.cache, length=out.cache.length + 1)
        return i + 1, alive, out.hidden[:, 0], cache, answers

    start = jnp.full((B, config.max_new), -1, jnp.int32)
    state = (jnp.int32(0), jnp.ones(B, bool), hidden, cache, start)
    _, alive, _, _, answers = jax.lax.while_loop(running, step, state)
    return answers, alive


def encode(model: Pretrained, prompt: str) -> list[int]:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": prompt},
    ]
    return model.tokenizer.chat(messages)


def trim(answer: str, cut: bool) -> str:
    """A cut answer ends at its last whole sentence; "" if it has none."""
    answer = answer.strip()
    if cut:
        end = max(answer.rfind(mark) for mark in (".", "!", "?"))
        answer = answer[: end + 1]
        last = answer.rpartition("\n")[2]
        if last.rstrip(".").isdigit():  # "3." opened a list item that was cut
            answer = answer.rpartition("\n")[0].strip()
    return answer


def main(config: Config) -> None:
    model = targets.load("smollm2-135m", dtype=jnp.float32)
    prompts = chat_prompts.prompts(config.seed)
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.touch()
    done = {json.loads(line)["prompt"] for line in config.out.open()}
    prompts = [p for p in prompts if p not in done]
    # Philox keys: threefry would spend a quarter of the time on 49,152 draws a token.
    key = jax.random.fold_in(jax.random.key(config.seed, impl="rbg"), len(done))
    began = time.time()
    encoded = {p: encode(model, p) for p in prompts}
    width = max(map(len, encoded.values()))
    for first in range(0, len(prompts) - config.batch + 1, config.batch):
        if time.time() - began > 60 * config.minutes:
            break
        chosen = prompts[first : first + config.batch]
        lengths = np.array([len(encoded[p]) for p in chosen], np.int32)
        tokens = np.zeros((config.batch, width), np.int32)
        for row, p in zip(tokens, chosen, strict=True):
            row[: len(encoded[p])] = encoded[p]
        key, batch_key = jax.random.split(key)
        clock = time.time()
        answers, alive = jax.device_get(
            sample(
                model.target,
                config,
                model.stop_ids,
                model.params,
                tokens,
                lengths,
                batch_key,
            )
        )
        with config.out.open("a") as file:
            for prompt, ids, cut in zip(chosen, answers, alive, strict=True):
                answer = trim(model.tokenizer.decode([i for i in ids if i >= 0]), cut)
                if len(answer) > 20:
                    record = {"prompt": prompt, "answer": answer}
                    file.write(json.dumps(record) + "\n")
        count = int(np.sum(answers >= 0))
        seconds = time.time() - clock
        print(f"{first}: {count} tokens, {count / seconds:.0f} a second", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Config))
