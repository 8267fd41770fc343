"""Drafters on disk: what is saved comes back, and what does not fit is refused."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from specjax import checkpoints, drafters, joint
from specjax.drafters import base
from specjax.drafters.draft_model import DraftModel
from specjax.layers import Rope
from specjax.transformer import Shared, TransformerConfig

NAMES = list(drafters.REGISTRY)
CONFIG = TransformerConfig(
    vocab_size=24,
    width=16,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_width=8,
    mlp_width=24,
    rope=Rope(5e5, "llama3", 8.0),
    windows=(None, 4, None, 4),
    max_positions=64,
)


def shared(config=CONFIG):
    table = jnp.zeros((config.vocab_size, config.width))
    return Shared(embed=table, head=table)


def make(name, **fields):
    """A drafter of the paper's shape with random weights."""
    drafter = drafters.get(name).for_target(CONFIG, CONFIG.vocab_size - 1, **fields)
    return drafter, weights(drafter)


def weights(drafter):
    """Random, made without compiling the drafter's own initialisers."""
    want = jax.eval_shape(lambda s: drafter.init(jax.random.key(0), s), shared())
    if together := base.joint(drafter):
        a, b = (jnp.zeros(shape) for shape in ((together.rank, 16), (8, together.rank)))
        want |= {joint.ADAPTER: {"layer_0/mlp/down": {"a": a, "b": b}}}
    rng = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32)
    return jax.tree.map(draw, want)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_comes_back_as_it_was(tmp_path, name):
    drafter, params = make(name)
    about = {"target": "toy", "steps": 3}
    folder = tmp_path / "d"
    checkpoints.save(folder, name, drafter, params, dtype=jnp.float32, about=about)
    found, again, read = checkpoints.load(folder, shared())
    assert (found, again) == (name, drafter)
    assert hash(again) == hash(drafter)
    same(read, params)
    assert json.loads((folder / "drafter.json").read_text())["about"] == about
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]


def test_weights_are_kept_in_bfloat16_unless_asked_otherwise(tmp_path):
    drafter, params = make("medusa")
    checkpoints.save(tmp_path / "d", "medusa", drafter, params)
    _, _, read = checkpoints.load(tmp_path / "d", shared())
    narrow = lambda x: np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)
    same(read, jax.tree.map(narrow, params))
    _, _, half = checkpoints.load(tmp_path / "d", shared(), jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}


def test_nested_settings_are_rebuilt(tmp_path):
    config = dataclasses.replace(CONFIG, qk_norm=True)
    drafter = DraftModel(config, 7, "tv")
    checkpoints.save(tmp_path / "d", "draft_model", drafter, weights(drafter))
    _, again, _ = checkpoints.load(tmp_path / "d", shared())
    assert again == drafter
    assert again.config.rope == CONFIG.rope
    assert again.config.windows == (None, 4, None, 4)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("draft_model", {"vocab_size": 25}),  # it reads ids alone: any width will do
        ("medusa", {"vocab_size": 25}),
        ("medusa", {"width": 32}),
        ("dflash", {"width": 32}),
    ],
)
def test_a_drafter_of_another_target_is_refused(tmp_path, name, fields):
    drafter, params = make(name)
    checkpoints.save(tmp_path / "d", name, drafter, params)
    other = shared(dataclasses.replace(CONFIG, **fields))
    with pytest.raises(ValueError, match=r"(this|the) target|one vocabulary"):
        checkpoints.load(tmp_path / "d", other)


def cut(path: pathlib.Path, keep: float):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


def edit(folder, change):
    path = folder / "drafter.json"
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))


@pytest.fixture
def saved(tmp_path):
    drafter, params = make("draft_model")
    checkpoints.save(tmp_path / "d", "draft_model", drafter, params)
    return tmp_path / "d"


