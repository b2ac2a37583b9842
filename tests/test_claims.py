"""Chapters and their tags; and every claim on the reference."""
import inspect
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import reports
from stepscope.report import claims
from stepscope.report.claims import HOLDS, TAG, ChapterError, Teller, collect, formatted
from stepscope.report.render import CHAPTERS
from stepscope.report.style import figure
from stepscope.report.tables import table
from stepscope.runs.store import Store
from stepscope.runs.sweep_file import find_sweeps, load_sweeps

PAGES = sorted(CHAPTERS.rglob("*.md"))
# Of the configuration, the machine, a formula or types alone: no measured number is in them.
FROM_SHAPES = {"answer_residual", "measured_on", "answer_toy"}
CLAIM = re.compile(r"\{%\s*claim\s+(\w+)\s*%\}(.*?)\{%\s*endclaim\s*%\}", re.DOTALL)


def holds(tables):
    return {"size": "a_b", "wall": 94.23, "operations": 1778, "kernel": "k<T>"}


def fails(tables):
    return None


def lacks(tables):
    raise KeyError("benchmark.times")


def breaks(tables):
    raise TypeError("of\nan odd table")


def empty(tables):
    return {"wall": float("nan")}


@pytest.fixture
def teller(monkeypatch):
    functions = {one.__name__: one for one in (holds, fails, lacks, breaks, empty)}
    known = {"claim": functions, "table": {"times": lambda tables: table(pd.DataFrame({"wall, ms": [1.0]})),
                                           "none": lambda tables: None, "rowless": lambda tables: pd.DataFrame()},
             "figure": {"busy": lambda tables: figure("A <b>message</b>")[0], "none": lambda tables: None}}
    monkeypatch.setattr(claims, "collect", known.__getitem__)
    return Teller({})


def test_a_claim_that_holds_is_said_with_its_numbers(teller):
    text = "Before. {% claim holds %}{size}: {operations:n} kernels, `{kernel}`, in {wall:ms}.{% endclaim %} After."
    assert teller.chapter(text, "a.md") == "Before. a\\_b: 1,778 kernels, `k<T>`, in 94.2 ms. After.\n"
    assert [told.why for told in teller.told] == [HOLDS]


@pytest.mark.parametrize(("name", "why"), [
    ("fails", "does not hold"), ("lacks", "no data"), ("breaks", "TypeError: of an odd table"),
    ("empty", "has no number for wall")])
def test_a_claim_that_does_not_hold_is_left_out_and_listed(teller, name, why):
    text = f"A. {{% claim {name} %}}B {{wall:ms}}.{{% endclaim %}} C. {{% claim holds %}}D.{{% endclaim %}}"
    assert teller.chapter(text, "a.md") == "A. C. D.\n"
    assert teller.told[0].why == why


@pytest.mark.parametrize(("text", "left"), [
    ("{% claim fails %}A.{% endclaim %} {% claim lacks %}B.{% endclaim %}\n\nProse. {% claim holds %}C.{% endclaim %}",
     "Prose. C.\n"),
    ("(a), (b) **A question?** {% claim fails %}An answer.{% endclaim %}\n\n{% claim holds %}C.{% endclaim %}", "C.\n"),
    ("{% claim holds %}A.{% endclaim %} It leads to: {% claim fails %}what is not said.{% endclaim %}", "A.\n"),
    ("**Why?** With the square: {% claim fails %}B.{% endclaim %} C. {% claim holds %}D.{% endclaim %}",
     "**Why?** C. D.\n"),
    ("## Title\n\nProse.\n\n{% table none %}\n\n### Part\n\nMore.\n\n{% table times %}",
     "## Title\n\n### Part\n\nMore.\n\n| wall, ms |\n| --: |\n| 1.00 |\n"),
    ("## Title\n\n{% table times %}\n\n### Part\n\nMore.\n\n{% figure none %}",
     "## Title\n\n| wall, ms |\n| --: |\n| 1.00 |\n"),
    ("## Title\n\nProse.\n\n{% table none %}\n\n{% table rowless %}\n\n{% claim lacks %}A.{% endclaim %}", ""),
    ("## Title\n\nProse without a tag.", "## Title\n\nProse without a tag.\n")])
def test_what_says_nothing_is_absent(teller, text, left):
    assert teller.chapter(text, "a.md") == left


def test_a_figure_is_shown_once_made_with_its_message_escaped(teller):
    text = teller.chapter("{% figure busy %}", "a.md", "../figures")
    assert text == "![A \\<b\\>message\\</b\\>](../figures/busy.svg)\n"
    teller.chapter("{% figure busy %}", "b.md")
    assert [*teller.figures] == ["busy"] and len(teller.told) == 1


def test_code_in_fences_is_left_as_it_is(teller):
    text = "A.\n\n```python\nf'{x}'  # {% claim nothing %}\n\n\ny\n```\n\nB. {% claim holds %}C.{% endclaim %}\n"
    assert teller.chapter(text, "a.md") == text.replace("{% claim holds %}C.{% endclaim %}", "C.")


@pytest.mark.parametrize(("text", "message"), [
    ("One.\n\n{% claim nothing %}A.{% endclaim %}", r"a\.md, line 3: no claim is called nothing"),
    ("{% table holds %}", "no table is called holds"), ("{% figure x %}", "no figure is called x"),
    ("{% claim holds %}A.", "claim holds is not closed"), ("A.{% endclaim %}", "endclaim without a claim"),
    ("{% claim holds %}{% table times %}{% endclaim %}", "claim holds is not closed before"),
    ("{% if x %}", "is no tag"), ("{% claim %}A.{% endclaim %}", "is no tag"),
    ("\n{% claim holds %}{walls:ms}{% endclaim %}", r"line 2: claim holds has no field 'walls', only size, wall"),
    ("{% claim holds %}{wall:furlongs}{% endclaim %}", r"\{wall:furlongs\}: unit 'furlongs'"),
    ("{% claim holds %}{wall}{% endclaim %}", "needs its unit"),
    ("{% claim holds %}{size:ms}{% endclaim %}", "of the text"),
    ("{% claim holds %}{wall:ms{% endclaim %}", "claim holds")])
