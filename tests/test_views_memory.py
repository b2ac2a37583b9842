"""The memory study's views, recomputed from the files of runs/h200 by code that imports nothing but the views."""

import math
from collections import defaultdict

import pandas as pd
import pytest

from reference_runs import DIMENSIONS, MODES, RUNS, Row, Rows, assert_same, keyed, read_tables
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
    """Return rows by configuration and these columns, each key once."""
    return keyed(rows, (*STEP, *names))


PEAKS = by_step(
    RAW["peaks"].assign(phase=RAW["peaks"].phase.replace({"total": "total"})),
    "mode",
    "phase",
)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("peaks", ["mode", "phase"]),
        ("allocations", ["what", "rank"]),
        ("timeline", ["mode", "event"]),
        ("checkpoints", ["mode", "blocks", "checkpoint_policy"]),
    ],
)
def test_recorded_columns_stay_with_their_rows(name: str, key: list[str]):
    names = [*STEP, *key]
    view, recorded = VIEWS[name], RAW[name]
    shared = [column for column in view if column in recorded]
    frames = [rows[shared].sort_values(names, ignore_index=True) for rows in (view, recorded)]
    pd.testing.assert_frame_equal(*frames, check_dtype=False)


def begins_backward(row: Row) -> bool:
    last = DIMENSIONS[row["size"]][2] - 1
    return row["peak_in"] == "backward" and (pd.isna(row["layer"]) or row["layer"] == last)


def test_peaks_are_recomputed():
    expected = {
        key: {
            "peak_gib": row["peak_gib"],
            "reserved_ratio": row["reserved_gib"] / row["peak_gib"],
            "beyond_formula_bytes": round((row["requested_gib"] - row["predicted_requested_gib"]) * GIB)
            if not math.isnan(row["requested_gib"] - row["predicted_requested_gib"])
            else math.nan,
            "begins_backward": begins_backward(row),
            "mode_precision": f"{MODES[row['mode']]}, {row['precision']}",
        }
        for key, row in PEAKS.items()
    }
    assert_same(by_step(VIEWS["peaks"], "mode", "phase"), expected)


def test_peak_kinds_are_the_columns_of_a_peak():
    expected = {
        (*key, kind): {
            "held_gib": row[column],
            "stage": f"{row['phase']} alone" if row["mode"] == "forward" else row["phase"],
        }
        for key, row in PEAKS.items()
        for kind, column in KINDS.items()
    }
    view = by_step(VIEWS["peak_kinds"], "mode", "phase", "kind")
    assert_same(view, expected)
    for key, row in PEAKS.items():
        if row["status"] == "ok":
            held = sum(view[(*key, kind)]["held_gib"] for kind in KINDS if kind != "all")
            assert held == pytest.approx(row["peak_gib"], rel=1e-9)


def test_stage_peaks_are_recomputed():
    fits = {key: row for key, row in PEAKS.items() if row["status"] == "ok"}
    expected = {
        key[:-1]: {
            "reserved_gib": row["reserved_gib"],
            "peak_in": row["peak_in"],
            "rounding_gib": row["rounding_gib"],
        }
        | {
            f"{stage}_gib": fits.get((*key[:-1], stage), {}).get("peak_gib")
            for stage in ("forward", "loss", "backward", "optimizer")
        }
        for key, row in fits.items()
        if key[-1] == "total"
    }
    assert_same(by_step(VIEWS["stage_peaks"], "mode"), expected)
    highest = VIEWS["stage_peaks"].filter(regex="^(forward|loss|backward|optimizer)_gib$").max(axis=1)
    totals = {key[:-1]: row["peak_gib"] for key, row in fits.items() if key[-1] == "total"}
    assert sorted(highest) == pytest.approx(sorted(totals.values()))


def letters(row: Row) -> dict[str, int]:
    """Return the numbers of elements that a block's tensors have."""
    d, f, _, heads = DIMENSIONS[row["size"]]
    batch, length = row["batch_size"], row["context_length"]
    return {
        "X": batch * length * d,
        "G": batch * length * f,
        "S": batch * heads * length**2 * (row["attention"] == "naive"),
        "n": batch * heads * length,
        "r": batch * length,
        "t": length * d // heads,
        "A": d * d,
        "M": d * f,
        "C": d,
    }


def saved_bytes(row: Row) -> int:
    """Return what a block saves for backward, with autocast's copies of its weights."""
    k = letters(row)
    shared = 4 * k["n"] + 8 * k["r"]
    if row["precision"] == "bf16":
        activations = 34 * k["X"] + 10 * k["G"] + 6 * k["S"] + 4 * k["t"]
        return activations + shared + 8 * k["A"] + 6 * k["M"]
    return 40 * k["X"] + 20 * k["G"] + 8 * k["S"] + shared


