"""Test that the writeup depends on the values in the records, but not on the order of the records."""

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

from simulated_campaign import scaled
from stepscope import PROJECT
from stepscope.report import writeup
from stepscope.report.check import alike
from stepscope.report.document import Document, DocumentError
from stepscope.runs.record import mixed_notebook_warnings
from stepscope.runs.store import Store
from stepscope.views import MODULES, View, Views, all_views, facts, unit_of

if PROJECT is None:
    pytest.skip("not in a checkout", allow_module_level=True)
FOLDER = writeup.templates_folder()


# -- code version ----------------------------------------------------------------------------------------------


def test_reference_was_measured_by_one_version_of_the_code_on_one_kind_of_gpu():
    records, errors = Store(PROJECT / "runs" / "h200").records(check_files=True)
    assert records and not errors and mixed_notebook_warnings(records) == []
    assert {record.machine["device_name"] for record in records} == {"NVIDIA H200"}
    assert len({record.software["torch"] for record in records}) == 1
    assert len({record.software["stepscope_source"] for record in records}) == 1


# -- order ----------------------------------------------------------------------------------------------------


def shuffled(table: pd.DataFrame) -> pd.DataFrame:
    """Reorder the runs in a table; if the table has no column that names the run, reorder its rows."""
    if "run_id" not in table:
        return table.sample(frac=1, random_state=1)
    digests = {run: hashlib.md5(run.encode()).hexdigest() for run in table["run_id"].unique()}
    return table.sort_values("run_id", key=lambda runs: runs.map(digests), kind="stable")


def test_writeup_is_independent_of_run_order(campaign):
    views, *others = (
        Views({name: shuffled(table) for name, table in tables.items()})
        for tables in (campaign.tables, *campaign.others.values())
    )
    texts, figures = writeup.render_views(FOLDER, views, dict(zip(campaign.others, others)))
    written = campaign.report.texts
    chapters = [text for name, text in texts.items() if not name.startswith(writeup.EVIDENCE)]
    assert written["writeup.md"].startswith("\n".join(chapters))
    pages = {name: text for name, text in texts.items() if name.startswith(writeup.EVIDENCE)}
    assert pages == {name: written[f"{name}.md"] for name in pages}
    assert not [name for name, drawn in figures.items() if not alike(drawn, written[f"figures/{name}.svg"])]


# -- changed times ----------------------------------------------------------------------------------------------


def test_false_sentences_are_listed_with_line_and_numbers(campaign, monkeypatch):
    monkeypatch.setattr(writeup, "all_figures", lambda: defaultdict(lambda: lambda *_: ""))
    tables = {}
    for name, table in campaign.tables.items():
        runs = table.groupby("run_id", sort=False) if "run_id" in table else [("", table)]
        tables[name] = pd.concat([scaled(rows, run, 1.0, 0.3) for run, rows in runs])
    with pytest.raises(DocumentError) as error:
        writeup.render_views(
            FOLDER, Views(tables), {name: Views(other) for name, other in campaign.others.items()}
        )
    places = str(error.value).split("\n\n")
    first_lines = [place.partition("\n")[0] for place in places]
    at = r"writeup/[\w/-]+\.md\.j2:\d+: "
    assert not [line for line in first_lines if not re.match(at, line)]
    false = [line for line in first_lines if "no longer true" in line]
    assert len(false) > 10
    compared = [line for line in false if re.search(r"\(.*\d.* vs\. .*\)", line)]
    assert len(compared) > len(false) / 2


# -- swapped columns ------------------------------------------------------------------------------------------


PRINTED = re.compile(r"\{\{(.*?)\}\}")
# these expressions don't print a column's value
SILENT = re.compile(r"\b(holds|figure)\(.*|\.\w+\.count\(\)")


