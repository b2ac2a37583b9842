"""Configure torch.compile: its cache, and the number of shapes for which it may compile a function."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from timeit import default_timer
from typing import Any

from stepscope.measure.timing import synchronizer


def fresh_compiler_cache() -> AbstractContextManager:
    """Return a context manager within which torch.compile ignores existing caches and recompiles everything."""
    from torch._inductor.utils import fresh_cache  # imported lazily: it loads the compiler

    return fresh_cache()


def allow_recompiling(shapes: int) -> None:
    """Allow torch.compile to compile a function for this many shapes (PyTorch's default is 8).

    If there are more shapes, PyTorch raises an error. By default, it would run the function uncompiled.
    """
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = shapes
    dynamo.accumulated_recompile_limit = 4 * shapes
    dynamo.fail_on_recompile_limit_hit = True


def refuse_recompiling() -> AbstractContextManager:
    """Return a context manager within which compiling again raises a ``RecompileError`` that names the cause."""
    import torch._dynamo.config as dynamo

    return dynamo.patch(error_on_recompile=True)


def seconds_with_compiling(step: Callable[[], Any], device: str) -> float:
    """Run a step for the first time; return its duration in seconds, which includes compilation."""
    synchronize = synchronizer(device)
    started = default_timer()
    step()
    synchronize()
    return default_timer() - started
