"""The command line in process: JSON results, marks, and one line for bad input."""

import contextlib
import io
import json
import re
import shutil
import tempfile
import weakref

import conftest
import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from specjax import (
    checkpoints,
    cli,
    console,
    corpus,
    cost,
    drafters,
    joint,
    targets,
    testing,
    training,
)
from specjax.certify import planted
from specjax.commands import bench
from specjax.targets import Tokenizer
from specjax.targets.scanned import Scanned

PROMPT = "the cat in the hat"


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A saved random target, two saved drafters, prompts and chats."""
    root = tmp_path_factory.mktemp("world")
    target, params = testing.tiny_target(vocab_size=64, num_layers=2)
    tokenizer = Tokenizer(folders.toy_tokenizer(), folders.TEMPLATE, None, "<|end|>")
    assert tokenizer.vocab_size <= 64
    made = targets.Pretrained("toy", target, params, tokenizer, (0,))
    targets.save_pretrained(root / "toy", made)
    for name in ("medusa", "draft_model"):
        drafter, weights = testing.tiny_drafter(name, target, params, gamma=2)
        checkpoints.save(root / name, name, drafter, weights)
    lines = [{"prompt": p} for p in (PROMPT, "a thin ant", "in the end")]
    (root / "asks.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    chat = [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": "the ant and the cat, in the hat"},
    ]
    line = json.dumps({"messages": chat})
    (root / "chats.jsonl").write_text(f"{line}\n" * 4)
    (root / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n')
    return root


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """The command keeps compiled programs in its own cache; tests get theirs back."""
    monkeypatch.setenv("SPECJAX_CACHE", str(conftest.CACHE))
    names = (
        "jax_compilation_cache_dir",
        "jax_numpy_dtype_promotion",
        "jax_persistent_cache_min_compile_time_secs",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def specjax(*args):
    """Runs a command: exit status, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main([str(a) for a in args])
        except SystemExit as stop:
            status = stop.code
    return status, out.getvalue(), err.getvalue()


def ask(world, tmp_path, *args):
    """`generate` on the saved target; its JSON, what it printed and its note."""
    status, out, err = specjax(
        *("generate", "--prompt", PROMPT, "--target", world / "toy"),
        *("--max-new-tokens", 12, "--json", tmp_path / "g.json", *args),
    )
    assert status == 0, err
    return json.loads((tmp_path / "g.json").read_text()), out, err


def test_drafters_lists_the_registry(tmp_path):
    status, out, _ = specjax("drafters", "--json", tmp_path / "d.json")
    assert status == 0
    cards = json.loads((tmp_path / "d.json").read_text())["drafters"]
    assert [card["name"] for card in cards] == list(drafters.REGISTRY)
    fields = {"name": str, "reads": str, "passes": str, "trained": str, "paper": str}
    for card in cards:
        assert {k: type(v) for k, v in card.items()} == fields | {"year": int}
        assert card["name"] in out


def test_info_names_versions_targets_and_devices(tmp_path):
    status, out, _ = specjax("info", "--json", tmp_path / "i.json")
    facts = json.loads((tmp_path / "i.json").read_text())
    assert status == 0
    assert set(facts) == {"device", "versions", "targets", "shipped"}
    assert {"tiny", "smollm2-135m"} <= set(facts["targets"])
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["device"] in out


@pytest.mark.parametrize("name", ["medusa", "draft_model"])
def test_generate_writes_the_plain_text_whatever_drafts_it(world, tmp_path, name):
    plain, shown, _ = ask(world, tmp_path, "--drafter", "none")
    found, out, note = ask(
        world, tmp_path, "--drafter", world / name, "--marks", "none"
    )
    schema = {"tokens": list, "text": str, "finish_reason": str}
    for result in (plain, found):
        assert {k: type(v) for k, v in result.items()} == schema | {
            "rounds": int,
            "accepted": int,
        }
        assert 1 <= len(result["tokens"]) <= 12
        assert result["finish_reason"] in ("eos", "length")
    assert found["tokens"] == plain["tokens"]
    assert out == found["text"] + "\n" == shown
    assert plain["accepted"] == 0
    assert plain["rounds"] == len(plain["tokens"]) - 1
    assert found["rounds"] <= plain["rounds"]
    assert f"drafter {name}" in note
    assert note.count("\n") == 1


def test_brackets_mark_what_was_drafted_and_hide_nothing(world, tmp_path):
    found, out, note = ask(
        world, tmp_path, "--drafter", world / "medusa", "--marks", "brackets"
    )
    assert re.sub(r"~[^~]*~|[{}]", "", out) == found["text"] + "\n"
    assert "~" in out  # a random drafter is refused somewhere
    assert "{accepted draft}" in note


