"""`specjax train` by two processes over loopback: real collectives, one checkpoint."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from specjax import checkpoints, distributed, targets

SCRIPT = pathlib.Path(__file__).with_name("two_processes.py")
TRAIN = ("train", "medusa", "--self-prompts", "24", "--length", "32", "--steps", "4")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def run(folder, *args, num_processes=2):
    """Starts the processes and returns what each printed."""
    flags = os.environ["XLA_FLAGS"].replace(
        "--xla_force_host_platform_device_count=8", ""
    )
    env = os.environ | {
        "XLA_FLAGS": flags,
        "SPECJAX_CACHE": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    port = free_port()
    joins: list[list[str]] = [[]]
    if num_processes > 1:
        common = ["--coordinator", f"127.0.0.1:{port}"]
        common += ["--num-processes", str(num_processes), "--process-id"]
        joins = [[*common, str(i)] for i in range(num_processes)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *args, *join],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for join in joins
    ]
    try:
        outputs = [p.communicate(timeout=240) for p in processes]
    finally:
        for p in processes:
            p.kill()
    for process, (_, error) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, error
    return [out for out, _ in outputs]


@pytest.mark.slow
def test_two_processes_train_what_one_does(tmp_path):
    """Two processes with two devices each, against one process with one device."""
    both = tmp_path / "both"
    mesh = ("--mesh", "data=2,tensor=2", "--out", str(both))
    outputs = run(tmp_path, *TRAIN, *mesh)
    read = [json.loads(out.splitlines()[-1])["rows"] for out in outputs]
    assert read == [[0, 1, 2, 3], [4, 5, 6, 7]]  # of a batch of 8
    assert "wrote" in outputs[0]
    assert "wrote" not in outputs[1]
    lines = (both / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4]

    alone = tmp_path / "alone"
    run(tmp_path, *TRAIN, "--out", str(alone), num_processes=1)
    texts = [np.load(folder / "texts.npz")["tokens"] for folder in (both, alone)]
    assert np.array_equal(*texts)
    tiny = targets.load("tiny")
    shared = tiny.target.shared(tiny.params)
    load = lambda folder: checkpoints.load(folder / "drafter", shared)[2]
    for name, x in load(alone).items():
        np.testing.assert_allclose(load(both)[name], x, atol=1e-3, err_msg=name)

    more = run(tmp_path, *TRAIN, *mesh)  # the one checkpoint is found by both
    assert "nothing was trained" in more[0]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((None, 2, None), "belong to --coordinator"),
        (("host:1", 2, None), "needs --num-processes and --process-id"),
        (("host:1", 2, 2), "not one of 0 to 1"),
        (("host:1", 0, 0), "--num-processes must be >= 1, got 0"),
        (("host", 2, 0), "has no port"),
        ((":1", 2, 0), "is no HOST:PORT"),
        (("host:99999", 2, 0), "a port of 1 to 65535"),
    ],
)
def test_flags_that_contradict_one_another(flags, says):
    with pytest.raises(ValueError, match=says):
        distributed.start(*flags)


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_run_that_cannot_be_joined_is_one_line(monkeypatch, error):
    def refuse(*args, **options):
        raise error("coordinator_address should be defined.\nmore")

    monkeypatch.setattr("jax.distributed.initialize", refuse)
    for flags in (("auto", None, None), ("host:1", 2, 1)):
        with pytest.raises(ConnectionError, match="could not join the run") as raised:
            distributed.start(*flags)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("mine", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_the_first_process_decides_and_what_one_misses_all_miss(
    monkeypatch, mine, other
):
    """This is process 1 of two, and `other` is what process 0 found."""
    collective = "jax.experimental.multihost_utils."
    both = lambda x: np.stack([np.asarray(other, x.dtype), x])
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr(f"{collective}broadcast_one_to_all", lambda x: both(x)[0])
    monkeypatch.setattr(f"{collective}process_allgather", both)
    assert distributed.agree(mine) is other
    assert distributed.everywhere(mine) is (mine and other)
