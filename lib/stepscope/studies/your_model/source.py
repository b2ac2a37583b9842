"""Find the function that builds a user's model, import its file, and call it.

Only :func:`build` runs the user's code; :func:`find` only reads the file's text. Any problem with the file, the
function or its return value raises a :class:`ModelError`, whose message is one sentence.
"""

import hashlib
import importlib.util
import inspect
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stepscope import PACKAGE, StepscopeError
from stepscope.config import truncated_repr
from stepscope.measure.oom import error_text
from stepscope.model.training_step import is_out_of_memory, reseed

# The environment variable that names a run's model, in the form that the command line uses. The configuration
# doesn't contain the path, because records must not.
MODEL = "STEPSCOPE_MODEL"
EXPECTED = "(model, batch) or (model, batch, loss), where batch is a dict of the model's arguments"
# Files in these folders aren't the user's. (Python's own folder isn't listed, because it may contain the folder of
# installed packages.)
LIBRARIES = (str(PACKAGE), str(Path(torch.__file__).parent), "<")
# Environment variables that name the folders of generated code.
COMPILER_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
PYTHON = sysconfig.get_path("stdlib")


class ModelError(StepscopeError, ValueError):
    """Raised when a model can't be measured; ``trace`` is the traceback of the user's code, or ""."""

    def __init__(self, message: str, trace: str = ""):
        super().__init__(message)
        self.trace = trace


@dataclass(frozen=True)
class Source:
    """The function that builds a model.

    Args:
        place: the function's location, in a form that :func:`find` accepts in any working directory.
        path: the file that defines the function.
        root: the folder from which the file's module is imported.
        module: the module's name.
        function: the function's name.
        name: the model's name in records, such as "mine:build".
        digest: a digest of the file's text.
    """

    place: str
    path: Path
    root: Path
    module: str
    function: str
    name: str
    digest: str

    @property
    def fields(self) -> dict[str, str]:
        """The configuration fields that identify this model."""
        return {"model": self.name, "source": self.digest}


def find(model: str | Callable, folder: Path, digest: str = "") -> Source:
    """Find the function that builds a model, without running the file that defines the function.

    Args:
        model: "FILE.py:FUNCTION", "package.module:FUNCTION", or a function that a notebook's cell defines.
        folder: the folder to which the cell is copied.
        digest: in a sweep, a digest of the file's text at the time when the run was requested. The environment
            variable :data:`MODEL` then names the model. Outside a sweep, "".

    Raises:
        ModelError: If the file or the function doesn't exist, or the file has changed since the run was requested.
    """
    if digest:
        model = os.environ.get(MODEL, "")
    elif callable(model):
        cell = linecache.getlines(inspect.getfile(model))
        path = folder / "cell.py"
        path.write_text("".join(cell), encoding="utf-8")
        model = f"{path}:{model.__name__}"
    place, _, function = str(model).rpartition(":")
    is_file = place.endswith(".py")
    if not place or not function.isidentifier():
        expected = "FILE.py:FUNCTION or package.module:FUNCTION"
        raise ModelError(f"model: got {truncated_repr(model)}, but expected {expected}")
    name = place if is_file else f"{place.replace('.', '/')}.py"
    roots = [""] if is_file else ["", *sys.path]
    paths = [Path(root, name).absolute() for root in roots]
    path = next(filter(Path.is_file, paths), paths[0])
    if not path.is_file():
        raise ModelError(f"model: there is no file {path.name} for {truncated_repr(place)}")
    content = path.read_bytes()
    if not re.search(rf"\b{function}\b".encode(), content):
        raise ModelError(f"{path.name} has no function {function}")
    root, module = (path.parent, path.stem) if is_file else (path.parents[place.count(".")], place)
    words = [re.sub("[^A-Za-z0-9]+", "_", word).strip("_") for word in (module, function)]
    source = Source(
        f"{path if is_file else place}:{function}",
        path,
        root,
        module,
        function,
        ":".join(words),
        digest_of(content),
    )
    if digest not in ("", source.digest):
        raise ModelError(f"{path.name} was edited after the run was requested; run the command again")
    return source


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def build(source: Source, keywords: dict[str, Any], device: str, seed: int) -> tuple[Any, ...]:
    """Import the file and call the function on the device; return the checked model, batch, and loss or None.

    Raises:
        ModelError: If the file was edited since it was found, or the file or the function raises, or returns
            something that can't be trained.
    """
    if digest_of(source.path.read_bytes()) != source.digest:
        raise ModelError(f"{source.path.name} was edited while it was measured; run the command again")
    # Python would use its compiled copy if an edit within a second keeps the file's size.
    with suppress(OSError):  # there is no copy, or the folder of an installed package can't be written
        Path(importlib.util.cache_from_source(source.path)).unlink()
    sys.path.insert(0, str(source.root))
    reseed(seed)
    try:
        module = importlib.import_module(source.module)
        file = getattr(module, "__file__", None)  # modules such as time have no file
        if file is None or not source.path.samefile(file):
            raise ModelError(f"{source.path.name} has the same name as another module; rename the file")
        if not hasattr(module, source.function):
            raise ModelError(f"{source.path.name} has no function {source.function}")
        with torch.device(device):
            built = getattr(module, source.function)(**keywords)
    except ModelError:
        raise
    except Exception as error:  # noqa: BLE001  the user's code may raise anything
        if is_out_of_memory(error):
            raise ModelError(f"the model doesn't fit into memory: {error_text(error)}") from None
        raise raised(source.function, error) from None
    return checked(built, device)


