"""Name the parts of a model, and open NVTX ranges around them on demand.

``@region("ffn")`` only stores the name on a method. Nothing wraps the method until :func:`annotated` is entered,
so an unannotated model runs exactly the code that you read, at no cost.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import nvtx
import torch
from torch import nn

DOMAIN = "stepscope"
_domain = nvtx.get_domain(DOMAIN)


class ProfilerRanges:
    """Replaces the NVTX domain under torch.profiler: the same calls open ranges of the profiler."""

    def __init__(self) -> None:
        self.threads = threading.local()

    def get_event_attributes(self, message: str) -> str:
        return message

    def push_range(self, name: str) -> None:
        opened_range = torch.profiler.record_function(name)
        opened_range.__enter__()
        vars(self.threads).setdefault("open", []).append(opened_range)

    def pop_range(self) -> None:
        self.threads.open.pop().__exit__(None, None, None)


def use_ranges(ranges: Any) -> None:
    """Open ``ranges`` instead of NVTX ranges from now on.

    Args:
        ranges: an object with the methods of :class:`ProfilerRanges`.
    """
    global _domain
    _domain = ranges
    _attributes.cache_clear()


def region(name: str) -> Callable:
    """Return a decorator that stores the name of a model's region on a method and returns it unchanged."""

    def mark(method: Callable) -> Callable:
        setattr(method, "region", name)  # noqa: B010
        return method

    return mark


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """Open an NVTX push/pop range on this thread, in the project's domain."""
    _domain.push_range(_attributes(name))
    try:
        yield
    finally:
        _domain.pop_range()


@functools.cache
def _attributes(name: str):
    return _domain.get_event_attributes(message=name)


class Annotation:
    """Records an annotated model's forward pass, so that its backward pass gets the same names.

    Autograd runs backward in its own threads, where no range of the forward pass is open. But forward numbers
    every autograd node from a counter of its thread, so the counter's values at the two ends of a region
    identify the nodes that the region created. This is exact, also for fused or rewritten operations, whereas
    ranges from module hooks would miss operations between modules.
    """

    def __init__(self) -> None:
        # (first number, end, name) of each region; inner regions precede outer ones
        self.made: list[tuple[int, int, str]] = []
        self.output: Any = None  # of the last region that ended

    def link_backward(self) -> None:
        """Make each autograd node open the range of the region that created it.

        Call this between forward and backward.
        """
        regions: dict[int, str] = {}  # by the number of a node
        for first, end, region_name in reversed(self.made):  # inner regions overwrite outer ones
            regions.update(dict.fromkeys(range(first, end), region_name))
        todo: list[tuple[Any, str | None]] = [(self.output.grad_fn, None)]
        visited = set()
        while todo:
            node, user_region = todo.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            # a node that accumulates a parameter's gradient has no number; it belongs to the parameter's user
            is_accumulation = node.name().endswith("AccumulateGrad")
            name = regions.get(node._sequence_nr(), user_region if is_accumulation else None)
            if name:
                attributes = _attributes(name)
                node.register_prehook(lambda _, attributes=attributes: _domain.push_range(attributes))
                node.register_hook(lambda *_: _domain.pop_range())
            todo += [(function, name) for function, _ in node.next_functions]
        self.made.clear()
        self.output = None


def _wrapped(method: Callable, name: str, annotation: Annotation) -> Callable:
    # looked up once: these calls are part of the profiled step
    attributes, push, pop = _attributes(name), _domain.push_range, _domain.pop_range
    next_number, made = torch._C._autograd._get_sequence_nr, annotation.made

    @functools.wraps(method)
    def call(*args, **kwargs):
        first = next_number()
        push(attributes)
        try:
            output = annotation.output = method(*args, **kwargs)
        finally:
            pop()
        made.append((first, next_number(), name))
        return output

    return call


def _named_methods(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield each method that has a region's name, as module, attribute and region."""
    for module in model.modules():
        for attribute in dir(type(module)):
            name = getattr(getattr(type(module), attribute, None), "region", None)
            if isinstance(name, str):
                yield module, attribute, name


@contextmanager
def annotated(model: nn.Module) -> Iterator[Annotation]:
    """Open an NVTX range around every method of ``model`` that has a region's name, until the block ends.

    To name a backward pass as well, call the annotation's ``link_backward()`` before it. After a forward pass
    without a backward pass, call ``made.clear()``.
    """
    annotation = Annotation()
    named_methods = list(_named_methods(model))
    # an instance attribute shadows the class's method; deleting it restores the method
    for module, attribute, name in named_methods:
        setattr(module, attribute, _wrapped(getattr(module, attribute), name, annotation))
    try:
        yield annotation
    finally:
        for module, attribute, _ in named_methods:
            delattr(module, attribute)


@contextmanager
def annotated_modules(model: nn.Module, name_of: Callable[[str], str]) -> Iterator[Annotation]:
    """Open a range around the forward pass of every module of ``model``, until the block ends.

    Set the annotation's ``output`` to the loss before you call ``link_backward()``, because a module may return
    anything.

    Args:
        name_of: the range's name for a module's path.
    """
    annotation = Annotation()
    modules = list(model.named_modules())
    for path, module in modules:
        module.forward = _wrapped(module.forward, name_of(path), annotation)
    try:
        yield annotation
    finally:
        for _, module in modules:
            del module.forward
