"""The layer rule: imports point down, and nothing heavy is imported by accident."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import specjax
from specjax.drafters import REGISTRY

ROOT = Path(specjax.__file__).parent
FILES = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py"))
LAYERS = [
    {"typing", "pytree"},
    {"sampling", "tree", "sharding", "kernels"} | {"distributed", "preemption"},
    {"layers", "kv_cache", "metrics", "verify", "draft_tree", "draft_vocab"}
    | {"scheduler", "calibration"},
    {"clustered_head"},
    {"transformer", "mla", "gemma"},
    {"targets", "drafters"},
    {"generate", "training", "corpus", "checkpoints", "joint"}
    | {"feature_cache", "run_state"},
]
LEVEL = {name: i for i, names in enumerate(LAYERS) for name in names}
TOP = len(LAYERS)  # testing, bench, the command line: may import everything


def imports(file):
    """Modules of the package that a file imports anywhere, as paths below it."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "specjax"
        ):
            module = node.module.split(".")[1:]
            for alias in node.names:
                yield (
                    ".".join([*module, alias.name])
                    if len(module) < 2
                    else ".".join(module)
                )
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("specjax."):
                    yield alias.name.partition(".")[2]


def unit(path):
    """The file or folder directly under the package."""
    return path.replace("/", ".").removesuffix(".py").split(".")[0]


@pytest.mark.parametrize("file", FILES)
def test_a_file_imports_only_from_lower_layers(file):
    own = unit(file)
    if own == "__init__":
        pytest.skip("re-exports")
    level = LEVEL.get(own, TOP)
    for module in imports(file):
        other = unit(module)
        if other == own or level == TOP:
            continue
        # Files of one layer may build on each other, folders never.
        allowed = level if own not in ("targets", "drafters") else level - 1
        if own == "drafters" and other == "verify":
            continue
        assert LEVEL.get(other, TOP) <= allowed, f"{file} imports {module}"


@pytest.mark.parametrize("file", [f for f in FILES if f.startswith("drafters/")])
def test_a_drafter_knows_no_target_and_at_most_one_other_drafter(file):
    mine = [m for m in imports(file) if m.startswith(("drafters", "targets"))]
    assert not [m for m in mine if m.startswith("targets")]
    if file == "drafters/__init__.py":
        return
    # Those with a name; `base`, `block`, `recurrent`, `parallel` are what they share.
    named = {cls.__module__.split(".")[-1] for cls in REGISTRY.values()}
    others = {m.split(".")[1] for m in mine if len(m.split(".")) > 1} & named
    assert len(others) <= 1, f"{file} builds on {sorted(others)}"


@pytest.mark.parametrize("file", [f for f in FILES if f.startswith("targets/")])
def test_a_target_knows_no_drafter(file):
    assert not [m for m in imports(file) if m.startswith("drafters")]


def test_importing_the_package_stays_light():
    heavy = "('torch', 'transformers', 'tensorflow', 'matplotlib', 'tyro', 'optax')"
    code = f"import specjax, sys; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
