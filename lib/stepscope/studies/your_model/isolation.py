"""Call a function in a new process, with a time limit. Whatever happens there doesn't affect later calls."""

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import current_process
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from stepscope import StepscopeError
from stepscope.files import one_line

# A server process imports these once, and then forks a process for each call, which saves seconds per call.
PRELOADED = ["stepscope.studies.your_model.rows", "torch._dynamo", "torch._inductor.compile_fx"]
MAX_PATH = 60  # of a folder for sockets, whose names are up to 40 bytes


class ProcessFailed(StepscopeError, RuntimeError):
    """The process ended without a result; the message says how."""


def call_isolated(function: Callable[..., Any], limit_s: float, *arguments: Any) -> Any:
    """Return ``function(*arguments)`` from a new process.

    Raises:
        ProcessFailed: the process was killed, crashed, or took longer than ``limit_s`` seconds.
        Exception: the function raised a StepscopeError, which is raised here, too.
    """
    current_process()._config.setdefault("tempdir", _short(_folder().name))  # type: ignore[attr-defined]
    # Asking the driver whether there is a GPU would keep the processes that the server forks from using it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit_s):
            raise ProcessFailed(f"it took longer than {limit_s:g} s, so its process was killed")
        result = receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        raise ProcessFailed(f"its process {how}") from None
    finally:
        with suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):  # such as compilers
                child.kill()
        process.kill()
        process.join()
    if isinstance(result, StepscopeError):
        raise result
    return result


@functools.cache
def _folder() -> TemporaryDirectory:
    return TemporaryDirectory(prefix="pymp-")


def _short(path: str) -> str:
    """Return a path for sockets, which is limited to 107 bytes: relative if it is long."""
    return path if len(path) < MAX_PATH else os.path.relpath(path)


def _send(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call the function, and send its result or its error; runs in the new process."""
    try:
        result = function(*arguments)
    except StepscopeError as error:
        result = error
    except Exception as error:  # noqa: BLE001  a bug of ours, or the user's code
        result = ProcessFailed(f"its process raised {type(error).__name__}: {one_line(error, 300)}")
    sender.send(result)