def test_a_wrong_tag_is_an_error_that_names_its_line(teller, text, message):
    with pytest.raises(ChapterError, match=message):
        teller.chapter(text, "a.md")


def test_two_studies_may_not_have_one_name(monkeypatch):
    modules = list(claims._modules("claims"))[:1] * 2
    monkeypatch.setattr(claims, "_modules", lambda _: modules)
    with pytest.raises(ChapterError, match="has a claim called"):
        collect("claim")


# The chapters as they are

def test_every_tag_has_its_function():
    known = {kind: collect(kind) for kind in ("claim", "table", "figure")}
    lacking = [f"{page.name}: {tag[0]}" for page in PAGES for tag in TAG.finditer(page.read_text())
               if tag["kind"] != "endclaim" and tag["name"] not in known[tag["kind"]]]
    assert not lacking


def test_every_claim_and_table_is_said_somewhere():
    said = {(tag["kind"], tag["name"]) for page in PAGES for tag in TAG.finditer(page.read_text())}
    unsaid = [f"{kind} {name}" for kind in ("claim", "table") for name in collect(kind) if (kind, name) not in said]
    assert not unsaid


def test_a_claims_numbers_are_its_functions():
    """Words of a claim have no number with a unit of their own."""
    own = [(page.name, found[0]) for page in PAGES for claim in CLAIM.finditer(page.read_text())
           for found in re.finditer(r"(?<!over )(?<!under )\b[\d.,]+ ?(?:ms|µs|s|%|x|GiB|MiB|W|J|MHz|TFLOP/s|tokens/s)(?!\w)",
                                    re.sub(r"\{[^}]*\}", "", claim[2]))]
    assert not own


def _sentences(tables: dict) -> dict[str, str]:
    """Every claim's first sentence on these tables, and why it is not said of others."""
    teller, found = Teller(tables), {}
    for page in PAGES:
        for name, sentence in CLAIM.findall(page.read_text()):
            if name not in found:
                found[name] = teller._claim(name, sentence, page.name) if name in teller.known["claim"] else ""
    return found


def _whys(tables: dict) -> list[str]:
    teller = Teller(tables)
    for page in PAGES:
        teller.chapter(page.read_text(), page.name)
    return [f"{told.kind} {told.name}: {told.why}" for told in teller.told
            if told.why != HOLDS and not told.name.startswith("cpu_")]


@pytest.mark.skipif(not reports.IS_REFERENCE, reason="of the reference")
def test_all_claims_tables_and_figures_hold_on_the_reference():
    assert not reports.whole().errors
    asked = load_sweeps(find_sweeps("reference"), "cuda", None).configs
    if missing := sum(Store(reports.RUNS).find(config) is None for config in asked):
        pytest.skip(f"{missing} of {len(asked)} runs of the reference are still to be measured")
    assert not _whys(reports.whole().tables)


def test_none_breaks_on_any_study_alone():
    """A user's own report has some studies: what is not there is no data, and never an error."""
    tables = reports.whole().tables
    for study in sorted({name.partition(".")[0] for name in tables} - {"runs"}):
        alone = {name: frame for name, frame in tables.items() if name.partition(".")[0] in (study, "runs")}
        assert not [why for why in _whys(alone) if "Error" in why], study


def _rotated(tables: dict, by: int) -> dict:
    """The same tables with each measured column in the place of one so many before, and rows weighed unequally:
    a column may have no other, or an equal one."""
    keys = {"size", "context_length", "batch_size", "vocab_size", "repeat", "step", "seed", "sequence", "d_model", "at",
            "event", "rank", "blocks"}
    changed = {}
    for name, frame in tables.items():
        columns = [column for column in frame if column not in keys and pd.api.types.is_numeric_dtype(frame[column])
                   and not pd.api.types.is_bool_dtype(frame[column])]
        weights = 1 + np.arange(len(frame)) % 7 / 3
        changed[name] = frame.assign(**{column: frame[other] * weights for column, other in zip(
            columns, [*columns[by:], *columns[:by]])})
    return changed


def test_no_claim_stands_when_columns_are_swapped():
    tables = reports.whole().tables
    with np.errstate(all="ignore"):
        before, *after = [_sentences(these) for these in (tables, _rotated(tables, 1), _rotated(tables, 3))]
    said = {name for name, sentence in before.items() if claims.SAID in sentence}
    assert said, "no claim holds here at all"
    assert not sorted(name for name in said - FROM_SHAPES if all(one[name] == before[name] for one in after))


def test_a_claims_function_is_short():
    long = {name: lines for name, function in collect("claim").items()
            if (lines := len(inspect.getsource(function).splitlines())) > 24}
    assert not long


def test_formatting_leaves_braces_that_are_doubled():
    assert formatted("{{x}} {a:n}", {"a": 1}, "here") == "{x} 1"


def test_chapters_are_what_the_report_reads():
    assert {path.name for path in PAGES} >= {"00-first.md", "08-trust.md", "cpu.md", "2026.md"}
    assert Path(CHAPTERS, "fast_step.py").is_file()
