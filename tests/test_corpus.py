"""Training texts: files read and refused, packing, epochs, answers of the target."""

import json

import folders
import jax
import numpy as np
import pytest

from specjax import corpus, targets, testing
from specjax.corpus import Example, Texts
from specjax.drafters.none import NoDrafter
from specjax.generate import Model, Weights, generate
from specjax.sampling import Sampling
from specjax.targets import Tokenizer


@pytest.fixture(scope="module")
def pretrained():
    target, params = testing.tiny_target(vocab_size=72, num_layers=1)
    tokenizer = Tokenizer(folders.toy_tokenizer(), folders.TEMPLATE, None, "<|end|>")
    return targets.Pretrained("toy", target, params, tokenizer, (0,))


def write(path, *records):
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


# --- epochs


@pytest.mark.parametrize("batch_size", [1, 3, 7, 10])
def test_every_epoch_is_a_permutation_of_all_texts(batch_size):
    texts = Texts(np.zeros((7, 2), np.int32), np.ones((7, 2), bool))
    rows = np.concatenate([texts.batch(s, batch_size, seed=3) for s in range(21)])
    epochs = rows[: len(rows) // 7 * 7].reshape(-1, 7)
    for epoch in epochs:
        assert sorted(epoch) == list(range(7))
    assert len({tuple(e) for e in epochs}) > 1


def test_a_batch_depends_on_its_arguments_alone():
    texts = Texts(np.zeros((50, 2), np.int32), np.ones((50, 2), bool))
    other = Texts(np.ones((50, 2), np.int32), np.ones((50, 2), bool))
    late = texts.batch(9, 8, seed=0)
    first = texts.batch(0, 8, seed=0)
    np.testing.assert_array_equal(texts.batch(9, 8, seed=0), late)
    np.testing.assert_array_equal(other.batch(9, 8, seed=0), late)
    assert not np.array_equal(first, texts.batch(0, 8, seed=1))
    # The order does not depend on how it is cut into batches.
    np.testing.assert_array_equal(first, texts.batch(0, 16, seed=0)[:8])


# --- packing


def test_pack_cuts_pads_and_drops():
    long = Example(list(range(1, 31)), [False] * 5 + [True] * 25)
    short = Example(list(range(1, 13)), [True] * 12)
    late = Example(list(range(1, 31)), [False] * 15 + [True] * 15)  # 5 within 20
    texts = corpus.pack([long, short, late], 20)
    assert len(texts) == 2
    assert texts.tokens[0].tolist() == list(range(1, 21))
    assert texts.mask[0].sum() == 15
    assert texts.tokens[1].tolist() == [*range(1, 13), *[0] * 8]
    assert not texts.mask[1, 12:].any()


def test_pack_says_what_to_do_when_nothing_is_left():
    with pytest.raises(ValueError, match=r"none of 1 texts has 8 tokens.*Raise"):
        corpus.pack([Example([1, 2, 3], [True] * 3)], 20)


# --- files


def test_prompts_are_read_in_every_known_form(tmp_path):
    chat = [{"role": r, "content": r} for r in ("system", "user", "assistant")]
    path = write(
        tmp_path / "p.jsonl",
        {"turns": ["one", "two"]},
        "",
        {"messages": chat},
        {"prompt": "three"},
        {"question": "four", "answer": "4"},
    )
    found = ["one", "user", "three", "four"]
    assert corpus.read_prompts(path) == found
    assert corpus.read_prompts(path, limit=2) == found[:2]


def test_lines_end_at_line_feeds_alone(tmp_path):
    text = "a\u2028b\x85c"
    path = tmp_path / "p.jsonl"
    record = json.dumps({"prompt": text}, ensure_ascii=False)
    path.write_bytes(f"{record}\r\n{record}\n".encode())
    assert corpus.read_prompts(path) == [text, text]


BAD = [
    ("{", "is no JSON object"),
    ("[1]", "is no JSON object"),
    ({"text": "a"}, "holds no prompt.*has text"),
    ({}, "has nothing"),
    ({"turns": [3]}, "holds no prompt"),
    ({"prompt": "  "}, "holds no prompt"),
    ({"messages": [{"role": "user"}]}, "without a text `role` and `content`"),
    ({"messages": ["hello"]}, "without a text `role` and `content`"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "holds no prompt"),
]


@pytest.mark.parametrize(("record", "message"), BAD)
def test_a_bad_prompt_is_named_by_file_and_line(tmp_path, record, message):
    path = write(tmp_path / "p.jsonl", {"prompt": "fine"}, "", record)
    with pytest.raises(ValueError, match=rf"p\.jsonl:3.*{message}") as error:
        corpus.read_prompts(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        *BAD[:2],
        ({"prompt": "a"}, "needs messages.*has prompt"),
        ({"messages": [{"role": "user", "content": "a"}]}, "needs an assistant"),
        ({"messages": []}, "needs an assistant"),
        ({"messages": [{"role": "assistant", "content": None}]}, "`content`"),
    ],
)
def test_a_bad_example_is_named_by_file_and_line(pretrained, tmp_path, record, message):
    path = write(tmp_path / "e.jsonl", {"text": "fine"}, record)
    with pytest.raises(ValueError, match=rf"e\.jsonl:2.*{message}"):
        corpus.read_examples(path, pretrained)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        corpus.read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no prompts"):
        corpus.read_prompts(write(tmp_path / "empty.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"latin\.jsonl is no UTF-8"):
        corpus.read_prompts(tmp_path / "latin.jsonl")


def test_examples_learn_answers_of_chats_and_all_of_raw_text(pretrained, tmp_path):
    chat = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "ant"}]
    path = write(tmp_path / "e.jsonl", {"messages": chat}, {"text": "a cat"})
    both = corpus.read_examples(path, pretrained)
    learned = [t for t, m in zip(both[0].tokens, both[0].mask, strict=True) if m]
    assert pretrained.tokenizer.decode(learned, skip_special=False) == "ant<|end|>"
    assert all(both[1].mask)
    assert both[1].tokens == pretrained.tokenizer.encode("a cat")


