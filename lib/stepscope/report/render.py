"""From a runs folder to the report: writeup.md, writeup.html, answers-2026.md, evidence/ and figures/.

All of it is text and made before anything is written; then each file is put in its place whole.
"""

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from stepscope import StepscopeError, __version__
from stepscope.config import EDITIONS
from stepscope.files import read_within, write_texts_durably
from stepscope.report.claims import HOLDS, TAG, Renderer, TagResult, collect
from stepscope.report.left_out import Pages, differing, left_out, not_measured, sizes, study_of
from stepscope.report.load import Read, read, steady
from stepscope.report.page import Section, page
from stepscope.report.tables import NONE, escape, listed, number
from stepscope.runs.record import NOTEBOOK, Record
from stepscope.runs.store import Store

CHAPTERS = Path(__file__).parent / "chapters"
STORY = ("<!-- story -->\n", "<!-- /story -->")
FOOT = Path(__file__).with_name("page_foot.md")
MOST_README_BYTES = 2**20
REFERENCE = "reference"  # the reference's picture, for a report without a GPU
WITHOUT_GPU = CHAPTERS / "cpu"  # the chapters of a folder whose runs are all of a CPU


class OutputError(StepscopeError, OSError):
    """A report that cannot be written; the text names the place and why."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass
class Report:
    """All files of a report by their path in its folder, and what was not said in it."""

    texts: dict[str, str] = field(default_factory=dict)
    first: str = ""  # the first screen without its heading
    pages: Pages = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Rendered:
    """What :func:`render` did: files written, what is not said and why, each tag of it, runs left out, and
    what to know of the others."""

    paths: list[Path]
    left_out: list[str]
    omitted: list[TagResult]
    errors: list[str]
    notes: list[str]


def render(runs: Path, out: Path) -> Rendered:
    """Write the report of a runs folder into ``out``; what is there stays as it is until all of it is made.

    Raises:
        RunsError: there is no such folder.
        ChapterError: a chapter that cannot be told.
        OutputError: the report cannot be written there.
    """
    for folder in ("evidence", "figures"):
        if (out / folder).is_symlink():
            raise OutputError(f"{out / folder}: is a link, and would be written through; remove it")
    if out.is_dir():
        _readme(out, "")  # refused before anything is made
    report = compose(runs, out)
    try:
        for folder in ("evidence", "figures"):
            (out / folder).mkdir(parents=True, exist_ok=True)
        write_texts_durably({out / name: text for name, text in report.texts.items()})
        for name in _possible() - report.texts.keys():  # of before
            (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{out}: the report cannot be written there ({error.strerror or error})") from None
    finally:
        for folder in ("evidence", "figures"):
            with suppress(OSError):  # it is not empty
                (out / folder).rmdir()
    told = dict.fromkeys(one for own in report.pages.values() for one in own)
    omitted = [one for one in told if one.why != HOLDS]
    paths = [out / name for name in report.texts]
    return Rendered(paths, report.left_out, omitted, report.errors, report.notes)


def _possible() -> set[str]:
    """Every file that a report can have."""
    figures = {f"figures/{name}.svg" for name in [*collect("figure"), REFERENCE]}
    evidence = {f"evidence/{path.name}" for path in (CHAPTERS / "evidence").glob("*.md")}
    return figures | evidence | {"answers-2026.md"}


def compose(runs: Path, out: Path) -> Report:
    """The report of a runs folder as it would be written into ``out``.

    Raises:
        As :func:`render`.
    """
    found = read(Store(runs))
    if not found.records:
        raise OutputError(f"{runs}: {found.errors[0] if found.errors else 'holds no run'}")
    renderer, report = Renderer(steady(found.tables)), Report(errors=found.errors, notes=found.notes)
    without_gpu = all(record.config["device"] == "cpu" for record in found.records)

    def told(path: Path, figures: str = "figures") -> str:
        before = len(renderer.results)
        text = renderer.chapter(_source(path), str(path.relative_to(CHAPTERS)), figures)
        report.pages.setdefault(_title(_source(path)), []).extend(renderer.results[before:])
        return text

    chapters = sorted((WITHOUT_GPU if without_gpu else CHAPTERS).glob("[0-9][0-9]-*.md"))
    main = {path: _with_code(told(path)) for path in chapters}
    others = (
        {}
        if without_gpu
        else {"answers-2026.md": told(CHAPTERS / "2026.md")}
        | {
            f"evidence/{path.name}": told(path, "../figures")
            for path in sorted((CHAPTERS / "evidence").glob("*.md"))
        }
    )
    pages = {name: text for name, text in others.items() if text}
    pages["evidence/runs.md"] = _runs_page(found, _relative(runs, out / "evidence"))
    missing = [path for path, text in main.items() if not text and [*_studies(path)]]
    place = _relative(runs, out)
    if not without_gpu and (rest := not_measured(report.pages, found.records)):
        heading, _, first = main[chapters[0]].partition("\n")
        main[chapters[0]] = f"{heading}\n\n{_of_what(rest, found.records, place)}{first}"
    report.first = main[chapters[0]].partition("\n")[2].strip()
    sweeps = dict.fromkeys(study for path in missing for study in _studies(path))
    end = _end(missing, pages, place, [*sweeps])
    writeup = "\n".join([*filter(None, main.values()), *end])
    figures = {name: drawn for name, (_, drawn) in renderer.figures.items()}
    if without_gpu:
        figures[REFERENCE] = _source(CHAPTERS / f"{REFERENCE}.svg")
    sections = [Section(name, text) for name, text in pages.items()]
    html = page(writeup, sections, figures, _foot(found.records))
    report.texts = (
        {"writeup.md": writeup, "writeup.html": html}
        | pages
        | {f"figures/{name}.svg": text for name, text in figures.items()}
    )
    report.texts |= _readme(out, report.first)
    report.left_out = left_out(report.pages, found.records)
    return report


def _foot(records: list[Record]) -> str:
    """Of what the page is, and how it is cited; the dates are the runs'."""

    def some(values: Iterable[object]) -> str:
        found = sorted({str(value) for value in values if value})
        return escape(", ".join([*found[:3], *[f"and {len(found) - 3} more"] * (len(found) > 3)])) or NONE

    days = sorted(record.started_at.date().isoformat() for record in records)
    return _source(FOOT).format(
        runs="1 run" if len(records) == 1 else f"{len(records):,} runs",
        version=__version__,
        devices=some(record.machine.get("device_name") for record in records),
        dates=" to ".join(dict.fromkeys([days[0], days[-1]])),
        sources=some(record.software.get("stepscope_source") for record in records),
    )


