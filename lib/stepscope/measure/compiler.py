"""Settings of torch.compile: where it caches code, and how many shapes it may compile a function for."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from timeit import default_timer
from typing import Any

from stepscope.measure.timing import synchronizer


def fresh_compiler_cache() -> AbstractContextManager:
    """Return a context in which everything is compiled from scratch, without an earlier run's cache."""
    from torch._inductor.utils import fresh_cache  # not above: it imports the compiler

    return fresh_cache()


def allow_recompiling(shapes: int) -> None:
    """From now on one function may be compiled for so many shapes (torch's own limit is 8); beyond them, fail
    rather than run what is not compiled."""
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit, dynamo.accumulated_recompile_limit = shapes, 4 * shapes
    dynamo.fail_on_recompile_limit_hit = True


def seconds_with_compiling(step: Callable[[], Any], device: str) -> float:
    """Return how many seconds a first step takes, which compiles."""
    synchronize, began = synchronizer(device), default_timer()
    step()
    synchronize()
    return default_timer() - began
