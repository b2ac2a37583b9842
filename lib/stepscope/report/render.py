"""From a runs folder to the report: writeup.md, writeup.html, answers-2026.md, evidence/ and figures/.

All of it is text and made before anything is written; then each file is put in its place whole.
"""
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from stepscope import StepscopeError
from stepscope.files import read_within, write_text_durably
from stepscope.report.claims import HOLDS, TAG, Teller, Told, collect
from stepscope.report.load import Read, read
from stepscope.report.page import Section, page
from stepscope.report.tables import escape, number
from stepscope.runs.record import NOTEBOOK, Record
from stepscope.runs.store import Store

CHAPTERS = Path(__file__).parent / "chapters"
STORY = ("<!-- story -->\n", "<!-- /story -->")
MOST_README_BYTES = 2**20
REFERENCE = "reference"  # the reference's picture, for a report without a GPU
WITHOUT_GPU = "cpu.md"  # its first screen, in place of the first chapter


class OutputError(StepscopeError, OSError):
    """A report that cannot be written; the text names the place and why."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass
class Report:
    """All files of a report by their path in its folder, and what was not said in it."""

    texts: dict[str, str] = field(default_factory=dict)
    first: str = ""  # the first screen without its heading
    told: list[Told] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def unsaid(self) -> list[Told]:
        return [told for told in dict.fromkeys(self.told) if told.why != HOLDS]


@dataclass
class Rendered:
    """What :func:`render` did: files written, claims, tables and figures not said, runs left out."""

    paths: list[Path]
    unsaid: list[Told]
    errors: list[str]


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
        for name, text in report.texts.items():
            write_text_durably(out / name, text)
        for name in _possible() - report.texts.keys():  # of before
            (out / name).unlink(missing_ok=True)
        for folder in ("evidence", "figures"):
            with suppress(OSError):  # it is not empty
                (out / folder).rmdir()
    except OSError as error:
        raise OutputError(f"{out}: the report cannot be written there ({error.strerror or error})") from None
    return Rendered([out / name for name in report.texts], report.unsaid, report.errors)


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
    teller, report = Teller(found.tables), Report(errors=found.errors)
    main, missing = [], []
    preset = all(record.config["device"] == "cpu" for record in found.records)
    for path in sorted(CHAPTERS.glob("[0-9][0-9]-*.md")):
        path = CHAPTERS / WITHOUT_GPU if preset and path.name.startswith("00") else path
        told = teller.chapter(_source(path), path.name)
        main.append(_with_code(told))
        if not told:
            missing.append(path)
    report.first = main[0].partition("\n")[2].strip()
    pages = {f"evidence/{path.name}": told for path in sorted((CHAPTERS / "evidence").glob("*.md"))
             if (told := teller.chapter(_source(path), f"evidence/{path.name}", "../figures"))}
    if told := teller.chapter(_source(CHAPTERS / "2026.md"), "2026.md", "figures"):
        pages = {"answers-2026.md": told} | pages
    folder = os.path.relpath(runs, out / "evidence").replace(os.sep, "/")
    pages["evidence/runs.md"] = _runs_page(found, folder)
    writeup = "\n".join([*filter(None, main), *_end(missing, pages, runs)])
    figures = {name: drawn for name, (_, drawn) in teller.figures.items()}
    if preset:
        figures[REFERENCE] = _source(CHAPTERS / f"{REFERENCE}.svg")
    sections = [Section(name, text) for name, text in pages.items()]
    report.texts = {"writeup.md": writeup, "writeup.html": page(writeup, sections, figures)} | pages | {
        f"figures/{name}.svg": text for name, text in figures.items()}
    report.texts |= _readme(out, report.first)
    report.told = teller.told
    return report


def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _with_code(text: str) -> str:
    """Fenced blocks named by a file have the part of it between its lines ``# <name>`` and ``# </name>``."""
    def code(block: re.Match) -> str:
        _, _, part = _source(CHAPTERS / f"{block[1]}.py").partition(f"# <{block[1].replace('_', ' ')}>\n")
        return f"```python\n{part.partition('# </')[0].strip()}\n```"
    return re.sub(r"^```python (\w+)\n(?:```)?$", code, text, flags=re.MULTILINE)


def _end(missing: list[Path], pages: dict[str, str], runs: Path) -> Iterator[str]:
    """What stands below the chapters: where the evidence is, and which sweeps would fill what is absent."""
    titles = [f"[{_title(text)}]({name})" for name, text in pages.items()]
    yield f"---\n\nEvidence, a page a study: {', '.join(titles)}.\n"
    if missing:
        studies = dict.fromkeys(study for path in missing for study in _studies(path))
        names = ", ".join(_title(_source(path)) for path in missing)
        command = f"stepscope sweep {' '.join(studies)} --runs {_code(runs)}"
        yield f"Not measured here: {names}. `{command}` measures what they are made of.\n"


def _title(text: str) -> str:
    return TAG.sub("", text.partition("\n")[0]).lstrip("# ").strip()


def _code(path: Path) -> str:
    """A path inside backticks."""
    return re.sub(r"[^\w./+-]", "?", str(path) if not path.is_absolute() else path.name)


def _studies(path: Path) -> list[str]:
    """The studies that a chapter's tags are made of."""
    known = {kind: collect(kind) for kind in ("claim", "table", "figure")}
    places = [known[tag["kind"]][tag["name"]].__module__.split(".") for tag in TAG.finditer(_source(path))
              if tag["kind"] in known]
    return [place[2] for place in places if place[1] == "studies"]


def _runs_page(found: Read, folder: str) -> str:
    """All runs with links to their notebooks, and what was left out. Run ids are plain names."""
    def row(record: Record) -> str:
        link = f"[{record.run_id}]({folder}/{record.study}/{record.run_id}/{NOTEBOOK})"
        outcome = f"{record.status}: {escape(record.cause)}" if record.cause else record.status
        cells = (record.study, link, number(record.duration_s, "s"), outcome)
        return f"| {' | '.join(cells)} |"

    rows = "\n".join(map(row, found.records))
    left = "\n".join(f"* {escape(error)}" for error in found.errors)
    head = "| study | run | time | outcome |\n| :-- | :-- | --: | :-- |"
    return (f"# Runs\n\n{head}\n{rows}\n" + (f"\n## Left out\n\n{left}\n" if left else ""))


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
