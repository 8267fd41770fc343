"""Training texts: chats or raw text in, token rows with an answer mask out.

A drafter learns the target's own way of writing, so answers are best written by the
target: `answer` regenerates them, and `invent_prompts` lets the target write the
questions too, from its own empty user turn (Xu et al. 2024, Magpie, arXiv:2406.08464),
so that a drafter can be trained with no data set at all.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specjax.drafters.none import NoDrafter
from specjax.generate import Model, Weights, generate
from specjax.sampling import Sampling
from specjax.targets.base import Pretrained
from specjax.typing import PRNGKey

Messages = list[dict[str, str]]
MIN_ANSWER = 8  # tokens; shorter answers teach nothing about drafting a block


@dataclasses.dataclass(frozen=True)
class Example:
    """One text in tokens; the mask is True on what is to be learned."""

    tokens: list[int]
    mask: list[bool]


@dataclasses.dataclass(frozen=True)
class Texts:
    """Examples as rows of one length, right-padded with token 0 and mask False."""

    tokens: np.ndarray  # [X T] int32
    mask: np.ndarray  # [X T] bool

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, share: float) -> tuple["Texts", "Texts"]:
        """All but the last `share` of the texts, and those; one at least in each."""
        at = min(len(self) - 1, math.ceil(len(self) * (1 - share)))
        if at < 1:
            raise ValueError("one text cannot be parted; give two or more.")
        return (
            Texts(self.tokens[:at], self.mask[:at]),
            Texts(self.tokens[at:], self.mask[at:]),
        )

    def batch(self, step: int, batch_size: int, seed: int) -> np.ndarray:
        """Row numbers of a step: each epoch is a new permutation, nothing is kept.

        A pure function of its arguments, so that a resumed run sees the same data.
        """
        indices = np.arange(step * batch_size, (step + 1) * batch_size)
        epochs = indices // len(self)
        orders = {
            e: np.random.default_rng((seed, e)).permutation(len(self))
            for e in np.unique(epochs)
        }
        return np.array(
            [orders[e][i % len(self)] for e, i in zip(epochs, indices, strict=True)]
        )


def _records(path: str | pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no file {path}; give a .jsonl with one object a line."
        )
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}.") from None
    # `splitlines` would also cut at U+2028 and the like, which JSON may hold bare.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is no JSON object: {error}.") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number} is no JSON object: {line[:60]!r}.")
        yield number, record


def _check_messages(messages: list[Any], where: str) -> None:
    for message in messages:
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(k), str) for k in ("role", "content")):
            raise ValueError(
                f"{where} has a message without a text `role` and `content`: "
                f"{str(message)[:60]}."
            )


def read_prompts(path: str | pathlib.Path, limit: int | None = None) -> list[str]:
    """First user turns of a .jsonl: `turns`, `messages`, `prompt` or `question`."""
    prompts = []
    for number, record in _records(path):
        if isinstance(record.get("turns"), list) and record["turns"]:
            prompt = record["turns"][0]
        elif isinstance(record.get("messages"), list) and record["messages"]:
            _check_messages(record["messages"], f"{path}:{number}")
            users = [m for m in record["messages"] if m["role"] == "user"]
            prompt = users[0]["content"] if users else None
        else:
            prompt = record.get("prompt", record.get("question"))
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(
                f"{path}:{number} holds no prompt: it needs turns, messages, prompt or "
                f"question, and has {', '.join(record) or 'nothing'}."
            )
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompts.")
    return prompts[:limit]


def spread(items: Sequence[Any], num: int) -> list[Any]:
    """`num` of them, evenly over the whole: files begin with what is alike."""
    if num >= len(items):
        return list(items)
    at = np.linspace(0, len(items) - 1, num).round().astype(int)
    return [items[i] for i in at]


def shipped_prompts(tasks: str) -> dict[str, list[str]]:
    """The package's held-out prompts of comma-separated tasks."""
    folder = pathlib.Path(__file__).parent / "data" / "prompts"
    known = sorted(p.stem for p in folder.glob("*.jsonl"))
    names = [t for t in tasks.split(",") if t]
    unknown = [t for t in names if t not in known]
    if unknown or not names:
        raise ValueError(
            f"unknown task {', '.join(unknown) or '(none given)'}; the shipped "
            f"ones are {', '.join(known)}."
        )
    return {t: read_prompts(folder / f"{t}.jsonl") for t in names}


