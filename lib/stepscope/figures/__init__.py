"""Draw figures, with one module per study.

Each function takes a title from the document, and rows of views to draw.
"""

import importlib
from collections.abc import Callable

from stepscope.report.style import Picture, svg

MODULES = ("ladder", "benchmark", "nsys", "mixed_precision", "memory", "attention", "distributed")


def all_figures() -> dict[str, Callable[..., str]]:
    """Return a dictionary of all figures, which are functions (title, *frames) that return an SVG."""
    figures = {}
    for module in MODULES:
        members = vars(importlib.import_module(f"stepscope.figures.{module}"))
        for name, function in members.items():
            is_defined_here = getattr(function, "__module__", "").endswith(module)
            if is_defined_here and not name.startswith("_"):
                figures[name] = _as_svg(function)
    return figures


def _as_svg(draw: Callable[..., Picture]) -> Callable[..., str]:
    return lambda title, *frames: svg(draw(title, *frames))
