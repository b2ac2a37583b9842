"""The writeup's numbers come from the records: other records change the text, another order does not."""

import hashlib
import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from jinja2 import nodes

from simulated_campaign import scaled
from stepscope import PROJECT
from stepscope.report import writeup
from stepscope.report.check import alike
from stepscope.report.document import Document, DocumentError
from stepscope.views import MODULES, View, Views, facts, unit_of

if PROJECT is None:
    pytest.skip("not in a checkout", allow_module_level=True)
FOLDER = writeup.templates_folder()


# -- order ----------------------------------------------------------------------------------------------------


def shuffled(table: pd.DataFrame) -> pd.DataFrame:
    """Reorder the runs, and rows that belong to no run."""
    if "run_id" not in table:
        return table.sample(frac=1, random_state=1)
    digests = {run: hashlib.md5(run.encode()).hexdigest() for run in table["run_id"].unique()}
    return table.sort_values("run_id", key=lambda runs: runs.map(digests), kind="stable")


def test_writeup_does_not_depend_on_the_order_of_runs(campaign):
    views = Views({name: shuffled(table) for name, table in campaign.tables.items()})
    texts, figures = writeup.render_views(FOLDER, views)
    written = campaign.report.texts
    chapters = [text for name, text in texts.items() if not name.startswith(writeup.EVIDENCE)]
    assert written["writeup.md"].startswith("\n".join(chapters))
    pages = {name: text for name, text in texts.items() if name.startswith(writeup.EVIDENCE)}
    assert pages == {name: written[f"{name}.md"] for name in pages}
    assert not [name for name, drawn in figures.items() if not alike(drawn, written[f"figures/{name}.svg"])]


# -- other times ----------------------------------------------------------------------------------------------


def test_false_sentences_are_named_with_line_and_numbers(campaign, monkeypatch):
    monkeypatch.setattr(writeup, "all_figures", lambda: defaultdict(lambda: lambda *_: ""))
    tables = {}
    for name, table in campaign.tables.items():
        runs = table.groupby("run_id", sort=False) if "run_id" in table else [("", table)]
        tables[name] = pd.concat([scaled(rows, run, 1.0, 0.3) for run, rows in runs])
    with pytest.raises(DocumentError) as error:
        writeup.render_views(FOLDER, Views(tables))
    places = str(error.value).split("\n\n")
    first_lines = [place.partition("\n")[0] for place in places]
    at = r"writeup/[\w/-]+\.md\.j2:\d+: "
    assert not [line for line in first_lines if not re.match(at, line)]
    false = [line for line in first_lines if "no longer true" in line]
    assert len(false) > 10
    compared = [line for line in false if re.search(r"\(.*\d.* vs\. .*\)", line)]
    assert len(compared) > len(false) / 2


# -- swapped columns ------------------------------------------------------------------------------------------


class Template:
    """A template's set lines, and its lines that print columns of views."""

    def __init__(self, path: Path, document: Document, views: Iterable[str]) -> None:
        self._environment = document._environment
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        self.name = path.relative_to(FOLDER).as_posix()
        self.views = {name: {name} for name in views}  # by each name of the template
        self._sets = {}
        sets: Iterable[Any] = self._environment.parse(text).find_all((nodes.Assign, nodes.AssignBlock))
        for node in sets:
            self.views[node.target.name] = self._used(node)
            self._sets[node.target.name] = self._environment.from_string(lines[node.lineno - 1])
        self.columns: dict[int, set[tuple[str, str]]] = {}  # views and columns that each line prints
        self._lines = {}
        for number, line in enumerate(lines, 1):
            columns = set() if line.startswith("{%") else self._printed(line)
            if columns:
                self.columns[number] = columns
                self._lines[number] = self._environment.from_string(line)

    def _used(self, node: nodes.Node) -> set[str]:
        """Return the views that an expression names, directly or through set lines."""
        names = [*node.find_all(nodes.Name)]
        if isinstance(node, nodes.Name):
            names.append(node)
        read = {name.name for name in names if name.ctx == "load"}
        return {view for name in read for view in self.views.get(name, ())}

    def _printed(self, line: str) -> set[tuple[str, str]]:
        found = set()
        for output in self._environment.parse(line).find_all(nodes.Output):
            for expression in output.nodes:
                found |= self._columns(expression)
        return found

    def _columns(self, expression: nodes.Expr) -> set[tuple[str, str]]:
        if name_of(expression) in ("holds", "figure"):
            return set()
        found = set()
        attributes = [*expression.find_all(nodes.Getattr)]
        counted = [node.node for node in attributes if node.attr == "count"]  # the rows, not the values
        for node in attributes:
            found |= {(view, node.attr) for view in self._used(node.node) if node not in counted}
        calls: list[Any] = [expression, *expression.find_all(nodes.Call)]
        for call in [one for one in calls if name_of(one) in ("wide", "table")]:
            words = [word.value for word in call.args[1:] if isinstance(word, nodes.Const)]
            columns = [word.partition(":")[0] for word in words]
            found |= {(view, column) for view in self._used(call.args[0]) for column in columns}
        return found

    def texts(self, names: dict[str, Any]) -> dict[int, str]:
        """Return the text of each line that prints a column, by number; of a line that fails, its error."""
        known = dict(names)
        for name, source in self._sets.items():
            with suppress(Exception):  # then each line that uses the name fails
                known[name] = getattr(source.make_module(known), name)
        texts = {}
        for number, source in self._lines.items():
            try:
                texts[number] = source.render(known)
            except Exception as error:  # noqa: BLE001 any expression may fail
                texts[number] = f"{type(error).__name__}: {error}"
        return texts


