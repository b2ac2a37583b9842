"""Write a report's files: first create all of them, and then move them into place together."""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from stepscope import StepscopeError, __version__
from stepscope.figures import all_figures
from stepscope.files import read_within, write_texts_durably
from stepscope.report.tables import NONE, escape
from stepscope.runs.record import Record

STORY = ("<!-- story -->\n", "<!-- /story -->")
FOOT = Path(__file__).with_name("page_foot.md")
MAX_README_BYTES = 2**20
FOLDERS = ("evidence", "figures")
MAX_NAMED = 3  # maximum number of devices or code versions that a page's footer names


class OutputError(StepscopeError, OSError):
    """Raised when a report can't be written; the message names the path and the reason."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass
class Report:
    """A report's files, by path within its folder, with the errors and notes about its runs."""

    texts: dict[str, str]
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def write(report: Report, out: Path) -> list[Path]:
    """Write a report's files into ``out``; keep the old files until all new files are on disk.

    An earlier report's figures are removed unless this report includes them.

    Raises:
        OutputError: If the report can't be written into ``out``.
    """
    for folder in FOLDERS:
        if (out / folder).is_symlink():
            raise OutputError(f"{out / folder}: expected a folder, but it is a link; remove it")
    try:
        for folder in FOLDERS:
            (out / folder).mkdir(parents=True, exist_ok=True)
        write_texts_durably({out / name: text for name, text in report.texts.items()})
        for path in stale_figures(report, out):
            path.unlink()
    except OSError as error:
        raise OutputError(f"{out}: cannot write the report ({error.strerror or error})") from None
    finally:
        for folder in FOLDERS:
            with suppress(OSError):  # raised if the folder isn't empty
                (out / folder).rmdir()
    return [out / name for name in report.texts]


def stale_figures(report: Report, out: Path) -> list[Path]:
    """Return the files in ``out/figures`` that are named like our figures but aren't part of this report."""
    kinds = "|".join(map(re.escape, all_figures()))
    ours = re.compile(rf"({kinds})(-\d+)?\.svg")
    paths = sorted((out / "figures").glob("*.svg"))
    return [
        path for path in paths if ours.fullmatch(path.name) and f"figures/{path.name}" not in report.texts
    ]


def readme(out: Path, first: str) -> dict[str, str]:
    """Return a dict that maps the README's file name to its text, with ``first`` inserted between its marks.

    The dict is empty if ``out`` contains no README, or if the README doesn't contain the marks.

    Raises:
        OutputError: If only one of the two marks is present, or the README can't be read.
    """
    place = out / "README.md"
    try:
        text = read_within(out, place.name, MAX_README_BYTES).decode("utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        raise OutputError(f"{place}: cannot be read ({why})") from None
    marks = [text.count(mark) for mark in STORY]
    if marks == [0, 0]:
        return {}
    begin, end = (text.find(mark) for mark in STORY)
    if marks != [1, 1] or end < begin:
        raise OutputError(
            f"{place}: got {marks[0]} lines {STORY[0].strip()!r} and {marks[1]} lines {STORY[1]!r}, but expected"
            " one of each, in this order, or none"
        )
    return {place.name: text[:begin] + STORY[0] + first.strip() + "\n" + text[end:]}


def foot(records: list[Record]) -> str:
    """Return a page's footer: the number of runs, their dates (not today's date), and how to cite the page."""
    days = sorted(record.started_at.date().isoformat() for record in records)
    return FOOT.read_text(encoding="utf-8").format(
        runs="1 run" if len(records) == 1 else f"{len(records):,} runs",
        version=__version__,
        devices=_first_few(record.machine.get("device_name") for record in records),
        dates=" to ".join(dict.fromkeys([days[0], days[-1]])),
        sources=_first_few(record.software.get("stepscope_source") for record in records),
    )


def _first_few(values: Iterable[object]) -> str:
    names = sorted({str(value) for value in values if value})
    others = len(names) - MAX_NAMED
    more = [f"and {others} more"] if others > 0 else []
    return escape(", ".join([*names[:MAX_NAMED], *more])) or NONE
