"""Text to tokens and back, with the chat template, and text out of token streams."""

import dataclasses
import datetime
import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import tokenizers

Messages = Sequence[dict[str, str]]
MASKS = ("<|mask|>", "<|MASK|>", "<mask>", "<empty_output>")  # ids that no text holds


def read_json(path: pathlib.Path) -> Any:
    """Reads a JSON file; a damaged one is named."""
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:  # bad JSON or bad UTF-8
        raise ValueError(f"{path} is damaged ({error}); fetch it again.") from None


@functools.cache
def _compile(template: str):
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str):
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda x, ensure_ascii=False, **options: json.dumps(
        x, ensure_ascii=ensure_ascii, **options
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(
        form
    )
    return environment.from_string(template)


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A `tokenizers.Tokenizer` with its chat template and special tokens."""

    backend: tokenizers.Tokenizer
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None

    @classmethod
    def from_folder(cls, folder: pathlib.Path) -> "Tokenizer":
        """Reads tokenizer.json and what lies beside it."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} has no tokenizer.json; save the fast tokenizer there."
            )
        read_json(path)  # what `tokenizers` raises itself names no file
        config: dict[str, Any] = {}
        for file in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / file).is_file():
                config |= read_json(folder / file)
        template = config.get("chat_template")
        if isinstance(template, list):  # several named ones
            template = {t["name"]: t["template"] for t in template}.get("default")
        if (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text("utf-8")
        text = lambda t: t.get("content") if isinstance(t, dict) else t
        return cls(
            tokenizers.Tokenizer.from_file(str(path)),
            template,
            text(config.get("bos_token")),
            text(config.get("eos_token")),
        )

    @classmethod
    def from_gguf(cls, parts: Any) -> "Tokenizer":
        """Rebuilds the byte-level BPE of a GGUF file; digits stand alone."""
        from tokenizers import AddedToken, decoders, models, pre_tokenizers

        vocabulary = {token: i for i, token in enumerate(parts.tokens)}
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, parts.merges))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t in parts.special]
        )
        return cls(backend, parts.chat_template, parts.bos_token, parts.eos_token)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One past the largest id; a model's table may have more rows."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    @property
    def mask_token_id(self) -> int | None:
        """An id that no text holds, for drafters that fill in masks."""
        ids = (self.backend.token_to_id(token) for token in MASKS)
        return next((i for i in ids if i is not None), None)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text as it stands; special tokens in it are recognised."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self.backend.decode(
            [int(i) for i in ids], skip_special_tokens=skip_special
        )

    def render(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """The chat as text, by the model's own template."""
        from jinja2.exceptions import TemplateError

        if self.chat_template is None:
            raise ValueError(
                "this tokenizer has no chat template; give raw text instead (--raw)."
            )
        try:
            return _compile(self.chat_template).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token or "",
                eos_token=self.eos_token or "",
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses this chat: {error}.") from None

    def chat(self, messages: Messages, add_generation_prompt: bool = True) -> list[int]:
        return self.encode(self.render(messages, add_generation_prompt))

    def chat_with_mask(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """Tokens of a whole chat; True on the answers and the mark that ends each.

        The chat is rendered once more up to each answer: what the template then adds is
        the answer. Pieces are encoded one by one, so no token straddles a border.
        """
        if not any(m.get("role") == "assistant" for m in messages):
            raise ValueError("a chat to learn from needs an assistant message.")
        ids: list[int] = []
        mask: list[bool] = []
        done = ""
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self.render(messages[:i], add_generation_prompt=True)
            after = self.render(messages[: i + 1], add_generation_prompt=False)
            if not (before.startswith(done) and after.startswith(before)):
                raise ValueError(
                    "this chat template rewrites earlier turns, so answers cannot be "
                    "told from the rest; give raw text with `text` instead."
                )
            opening = self.encode(before[len(done) :])
            answer = self.encode(after[len(before) :])
            ids += opening + answer
            mask += [False] * len(opening) + self._until_stop(answer)
            done = after
        return ids, mask

    def _until_stop(self, answer: list[int]) -> list[bool]:
        """What follows the end mark (a newline, say) is never drafted."""
        stop = self.stop_id(answer)
        last = len(answer) - 1 - answer[::-1].index(stop) if stop in answer else None
        return [last is None or i <= last for i in range(len(answer))]

    def stop_id(self, answer: Sequence[int]) -> int | None:
        """The special token that ends a rendered answer, if there is one."""
        special = {
            i for i, t in self.backend.get_added_tokens_decoder().items() if t.special
        }
        return next((t for t in reversed(answer) if t in special), None)

    @property
    def end_of_turn(self) -> int | None:
        """The id that the template puts behind an answer."""
        if self.chat_template is None:
            return None
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        before = self.render(chat[:1], add_generation_prompt=True)
        after = self.render(chat, add_generation_prompt=False)
        rest = after[len(before) :] if after.startswith(before) else after[-40:]
        return self.stop_id(self.encode(rest))

    def stream(self) -> "TextStream":
        return TextStream(self)

    def save(self, folder: pathlib.Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and the template."""
        self.backend.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "clean_up_tokenization_spaces": False,
        }
        text = json.dumps(config, indent=2) + "\n"
        (folder / "tokenizer_config.json").write_text(text, "utf-8")
        if self.chat_template is not None:
            path = folder / "chat_template.jinja"
            path.write_text(self.chat_template, "utf-8")


class TextStream:
    """Turns tokens that come in any portions into text of whole characters.

    A byte-level token may hold part of a character, which decodes to U+FFFD at the end
    of the text: those are held back until later tokens complete them.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self.tokenizer, self.skip_special = tokenizer, skip_special
        self.ids: list[int] = []  # the last portions: decoders look back
        self.fresh = 0  # where in `ids` the portions begin that are not all given out
        self.given = 0  # characters of decoded `ids` that were given out

    def push(self, ids: Sequence[int]) -> str:
        """Text that has become certain."""
        self.ids += [int(i) for i in ids]
        text = self._decode()
        certain = len(text.rstrip("\ufffd"))
        new = text[self.given : certain]
        self.given = max(self.given, certain)
        if new and self.given == len(text):  # whole: only the newest tokens are needed
            self.ids = self.ids[self.fresh :]
            self.fresh, self.given = len(self.ids), len(self._decode())
        return new

    def close(self) -> str:
        """What is left, a broken character included."""
        new = self._decode()[self.given :]
        self.ids, self.fresh, self.given = [], 0, 0
        return new

    def _decode(self) -> str:
        return self.tokenizer.decode(self.ids, self.skip_special)
