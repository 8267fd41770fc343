"""The toy training in processes of their own, which a test may kill.

Reads lines FOLDER STEPS; each is trained in a fork of this process, which has imported
all that costs seconds to import and has not yet asked JAX for a device. Prints the
fork's number, each of its steps as it is done, and at its end how it ended.
"""

import dataclasses
import os
import sys
import traceback

import jax
import orbax.checkpoint  # noqa: F401  (before the forks)
from toy_run import CONFIG, DRAFTER, TEXTS, make_target

from specjax import training


def run(folder: str, steps: int) -> None:
    config = dataclasses.replace(CONFIG, steps=steps, save_every=1)
    say = lambda step, values: print("step", step, flush=True)
    training.train(make_target(), DRAFTER, TEXTS, config, folder=folder, log=say)


def forked(folder: str, steps: int) -> int:
    fork = os.fork()
    if fork:
        print("process", fork, flush=True)
        return os.waitpid(fork, 0)[1]
    code = 1
    try:
        run(folder, steps)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    for line in sys.stdin:
        folder, steps = line.split()
        print("end", forked(folder, int(steps)), flush=True)
