"""Figures: each draws rows of views under a title that the document gives it."""

import importlib
from collections.abc import Callable

from stepscope.report.style import Picture, svg

MODULES = ("ladder", "benchmark", "nsys", "mixed_precision", "memory", "attention")


def all_figures() -> dict[str, Callable[..., str]]:
    """Return by name a function (title, *frames) that draws a figure and returns its SVG."""
    found = {}
    for module in MODULES:
        for name, function in vars(importlib.import_module(f"stepscope.figures.{module}")).items():
            if getattr(function, "__module__", "").endswith(module) and not name.startswith("_"):
                found[name] = _as_svg(function)
    return found


def _as_svg(draw: Callable[..., Picture]) -> Callable[..., str]:
    return lambda title, *frames: svg(draw(title, *frames))
