"""A run that ends early goes on as if it had not; what is damaged is not read."""

import contextlib
import dataclasses
import errno
import functools
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_run import CONFIG, DRAFTER, TEXTS, Log, make_target, make_texts, same

from specjax import preemption, run_state, sharding
from specjax.feature_cache import cache_features
from specjax.run_state import Checkpoints
from specjax.sharding import MeshShape
from specjax.targets.scanned import Scanned
from specjax.training import train


@pytest.fixture(scope="module", autouse=True)
def promotion():
    """AdamW of optax raises a float to an integer count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def pretrained():
    return make_target()


@pytest.fixture(scope="module")
def straight(pretrained, tmp_path_factory):
    """Ten steps at one go: folder, parameters, metrics."""
    folder, log = tmp_path_factory.mktemp("straight"), Log()
    params = train(pretrained, DRAFTER, TEXTS, CONFIG, folder=folder, log=log)
    return folder, params, log


def steps(folder):
    return sorted(int(p.name) for p in (folder / "checkpoints").iterdir())


def state_at_the_end(folder, step=CONFIG.steps, mesh=None):
    """Parameters and optimiser state of a checkpoint."""
    shared = make_target().target.shared(make_target().params)
    params = jax.jit(DRAFTER.init)(jax.random.key(0), shared)
    params = sharding.place(params, mesh)
    state = CONFIG.optimiser().init(params)
    about = folder / "checkpoints" / str(step) / "about" / "metadata"
    keeper = Checkpoints(folder / "checkpoints", json.loads(about.read_text()))
    found = keeper.restore(params, state)
    keeper.close()
    assert found[0] == step
    return jax.tree.map(np.asarray, found[1:])


@pytest.mark.parametrize("stop", [4, 5])  # within an epoch, at its end
def test_a_resumed_run_is_the_straight_one_bit_by_bit(
    pretrained, straight, tmp_path, stop
):
    log = Log()
    run = functools.partial(train, pretrained, DRAFTER, TEXTS, CONFIG, folder=tmp_path)
    run(log=log, stop_after=stop)
    assert list(log) == list(range(1, stop + 1))
    params = run(log=log)
    folder, expected, metrics = straight
    assert log == metrics  # each step once, the same numbers
    same(params, expected)
    same(state_at_the_end(tmp_path), state_at_the_end(folder))
    assert steps(folder) == [9, 10]  # the last two


def test_a_run_that_is_asked_to_stop_goes_on_there(pretrained, straight, tmp_path):
    run = functools.partial(train, pretrained, DRAFTER, TEXTS, CONFIG, folder=tmp_path)
    with pytest.raises(preemption.Stopped, match="stopped after step 4 of 10"):
        run(stop=lambda step: step == 4)
    assert steps(tmp_path) == [3, 4]
    log = Log()
    same(run(stop=lambda step: step == 10, log=log), straight[1])  # it was the last
    assert list(log) == [5, 6, 7, 8, 9, 10]


def copy(straight, tmp_path):
    shutil.copytree(straight[0], tmp_path / "run")
    return tmp_path / "run"


def test_a_finished_run_goes_on_by_nothing(pretrained, straight, tmp_path):
    log, folder = Log(), copy(straight, tmp_path)
    params = train(pretrained, DRAFTER, TEXTS, CONFIG, folder=folder, log=log)
    assert log == {}
    same(params, straight[1])


def test_a_run_of_another_net_is_no_damaged_file(pretrained, straight, tmp_path):
    """The fields are the same, the code has changed."""
    folder, start = copy(straight, tmp_path), straight[1]
    wider = jax.tree.map(lambda x: jnp.pad(x, [(0, 1)] * x.ndim), start)
    with pytest.raises(ValueError, match="other settings"):
        train(pretrained, DRAFTER, TEXTS, CONFIG, folder=folder, params=wider)


def test_a_killed_save_leaves_the_one_before(pretrained, straight, tmp_path):
    """Checkpoint 10 was being written: a temporary folder, no final one."""
    folder, log = copy(straight, tmp_path), Log()
    kept = folder / "checkpoints"
    (kept / "10").rename(kept / "10.orbax-checkpoint-tmp")
    for path in (kept / "10.orbax-checkpoint-tmp").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    params = train(pretrained, DRAFTER, TEXTS, CONFIG, folder=folder, log=log)
    assert list(log) == [10]
    same(params, straight[1])
    assert steps(folder) == [9, 10]  # what the killed save left is gone


def empty(path: pathlib.Path):
    for file in path.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE = {
    "everything cut in half": lambda step: empty(step),
    "the arrays cut in half": lambda step: empty(step / "tree"),
    "the arrays gone": lambda step: shutil.rmtree(step / "tree"),
    "the settings gone": lambda step: shutil.rmtree(step / "about"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_says_what_to_delete(
    pretrained, straight, tmp_path, damage
):
    folder, log = copy(straight, tmp_path), Log()
    newest = folder / "checkpoints" / "10"
    DAMAGE[damage](newest)
    run = functools.partial(train, pretrained, DRAFTER, TEXTS, CONFIG, folder=folder)
    with pytest.raises(ValueError, match=r"checkpoints/10 is damaged.*delete") as error:
        run()
    assert "\n" not in str(error.value)
    shutil.rmtree(newest)
    same(run(log=log), straight[1])
    assert list(log) == [10]


@pytest.mark.parametrize("changed", ["config", "texts", "fields", "target", "features"])
def test_other_settings_are_refused_by_their_name(
    pretrained, straight, tmp_path, changed
):
    taps, folder = DRAFTER.taps, tmp_path / "c"
    arguments = (
        dict(pretrained=pretrained, drafter=DRAFTER, texts=TEXTS, config=CONFIG)
        | {
            "features": dict(cache=cache_features(folder, pretrained, taps, TEXTS)),
            "config": dict(config=dataclasses.replace(CONFIG, learning_rate=1e-4)),
            "texts": dict(texts=make_texts(seed=1)),
            "fields": dict(drafter=dataclasses.replace(DRAFTER, decay=0.5)),
            "target": dict(pretrained=dataclasses.replace(pretrained, name="other")),
        }[changed]
    )
    with pytest.raises(ValueError, match=rf"step 10 .*other settings.*{changed}"):
        train(**arguments, folder=copy(straight, tmp_path))


# --- other meshes

MESHES = [MeshShape(data=2, fsdp=2, tensor=2), MeshShape(fsdp=8), MeshShape(tensor=8)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_a_run_goes_on_on_another_mesh(pretrained, straight, tmp_path, shape):
    """What is read is equal, bit by bit; what is computed of it to 1e-6."""
    mesh, log = shape.make(), Log()
    run = functools.partial(train, pretrained, DRAFTER, TEXTS, CONFIG, folder=tmp_path)
    run(stop_after=5)
    same(state_at_the_end(tmp_path, 5), state_at_the_end(tmp_path, 5, mesh))
    params = run(mesh=mesh, log=log)
    assert list(log) == [6, 7, 8, 9, 10]
    for a, b in zip(*map(jax.tree.leaves, (params, straight[1])), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    for step, values in log.items():
        assert values["loss"] == pytest.approx(straight[2][step]["loss"], rel=1e-6)


@pytest.mark.slow
def test_a_run_on_a_mesh_goes_on_on_it_bit_by_bit_and_off_it(
    pretrained, straight, tmp_path
):
    mesh, ends = MESHES[0].make(), []
    run = functools.partial(train, pretrained, DRAFTER, TEXTS, CONFIG)
    ends.append(run(folder=tmp_path / "whole", mesh=mesh))
    for on in (mesh, None):
        folder = tmp_path / str(on is None)
        run(folder=folder, mesh=mesh, stop_after=4)
        ends.append(run(folder=folder, mesh=on))
    host = [jax.tree.map(np.asarray, params) for params in ends]
    same(host[0], host[1])
    for a, b in zip(*map(jax.tree.leaves, (host[2], straight[1])), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_what_is_restored_lies_as_what_was_given(tmp_path):
    """Saved from one mesh; on the other, and on one device, it is split as asked."""
    tree = {"head": jnp.arange(128.0).reshape(16, 8)}
    state = {"mu": tree, "count": jnp.int32(3)}
    first, *others = (MESHES[2].make(), MESHES[1].make(), None)
    with opened(tmp_path) as keeper:
        keeper.save(1, *(sharding.place(x, first) for x in (tree, state)))
        keeper.manager.wait_until_finished()
        for mesh in others:
            given = jax.tree.map(jnp.zeros_like, (tree, state))
            given = tuple(sharding.place(x, mesh) for x in given)
            step, *found = keeper.restore(*given)
            assert step == 1
            same(found, [tree, state])
            lies = lambda a, b: a.sharding == b.sharding
            assert jax.tree.all(jax.tree.map(lies, tuple(found), given))


@pytest.mark.slow
def test_a_run_goes_on_with_layers_scanned(pretrained, straight, tmp_path):
    run = functools.partial(train, drafter=DRAFTER, texts=TEXTS, config=CONFIG)
    run(pretrained, folder=tmp_path, stop_after=5)
    target = Scanned(pretrained.target)
    params = target.stack(pretrained.params)
    stacked = dataclasses.replace(pretrained, target=target, params=params)
    found, log = run(stacked, folder=tmp_path, log=(log := Log())), log
    assert list(log) == list(range(6, 11))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(straight[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


# --- flipped bits, full disks, two runs at once

TREE = {"w": np.arange(20000, dtype=np.float32) ** 2}  # 80 kB, hard to compress
STATE = {"count": np.int32(3)}


@contextlib.contextmanager
def opened(folder, about=None):
    keeper = Checkpoints(folder / "checkpoints", about or {"a": 1})
    try:
        yield keeper
    finally:
        keeper.close()


def placed():
    return jax.tree.map(jnp.asarray, (TREE, STATE))


def flip(path, rng):
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def test_a_flipped_bit_in_any_file_is_noticed_or_without_effect(tmp_path, capfd):
    """Orbax alone restores other numbers. Its own notes are not read for content."""
    with opened(tmp_path) as keeper:
        keeper.save(1, *placed())
    step, rng, noticed = tmp_path / "checkpoints" / "1", random.Random(0), []
    for path in sorted(p for p in step.rglob("*") if p.is_file()):
        whole = path.read_bytes()
        flip(path, rng)
        with opened(tmp_path) as keeper:
            try:
                found = keeper.restore(*placed())
            except ValueError as error:
                assert "checkpoints/1 is damaged (" in str(error)
                assert "\n" not in str(error)
                noticed.append(path.name)
            else:
                same(found, (1, TREE, STATE))
                assert path.name in ("commit_success.txt", "_CHECKPOINT_METADATA")
        path.write_bytes(whole)
    assert "sums.sha256" in noticed and "manifest.ocdbt" in noticed
    assert capfd.readouterr().err == ""


@contextlib.contextmanager
def small_files(limit):
    """No file may grow past a limit: errors as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_error_and_leaves_the_step_before(tmp_path, capfd):
    with opened(tmp_path) as keeper:
        keeper.save(1, *placed())
    says = (
        r"of step 2 cannot be written to \S+/checkpoints \(File too large\).* run "
        "again, it goes on from step 1"
    )
    with (
        small_files(10_000),
        pytest.raises(OSError, match=says) as error,
        opened(tmp_path) as keeper,
    ):
        keeper.save(2, *placed())
    assert "\n" not in str(error.value)
    with opened(tmp_path) as keeper:
        same(keeper.restore(*placed()), (1, TREE, STATE))
        keeper.save(2, *placed())
    with opened(tmp_path) as keeper:
        same(keeper.restore(*placed()), (2, TREE, STATE))
    assert steps(tmp_path) == [1, 2]  # what the failed save left is gone
    assert capfd.readouterr().err == ""