def test_sampling_depends_on_the_seed_alone(world, tmp_path):
    options = ("--drafter", world / "medusa", "--temperature", 1, "--seed")
    first, again, other = (ask(world, tmp_path, *options, s)[0] for s in (1, 1, 2))
    assert first == again
    assert first["tokens"] != other["tokens"]


def test_raw_text_is_continued_without_the_template(world, tmp_path):
    raw, _, _ = ask(world, tmp_path, "--drafter", "none", "--raw")
    chat, _, _ = ask(world, tmp_path, "--drafter", "none")
    assert raw["tokens"] != chat["tokens"]


ROW = {
    "drafter": str,
    "task": str,
    "temperature": float,
    "gamma": int,
    "nodes": int,
    "rule": str,
    "rounds": int,
    "tokens": int,
    "tau": float,
    "tau_low": float,
    "tau_high": float,
    "alpha_by_position": list,
    "draft_cost": float,
    "verify_ratio": float,
    "speedup_predicted": float,
    "speedup_measured": float,
    "lossless": bool,
}


@pytest.mark.parametrize(
    "temperatures", [(0.0,), pytest.param((0.0, 1.0), marks=pytest.mark.slow)]
)
def test_bench_writes_a_row_for_each_temperature(world, tmp_path, temperatures):
    status, out, err = specjax(
        *("bench", "--target", world / "toy", "--drafters", world / "medusa"),
        *("--prompts", world / "asks.jsonl", "--temperature", *temperatures),
        *("--num-prompts", 2, "--max-new-tokens", 10, "--out", tmp_path / "out"),
        *("--json", tmp_path / "b.json"),
    )
    assert status == 0, err
    result = json.loads((tmp_path / "b.json").read_text())
    names = {"target", "settings", "rows", "notes", "versions", "device"}
    assert set(result) == names
    assert result["target"] == "toy"
    assert tuple(result["settings"]["temperatures"]) == temperatures
    assert tuple(r["temperature"] for r in result["rows"]) == temperatures
    for row in result["rows"]:
        assert {k: type(v) for k, v in row.items()} == ROW
        assert (row["drafter"], row["task"], row["gamma"]) == ("medusa", "asks", 2)
        assert row["lossless"] is True
        assert 1 <= row["tau_low"] <= row["tau"] <= row["tau_high"] <= 3
        assert len(row["alpha_by_position"]) == 2
        assert row["verify_ratio"] > 0
        assert row["draft_cost"] >= 0
    assert "medusa" in out
    assert (tmp_path / "out" / "bench.png").stat().st_size > 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.json", "out"]


@pytest.mark.slow
def test_a_found_tree_is_saved_and_drafted_without_loss(world, tmp_path):
    status, out, err = specjax(
        *("tree", world / "medusa", "--target", world / "toy", "--nodes", 5),
        *("--num-prompts", 4, "--max-new-tokens", 8, "--out", tmp_path / "tree.json"),
        *("--tasks", "chat"),
    )
    assert status == 0, err
    assert "held out" in out
    plain, _, _ = ask(world, tmp_path, "--drafter", "none")
    for tree in (tmp_path / "tree.json", "dynamic:4:2:3"):
        found, _, _ = ask(
            world, tmp_path, "--drafter", world / "medusa", "--tree", tree
        )
        assert found["tokens"] == plain["tokens"]


@pytest.mark.slow
def test_certify_reports_rows_and_planted_bugs(tmp_path, monkeypatch):
    """The quick form: of the 43 bugs six that are of different kinds."""
    few = {n: planted.BUGS[n] for n in (1, 4, 8, 17, 22, 34)}
    monkeypatch.setattr(planted, "BUGS", few)
    status, out, err = specjax(
        "certify", "--drafters", "medusa", "--quick", "--json", tmp_path / "c.json"
    )
    assert status == 0, err
    report = json.loads((tmp_path / "c.json").read_text())
    for row in report["rows"]:
        assert row["passed"] and ("max_tv" in row) != ("p_value" in row)
        assert {"drafter", "rule", "sampling", "method"} <= set(row)
    assert len(report["planted_bugs"]) == 6
    assert all(b["caught"] and b["margin"] > 1 for b in report["planted_bugs"])
    assert "traversal" in out


