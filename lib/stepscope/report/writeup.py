"""Render the templates of ``writeup/`` with data from one full campaign and from datasets in neighboring folders.

A folder of templates can have the name of a dataset, such as ``writeup/h200x2``. It belongs to the writeup only if
a runs folder with this name exists next to the campaign's folder. All templates can use the dataset's views, for
example as ``h200x2.strategies``.
"""

from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path

from stepscope import PROJECT, StepscopeError
from stepscope.figures import all_figures
from stepscope.report.document import Document
from stepscope.report.load import Read, read, steady
from stepscope.report.output import Report, foot, readme
from stepscope.report.page import Section, page
from stepscope.report.runs_list import runs_page
from stepscope.runs.store import Store
from stepscope.views import Views, facts

FOLDER = "writeup"  # a folder in the checkout
EVIDENCE = "evidence/"


class NoTemplatesError(StepscopeError):
    """Raised when the writeup's templates are missing."""


def templates_folder() -> Path:
    """Return the folder that contains the writeup's templates.

    Raises:
        NoTemplatesError: If this is an installed package, or the folder has no templates.
    """
    folder = PROJECT / FOLDER if PROJECT else None
    if folder is None or not any(folder.glob("*.md.j2")):
        raise NoTemplatesError(
            "--writeup: found no templates, but expected a checkout of the project with writeup/*.md.j2; without"
            " --writeup, 'render' writes the report of a runs folder"
        )
    return folder


def other_datasets(runs: Path) -> dict[str, Read]:
    """Read those datasets next to the campaign's folder for which the writeup has templates."""
    folders = [path for path in sorted(templates_folder().iterdir()) if path.is_dir()]
    return {
        path.name: read(Store(runs.parent / path.name))
        for path in folders
        if (runs.parent / path.name).is_dir()
    }


def compose(found: Read, runs: Path, out: Path, views: Views) -> Report:
    """Return one full campaign's writeup, as it would be written into ``out``.

    Args:
        found: the contents of the campaign's folder, ``runs``.
        views: the views of the campaign's consistent tables.

    Raises:
        DocumentError: If a sentence doesn't hold or a lookup fails; the message names each such sentence, and each
            template's first lookup failure.
        NoTemplatesError: If the templates are missing.
        OutputError: If the README in ``out`` contains only one of the two marks.
    """
    others = other_datasets(runs)
    texts, figures = render_views(templates_folder(), views, views_of(others))
    chapters = [text for name, text in texts.items() if not name.startswith(EVIDENCE)]
    pages = {f"{name}.md": text for name, text in texts.items() if name.startswith(EVIDENCE)}
    pages["evidence/runs.md"] = runs_page(found, runs, out / "evidence")
    for name, dataset in others.items():
        listed = runs_page(dataset, runs.parent / name, out / "evidence")
        pages[f"evidence/runs-{name}.md"] = listed.replace("# Runs", f"# Runs of {name}", 1)
    links = [f"[{_title(text)}]({name})" for name, text in pages.items()]
    end = f"---\n\nEvidence, one page per study: {', '.join(links)}.\n"
    text = "\n".join([*chapters, end])
    sections = [Section(name, section) for name, section in pages.items()]
    datasets = [found, *others.values()]
    html = page(text, sections, figures, foot([record for each in datasets for record in each.records]))
    drawings = {f"figures/{name}.svg": figure for name, figure in figures.items()}
    first = chapters[0].partition("\n")[2]
    files = {"writeup.md": text, "writeup.html": html} | pages | drawings | readme(out, first)
    errors = [error for each in datasets for error in each.errors]
    return Report(files, errors, [note for each in datasets for note in each.notes])


def views_of(datasets: Mapping[str, Read]) -> dict[str, Views]:
    return {name: Views(steady(found.tables)) for name, found in datasets.items()}


def _title(text: str) -> str:
    return text.partition("\n")[0].lstrip("# ")


def render_views(
    folder: Path, views: Views, others: Mapping[str, Views]
) -> tuple[dict[str, str], dict[str, str]]:
    """Render a writeup's templates with the views of one campaign and of other datasets.

    Args:
        folder: the folder that contains the chapters, ``*.md.j2``, in order, and ``evidence/*.md.j2``. A subfolder
            that is named after one of the other datasets contains more chapters and evidence.
        others: the views of the other datasets, by name.

    Returns:
        Texts by template ("00-first", "evidence/nsys"), and figures by name, as SVG.

    Raises:
        DocumentError: If a sentence doesn't hold or a lookup fails; the message names each such sentence, and each
            template's first lookup failure.
    """
    names = ChainMap({"code": code}, facts.FACTS, others, views)  # type: ignore[arg-type, misc]  # nothing is assigned
    document = Document(folder, names, all_figures())
    templates = {}
    for root in [folder, *(folder / name for name in others)]:
        for path in [*root.glob("*.md.j2"), *root.glob("evidence/*.md.j2")]:
            templates[path.relative_to(root).as_posix().removesuffix(".md.j2")] = path
    in_order = sorted(templates, key=lambda name: (name.startswith(EVIDENCE), name))
    texts = {name: document.render(templates[name].relative_to(folder).as_posix()) for name in in_order}
    document.check()
    return texts, document.figures


def code(path: str, part: str) -> str:
    """Return the text of a project file between the lines ``# <part>`` and ``# </part>``."""
    text = Path(str(PROJECT), path).read_text(encoding="utf-8")
    return text.partition(f"# <{part}>\n")[2].partition(f"# </{part}>")[0].strip()
