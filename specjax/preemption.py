"""Ends a run early and whole: at SIGTERM, as clusters send it, or the first Ctrl-C.

What is written is written beside its place and renamed, so a run may be left anywhere
but in the middle of a step, whose end is waited for. A second signal ends the process
at once.
"""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


class Stopped(BaseException):
    """The run ends because it was asked to; the text says where it stands.

    Not an `Exception`: whoever handles errors lets it by.
    """


class Watch:
    """Whether somebody has asked this run to end."""

    def __init__(self) -> None:
        self.asked = False
        self.waits = False  # for the end of a step; else a signal raises `Stopped`
        self.before: dict[signal.Signals, Any] = {}

    def __call__(self, step: int) -> bool:
        """Whether to end after this step; all processes end after the same one."""
        import jax
        from jax.experimental import multihost_utils

        if jax.process_count() == 1:
            return self.asked
        return multihost_utils.reached_preemption_sync_point(step)

    def listen(self) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(each) != signal.SIG_IGN:
                self.before[each] = signal.signal(each, self._ask)

    def end(self) -> None:
        for each, handler in self.before.items():
            signal.signal(each, handler)

    def _ask(self, number: int, frame: Any) -> None:
        del number, frame
        self.end()
        self.asked = True
        if not self.waits:
            raise Stopped("stopped before training began")


@contextlib.contextmanager
def watch() -> Iterator[Watch]:
    """Catches the signals; in a run of several processes JAX's own service does."""
    import jax

    found = Watch()
    if jax.process_count() == 1:
        found.listen()
    try:
        yield found
    finally:
        found.end()
