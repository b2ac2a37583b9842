"""Read the files in runs/h200 without importing the package; compare views with the values in the files."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

RUNS = Path(__file__).parents[1] / "runs" / "h200"
if not RUNS.is_dir():
    pytest.skip("no reference runs", allow_module_level=True)
# width, feed-forward width, layers, heads
DIMENSIONS = {
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
    "xl": (1600, 6400, 48, 25),
    "2.7B": (2560, 10240, 32, 32),
    "10B": (4608, 12288, 50, 36),
}
MODES = {"forward": "forward", "forward_backward": "forward + backward", "step": "full step"}
NAN = math.nan
Row = dict[str, Any]
Rows = dict[tuple, Row]


def read_records(folder: Path = RUNS) -> list[tuple[Path, Row]]:
    """Return each run's folder and record."""
    paths = sorted(folder.glob("*/*/record.json"))
    return [(path.parent, json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def read_tables(studies: dict[str, Iterable[str]], folder: Path = RUNS) -> dict[str, pd.DataFrame]:
    """Return the studies' tables and a table of their runs; the given configuration fields become columns."""
    frames = defaultdict(list)
    for place, record in read_records(folder):
        study = record["study"]
        if study not in studies:
            continue
        config = {field: record["config"].get(field, 0) for field in studies[study]}
        config["run_id"] = record["run_id"]
        device = record["machine"]["device_name"]
        run = record["config"] | config | {"study": study, "status": record["status"], "device": device}
        frames["runs"].append(pd.DataFrame([run]))
        frames[f"{study}.results"].append(pd.DataFrame([config | record["results"]]))
        for name, table in record["tables"].items():
            if table["file"].endswith(".parquet"):
                rows = pd.read_parquet(place / table["file"])
                added = {field: value for field, value in config.items() if field not in rows}
                frames[f"{study}.{name}"].append(rows.assign(**added))
    return {name: pd.concat(parts, ignore_index=True) for name, parts in frames.items()}


def keyed(rows: pd.DataFrame, key: Iterable[str]) -> Rows:
    """Return the rows, keyed by their values in these columns; assert that the keys are unique."""
    names = [*key]
    found = {tuple(row[name] for name in names): row for row in rows.to_dict("records")}
    assert len(found) == len(rows)
    return found


def is_same(shown: Any, expected: Any) -> bool:
    if isinstance(shown, str) or isinstance(expected, str):
        return shown == expected
    if pd.isna(shown) or pd.isna(expected):
        return bool(pd.isna(shown) and pd.isna(expected))
    return shown == expected or math.isclose(shown, expected, rel_tol=1e-9, abs_tol=1e-12)


def assert_same(shown: Rows, expected: Rows) -> None:
    """Assert that ``shown`` has the same keys as ``expected`` and, for each key, all expected values."""
    assert shown.keys() == expected.keys()
    wrong = [
        (key, column, shown[key][column], value)
        for key, row in expected.items()
        for column, value in row.items()
        if not is_same(shown[key][column], value)
    ]
    assert not wrong[:5]
