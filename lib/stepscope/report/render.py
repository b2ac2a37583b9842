"""From a runs folder to the report: every answer computed, every figure drawn, one markdown text and one HTML
page.
"""
import functools
import os
import re
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment
from markupsafe import Markup

from stepscope import StepscopeError
from stepscope.report.interactive import pieces
from stepscope.report.load import Data, chapters, load_data
from stepscope.report.measured_on import machine, sizes
from stepscope.report.other_runs import other_runs_answer
from stepscope.report.page import render_page
from stepscope.report.readme import with_story
from stepscope.report.story import STORY
from stepscope.report.story.part import tell
from stepscope.runs.store import Store
from stepscope.say.chapter import Answer, Page, Picture, answer, given
from stepscope.say.style import save
from stepscope.say.tables import markdown_table
from stepscope.say.words import environment
from stepscope.studies.ladder.names import NAMES


class OutputError(StepscopeError, OSError):
    """A report that cannot be written; the text names the place and why."""


@dataclass
class Report:
    """All that is said of a runs folder, ready to be laid out."""

    data: Data
    story: dict[str, list[Answer]]  # the main text: its headings, and under each its answers
    studies: dict[str, tuple[str, list[Answer]]]  # the evidence, a page a study: title and answers
    left: list[str]  # folders of runs that no answer is made from

    @property
    def measured(self) -> dict[str, tuple[str, list[Answer]]]:
        """Of the evidence the studies that answer something."""
        return {study: own for study, own in self.studies.items() if any(map(answered, own[1]))}

    @property
    def answers(self) -> list[Answer]:
        parts = [*self.story.values(), *(answers for _, answers in self.studies.values())]
        return [one for answers in parts for one in answers]


def compose(data: Data, figures: Collection[str] = ()) -> Report:
    """Every answer, each with those of its figures that exist."""
    studies = {chapter.study: (chapter.title, [answer(chapter, question, data.tables)
                                               for question in chapter.questions]) for chapter in chapters()}
    told_of = {part.title: answers for part in STORY if (answers := tell(part, data.tables))}
    report = Report(data, told_of, studies, [])
    shown = {run for one in report.answers for run in one.runs}
    report.left = [run for record in data.records if record.done
                   and (run := f"{record.study}/{record.run_id}") not in shown]
    if report.left:
        times = pd.concat([data.tables["benchmark.times"], data.aside_times], ignore_index=True)
        studies["other_runs"] = ("Other runs", [other_runs_answer(times, report.left)])
    for one in report.answers:
        one.figures = [figure for figure in one.figures if figure[0] in figures]
    return report


def _made(data: Data, asks: Picture | Page, make: Callable) -> Any:
    asked = given(data.tables, asks)
    return None if asked is None else make(*asked, where=data.where)


def draw_figures(data: Data, folder: Path) -> list[str]:
    """Draw every figure that there are data for; the stems of those drawn."""
    drawn = []
    for picture in (picture for one in (*STORY, *chapters()) for picture in one.pictures):
        if (figure := _made(data, picture, picture.draw)) is not None:
            save(figure, folder / f"{picture.stem}.png")
            drawn.append(picture.stem)
    return drawn


def pages(data: Data) -> dict[str, str]:
    """The HTML pages that stand beside the figures, by name."""
    made = {page.name: _made(data, page, page.make)
            for chapter in chapters() for page in chapter.pages}
    return {name: text for name, text in made.items() if text is not None}


@functools.cache
def _templates() -> Environment:
    templates = environment(Path(__file__).parent / "templates")
    templates.keep_trailing_newline = True
    templates.filters |= {"table": markdown_table, "markdown": Markup,
                          "before_slash": lambda run: run.partition("/")[0]}
    return templates


def answered(one: Answer) -> bool:
    """Whether an answer stands on measurements: on runs, or on files that a runs folder keeps beside them."""
    return bool(one.runs or one.tables)


def writeup(report: Report) -> str:
    """The main text as GitHub markdown, to stand beside the folders ``figures`` and ``evidence``."""
    data = report.data
    measured = {study: title for study, (title, _) in report.measured.items()}
    missing = [title for study, (title, _) in report.studies.items() if study not in measured]
    text = _templates().get_template("writeup.md.j2").render(
        data=data, report=report, machine=machine(data), sizes=sizes(data), measured=measured,
        missing=missing)
    return _linked(text, report, "")


def evidence(report: Report, runs_link: str) -> dict[str, str]:
    """The pages of the folder ``evidence`` by name: one for each study that answers something, and an index
    of the runs.

    Args:
        runs_link: path from that folder to the runs folder.
    """
    data, templates = report.data, _templates()
    page = templates.get_template("evidence.md.j2")
    made = {study: page.render(data=data, title=title, study=study, answers=list(filter(answered, answers)),
                               open=[one.question for one in answers if not answered(one)])
            .replace("](figures/", "](../figures/")
            for study, (title, answers) in report.measured.items()}
    made["runs"] = templates.get_template("runs.md.j2").render(
        data=data, runs_link=runs_link)
    return {f"{name}.md": _linked(text, report, name) for name, text in made.items()}


