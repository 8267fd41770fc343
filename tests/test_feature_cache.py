"""Features on disk: what is read is what was computed, shard by shard, or an error."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from toy_run import CONFIG, DRAFTER, TEXTS, Log, make_target, make_texts, same

from specjax import distributed, feature_cache, training
from specjax.sharding import MeshShape

SHARD = {"batch_size": 2, "shard_bytes": 1}  # 2 texts each: 5 shards of 10 texts


@pytest.fixture(scope="module")
def pretrained():
    return make_target()


def build(folder, pretrained, taps=(-1,), texts=TEXTS, **options):
    return feature_cache.cache_features(
        folder, pretrained, taps, texts, **SHARD | options
    )


@pytest.fixture(scope="module")
def whole(pretrained, tmp_path_factory):
    """A cache of five shards, the last of one text."""
    folder = tmp_path_factory.mktemp("features") / "c"
    build(folder, pretrained, texts=make_texts(rows=9))
    return folder


@pytest.fixture
def again(pretrained, whole, tmp_path):
    """A copy of it, and how to open that."""
    shutil.copytree(whole, tmp_path / "c")
    run = functools.partial(build, tmp_path / "c", pretrained, texts=make_texts(rows=9))
    return SimpleNamespace(folder=tmp_path / "c", open=run)


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_cached_features_are_those_computed_on_the_fly(pretrained, tmp_path):
    taps, done = (1, -1), []
    options = {"batch_size": 4, "shard_bytes": 2**20, "progress": done.append}
    cache = build(tmp_path / "c", pretrained, taps, **options)
    assert done == [4, 8, 10]  # the last batch is not full
    run = jax.jit(functools.partial(feature_cache.features, pretrained.target, taps))
    live = run(pretrained.params, TEXTS.tokens, TEXTS.mask)
    rows = np.array([9, 0, 3, 8, 9])  # any order, repeats too
    batch = cache.batch(TEXTS, rows)
    np.testing.assert_array_equal(batch.tokens, TEXTS.tokens[rows])
    pairs = ((batch.features, live.features), (batch.hidden, live.hidden))
    for found, full in pairs:
        found, wanted = np.asarray(found), np.asarray(full)[rows]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, rtol=2**-8, atol=1e-5)
        distances = np.abs(found[:, None] - np.asarray(full)[None]).sum((2, 3))
        np.testing.assert_array_equal(distances.argmin(1), rows)
        rounded = found.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(found, rounded)
    small = build(tmp_path / "small", pretrained, taps)  # in shards of two texts
    assert len(list((tmp_path / "small").glob("*.npy"))) == 5
    same(build(tmp_path / "c", pretrained, taps).batch(TEXTS, rows), batch)
    # A batch of another size may be rounded otherwise, on some machines.
    close = functools.partial(np.testing.assert_allclose, rtol=2**-7, atol=1e-5)
    jax.tree.map(close, small.batch(TEXTS, rows), batch)


def test_a_batch_on_a_mesh_is_that_of_one_device(pretrained, tmp_path):
    cache = build(tmp_path / "c", pretrained)
    mesh, rows = MeshShape(data=2, tensor=4).make(), np.array([5, 0, 9, 8])
    batch = cache.batch(TEXTS, rows, mesh)
    assert batch.features.sharding.shard_shape(batch.features.shape)[0] == 2
    same(jax.tree.map(np.asarray, batch), cache.batch(TEXTS, rows))


def test_cached_keys_and_values_are_those_of_their_layer_and_row(pretrained, tmp_path):
    layers, rows = {"kv_layers": (0, 1)}, np.array([9, 0])
    cache = build(tmp_path / "c", pretrained, **layers)
    run = functools.partial(feature_cache.features, pretrained.target, (-1,), **layers)
    live = jax.jit(run)(pretrained.params, TEXTS.tokens, TEXTS.mask)
    empty = pretrained.target.init_cache(len(TEXTS), 16)
    own = jax.jit(pretrained.target)(pretrained.params, TEXTS.tokens, empty).cache
    same(live.kv, tuple(zip(own.k, own.v, strict=True)))
    right = jax.tree.map(lambda x: x[rows], live.kv)
    found = cache.batch(TEXTS, rows).kv
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-8, atol=1e-5)
    with pytest.raises(ValueError, match=r"differs in: fields, kv_layers"):
        build(tmp_path / "c", pretrained, kv_layers=(1,))


# --- int8


@pytest.mark.parametrize("taps", [(1, -1), ()])
def test_int8_is_off_by_half_a_step_of_its_token_and_tap(pretrained, tmp_path, taps):
    cache = build(tmp_path / "c", pretrained, taps, dtype="int8", kv_layers=(0,))
    full = functools.partial(feature_cache.features, pretrained.target, taps)
    live = jax.jit(functools.partial(full, kv_layers=(0,)))(
        pretrained.params, TEXTS.tokens, TEXTS.mask
    )
    found = cache.batch(TEXTS, np.arange(10))
    D = live.hidden.shape[-1]
    pairs = [(found.hidden, live.hidden), *zip(found.kv[0], live.kv[0], strict=True)]
    if taps:
        parted = lambda x: np.asarray(x.features).reshape(10, 16, 2, D)
        pairs.append((parted(found), parted(live)))
    assert found.features.shape == (10, 16, len(taps) * D)
    for a, b in pairs:
        step = np.abs(b).max(-1, keepdims=True) / 127
        assert (np.abs(a - b) <= step * 0.5001).all()


def test_int8_keeps_zeros_and_the_ends_of_its_scale():
    x = jnp.array([[0.0, 0.0, 0.0], [-2.54, 1.0, 2.54], [1e-30, 0.0, -1e-30]])
    q, scale = jax.jit(feature_cache.quantise)(x)
    assert q.dtype == jnp.int8
    np.testing.assert_array_equal(q, [[0, 0, 0], [-127, 50, 127], [127, 0, -127]])
    np.testing.assert_allclose(scale, [0.0, 0.02, 1e-30 / 127], rtol=1e-6)


def test_int8_takes_half_the_bytes(pretrained, tmp_path):
    sizes = []
    for dtype in ("bfloat16", "int8"):
        build(tmp_path / dtype, pretrained, dtype=dtype)
        sizes.append(sum(p.stat().st_size for p in (tmp_path / dtype).glob("*.npy")))
    assert sizes[1] < 0.7 * sizes[0]  # of width 16 a scale is a fifth; of 4096, 0.1 %


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_training_from_the_cache_follows_training_without(pretrained, tmp_path, dtype):
    cache = build(tmp_path / "c", pretrained, dtype=dtype)
    logs = Log(), Log()
    with jax.numpy_dtype_promotion("standard"):
        for log, given in zip(logs, (None, cache), strict=True):
            training.train(pretrained, DRAFTER, TEXTS, CONFIG, cache=given, log=log)
    for step, values in logs[0].items():
        for name, value in values.items():
            assert logs[1][step][name] == pytest.approx(value, rel=0.05, abs=0.02)


# --- what is refused


@pytest.mark.parametrize("foreign", ["texts", "taps", "weights", "target", "fields"])
def test_a_cache_of_something_else_is_refused(pretrained, again, foreign):
    other = jax.tree.map(lambda x: x * 1.01, pretrained.params)
    of = functools.partial(dataclasses.replace, pretrained)
    arguments = {
        "texts": dict(texts=make_texts(seed=1, rows=9)),
        "taps": dict(taps=(1,)),
        "weights": dict(pretrained=of(params=other)),
        "target": dict(pretrained=of(name="other")),
        "fields": dict(dtype="int8"),
    }[foreign]
    call = dict(pretrained=pretrained, texts=make_texts(rows=9)) | arguments
    hint = r" .*--feature-dtype bfloat16 reads it" if foreign == "fields" else "$"
    match = rf"differs in: {foreign}\).*delete it\.{hint}"
    with pytest.raises(ValueError, match=match):
        build(again.folder, **call)


@pytest.mark.parametrize("text", ["", "[]", '{"target": 3', None])
def test_a_folder_without_a_readable_manifest_is_refused(again, text):
    """A cache of one file, as earlier versions made it, too."""
    path = again.folder / "manifest.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ValueError, match=r"is no feature cache .*delete it") as error:
        again.open()
    assert "\n" not in str(error.value)


def flip(path, share):
    data = bytearray(path.read_bytes())
    data[int(share * (len(data) - 1))] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a bit of the header": lambda shard: flip(shard, 0.0),
    "a bit within": lambda shard: flip(shard, 0.6),
    "the last bit": lambda shard: flip(shard, 1.0),
    "emptied": lambda shard: shard.write_bytes(b""),
    "cut short": lambda shard: shard.write_bytes(shard.read_bytes()[:-1]),
    "no checksum": lambda shard: shard.with_suffix(".sha256").unlink(),
    "another checksum": lambda shard: flip(shard.with_suffix(".sha256"), 0.1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_is_named_and_it_alone_is_made_anew(again, damage):
    before = files(again.folder)
    DAMAGE[damage](again.folder / "00001.npy")
    with pytest.raises(ValueError, match=r"damaged.*: \S+/00001\.npy\. Del") as error:
        again.open()
    assert "\n" not in str(error.value)
    (again.folder / "00001.npy").unlink()
    done = []
    again.open(progress=done.append)
    assert done == [4]  # of five shards
    assert files(again.folder) == before


def test_checksums_are_in_the_form_of_sha256sum(whole):
    hexadecimal, name = (whole / "00004.sha256").read_text().split("  ")
    data = (whole / "00004.npy").read_bytes()
    assert (hexadecimal, name) == (hashlib.sha256(data).hexdigest(), "00004.npy\n")


# --- builds that end early


@pytest.mark.parametrize("last", [1, 4, 5, 9])
def test_a_killed_build_goes_on_at_the_first_missing_shard(
    pretrained, whole, tmp_path, last
):
    texts, folder, done = make_texts(rows=9), tmp_path / "c", []

    def killed(number):
        if number >= last:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(folder, pretrained, texts=texts, progress=killed)
    kept = len(list(folder.glob("*.npy")))
    assert kept == {1: 0, 4: 1, 5: 2, 9: 4}[last]
    # A cache keeps the shards it was begun with.
    build(folder, pretrained, texts=texts, progress=done.append, batch_size=8)
    assert done == [4, 6, 8, 9][max(kept - 1, 0) :] if kept else [2, 4, 6, 8, 9]
    assert files(folder) == files(whole)


def test_a_killed_start_leaves_nothing_in_the_way(pretrained, tmp_path):
    (tmp_path / "c.partial").mkdir()
    (tmp_path / "c.partial" / "manifest.json").write_text("{")
    (tmp_path / "c").mkdir()  # made by hand, empty
    build(tmp_path / "c", pretrained)
    assert not (tmp_path / "c.partial").exists()


def test_a_full_disk_says_so_and_keeps_the_shards_before(
    pretrained, whole, tmp_path, monkeypatch
):
    folder, texts = tmp_path / "c", make_texts(rows=9)

    def full(number):
        raise OSError(28, "No space left on device")

    def later(number):  # after two shards
        if number == 4:
            monkeypatch.setattr(feature_cache.os, "fsync", full)

    with pytest.raises(
        OSError, match=r"00001\.npy \(No space left .*run again"
    ) as error:
        build(folder, pretrained, texts=texts, progress=later)
    assert "\n" not in str(error.value)
    assert {p.name for p in folder.iterdir()} == {
        *("manifest.json", "00000.npy", "00000.sha256")
    }
    monkeypatch.undo()
    build(folder, pretrained, texts=texts)
    assert files(folder) == files(whole)


def test_a_disk_that_is_too_small_is_noticed_before_the_work(
    pretrained, tmp_path, monkeypatch
):
    usage = SimpleNamespace(free=100)
    monkeypatch.setattr(feature_cache.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(OSError, match=r"features need 0\.0 MB more .*0\.0 MB are free"):
        build(tmp_path / "c", pretrained)


# --- several processes


def test_processes_build_their_shares_and_open_the_same(
    pretrained, whole, tmp_path, monkeypatch
):
    """Each in turn here; each would wait for the others where this one goes on."""
    folder, texts, made = tmp_path / "c", make_texts(rows=9), {}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for name in ("agree", "everywhere", "wait"):
        monkeypatch.setattr(distributed, name, lambda mine: mine)
    for process in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda p=process: p)
        done = made.setdefault(process, [])
        build(folder, pretrained, texts=texts, progress=done.append)
    assert made == {0: [2, 6, 9], 1: [4, 8]}
    assert files(folder) == files(whole)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["alone", "together"])
def test_two_processes_build_what_one_does(whole, tmp_path, how):
    """Each its shards with the weights it has, or all with weights that they share."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    script = pathlib.Path(__file__).with_name("shared_cache.py")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [
        subprocess.Popen(
            [sys.executable, script, tmp_path / "c", str(port), str(process), how],
            **pipes,
            env=env,
        )
        for process in (0, 1)
    ]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    done = [out.splitlines()[-1].rpartition(" ")[0] for out, _ in said]
    alone = ["[2, 6, 9]", "[4, 8]"]
    assert done == (alone if how == "alone" else ["[2, 4, 6, 8, 9]"] * 2)
    assert said[0][0].split()[-1] == said[1][0].split()[-1]  # what they read of it
    assert set(files(tmp_path / "c")) == set(files(whole))


def test_a_manifest_says_what_a_row_holds(whole):
    found = json.loads((whole / "manifest.json").read_text())
    assert found["shard_texts"] == found["batch_size"] == 2
    assert found["fields"]["hidden"] == ["uint16", 16, 16]
    assert np.load(whole / "00000.npy").dtype["hidden"].shape == (16, 16)
