"""Read the files in runs/h200 without importing the package, and compare views with the values in the files."""

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
# The schema 3 names that versions from 0.3 on have replaced, repeated here on purpose, because the views' tests
# share no code with the package.
COLUMNS = {
    "unsteady": "inconsistent",
    "step_j": "energy_per_step_j",
    "mfu_measured": "mfu_vs_measured_peak",
    "mfu_at_clock": "mfu_clock_adjusted",
    "moved_ms": "memory_traffic_ms",
    "bound_ms": "lower_bound_ms",
    "family": "kernel_category",
    "sequence": "context_length",
    "asked_gib": "requested_gib",
    "captured": "profiled",
}
CONFIG_FIELDS = {"keep_snapshot": "save_snapshot"}
RESULTS = {
    "unsteady": "inconsistent",
    "kept_up_tflops": "sustained_tflops",
    "kept_up_clock_mhz": "sustained_clock_mhz",
    "kept_up_power_w": "sustained_power_w",
}
VALUES = {
    "whole": "total",
    "fused": "fused_adamw",
    "blocks": "compiled_blocks",
    "chunked": "chunked_loss",
    "without_blocks": "without_compiled_blocks",
    "hugging_face_graphs": "hugging_face_reduce_overhead",
    "hugging_face_causal": "hugging_face_no_mask",
    "hugging_face_captured": "hugging_face_no_mask_cuda_graph",
    "from the start": "from the input",
    "halved": "recursive",
}
RENAMED_VALUES_OF = ("phase", "optimization", "checkpoint_policy")
MODES = {"forward": "forward", "forward_backward": "forward + backward", "step": "full step"}
NAN = math.nan
Row = dict[str, Any]
Rows = dict[tuple, Row]


def read_records(folder: Path = RUNS) -> list[tuple[Path, Row]]:
    """Return each run's folder and record."""
    paths = sorted(folder.glob("*/*/record.json"))
    return [(path.parent, json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def read_tables(studies: dict[str, Iterable[str]], folder: Path = RUNS) -> dict[str, pd.DataFrame]:
    """Return these studies' tables, with these fields of each run's configuration, and the table of runs."""
    frames = defaultdict(list)
    for place, record in read_records(folder):
        study = record["study"]
        if study not in studies:
            continue
        config = {field: record["config"].get(field, 0) for field in studies[study]}
        config["run_id"] = record["run_id"]
        device = record["machine"]["device_name"]
        renamed = {CONFIG_FIELDS.get(name, name): value for name, value in record["config"].items()}
        run = renamed | config | {"study": study, "status": record["status"], "device": device}
        frames["runs"].append(pd.DataFrame([run]))
        results = {RESULTS.get(name, name): value for name, value in record["results"].items()}
        frames[f"{study}.results"].append(pd.DataFrame([config | results]))
        for name, table in record["tables"].items():
            if table["file"].endswith(".parquet"):
                rows = read_table(place / table["file"])
                name = "times" if (study, name) == ("nsys", "clocks") else name
                added = {field: value for field, value in config.items() if field not in rows}
                frames[f"{study}.{name}"].append(rows.assign(**added))
    return {name: pd.concat(parts, ignore_index=True) for name, parts in frames.items()}


def read_table(path: Path) -> pd.DataFrame:
    """Read a schema 3 table under today's names."""
    rows = pd.read_parquet(path).rename(columns=COLUMNS)
    for column in RENAMED_VALUES_OF:
        if column in rows:
            rows[column] = rows[column].replace(VALUES)
    return rows


def keyed(rows: pd.DataFrame, key: Iterable[str]) -> Rows:
    """Return rows keyed by the values of these columns, which must be unique."""
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
    """Check that both sides contain the same rows, and that the expected columns match in all of them."""
    assert shown.keys() == expected.keys()
    wrong = [
        (key, column, shown[key][column], value)
        for key, row in expected.items()
        for column, value in row.items()
        if not is_same(shown[key][column], value)
    ]
    assert not wrong[:5]