def _relative(runs: Path, folder: Path) -> str:
    return os.path.relpath(runs, folder).replace(os.sep, "/")


def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _with_code(text: str) -> str:
    """Fenced blocks named by a file have the part of it between its lines ``# <name>`` and ``# </name>``."""

    def code(block: re.Match) -> str:
        _, _, part = _source(CHAPTERS / f"{block[1]}.py").partition(f"# <{block[1].replace('_', ' ')}>\n")
        return f"```python\n{part.partition('# </')[0].strip()}\n```"

    return re.sub(r"^```python (\w+)\n(?:```)?$", code, text, flags=re.MULTILINE)


def _of_what(rest: list[str], records: list[Record], place: str) -> str:
    """The first words of a report that is not of all that the reference measures; a size that one study of
    several has is said to be its alone."""
    there, all_of_them = sizes(records), len(EDITIONS[2025])
    ran = {size: {record.study for record in records if record.config.get("size") == size} for size in there}
    whole = len(set().union(*ran.values())) == 1
    named = [size if whole or len(own) > 1 else f"{size} ({min(own)} alone)" for size, own in ran.items()]
    of = f"A tour of {len(there)}" if len(there) > 1 else "One"
    of = f"{of} of the handout's {all_of_them} sizes, {listed(named)}. " * (0 < len(there) < all_of_them)
    return (
        f"> {of}It leaves out {'; '.join(rest)}. In this report's folder,"
        f" `{_command('sweep', ['reference'], place)}` measures the rest, and"
        f" `{_command('render', [], place)}` tells it.\n"
    )


