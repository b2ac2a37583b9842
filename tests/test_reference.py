"""The committed report, its claims and what they read, on the reference: all of it is made once, by the check of the
report, and what another test asks of unchanged tables is answered from that."""

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import reports
from reports import CLAIM, PAGES, Reads
from stepscope import PROJECT
from stepscope.report import check as checking
from stepscope.report import claims
from stepscope.report import reference as writing
from stepscope.report.check import alike, check
from stepscope.report.claims import FAILS, HOLDS, Renderer, collect
from stepscope.report.load import Read, read
from stepscope.report.reference import reference_text
from stepscope.report.render import CHAPTERS, compose
from stepscope.report.shipped import FILE
from stepscope.runs.store import Store
from stepscope.runs.sweep_file import find_sweeps, load_sweeps
from stepscope.studies import STUDIES

KINDS = claims.KINDS
RENDERED = reports.IS_REFERENCE and Path(str(PROJECT), "writeup.md").is_file()
# Of the configuration, the machine, a formula or types alone: no measured number is in them.
FROM_SHAPES = {
    "answer_residual",
    "measured_on",
    "answer_toy",
    "answer_models",
    "profiled",
    "profiled_contexts",
    "toy_why",
    "attention_long_dims",
    "answer_attention_dims",
    "snapshot_kept",
    "peak_of_optimizer",
    "attention_chosen",
    "softmax_passes",
    "predicted_peak",
    "block_saves_formula",
}


class Reference:
    """The committed report as the check makes it anew, with what each function made of which tables."""

    def __init__(self):
        self.functions = {kind: collect(kind) for kind in KINDS}
        self.made, self.tables = (
            {},
            None,
        )  # by kind and name: made, error, and the frames it asked for by their names
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                claims,
                "collect",
                lambda kind: {
                    name: lambda tables, key=(kind, name): self.answer(key, tables)
                    for name in self.functions[kind]
                },
            )
            patch.setattr(checking, "compose", self._compose)
            self.differs = check(reports.RUNS, Path(str(PROJECT)))

    def _compose(self, *places):
        self.report = compose(*places)
        return self.report

    def answer(self, key, tables):
        """What a function makes of tables, from memory where it was asked the same of the same frames."""
        if self.tables is None:
            self.tables = tables  # the report's own
        if key not in self.made or any(
            tables.get(name) is not frame for name, frame in self.made[key][2].items()
        ):
            found = self._call(key, Reads(tables))
            if tables is not self.tables:
                return self._give(*found)
            self.made[key] = found
        return self._give(*self.made[key])

    def _call(self, key, noting):
        kind, name = key
        try:
            made, error = self.functions[kind][name](noting), None
        except Exception as raised:  # noqa: BLE001 as the renderer, which says it
            made, error = None, raised
        return made, error, {name: dict.get(noting, name) for name in noting.asked}

    def _give(self, made, error, _):
        if error is not None:
            raise error
        return made

    def asked(self, kind, name):
        """The names of the tables that a function asked for."""
        key = kind, name
        return {*(self.made[key] if key in self.made else self._call(key, Reads(self.tables)))[2]}

    def renderer(self, tables):
        """A renderer of other tables; figures whose frames are the same are as they were drawn."""
        renderer = Renderer(tables)
        renderer.known = {
            kind: {name: lambda tables, key=(kind, name): self.answer(key, tables) for name in own}
            for kind, own in self.functions.items()
        }
        for name in self.functions["figure"]:
            text = self.report.texts.get(f"figures/{name}.svg")
            if text and all(tables.get(one) is self.tables.get(one) for one in self.asked("figure", name)):
                renderer.figures[name] = name, text
        return renderer


@pytest.fixture(scope="module")
def reference():
    reports.needs_runs()
    if PROJECT is None:
        pytest.skip("not in a checkout")
    return Reference()


@pytest.mark.skipif(not RENDERED, reason="of the reference")
def test_the_committed_report_is_what_the_reference_says(reference):
    assert reference.differs == []


