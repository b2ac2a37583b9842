"""Test the mixed-precision study's views against an independent recomputation from the files in runs/h200."""

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from reference_runs import NAN, Row, assert_same, keyed, read_tables
from stepscope.views import Views

CONFIG = ("size", "context_length", "batch_size", "vocab_size", "attention", "compile", "optimizer")
CATEGORIES = {"matrix multiply": "matmul", "elementwise": "elementwise", "optimizer": "optimizer"}
TABLES = read_tables({"mixed_precision": CONFIG})
VIEWS = Views(TABLES)
RAW = {name.partition(".")[2]: table.to_dict("records") for name, table in TABLES.items()}


def of(row: Row, *names: str) -> tuple:
    return tuple(row[name] for name in (*CONFIG, *names))


def experiment(name: str, *names: str) -> dict[tuple, Any]:
    """Return the values of an experiment, keyed by configuration and the fields ``names``."""
    rows = [row for row in RAW["numerics"] if row["experiment"] == name]
    column = "dtype" if name == "toy" else "value"
    result = {of(row, *names): row[column] for row in rows}
    assert len(result) == len(rows) > 0
    return result


def kernel_times() -> dict[tuple, Counter]:
    """Return the GPU time in ms of each kernel category, keyed by configuration, precision and mode."""
    result = defaultdict(Counter)
    for row in RAW["operations"]:
        casts = re.search(r"b?float16_copy_kernel|direct_copy_kernel.*LoadWithCast", row["name"])
        category = "cast" if casts else CATEGORIES.get(row["kernel_category"], "other")
        result[of(row, "precision", "mode")][category] += row["gpu_ms"]
    return result


def is_launch_bound(row: Row) -> bool:
    return bool(row["gpu_ms"] / row["wall_ms"] < 0.95 and row["enqueue_ms"] > row["gpu_ms"])


def gains() -> dict[tuple, Row]:
    totals = {of(row, "precision", "mode"): row for row in RAW["times"] if row["phase"] == "total"}
    kernels, result = kernel_times(), {}
    for key, row in totals.items():
        *config, precision, mode = key
        exact = (*config, "fp32", mode)
        if precision != "fp32":
            result[key] = gain(row, totals[exact], kernels[key], kernels[exact])
    return result


def gain(low: Row, exact: Row, kernels: Counter, exact_kernels: Counter) -> Row:
    others = kernels.total() - kernels["matmul"]
    exact_others = exact_kernels.total() - exact_kernels["matmul"]
    return {
        "gpu_speedup": exact["gpu_ms"] / low["gpu_ms"],
        "launch_bound": is_launch_bound(low),
        "peak_ratio": low["peak_gib"] / exact["peak_gib"],
        "matmul_speedup": exact_kernels["matmul"] / kernels["matmul"],
        "other_speedup": exact_others / others,
        "cast_share": kernels["cast"] / kernels.total(),
    }


def outside(deviation: float, low: float, high: float) -> float:
    """Return the fraction of normally distributed values whose magnitude is below ``low`` or above ``high``."""
    normal = statistics.NormalDist(0, deviation)
    return (2 * normal.cdf(low) - 1) + 2 * normal.cdf(-high)


def norms() -> dict[tuple, Row]:
    errors = experiment("norm error", "case", "quantity", "at")
    lost, result = experiment("norm lost", "case", "quantity", "at"), {}
    for key, error in errors.items():
        *_, precision, part, scale = key
        of_part = {
            "mean": (scale / 32, 2**-25, 65_520),
            "squares": (scale, 2**-12.5, math.sqrt(65_520)),
        }
        limits = of_part.get(part) if precision == "fp16" else None
        result[key] = {
            "error": error,
            "lost_share": lost[key],
            "is_lost": lost[key] > 0.001,
            "expected_lost_share": outside(*limits) if limits else NAN,
        }
    return result


def norm_parts() -> dict[tuple, Row]:
    lost, expected = defaultdict(list), defaultdict(dict)
    for (*key, scale), row in norms().items():
        lost[tuple(key)] += [scale] if row["is_lost"] else []
    for (*config, precision, part), scales in lost.items():
        small, large = ([scale for scale in scales if (scale < 1) == below] for below in (True, False))
        ends = [f"{max(small):g} and less"] if small else []
        ends += [f"{min(large):g} and more"] if large else []
        expected[(*config, part)] |= {
            f"{precision}_loses": ", ".join(ends) or "none",
            f"{precision}_loses_below": f"{max(small):g}" if small else NAN,
            f"{precision}_loses_above": f"{min(large):g}" if large else NAN,
        }
    return expected


EXPECTED: dict[str, tuple[tuple[str, ...], Callable[[], dict[tuple, Row]]]] = {
    "precision_gains": (("precision", "mode"), gains),
    "layer_norm": (("precision", "part", "scale"), norms),
    "layer_norm_parts": (("part",), norm_parts),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_mixed_precision_view_matches_recomputation_from_files(name: str):
    names, expect = EXPECTED[name]
    assert_same(keyed(VIEWS[name], (*CONFIG, *names)), expect())


def test_repeated_sums_match_numpy():
    """Add the numbers one at a time in fp32 and fp16 with NumPy."""
    cases = {
        "fp32 into fp32": (np.float32, np.float32),
        "fp16 into fp16": (np.float16, np.float16),
        "fp16 into fp32": (np.float32, np.float16),
    }
    results = VIEWS["repeated_sums"].set_index("case")["result"]
    for case, (of_sum, of_term) in cases.items():
        total = of_sum(0)
        for _ in range(1000):
            total = of_sum(total + of_term(0.01))
        assert results[case] == float(total), case


def test_share_of_values_lost_in_fp16_matches_its_range():
    rows = VIEWS["layer_norm"].query("part in ['mean', 'squares'] and precision == 'fp16'")
    assert len(rows) == 22
    assert (rows["lost_share"] - rows["expected_lost_share"]).abs().max() < 0.05


def test_gains_omit_configurations_without_fp32():
    tables = {}
    for name in ("mixed_precision.times", "mixed_precision.operations"):
        is_dropped = (TABLES[name]["precision"] == "fp32") & (TABLES[name]["size"] == "xl")
        tables[name] = TABLES[name][~is_dropped]
    assert {*Views(tables)["precision_gains"]["size"]} == {"small", "medium", "large", "2.7B"}
