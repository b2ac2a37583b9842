"""Render the lines of a summary, and format the names, counts and times in these lines."""

import json
import textwrap
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from stepscope.captures.advice import MAX_NAME_CHARS, short_kernel_name
from stepscope.files import one_line
from stepscope.report.tables import MAX_TEXT_CHARS, digits, escape
from stepscope.traces.attribution import TraceError

FORMATS = ("text", "json", "markdown")


@dataclass
class Line:
    """One fact in a summary: a label, a text, and the numbers in the text.

    Each key of ``values`` ends with the unit of its number, if the number has a unit.
    """

    label: str
    text: str
    values: dict[str, Any] = field(default_factory=dict)


def rendered(lines: Sequence[Line], how: str = "text") -> str:
    """Render lines as text, markdown or JSON.

    Raises:
        TraceError: If the format is unknown.
    """
    if how == "json":
        facts = [{"label": line.label, "text": line.text, **line.values} for line in lines]
        return json.dumps({"lines": facts}, ensure_ascii=False, indent=1, default=float)
    if how == "markdown":
        label, items = "", []
        for line in lines[1:]:
            label = line.label or label
            items.append(f"* **{escape(label)}**: {escape_all(line.text)}")
        return "\n".join([escape_all(lines[0].text), "", *items])
    if how != "text":
        raise TraceError(f"--format: got {clean(how)!r}, but expected one of {', '.join(FORMATS)}")
    return "\n".join([lines[0].text, *(f"{line.label:<14} {line.text}" for line in lines[1:])])


def escape_all(text: str) -> str:
    """Escape a line's text for markdown, regardless of its length.

    The text is never at the start of a markdown line. Therefore, if the text begins with a number, this number
    can't mark a list item and must not be escaped.
    """
    parts = textwrap.wrap(text, MAX_TEXT_CHARS - 2, break_on_hyphens=False)
    return " ".join(escape(f"x {part}")[2:] for part in parts)


def clean(name: object, max_chars: int = MAX_NAME_CHARS) -> str:
    """Clean a name for printing: remove line breaks and unprintable characters, and truncate a long name."""
    return one_line(name, max_chars)


def listed(times_ms: pd.Series, separator: str = ", ") -> str:
    """Format names with their times, such as "matmul 27.2 | attention 5.20 ms". An empty series becomes ""."""
    text = separator.join(f"{clean(name)} {digits(value, 'ms')}" for name, value in times_ms.items())
    return f"{text} ms" if text else ""


def count_text(value: float) -> str:
    """Format the number of events per step, which can be fractional if it is averaged over two steps."""
    return digits(value, "n" if value == round(value) or value >= 100 else "")


def counted(items: Sized | int, word: str) -> str:
    count = items if isinstance(items, int) else len(items)
    return f"{count:,} {word}{'s' * (count != 1)}"


def short(name: object) -> str:
    return clean(short_kernel_name(str(name)))
