"""Test the memory study's views against an independent recomputation from the files in runs/h200."""

import math
from collections import defaultdict

import pandas as pd
import pytest

from reference_runs import DIMENSIONS, RUNS, Row, Rows, assert_same, keyed, read_tables
from stepscope.views import Views

STEP = [
    "size",
    "context_length",
    "batch_size",
    "vocab_size",
    "precision",
    "attention",
    "optimizer",
    "expandable_segments",
]
KINDS = {
    "weights": "weights_gib",
    "gradients": "gradients_gib",
    "optimizer state": "optimizer_state_gib",
    "saved for backward": "saved_for_backward_gib",
    "autocast weight cache": "autocast_weight_cache_gib",
    "temporaries": "temporaries_gib",
    "workspaces": "workspaces_gib",
    "other": "other_gib",
    "rounding": "rounding_gib",
    "all": "peak_gib",
}
MIB, GIB = 2**20, 2**30


TABLES = read_tables({"memory": STEP})
VIEWS = Views(TABLES)
RAW = {name.removeprefix("memory."): table for name, table in TABLES.items()}


def by_step(rows: pd.DataFrame, *names: str) -> Rows:
    """Return the rows, keyed by their configuration and these columns; assert that the keys are unique."""
    return keyed(rows, (*STEP, *names))


PEAKS = by_step(RAW["peaks"], "mode", "phase")


def begins_backward(row: Row) -> bool:
    last = DIMENSIONS[row["size"]][2] - 1
    return row["peak_in"] == "backward" and (pd.isna(row["layer"]) or row["layer"] == last)


def test_peaks_match_recomputation():
    expected = {
        key: {
            "peak_gib": row["peak_gib"],
            "reserved_ratio": row["reserved_gib"] / row["peak_gib"],
            "begins_backward": begins_backward(row),
        }
        for key, row in PEAKS.items()
    }
    assert_same(by_step(VIEWS["peaks"], "mode", "phase"), expected)


def test_peak_kinds_sum_to_the_peak():
    view = by_step(VIEWS["peak_kinds"], "mode", "phase", "kind")
    expected = {
        (*key, kind): {"held_gib": row[column]}
        for key, row in PEAKS.items()
        for kind, column in KINDS.items()
    }
    assert_same(view, expected)
    for key, row in PEAKS.items():
        if row["status"] == "ok":
            held = sum(view[(*key, kind)]["held_gib"] for kind in KINDS if kind != "all")
            assert held == pytest.approx(row["peak_gib"], rel=1e-9)


def test_highest_stage_peak_matches_the_peak_of_the_step():
    stages = ("forward", "loss", "backward", "optimizer")
    fits = {key: row["peak_gib"] for key, row in PEAKS.items() if row["status"] == "ok"}
    totals = {key[:-1]: peak for key, peak in fits.items() if key[-1] == "total"}
    expected = {key: {f"{stage}_gib": fits.get((*key, stage)) for stage in stages} for key in totals}
    assert_same(by_step(VIEWS["stage_peaks"], "mode"), expected)
    highest = {key: max(filter(None, row.values())) for key, row in expected.items()}
    assert highest == pytest.approx(totals)


def groups() -> dict[tuple, list[Row]]:
    """Return the allocation groups, keyed by configuration and kind of allocation."""
    result = defaultdict(list)
    for row in RAW["allocations"].to_dict("records"):
        result[(*(row[name] for name in STEP), row["what"])].append(row)
    return result


def test_block_memory_formulas_match_recorded_sizes():
    view = by_step(VIEWS["block_memory"])
    recorded = {key[:-1]: rows for key, rows in groups().items() if key[-1] == "saved by a block"}
    assert view.keys() == recorded.keys()
    for key, rows in recorded.items():
        gradients = groups()[(*key, "gradients of a block")]
        saved_mib = sum(row["mib"] * row["count"] for row in rows)
        gradients_mib = sum(row["mib"] * row["count"] for row in gradients)
        assert view[key]["saved_mib"] == pytest.approx(saved_mib)
        assert view[key]["gradients_mib"] == pytest.approx(gradients_mib)
        formulas = [view[key]["formula_saved_mib"], view[key]["formula_gradients_mib"]]
        assert formulas == pytest.approx([saved_mib, gradients_mib], rel=1e-6)
        d, f, _, heads = DIMENSIONS[rows[0]["size"]]
        tokens, context_length = rows[0]["batch_size"] * rows[0]["context_length"], rows[0]["context_length"]
        sizes = {
            "saved_ratio": saved_mib / gradients_mib,
            "block_parameters": 4 * d * d + 3 * d * f + 2 * d,
            "residual_mib": 4 * tokens * d / 2**20,
            "scores_mib": 4 * tokens * context_length * heads / 2**20,
        }
        assert {name: view[key][name] for name in sizes} == pytest.approx(sizes)


