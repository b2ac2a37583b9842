"""Words: one markdown template a question, into which computed facts are put.

A template has the blocks ``question``, ``text``, ``more`` and a caption for each table and figure. Lines are
wrapped as one likes: a paragraph becomes one line. It may choose by a named boolean and go through a
list; arithmetic and comparisons belong to the facts (``tests/test_words.py`` refuses them here). Whatever a
value holds is
data: it is escaped where it is put in, so nothing that was measured or recorded is rendered as markup.
"""
import functools
import re
from collections.abc import Callable
from numbers import Integral
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.runtime import Macro
from markupsafe import Markup

from stepscope.say import formats

SHARED = Path(__file__).parent / "words"  # sentences that several studies say
# What must not be taken for markup: a tag, emphasis, the ends of a link, code without its end, a formula.
MARKUP = re.compile(r"\\.|<(?=[A-Za-z/!?])|\](?=[(\[:])|!(?=\[)|\*(?=\S.*\S?\*)|(?<!\w)_(?=\S.*_(?!\w))|`|\$")
CODE = re.compile(r"(?<!`)`[^`\n]+`(?!`)")
ADDRESS = re.compile(r"://|\bwww\.", re.IGNORECASE)  # what GitHub makes a link of by itself


def escape(value: Any) -> Any:
    """Text of a record or a table as markdown that shows just this text. Code in balanced backticks stays
    code; what is no text, or is markdown already (``Markup``), is left as it is."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    value = value.replace("\r", " ").replace("\n", " ")
    if ADDRESS.search(value):
        return f"`{value.replace('`', '')}`"
    plain, pieces, end = value, [], 0
    for code in CODE.finditer(plain):
        pieces += [MARKUP.sub(_backslash, plain[end:code.start()]), code[0]]
        end = code.end()
    return "".join([*pieces, MARKUP.sub(_backslash, plain[end:])])


def _backslash(found: re.Match) -> str:
    return found[0] if found[0].startswith("\\") else f"\\{found[0]}"


def shown(value: Any) -> Any:
    """A value as a template shows it: text escaped (:func:`escape`), whole numbers with a comma for
    thousands."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return f"{value:,}" if whole else escape(value)


def tidy(text: str) -> str:
    """One line a paragraph, list item or row of a table, no space before a full stop or comma."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if paragraph.startswith("|"):
            rows = (" ".join(row.split()) for row in paragraph.splitlines())
            paragraphs.append("\n".join(row for row in rows if row))
            continue
        items = re.split(r"\n\s*(?=[*-] )", paragraph)
        paragraphs.append(
            "\n".join(re.sub(r" (?=[,.;:?](\s|$))", "", " ".join(item.split())) for item in items)
        )
    return "\n\n".join(paragraphs)


def _said(macro: Macro) -> Callable[..., Markup]:
    """A macro whose result is not escaped again: its values were, as they were put in."""
    return lambda *values, **named: Markup(macro(*values, **named))


class Templates(Environment):
    """Jinja's, but that ``facts.clear`` is the fact of that name and not a dictionary's method."""

    def getattr(self, thing: Any, name: str) -> Any:
        return thing[name] if isinstance(thing, dict) and name in thing else super().getattr(thing, name)


def environment(*folders: Path) -> Environment:
    """The templates of some folders, with the formats of :mod:`stepscope.say.formats` as filters."""
    made = Templates(loader=FileSystemLoader([*folders, SHARED]), undefined=StrictUndefined, finalize=shown,
                       trim_blocks=True, lstrip_blocks=True)
    made.filters |= formats.FILTERS
    return made


@functools.cache
def _of_study(folder: Path) -> Environment:
    """One environment for all questions of a study, which compiles each template once."""
    return environment(folder)


class Words:
    """The words of one question."""

    def __init__(self, folder: Path, name: str):
        self.templates = _of_study(folder)
        self.template = self.templates.get_template(name)

    def block(self, name: str, facts: dict | None = None) -> str:
        """One block of the template with these facts; empty where the template has no such block.

        Raises:
            jinja2.UndefinedError: it asks for a fact that is not there.
        """
        if name not in self.template.blocks:
            return ""
        context = self.template.new_context(facts or {})
        blocks, context.blocks = context.blocks, {block: [lambda _: iter(())] for block in context.blocks}
        for _ in self.template.root_render_func(context):  # defines the macros, and says nothing itself
            pass
        context.blocks = blocks
        macros = {key for key, value in context.vars.items() if isinstance(value, Macro)}
        for macro in context.exported_vars & macros:
            context.vars[macro] = _said(context.vars[macro])
        return tidy("".join(self.template.blocks[name](context)))

    def not_answered(self, study: str) -> str:
        """What stands in a question's place while nothing has been measured for it."""
        return tidy(self.templates.get_template("not_answered.md").render(study=study))
