"""Kernels: started, one ahead of its run where that disturbs nothing, watched, and ended with all they have started.

A *spare* is the next run's kernel: interpreter up, libraries imported, no CUDA. It is started when a run has said that
its measuring is over (``Run.measured``) and never sooner, so nothing of it runs beside a timed part of its own worker.
"""
import asyncio
import fcntl
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
LOOKS = 500  # at all processes, 10 ms apart: far more than an exec takes, and an end where one never gets through
# A kernel watches for its parent's end only from when it is up: one whose sweep was killed before then is to end here.
ORPHANED = "__import__('os').getppid() == int(__import__('os').environ['JPY_PARENT_PID']) or __import__('os')._exit(1)"
# What every study's notebook imports first. None of these touches a GPU.
IMPORTS = "[__import__(name) for name in ('torch', 'pandas', 'scipy.stats', 'seaborn', 'stepscope.run', 'stepscope.step')] and None"
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

    @property
    def alive(self) -> bool:
        process = self.manager.provisioner and self.manager.provisioner.process
        return process is not None and process.poll() is None

    def kill(self) -> None:
        """End the kernel and every process it has started, whatever session those are in and whoever is their parent by now."""
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
        with suppress(Exception):  # it is dead already; this is only the client's and the manager's own tidying up
            if self.manager.made:
                self.manager.made.stop_channels()
        with suppress(Exception):
            asyncio.run(self.manager.shutdown_kernel(now=True))
        self.owner.close()
        shutil.rmtree(self.sockets, ignore_errors=True)


def start_kernel(folder: Path, imports: bool = False) -> Kernel:
    """Start a kernel that works in ``folder``.

    Args:
        imports: let it import what every study needs; it does so by itself, and this does not wait for it.
    """
    # IPC: nobody else on the machine can speak to a kernel, and no port can be taken. A socket's path is limited to
    # 107 bytes, hence a folder of its own in the system's temporary folder and not one beside the runs.
    sockets = Path(tempfile.mkdtemp(prefix=SOCKETS))
    owner = (sockets / ".owner").open("w")
    fcntl.flock(owner, fcntl.LOCK_EX)
    os.rename(sockets / ".owner", sockets / "owner")  # seen by clear_dead from now on, and never unlocked
    traits = Traits({"ConnectionFileMixin": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
    manager = Manager(kernel_name="python3", config=traits, connection_file=str(sockets / "connection.json"))
    lines = [ORPHANED, *([IMPORTS] if imports else [])]
    kernel = Kernel(manager, folder, sockets, owner)
    try:
        with (folder / LOG).open("wb") as log:
            asyncio.run(manager.start_kernel(cwd=str(folder), env=kernel_environment() | {MARK: str(sockets)}, stdout=log, stderr=log,
                                             extra_arguments=[f"--IPKernelApp.exec_lines={line}" for line in lines]))
    except BaseException:
        kernel.close()
        raise
    return kernel


asked: list[str] = []  # signals that have asked this process's sweep to end: its run is then ended by its watch
_environment: dict[str, str | None] = {}


def set_environment(changes: dict[str, str | None]) -> None:
    """From now on, kernels are started with these variables set (None: unset) over this process's own."""
    _environment.clear()
    _environment.update(changes)


def kernel_environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if _environment.get(name, value) is not None}
    return environment | {name: value for name, value in _environment.items() if value is not None}


def end_marked(sockets: Path) -> None:
    """End every process that a kernel has started, also those that no longer are its descendants: they bear its mark.

    It looks again until there is nobody new: one that is ended may have started another while its turn had not come, and
    one that is becoming another program shows no mark in that moment.
    """
    mark, ended = f"{MARK}={sockets}".encode(), set()
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
    """Whether a process (its folder in ``/proc``) bears a mark; None in the middle of exec, where no environment is to be seen."""
    with suppress(OSError):  # ended meanwhile, or another user's
        if environment := (process / "environ").read_bytes():
            return mark in environment.split(b"\0")
        os.readlink(process / "exe")  # one of the system's own threads, or a dead one, has none
        start, end = (process / "stat").read_text().rpartition(")")[2].split()[47:49]  # where its environment is in memory
        return False if start == end != "0" else None
    return False


def clear_dead() -> None:
    """End what is left of kernels whose sweep or worker was killed, and remove their socket folders.

    A folder's owner holds a lock on it, which ends with the owner however that dies.
    """
    for owner in Path(tempfile.gettempdir()).glob(f"{SOCKETS}*/owner"):
        with suppress(OSError), open(owner, opener=_open_unwaiting) as file:  # gone meanwhile, or its owner lives
            if os.fstat(file.fileno()).st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                end_marked(owner.parent)
                shutil.rmtree(owner.parent, ignore_errors=True)


def _open_unwaiting(path: str, flags: int) -> int:
    """Whatever another user may have put there: opening a pipe would wait for its other end."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


class Spare:
    """The kernel that is being made ready for this process's next run, if there is one."""

    def __init__(self) -> None:
        self.kernel: Kernel | None = None
        self.lock = threading.Lock()

    def start(self, folder: Path) -> None:
        with self.lock, suppress(OSError, RuntimeError):  # the next run then starts its own, and says what is wrong
            if self.kernel is None:
                folder.mkdir(parents=True)
                self.kernel = start_kernel(folder, imports=True)

    def take(self, folder: Path) -> Kernel | None:
        """The spare, its folder moved to ``folder``; None where there is none that is alive and of this runs folder."""
        with self.lock:
            kernel, self.kernel = self.kernel, None
        if kernel is None:
            return None
        if kernel.alive and kernel.folder.parent == folder.parent and kernel.folder.is_dir():
            os.rename(kernel.folder, folder)
            kernel.folder = folder
            return kernel
        kernel.close()
        return None

    def close(self) -> None:
        with self.lock:
            kernel, self.kernel = self.kernel, None
        if kernel:
            kernel.close()
            shutil.rmtree(kernel.folder, ignore_errors=True)


spare = Spare()


class Watch:
    """A thread beside a run: ends its kernel at the time limit, when its folder is gone or its sweep is asked to end, and
    starts the next one's spare."""

    def __init__(self, kernel: Kernel, timeout_s: float | None, sign: str, when_measured: Callable[[], None]):
        self.kernel, self.sign, self.when_measured = kernel, sign, when_measured
        self.deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.over, self.cause = threading.Event(), None
        self.limit_s = timeout_s
        self.thread = threading.Thread(target=self._watch, name="stepscope-watch", daemon=True)

    def __enter__(self) -> "Watch":
        self.thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self.over.set()
        self.thread.join()

    def _watch(self) -> None:
        measured = False
        while not self.over.wait(0.5):  # one look at a file every half second is all that goes on beside a measurement
            if self.deadline is not None and time.monotonic() > self.deadline:
                self.cause = f"no end after {self.limit_s:g} s, the limit for a run; its processes were ended"
            elif not self.kernel.folder.is_dir():
                self.cause = "its folder was taken away: the sweep that asked for it is gone"
            elif asked:
                self.cause = f"the sweep was stopped by {asked[0]}"
            if self.cause:
                self.kernel.kill()
                return
            if not measured and (self.kernel.folder / self.sign).exists():
                measured = True
                self.when_measured()
