"""The writeup: the templates of ``writeup/``, rendered over one full campaign."""

import re
from collections import ChainMap
from pathlib import Path

from stepscope import PROJECT
from stepscope.figures import all_figures
from stepscope.report.document import Document
from stepscope.report.load import steady
from stepscope.report.schemas import Tables
from stepscope.views import Views, facts

FOLDER = "writeup"  # in the checkout
PART = re.compile(r"# </?[\w ]+>\n?")


def render_templates(folder: Path, tables: Tables, only: str = "") -> tuple[dict[str, str], dict[str, str]]:
    """Render all templates of a writeup over the tables of one campaign.

    Args:
        folder: holds ``*.md.j2``, the chapters in their order, and ``evidence/*.md.j2``.
        only: a part of the names of the templates to render; empty for all of them.

    Returns:
        Texts by template ("00-first", "evidence/nsys") and figures by name, as SVG.

    Raises:
        DocumentError: naming every sentence that does not hold, and the first lookup of each template that fails.
    """
    names = ChainMap({"code": code}, facts.FACTS, Views(steady(tables)))
    document = Document(folder, names, all_figures())
    templates = [*sorted(folder.glob("*.md.j2")), *sorted(folder.glob("evidence/*.md.j2"))]
    texts = {}
    for path in templates:
        name = path.relative_to(folder).as_posix()
        if only in name:
            texts[name.removesuffix(".md.j2")] = document.render(name)
    document.check()
    return texts, document.figures


def code(path: str, part: str) -> str:
    """Return what a file of the project has between its lines ``# <part>`` and ``# </part>``."""
    text = Path(str(PROJECT), path).read_text(encoding="utf-8")
    return text.partition(f"# <{part}>\n")[2].partition(f"# </{part}>")[0].strip()