def test_train_writes_a_drafter_that_generate_takes(world, tmp_path):
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # optax mixes dtypes
    command = (
        *("train", "medusa", "--target", world / "toy"),
        *("--data", world / "chats.jsonl", "--length", 64, "--steps", 2),
        *("--batch-size", 2, "--field", "gamma=2", "--out", tmp_path / "run"),
        *("--json", tmp_path / "t.json"),
    )
    status, out, err = specjax(*command)
    assert status == 0, err
    last = json.loads((tmp_path / "t.json").read_text())
    assert (last["step"], last["drafter"]) == (2, "medusa")
    stored = json.loads((tmp_path / "run" / "drafter" / "drafter.json").read_text())
    assert stored["about"]["target"] == "toy"
    assert "specjax bench" in out
    found, _, _ = ask(world, tmp_path, "--drafter", tmp_path / "run" / "drafter")
    assert found["tokens"]
    before = (tmp_path / "run" / "drafter" / "drafter.safetensors").read_bytes()
    assert specjax(*command)[0] == 0  # nothing is left to do
    after = (tmp_path / "run" / "drafter" / "drafter.safetensors").read_bytes()
    assert after == before


@pytest.mark.parametrize(
    ("flags", "written", "trained"),
    [
        (("medusa", "--data", "CHATS"), None, True),
        (("medusa",), False, True),
        (("blockwise", "--data", "CHATS"), None, True),
        (("blockwise", "--data", "CHATS", "--field", "tune_target=true"), None, False),
        (("gemma4_mtp", "--data", "CHATS"), None, False),
    ],
)
def test_training_reads_layers_stacked_and_writes_texts_one_by_one(
    world, tmp_path, monkeypatch, flags, written, trained
):
    seen, weights = {}, []

    def write(pretrained, *args):
        seen["written"] = isinstance(pretrained.target, Scanned)
        weights.append(weakref.ref(pretrained.params["layer_0"]["mlp"]["down"]))
        return [corpus.Example([1] * 40, [True] * 40)]

    def stop(pretrained, *args, **options):
        seen["trained"] = isinstance(pretrained.target, Scanned)
        assert not any(ref() for ref in weights)  # both would be the weights twice
        raise ValueError("as far as this goes")

    monkeypatch.setattr(corpus, "self_made", write)
    monkeypatch.setattr(training, "train", stop)
    chats = [str(world / "chats.jsonl") if x == "CHATS" else x for x in flags]
    command = ("train", *chats, "--target", world / "toy", "--length", 40)
    _, _, err = specjax(*command, "--out", tmp_path / "run")
    assert "as far as this goes" in err
    assert (seen.get("written"), seen["trained"]) == (written, trained)


ASK = ("generate", "--prompt", "a", "--target", "TOY")


@pytest.mark.slow
def test_a_drafter_that_was_trained_with_its_target_brings_that_target(world, tmp_path):
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # optax mixes dtypes
    out = tmp_path / "run"
    status, said, err = specjax(
        *("train", "medusa2", "--target", world / "toy", "--init", world / "medusa"),
        *("--data", world / "chats.jsonl", "--length", 64, "--steps", 2),
        *("--batch-size", 2, "--field", "rank=2", "--out", out),
    )
    assert status == 0, err
    assert "1 held-out texts" in said
    stored = json.loads((out / "drafter" / "drafter.json").read_text())
    assert stored["about"]["quality"]["kl"] >= 0
    assert stored["config"]["heads_first"] == 0  # its heads are trained

    pretrained = targets.load(str(world / "toy"))
    shared = pretrained.target.shared(pretrained.params)
    name, drafter, params = checkpoints.load(out / "drafter", shared)
    params["adapter"] = testing.perturb(params["adapter"], scale=0.5)
    checkpoints.save(tmp_path / "moved", name, drafter, params, dtype=jnp.float32)
    tuned = joint.tuned(pretrained, drafter, params)
    targets.save_pretrained(tmp_path / "tuned", tuned)
    drafted, _, _ = ask(world, tmp_path, "--drafter", tmp_path / "moved")
    first, _, _ = ask(world, tmp_path, "--drafter", "none")
    plain, _, _ = ask(
        world, tmp_path, "--drafter", "none", "--target", tmp_path / "tuned"
    )
    assert drafted["tokens"] == plain["tokens"] != first["tokens"]


