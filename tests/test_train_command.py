"""Files of `specjax train`: damaged texts, a full disk, the log of a killed run."""

import errno
import json
import os

import jax
import numpy as np
import pytest

from specjax import cli
from specjax.commands import train

SOURCE = "[]"


@pytest.fixture
def kept(tmp_path):
    path = tmp_path / "texts.npz"
    tokens = np.arange(2000, dtype=np.int32).reshape(20, 100)
    np.savez_compressed(path, tokens=tokens, mask=tokens > 5, source=np.array(SOURCE))
    return path


def test_the_texts_of_a_run_are_found_again(kept):
    found = train._kept_texts(kept, SOURCE)
    assert found.tokens[19, 99] == 1999 and found.mask.sum() == 1994
    with pytest.raises(ValueError, match="was made from other data or settings"):
        train._kept_texts(kept, "[1]")


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_damaged_texts_are_one_error(kept, how, share):
    data = bytearray(kept.read_bytes())
    at = int(share * len(data))
    data[at] ^= 1
    kept.write_bytes(data if how == "flipped" else data[:at])
    with pytest.raises(
        ValueError, match=r"texts\.npz is damaged .*; delete it"
    ) as error:
        train._kept_texts(kept, SOURCE)
    assert "\n" not in str(error.value)


def test_a_log_loses_what_a_killed_run_wrote_past_its_checkpoint(tmp_path):
    lines = [{"step": step, "loss": 1.0} for step in (10, 20, 30)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 40, "lo')
    with train._TrainLog(tmp_path, steps=50) as log:
        for step in (20, 30):  # goes on after step 10
            log.write(step, {"loss": 2.0, "tokens_per_s": 1.0})
    assert [(x["step"], x["loss"]) for x in log.read()] == [(10, 1), (20, 2), (30, 2)]


def full(*args, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_board_that_cannot_be_closed_is_left_in_silence(tmp_path, capfd, monkeypatch):
    tensorboard = pytest.importorskip("tensorboardX")
    board = tensorboard.SummaryWriter(str(tmp_path))
    board.add_scalar("loss", 1.0, 1)
    writer = board.file_writer.event_writer
    monkeypatch.setattr(writer, "flush", full)
    train._close(board)
    writer._worker.join(timeout=30)
    assert not writer._worker.is_alive()
    writer.close()  # as at exit
    assert capfd.readouterr().err == ""


def test_a_full_disk_is_named_where_the_error_does_not(monkeypatch, capsys):
    monkeypatch.setattr(train.Train, "run", full)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "medusa"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("specjax: the disk is full ([Errno 28]")
