"""From a runs folder to the report: every answer computed, every figure drawn, one markdown text and one HTML
page.
"""
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from stepscope import StepscopeError
from stepscope.report.interactive import pieces
from stepscope.report.load import Data, chapters, load_data
from stepscope.report.measured_on import machine, sizes
from stepscope.report.other_runs import other_runs_answer
from stepscope.report.page import render_page
from stepscope.report.readme import with_table
from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.say.chapter import Answer, Page, Picture, answer, given
from stepscope.say.style import save
from stepscope.say.tables import markdown_table
from stepscope.say.words import environment
from stepscope.traces.waits import FULL_QUEUE, WAITED


class OutputError(StepscopeError, OSError):
    """A report that cannot be written; the text names the place and why."""


def sections(data: Data) -> dict[str, list[Answer]]:
    """The report's order: its headings, and under each the answers."""
    return {chapter.title: [answer(chapter, question, data.tables) for question in chapter.questions]
            for chapter in chapters()}


def other_runs(data: Data, answers: list[Answer]) -> list[Answer]:
    """The last section: what none of the answers is made from; empty where there is nothing."""
    shown = {run for one in answers for run in one.runs}
    left = [run for record in data.records if record.done
            and (run := f"{record.study}/{record.run_id}") not in shown]
    times = pd.concat([data.tables["benchmark.times"], data.aside_times], ignore_index=True)
    return [other_runs_answer(times, left)] if left else []


def _made(data: Data, asks: Picture | Page, make: Callable) -> Any:
    asked = given(data.tables, asks)
    return None if asked is None else make(*asked, where=data.where)


def draw_figures(data: Data, folder: Path) -> list[str]:
    """Draw every figure that there are data for; the stems of those drawn."""
    drawn = []
    for picture in (picture for chapter in chapters() for picture in chapter.pictures):
        if (figure := _made(data, picture, picture.draw)) is not None:
            save(figure, folder / f"{picture.stem}.png")
            drawn.append(picture.stem)
    return drawn


def pages(data: Data) -> dict[str, str]:
    """The HTML pages that stand beside the figures, by name."""
    made = {page.name: _made(data, page, page.make)
            for chapter in chapters() for page in chapter.pages}
    return {name: text for name, text in made.items() if text is not None}


def writeup(data: Data, figures: list[str], runs_link: str, figures_link: str) -> str:
    """The report as GitHub markdown.

    Args:
        figures: stems of the figures that exist.
        runs_link, figures_link: paths from the report to the runs folder and to the figures.
    """
    parts = sections(data)
    if left := other_runs(data, [one for answers in parts.values() for one in answers]):
        parts["Other runs"] = left
    for one in (one for answers in parts.values() for one in answers):
        one.figures = [figure for figure in one.figures if figure[0] in figures]
    templates = environment(Path(__file__).parent / "templates")
    templates.keep_trailing_newline = True
    templates.filters |= {"table": markdown_table, "markdown": Markup}
    return templates.get_template("writeup.md.j2").render(
        data=data, sections=parts, machine=machine(data), sizes=sizes(data), waited=WAITED,
        full_queue=FULL_QUEUE, measured_neighbours=len(data.tables["neighbours.timings"]) > 0,
        runs_link=runs_link, figures_link=figures_link,
        tables={f"{record.study}/{record.run_id}": kept_files(record) for record in data.records})


def kept_files(record: Record) -> list[str]:
    """What a run's record names. Another program's reports are many and in a folder of their own, which
    stands for them.
    """
    return list(dict.fromkeys(f"{table.file.split('/')[0]}/" if "/" in table.file else table.file
                              for table in record.tables.values()))


def texts(store: Store, data: Data, figures: list[str], folder: Path) -> dict[Path, str]:
    """Every text of the report with its place in ``folder``: the writeup, pages beside the figures, and the
    README there, if there is one, with its table."""
    runs_link = os.path.relpath(store.root, folder).replace(os.sep, "/")
    made = {folder / "writeup.md": writeup(data, figures, runs_link, "figures")}
    made |= {folder / "figures" / name: text for name, text in pages(data).items()}
    if (readme := folder / "README.md").exists():
        made[readme] = with_table(readme.read_text(encoding="utf-8"), data)
    return made


def page_of(data: Data, markdown: str, folder: Path) -> str:
    """The writeup as one HTML file; ``folder`` has ``figures/`` with all that it shows."""
    return render_page(markdown, folder, pieces=pieces(data.records, data.tables))


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
            written = texts(store, data, figures, folder)
            for path, text in written.items():
                _write(made / path.relative_to(folder), text)
            _write(made / "writeup.html", page_of(data, written[folder / "writeup.md"], made))
            (folder / "figures").mkdir(exist_ok=True)
            for path in sorted(made.rglob("*.*")):
                path.replace(folder / path.relative_to(made))
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"{folder}: the report cannot be written there ({reason})") from None
    return [folder / "writeup.md", folder / "writeup.html",
            *(folder / "figures" / f"{stem}.png" for stem in figures)]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
