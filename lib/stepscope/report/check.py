"""Check that the committed writeup matches its records.

Texts must match exactly. In figures, words must match exactly, and numbers may differ slightly.
"""

import re
from pathlib import Path

from stepscope.files import read_within
from stepscope.report import machine, writeup
from stepscope.report.load import read, steady
from stepscope.report.output import Report, stale_figures
from stepscope.runs.store import Store
from stepscope.views import Views

# Coordinates may differ by up to this many points, because machines round the last digit differently.
NEARLY = 0.05
MAX_BYTES = 2**28


def check(runs: Path, out: Path) -> list[str]:
    """Compare the writeup in ``out`` with the records in ``runs``; return a list of their differences.

    The list has one line per file. The package's ``reference.parquet`` is compared, too. No files are written.

    Raises:
        StepscopeError: If :func:`stepscope.report.writeup.compose` raises it.
    """
    found = read(Store(runs))
    report = writeup.compose(found, runs, out, Views(steady(found.tables)))
    return [*filter(None, [*differences(report, out), machine.reference_difference(runs)])]


def differences(report: Report, out: Path) -> list[str]:
    """Compare the files in ``out`` with a report; return a list of their differences, one line per file."""
    left_out = [f"omitted: {error}" for error in report.errors]
    compared = [_compared(out, name, text) for name, text in report.texts.items()]
    surplus = [f"figures/{path.name} isn't used by any page" for path in stale_figures(report, out)]
    return [*left_out, *filter(None, compared), *surplus]


def _compared(out: Path, name: str, expected: str) -> str:
    try:
        text = read_within(out, name, MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return f"{name}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})"
    if name.endswith((".svg", ".html")):
        return "" if alike(text, expected) else f"{name} shows different data than the records"
    if text == expected:
        return ""
    lines = zip([*text.splitlines(), "(end)"], [*expected.splitlines(), "(end)"])
    number, old, new = next((n, *pair) for n, pair in enumerate(lines, start=1) if pair[0] != pair[1])
    return f"{name}, line {number}: got {old[:120]!r}, but the records give {new[:120]!r}"


def alike(old: str, new: str) -> bool:
    """Return whether two drawings contain the same words and tags, with nearly the same numbers in the tags.

    The ids of clip paths and markers are ignored, because they depend on the last digits of coordinates.
    """
    # Inside a page, a drawing's quotes and hashes are written as %22 and %23.
    ids = re.compile(r"(?:\b|(?<=%2[23]))[a-z][0-9a-f]{10}\b")
    pieces = [re.split(r"(<[^>]*>)", ids.sub("", text)) for text in (old, new)]
    if len(pieces[0]) != len(pieces[1]) or pieces[0][::2] != pieces[1][::2]:
        return False
    tags = [re.split(r"(-?\d+(?:\.\d+)?)", "".join(part[1::2])) for part in pieces]
    return tags[0][::2] == tags[1][::2] and all(
        abs(float(a) - float(b)) <= NEARLY for a, b in zip(tags[0][1::2], tags[1][1::2])
    )
