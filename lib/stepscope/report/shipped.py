"""What the shipped reference found, for reports of other machines: chapters/reference.json, which
:mod:`stepscope.report.reference` makes of its records."""

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "chapters" / "reference.json"


@cache
def shipped() -> dict[str, Any]:
    """``device``; ``claims``, the numbers of some claims by name, each with ``on``, the GPU's short name;
    ``key_numbers``, as of :func:`stepscope.report.tables_across.key_numbers`, a dictionary a row."""
    return json.loads(FILE.read_text(encoding="utf-8"))
