"""Chapters: hand-written markdown with five tags, into which numbers, tables and figures are put.

    {% claim launch_bound %}{size} waits {idle:%} of its time.{% endclaim %}
    {% reference launch_bound %}On the {on} it is {idle:%}.{% endreference %}
    {% table times %}
    {% figure busy %}
    {% fold Why_so_long %} ... {% endfold %}

A claim is a function of the tables: the numbers of its sentence where it holds, None where it does not, a
LookupError where there is no data. ``reference`` has the same claim's numbers of the shipped reference, and
its GPU as ``on``. What is not said vanishes, and the paragraph, fold and section that then
say nothing. A fold is shown by its words until a reader opens it: on GitHub, too, as ``<details>``.
"""

import importlib
import inspect
import re
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from stepscope import StepscopeError, studies
from stepscope.report.schemas import Tables
from stepscope.report.shipped import shipped
from stepscope.report.style import svg
from stepscope.report.tables import Shown, escape, markdown, missing

KINDS = ("claim", "reference", "table", "figure")
SENTENCES = KINDS[:2]  # which are closed, by end and their kind
TAG = re.compile(r"\{%\s*(?P<kind>\w+)(?:\s+(?P<name>\w+))?\s*%\}")
SAID, NOT_SAID = "\x01", "\x00"  # stand in a text for what was said, and for what was not
FOLD = re.compile("\x03([^\n]*)\n\n(.*?)\x04", re.DOTALL)  # a fold's words, and what it holds
FENCED = re.compile(r"^```.*?^```[^\n]*$", re.DOTALL | re.MULTILINE)
HOLDS, FAILS, NO_DATA = "", "does not hold", "no data"