# --- answers of the target


def test_an_answer_does_not_depend_on_the_batches(pretrained):
    prompts = ["the cat", "a", "in the hat the ant"]
    key = jax.random.key(5)
    batched = corpus.answer(
        pretrained, prompts, key=key, max_new_tokens=9, batch_size=2, temperature=0.9
    )
    sampling = Sampling(0.9, num_ids=pretrained.tokenizer.vocab_size)
    model = Model(pretrained.target, NoDrafter(), sampling, (0,))
    weights = Weights(pretrained.params, None)
    for row, (prompt, example) in enumerate(zip(prompts, batched, strict=True)):
        opening = pretrained.tokenizer.chat([{"role": "user", "content": prompt}])
        alone = generate(
            model,
            weights,
            [opening] * 2,  # the width compiled above
            seeds=[row] * 2,
            max_new_tokens=9,
            key=key,
            cache_size=64,
        )
        assert example.tokens == opening + alone.tokens[0]
        assert example.mask == [False] * len(opening) + [True] * len(alone.tokens[0])


def test_the_target_writes_both_sides_the_same_way_twice(pretrained):
    options = dict(batch_size=4)
    first = corpus.self_made(pretrained, 4, seed=1, **options)
    again = corpus.self_made(pretrained, 4, seed=1, **options)
    assert first == again
    assert 0 < len(first) <= 4
    marks = pretrained.tokenizer.encode("<|user|><|assistant|>")
    for example in first:
        assert example.tokens[0] == marks[0]
        answer = example.mask.index(True)
        assert example.tokens[answer - 1] == marks[1]
        assert all(example.mask[answer:])


def test_no_prompts_is_one_clear_error(pretrained):
    with pytest.raises(ValueError, match="no prompts"):
        corpus.answer(pretrained, [], key=jax.random.key(0))


def test_prompts_are_taken_evenly_from_a_whole_list():
    assert corpus.spread(list(range(9)), 3) == [0, 4, 8]
    assert corpus.spread([1, 2], 5) == [1, 2]