def words(page: Path) -> int:
    """Of a page without its tables."""
    return len(re.sub(r"^\|.*$", "", page.read_text(), flags=re.MULTILINE).split())


@pytest.mark.skipif(not RENDERED, reason="of the reference")
def test_the_reference_is_as_short_as_promised():
    assert words(Path(str(PROJECT), "writeup.md")) <= 7500
    assert sum(map(words, Path(str(PROJECT)).glob("evidence/*.md"))) <= 3000
    first = Path(str(PROJECT), "writeup.md").read_text().partition("\n## ")[0]
    assert len(re.sub(r"!\[[^\]]*\]\([^)]*\)", "", first).split()) <= 140


@pytest.mark.skipif(not RENDERED, reason="of the reference")
def test_a_report_without_a_gpu_shows_the_reference_as_it_is():
    shown = Path(str(PROJECT), "lib", "stepscope", "report", "chapters", "reference.svg").read_text()
    assert alike(shown, Path(str(PROJECT), "figures", "ladder.svg").read_text())


@pytest.mark.skipif(not reports.IS_REFERENCE, reason="of the reference")
def test_what_other_machines_are_told_of_the_reference_is_what_it_says(reference):
    """`make reference` writes it before it renders."""
    made, there = json.loads(reference_text(reference.tables)), json.loads(FILE.read_text(encoding="utf-8"))
    asked = {
        tag["name"]
        for page in PAGES
        for tag in claims.TAG.finditer(page.read_text())
        if tag["kind"] == "reference"
    }
    assert made == there and asked == there["claims"].keys()


def test_nobody_is_told_of_what_was_unsteady(monkeypatch, tmp_path):
    steps = pd.DataFrame({"optimization": ["fp32", "bf16"], "unsteady": ["", "late"]})
    monkeypatch.setattr(writing, "read", lambda _: Read([], {"ladder.steps": steps}))
    monkeypatch.setattr(
        writing, "reference_text", lambda tables: " ".join(tables["ladder.steps"]["optimization"])
    )
    monkeypatch.setattr(writing, "FILE", tmp_path / "reference.json")
    writing.write_reference(tmp_path)
    assert (tmp_path / "reference.json").read_text() == "fp32"


def _told(renderer: Renderer) -> tuple[dict[Path, str], list[str]]:
    """Every page as it is told, and why the rest is not."""
    texts = {page: renderer.chapter(page.read_text(), page.name) for page in PAGES}
    return texts, [
        f"{told.kind} {told.name}: {told.why}"
        for told in renderer.results
        if told.why != HOLDS and not told.name.startswith(("cpu_", "beside_reference"))
    ]


@pytest.mark.skipif(not reports.IS_REFERENCE, reason="of the reference")
def test_the_reference_has_the_data_of_all_that_is_said(reference):
    """A claim may not hold of it; none lacks data, and none breaks."""
    assert not reference.report.errors
    asked = load_sweeps(find_sweeps("reference"), "cuda", None).configs
    known = [record.config for record in Store(reports.RUNS).records()[0]]
    assert not [config.label for config in asked if config.model_dump(mode="json") not in known]
    texts, whys = _told(reference.renderer(reference.tables))
    assert not [why for why in whys if not (why.startswith("claim") and why.endswith(FAILS))]
    questions = {
        question: page
        for page in PAGES
        if "questions" in page.read_text().partition("\n")[0]
        for question in re.findall(r"\*\*.+?\*\*", page.read_text())
    }
    assert len(questions) > 25
    assert not [question for question, page in questions.items() if question not in texts[page]], (
        "without an answer"
    )