def name_of(call: nodes.Node) -> str:
    """Return the name of the function that is called; empty for any other expression."""
    return getattr(call.node, "name", "") if isinstance(call, nodes.Call) else ""


def rotated(view: pd.DataFrame) -> pd.DataFrame:
    """Return a view in which each measured column has the values of another, of the same unit where it can be.

    Rows get different factors, because a column may equal its neighbor or have none.
    """
    columns = measured(view)
    weights = 1.1 + np.arange(len(view)) % 7 / 3
    others = [*columns[1:], *columns[:1]]
    changed = view.assign(**{column: view[other] * weights for column, other in zip(columns, others)})
    changed.attrs = view.attrs
    return changed


def measured(view: pd.DataFrame) -> list[str]:
    """Return the numeric columns beside the key, those of one unit next to each other."""
    numbers = view.select_dtypes("number").columns.difference(view.attrs["key"])
    return sorted(numbers, key=lambda name: (unit_of(name), name))


@pytest.fixture(scope="module")
def templates(campaign) -> list[Template]:
    document = Document(FOLDER, {}, {})
    silent = dict.fromkeys(("holds", "figure"), lambda *_, **__: "")
    document._environment.globals |= silent | facts.FACTS | {"code": writeup.code}
    paths = sorted(FOLDER.rglob("*.md.j2"))
    return [Template(path, document, campaign.views) for path in paths]


def test_sentences_change_when_their_columns_are_swapped(campaign, templates):
    unchanged = []
    checked = 0
    for template in templates:
        used = set().union(*template.views.values())
        views = {name: campaign.views[name] for name in used & {*campaign.views._made}}
        before = template.texts(views)
        for name in {view for columns in template.columns.values() for view, _ in columns}:
            swapped = {(name, column) for column in measured(views[name])}
            numbers = [number for number, columns in template.columns.items() if columns & swapped]
            with np.errstate(all="ignore"):
                after = template.texts(views | {name: rotated(views[name])}) if numbers else before
            checked += len(numbers)
            same = [number for number in numbers if after[number] == before[number]]
            unchanged += [f"{template.name}:{number}: {name}: {before[number][:150]}" for number in same]
    assert checked > 300
    assert not unchanged


# -- names ----------------------------------------------------------------------------------------------------


def test_views_and_facts_have_unique_names():
    """A template finds all of them by their names alone."""
    names = [*facts.FACTS, *Document(FOLDER, {}, {})._environment.globals, "code"]
    for module in MODULES:
        inside = importlib.import_module(f"stepscope.views.{module}")
        own = [one for one in vars(inside).values() if getattr(one, "__module__", "") == inside.__name__]
        names += [one.__name__ for one in own if isinstance(getattr(one, "view", None), View)]
    assert len(names) > len(facts.FACTS) + 50
    assert not [name for name, count in Counter(names).items() if count > 1]
