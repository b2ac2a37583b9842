"""One capture of several modes' steps, cut into an export for each.

The steps of a mode follow one another, each waited for, so the moment in which the next mode's first step
begins has the operations of one before it and those of the other behind it.
"""
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from stepscope.traces.export import (
    NVTX,
    PUSH_POP,
    ConservationError,
    TraceError,
    activity_totals,
    load_trace,
)


def cut(export: Path, modes: Sequence[str]) -> dict[str, Path]:
    """Write an export ``<mode>.sqlite`` for each mode, beside the one that holds them all.

    Args:
        modes: of each step in the capture, in order; a mode's steps follow one another.

    Returns:
        Their paths by mode.

    Raises:
        TraceError: the capture has not so many steps, or cannot be read.
        ConservationError: an operation is in none of them, or in two.
    """
    ranges = load_trace(export)[1]
    steps = ranges[ranges["role"] == "step"].sort_values("start_ns")
    begins = steps["start_ns"].tolist()
    if len(begins) != len(modes):
        raise TraceError(f"{export}: holds {len(begins)} steps, expected the {len(modes)} that were run")
    names = list(dict.fromkeys(modes))
    # What follows the last step is the freeing of its memory, which is nobody's.
    edges = [None, *(begins[modes.index(name)] for name in names[1:]), int(steps["end_ns"].max())]
    made = {name: _between(export, name, *edges[at:at + 2]) for at, name in enumerate(names)}
    whole, parts = activity_totals(export), sum(activity_totals(path) for path in made.values())
    if not whole.equals(parts):
        raise ConservationError(f"{export}: its operations, {whole.to_dict('index')}, are not those of its"
                                f" parts, {parts.to_dict('index')}")
    return made


def _between(export: Path, name: str, first_ns: int | None, end_ns: int | None) -> Path:
    path = Path(shutil.copy(export, export.with_name(f"{name}.sqlite")))
    with closing(sqlite3.connect(path)) as connection:
        for table, rows in _timed(connection).items():
            for edge, comparison in ((first_ns, "<"), (end_ns, ">=")):
                if edge is not None:
                    connection.execute(f'DELETE FROM "{table}" WHERE {rows} AND start {comparison} ?', [edge])
        connection.commit()
        connection.execute("VACUUM")  # nsys's reports are each made from a copy
    return path


def _timed(connection: sqlite3.Connection) -> dict[str, str]:
    """The tables whose rows begin at a time, and which of them are cut: NVTX's domains are everybody's."""
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    starts = [table for table in tables
              if "start" in {row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')}]
    return {table: f"eventType = {PUSH_POP}" if table == NVTX else "1" for table in starts}
