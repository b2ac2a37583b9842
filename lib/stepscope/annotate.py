"""Names for the parts of a model, as NVTX ranges on demand.

``@region("ffn")`` only writes the name on a method. Nothing wraps the method until :func:`annotated` asks for it, so
that an unannotated model runs exactly the code one reads: annotation that is off costs nothing at all.
"""
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import nvtx
from torch import nn

DOMAIN = "stepscope"
_domain = nvtx.get_domain(DOMAIN)


def region(name: str) -> Callable:
    """Name a method as one region of the model; the method itself is returned unchanged."""
    def mark(method: Callable) -> Callable:
        method.region = name
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


def _wrapped(method: Callable, name: str) -> Callable:
    attributes, push, pop = _attributes(name), _domain.push_range, _domain.pop_range

    @functools.wraps(method)
    def call(*args, **kwargs):
        push(attributes)
        try:
            return method(*args, **kwargs)
        finally:
            pop()
    return call


@contextmanager
def annotated(model: nn.Module) -> Iterator[None]:
    """Open an NVTX range around every method of ``model`` that bears a region's name, until the block ends."""
    shadowed = []
    for module in model.modules():
        for attribute in dir(type(module)):
            name = getattr(getattr(type(module), attribute, None), "region", None)
            if isinstance(name, str):
                # An instance attribute shadows the class's method; deleting it brings the plain method back.
                vars(module)[attribute] = _wrapped(getattr(module, attribute), name)
                shadowed.append((module, attribute))
    try:
        yield
    finally:
        for module, attribute in shadowed:
            del vars(module)[attribute]
