"""The report's tables for one's own questions, and the notebook that asks some."""
import json
import re
import shutil

import nbformat
import pandas as pd
import papermill
import pytest

from stepscope import StepscopeError
from stepscope.report.load import load
from stepscope.runs.one_run import NOTEBOOKS
from stepscope.runs.record import RecordError
from stepscope.say.tables import brief

ROOT = NOTEBOOKS.resolve().parent


def test_it_runs_from_top_to_bottom_and_shows_six_pictures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # from wherever it is opened
    done = papermill.execute_notebook(NOTEBOOKS / "explore.ipynb", tmp_path / "done.ipynb",
                                      parameters={"device": "cpu"}, progress_bar=False)
    outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 6
    assert [output.text for output in outputs if output.output_type == "stream"] == []


def test_it_passes_over_what_a_folder_of_ones_own_does_not_tell(tmp_path):
    """Benchmark runs only, and without the peaks that a CPU's allocator does not tell."""
    for record in (ROOT / "runs" / "h200" / "benchmark").glob("small-ctx128-step-fp32-*/record.json"):
        folder = shutil.copytree(record.parent, tmp_path / "runs" / "benchmark" / record.parent.name)
        said = json.loads(record.read_text(encoding="utf-8"))
        said["results"] = {name: value for name, value in said["results"].items() if not name.startswith("peak")}
        (folder / "record.json").write_text(json.dumps(said), encoding="utf-8")
    done = papermill.execute_notebook(NOTEBOOKS / "explore.ipynb", tmp_path / "done.ipynb", progress_bar=False,
                                      parameters={"device": "cpu", "runs": str(tmp_path / "runs")})
    shown = [output.get("data", {}) for cell in done.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in data for data in shown) == 2  # the optimizer's share, and what is measured here
    said = [data["text/markdown"] for data in shown if "text/markdown" in data]
    assert len(said) == 3 and "No captures" in said[0] and "No peaks" in said[1]


def test_no_cell_of_it_is_longer_than_a_screen():
    for cell in nbformat.read(NOTEBOOKS / "explore.ipynb", as_version=4).cells:
        assert len(cell.source.splitlines()) <= 30


def of_readme(call: str) -> dict:
    """What the README's lines of Python that hold a call leave behind."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [lines] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if call in block]
    found: dict = {}
    exec(lines, found)
    return found


def test_the_readmes_lines_run():
    rungs = of_readme("load(")["rungs"]
    assert len(rungs) and set(rungs["size"]) == {"2.7B"}


def test_the_readmes_lines_read_a_capture_of_ones_own(tmp_path, monkeypatch, capsys):
    shutil.copy(ROOT / "tests" / "data" / "nsys" / "sample.sqlite", tmp_path / "mine.sqlite")
    monkeypatch.chdir(tmp_path)
    operations = of_readme("load_trace(")["operations"]
    assert (operations["step"] >= 0).any() and set(operations["family"]) > {"matrix multiply"}
    said = capsys.readouterr().out
    assert all(phase in said for phase in ("forward", "backward", "optimizer"))


def test_a_folder_of_ones_own_is_loaded_with_what_the_report_sets_aside(tmp_path):
    found = {path.parent for path in (ROOT / "runs" / "h200" / "benchmark").glob("small-ctx128*/record.json")}
    for folder in found:
        shutil.copytree(folder, tmp_path / "benchmark" / folder.name)
    tables = load("benchmark", "ladder", runs=tmp_path)
    assert set(tables["benchmark.times"]["run_id"]) == {folder.name for folder in found}
    assert tables["ladder.rungs"].empty


def test_what_cannot_be_loaded_is_said_in_a_sentence(tmp_path):
    with pytest.raises(RecordError, match="no such runs folder"):
        load(runs=tmp_path / "nowhere")
    with pytest.raises(StepscopeError, match="got lunch, but known studies are ladder"):
        load("lunch")


def test_a_brief_table_has_no_empty_column_and_numbers_a_reader_takes_in():
    table = pd.DataFrame({"part": ["a", "b"], "cause": [None, None], "flags": ["", ""], "n": [1, 20_000],
                          "saved_bytes": [2**20, 4202496.0], "error": [2.004912e-07, float("nan")]})
    shown = brief(table, ["error", "part", "saved_bytes", "cause", "n", "flags", "absent"])
    assert shown.to_dict("list") == {"error": ["2.0e\N{NON-BREAKING HYPHEN}7", "–"], "part": ["a", "b"],
                                     "saved (MiB)": ["1.00", "4.01"], "n": ["1", "20,000"]}
    assert brief(table.head(0), ["part"], "None.").data == "None."
    table = pd.DataFrame({"mode": ["forward_backward"], "captured_ms": [1.5], "tokens_per_s": [3265.0]})
    assert brief(table, list(table)).to_dict("list") == {
        "mode": ["forward + backward"], "captured (ms)": ["1.50"], "tokens per s": ["3,265"]}
    with pytest.raises(ValueError, match="9 columns"):
        brief(table, list("abcdefghi"))
