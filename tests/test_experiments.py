"""Every experiment script and benchmark runs, shrunk to seconds."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HELPERS = ("common.py", "timing.py", "trained.py")
SCRIPTS = [
    path
    for folder in ("experiments", "benchmarks")
    for path in sorted((ROOT / folder).glob("*.py"))
    if path.name not in HELPERS
]
TINY = (ROOT / "specjax" / "data" / "tiny").is_dir()


def _common():
    spec = importlib.util.spec_from_file_location(
        "common", ROOT / "experiments" / "common.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.smoke
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_ends_well_in_smoke_mode(script, tmp_path):
    if script.parent.name == "experiments" and not TINY:
        pytest.skip("the tiny target is not in this tree")
    result = subprocess.run(
        [sys.executable, str(script), "--smoke"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.smoke
def test_a_papers_number_stands_beside_the_row_it_belongs_to():
    rows = [{"drafter": "a", "gamma": g, "tau": 1.0 + g} for g in (1, 2)]
    table = _common().table(rows, [{"drafter": "a", "gamma": 2, "tau": 9.0}])
    assert [column.header for column in table.columns][-2:] == ["tau", "(paper)"]
    assert list(table.columns[-1].cells) == ["-", "9"]


def test_results_name_no_folder_of_the_machine_they_were_made_on():
    texts = {
        p: p.read_text() for p in (ROOT / "experiments").rglob("results/**/*.json")
    }
    assert texts
    assert not [str(p) for p, text in texts.items() if '"/' in text]