def _command(name: str, arguments: list[str], place: str) -> str:
    folder = re.sub(r"[^\w ./+'-]", "?", shlex.quote(place))
    return " ".join(["stepscope", name, *arguments, "--runs", folder])


def _end(missing: list[Path], pages: dict[str, str], place: str, sweeps: list[str]) -> Iterator[str]:
    """What stands below the chapters: where the evidence is, and which sweeps would fill what is absent."""
    titles = [f"[{_title(text)}]({name})" for name, text in pages.items()]
    yield f"---\n\nEvidence, a page a study: {', '.join(titles)}.\n"
    if missing:
        names = ", ".join(_title(_source(path)) for path in missing)
        command = _command("sweep", sweeps, place)
        yield f"Not measured here: {names}. In this report's folder, `{command}` measures it.\n"


def _title(text: str) -> str:
    return text.partition("\n")[0].partition("{%")[0].strip("# ")


def _studies(path: Path) -> Iterator[str]:
    """The studies that a chapter's tags are made of."""
    for tag in TAG.finditer(_source(path)):
        if tag["name"] and tag["kind"] != "fold" and (study := study_of(tag["kind"], tag["name"])):
            yield study


def _runs_page(found: Read, folder: str) -> str:
    """All runs of each study with the fields in which they differ and links to their notebooks, and what was
    left out. Run ids are plain names."""
    text = "# Runs\n"
    for study in dict.fromkeys(record.study for record in found.records):
        own = [record for record in [*found.records, *found.replaced] if record.study == study]
        fields = differing([record.config for record in own])
        rows = [_run_row(record, fields, f"{quote(folder)}/{study}") for record in own]
        for record, row in zip(own, rows):
            row[-1] += ", replaced by a newer one" * (record in found.replaced)
        headings = [name.replace("_", " ") for name in fields]
        text += f"\n## {study.replace('_', ' ').capitalize()}\n\n"
        text += "".join(
            f"| {' | '.join(row)} |\n"
            for row in [
                ["run", *headings, "what it found", "time", "outcome"],
                [":--", *[":--"] * len(headings), ":--", "--:", ":--"],
                *rows,
            ]
        )
    left = "".join(f"* {escape(error)}\n" for error in found.errors)
    return text + (f"\n## Left out\n\n{left}" if left else "")


def _run_row(record: Record, fields: list[str], folder: str) -> list[str]:
    def text(value: object) -> str:
        return escape(", ".join(map(str, value)) if isinstance(value, list) else value)

    config = [text(record.config.get(name)) for name in fields]
    finding = str(record.results.get("finding") or NONE).replace("**", "")
    outcome = f"{record.status}: {escape(record.cause)}" if record.cause else record.status
    if unsteady := record.results.get("unsteady"):
        outcome += f"; unsteady, and in no sentence: {escape(str(unsteady))}"
    link = f"[{record.run_id}]({folder}/{record.run_id}/{NOTEBOOK})"
    return [
        link if record.notebook_sha256 else record.run_id,
        *config,
        escape(finding),
        number(record.duration_s, "s"),
        outcome,
    ]


def _readme(out: Path, first: str) -> dict[str, str]:
    """The README in the report's folder, if there is one with marks, with the first screen between them.

    Raises:
        OutputError: it has one mark and not the other, or cannot be read.
    """
    place = out / "README.md"
    try:
        text = read_within(out, place.name, MOST_README_BYTES).decode("utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise OutputError(f"{place}: cannot be read ({why})") from None
    marks = [text.count(mark) for mark in STORY]
    if marks == [0, 0]:
        return {}
    begin, end = text.find(STORY[0]), text.find(STORY[1])
    if marks != [1, 1] or end < begin:
        raise OutputError(f"{place}: needs a line {STORY[0].strip()!r} and {STORY[1]!r} behind, or neither")
    return {place.name: text[:begin] + STORY[0] + first + "\n" + text[end:]}
