"""Kernels: started, watched, and ended with all they have started."""
import asyncio
import fcntl
import math
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil
from jupyter_client.manager import AsyncKernelManager
from traitlets.config import Config as Traits

from stepscope.runs.record import LOG

SOCKETS = "stepscope-"
MARK = "STEPSCOPE_KERNEL"  # in the environment of a kernel and all it starts: its socket folder
PROC = Path("/proc")
LOOKS = 500  # at all processes, 10 ms apart: far more than an exec takes, and an end where none gets through
# A kernel watches for its parent's end from when it is up; one whose sweep was killed before then ends here.
ORPHANED = ("__import__('os').getppid() == int(__import__('os').environ['JPY_PARENT_PID'])"
            " or __import__('os')._exit(1)")
# Inductor would compile a program to try out each vector instruction that the processor says it has: 5 to
# 15 s of a process that compiles for a CPU.
BELIEVED = {"TORCHINDUCTOR_VEC_ISA_OK": "1"}
# What Dask's nanny sets for its workers' own sake, and a run beside no Dask would not have.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_")


class Manager(AsyncKernelManager):
    """Keeps the client it has made, which nbclient leaves open where the kernel is not its own."""

    made = None

    def client(self, **kwargs):
        self.made = super().client(**kwargs)
        return self.made


@dataclass
class Kernel:
    """A kernel of this process: its manager, the folder it works in, and that of its sockets."""

    manager: Manager
    folder: Path
    sockets: Path
    owner: IO  # a locked file: while the lock is held, the sockets' owner lives

    def kill(self) -> None:
        """End the kernel and all it has started, in whatever session and with whatever parent by now."""
        process = self.manager.provisioner and self.manager.provisioner.process
        if process is None:
            return
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(process.pid)
            parent.suspend()  # it starts no more of them meanwhile
            for child in [*parent.children(recursive=True), parent]:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        end_marked(self.sockets)

    def close(self) -> None:
        """End it and clear away what it had outside of its folder."""
        self.kill()
        with suppress(Exception):  # it is dead already; this is the client's and the manager's tidying up
            if self.manager.made:
                self.manager.made.stop_channels()
        with suppress(Exception):
            asyncio.run(self.manager.shutdown_kernel(now=True))
        self.owner.close()
        shutil.rmtree(self.sockets, ignore_errors=True)


def start_kernel(folder: Path) -> Kernel:
    """Start a kernel that works in ``folder``.

    Raises:
        OSError, RuntimeError: it cannot be started.
    """
    # IPC: only this user can speak to a kernel. One port is left, which ipykernel itself opens on the
    # loopback for the output of forked children: it takes only what bears a key of 16 random bytes, and runs
    # nothing. A socket's path is limited to 107 bytes, hence a folder of its own in the system's temporary
    # folder and not one beside the runs.
    sockets = Path(tempfile.mkdtemp(prefix=SOCKETS))
    owner = (sockets / ".owner").open("w")
    fcntl.flock(owner, fcntl.LOCK_EX)
    (sockets / ".owner").rename(sockets / "owner")  # seen by clear_dead from now on, and never unlocked
    traits = Traits({"ConnectionFileMixin": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
    manager = Manager(kernel_name="python3", config=traits, connection_file=str(sockets / "connection.json"))
    kernel = Kernel(manager, folder, sockets, owner)
    environment = kernel_environment() | {MARK: str(sockets)}
    try:
        with (folder / LOG).open("wb") as log:
            asyncio.run(manager.start_kernel(cwd=str(folder), env=environment, stdout=log, stderr=log,
                                             extra_arguments=[f"--IPKernelApp.exec_lines={ORPHANED}"]))
    except BaseException:
        kernel.close()
        raise
    return kernel


asked: list[str] = []  # signals that asked this process's sweep to end: its run is then ended by its watch
_environment: dict[str, str | None] = {}


def set_environment(changes: dict[str, str | None]) -> None:
    """From now on, kernels are started with these variables set (None: unset) over this process's own."""
    _environment.clear()
    _environment.update(changes)


def kernel_environment() -> dict[str, str]:
    changed = BELIEVED | os.environ | _environment
    return {name: value for name, value in changed.items() if value is not None}


def end_marked(sockets: Path) -> None:
    """End every process that a kernel has started, its descendants or not: they bear its mark.

    It looks again until there is nobody new: one that is ended may have started another while its turn had
    not come, and one that is becoming another program shows no mark in that moment.
    """
    mark, ended = f"{MARK}={sockets}".encode(), set[Path]()
    for _ in range(LOOKS):
        again = False
        for process in set(PROC.glob("[0-9]*")) - ended:
            bears = _bears(process, mark)
            again = again or bears is not False
            if bears:
                ended.add(process)
                with suppress(OSError):  # it has ended meanwhile
                    os.kill(int(process.name), signal.SIGKILL)
        if not again:
            return
        time.sleep(0.01)


def _bears(process: Path, mark: bytes) -> bool | None:
    """Whether a process (its folder in ``/proc``) bears a mark; None in the middle of exec."""
    with suppress(OSError):  # ended meanwhile, or another user's
        if environment := (process / "environ").read_bytes():
            return mark in environment.split(b"\0")
        (process / "exe").readlink()  # one of the system's own threads, or a dead one, has none
        start, end = (process / "stat").read_text().rpartition(")")[2].split()[47:49]  # of its environment
        return False if start == end != "0" else None
    return False


def clear_dead() -> None:
    """End what is left of kernels whose sweep or worker was killed, and remove their socket folders.

    A folder's owner holds a lock on it, which ends with the owner however that dies.
    """
    for owner in Path(tempfile.gettempdir()).glob(f"{SOCKETS}*/owner"):
        with suppress(OSError), open(owner, opener=_open_unwaiting) as file:  # it is gone, or its owner lives
            if os.fstat(file.fileno()).st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                end_marked(owner.parent)
                shutil.rmtree(owner.parent, ignore_errors=True)


def _open_unwaiting(path: str, flags: int) -> int:
    """Whatever another user may have put there: opening a pipe would wait for its other end."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


class Watch:
    """A thread beside a run: ends its kernel when its time is up, its folder gone, or its sweep."""

    def __init__(self, kernel: Kernel, timeout_s: float | None, abandoned: Callable[[], bool]):
        """Args:
            abandoned: whether whoever asked for the run is gone.
        """
        self.kernel, self.limit_s, self.abandoned = kernel, timeout_s, abandoned
        self.deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self.over = threading.Event()
        self.cause: str | None = None
        self.thread = threading.Thread(target=self._watch, name="stepscope-watch", daemon=True)

    def __enter__(self) -> "Watch":
        self.thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self.over.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.over.wait(0.5):  # a look at a folder each half second is all that goes on beside a run
            self.cause = self._why_end()
            if self.cause:
                self.kernel.kill()
                return

    def _why_end(self) -> str | None:
        if time.monotonic() > self.deadline:
            return f"no end after {self.limit_s:g} s, the limit for a run; its processes were ended"
        if not self.kernel.folder.is_dir():
            return "its folder was taken away: the sweep that asked for it is gone"
        if self.abandoned():
            return "the sweep that asked for it is gone"
        if asked:
            return f"the sweep was stopped by {asked[0]}"
        return None
