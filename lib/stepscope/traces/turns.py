"""Turns: runs side by side on one GPU, of which one at a time is timed, while none is at work.

Starting, importing and analysing are work; a run that waits for its turn does nothing. Who wants a turn has
it when nobody is at work, and nobody begins to work while somebody wants a turn. So runs get ready together,
are timed one after another, and are analysed together.

They share a folder, in which a run has a file while it is at work and one while it wants its turn, both named
by the process id of its worker: what a dead worker has left does not count. A run's own mark is in its
environment; where there is none, nobody else is there, and nothing waits.
"""
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

MARK = "STEPSCOPE_TURN"  # the variable with a run's mark: its file in the common folder, but for the suffix
WORK, WANTS = ".work", ".wants"
LOOK_S = 0.02


def lives(pid: int) -> bool:
    """Whether that process goes on; one that nobody has waited for yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def own_mark() -> Path | None:
    """This run's mark; None where it shares no GPU."""
    return Path(place) if (place := os.environ.get(MARK)) else None


def begin_work(mark: Path | None) -> None:
    """Wait until nobody is timed or wants to be, and be at work from then on."""
    while mark:
        with _held(mark):
            if not _any(mark, WANTS):
                mark.with_suffix(WORK).touch()
                return
        time.sleep(LOOK_S)


def end_work(mark: Path | None) -> None:
    """Neither be at work nor want a turn any more."""
    if mark:  # its folder goes with the sweep
        for suffix in (WORK, WANTS):
            mark.with_suffix(suffix).unlink(missing_ok=True)


@contextmanager
def alone(mark: Path | None) -> Iterator[None]:
    """Wait for a turn and have it. At its end the run is not at work: it has to :func:`begin_work` again."""
    if mark is None:
        yield
        return
    mark.with_suffix(WANTS).touch()
    mark.with_suffix(WORK).unlink(missing_ok=True)
    while True:
        with _held(mark):  # whoever else wants anything waits for this lock, and looks at nothing meanwhile
            if not _any(mark, WORK):
                mark.with_suffix(WANTS).unlink()
                yield
                return
        time.sleep(LOOK_S)


@contextmanager
def _held(mark: Path) -> Iterator[None]:
    with (mark.parent / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # ends with the process that has it, however that dies
        yield


def _any(mark: Path, suffix: str) -> bool:
    """Whether another run that lives is so marked."""
    others = [path for path in mark.parent.glob(f"*{suffix}") if path.stem != mark.name]
    return any(lives(int(path.stem)) for path in others)
