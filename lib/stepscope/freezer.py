"""While one run measures, the other runs of its worker are frozen: SIGSTOP to their processes, SIGCONT after.

Their imports, compilers and analyses would use the cores that launch the measured kernels, and a compiler
also the GPU itself, on which it tries its kernels: a step beside three that compile takes up to 2.5 times as
long, beside three frozen ones as long as alone.

Whoever measures can be killed at any moment, and a stopped process cannot see that its worker has died. So a
small process of its own, this file run as a program, freezes and thaws: its standard input ends with the
process that measures, however that dies, and then it thaws. It listens to no signal that asks it to end.

What of a run's time was spent frozen stands in a ledger beside the lock (:func:`frozen_s`). Nothing but the
standard library is imported here: the program starts in a tenth of a second.
"""

import fcntl
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

LOCK, RUN = "STEPSCOPE_GPU_LOCK", "STEPSCOPE_RUN"  # in the environment of a run's processes
STOPS_WITHIN_S = 2.0  # a process in the middle of a system call stops at its end


def processes(lock: str, but: str = "") -> set[int]:
    """The processes of all runs that share a lock, but for one run's."""
    shared, mark, own = f"{LOCK}={lock}".encode(), f"{RUN}=".encode(), f"{RUN}={but}".encode()
    found = set()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's, or ended meanwhile
            variables = environment.read_bytes().split(b"\0")
            runs = [variable for variable in variables if variable.startswith(mark)]
            if shared in variables and runs and own not in runs:
                found.add(int(environment.parent.name))
    return found


def freeze(lock: str, but: str) -> set[int]:
    """Stop them, until none is found that was not stopped before: one may have started another."""
    frozen: set[int] = set()
    while started := processes(lock, but) - frozen:
        _send(started, signal.SIGSTOP)
        frozen |= started
        deadline = time.monotonic() + STOPS_WITHIN_S
        while any(map(_runs, frozen)) and time.monotonic() < deadline:
            time.sleep(0.001)
    return frozen


def thaw(frozen: set[int]) -> None:
    _send(frozen, signal.SIGCONT)


def _send(processes: set[int], number: int) -> None:
    for process in processes:
        with suppress(OSError):  # it has ended
            os.kill(process, number)


def _runs(process: int) -> bool:
    """Whether a process is neither stopped nor over."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] not in "TtZX"
    except OSError:
        return False


def _ledger(lock: str) -> Path:
    return Path(f"{lock}.frozen")


def _note(lock: str, what: str, run: str) -> None:
    with suppress(OSError), _ledger(lock).open("a") as ledger:  # its folder goes with its worker
        ledger.write(f"{what} {time.monotonic()} {run}\n")


def frozen_s(since: float, lock: str | None = None, run: str | None = None) -> float:
    """For how many seconds a run has been frozen since a moment of the monotonic clock; 0 where none is.

    Args:
        lock, run: if not those of this process.
    """
    lock, run = lock or os.environ.get(LOCK), run or os.environ.get(RUN)
    if not lock or not _ledger(lock).exists():
        return 0.0
    seconds, began = 0.0, None
    for line in [*_ledger(lock).read_text().splitlines(), f"thaw {time.monotonic()} "]:
        what, moment, measuring = line.split(" ", 2)
        if began is not None:
            seconds += max(float(moment) - max(began, since), 0)
        began = float(moment) if what == "freeze" and measuring != run else None
    return seconds


class Freezer:
    """The program that freezes the others of a run."""

    def __init__(self, lock: str, run: str):
        # Without what marks a run's processes: they are killed with the run, and this one has to thaw first.
        own = {name: value for name, value in os.environ.items() if name not in (LOCK, RUN)}
        self.program = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, lock, run],
            env=own,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def ask(self, what: str) -> bool:
        """Whether it has done it: somebody may have killed it."""
        assert self.program.stdin and self.program.stdout
        with suppress(OSError):
            self.program.stdin.write(f"{what}\n".encode())
            self.program.stdin.flush()
            return bool(self.program.stdout.readline())
        return False


@functools.cache
def _freezer(lock: str, run: str) -> Freezer:
    return Freezer(lock, run)


@contextmanager
def others_frozen(lock: str) -> Iterator[None]:
    """Freeze all other runs that share the lock, which this process holds. A process of no run freezes none."""
    run = os.environ.get(RUN)
    if not run:
        yield
        return
    freezer = _freezer(lock, run)
    freezer.ask("freeze")
    try:
        yield
    finally:
        if not freezer.ask("thaw"):
            _freezer.cache_clear()
            thaw(processes(lock, run))
            _note(lock, "thaw", run)


@contextmanager
def flocked(lock: str, alone: bool) -> Iterator[None]:
    """Hold the lock's file, which is made where it is missing: alone, or with others who share it."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def none_measures(lock: str) -> AbstractContextManager[None]:
    """Between two exclusive sections: wait until no run measures, and let none begin to meanwhile."""
    return flocked(lock, alone=False)


def thaw_if_none_measures(lock: str) -> None:
    """Thaw all where nobody holds the lock: who measured was killed, and the freezer with it."""
    with suppress(OSError), Path(lock).open("rb") as file:  # BlockingIOError: who measures will thaw
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        thaw(processes(lock))
        _note(lock, "thaw", "")


def main(lock: str, run: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    frozen: set[int] = set()

    try:
        while asked := sys.stdin.buffer.readline():
            if asked == b"freeze\n":
                _note(lock, "freeze", run)
                frozen = freeze(lock, run)
            else:
                thaw(frozen)
                _note(lock, "thaw", run)
                frozen = set()
            os.write(1, b"done\n")
    finally:
        if frozen:
            thaw(frozen)
            _note(lock, "thaw", run)


if __name__ == "__main__":
    main(*sys.argv[1:])
