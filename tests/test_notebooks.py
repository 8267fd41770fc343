"""Every notebook runs from top to bottom in smoke mode, and is kept short."""

import types
from pathlib import Path

import pytest

from specjax import console

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TINY = (ROOT / "specjax" / "data" / "tiny").is_dir()
MAX_LINES = 15


def _read(path: Path):
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(path, as_version=4)


@pytest.mark.smoke
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_smoke_mode(path, monkeypatch, tmp_path):
    if not TINY:
        pytest.skip("the tiny target is not in this tree")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("SPECJAX_SMOKE", "1")
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(_read(path), timeout=900, resources=where).execute()


@pytest.mark.smoke
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_executed_and_thin(path):
    code = [cell for cell in _read(path).cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code) or not TINY
    assert max(len(cell.source.splitlines()) for cell in code) <= MAX_LINES
    assert not any("def " in cell.source for cell in code)


@pytest.mark.smoke
def test_html_escapes_text_and_leaves_rejected_drafts_out_of_it():
    decode = lambda ids: "".join(map(chr, ids))
    stream = types.SimpleNamespace(push=decode, close=lambda: "")
    tokenizer = types.SimpleNamespace(decode=decode, stream=lambda: stream)
    told = [(ord("<"), console.OWN), (ord("x"), console.REJECTED)]
    page = console.html(told, tokenizer)
    assert "&lt;" in page and "line-through" in page.split("x</span>")[0]