def _linked(text: str, report: Report, here: str | None) -> str:
    """Links to an answer's anchor lead to the page that it is on; of one that the records do not answer the
    words stay, or nothing where they are an aside, "; [more](#anchor)".

    Args:
        here: the page of the text: a study, "" for the main text, None for the README beside it.
    """
    pages_of = {one.key: study for study, (_, answers) in report.studies.items()
                for one in filter(answered, answers)}
    pages_of |= {one.key: "" for answers in report.story.values() for one in answers}

    def leads(link: re.Match) -> str:
        aside, words, anchor, close = link["aside"] or "", link["words"], link["anchor"], link["close"] or ""
        if anchor not in pages_of and f'id="{anchor}"' not in text:
            if aside == " (" and close:
                return ""
            ends = close or re.match(r" ?[.);|\n]|$", text[link.end():])
            return close if aside in (": ", "; ") and ends else f"{aside}{words}{close}"
        there = pages_of.get(anchor, here)
        beside, up = ("", "../") if here else ("evidence/", "")
        page = "" if there == here else f"{beside}{there}.md" if there else f"{up}writeup.md"
        return f"{aside}[{words}]({page}#{anchor}){close}"

    link = r"\[(?P<words>[^][\n]+)\]\(#(?P<anchor>[\w-]+)\)"
    return re.sub(rf"(?P<aside>[:;] | \()?{link}(?P<close>\))?", leads, text)


def whole(report: Report, runs_link: str) -> str:
    """The main text with all evidence folded behind it, for a file that has to stand alone.

    Args:
        runs_link: path from that file to the runs folder.
    """
    parts = [writeup(report)]
    for page, text in evidence(report, runs_link).items():
        name = page.removesuffix(".md")
        if name == "runs":  # whose anchors are the studies' names, as some questions' are
            text = text.replace('<a id="', '<a id="runs-')
        heading, _, rest = text.replace("\n## ", "\n#### ").partition("\n")
        parts.append(f"<details class=\"study\" id=\"evidence-{name}\"><summary>"
                     f"{heading.lstrip('# ')}</summary>\n\n{rest.strip()}\n\n</details>\n")

    def here(link: re.Match) -> str:
        page, anchor = link[1], link[2]
        if page == "runs" and anchor:
            return f"](#runs-{anchor})"
        return f"](#{anchor or (f'evidence-{page}' if page else '')})"

    text = "\n".join(parts).replace("](../figures/", "](figures/")
    return re.sub(r"\]\((?:\.\./writeup\.md|(?:evidence/)?(\w+)\.md)(?:#([\w-]+))?\)", here, text)


def texts(store: Store, report: Report, folder: Path) -> dict[Path, str]:
    """Every text of the report with its place in ``folder``: the writeup, the evidence, pages beside the
    figures, and the README there, if there is one, with the story."""
    runs = os.path.relpath(store.root, folder / "evidence").replace(os.sep, "/")
    made = {folder / "writeup.md": writeup(report)}
    made |= {folder / "evidence" / name: text for name, text in evidence(report, runs).items()}
    made |= {folder / "figures" / name: text for name, text in pages(report.data).items()}
    if (readme := folder / "README.md").exists():
        made[readme] = with_story(readme.read_text(encoding="utf-8"), report.data,
                                  lambda text: _linked(text, report, None))
    return made


def page_of(store: Store, report: Report, folder: Path, pictures: Path) -> str:
    """``writeup.html`` of a report in ``folder``, with the pictures in another folder's ``figures``."""
    runs = os.path.relpath(store.root, folder).replace(os.sep, "/")
    return render_page(whole(report, runs), pictures,
                       pieces=pieces(report.data.records, report.data.tables, NAMES))


def render(store: Store, folder: Path) -> list[Path]:
    """Write ``writeup.md``, ``writeup.html``, ``figures/`` and the table in README.md, if there is one, into
    ``folder``.

    Returns what was written. What is there stays as it is until all of it is made.

    Raises:
        OutputError: the report cannot be written there.
    """
    data = load_data(store)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".rendering-") as temporary:
            made = Path(temporary)
            figures = draw_figures(data, made / "figures")
            report = compose(data, figures)
            written = texts(store, report, folder)
            for path, text in written.items():
                _write(made / path.relative_to(folder), text)
            _write(made / "writeup.html", page_of(store, report, folder, made))
            for path in sorted(made.rglob("*.*")):
                (folder / path.relative_to(made)).parent.mkdir(exist_ok=True)
                path.replace(folder / path.relative_to(made))
            for study in report.studies:  # pages of before
                if (page := folder / "evidence" / f"{study}.md") not in written:
                    page.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"{folder}: the report cannot be written there ({reason})") from None
    return [folder / "writeup.md", folder / "writeup.html",
            *(folder / "figures" / f"{stem}.png" for stem in figures)]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
