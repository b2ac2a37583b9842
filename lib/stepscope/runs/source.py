"""Compute a digest that identifies the version of a notebook's measuring code.

Comments, outputs and default parameters don't change the digest. It covers all code cells except those tagged
``parameters`` (which set defaults) or ``show`` (which only display results).
"""

import ast
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.config import assigned_constants

PARAMETERS, INJECTED, SHOW = "parameters", "injected-parameters", "show"


class Cell(NamedTuple):
    """A code cell: its source, its tags, and its error outputs."""

    source: str
    tags: frozenset[str]
    errors: list[dict[str, Any]]

    @property
    def shows(self) -> bool:
        return SHOW in self.tags

    @property
    def measures(self) -> bool:
        """Whether the cell's code affects the measurement and therefore belongs in the digest."""
        return not self.tags & {PARAMETERS, INJECTED, SHOW}


def code_cells(notebook: Path) -> list[Cell]:
    """Return a notebook's code cells, in order.

    Raises:
        OSError: If the file can't be read.
        ValueError: If the file isn't a notebook.
    """
    content = json.loads(notebook.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise ValueError(f"{notebook}: not a Jupyter notebook")
    return [
        Cell(
            "".join(cell["source"]),
            frozenset(cell.get("metadata", {}).get("tags", [])),
            [output for output in cell.get("outputs", []) if output["output_type"] == "error"],
        )
        for cell in content["cells"]
        if cell["cell_type"] == "code"
    ]


def notebook_source(notebook: Path) -> str:
    """Return the digest of a notebook's measuring cells, as twelve hexadecimal digits.

    Raises:
        OSError, ValueError: As in :func:`code_cells`.
    """
    return digest_of(parsed(cell.source) for cell in code_cells(notebook) if cell.measures)


def digest_of(cells: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(filter(None, cells)).encode()).hexdigest()[:12]


def parsed(source: str) -> str:
    """Return a cell's code without comments and formatting, or "" if the cell contains no code.

    The result doesn't depend on the Python version. If a cell isn't valid Python, for example because it contains
    IPython's ``%`` or ``!`` commands, the result is its source, without leading and trailing whitespace.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source.strip()
    return json.dumps(_plain(tree.body)) if tree.body else ""


def _plain(value: Any) -> Any:
    if isinstance(value, ast.AST):
        fields = [[name, _plain(inner)] for name, inner in ast.iter_fields(value)]
        return [type(value).__name__, *([name, inner] for name, inner in fields if inner not in ("None", []))]
    return [_plain(item) for item in value] if isinstance(value, list) else repr(value)


def source_by_hand(executed: list[str], notebook: Path) -> str:
    """Return the digest of a notebook that a user runs by hand.

    The kernel knows only the executed code, not the tags of the cells. If this code consists of cells from the
    notebook's file and assignments to parameters, return the digest of the file. Otherwise, return a digest of all
    executed code.

    Args:
        executed: the source of each executed cell.
        notebook: the path of the notebook's file.
    """
    known_cells = {"", *(parsed(cell.source) for cell in code_cells(notebook))}
    cells = [parsed(source) for source in executed if not assigned_constants(source)]
    return notebook_source(notebook) if known_cells.issuperset(cells) else digest_of(cells)
