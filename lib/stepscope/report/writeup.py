"""Render the templates of ``writeup/`` over one full campaign."""

from collections import ChainMap
from pathlib import Path

from stepscope import PROJECT, StepscopeError
from stepscope.figures import all_figures
from stepscope.report.document import Document
from stepscope.report.load import Read
from stepscope.report.output import Report, foot, readme
from stepscope.report.page import Section, page
from stepscope.report.runs_list import runs_page
from stepscope.views import Views, facts

FOLDER = "writeup"  # a folder in the checkout
EVIDENCE = "evidence/"


class NoTemplatesError(StepscopeError):
    """An error for missing writeup templates."""


def templates_folder() -> Path:
    """Return the folder that contains the writeup's templates.

    Raises:
        NoTemplatesError: this is an installed package, or the folder has no templates.
    """
    folder = PROJECT / FOLDER if PROJECT else None
    if folder is None or not any(folder.glob("*.md.j2")):
        raise NoTemplatesError(
            "--writeup: got no templates, but expected a checkout of the project with writeup/*.md.j2; without"
            " --writeup, render writes the report of a runs folder"
        )
    return folder


def compose(found: Read, runs: Path, out: Path, views: Views) -> Report:
    """Return one full campaign's writeup, as it would be written into ``out``.

    Args:
        found: contents of the campaign's folder, ``runs``.
        views: views of the campaign's consistent tables.

    Raises:
        DocumentError: names each sentence that does not hold, and each template's first lookup failure.
        NoTemplatesError: the templates are missing.
        OutputError: the README in ``out`` contains only one of the two marks.
    """
    texts, figures = render_views(templates_folder(), views)
    chapters = [text for name, text in texts.items() if not name.startswith(EVIDENCE)]
    pages = {f"{name}.md": text for name, text in texts.items() if name.startswith(EVIDENCE)}
    pages["evidence/runs.md"] = runs_page(found, runs, out / "evidence")
    links = [f"[{_title(text)}]({name})" for name, text in pages.items()]
    end = f"---\n\nEvidence, one page per study: {', '.join(links)}.\n"
    text = "\n".join([*chapters, end])
    sections = [Section(name, section) for name, section in pages.items()]
    html = page(text, sections, figures, foot(found.records))
    drawings = {f"figures/{name}.svg": figure for name, figure in figures.items()}
    first = chapters[0].partition("\n")[2]
    files = {"writeup.md": text, "writeup.html": html} | pages | drawings | readme(out, first)
    return Report(files, found.errors, found.notes)


def _title(text: str) -> str:
    return text.partition("\n")[0].lstrip("# ")


def render_views(folder: Path, views: Views) -> tuple[dict[str, str], dict[str, str]]:
    """Render all of a writeup's templates over one campaign's views.

    Args:
        folder: folder that contains ``*.md.j2``, the chapters in order, and ``evidence/*.md.j2``.

    Returns:
        Texts by template ("00-first", "evidence/nsys"), and figures by name, as SVG.

    Raises:
        DocumentError: names each sentence that does not hold, and each template's first lookup failure.
    """
    names = ChainMap({"code": code}, facts.FACTS, views)  # type: ignore[arg-type, misc]  # nothing is assigned
    document = Document(folder, names, all_figures())
    texts = {}
    for path in [*sorted(folder.glob("*.md.j2")), *sorted(folder.glob("evidence/*.md.j2"))]:
        name = path.relative_to(folder).as_posix()
        texts[name.removesuffix(".md.j2")] = document.render(name)
    document.check()
    return texts, document.figures


def code(path: str, part: str) -> str:
    """Return the text of a project file between the lines ``# <part>`` and ``# </part>``."""
    text = Path(str(PROJECT), path).read_text(encoding="utf-8")
    return text.partition(f"# <{part}>\n")[2].partition(f"# </{part}>")[0].strip()