# prefixes of the names of operations that save tensors, keyed by module
REGIONS = {
    "ffn": ["second multiplication", "first multiplication", "sigmoid", "down_proj", "gate_proj"],
    "attention.value": ["attention weights"],
    "attention.softmax": ["exponentials", "division"],
    "attention.scores": ["q @ k"],
    "attention.qkv": ["q_proj"],
    "attention.output": ["o_proj"],
    "norm": ["norms: input", "norms: multiplication"],
}


def test_sizes_of_block_operations_sum_to_the_recorded_size_of_their_module():
    operations = VIEWS["block_operations"]
    configurations = operations.groupby(STEP)
    assert len(configurations) == sum(
        key[4] == "fp32" and key[5] == "naive" for key in by_step(VIEWS["block_memory"])
    )
    for key, rows in configurations:
        recorded = defaultdict(float)
        for row in groups()[(*key, "saved by a block")]:
            recorded[row["region"]] += row["mib"] * row["count"]
        by_name = rows.set_index("operation").saved_mib
        for region, starts in REGIONS.items():
            named = [name for name in by_name.index if name.startswith(tuple(starts))]
            assert by_name[named].sum() == pytest.approx(recorded[region]), region
        assert by_name.sum() == pytest.approx(sum(recorded.values()))
        assert rows.saved_share.tolist() == pytest.approx((by_name / by_name.sum()).tolist())
        by_rank = rows.sort_values("rank").saved_mib.tolist()
        assert by_rank == sorted(by_rank, reverse=True)


CHECKPOINTS = by_step(RAW["checkpoints"], "mode", "blocks", "checkpoint_policy")


def test_checkpoints_match_recomputation():
    blocks = {(*key[:3], *key[4:6]): row for key, row in by_step(VIEWS["block_memory"]).items()}
    view = by_step(VIEWS["checkpoints"], "mode", "blocks", "checkpoint_policy")
    assert view.keys() == CHECKPOINTS.keys()
    for key, row in CHECKPOINTS.items():
        without = CHECKPOINTS.get((*key[:-1], "none"), {})
        ratios = [row[name] / without.get(name, math.nan) for name in ("peak_gib", "gpu_ms")]
        ratios.append(row["gpu_ms"] / row["wall_ms"])
        shown = [view[key][name] for name in ("peak_ratio", "gpu_ratio", "gpu_wall_ratio")]
        assert shown == pytest.approx(ratios, nan_ok=True)
        block = blocks.get((*key[:3], *key[4:6]))
        if block and row["blocks_per_checkpoint"] > 1:
            single, number = CHECKPOINTS[(*key[:-1], "every 1")], row["blocks_per_checkpoint"]
            added_gib = (row["peak_gib"] - single["peak_gib"]) / (number - 1)
            formula_mib = block["saved_mib"] - block["gradients_mib"]
            expected = [added_gib, formula_mib / 1024]
            assert [view[key]["added_gib"], view[key]["formula_added_gib"]] == pytest.approx(expected)
            input_mib = 4 * key[1] * key[2] * DIMENSIONS[key[0]][0] / MIB
            best_group = math.sqrt(row["blocks"] * input_mib / block["saved_mib"])
            assert view[key]["best_group"] == pytest.approx(best_group)


def test_custom_size_gets_no_formulas():
    renamed = {f"memory.{name}": RAW[name].assign(size="custom") for name in ("checkpoints", "allocations")}
    one = {name: rows[rows.run_id == rows.run_id.iloc[-1]] for name, rows in renamed.items()}
    views = Views(one)
    assert views["checkpoints"].peak_ratio.notna().any() and views["checkpoints"].best_group.isna().all()
    assert (
        views["block_memory"].saved_mib.notna().all() and views["block_memory"].formula_saved_mib.isna().all()
    )


def test_predictions_match_the_records_and_equal_the_sum_of_their_kinds():
    recorded = {key[: len(STEP)]: row for key, row in PEAKS.items() if key[len(STEP) :] == ("step", "total")}
    view = by_step(VIEWS["predictions"])
    compared = view.keys() & recorded.keys()
    assert len(compared) == sum(key[5:] == ("naive", "foreach", False) for key in recorded)
    for key, row in view.items():
        d, f, layers, _ = DIMENSIONS[row["size"]]
        parameters = 2 * row["vocab_size"] * d + layers * (4 * d * d + 3 * d * f + 2 * d) + d
        held_gib = sum(row[column] for kind, column in KINDS.items() if kind != "all")
        assert row["parameters"] == parameters and row["state_gib"] == pytest.approx(16 * parameters / GIB)
        assert row["predicted_gib"] == pytest.approx(held_gib)
        assert row["runs_out"] == (key in recorded and recorded[key]["status"] == "oom")
        if key in compared:
            assert row["predicted_gib"] == pytest.approx(recorded[key]["predicted_gib"])


def test_linked_snapshots_exist():
    paths = VIEWS["snapshots"].path.tolist()
    assert paths and all((RUNS / path).is_file() for path in paths)
