"""Test that the writeup depends on the values in the records, but not on the order of the records."""

import hashlib
import importlib
import re
from collections import Counter, defaultdict

import pandas as pd
import pytest

from simulated_campaign import scaled
from stepscope import PROJECT
from stepscope.report import writeup
from stepscope.report.check import alike
from stepscope.report.document import Document, DocumentError
from stepscope.runs.record import mixed_notebook_warnings
from stepscope.runs.store import Store
from stepscope.views import MODULES, View, Views, facts

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