def gradient_bytes(row: Row) -> int:
    k = letters(row)
    return 4 * (4 * k["A"] + 3 * k["M"] + 2 * k["C"])


def groups() -> dict[tuple, list[Row]]:
    """Return the groups of allocations of each configuration and kind of allocation."""
    found = defaultdict(list)
    for row in RAW["allocations"].to_dict("records"):
        found[(*(row[name] for name in STEP), row["what"])].append(row)
    return found


def test_allocations_are_recomputed():
    sums = {key: sum(row["mib"] * row["count"] for row in rows) for key, rows in groups().items()}
    expected = {
        (*key, row["rank"]): {
            "each_mib": row["mib"],
            "together_gib": row["mib"] * row["count"] / 1024,
            "sum_share": row["mib"] * row["count"] / sums[key] if "block" in key[-1] else math.nan,
        }
        for key, rows in groups().items()
        for row in rows
    }
    assert_same(by_step(VIEWS["allocations"], "what", "rank"), expected)


def test_block_memory_is_recomputed_and_its_formulas_are_what_was_recorded():
    expected = {}
    for key, rows in groups().items():
        if key[-1] != "saved by a block":
            continue
        gradients = groups()[(*key[:-1], "gradients of a block")]
        saved_mib = sorted((row["mib"] * row["count"] for row in rows), reverse=True)
        gradients_mib = sum(row["mib"] * row["count"] for row in gradients)
        d, f, layers, heads = DIMENSIONS[rows[0]["size"]]
        pairs = rows[0]["batch_size"] * rows[0]["context_length"]
        expected[key[:-1]] = {
            "saved_mib": sum(saved_mib),
            "saved_tensors": sum(row["count"] for row in rows),
            "formula_saved_mib": saved_bytes(rows[0]) / MIB,
            "five_lines_share": sum(saved_mib[:5]) / sum(saved_mib),
            "gradients_mib": gradients_mib,
            "block_parameters": 4 * d * d + 3 * d * f + 2 * d,
            "formula_gradients_mib": gradient_bytes(rows[0]) / MIB,
            "saved_ratio": sum(saved_mib) / gradients_mib,
            "residual_mib": 4 * pairs * d / MIB,
            "scores_mib": 4 * pairs * rows[0]["context_length"] * heads / MIB,
            "num_layers": layers,
            "num_heads": heads,
            "d_model": d,
            "d_ff": f,
        }
    view = VIEWS["block_memory"]
    assert_same(by_step(view), expected)
    assert view.formula_saved_mib.tolist() == pytest.approx(view.saved_mib.tolist(), rel=1e-6)
    assert view.formula_gradients_mib.tolist() == pytest.approx(view.gradients_mib.tolist(), rel=1e-9)


REGIONS = {  # of the operations that save anything
    "ffn": ["second multiplication", "first multiplication", "sigmoid", "down_proj", "gate_proj"],
    "attention.value": ["attention weights"],
    "attention.softmax": ["exponentials", "division"],
    "attention.scores": ["q @ k"],
    "attention.qkv": ["q_proj"],
    "attention.output": ["o_proj"],
    "norm": ["norms: input", "norms: multiplication"],
}


def test_block_operations_save_what_the_lines_of_their_module_were_recorded_to_save():
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
        assert sorted(rows["rank"]) == [*range(1, len(rows) + 1)]
        by_rank = rows.sort_values("rank").saved_mib.tolist()
        assert by_rank == sorted(by_rank, reverse=True)


CHECKPOINTS = by_step(RAW["checkpoints"], "mode", "blocks", "checkpoint_policy")


def expected_checkpoint(key: tuple, row: Row) -> Row:
    without = CHECKPOINTS.get((*key[:-1], "none"), {})
    single = CHECKPOINTS.get((*key[:-1], "every 1"), {})
    number = row["blocks_per_checkpoint"]
    input_mib = 4 * letters(row)["X"] / MIB
    saved_mib, gradients_mib = saved_bytes(row) / MIB, gradient_bytes(row) / MIB
    added_gib = math.nan
    if number > 1:
        added_gib = (row["peak_gib"] - single["peak_gib"]) / (number - 1)
    return {
        "mode_name": MODES[row["mode"]],
        "per_checkpoint": "" if math.isnan(number) else f"{number:.0f}" if number else "none",
        "peak_ratio": row["peak_gib"] / without.get("peak_gib", math.nan),
        "gpu_ratio": row["gpu_ms"] / without.get("gpu_ms", math.nan),
        "beyond_state_gib": row["peak_gib"] - row["state_gib"],
        "formula_saved_gib": row["expected_saved_gib"],
        "input_mib": input_mib,
        "block_saved_mib": saved_mib,
        "block_gradients_mib": gradients_mib,
        "best_group": math.sqrt(row["blocks"] * input_mib / saved_mib),
        "added_gib": added_gib,
        "formula_added_gib": (saved_mib - gradients_mib) / 1024,
    }


