"""Test the nsys study's views against an independent recomputation from the files in runs/h200."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Set
from typing import Any

import numpy as np
import pytest

from reference_runs import DIMENSIONS, MODES, NAN, Row, assert_same, keyed, read_tables
from stepscope.figures import all_figures
from stepscope.views import Views
from stepscope.views.nsys import readable

CONFIG = ("size", "context_length", "batch_size", "vocab_size", "precision", "attention", "optimizer")
MATMUL = "matrix multiply"


# -- the files ------------------------------------------------------------------------------------------------


TABLES = read_tables(
    {
        "nsys": CONFIG,
        "benchmark": (*CONFIG, "compile", "repeat"),
        "mixed_precision": (*CONFIG, "compile"),
        "ladder": ("size", "context_length", "vocab_size"),
    }
)
VIEWS = Views(TABLES)


def of(row: Row, *names: str) -> tuple:
    return (*(row[name] for name in CONFIG), *(row[name] for name in names))


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple, list[Row]]:
    result = defaultdict(list)
    for row in rows:
        result[of(row, *names)].append(row)
    return result


def summed(rows: Iterable[Row], column: str = "total_ns") -> float:
    return math.fsum(row[column] for row in rows)


def category(row: Row) -> str:
    if row["region"] == "attention.softmax":
        return "attention softmax"
    return (
        "loss softmax"
        if (row["kernel_category"], row["region"]) == ("softmax", "cross_entropy")
        else row["kernel_category"]
    )


OPERATIONS = [row | {"category": category(row)} for row in TABLES["nsys.operations"].to_dict("records")]
PROFILES = grouped(OPERATIONS, "mode")
WITH_TOTALS = OPERATIONS + [row | {"phase": "total"} for row in OPERATIONS]
PASSES = grouped(TABLES["nsys.times"].to_dict("records"), "mode", "phase")


# -- expected rows -----------------------------------------------------------------------------------------


def times() -> dict[tuple, Row]:
    named = Counter()
    for row in WITH_TOTALS:
        named[of(row, "mode", "phase")] += row["count"]
    return {key: time_of(passes, named[key]) for key, passes in PASSES.items()}


def time_of(passes: list[Row], named: int) -> Row:
    profiled = [row for row in passes if row["profiled"]]
    unprofiled = [row for row in passes if not row["profiled"]]
    result: Row = {
        f"{name}_ms": statistics.median(row[f"{source}_ns"] for row in profiled) / 1e6
        for name, source in {"host": "host", "projected": "projected", "gpu": "busy"}.items()
    }
    result |= {"profiled_passes": len(profiled), "named_operations": named}
    result["operations"] = statistics.median(row["operations"] for row in profiled)
    result["conserved"] = {row["operations"] for row in profiled} == {named}
    walls = [row["wall_ms"] for row in unprofiled]
    q1, wall, q3 = np.quantile(walls, [0.25, 0.5, 0.75]) if walls else (NAN, NAN, NAN)
    enqueue = statistics.median(row["enqueue_ms"] for row in unprofiled) if walls else NAN
    gpu, ratio = result["gpu_ms"], result["projected_ms"] / wall
    singles = [abs(row["projected_ns"] / 1e6 / wall - 1) for row in profiled]
    return result | {
        "passes": len(walls) or NAN,
        "wall_ms": wall,
        "wall_q1_ms": q1,
        "wall_q3_ms": q3,
        "enqueue_ms": enqueue,
        "busy": gpu / wall,
        "launch_bound": bool(gpu / wall < 0.95 and enqueue > gpu),
        "projected_ratio": ratio,
        "projected_error": abs(ratio - 1),
        "single_error": max(singles),
        "slowed": bool(ratio > 1 / 0.95),
    }


def ranks(times_ns: dict[Any, float]) -> dict[Any, int]:
    """Rank the keys by time: the longest time has rank 1, and equal times keep their order."""
    order = sorted(times_ns, key=lambda key: -times_ns[key])
    return {key: place for place, key in enumerate(order, 1)}


def parts(*names: str, phases: bool = False) -> dict[tuple, Row]:
    """Return the GPU time of each group of operations, and the group's share of the profile's time."""
    result = {}
    for key, own in grouped(WITH_TOTALS if phases else OPERATIONS, "mode", *names).items():
        total_ns = summed(PROFILES[key[: len(CONFIG) + 1]])
        result[key] = {"gpu_ms": summed(own) / 1e6, "share": summed(own) / total_ns}
    return result


def places(result: dict[tuple, Row], depth: int, skipped: Set[tuple] = frozenset()) -> dict[tuple, int]:
    """Rank groups by time among those with the same first ``depth`` key fields; skipped groups get rank 0."""
    together = defaultdict(dict)
    for key, row in result.items():
        if key not in skipped:
            together[key[:depth]][key] = row["gpu_ms"]
    placed = [ranks(times_ms) for times_ms in together.values()]
    return dict.fromkeys(skipped, 0) | {key: place for each in placed for key, place in each.items()}


def kernels() -> dict[tuple, Row]:
    split, result = grouped(OPERATIONS, "mode", "name"), parts("name")
    place = places(result, len(CONFIG) + 1)
    for key, own in split.items():
        launches, blocks = sum(row["count"] for row in own), DIMENSIONS[key[0]][2]
        result[key] |= {
            "place": place[key],
            "launches": launches,
            "blocks": blocks,
            "per_block": launches // blocks,
            "beyond_blocks": launches % blocks,
            "kernel_category": own[0]["kernel_category"],
            "mode_name": MODES[own[0]["mode"]],
        }
    return result


def regions() -> dict[tuple, Row]:
    split, result = grouped(OPERATIONS, "mode", "region", "name"), parts("region", "name")
    matmuls = {key for key, own in split.items() if own[0]["category"] == MATMUL}
    place = places(result, len(CONFIG) + 1, matmuls)
    for key, own in split.items():
        launches = sum(row["count"] for row in own)
        result[key] |= {"place": place[key], "launches": launches, "kernel_category": own[0]["category"]}
    return result


def categories() -> dict[tuple, Row]:
    result = parts("phase", "category", phases=True)
    place = places(result, len(CONFIG) + 2, {key for key in result if key[-1] == MATMUL})
    return {key: row | {"other_place": place[key]} for key, row in result.items()}


def model_parts() -> dict[tuple, Row]:
    return parts("region")


def attention() -> dict[tuple, Row]:
    return {key[:-1]: attention_of(key, rows) for key, rows in PROFILES.items() if key[-1] == "forward"}


def attention_of(key: tuple, rows: list[Row]) -> Row:
    size, context_length, batch_size = key[:3]
    width, _, layers, heads = DIMENSIONS[size]
    matmuls = [row for row in rows if row["kernel_category"] == MATMUL]
    scores = summed(row for row in matmuls if row["region"] == "attention.scores") / 1e6
    values = summed(row for row in matmuls if row["region"] == "attention.value") / 1e6
    softmax = summed(row for row in rows if row["region"] == "attention.softmax") / 1e6
    numbers = batch_size * heads * context_length**2
    matmul_flops = layers * numbers * 2 * (width // heads)
    moved = layers * numbers * 4 * 8
    return {
        "scores_ms": scores,
        "values_ms": values,
        "softmax_ms": softmax,
        "matmuls_ms": scores + values,
        "time_share": softmax / (scores + values),
        "heads": heads,
        "layers": layers,
        "matmul_flops": matmul_flops,
        "softmax_flops": 5 * numbers * layers,
        "matmul_gflop": matmul_flops / 1e9,
        "softmax_gflop": 5 * numbers * layers / 1e9,
        "flops_share": 5 / (4 * (width // heads)),
        "matrix_bytes": 4 * numbers,
        "matrix_mb": 4 * numbers / 1e6,
        "softmax_bytes": moved,
        "softmax_gb": moved / 1e9,
    }


def at_peak_rates() -> dict[tuple, Row]:
    results = TABLES["ladder.results"]
    copy, matmul = results["copy"].max() * 1e12, results["matmul_fp32"].max() * 1e12
    (device,) = TABLES["runs"]["device"].unique()
    return {
        (*key, device): {
            "copy_ms": 1e3 * row["softmax_bytes"] / copy,
            "matmul_ms": 1e3 * 2 * row["matmul_flops"] / matmul,
        }
        for key, row in attention().items()
    }


def agreement() -> dict[tuple, Row]:
    clock = times()
    result = {}
    for study in ("benchmark", "mixed_precision"):
        for row in TABLES[f"{study}.times"].to_dict("records"):
            phase = row["phase"]
            ours = clock.get((*of(row, "mode"), phase))
            if ours:
                key = of(row | {"study": study, "repeat": row.get("repeat", 0)}, "study", "compile", "repeat")
                result[(*key, row["mode"], phase)] = {
                    "gpu_ms": ours["gpu_ms"],
                    "in_process_gpu_ms": row["gpu_ms"],
                    "gpu_error": abs(ours["gpu_ms"] / row["gpu_ms"] - 1),
                    "mode_name": MODES[row["mode"]],
                    "configuration": f"{row['size']}, {row['context_length']:,}",
                }
    return result


def busy() -> dict[tuple, Row]:
    result = {}
    for key, rows in grouped(TABLES["nsys.timeline"].to_dict("records"), "mode").items():
        # whether the GPU is busy, for each nanosecond of the first millisecond
        runs = np.zeros(1_000_000, dtype=bool)
        for row in rows:
            begin, end = row["start_ns"], row["start_ns"] + row["duration_ns"]
            runs[max(begin, 0) : max(end, 0)] = True
        result[key] = {"busy": runs.mean()}
    return result


def tools() -> dict[tuple, Row]:
    return {
        of(row): {"tool": row["tool"], "same_as_nsys": row["nsys_ns"] == row["operations_ns"]}
        for row in TABLES["nsys.results"].to_dict("records")
    }


EXPECTED: dict[str, tuple[tuple[str, ...], Callable[[], dict[tuple, Row]]]] = {
    "profile_times": (("mode", "phase"), times),
    "profile_kernels": (("mode", "name"), kernels),
    "region_kernels": (("mode", "region", "name"), regions),
    "profile_categories": (("mode", "phase", "kernel_category"), categories),
    "model_parts": (("mode", "region"), model_parts),
    "profiled_attention": ((), attention),
    "attention_at_peak_rates": (("device",), at_peak_rates),
    "profiler_agreement": (("study", "compile", "repeat", "mode", "phase"), agreement),
    "launch_timeline_busy": (("mode",), busy),
    "profile_runs": ((), tools),
}
NAMES = {"kernel", "full_kernel", "both_kernel", "column"}  # text columns, which are tested separately


@pytest.mark.parametrize("name", EXPECTED)
def test_view_matches_recomputation_from_files(name: str):
    names, expect = EXPECTED[name]
    expected = expect()
    view = VIEWS[name]
    assert_same(keyed(view, (*CONFIG, *names)), expected)
    assert all(row.keys() == {*view} - {*CONFIG, *names} - NAMES for row in expected.values())


def test_readable_kernel_names_are_distinct_and_keep_the_tile():
    names = {*TABLES["nsys.operations"]["name"]}
    short = readable(sorted(names))
    assert len({*short.values()}) == len(names)
    tiled = {name: text for name, text in short.items() if "_tilesize" in name}
    assert tiled
    for name, text in tiled.items():
        tile = name.partition("_tilesize")[2].partition("_")[0]
        assert tile in text and "tilesize" not in text


def test_figures_draw_rows_of_the_views():
    draw = all_figures()
    step = VIEWS["profile_categories"].query(
        "mode == 'step' and precision == 'fp32' and context_length == 512"
    )
    drawn = draw["kernel_categories_by_size"]("A title", step)
    assert all(f"{size}: AdamW" in drawn for size in ("small", "2.7B"))
    window = VIEWS["launch_timeline"].query(
        "size == 'small' and precision == 'bf16' and context_length == 128"
    )
    assert "as a CUDA graph" in draw["launches_timeline"]("A title", window)


def test_agreement_with_nsys_is_unknown_without_its_reports():
    results = TABLES["nsys.results"].drop(columns="nsys_ns")
    assert Views({"nsys.results": results})["profile_runs"]["same_as_nsys"].isna().all()