def test_train_chooses_a_draft_vocabulary_and_a_warm_start_keeps_it(world, tmp_path):
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # optax mixes dtypes
    command = (
        *("train", "eagle3", "--target", world / "toy"),
        *("--data", world / "chats.jsonl", "--length", 64, "--steps", 1),
        *("--batch-size", 2, "--field", "ttt_steps=1", "--field", "gamma=1"),
    )
    read = lambda run: json.loads((run / "drafter" / "drafter.json").read_text())
    first, second = tmp_path / "first", tmp_path / "second"
    status, out, err = specjax(*command, "--draft-vocab", 12, "--out", first)
    assert status == 0, err
    ids = read(first)["config"]["draft_ids"]
    assert ids == sorted(set(ids)) and len(ids) == 12 and "of 12 ids" in out
    warm = (*command[:-4], "--init", first / "drafter", "--out", second)
    assert specjax(*warm)[0] == 0
    assert read(second)["config"]["draft_ids"] == ids
    status, _, err = specjax(*warm, "--draft-vocab", 13)
    assert status != 0 and "keeps the ids it has" in err


@pytest.mark.slow
def test_train_parts_the_table_of_a_trained_drafter_into_clusters(world, tmp_path):
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # optax mixes dtypes
    command = (
        *("train", "gemma4_mtp", "--target", world / "toy", "--steps", 1),
        *("--data", world / "chats.jsonl", "--length", 64, "--batch-size", 2),
    )
    first, second = tmp_path / "first", tmp_path / "second"
    status, _, err = specjax(*command, "--field", "gamma=1", "--out", first)
    assert status == 0, err
    parts = ("--clusters", 8, "--clusters-scored", 2, "--feature-cache", tmp_path / "f")
    warm = (*command, "--init", first / "drafter", *parts, "--out", second)
    status, _, err = specjax(*warm)
    assert status == 0, err
    config = json.loads((second / "drafter" / "drafter.json").read_text())["config"]
    assert (config["num_clusters"], config["num_scored"]) == (8, 2)
    assert sorted(config["order"]) == list(range(64))
    one, two = (
        load_file(run / "drafter" / "drafter.safetensors") for run in (first, second)
    )
    moved = {n for n in two if n not in one or not np.array_equal(one[n], two[n])}
    assert moved == {"centroids", "clusters"}
    rows = two["clusters"].reshape(64, -1)
    np.testing.assert_array_equal(rows, one["head"][list(config["order"])])
    status, _, err = specjax(*warm[:-2], "--init", second / "drafter")
    assert status != 0 and "8 clusters already" in err