def read_examples(path: str | pathlib.Path, pretrained: Pretrained) -> list[Example]:
    """Chats (`messages`: answers are learned) and raw text (`text`: all is learned)."""
    examples = []
    for number, record in _records(path):
        if isinstance(record.get("messages"), list):
            _check_messages(record["messages"], f"{path}:{number}")
            try:
                tokens, mask = pretrained.tokenizer.chat_with_mask(record["messages"])
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
        elif isinstance(record.get("text"), str):
            tokens = pretrained.tokenizer.encode(record["text"])
            mask = [True] * len(tokens)
        else:
            raise ValueError(
                f"{path}:{number} needs messages (a chat) or text, and has "
                f"{', '.join(record) or 'nothing'}."
            )
        examples.append(Example(tokens, mask))
    if not examples:
        raise ValueError(f"{path} holds no texts.")
    return examples


def batched(
    pretrained: Pretrained,
    prompts: Sequence[list[int]],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    key: PRNGKey,
    batch_size: int = 64,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[int]]:
    """The target's own continuations of many prompts, each to its stop token."""
    if not prompts:
        raise ValueError("there are no prompts for the target to answer.")
    sampling = dataclasses.replace(sampling, num_ids=pretrained.tokenizer.vocab_size)
    model = Model(pretrained.target, NoDrafter(), sampling, pretrained.stop_ids)
    weights = Weights(pretrained.params, None)
    width = max(len(p) for p in prompts) + max_new_tokens + 1
    order = np.argsort([len(p) for p in prompts], kind="stable")
    texts: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(prompts), batch_size):
        rows = order[start : start + batch_size].tolist()
        full = rows + rows[:1] * (batch_size - len(rows))  # one shape, compiled once
        result = generate(
            model,
            weights,
            [prompts[i] for i in full],
            max_new_tokens=max_new_tokens,
            key=key,
            seeds=full,
            cache_size=-(-width // 64) * 64,
        )
        for row, tokens in zip(rows, result.tokens, strict=False):
            texts[row] = tokens
        progress(start + len(rows))
    return texts


def invent_prompts(
    pretrained: Pretrained, count: int, key: PRNGKey, **options: Any
) -> list[str]:
    """User turns that the target writes from its own empty user turn, T = 1."""
    tokenizer = pretrained.tokenizer
    marker = "\x1a"
    text = tokenizer.render(
        [{"role": "user", "content": marker}], add_generation_prompt=False
    )
    opening = tokenizer.encode(text.split(marker)[0])
    written = batched(
        pretrained,
        [opening] * count,
        sampling=Sampling(temperature=1.0, min_p=0.02),
        max_new_tokens=64,
        key=key,
        **options,
    )
    stop = set(pretrained.stop_ids)
    prompts = [tokenizer.decode([t for t in w if t not in stop]) for w in written]
    return sorted({p.strip() for p in prompts if p.strip()})


def answer(
    pretrained: Pretrained,
    prompts: Sequence[str],
    *,
    temperature: float = 0.8,
    max_new_tokens: int = 192,
    key: PRNGKey,
    **options: Any,
) -> list[Example]:
    """Chats of one turn whose answers the target writes; these alone are learned."""
    openings = [
        pretrained.tokenizer.chat([{"role": "user", "content": p}]) for p in prompts
    ]
    answers = batched(
        pretrained,
        openings,
        sampling=Sampling(temperature=temperature),
        max_new_tokens=max_new_tokens,
        key=key,
        **options,
    )
    return [
        Example(o + a, [False] * len(o) + [True] * len(a))
        for o, a in zip(openings, answers, strict=True)
    ]


def self_made(
    pretrained: Pretrained, count: int, seed: int, length: int = 128, **options: Any
) -> list[Example]:
    """Chats of which the target writes both sides: no data set is needed.

    Answers have at most `length` tokens: no more of a text is kept.
    """
    prompt_key, answer_key = jax.random.split(jax.random.key(seed))
    prompts = invent_prompts(pretrained, count, prompt_key, **options)
    return answer(pretrained, prompts, max_new_tokens=length, key=answer_key, **options)


def pack(examples: Sequence[Example], length: int) -> Texts:
    """Cuts each example to `length` and drops those left with too little to learn."""
    kept = [e for e in examples if sum(e.mask[:length]) >= MIN_ANSWER]
    if not kept:
        raise ValueError(
            f"none of {len(examples)} texts has {MIN_ANSWER} tokens to learn within "
            f"its first {length}. Raise the length or give longer answers."
        )
    tokens = np.zeros((len(kept), length), np.int32)
    mask = np.zeros((len(kept), length), bool)
    for row, example in enumerate(kept):
        n = min(len(example.tokens), length)
        tokens[row, :n], mask[row, :n] = example.tokens[:n], example.mask[:n]
    return Texts(tokens, mask)