def raised(what: str, error: BaseException) -> ModelError:
    """Return a ModelError for an exception in the user's code.

    The ModelError's ``trace`` begins at the first frame of the user's code.
    """
    frames = error.__traceback__
    while frames and not is_users(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    trace = "".join(traceback.format_exception(type(error), error, frames))
    return ModelError(f"{user_line(error)}{what} raised {type(error).__name__}: {error_text(error)}", trace)


def checked(built: Any, device: str) -> tuple[Any, ...]:
    """Check what the user's function returned, and return the model, the batch, and the loss or None.

    Raises:
        ModelError: If the model can't be trained on this device.
    """
    parts = built if isinstance(built, tuple) else (built,)
    types = [type(part) for part in parts]
    if len(parts) not in (2, 3) or not isinstance(parts[0], nn.Module) or not isinstance(parts[1], Mapping):
        names = ", ".join(one.__name__ for one in types)
        raise ModelError(f"expected build to return {EXPECTED}, but it returned {truncated_repr(names)}")
    model, loss = parts[0], (*parts, None)[2]
    batch = dict(parts[1])  # a tokenizer's batch is a mapping, but not a dict
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise ModelError(
            "got a compiled model, but expected one without torch.compile; the ladder compiles it"
        )
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ModelError(f"{name} has no shape yet; run the model on the batch once before you return it")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("the model has no trainable parameters")
    for name, tensor in [*model.named_parameters(), *batch.items()]:
        if isinstance(tensor, Tensor) and tensor.device.type != device:
            raise ModelError(
                f"{truncated_repr(name)}: got a tensor on {tensor.device.type}, but expected {device}; build runs"
                f' under torch.device("{device}"), so create the tensor there or move it with .to("{device}")'
            )
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise ModelError(
                f"{truncated_repr(name)}: got {tensor.dtype}, but expected torch.float32, because the ladder"
                " changes the precision itself; convert it with .float()"
            )
    return model, batch, loss


def user_line(error: BaseException | None) -> str:
    """Return the innermost location in an error's traceback that is in the user's code or in a package it imports.

    The format is "router.py:41: ". If there is no such location, the result is "".
    """
    while error is not None:
        places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        # torch.compile names the location only in the message.
        places += re.findall(r'File "([^"]+)", line (\d+)', str(error))
        for file, line in reversed(places):
            if is_users(file):
                return f"{Path(file).name}:{line}: "
        error = error.__cause__ or error.__context__
    return ""


def is_users(file: str) -> bool:
    """Return whether a file is neither generated nor part of Python, PyTorch or stepscope.

    Other installed packages, such as transformers, count as user code.
    """
    is_pythons = file.startswith(PYTHON) and "-packages" not in file
    caches = [os.environ[name] for name in COMPILER_CACHES if os.environ.get(name)]
    is_generated = (
        file.startswith(tuple(caches)) or "/torchinductor_" in file or "/site-packages/triton/" in file
    )
    return not is_pythons and not is_generated and not file.startswith(LIBRARIES)