def test_checkpoints_are_recomputed():
    expected = {key: expected_checkpoint(key, row) for key, row in CHECKPOINTS.items()}
    assert_same(by_step(VIEWS["checkpoints"], "mode", "blocks", "checkpoint_policy"), expected)


def test_size_without_a_name_has_no_formulas():
    renamed = {f"memory.{name}": RAW[name].assign(size="custom") for name in ("checkpoints", "allocations")}
    one = {name: rows[rows.run_id == rows.run_id.iloc[-1]] for name, rows in renamed.items()}
    views = Views(one)
    assert views["checkpoints"].peak_ratio.notna().any() and views["checkpoints"].best_group.isna().all()
    assert (
        views["block_memory"].saved_mib.notna().all() and views["block_memory"].formula_saved_mib.isna().all()
    )


def test_best_group_has_the_least_of_inputs_and_saved_tensors():
    """The square root is where the derivative is zero; compare it with a search."""
    for row in VIEWS["checkpoints"].to_dict("records"):
        sizes = [index / 1000 for index in range(1, 5000)]
        sums = [row["input_mib"] * row["blocks"] / size + row["block_saved_mib"] * size for size in sizes]
        assert sizes[sums.index(min(sums))] == pytest.approx(row["best_group"], abs=1e-3)


SAVINGS = {
    "bf16 autocast": ({"precision": "fp32"}, {"precision": "bf16"}),
    "fused attention and AdamW": (
        {"attention": "naive", "optimizer": "foreach"},
        {"attention": "sdpa", "optimizer": "fused"},
    ),
    "expandable segments": ({"expandable_segments": False}, {"expandable_segments": True}),
}


def test_memory_savings_pair_configurations_that_differ_in_the_change_alone():
    steps = {key[: len(STEP)]: row for key, row in PEAKS.items() if key[len(STEP) :] == ("step", "total")}
    expected = {}
    for change, (before, after) in SAVINGS.items():
        measured = "reserved_gib" if change == "expandable segments" else "peak_gib"
        for key, row in steps.items():
            changed = steps.get(tuple((row | after)[name] for name in STEP))
            if changed and all(row[name] == value for name, value in before.items()):
                expected[(*key, change)] = (row[measured], changed[measured])
    for key, row in CHECKPOINTS.items():
        *step, mode, blocks, policy = key
        if mode == "forward_backward" and policy == "every 1" and blocks == DIMENSIONS[row["size"]][2]:
            without = CHECKPOINTS[(*key[:-1], "none")]
            expected[(*step, "a checkpoint around each block")] = (without["peak_gib"], row["peak_gib"])
    measures = {"expandable segments": "reserved, full step"}
    measures |= {"a checkpoint around each block": "peak, forward + backward"}
    pairs = {
        key: {
            "before_gib": before,
            "after_gib": after,
            "less_share": 1 - after / before,
            "measure": measures.get(key[-1], "peak, full step"),
        }
        for key, (before, after) in expected.items()
        if not math.isnan(before + after)
    }
    assert_same(by_step(VIEWS["memory_savings"], "change"), pairs)


def test_predictions_have_the_recorded_prediction_and_outcome():
    recorded = {key[: len(STEP)]: row for key, row in PEAKS.items() if key[len(STEP) :] == ("step", "total")}
    view = by_step(VIEWS["predictions"])
    compared = view.keys() & recorded.keys()
    assert len(compared) == sum(key[5:] == ("naive", "foreach", False) for key in recorded)
    for key in compared:
        assert view[key]["predicted_gib"] == pytest.approx(recorded[key]["predicted_gib"])
        assert view[key]["runs_out"] == (recorded[key]["status"] == "oom")
    assert not any(row["runs_out"] for key, row in view.items() if key not in recorded)


def test_predictions_are_recomputed():
    for row in VIEWS["predictions"].to_dict("records"):
        d, f, layers, heads = DIMENSIONS[row["size"]]
        assert (row["d_model"], row["d_ff"], row["num_layers"], row["num_heads"]) == (d, f, layers, heads)
        parameters = 2 * row["vocab_size"] * d + layers * (4 * d * d + 3 * d * f + 2 * d) + d
        held = sum(row[column] for kind, column in KINDS.items() if kind != "all")
        growing = row["saved_for_backward_gib"]
        if row["peak_in"] != "optimizer":
            growing += row["temporaries_gib"]
        assert row["parameters"] == parameters
        assert row["state_gib"] == pytest.approx(16 * parameters / GIB)
        assert row["predicted_gib"] == pytest.approx(held)
        assert row["growing_share"] == pytest.approx(growing / held)


def test_snapshots_exist():
    paths = VIEWS["snapshots"].path.tolist()
    assert paths and all((RUNS / path).is_file() for path in paths)