def test_checksums_that_cannot_be_written_undo_the_save(tmp_path, monkeypatch):
    def full(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path) as keeper:
        keeper.save(1, *placed())
        keeper.manager.wait_until_finished()
        monkeypatch.setattr(run_state, "_sums", full)
        keeper.save(2, *placed())
        with pytest.raises(OSError, match=r"step 2 cannot .*No space left on device"):
            keeper.save(3, *placed())
    monkeypatch.undo()
    with opened(tmp_path) as keeper:
        assert keeper.restore(*placed())[0] == 1


def test_a_second_run_in_the_folder_is_refused_while_the_first_one_lives(tmp_path):
    (tmp_path / "lock").touch()  # what any run leaves
    with opened(tmp_path) as keeper:
        with pytest.raises(ValueError, match=r"another run is training in .*--out"):
            Checkpoints(tmp_path / "checkpoints", {})
        keeper.save(1, *placed())
    with opened(tmp_path) as keeper:
        assert keeper.restore(*placed())[0] == 1


# --- SIGKILL


class Forks:
    """`toy_process.py`: trainings to kill."""

    def __init__(self, folder):
        cache = folder / "xla"
        env = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        script = pathlib.Path(__file__).with_name("toy_process.py")
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, script], stdin=pipe, stdout=pipe, text=True, env=env
        )

    def start(self, folder, steps):
        print(folder, steps, file=self.process.stdin, flush=True)
        name, number = self.read()
        assert name == "process"
        return number

    def read(self):
        name, number = self.process.stdout.readline().split()
        return name, int(number)

    def rest(self):
        """Steps up to the end, and its status."""
        steps = []
        while (line := self.read())[0] == "step":
            steps.append(line[1])
        assert line[0] == "end"
        return steps, line[1]


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.process.kill()
    forks.process.communicate()


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(forks, tmp_path):
    """A checkpoint is written at every step, so most kills are during a save."""
    kills, total = 20, 60
    forks.start(tmp_path / "whole", total)
    assert forks.rest() == (list(range(1, total + 1)), 0)
    rng, folder, reached, cut = random.Random(kills), tmp_path / "killed", 0, 0
    for _ in range(kills):
        number = forks.start(folder, total)
        for _ in range(rng.randint(0, 2)):
            assert forks.read()[0] == "step"
        time.sleep(rng.uniform(0, 0.3))
        os.kill(number, signal.SIGKILL)
        _, status = forks.rest()
        assert status == signal.SIGKILL
        left = list((folder / "checkpoints").glob("*"))
        cut += any("tmp" in p.name for p in left)
        kept = max([int(p.name) for p in left if p.name.isdecimal()], default=0)
        assert kept >= reached  # nothing is lost
        reached = kept
    forks.start(folder, total)
    assert forks.rest() == (list(range(reached + 1, total + 1)), 0)
    same(state_at_the_end(folder, total), state_at_the_end(tmp_path / "whole", total))
    print(f"{cut} of {kills} kills were during a save; {reached} steps before the last")
