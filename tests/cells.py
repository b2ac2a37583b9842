"""Execute notebook cells in this process, and analyze their code."""

import dis
import functools
import json
import linecache
import statistics
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from stepscope import PACKAGE
from stepscope.report.load import load
from stepscope.report.schemas import Tables
from stepscope.runs.source import Cell, code_cells

NOTEBOOKS = sorted((PACKAGE / "notebooks").glob("*.ipynb"))


@functools.cache
def reference(runs: str | Path = "", quiet: bool = False) -> Tables:
    """Load the reference tables that a notebook compares its run with; cache the result."""
    return load(runs, quiet)


def run_cells(
    notebook: str | Path,
    until: str | None = None,
    replaced: Mapping[str, Any] | None = None,
    wrapped: Mapping[str, Callable[[Any], Any]] | None = None,
    **parameters: Any,
) -> dict[str, Any]:
    """Execute a notebook's code cells in this process, in order; return the variables that they define.

    Args:
        notebook: the notebook's path, or the name of one of the package's notebooks.
        until: stop before the first cell that contains this text.
        replaced: values, keyed by variable name, that are assigned to existing variables (such as a clock or a
            library function) after each cell.
        wrapped: wrappers, keyed by function name; each is applied once, after a cell has defined the function.
        parameters: values that override those in the parameters cell.
    """
    path = PACKAGE / "notebooks" / f"{notebook}.ipynb" if isinstance(notebook, str) else notebook
    names: dict[str, Any] = {"__name__": "__main__"}
    waiting = dict(wrapped or {})
    for number, cell in enumerate(code_cells(path), 1):
        if until is not None and until in cell.source:
            return names
        # inspect finds a cell's source under this name, as in a Jupyter kernel
        place = f"{path.name}, code cell {number}"
        linecache.cache[place] = (len(cell.source), None, cell.source.splitlines(keepends=True), place)
        exec(compile(cell.source, place, "exec"), names)
        if "parameters" in cell.tags:
            if unknown := parameters.keys() - names.keys():
                raise LookupError(f"{path.name} has no parameters {', '.join(sorted(unknown))}")
            names |= parameters
        names |= {
            name: value for name, value in {"load": reference, **(replaced or {})}.items() if name in names
        }
        names |= {name: waiting.pop(name)(names[name]) for name in [*waiting] if name in names}
    if until is not None:
        raise LookupError(f"{path.name} has no cell with {until!r}")
    return names


def edited(notebook: str | Path, folder: Path, before: str, after: str) -> Path:
    """Copy a notebook into a folder, replace ``before`` with ``after`` in one cell, and return the copy's path.

    The notebook is given by its path or by its name in the package. Only one cell may contain ``before``.
    """
    source = PACKAGE / "notebooks" / f"{notebook}.ipynb" if isinstance(notebook, str) else notebook
    content = json.loads(source.read_text())
    (cell,) = (
        cell for cell in content["cells"] if cell["cell_type"] == "code" and before in "".join(cell["source"])
    )
    cell["source"] = "".join(cell["source"]).replace(before, after)
    path = folder / source.name
    path.write_text(json.dumps(content))
    return path


def executed(notebook: str, holding: str, names: dict[str, Any]) -> dict[str, Any]:
    """Execute the only cell that contains this text, with ``names`` as its variables; return ``names``."""
    (source,) = [
        cell.source
        for cell in code_cells(PACKAGE / "notebooks" / f"{notebook}.ipynb")
        if holding in cell.source
    ]
    exec(source, names)
    return names


def spread(wall_times_ms: list[float]) -> dict[str, float]:
    """Compute the wall-time columns of a table's row, using only the standard library."""
    q1, _, q3 = statistics.quantiles(wall_times_ms, n=4, method="inclusive")
    return {
        "wall_ms": statistics.median(wall_times_ms),
        "wall_mean_ms": statistics.mean(wall_times_ms),
        "wall_std_ms": statistics.stdev(wall_times_ms),
        "wall_q1_ms": q1,
        "wall_q3_ms": q3,
        "wall_min_ms": min(wall_times_ms),
    }


def covered_ms(rows: pd.DataFrame) -> float:
    """Return the time in milliseconds during which at least one of these operations is running."""
    total = reached = 0
    for start, end in sorted(zip(rows["start_ns"], rows["end_ns"])):
        total, reached = total + max(0, end - max(start, reached)), max(reached, end)
    return total / 1e6


def fastest_complete_step(operations: pd.DataFrame) -> pd.DataFrame:
    """Return the operations of the fastest complete step; a step that lacks operations isn't complete."""
    steps = [own for _, own in operations.groupby("number")]
    return min((own for own in steps if len(own) == max(map(len, steps))), key=covered_ms)


def by_name(operations: pd.DataFrame, *names: str) -> dict[Any, float]:
    """Return the operations' total time in milliseconds for each combination of values in these columns."""
    return (
        (operations["end_ns"] - operations["start_ns"])
        .groupby([operations[name] for name in names])
        .sum()
        .div(1e6)
        .to_dict()
    )


def times_of(samples: pd.DataFrame, operations: pd.DataFrame, phase: str) -> dict[str, float]:
    """Compute a phase's row in the table of times from its mode's raw samples and profiled operations."""
    timed, own = samples[(samples["phase"] == phase) & ~samples["warmup"]], fastest_complete_step(operations)
    own = own if phase == "total" else own[own["phase"] == phase]
    found = spread(timed["wall_ms"].tolist()) | {
        "gpu_ms": covered_ms(own),
        "operations": len(own),
        "steps": len(timed),
    }
    return found | {
        "enqueue_ms": statistics.median(timed["enqueue_ms"]),
        "busy": found["gpu_ms"] / found["wall_ms"],
    }


def step_flops(config: Any) -> float:
    """Return a full step's matmul FLOPs, including attention: three times those of the forward pass."""
    weights = (
        config.num_layers * (4 * config.d_model**2 + 3 * config.d_model * config.d_ff)
        + config.vocab_size * config.d_model
    )
    return (
        6
        * config.batch_size
        * config.context_length
        * (weights + 2 * config.num_layers * config.context_length * config.d_model)
    )


def leaks(cells: list[Cell]) -> list[str]:
    """Describe each variable that a display cell binds and another cell reads.

    If the display cell failed, the other cell would fail, too.
    """
    found = []
    for number, cell in enumerate(cells):
        if cell.shows:
            _, bound = names_of(cell.source)
            for place, other in enumerate(cells):
                read, other_bound = names_of(other.source)
                found += [
                    f"{name} of cell {number + 1}, read by cell {place + 1}"
                    for name in sorted(bound & read - other_bound)
                    if place != number
                ]
    return found


def names_of(source: str) -> tuple[set[str], set[str]]:
    """Return two sets: the global names that a cell reads, and those that it binds."""
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
