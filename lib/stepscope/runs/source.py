"""Which notebook measured: a digest of its code that a comment, a picture or another default leaves as it is.

A notebook's cells have tags. ``parameters`` are defaults and ``show`` is what only shows; all other code
decides what is measured, and is in the digest.
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
    """A code cell: its source, its tags, and the errors among its outputs."""

    source: str
    tags: frozenset[str]
    errors: list[dict[str, Any]]

    @property
    def shows(self) -> bool:
        return SHOW in self.tags

    @property
    def measures(self) -> bool:
        """Whether what it says is part of the measurement."""
        return not self.tags & {PARAMETERS, INJECTED, SHOW}


def code_cells(notebook: Path) -> list[Cell]:
    """The code cells of a notebook, in order.

    Raises:
        OSError: it cannot be read. ValueError: it is no notebook.
    """
    content = json.loads(notebook.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise ValueError(f"{notebook}: is no notebook")
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
    """The digest of a notebook's measuring cells: twelve hexadecimal digits.

    Raises:
        OSError, ValueError: as :func:`code_cells`.
    """
    return digest_of(parsed(cell.source) for cell in code_cells(notebook) if cell.measures)


def digest_of(cells: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(filter(None, cells)).encode()).hexdigest()[:12]


def parsed(source: str) -> str:
    """A cell's code without comments and layout, the same in every version of Python; empty where it has no
    code. What is not Python (a line of IPython's ``%`` or ``!``) is taken as it stands."""
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
    """The digest of a notebook that is run by hand, whose tags its kernel does not see: the notebook's own
    where nothing but its cells, and settings of parameters, was executed; else one of all that was."""
    known = {"", *(parsed(cell.source) for cell in code_cells(notebook))}
    cells = [parsed(source) for source in executed if not assigned_constants(source)]
    return notebook_source(notebook) if known.issuperset(cells) else digest_of(cells)
