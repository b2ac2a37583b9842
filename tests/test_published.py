"""Published figures: the shipped file, files to refuse, and how figures are set beside those here."""
import json

import pandas as pd
import pytest
from markdown_it import MarkdownIt

from stepscope.say.published import (
    PublishedError,
    beside,
    by_report,
    counts,
    load_published,
    placed,
    printed_by_report,
    published_times,
)
from stepscope.say.tables import markdown_table
from stepscope.studies.nsys.facts_claims import MEASURES, REASONS

TIMES = {"size": "small", "context_length": 512, "precision": "fp32", "forward": "33.29 ± 0.71"}
CLAIM = {"question": "b", "as_printed": "half", "measure": "first_share", "printed": 0.5}
CELL = "d_model,sequence,forward,backward,mib,compiled_forward,tf32_forward,compiled_backward,tf32_backward\n"


@pytest.fixture
def load(tmp_path):
    def written_and_loaded(**report):
        path = tmp_path / "reports.yaml"
        path.write_text(json.dumps({"reports": [{"title": "X", "what": "a report"} | report]}), encoding="utf-8")
        return load_published(path)
    return written_and_loaded


def test_shipped_reports_are_named_and_what_they_claim_can_be_measured():
    reports = load_published()
    assert len({report.name for report in reports}) == len(reports) == 3
    for report in reports:
        assert len(report.title) > 10 and "ntitled" not in report.title and report.what and (report.gpu or "names no GPU" in report.name)
        for claim in report.claims:
            assert claim.measure in MEASURES and claim.reason in {None, *REASONS}, claim
            assert (claim.size is None) == (claim.context_length is None)


def test_shipped_numbers_are_those_printed():
    times = published_times(load_published())
    assert not times.duplicated(["report", "size", "context_length", "phase", "precision", "clock"]).any()
    found = times.set_index("as_printed")
    assert found.loc["53.41 ± 0.5", ["size", "context_length", "phase", "theirs"]].tolist() == [
        "small", 512, "forward", 53.41]
    assert found.loc["~90", "theirs"] == 90 and found.loc["845.35", "size"] == "2.7B"
    for report in load_published():
        for claim in report.claims:
            shown = claim.as_printed.replace(" ", "")
            numbers = claim.printed if isinstance(claim.printed, list) else [abs(claim.printed)]
            assert all(any(f"{number * scale:g}" in shown for scale in (1, 100)) for number in numbers
                       if claim.printed not in (1.0, 0.324)), claim  # "roughly as long"; a sum of four


def test_the_shipped_grid_has_five_heads_and_seven_sequences():
    grid = next(report for report in load_published() if report.attention)
    assert len(grid.attention) == len({(cell.d_model, cell.sequence) for cell in grid.attention}) == 5 * 7
    assert {cell.sequence for cell in grid.attention if cell.backward is None} == {16384}
    assert grid.attention_passes == 200


@pytest.mark.parametrize("report, words", [
    ({"times": [TIMES, TIMES | {"mean": 3.0}]}, ["times.1.mean: Extra inputs"]),
    ({"times": [TIMES | {"forward": "-33.29"}]}, ["times.0.forward: ", "-33.29"]),
    ({"times": [TIMES | {"forward": "fast"}]}, ["times.0.forward: ", "fast"]),
    ({"times": [TIMES | {"size": "huge"}]}, ["times.0.size: ", "'huge'"]),
    ({"times": [TIMES | {"context_length": 0}]}, ["times.0.context_length: "]),
    ({"claims": [CLAIM | {"printed": [1.0]}]}, ["claims.0.printed", "at least 2 items"]),
    ({"claims": [CLAIM | {"question": "z"}]}, ["claims.0.question: "]),
    ({"attention": "d_model,sequence\n1,2\n"}, ["attention.0.forward: Field required"]),
    ({"attention": CELL + "32,64,-1,1,1,1,1,1,1"}, ["attention.0.forward: Input should be greater than 0"]),
    ({"attention": [1]}, ["attention: ", "expected CSV text"]),
    ({"gpu": ""}, ["gpu: "]),
    ({"colour": "red", "title": 3}, ["colour: Extra", "title: "]),
])
def test_a_wrong_entry_is_named(load, report, words):
    assert load(times=[TIMES], claims=[CLAIM], attention=CELL + "32,64,1,,1,1,1,1,1")
    with pytest.raises(PublishedError) as error:
        load(**report)
    for word in ["reports.yaml: ", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("text, words", [
    ("{}", "reports: Field required"),
    ("- 1", "valid dictionary"),
    ("reports: [", "line 2, column 1"),
    ("reports: []\nreports: []", "the key 'reports' is there twice"),
])
def test_a_wrong_file_is_named(tmp_path, text, words):
    path = tmp_path / "reports.yaml"
    path.write_text(text)
    with pytest.raises(PublishedError) as error:
        load_published(path)
    assert "reports.yaml: " in str(error.value) and words in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PublishedError, match="absent.yaml: cannot be read"):
        load_published(tmp_path / "absent.yaml")


def test_a_place_is_against_the_least_and_the_most_here():
    table = placed(pd.DataFrame({"theirs": [9.0, 9.6, 15.0, 20.9, 30.0, -3.0], "low": [10.0] * 5 + [-4.0],
                                 "high": [20.0] * 5 + [-2.0]}))
    assert list(table["place"]) == ["below", "within", "within", "within", "above", "within"]
    assert list(table["ratio"]) == pytest.approx([0.9, 0.96, 1, 1.045, 1.5, 1])
    assert counts(table) == {"below": 1, "within": 4, "above": 1}


def test_a_time_is_set_beside_its_context_or_beside_all_where_it_states_none(load):
    here = pd.DataFrame({"size": "small", "phase": "forward", "context_length": [128, 512], "here": [10.0, 40.0]})
    theirs = published_times(load(times=[TIMES | {"forward": "80"}, TIMES | {"context_length": 256},
                                         {"size": "small", "forward": "30"}, {"size": "large", "forward": "1"}]))
    table = beside(theirs, here, ["size", "phase"])
    assert table[["low", "high", "ratio"]].values.tolist() == [[40, 40, 2], [10, 40, 1]]
    summary = by_report(table)
    assert summary[["figures", "median", "within", "above"]].values.tolist() == [[2, 1.5, 1, 1]]


def test_a_title_is_shown_as_text(load):
    hostile = "<img src=x onerror=alert(1)> [a](javascript:b) **c**"
    theirs = published_times(load(title=hostile, times=[TIMES]))
    here = pd.DataFrame({"size": ["small"], "phase": "forward", "context_length": 512, "here": 40.0})
    table = printed_by_report(by_report(beside(theirs, here, ["size", "phase"])), "time")
    page = MarkdownIt("commonmark").enable("table").render(markdown_table(table))
    assert "onerror" in page and not any(tag in page for tag in ("<img", "<a ", "<strong>"))