COST = ("cost", "--target", "TOY", "--drafters", "MEDUSA")
PLAN = ("cost", "--chip", "h100", "--model", "llama-3.2-1b", "--drafters", "eagle3")
BENCH = ("bench", "--target", "TOY", "--drafters", "MEDUSA")
BAD = {
    "cost on an unknown chip": (
        ("cost", "--chip", "h900"),
        "unknown chip 'h900'; known: a100, h100",
    ),
    "cost of an unknown model": ((*PLAN[:3], "--model", "x"), "unknown model 'x'"),
    "cost of an unknown drafter": ((*PLAN[:-1], "x"), "unknown drafter 'x'"),
    "cost of no acceptance": (
        (*PLAN, "--alpha", "1.2"),
        "--alpha 1.2 is no acceptance",
    ),
    "cost of no rows": ((*COST, "--batch", "0"), "--batch 0 is out of range"),
    "cost of a plan for two batches": ((*PLAN, "--batch", "1", "2"), "one --batch"),
    "cost of a model without a chip": ((*COST, "--model", "qwen3-8b"), "its --chip"),
    "cost of a plan at some gammas": ((*PLAN, "--gammas", "2"), "not --gammas"),
    "cost of a plan that is timed": (
        (*PLAN, "--repeats", "3"),
        "--repeats 3 is of a measurement here; leave out --chip",
    ),
    "cost measured at another context": (
        (*COST, "--context", "99"),
        "--context 99 is of a plan; name its --chip",
    ),
    "cost of too long a draft": (
        (*PLAN, "--max-gamma", "9999"),
        "--max-gamma 9999 is out of range; give 1 to 256",
    ),
    "cost of no draft vocabulary": (
        (*PLAN, "--draft-vocab", "0"),
        "--draft-vocab 0 is out of range; give 1 to 128256",
    ),
    "cost of a comma too many": ((*COST, "--tasks", "code,,"), "has an empty name"),
    "cost of bytes that are no number": (
        (*PLAN, "--weight-bytes", "nan"),
        "weight_bytes must be > 0, got nan",
    ),
    "cost of endless passes": (
        (*PLAN, "--pass-us", "inf"),
        "overhead must be >= 0 seconds, got inf",
    ),
    "cost of a model that is not named": (
        (*PLAN[:-1], "draft_model:"),
        "draft_model: names no model",
    ),
    "cost without a repeat": ((*COST, "--repeats", "0"), "--repeats 0 is out of range"),
    "cost of an impossible share": (
        (*PLAN, "--bandwidth-share", "1.5"),
        "at most 1; got 1.5",
    ),
    "cost past the model's positions": (
        (*PLAN, "--context", "200000"),
        "context 200000 is more than",
    ),
    "no command": ((), "specjax"),
    "unknown command": (("serve",), "serve"),
    "unknown flag": (("generate", "--prompt", "a", "--heat", "1"), "heat"),
    "no prompt": (("generate",), "prompt"),
    "not a number": (("generate", "--prompt", "a", "--seed", "x"), "seed"),
    "unknown target": (("generate", "--prompt", "a", "--target", "gpt"), "'gpt'"),
    "temperature": (
        (*ASK, "--temperature", "-1"),
        "temperature",
    ),
    "no tokens": (
        (*ASK, "--max-new-tokens", "0"),
        "max_new_tokens",
    ),
    "empty prompt": (
        ("generate", "--prompt", "", "--raw", "--target", "TOY"),
        "at least one token",
    ),
    "unknown drafter": (
        (*ASK, "--drafter", "eagle9"),
        "registered: draft_model",
    ),
    "untrained drafter": (
        (*ASK, "--drafter", "medusa"),
        "specjax train",
    ),
    "no drafter there": (
        (*ASK, "--drafter", "./nowhere"),
        "no drafter in nowhere",
    ),
    "gamma beyond the heads": (
        (*ASK, "--drafter", "MEDUSA", "--gamma", "9"),
        "num_heads",
    ),
    "unknown rule": ((*BENCH, "--rule", "guess"), "known: token, block"),
    "a rule for chains on a tree": (
        (
            *ASK,
            "--drafter",
            "MEDUSA",
            "--tree",
            "dynamic:4:2",
            "--rule",
            "token",
            "--temperature",
            "1",
        ),
        "verified by match",
    ),
    "no tree": ((*ASK, "--drafter", "MEDUSA", "--tree", "dynamic:x"), "dynamic:16:4"),
    "a tree deeper than the heads": (
        (*ASK, "--drafter", "MEDUSA", "--tree", "dynamic:9:9"),
        "one head a depth",
    ),
    "a step by step drafter has no static search": (
        ("tree", "STEPS", "--target", "TOY", "--out", "OUT/t.json"),
        "Use a dynamic tree",
    ),
    "an empty rule": ((*ASK, "--drafter", "MEDUSA", "--rule", ""), "known: token"),
    "a rule with no drafter": (
        (*ASK, "--drafter", "none", "--rule", "block"),
        "--rule block: there is no drafter",
    ),
    "a tree with no drafter": (
        (*ASK, "--drafter", "none", "--tree", "dynamic:4:2"),
        "--tree dynamic:4:2: there is no drafter",
    ),
    "a seed of more than 32 bits": ((*ASK, "--seed", str(2**32)), "--seed 4294967296"),
    "a tree of no file": ((*ASK, "--drafter", "MEDUSA", "--tree", ""), "'' is no file"),
    "a folder for a tree": (
        (*ASK, "--drafter", "MEDUSA", "--tree", "."),
        "'.' is no file",
    ),
    "a tree without a depth": (
        (*ASK, "--drafter", "MEDUSA", "--tree", "dynamic:16"),
        "dynamic:NODES:DEPTH[:WIDTH] in whole numbers",
    ),
    "a capital in a tree": (
        (*ASK, "--drafter", "MEDUSA", "--tree", "Dynamic:16:2"),
        "such as dynamic:16:4",
    ),
    "a tree wider than the vocabulary": (
        (*ASK, "--drafter", "MEDUSA", "--tree", "dynamic:100:2:80"),
        "80 children under a node, the target 64 ids",
    ),
    "bench of a rule that the tree forbids": (
        (
            *BENCH,
            *("--max-new-tokens", "8", "--tree", "dynamic:4:2", "--rule", "block"),
        ),
        "verified by match",
    ),
    "bench of one drafter twice": ((*BENCH[:-1], "a,a"), "names a twice"),
    "bench of all and one more": ((*BENCH[:-1], "all,medusa"), "all are all"),
    "a comma too many": ((*BENCH[:-1], "medusa,"), "'medusa,' has an empty name"),
    "certify with a comma too many": (
        ("certify", "--drafters", "medusa,,eagle"),
        "has an empty name",
    ),
    **{
        f"tree with {flag} {value}": (
            ("tree", "MEDUSA", "--target", "TOY", "--out", "OUT/t", flag, value),
            f"{flag} {value} is out of range",
        )
        for flag, value in (
            ("--ranks", "0"),
            ("--ranks", "-1"),
            ("--nodes", "1"),
            ("--max-new-tokens", "1"),
        )
    },
    **{
        f"train with {field}": (
            ("train", name, "--target", "TOY", "--out", "OUT/r", "--field", field),
            f"--field {field}: {name} needs {kind}",
        )
        for name, field, kind in (
            ("mtp", "num_modules=1.5", "int"),
            ("mtp", "weight=abc", "float"),
            ("mtp", "carry=both", "Literal"),
            ("eagle3", "draft_ids=(1.5, 2)", "tuple[int, ...]"),
            ("medusa", "share_head=1", "bool"),
        )
    },
    "train with draft ids twice": (
        (
            *("train", "eagle3", "--target", "TOY", "--field", "draft_ids=[1,2]"),
            *("--draft-vocab", "2", "--out", "OUT/r"),
        ),
        "give one of the two",
    ),
    **{
        f"train with a draft vocabulary of {n}": (
            (
                "train",
                "eagle3",
                "--target",
                "TOY",
                "--draft-vocab",
                n,
                "--out",
                "OUT/r",
            ),
            f"--draft-vocab {n} is out of range; give 1 to 64",
        )
        for n in ("0", "-5", "65")
    },
    "json in no folder": (("drafters", "--json", "OUT/no/d.json"), "no folder"),
    "bench without prompts": (
        (*BENCH, "--prompts", "OUT/p"),
        "no file",
    ),
    "bench with broken prompts": (
        (*BENCH, "--prompts", "BROKEN"),
        "broken.jsonl:2",
    ),
    "bench of an unknown task": (
        (*BENCH, "--tasks", "cooking"),
        "unknown task cooking; the shipped ones are chat, code, math",
    ),
    "train of an unknown drafter": (
        ("train", "eagle9", "--target", "TOY"),
        "registered: draft_model",
    ),
    "train with an unknown field": (
        ("train", "medusa", "--target", "TOY", "--field", "depth=3"),
        "no field depth",
    ),
    "train with a field twice": (
        ("train", "medusa", "--field", "gamma=2", "--field", "gamma=3"),
        "--field gamma=3: gamma is given twice",
    ),
    "train on answers to no prompts": (
        ("train", "medusa", "--target", "TOY", "--regenerate"),
        "prompts of --data; give it too",
    ),
    "train on texts too short to learn from": (
        ("train", "medusa", "--target", "TOY", "--length", "7"),
        "--length 7 is out of range; give 8 or more",
    ),
    "train on texts longer than the target reads": (
        ("train", "medusa", "--target", "TOY", "--length", "257", "--out", "OUT/r"),
        "--length 257 is out of range; give 8 to 256",
    ),
    "train into a file": (
        ("train", "medusa", "--target", "TOY", "--out", "BROKEN"),
        "needs a folder",
    ),
    "features under a file": (
        ("train", "medusa", "--target", "TOY", "--feature-cache", "BROKEN/x"),
        "broken.jsonl is a file",
    ),
    "train at an endless rate": (
        ("train", "medusa", "--target", "TOY", "--learning-rate", "inf"),
        "learning_rate must be > 0 and finite, got inf",
    ),
    "a tree into a folder": (
        ("tree", "MEDUSA", "--target", "TOY", "--out", "TOY"),
        "is a folder; --out needs a file",
    ),
    "train without a file": (
        ("train", "medusa", "--target", "TOY", "--data", "OUT/x", "--out", "OUT/r"),
        "no file",
    ),
    "clusters of an untrained table": (
        ("train", "gemma4_mtp", "--target", "TOY", "--clusters", "8"),
        "--init FOLDER",
    ),
    "clusters of a drafter with none": (
        ("train", "medusa", "--target", "TOY", "--init", "MEDUSA", "--clusters", "8"),
        "--init FOLDER",
    ),
    "clusters scored of none": (
        ("train", "gemma4_mtp", "--target", "TOY", "--clusters-scored", "2"),
        "--clusters makes; give it too",
    ),
    "fields beside a start that has its own": (
        ("train", "medusa", "--target", "TOY", "--init", "MEDUSA", "--field", "gama=3"),
        "--field gama=3: --init keeps",
    ),
    "train with another drafter's start": (
        ("train", "draft_model", "--target", "TOY", "--init", "MEDUSA"),
        "medusa",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_status_2(world, tmp_path, case):
    args, names = BAD[case]
    places = {
        "TOY": world / "toy",
        "MEDUSA": world / "medusa",
        "STEPS": world / "draft_model",
        "BROKEN": world / "broken.jsonl",
        "OUT": tmp_path,
    }
    args = [re.sub(r"^[A-Z]+(?=/|$)", lambda m: str(places[m[0]]), a) for a in args]
    status, _, err = specjax(*args)
    assert status == 2
    assert err.startswith("specjax: ")
    assert err.count("\n") == 1
    assert names in err
    left = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert left == []


def test_two_drafters_of_one_name_are_told_apart_by_their_folders(world, tmp_path):
    """Each has a label, and with it a certificate, of its own."""
    shutil.copytree(world / "medusa", tmp_path / "other")
    names = [world / "medusa", tmp_path / "other", world / "draft_model"]
    command = bench.Bench(drafters=",".join(map(str, names)), target=str(world / "toy"))
    loaded = command._load(targets.load(command.target))
    labels = [str(names[0]), str(names[1]), "draft_model"]
    assert [label for label, *_ in loaded] == labels
    assert [name for _, name, *_ in loaded] == ["medusa", "medusa", "draft_model"]


def test_a_tree_of_no_round_is_refused(world, tmp_path, monkeypatch):
    nothing = lambda *args, **kwargs: np.zeros((0, 2), int)
    monkeypatch.setattr("specjax.search.measure_ranks", nothing)
    command = ("tree", world / "medusa", "--target", world / "toy")
    status, _, err = specjax(*command, "--tasks", "chat", "--out", tmp_path / "t")
    assert status == 2 and "no round stands 2 tokens before the end" in err
    assert not (tmp_path / "t").exists()


def test_a_tree_is_judged_on_prompts_that_it_was_not_made_from(
    world, tmp_path, monkeypatch
):
    """Nor on those that `specjax bench` measures."""
    asked = []

    def ranks(pretrained, drafter, params, prompts, **options):
        asked.append({tuple(prompt) for prompt in prompts})
        return np.full((4, 2), len(asked) - 1)  # held-out tokens are second guesses

    monkeypatch.setattr("specjax.search.measure_ranks", ranks)
    command = ("tree", world / "medusa", "--target", world / "toy", "--nodes", 3)
    status, out, err = specjax(*command, "--out", tmp_path / "t", "--tasks", "chat")
    assert status == 0, err
    tokenizer = targets.load(str(world / "toy")).tokenizer
    chat = lambda text: tuple(tokenizer.chat([{"role": "user", "content": text}]))
    measured = set(map(chat, corpus.spread(corpus.shipped_prompts("chat")["chat"], 8)))
    assert [len(half) for half in asked] == [8, 8]
    assert not asked[0] & asked[1] and not measured & (asked[0] | asked[1])
    assert out.count("searched 3.00  held out 1.00") == 3
    assert json.loads((tmp_path / "t").read_text())["tau_held_out"] == 1.0


def test_a_place_that_may_not_be_written_is_refused_before_the_work(
    world, tmp_path, monkeypatch
):
    """`os.access` is faked: the superuser may write anywhere."""
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    for command in (
        ("train", "medusa", "--out", tmp_path / "a" / "b"),
        ("train", "medusa", "--feature-cache", tmp_path / "a"),
        ("bench", "--json", tmp_path / "a"),
        ("bench", "--out", tmp_path / "a"),
        ("tree", "medusa", "--out", tmp_path / "a"),
    ):
        status, _, err = specjax(*command)
        says = f"specjax: {command[-2]} {command[-1]}: nothing may be written in"
        assert status == 2 and err.count("\n") == 1
        assert err.startswith(f"{says} {tmp_path}; choose another")
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_cannot_be_written_leaves_no_half(world, tmp_path, monkeypatch):
    (tmp_path / "g.json").write_text("old")

    def full(*args):
        raise PermissionError("no space left")

    monkeypatch.setattr("os.replace", full)
    status, _, err = specjax("drafters", "--json", tmp_path / "g.json")
    assert (status, err) == (2, "specjax: no space left\n")
    assert (tmp_path / "g.json").read_text() == "old"


@pytest.mark.slow
def test_cost_measures_what_a_scheduler_and_a_reader_need(world, tmp_path):
    path = tmp_path / "cost.json"
    status, out, err = specjax(
        *("cost", "--target", world / "toy", "--drafters", world / "medusa"),
        *("--num-prompts", 1, "--max-new-tokens", 8, "--repeats", 1, "--json", path),
    )
    assert status == 0, err
    assert max(map(len, out.splitlines())) <= 100
    result = json.loads(path.read_text())
    (curve,), (row,) = result["curves"], result["drafters"]
    assert len(cost.load_passes(path)) == 32 and curve["tokens"][0] == 1
    G = row["gammas"][-1]
    speeds = [
        t / (v + c) for t, v, c in zip(row["tau"], row["v"], row["c"], strict=True)
    ]
    np.testing.assert_allclose(row["speedup"], speeds)
    assert row["best_speedup"] == max(row["speedup"])
    assert {m["gamma"] for m in row["measured"]} == {G, row["best_gamma"]}
    for m in row["measured"]:
        assert m["error"] == pytest.approx(m["predicted"] / m["measured"] - 1)


def test_cost_plans_on_chips_that_are_not_here(tmp_path):
    path = tmp_path / "cost.json"
    status, out, err = specjax(*PLAN, "--alpha", 0.8, "--max-gamma", 2, "--json", path)
    assert status == 0, err
    assert "16 rows" not in out and max(map(len, out.splitlines())) <= 100
    result = json.loads(path.read_text())
    assert result["params"] == 1_235_814_400
    assert result["drafters"][0]["tau"] == pytest.approx([1.8, 2.44])
    assert len(cost.load_passes(path)) == 3


def test_a_list_may_be_given_in_parts():
    """Of a flag that is repeated tyro keeps the last: the others were lost."""
    fields = ("--field", "gamma=2", "--seed", "3", "--field=num_heads=4", "a=1")
    made = cli.parse(["train", "medusa", *fields, "--data", "x", "--data", "y"])
    assert made.field == ("gamma=2", "num_heads=4", "a=1")
    assert [str(p) for p in made.data] == ["x", "y"]
    assert (made.seed, made.drafter) == (3, "medusa")
    made = cli.parse(["bench", "--temperature", "0", "--gamma", "2", "--gamma", "3"])
    assert (made.temperature, made.gamma) == ((0.0,), 3)


def test_more_tokens_than_positions_are_not_allocated(world, tmp_path):
    asked = ("--max-new-tokens", 10**12)
    found, _, _ = ask(world, tmp_path, "--drafter", "none", *asked)
    assert 1 <= len(found["tokens"]) <= 256


def test_help_is_no_error():
    status, out, _ = specjax("--help")
    assert status == 0
    assert all(name in out for name in ("bench", "cost", "generate", "drafters"))
    assert tempfile.gettempdir() not in out


def test_no_option_is_helped_by_the_comment_of_another():
    """tyro takes a comment for all lines below it that have none."""
    for command in ("bench", "certify", "cost", "generate", "plan", "train", "tree"):
        _, out, _ = specjax(command, "--help")
        words = " ".join(re.sub(r"[\u2500-\u257f]+", " ", out).split())
        said = re.findall(r"(?<= )--[a-z].*?(?= --[a-z-]+[ ,]|$)", words)
        said = [s.partition(" (default")[0].split(" ", 2)[-1] for s in said]
        said = [s for s in said if len(s) > 25]
        assert len(said) == len(set(said)), command
    config = training.TrainConfig()
    for value in (config.steps, config.batch_size, config.learning_rate):
        assert f"None: {value} (default" in specjax("train", "--help")[1]


def test_ctrl_c_ends_in_one_line(monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.Bench, "run", interrupted)
    assert specjax("bench")[::2] == (130, "specjax: interrupted.\n")


@pytest.mark.parametrize("width", [80, 150])
def test_the_table_of_bench_fits_a_terminal(width):
    row = dict(drafter="draft_model", task="code", temperature=0.7, gamma=7, tau=2.31)
    row |= dict(tau_low=1.94, tau_high=3.05, alpha_by_position=[0.51] * 7)
    row |= dict(draft_cost=12.34, verify_ratio=5.43, speedup_predicted=0.98)
    row |= dict(speedup_measured=1.23, lossless=True)
    screen = Console(width=width, file=io.StringIO())
    tables = console.bench_tables([row], "here", screen)
    assert len(tables) == 1 + (width == 80)
    for table in tables:
        screen.print(table)
    out = screen.file.getvalue()
    assert "\u2026" not in out and max(map(len, out.splitlines())) <= width
    parts = ("draft_model", "0.7", "2.31 [1.94, 3.05]", ".51 " * 6, "12.34", "5.43")
    assert all(part in out for part in (*parts, "0.98x", "1.23x", "yes"))


def test_bench_says_how_far_a_tuned_target_is_from_the_one_named():
    notes = bench.Bench(drafters="medusa,medusa2")._tuned_targets("tiny")
    assert len(notes) == 1
    assert re.match(r"medusa2: lossless to the target that was .* at 96.5%", notes[0])
