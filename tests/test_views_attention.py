"""Test the attention study's views against an independent recomputation from the files in runs/h200."""

import math

import pytest

from reference_runs import NAN, Row, assert_same, is_same, keyed, read_tables
from stepscope.views import Views

SETTING = ["d_model", "precision", "batch_size"]
CASE = [*SETTING, "implementation", "context_length"]


TABLES = read_tables({"attention": SETTING})
RECORDED = TABLES["attention.cases"]
CONSISTENT = RECORDED[RECORDED.inconsistent.fillna("") == ""]
CHECKS = TABLES["attention.checks"]
VIEWS = Views({"attention.cases": CONSISTENT, "attention.checks": CHECKS})


PHASES = keyed(CONSISTENT, [*CASE, "phase"])


def written(value: float) -> str:
    """Format a time in milliseconds with three significant digits."""
    rounded = float(f"{value:.2e}")
    decimals = 2 - math.floor(math.log10(rounded))
    return f"{value:,.{max(decimals, 0)}f}"


def quartiles(row: Row) -> str:
    if math.isnan(row["wall_ms"]):
        return ""
    return f"{written(row['wall_q1_ms'])} to {written(row['wall_q3_ms'])}"


def wall_text(row: Row) -> str:
    if math.isnan(row["wall_ms"]):
        return "–"
    best = f", at best {written(row['wall_min_ms'])}" if row["gpu_ms"] < 0.95 * row["wall_ms"] else ""
    return f"{written(row['wall_ms'])} ({quartiles(row)}){best}"


def test_phases_match_recomputation():
    view = keyed(VIEWS["attention_phases"], [*CASE, "phase"])
    expected = {
        key: {
            "wall_text": wall_text(row),
            "gpu_wall_ratio": row["gpu_ms"] / row["wall_ms"],
            "peak_gib": row["peak_mib"] / 1024,
        }
        for key, row in PHASES.items()
    }
    assert_same(view, expected)
    shown = {key: row["quartiles"] or "" for key, row in view.items()}
    assert shown == {key: quartiles(row) for key, row in PHASES.items()}


def expected_outcome(key: tuple, row: Row) -> str:
    """Return the expected text for an out-of-memory error: its phase and reason, or "" if there was no error.

    The phase is ``backward`` if the forward pass would fit. The forward pass's peak memory is assumed to grow with
    the square of the context length.
    """
    if row["status"] != "oom":
        return ""
    *case, length, _ = key
    ran = {
        other[4]: PHASES[other]["peak_mib"]
        for other in PHASES
        if [*other[:4]] == case and other[5] == "forward" and PHASES[other]["peak_mib"] > 0
    }
    longest = max(ran, default=1)
    need_gib = ran.get(longest, NAN) * (length / longest) ** 2 / 1024
    forward_fits = need_gib <= row["device_gib"]
    if row["reason"].endswith(": not compiled"):
        reason = row["reason"].removesuffix(": not compiled")
        return f"not run: {reason}" + ", though forward alone would fit" * forward_fits
    return f"in {'backward' if forward_fits else 'forward'}: {row['reason']}"


def test_out_of_memory_column_states_phase_and_reason():
    view = keyed(VIEWS["attention_phases"], [*CASE, "phase"])
    outcomes = {key: expected_outcome(key, row) for key, row in PHASES.items()}
    assert {key: row["out_of_memory"] for key, row in view.items()} == outcomes
    assert {text.partition(":")[0] for text in outcomes.values()} == {
        "",
        "in forward",
        "in backward",
        "not run",
    }


def both(key: tuple, column: str) -> float:
    """Return the sum of a column's values for forward and backward, or NaN if either value is unknown."""
    return sum(PHASES.get((*key, phase), {}).get(column, NAN) for phase in ("forward", "backward"))


CASES = {key[:-1] for key in PHASES}
GPU_MS = {key: both(key, "gpu_ms") for key in CASES}


def expected_case(key: tuple) -> Row:
    _, precision, batch, _, length = key
    others = sorted(
        ms for other, ms in GPU_MS.items() if other[:3] == key[:3] and other[4] == length and ms > 0
    )
    naive = (*key[:3], "naive", length)
    gpu_ms, forward = GPU_MS[key], PHASES.get((*key, "forward"), {})
    backward = PHASES.get((*key, "backward"), {})
    is_fastest = bool(others) and gpu_ms == others[0]
    return {
        "status": (backward or forward)["status"],
        "wall_ms": both(key, "wall_ms"),
        "gpu_ms": gpu_ms,
        "gpu_speedup": GPU_MS.get(naive, NAN) / gpu_ms,
        "lead_speedup": others[1] / others[0] if is_fastest and len(others) > 1 else NAN,
        "rank": others.index(gpu_ms) + 1 if gpu_ms > 0 else NAN,
        "square_gib": batch * length**2 * (2 if precision == "bf16" else 4) / 2**30,
        "row_mib": batch * length * 4 / 2**20,
    }


def test_cases_match_recomputation():
    view = keyed(VIEWS["attention"], CASE)
    assert_same(view, {key: expected_case(key) for key in CASES})


def test_total_times_are_omitted_when_a_phase_is_inconsistent():
    marked = keyed(RECORDED[RECORDED.inconsistent.fillna("") != ""], [*CASE, "phase"])
    view = keyed(VIEWS["attention"], CASE)
    assert marked
    for key in marked:
        assert math.isnan(view[key[:-1]]["gpu_ms"]) and math.isnan(view[key[:-1]]["wall_ms"])


def test_compiled_attention_is_compared_with_naive_wherever_both_ran():
    view = keyed(VIEWS["compiled_attention"], [*SETTING, "context_length"])
    settings = {(*key[:3], key[4]) for key in CASES if key[3] == "naive"}
    assert view.keys() == settings & {(*key[:3], key[4]) for key in CASES if key[3] == "compiled"}
    for key, row in view.items():
        naive, compiled = ((*key[:3], name, key[3]) for name in ("naive", "compiled"))
        assert row["compiled_speedup"] == pytest.approx(GPU_MS[naive] / GPU_MS[compiled], nan_ok=True)
        assert row["naive_forward"] == wall_text(PHASES[*naive, "forward"])
        assert is_same(row["compiled_in_use_mib"], PHASES[*compiled, "backward"]["in_use_mib"])


def test_parts_sum_to_the_predicted_peak():
    view = VIEWS["attention_parts"]
    predicted = keyed(VIEWS["attention"], CASE)
    assert len(view[view.part == "total"]) == len(CASES)
    for key, parts in view[view.part != "total"].groupby(CASE):
        assert parts.part_gib.sum() == pytest.approx(predicted[key]["predicted_gib"])


def test_attention_errors_are_the_maximum_over_all_checks():
    view = keyed(VIEWS["attention_errors"], ["precision", "implementation"])
    expected = {}
    columns = ["output_error", "dq_error", "dk_error", "dv_error"]
    for key, rows in CHECKS.groupby(["precision", "implementation"]):
        worst = rows[columns].to_numpy().max()
        allowed = rows.allowed_error.min()
        expected[key] = {"worst_error": worst, "allowed_error": allowed, "cases": len(rows)}
    assert_same(view, expected)