DAMAGE = {
    "half the weights": lambda d: cut(d / "drafter.safetensors", 0.5),
    "no bytes of weights": lambda d: cut(d / "drafter.safetensors", 0.0),
    "half the record": lambda d: cut(d / "drafter.json", 0.5),
    "an empty record": lambda d: cut(d / "drafter.json", 0.0),
    "a list": lambda d: (d / "drafter.json").write_text("[]"),
    "no name": lambda d: edit(d, lambda s: s.pop("name")),
    "no config": lambda d: edit(d, lambda s: s.pop("config")),
    "a field short": lambda d: edit(d, lambda s: s["config"].pop("config")),
    "no UTF-8": lambda d: (d / "drafter.json").write_bytes(b"\xff\xfe{"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_drafter_is_one_line(saved, damage):
    DAMAGE[damage](saved)
    with pytest.raises(ValueError, match=r"the drafter in .* is damaged") as error:
        checkpoints.load(saved, shared())
    assert "\n" not in str(error.value)


def test_weights_that_are_no_numbers_are_named(tmp_path):
    drafter, params = make("medusa")
    params = params | {"b": params["b"].at[0, 0].set(jnp.nan)}
    checkpoints.save(tmp_path / "d", "medusa", drafter, params)
    with pytest.raises(ValueError, match="no finite numbers in b; train it again"):
        checkpoints.load(tmp_path / "d", shared())


def test_what_is_unknown_is_named(saved):
    edit(saved, lambda s: s["config"].update(beta=1))
    with pytest.raises(ValueError, match="DraftModel has no field beta; its fields"):
        checkpoints.load(saved, shared())
    edit(saved, lambda s: s.update(name="eagle9"))
    with pytest.raises(KeyError, match="unknown drafter 'eagle9'; registered: draft"):
        checkpoints.load(saved, shared())


@pytest.mark.parametrize("file", ["drafter.json", "drafter.safetensors"])
def test_a_missing_file_is_named(saved, file):
    (saved / file).unlink()
    with pytest.raises(FileNotFoundError, match=file):
        checkpoints.load(saved, shared())


def test_tensors_too_few_and_too_many_are_named(saved):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(str(saved / "drafter.safetensors"))
    tensors["extra"] = tensors.pop("embed")
    save_file(tensors, str(saved / "drafter.safetensors"))
    with pytest.raises(ValueError, match=r"missing \['embed'\], not used \['extra'\]"):
        checkpoints.load(saved, shared())


A, B = (f"adapter.layer_0/mlp/down.{leaf}" for leaf in "ab")


@pytest.mark.parametrize("name", ["medusa2", "blockwise"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: [t.pop(n) for n in (A, B)], "its adapter is missing"),
        (lambda t: t.pop(B), r"of layer_0/mlp/down needs a .*has {'a': \(32, 16\)}"),
        (lambda t: t.update({A: t[A][:3]}), r"a \[32, in\] .*'a': \(3, 16\)"),
        (lambda t: t.update({A + "x": t[A]}), "'ax':"),
    ],
)
def test_an_adapter_that_is_not_whole_is_refused(tmp_path, name, change, says):
    """Else a part of the target would stay what it was, without a word."""
    from safetensors.numpy import load_file, save_file

    fields = {"tune_target": True} if name == "blockwise" else {}
    checkpoints.save(tmp_path / "d", name, *make(name, **fields))
    file = str(tmp_path / "d" / "drafter.safetensors")
    change(tensors := load_file(file))
    save_file(tensors, file)
    with pytest.raises(ValueError, match=f"drafter in .* is damaged: .*{says}"):
        checkpoints.load(tmp_path / "d", shared())


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("dflash2", "top_k", 2.5),
        ("dflash2", "target_layer_ids", "ab"),
        ("medusa2", "schedule", "cubic"),
        ("medusa2", "distil", "no"),
        ("blockwise", "hidden_width", 7.5),
    ],
)
def test_a_field_of_another_type_is_named(tmp_path, name, field, value):
    checkpoints.save(tmp_path / "d", name, *make(name))
    edit(tmp_path / "d", lambda s: s["config"].update({field: value}))
    with pytest.raises(ValueError, match=f"is damaged: .* has no {field}="):
        checkpoints.load(tmp_path / "d", shared())


def test_saving_again_replaces_what_a_killed_save_left(saved):
    for name in ("d.partial", "d.old"):
        (saved.parent / name).mkdir()
        (saved.parent / name / "drafter.json").write_text("{")
    drafter, params = make("draft_model", gamma=2)
    checkpoints.save(saved, "draft_model", drafter, params)
    assert checkpoints.load(saved, shared())[1].gamma == 2
    assert sorted(p.name for p in saved.parent.iterdir()) == ["d"]


def test_a_failed_save_leaves_the_old_drafter(saved, monkeypatch):
    drafter, params = make("draft_model", gamma=2)

    def fail(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", fail)
    with pytest.raises(OSError, match="no space"):
        checkpoints.save(saved, "draft_model", drafter, params)
    assert checkpoints.load(saved, shared())[1].gamma == 4


def test_shipped_drafters_are_found_in_the_order_of_the_registry(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "__file__", str(tmp_path / "checkpoints.py"))
    for name in (*NAMES, "unheard_of"):
        folder = tmp_path / "data" / "drafters" / "toy" / name
        folder.mkdir(parents=True)
        (folder / "drafter.json").write_text("{}")
    assert list(checkpoints.shipped("toy")) == NAMES
    assert checkpoints.shipped("other") == {}