def test_a_question_that_was_measured_has_a_sentence_whatever_was_found(reference, tmp_path):
    """Where a claim of its paragraph does not hold, another does: on the reference, and on a few of its runs."""
    page = CHAPTERS / "09-questions.md"
    whole = CLAIM.sub(lambda claim: claim[0].replace("\n\n", "\n"), page.read_text())
    asked = [paragraph for paragraph in whole.split("\n\n") if "**" in paragraph]
    for tables in (reference.tables, read(Store(reports.few(tmp_path / "runs"))).tables):
        renderer, silent = reference.renderer(tables), []
        for paragraph in asked:
            del renderer.results[:]
            renderer.chapter(paragraph, page.name)
            whys = [told.why for told in renderer.results]
            if FAILS in whys and HOLDS not in whys:
                silent.append(paragraph[:60])
        assert not silent


@pytest.mark.parametrize("study", STUDIES)
def test_none_breaks_on_a_study_alone(reference, study):
    """A user's own report has some studies: what is not there is no data, and never an error."""
    alone = {
        name: frame for name, frame in reference.tables.items() if name.partition(".")[0] in (study, "runs")
    }
    renderer = reference.renderer(alone)
    assert len(alone) > 1 and not [why for why in _told(renderer)[1] if "Error" in why]


def _sentences(renderer: Renderer, names: set[str] | None = None) -> dict[str, str]:
    """Every claim's first sentence, or those of some claims."""
    found: dict[str, str] = {}
    for page in PAGES:
        for name, sentence in CLAIM.findall(page.read_text()):
            if name not in found and (names is None or name in names):
                found[name] = renderer._claim("claim", name, sentence, page.name)
    return found


def _rotated(tables: dict, by: int) -> dict:
    """The same tables with each measured column in the place of one so many before, and rows weighed unequally:
    a column may have no other, or an equal one."""
    keys = {
        "size",
        "context_length",
        "batch_size",
        "vocab_size",
        "repeat",
        "step",
        "seed",
        "sequence",
        "d_model",
        "at",
        "event",
        "rank",
        "blocks",
    }
    changed = {}
    for name, frame in tables.items():
        columns = [
            column
            for column in frame
            if column not in keys
            and pd.api.types.is_numeric_dtype(frame[column])
            and not pd.api.types.is_bool_dtype(frame[column])
        ]
        weights = 1 + np.arange(len(frame)) % 7 / 3
        changed[name] = frame.assign(
            **{
                column: frame[other] * weights
                for column, other in zip(columns, [*columns[by:], *columns[:by]])
            }
        )
    return changed


def test_no_claim_stands_when_columns_are_swapped(reference):
    before = _sentences(reference.renderer(reference.tables))
    standing = {name for name, sentence in before.items() if claims.SAID in sentence} - FROM_SHAPES
    assert standing, "no claim holds here at all"
    for by in (1, 3):
        with np.errstate(all="ignore"):
            after = _sentences(reference.renderer(_rotated(reference.tables, by)), standing)
        standing = {name for name in standing if after[name] == before[name]}
    assert not sorted(standing)


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_declares_the_tables_of_others_that_it_reads(reference, study):
    asked = {
        table
        for kind in KINDS
        for name, function in reference.functions[kind].items()
        if function.__module__.split(".")[1:3] == ["studies", study]
        for table in reference.asked(kind, name)
    }
    read = {table for table in asked if "." in table and not table.startswith(f"{study}.")}
    assert read == set(getattr(importlib.import_module(f"stepscope.studies.{study}.tables"), "READS", ()))


def test_results_that_are_read_as_numbers_are_declared(reference):
    """Of others a record may hold text, and nothing of the report breaks."""
    changed = dict(reference.tables)
    for name in [name for name in changed if name.endswith(".results")]:
        module = importlib.import_module(f"stepscope.studies.{name.partition('.')[0]}.tables")
        others = set(changed[name].select_dtypes("number")) - {
            *module.CONFIG,
            *getattr(module, "NUMBERS", ()),
        }
        changed[name] = changed[name].assign(**dict.fromkeys(others, "some text"))
    before, after = (_told(reference.renderer(tables))[1] for tables in (reference.tables, changed))
    assert before == after
