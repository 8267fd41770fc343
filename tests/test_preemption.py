"""SIGTERM and Ctrl-C end a training whole, and the same command goes on."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import conftest
import folders
import pytest

from specjax import preemption, targets, testing
from specjax.targets import Tokenizer


@pytest.fixture(scope="module", autouse=True)
def heard():
    """Ctrl-C is heard here and in processes begun here, also where a shell that put the
    tests into the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_signal_before_the_first_step_ends_the_run_where_it_stands():
    before = signal.getsignal(signal.SIGTERM)
    says = pytest.raises(preemption.Stopped, match="before training")
    with says, preemption.watch():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_a_step_waits_for_its_end_and_the_second_does_not(number):
    before = signal.getsignal(number)
    with preemption.watch() as watch:
        watch.waits = True
        assert not watch(1)
        os.kill(os.getpid(), number)
        assert watch(2)
        assert signal.getsignal(number) == before


def test_a_signal_that_was_ignored_stays_so():
    """As of a run that a shell put into the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with preemption.watch():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


# --- the command


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Trains medusa for a saved toy target in a process of its own."""
    root = tmp_path_factory.mktemp("world")
    target, params = testing.tiny_target(vocab_size=64, num_layers=2)
    tokenizer = Tokenizer(folders.toy_tokenizer(), folders.TEMPLATE, None, "<|end|>")
    made = targets.Pretrained("toy", target, params, tokenizer, (0,))
    targets.save_pretrained(root / "toy", made)
    text = json.dumps({"text": "the ant and the cat, in the hat"})
    (root / "texts.jsonl").write_text(f"{text}\n" * 20)
    env = os.environ | {
        "SPECJAX_CACHE": str(conftest.CACHE),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONUNBUFFERED": "1",
    }

    def start(out, *args):
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "specjax.cli", "train", "medusa"),
                *("--target", root / "toy", "--length", "32", "--out", out),
                *("--field", "gamma=2", "--batch-size", "2", *args),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )

    start.data = ("--data", str(root / "texts.jsonl"))
    return start


def when(there, process, number, first=None):
    """Sends a signal as soon as a file is there and not empty; the last line said.

    That of `first` if the process is not the first one of its run.
    """
    for _ in range(6000):
        if there.exists() and (there.is_dir() or there.stat().st_size):
            break
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    if first is None:
        return end(process)
    line, (_, error) = end(first), process.communicate(timeout=60)
    assert process.returncode == 0, error
    return line


def end(process):
    """The last line that a run which ended well printed."""
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert "Traceback" not in error
    return out.splitlines()[-1]


def logged(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.slow
def test_a_run_stopped_while_compiling_and_in_a_step_ends_as_one_that_was_not(
    command, tmp_path
):
    args, out = (*command.data, "--steps", "400"), tmp_path / "run"
    says = r"specjax: stopped after step \d+ of 400; run the same command to go on\."
    for at, number in (
        (out / "checkpoints", signal.SIGTERM),  # before the first step is compiled
        (out / "metrics.jsonl", signal.SIGINT),  # after its tenth step
    ):
        line = when(at, command(out, *args), number)
        assert re.fullmatch(says, line), line
        step = line.split()[4]
        assert (out / "checkpoints" / step).is_dir()
        assert not (out / "drafter").exists()
    with (out / "metrics.jsonl").open("a") as file:  # as a killed run may leave it
        file.write('{"step": 400, "loss": 1.0}\n{"step": 4')
    whole = tmp_path / "whole"
    processes = command(out, *args), command(whole, *args)
    assert all("wrote" in end(p) for p in processes)
    weights = [
        (f / "drafter" / "drafter.safetensors").read_bytes() for f in (out, whole)
    ]
    assert weights[0] == weights[1]
    assert logged(out) == logged(whole) == list(range(10, 401, 10))


def test_a_run_stopped_while_the_target_writes_leaves_nothing_half(command, tmp_path):
    process = command(tmp_path, "--self-prompts", "100000")
    assert "writes 100000 chats" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    says = "specjax: stopped before training began; run the same command to go on."
    assert end(process) == says
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_processes_end_after_the_same_step_when_one_is_told(command, tmp_path):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    joins = ("--coordinator", f"127.0.0.1:{port}", "--num-processes", "2")
    args = (*command.data, "--steps", "600", "--batch-size", "16", *joins)
    first, second = (command(tmp_path, *args, "--process-id", i) for i in "01")
    line = when(tmp_path / "metrics.jsonl", second, signal.SIGTERM, first)
    step = re.fullmatch(r"specjax: stopped after step (\d+) of 600; .*", line)[1]
    assert (tmp_path / "checkpoints" / step).is_dir()
