"""Test that schema 3 records load under the current names, and that loading them doesn't rewrite any files."""

import hashlib
import io
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from stepscope.config import configure
from stepscope.report.load import read
from stepscope.runs import schema3
from stepscope.runs.store import Store
from stepscope.runs.sweep import SweepError, SweepOptions, run_sweep

# one run of each study, measured by version 0.2, without notebooks
FOLDER = Path(__file__).parent / "data" / "schema3"


def documents(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*/*/record.json"))]


def digest(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def test_schema_3_folder_loads_under_new_names_and_stays_unchanged():
    before = digest(FOLDER)
    loaded = read(Store(FOLDER))
    assert not loaded.errors
    assert len(loaded.records) + len(loaded.replaced) == len(documents(FOLDER))
    old_names = {*schema3.COLUMNS, *schema3.RESULTS}
    for name, table in loaded.tables.items():
        assert not old_names & {*table.columns}, name
    assert "total" in set(loaded.tables["benchmark.times"]["phase"])
    assert "nsys.times" in loaded.tables and "profiled" in loaded.tables["nsys.times"]
    assert digest(FOLDER) == before


def test_schema_3_values_are_unchanged_under_new_names():
    """Compare every loaded value with the value at the same position in the file; only names may differ."""
    for document in documents(FOLDER):
        for table in document["tables"].values():
            if table["rows"] is None:
                continue
            study = document["study"]
            path = FOLDER / study / document["run_id"] / table["file"]
            raw = pd.read_parquet(path)
            upgraded = schema3.upgrade_table(study, raw)
            assert upgraded.shape == raw.shape and upgraded.columns.is_unique, path
            for old, new in zip(raw.columns, upgraded.columns):
                names = schema3.COLUMN_VALUES.get(new, {})
                expected = [names.get(value, value) if names else value for value in raw[old]]
                pd.testing.assert_series_equal(
                    upgraded[new], pd.Series(expected, name=new), check_dtype=False, check_index=False
                )


def test_schema_3_run_ids_are_derived_from_the_old_names():
    for document in documents(FOLDER):
        config = configure(**schema3.upgrade_record(document)["config"])
        assert schema3.run_id(config) == document["run_id"]


def test_old_names_map_one_to_one_to_new_names():
    tables = [
        *schema3.CONFIG_FIELDS.values(),
        *schema3.STUDY_COLUMNS.values(),
        *schema3.TABLES.values(),
        *schema3.COLUMN_VALUES.values(),
        schema3.COLUMNS,
        schema3.RESULTS,
    ]
    for names in tables:
        assert len({*names.values()}) == len(names)
        assert not {*names} & {*names.values()}


def test_schema_3_record_with_an_altered_configuration_is_rejected(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "runs")
    path = next((tmp_path / "runs" / "ladder").glob("*/record.json"))
    document = json.loads(path.read_text())
    document["config"]["optimizations"] = document["config"]["optimizations"][:-1]
    path.write_text(json.dumps(document))
    _, errors = Store(tmp_path / "runs").records()
    assert len(errors) == 1 and "contains the record of another run" in str(errors[0])


@pytest.mark.parametrize(
    "field, value",
    [("config", 3), ("config", {"optimizations": [["fused"], None]}), ("study", ["nsys"]), ("tables", [])],
)
def test_malformed_schema_3_record_gives_a_one_line_error(tmp_path, field, value):
    shutil.copytree(FOLDER, tmp_path / "runs")
    path = next((tmp_path / "runs" / "ladder").glob("*/record.json"))
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {field: value}))
    _, errors = Store(tmp_path / "runs").records()
    assert len(errors) == 1 and "\n" not in str(errors[0])


def test_sweep_rejects_a_schema_3_folder_without_changes(tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(FOLDER, runs)
    before = digest(runs)
    grid = {"study": "attention", "fixed": {"d_model": 16, "device": "cpu", "context_lengths": [8]}}
    with pytest.raises(SweepError, match="schema 3.*choose another --runs folder"):
        run_sweep([grid], Store(runs), SweepOptions(), Console(file=io.StringIO()))
    assert digest(runs) == before
