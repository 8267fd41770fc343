"""Strict settings for the whole suite: what JAX and Python would let pass is an error.

Dtypes and ranks are never promoted silently, every shape in a signature is checked at
run time (jaxtyping with beartype), warnings are errors, and 8 CPU devices are faked so
that sharded code runs.
"""

import os
import re
import tempfile
from importlib.metadata import version
from pathlib import Path

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # Tiny models: compiling is the whole cost, so compile fast instead of well.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
if version("jaxlib").startswith("0.10."):  # XLA ends a process at a flag it has lost
    FLAGS += (
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    )
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402  (after the flags)
import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook("specjax", "beartype.beartype")  # before any import of specjax

from specjax import drafters  # noqa: E402

# Compiled programs are kept between runs; the folder may be deleted at any time. One a
# worker: a program that another is still writing reads as damaged.
CACHE = Path(tempfile.gettempdir()) / f"specjax-test-cache-{os.getuid()}"
CACHE /= os.environ.get("PYTEST_XDIST_WORKER", "main")
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error")
    damaged = "ignore:Error reading persistent compilation cache:UserWarning"
    config.addinivalue_line("filterwarnings", damaged)  # it is compiled again


def group(nodeid: str) -> str:
    """What shares compiled programs runs in one worker: a file's tests, and in the
    conformance battery those of one drafter. A script is a process of its own."""
    path, _, test = nodeid.partition("::")
    shared = Path(path).stem
    if shared == "test_experiments":
        return nodeid
    if shared == "test_conformance":
        names = re.findall(r"[a-z_0-9]+", test.partition("[")[2])
        shared += "".join(f"-{n}" for n in names if n in drafters.REGISTRY)
    return shared


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Groups by name: xdist's own, `--dist loadgroup`, writes a group behind a test's
    id, which pytest 9.2 no longer lets it do; all tests were scattered."""
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = group  # type: ignore[method-assign]
    return scheduler


MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def _few_programs():
    """Drop the compiled programs before they pass the number of memory maps that Linux
    allows a process (65,530), past which XLA crashes."""
    yield
    if MAPS.exists() and len(MAPS.read_bytes().splitlines()) > 20_000:
        jax.clear_caches()