class ChapterError(StepscopeError, SyntaxError):
    """A chapter that cannot be told; the text names it and the line."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class TagResult:
    """One tag, and what became of it: "" where it was said, else why not."""

    kind: str
    name: str
    why: str


def _modules(name: str) -> Iterator[ModuleType]:
    """Those of each study, whose claims may be in several (``claims``, ``claims_fp8``), and of several."""
    for study in studies.STUDIES:
        place = f"stepscope.studies.{study}"
        for module in iter_modules(importlib.import_module(place).__path__):
            if module.name == name or module.name.startswith(f"{name}_"):
                yield importlib.import_module(f"{place}.{module.name}")
    if find_spec(across := f"stepscope.report.{name}_across"):
        yield importlib.import_module(across)


def collect(kind: str) -> dict[str, Callable]:
    """Every study's claims, figures or tables, and those that join studies, by name: public functions of one
    argument, ``tables``, and what ``PRINTED`` names. Those of ``reference`` have the claims' names, and the
    numbers of the shipped reference whatever the tables.

    Raises:
        ChapterError: two have one name.
    """
    found: dict[str, Callable] = {}
    if kind == "reference":
        return {name: lambda _, name=name: shipped()["claims"][name] for name in collect("claim")}
    for module in _modules({"claim": "claims", "figure": "figures", "table": "tables"}[kind]):
        own = (
            getattr(module, "PRINTED", {})
            if kind == "table"
            else {
                name: function
                for name, function in inspect.getmembers(module, inspect.isfunction)
                if not name.startswith("_")
                and function.__module__ == module.__name__
                and [*inspect.signature(function).parameters] == ["tables"]
            }
        )
        if doubled := sorted(found.keys() & own.keys()):
            other = found[doubled[0]].__module__
            raise ChapterError(f"{module.__name__}: {other} has a {kind} called {', '.join(doubled)}, too")
        found |= own
    return found


class Renderer:
    """Tells chapters of one set of tables. ``figures`` gathers those that were asked for: message and SVG."""

    def __init__(self, tables: Tables, folder: str = "figures") -> None:
        self.tables, self.folder = tables, folder
        self.known = {kind: collect(kind) for kind in KINDS}
        self.results: list[TagResult] = []
        self.figures: dict[str, tuple[str, str]] = {}

    def chapter(self, text: str, name: str, folder: str | None = None) -> str:
        """A chapter as markdown; empty where it has tags and none of them could be said.

        Args:
            name: of its file, for errors.
            folder: the folder of figures as seen from the page.

        Raises:
            ChapterError: an unknown name, field or unit, or a tag that is not closed, with its line.
        """
        self.folder = folder or self.folder
        code: list[str] = []  # what is in fences is left as it is

        def saved(block: re.Match) -> str:
            code.append(block[0])
            return f"\x02{len(code) - 1}\x02" + "\n" * block[0].count("\n")

        told = "".join(self._pieces(FENCED.sub(saved, text), name))
        told = _without_empty(FOLD.sub(lambda fold: _live(fold[0]) or NOT_SAID, told))
        told = FOLD.sub(r"<details><summary>\1</summary>\n\n\2</details>", told)
        whole = re.sub(r"\x02(\d+)\x02\n*", lambda at: code[int(at[1])] + "\n\n", told)
        return whole.strip() + "\n" if told else ""

    def _pieces(self, text: str, chapter: str) -> Iterator[str]:
        place, folded = 0, False
        opened: tuple[str, str] | None = None
        for tag in TAG.finditer(text):
            at = f"{chapter}, line {text.count(chr(10), 0, tag.start()) + 1}"
            kind, name = tag["kind"], tag["name"]
            between = text[place : tag.start()]
            if kind in [f"end{sentence}" for sentence in SENTENCES]:
                if opened is None or kind != f"end{opened[0]}":
                    raise ChapterError(f"{at}: {kind} without a {kind.removeprefix('end')}")
                yield self._claim(*opened, between, at)
                opened = None
            elif kind not in (*self.known, "fold", "endfold") or not (name or kind == "endfold"):
                raise ChapterError(
                    f"{at}: {tag[0]} is no tag; they are claim, endclaim, reference, "
                    "endreference, table, figure, fold and endfold"
                )
            elif opened is not None:
                raise ChapterError(f"{at}: {' '.join(opened)} is not closed before {tag[0]}")
            elif "fold" in kind:
                if folded is (kind == "fold"):
                    raise ChapterError(f"{at}: {tag[0]}, where a fold is {'open' if folded else 'not open'}")
                folded = not folded
                yield between + (f"\n\n\x03{name.replace('_', ' ')}\n\n" if folded else "\n\n\x04\n\n")
            elif name not in self.known[kind]:
                raise ChapterError(f"{at}: no {kind} is called {name}")
            else:
                yield between
                if kind in SENTENCES:
                    opened = kind, name
                else:
                    yield self._table(name) if kind == "table" else self._figure(name)
            place = tag.end()
        if opened is not None:
            raise ChapterError(f"{chapter}: {' '.join(opened)} is not closed")
        if folded:
            raise ChapterError(f"{chapter}: a fold is not closed")
        yield text[place:]

    def _made(self, kind: str, name: str) -> Any:
        """What a function makes of the tables; None where it could not, which is noted."""
        why, made = HOLDS, None  # type: tuple[str, Any]
        try:
            made = self.known[kind][name](self.tables)
            why = HOLDS if made is not None else FAILS if kind in SENTENCES else NO_DATA
            if kind == "figure" and made is not None:
                made = getattr(made, "message", name.replace("_", " ")), svg(made)
        except LookupError:
            why = NO_DATA
        except Exception as error:  # noqa: BLE001 of any table: it is named, and the rest of the report stands
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if isinstance(made, dict) and (empty := [field for field, value in made.items() if missing(value)]):
            made, why = None, f"has no number for {', '.join(map(str, empty))}"
        self.results.append(TagResult(kind, name, why))
        return made

    def _claim(self, kind: str, name: str, sentence: str, at: str) -> str:
        values = self._made(kind, name)
        return NOT_SAID if values is None else SAID + formatted(sentence, values, f"{at}: {kind} {name}")

    def _table(self, name: str) -> str:
        frame = self._made("table", name)
        if frame is not None and not len(frame):
            self.results[-1] = TagResult("table", name, NO_DATA)
        return SAID + markdown(frame) if frame is not None and len(frame) else NOT_SAID

    def _figure(self, name: str) -> str:
        drawn = self.figures.get(name) or self._made("figure", name)
        if drawn is None:
            return NOT_SAID
        self.figures[name] = drawn
        message, _ = drawn
        return f"{SAID}![{escape(message)}]({self.folder}/{name}.svg)"


# A range of one number: "0.99x to 0.99x", but not "from 5 ms to 5 ms".
ALIKE = re.compile(r"(?<!from )(?<![\w.,])(\d[\d.,]*(?:x|%| [A-Za-zµ/]+)?) to \1(?![\w.,]*\w)")


def formatted(sentence: str, values: dict, at: str) -> str:
    """A claim's sentence with its values, by the one formatter.

    Raises:
        ChapterError: a field that the claim does not have, or a unit that does not fit.
    """
    out, name, unit = "", None, None
    try:
        for literal, name, unit, _ in string.Formatter().parse(sentence):
            out += literal
            if name is not None:
                value = values[name]
                inside = out.count("`") % 2 and isinstance(value, str)
                out += _code(value) if inside else format(Shown(value), unit or "")
    except KeyError as error:
        raise ChapterError(f"{at} has no field {error}, only {', '.join(values)}") from None
    except ValueError as error:
        field = f", {{{name}:{unit}}}" if name else ""
        raise ChapterError(f"{at}{field}: {error}") from None
    return ALIKE.sub(r"\1", out)


def _code(text: str) -> str:
    """Text inside backticks, which end at the next backtick and need no escape."""
    return "".join(c if c.isprintable() and c != "`" else "'" for c in text[:200]) or "?"


def _without_empty(text: str) -> str:
    """Leave out sections that have tags and said nothing, and of the others such paragraphs."""
    if NOT_SAID in text and SAID not in text:
        return ""
    first, *others = re.split(r"^(?=#{2,} )", text, flags=re.MULTILINE)
    if not first.strip() and others:  # the chapter's own heading: it stays where anything below it does
        heading, _, remainder = others[0].partition("\n")
        first, others = f"{heading}\n\n{_live(remainder)}", others[1:]
    paragraphs = re.split(r"\n{2,}", "".join([first, *map(_live, others)]))
    live = [_paragraph(paragraph) for paragraph in paragraphs]
    led = zip(live, [*live[1:], ""])
    return "\n\n".join(text for this, following in led if (text := this if following else _unled(this)))


def _unled(paragraph: str) -> str:
    """A paragraph without the words that led to the next one, where nothing is left of that."""
    return re.sub(r"(?s)(?:\A|(?<=[.!?])\s)(?:(?![.!?]\s).)*:\Z", "", paragraph).rstrip()


def _live(section: str) -> str:
    return "" if NOT_SAID in section and SAID not in section else section


def _paragraph(paragraph: str) -> str:
    if NOT_SAID in paragraph and SAID not in paragraph:
        remainder = re.sub(r"\*\*.+?\*\*|\([a-f]\),?|[\x00\s.,:;]", "", paragraph)
        if not remainder:  # nothing is left but a question
            return ""
    # What only leads to what is not said.
    paragraph = re.sub(r"[^.!?*\n\x01]*:(?:[ \n]?\x00)+(?![ \n]*[\x00\x01])", "", paragraph)
    text = re.sub(r"[ \n]?\x00", "", paragraph).replace(SAID, "")
    return re.sub(r"(?<=\S) {2,}", " ", text).strip("\n ")
