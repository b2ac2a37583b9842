"""The lines of a summary: what one holds, how it is rendered, and how names and counts are written."""

import json
import textwrap
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from stepscope.captures.advice import SHOWN, shortened
from stepscope.files import one_line
from stepscope.report.tables import MOST_TEXT, digits, escape
from stepscope.traces.attribution import TraceError

FORMATS = ("text", "json", "markdown")


@dataclass
class Line:
    """One fact: a label, a text in words, and its numbers with their units at the ends of their names."""

    label: str
    text: str
    values: dict[str, Any] = field(default_factory=dict)


def rendered(lines: Sequence[Line], how: str = "text") -> str:
    """Render lines as text, markdown or JSON.

    Raises:
        TraceError: there is no such format.
    """
    if how == "json":
        facts = [{"label": line.label, "text": line.text, **line.values} for line in lines]
        return json.dumps({"lines": facts}, ensure_ascii=False, indent=1, default=float)
    if how == "markdown":
        label, found = "", []
        for line in lines[1:]:
            label = line.label or label
            found.append(f"* **{escape(label)}**: {escape_all(line.text)}")
        return "\n".join([escape_all(lines[0].text), "", *found])
    if how != "text":
        raise TraceError(f"--format: got {clean(how)!r}, expected one of {', '.join(FORMATS)}")
    return "\n".join([lines[0].text, *(f"{line.label:<14} {line.text}" for line in lines[1:])])


def escape_all(text: str) -> str:
    """Escape a line's text for markdown, however long it is. The text never begins a line of markdown, so that
    no number makes a list."""
    parts = textwrap.wrap(text, MOST_TEXT - 2, break_on_hyphens=False)
    return " ".join(escape(f"x {part}")[2:] for part in parts)


def clean(name: object, most: int = SHOWN) -> str:
    """Return a name from a file on one line: printable, and not too long."""
    return one_line(name, most)


def listed(found: pd.Series, between: str = ", ") -> str:
    """Write names and their ms, "matmul 27.2 | attention 5.20 ms"; "" for none."""
    text = between.join(f"{clean(name)} {digits(value, 'ms')}" for name, value in found.items())
    return f"{text} ms" if text else ""


def count_text(value: float) -> str:
    """Write a count per step, which is a mean where two steps are in the middle."""
    return digits(value, "n" if value == round(value) or value >= 100 else "")


def counted(things: Sized | int, word: str) -> str:
    count = things if isinstance(things, int) else len(things)
    return f"{count:,} {word}{'s' * (count != 1)}"


def short(name: object) -> str:
    return clean(shortened(str(name)))
