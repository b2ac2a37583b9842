"""Names for the parts of a model, as NVTX ranges on demand.

``@region("ffn")`` only writes the name on a method. Nothing wraps the method until :func:`annotated` asks for
it, so that an unannotated model runs exactly the code one reads: annotation that is off costs nothing at all.
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
    """Stands in for the NVTX domain where torch.profiler watches: the same calls, its ranges."""

    def __init__(self) -> None:
        self.threads = threading.local()

    def get_event_attributes(self, message: str) -> str:
        return message

    def push_range(self, name: str) -> None:
        opened = torch.profiler.record_function(name)
        opened.__enter__()
        vars(self.threads).setdefault("open", []).append(opened)

    def pop_range(self) -> None:
        self.threads.open.pop().__exit__(None, None, None)


def use_ranges(ranges: Any) -> None:
    """From now on, open these ranges and not NVTX's: an object with the calls of :class:`ProfilerRanges`."""
    global _domain
    _domain = ranges
    _attributes.cache_clear()


def region(name: str) -> Callable:
    """Name a method as one region of the model; the method itself is returned unchanged."""

    def mark(method: Callable) -> Callable:
        setattr(method, "region", name)  # noqa: B010
        return method

    return mark


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """An NVTX push/pop range on this thread, in the project's domain."""
    _domain.push_range(_attributes(name))
    try:
        yield
    finally:
        _domain.pop_range()


@functools.cache
def _attributes(name: str):
    return _domain.get_event_attributes(message=name)


class Annotation:
    """What is known of an annotated model's last forward pass, so that its backward pass can bear the same
    names.

    Autograd runs backward on threads of its own, where no range of the forward's thread is open, and gives
    each of its nodes the number that its thread's counter had when forward made it. The counter's values at
    the two ends of a region therefore tell the nodes that the region made: exactly, fused or rewritten
    operations included, where ranges from module hooks would miss what lies between modules.
    """

    def __init__(self) -> None:
        # (first, end) of each region's numbers; inner regions before outer
        self.made: list[tuple[int, int, str]] = []
        self.output: Any = None  # of the region that ended last

    def link_backward(self) -> None:
        """Between forward and backward: hang on each autograd node an NVTX range of the region that made
        it.
        """
        owners: dict[int, str] = {}
        for first, end, region_name in reversed(self.made):  # inner regions overwrite outer ones
            owners.update(dict.fromkeys(range(first, end), region_name))
        todo: list[tuple[Any, str | None]] = [(self.output.grad_fn, None)]
        seen = set()
        while todo:
            node, maker = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            # A parameter's node that stores its gradient has no number of its own; it belongs to the
            # parameter's user.
            name = owners.get(node._sequence_nr(), maker if node.name().endswith("AccumulateGrad") else None)
            if name:
                attributes = _attributes(name)
                node.register_prehook(lambda _, attributes=attributes: _domain.push_range(attributes))
                node.register_hook(lambda *_: _domain.pop_range())
            todo += [(function, name) for function, _ in node.next_functions]
        self.made.clear()
        self.output = None


def _wrapped(method: Callable, name: str, annotation: Annotation) -> Callable:
    attributes, push, pop = _attributes(name), _domain.push_range, _domain.pop_range
    number, made = torch._C._autograd._get_sequence_nr, annotation.made

    @functools.wraps(method)
    def call(*args, **kwargs):
        first = number()
        push(attributes)
        try:
            output = annotation.output = method(*args, **kwargs)
        finally:
            pop()
        made.append((first, number(), name))
        return output

    return call


def _named(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """The methods that bear a region's name: the module, its attribute, the region."""
    for module in model.modules():
        for attribute in dir(type(module)):
            name = getattr(getattr(type(module), attribute, None), "region", None)
            if isinstance(name, str):
                yield module, attribute, name


@contextmanager
def annotated(model: nn.Module) -> Iterator[Annotation]:
    """Open an NVTX range around every method of ``model`` that bears a region's name, until the block ends.

    Call ``link_backward()`` of what it gives before each backward pass that is to bear the names as well, and
    ``made.clear()`` after a forward pass without one.
    """
    annotation = Annotation()
    # An instance attribute shadows the class's method; deleting it brings the plain method back.
    named = list(_named(model))
    for module, attribute, name in named:
        setattr(module, attribute, _wrapped(getattr(module, attribute), name, annotation))
    try:
        yield annotation
    finally:
        for module, attribute, _ in named:
            delattr(module, attribute)
