"""Start-up: from nothing to the first tokens, with and without compiled programs.

    python benchmarks/startup.py                 2 minutes on 2 cores
    python benchmarks/startup.py --smoke         one turn of one way

Each way is a new process. `import` imports the package; `first` answers a prompt with
one new token, `text` with 64, both with an empty folder of compiled programs; `again`
is the same command once more, which finds them there. Compiling is what the cache
saves: the difference of the two.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
import timing
import tyro


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = "tiny"
    drafter: str = "eagle"
    repeats: int = 3  # each with a folder of its own
    json: pathlib.Path | None = None
    smoke: bool = False


def ways(config: Config) -> dict[str, list[str]]:
    """Commands by name."""
    specjax = [sys.executable, "-m", "specjax.cli"]
    of = ["--target", config.target, "--drafter", config.drafter]
    answer = [*specjax, "generate", *of, "--prompt", "What is 12 + 30?"]
    first = [*answer, "--max-new-tokens", "1"]
    if config.smoke:
        return {"first": first}
    text = [*answer, "--max-new-tokens", "64"]
    return {
        "import": [sys.executable, "-c", "import specjax.cli, jax; jax.devices()"],
        "first": first,
        "text": text,
    }


def seconds(command: list[str], cache: str) -> float:
    """Of a whole process."""
    env = os.environ | {"SPECJAX_CACHE": cache}
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=env)
    return time.perf_counter() - began


def main(config: Config) -> list[dict]:
    rows = []
    for name, command in ways(config).items():
        cold, warm = [], []
        for _ in range(1 if config.smoke else config.repeats):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(seconds(command, folder))
                warm.append(seconds(command, folder))
        cold, warm = np.array(cold), np.array(warm)
        rows.append(
            {
                "way": name,
                "s": float(np.median(cold)),
                "again, s": float(np.median(warm)),
                "compiling, s": float(np.median(cold - warm)),
                "again / first": float(np.median(warm / cold)),
            }
        )
    title = f"start-up of {config.target} with {config.drafter}"
    timing.report(title, rows, dataclasses.asdict(config), config.json)
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config))
