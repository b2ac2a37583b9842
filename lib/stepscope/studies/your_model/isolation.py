"""Call a function in a new process with a time limit, so that a crash or a hang doesn't affect later calls."""

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import current_process
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from stepscope import StepscopeError
from stepscope.files import one_line

# A server process imports these modules once and then forks a process for each call, which saves seconds per call.
PRELOADED = ["stepscope.studies.your_model.rows", "torch._dynamo", "torch._inductor.compile_fx"]
# Libraries that take seconds to import, but don't use the GPU meanwhile. If a model's file mentions a library, the
# module next to it is preloaded.
LIBRARIES = {"transformers": "transformers.modeling_utils", "torchvision": "torchvision"}
MAX_PATH = 60  # maximum length of the path of the sockets' folder; a socket's name adds up to 40 bytes


class ProcessFailed(StepscopeError, RuntimeError):
    """Raised when a process ends without a result; the message describes how it ended."""


def call_isolated(
    function: Callable[..., Any], limit_s: float, *arguments: Any, preload: Sequence[str] = ()
) -> Any:
    """Call ``function(*arguments)`` in a new process, and return its result.

    Args:
        preload: additional modules that multiprocessing's fork server imports when it starts, at the first call.
            Modules that aren't installed are skipped.

    Raises:
        ProcessFailed: If the process crashes, is killed, or takes longer than ``limit_s`` seconds, or if the
            function raises an exception other than a StepscopeError.
        StepscopeError: If the function raises it.
    """
    current_process()._config.setdefault("tempdir", _short(_folder().name))  # type: ignore[attr-defined]
    # Otherwise, torch would ask the CUDA driver whether there is a GPU, and processes that the server forks
    # afterwards could not use the GPU.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *preload])
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
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
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
    """Return a folder's path, made relative if it is long, because socket paths are limited to 107 bytes."""
    return path if len(path) < MAX_PATH else os.path.relpath(path)


def _send(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call the function in the new process, and send back its result or its error."""
    try:
        result = function(*arguments)
    except StepscopeError as error:
        result = error
    except Exception as error:  # noqa: BLE001  a bug in stepscope, or an error in the user's code
        result = ProcessFailed(f"its process raised {type(error).__name__}: {one_line(error, 300)}")
    sender.send(result)


def libraries_in(text: str) -> list[str]:
    """Return the modules to preload for a file with this text."""
    return [module for name, module in LIBRARIES.items() if name in text]