class Template:
    """The lines of a template that set variables or print view columns.

    A view of another dataset has ``_`` instead of ``.`` in its name, as in ``h100x2_strategies``.
    """

    def __init__(self, path: Path, document: Document, views: Iterable[str], others: Iterable[str]) -> None:
        environment = document._environment
        self.name = path.relative_to(FOLDER).as_posix()
        # the views that each of the template's names depends on
        self.views = {name: {name} for name in views}
        self.expressions: dict[int, str] = {}  # printed expressions, keyed by line number
        self._sets, self._lines = {}, {}
        text = path.read_text(encoding="utf-8")
        for other in others:
            text = text.replace(f"{other}.", f"{other}_")
        for number, line in enumerate(text.splitlines(), 1):
            if assigned := re.match(r"\{% set (\w+)", line):
                self.views[assigned[1]] = self.used(line.partition("=")[2])
                self._sets[assigned[1]] = environment.from_string(line)
            expressions = " ".join(SILENT.sub("", text) for text in PRINTED.findall(line))
            if expressions.strip() and not line.startswith("{%"):
                self.expressions[number] = expressions
                self._lines[number] = environment.from_string(line)

    def used(self, code: str) -> set[str]:
        """Return the views that an expression uses, directly or through variables that other lines set."""
        names = re.findall(r"(?<![.\w])[a-z]\w*\b(?!=)", re.sub('"[^"]*"', "", code))
        return {view for name in names for view in self.views.get(name, ())}

    def lines_printing(self, view: str, columns: Iterable[str]) -> list[int]:
        """Return the numbers of the lines that print any of these columns of a view."""
        word = re.compile(rf"(\.|\")({'|'.join(columns)})\b")
        return [
            number
            for number, code in self.expressions.items()
            if view in self.used(code) and word.search(code)
        ]

    def texts(self, names: dict[str, Any]) -> dict[int, str]:
        """Map each line number to the text that the line prints, or to the error if the line fails."""
        known = dict(names)
        for name, source in self._sets.items():
            with suppress(Exception):  # if this line fails, so does each line that uses the name
                known[name] = getattr(source.make_module(known), name)
        texts = {}
        for number, source in self._lines.items():
            try:
                texts[number] = source.render(known)
            except Exception as error:  # noqa: BLE001 an expression may raise any error
                texts[number] = f"{type(error).__name__}: {error}"
        return texts


def rotated(view: pd.DataFrame) -> pd.DataFrame:
    """Replace the values of each measured column with another column's, preferably one with the same unit.

    Also scale the rows by different factors, because the two columns may be equal, or the view may have only
    one measured column.
    """
    columns = measured(view)
    weights = 1.1 + np.arange(len(view)) % 7 / 3
    others = [*columns[1:], *columns[:1]]
    changed = view.assign(**{column: view[other] * weights for column, other in zip(columns, others)})
    changed.attrs = view.attrs
    return changed


def measured(view: pd.DataFrame) -> list[str]:
    """Return the names of a view's numeric columns that aren't part of its key, sorted by unit."""
    numbers = view.select_dtypes("number").columns.difference(view.attrs["key"])
    return sorted(numbers, key=lambda name: (unit_of(name), name))


@pytest.fixture(scope="module")
def frames(campaign) -> dict[str, pd.DataFrame]:
    """Return the views that templates use, keyed by name.

    If a view is of another dataset, its name starts with the dataset's name.
    """
    found = dict(campaign.views._made)
    for dataset, tables in campaign.others.items():
        views, studies = Views(tables), {name.partition(".")[0] for name in tables}
        names = [name for name, view in all_views().items() if studies.issuperset(view.studies or ["none"])]
        found |= {f"{dataset}_{name}": views[name] for name in ["runs", *names]}
    return found


@pytest.fixture(scope="module")
def templates(campaign, frames) -> list[Template]:
    document = Document(FOLDER, {}, {})
    silent = dict.fromkeys(("holds", "figure"), lambda *_, **__: "")
    document._environment.globals |= silent | facts.FACTS | {"code": writeup.code}
    roots = [FOLDER, *(FOLDER / name for name in campaign.others)]
    paths = [path for root in roots for path in (*root.glob("*.md.j2"), *root.glob("evidence/*.md.j2"))]
    return [Template(path, document, frames, campaign.others) for path in sorted(paths)]


def test_sentences_change_when_their_columns_are_swapped(frames, templates):
    unchanged = []
    checked = 0
    for template in templates:
        used = set().union(*template.views.values())
        views = {name: frames[name] for name in used}
        before = template.texts(views)
        for name, view in views.items():
            columns = measured(view)
            numbers = template.lines_printing(name, columns) if columns else []
            if numbers:
                with np.errstate(all="ignore"):
                    after = template.texts(views | {name: rotated(view)})
                checked += len(numbers)
                same = [number for number in numbers if after[number] == before[number]]
                unchanged += [f"{template.name}:{number}: {name}: {before[number][:150]}" for number in same]
    assert checked > 300
    assert not unchanged


# -- names ----------------------------------------------------------------------------------------------------


def test_views_and_facts_have_unique_names():
    """Templates look up views and facts only by name."""
    names = [*facts.FACTS, *Document(FOLDER, {}, {})._environment.globals, "code"]
    for module in MODULES:
        inside = importlib.import_module(f"stepscope.views.{module}")
        own = [one for one in vars(inside).values() if getattr(one, "__module__", "") == inside.__name__]
        names += [one.__name__ for one in own if isinstance(getattr(one, "view", None), View)]
    assert len(names) > len(facts.FACTS) + 50
    assert not [name for name, count in Counter(names).items() if count > 1]
