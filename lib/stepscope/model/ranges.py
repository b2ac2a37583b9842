"""Name the parts of a model, and open NVTX ranges around them on demand.

``@region("ffn")`` only stores the name on a method. Nothing wraps the method until :func:`annotated` is entered,
so an unannotated model runs exactly the code that you read, without overhead.
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
    """A replacement for the NVTX domain that opens ranges of torch.profiler instead."""

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
    """Use ``ranges``, instead of the NVTX domain, to open all later ranges.

    Args:
        ranges: an object with the methods of :class:`ProfilerRanges`.
    """
    global _domain
    _domain = ranges
    _attributes.cache_clear()


def region(name: str) -> Callable:
    """Return a decorator that stores a region's name on a method, without wrapping the method."""

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
    """A record of an annotated model's forward pass, which is used to name the ranges of its backward pass.

    Autograd runs backward in its own threads, where no range of the forward pass is open. However, the forward
    pass numbers autograd nodes with a counter, so the counter's values at the start and end of a region identify
    the nodes that the region created. This approach is exact, even for fused or rewritten operations. Ranges
    opened by module hooks would miss the operations between modules.
    """

    def __init__(self) -> None:
        # (first number, end, name) of each region; inner regions precede the regions that enclose them
        self.made: list[tuple[int, int, str]] = []
        self.output: Any = None  # the output of the last region that ended

    def link_backward(self) -> None:
        """Make each autograd node open the range of the region that created it.

        Call this between forward and backward.
        """
        regions: dict[int, str] = {}  # names by node number
        for first, end, region_name in reversed(self.made):  # inner regions overwrite outer ones
            regions.update(dict.fromkeys(range(first, end), region_name))
        todo: list[tuple[Any, str | None]] = [(self.output.grad_fn, None)]
        visited = set()
        while todo:
            node, user_region = todo.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            # A node that accumulates a parameter's gradient has no number. It belongs to the region that uses the
            # parameter.
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
    # looked up in advance, because lookups would take time in the profiled step
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
    """Yield each method that has a region's name, as a tuple (module, attribute, region)."""
    for module in model.modules():
        for attribute in dir(type(module)):
            name = getattr(getattr(type(module), attribute, None), "region", None)
            if isinstance(name, str):
                yield module, attribute, name


@contextmanager
def annotated(model: nn.Module) -> Iterator[Annotation]:
    """Within the context, open an NVTX range around every method of ``model`` that has a region's name.

    To name a backward pass as well, call the annotation's ``link_backward()`` before it. After a forward pass
    without a backward pass, call the annotation's ``made.clear()``.
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
    """Within the context, open a range around the forward pass of every module of ``model``.

    Set the annotation's ``output`` to the loss before you call ``link_backward()``, because a module's output may
    not be a tensor.

    Args:
        name_of: returns the name of a module's range, given the module's path.
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
