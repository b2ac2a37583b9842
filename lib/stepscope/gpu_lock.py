"""The GPU lock: runs share a GPU, so that starting, compiling and analysing overlap, and one measures.

While it does, the others of the same worker are frozen (:mod:`stepscope.freezer`).

It is a lock on the file that ``$STEPSCOPE_GPU_LOCK`` names. The kernel releases it when the process that
holds it ends, however it dies. A child process (nsys, a compile worker) does not inherit it: the descriptor
is closed on exec. Nothing here imports torch: the process that executes a notebook can hold the lock for it.
It does so for each cell that is tagged ``measure`` (:mod:`stepscope.runs.run`): meanwhile the file that
``$STEPSCOPE_GPU_HELD`` names is there, by which the notebook's kernel, and what it starts, see it.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepscope import StepscopeError
from stepscope.freezer import LOCK as GPU_LOCK
from stepscope.freezer import flocked, others_frozen

HELD = "STEPSCOPE_GPU_HELD"
_thread = threading.RLock()  # also orders this process's own threads
_depth = 0
_seconds = 0.0


class NotExclusive(StepscopeError):
    """Something would be timed or captured while another run may use the GPU."""


@contextmanager
def exclusive() -> Iterator[None]:
    """Have the GPU to oneself: whatever is timed or captured goes in here. Within a section another is the
    same one.

    Without ``$STEPSCOPE_GPU_LOCK`` nobody shares the GPU, and nothing is waited for.
    """
    global _depth
    with _thread:
        if lock_held():
            yield
            return
        with _locked(os.environ.get(GPU_LOCK)):
            _depth, began = 1, time.monotonic()
            try:
                yield
            finally:
                add_locked_s(time.monotonic() - began)
                _depth = 0


@contextmanager
def _locked(path: str | None) -> Iterator[None]:
    """Hold the lock, and the others who wait for it still."""
    if not path:
        yield
        return
    with flocked(path, alone=True), others_frozen(path):
        yield


def lock_held() -> bool:
    """Whether this process is within an exclusive section, its own or one of the process that runs it."""
    return bool(_depth) or (HELD in os.environ and Path(os.environ[HELD]).exists())


def require_lock() -> None:
    """What times or captures asks this first.

    Raises:
        NotExclusive: runs share the GPU, and this is in no exclusive section.
    """
    if os.environ.get(GPU_LOCK) and not lock_held():
        raise NotExclusive(
            "this would be timed or captured while another run uses the GPU: the cell that"
            " measures needs the tag 'measure'"
        )


def locked_s() -> float:
    """Seconds of exclusive sections that this process, and those it counts as its own, have had so far."""
    return _seconds


def add_locked_s(seconds: float) -> None:
    """Count an exclusive section: also of a process that measured for this one."""
    global _seconds
    _seconds += seconds
