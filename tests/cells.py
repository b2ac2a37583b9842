"""What tests do with notebooks: execute their cells in this process, and read what stands in them."""
import ast
import dis
import functools
import linecache
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope import PACKAGE
from stepscope.report.load import load
from stepscope.report.schemas import Tables
from stepscope.runs.source import Cell, code_cells

NOTEBOOKS = sorted((PACKAGE / "notebooks").glob("*.ipynb"))
CLOCKS = {"perf_counter", "perf_counter_ns", "default_timer", "monotonic", "time", "time_ns", "elapsed_time"}


@functools.cache
def reference(runs: str | Path = "") -> Tables:
    """What a notebook's ``load`` reads to show beside its own run, read once."""
    return load(runs)


def run_cells(notebook: str | Path, until: str | None = None, replaced: Mapping[str, Any] | None = None,
              **parameters: Any) -> dict[str, Any]:
    """Execute a notebook's code cells in this process, in order; the names that they leave.

    Args:
        notebook: its path, or the name of one of the package's.
        until: the cell in which this stands is not executed, nor what is below it.
        replaced: values of names as soon as a cell has bound them: a clock, a library's function.
        parameters: what stands in place of the parameters cell's.
    """
    path = PACKAGE / "notebooks" / f"{notebook}.ipynb" if isinstance(notebook, str) else notebook
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(path), 1):
        if until is not None and until in cell.source:
            return names
        place = f"{path.name}, code cell {number}"  # under which inspect finds the source, as in a kernel
        linecache.cache[place] = (len(cell.source), None, cell.source.splitlines(keepends=True), place)
        exec(compile(cell.source, place, "exec"), names)
        if "parameters" in cell.tags:
            if unknown := parameters.keys() - names.keys():
                raise LookupError(f"{path.name} has no parameters {', '.join(sorted(unknown))}")
            names |= parameters
        names |= {name: value for name, value in {"load": reference, **(replaced or {})}.items() if name in names}
    if until is not None:
        raise LookupError(f"{path.name} has no cell with {until!r}")
    return names


def bare_clocks(cells: list[Cell]) -> list[str]:
    """Clocks that are read, or bound to a name, in cells without the tag that gives them the GPU to themselves;
    to import one is not to read it. ``time`` is one as ``time.time`` only: it is the module's name, too."""
    found = []
    for number, cell in enumerate(cells, 1):
        for node in ast.walk(ast.parse(cell.source)) if "measure" not in cell.tags else ():
            if isinstance(node, ast.Name) and node.id in CLOCKS - {"time"}:
                found.append(f"cell {number}: {node.id}")
            elif isinstance(node, ast.Attribute) and (
                    node.attr in CLOCKS - {"time"} or ast.unparse(node) == "time.time"):
                found.append(f"cell {number}: {ast.unparse(node)}")
    return found


def leaks(cells: list[Cell]) -> list[str]:
    """Names that a cell which only shows binds and another cell reads without binding them itself: where the
    one slips, so does the other."""
    found = []
    for number, cell in enumerate(cells):
        if cell.shows:
            _, bound = names_of(cell.source)
            for place, other in enumerate(cells):
                read, own = names_of(other.source)
                found += [f"{name} of cell {number + 1}, read by cell {place + 1}"
                          for name in sorted(bound & read - own) if place != number]
    return found


def names_of(source: str) -> tuple[set[str], set[str]]:
    """The notebook's names that a cell reads, anywhere in it, and those that it binds."""
    module = compile(source, "cell", "exec")
    read, bound, todo = set(), set(), [module]
    while todo:
        code = todo.pop()
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
                read.add(step.argval)
            elif step.opname == "STORE_GLOBAL" or (step.opname == "STORE_NAME" and code is module):
                bound.add(step.argval)
        todo += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return read, bound
