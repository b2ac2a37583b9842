"""Turns on a GPU: runs share one, so that starting, compiling and analysing overlap, and one measures.

A turn is a lock on the file that ``$STEPSCOPE_GPU_TURN`` names. The kernel releases it when the process that
holds it ends, however it dies. A child process (nsys, a compile worker) does not inherit it: the descriptor
is closed on exec.
"""
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TURN = "STEPSCOPE_GPU_TURN"
_held = threading.RLock()  # also orders this process's own threads
_depth = 0
held_s = 0.0  # seconds of turns that this process has had so far


@contextmanager
def turn() -> Iterator[None]:
    """Hold the GPU: whatever is timed or captured goes in here. Within a turn another is the same one.

    Without ``$STEPSCOPE_GPU_TURN`` nobody shares the GPU, and nothing is waited for.
    """
    global _depth, held_s
    with _held:
        if _depth:
            yield
            return
        path, began = os.environ.get(TURN), time.monotonic()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) if path else None
        try:
            if descriptor is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            _depth, began = 1, time.monotonic()
            yield
        finally:
            if _depth:
                held_s += time.monotonic() - began
            _depth = 0
            if descriptor is not None:
                os.close(descriptor)
