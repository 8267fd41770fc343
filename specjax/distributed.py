"""Runs of several processes: `jax.distributed` and who writes what.

Each process runs the same program over one mesh. Arrays are split over all devices, a
process reads only its rows of a batch, checkpoints are written by all together (orbax),
and what one process alone may do (logs, figures, the final folder) the first one does.
With one process everything here is trivial.
"""

from typing import Any

import jax
import numpy as np


def start(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Joins the run, before anything else asks JAX for devices.

    Args:
      coordinator: host:port of process 0; "auto" where the cluster says it all (Slurm,
        Open MPI, Kubernetes, TPU pods); None is a run of one process.

    Raises ValueError for flags that contradict one another.
    """
    if coordinator is None:
        if num_processes is not None or process_id is not None:
            raise ValueError(
                "--num-processes and --process-id belong to --coordinator HOST:PORT; "
                "give it too."
            )
        return
    if coordinator == "auto":
        _join(coordinator, num_processes=num_processes, process_id=process_id)
        return
    if num_processes is None or process_id is None:
        raise ValueError(
            f"--coordinator {coordinator} needs --num-processes and --process-id; "
            "--coordinator auto asks the cluster for all three."
        )
    if num_processes < 1:
        raise ValueError(f"--num-processes must be >= 1, got {num_processes}.")
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"--process-id {process_id} is not one of 0 to {num_processes - 1}."
        )
    host, _, port = coordinator.rpartition(":")
    if not port.isdecimal():
        raise ValueError(f"--coordinator {coordinator!r} has no port; give HOST:PORT.")
    if not host or not 0 < int(port) < 2**16:
        raise ValueError(
            f"--coordinator {coordinator!r} is no HOST:PORT with a port of 1 to 65535."
        )
    _join(coordinator, coordinator, num_processes, process_id)


def _join(coordinator: str, *args: Any, **options: Any) -> None:
    """Raises ConnectionError, by one line, for what JAX may raise."""
    try:
        jax.distributed.initialize(*args, **options)
    except (ValueError, RuntimeError) as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConnectionError(
            f"--coordinator {coordinator}: this process could not join the run "
            f"({cause}). Start process 0 at HOST:PORT and all --num-processes; `auto` "
            "needs a cluster that JAX knows."
        ) from None


def is_first() -> bool:
    """Whether this process writes what only one may write."""
    return jax.process_index() == 0


def agree(value: bool) -> bool:
    """What the first process found, in every process."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return bool(multihost_utils.broadcast_one_to_all(np.int32(value)))


def everywhere(mine: bool) -> bool:
    """Whether it is so in every process; none goes on before the last has come."""
    if jax.process_count() == 1:
        return mine
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.array(mine))))


def wait(name: str) -> None:
    """Goes on when every process has come here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def fetch(x: Any) -> np.ndarray:
    """A whole array on the host, also one that several processes hold together."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)
