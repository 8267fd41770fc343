"""Every experiment script and benchmark runs, shrunk to seconds."""

import dataclasses
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


@pytest.fixture
def scripts(monkeypatch):
    """Every experiment's module by its name."""
    monkeypatch.syspath_prepend(ROOT / "experiments")
    names = [p.stem for p in SCRIPTS if p.parent.name == "experiments"]
    return {name: importlib.import_module(name) for name in names}


def test_every_script_refuses_numbers_below_its_own(scripts):
    """Of each number of each `Config`, in `budget` too; what a script has is taken."""
    common, tried = scripts["serving"].common, 0
    assert len(scripts) > 25

    def negative(value):
        if isinstance(value, tuple):
            return tuple(map(negative, value))
        return type(value)(-1) if type(value) in (int, float) else value

    def spoil(config, wrap, prefix):
        nonlocal tried
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            again = lambda x, n=field.name: wrap(dataclasses.replace(config, **{n: x}))
            flag = f"{prefix}{field.name.replace('_', '-')}"
            if dataclasses.is_dataclass(value):
                spoil(value, again, f"{flag}.")
            elif negative(value) != value:
                tried += 1
                with pytest.raises(ValueError, match=f"{flag} -1.* give "):
                    common.check(again(negative(value)))

    for script in scripts.values():
        common.check(script.Config(**getattr(script, "SMOKE", {})))
        common.check(script.Config())
        spoil(script.Config(), lambda config: config, "--")
    assert tried > 200


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("gamma_sweep", "--num-prompts -1", "--num-prompts -1 is .*; give 1 or more"),
        ("gamma_sweep", "--gammas 2 0", "--gammas 0 is out of range; give 1 or more"),
        ("gamma_sweep", "--seeds", "--seeds needs at least one value, such as 0"),
        ("serving", "--threshold nan", "--threshold nan is .*; give 0 to 1"),
        ("block_table", "--budget.steps 0", "--budget.steps 0 is out of range"),
        ("arrivals", "--gammas 0 --rates 0", "--rates 0 is .*; give more than 0"),
    ],
)
def test_a_bad_number_ends_in_one_line(
    scripts, monkeypatch, tmp_path, name, flags, says
):
    script, out = scripts[name], tmp_path / "out"
    monkeypatch.setattr(sys, "argv", [name, *flags.split(), "--out", str(out)])
    with pytest.raises(SystemExit, match=f"^{name}.py: {says}"):
        script.common.run(script.main, script.Config)
    assert not out.exists()


def test_results_name_no_folder_of_the_machine_they_were_made_on():
    texts = {
        p: p.read_text() for p in (ROOT / "experiments").rglob("results/**/*.json")
    }
    assert texts
    assert not [str(p) for p, text in texts.items() if '"/' in text]
