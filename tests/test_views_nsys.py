"""Test the nsys study's views against an independent recomputation from the files in runs/h200."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Set
from typing import Any

import numpy as np
import pytest

from reference_runs import DIMENSIONS, NAN, Row, assert_same, keyed, read_tables
from stepscope.views import Views
from stepscope.views.nsys import readable

CONFIG = ("size", "context_length", "batch_size", "vocab_size", "precision", "attention", "optimizer")
MATMUL = "matrix multiply"


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


def times() -> dict[tuple, Row]:
    named = Counter()
    for row in WITH_TOTALS:
        named[of(row, "mode", "phase")] += row["count"]
    return {key: time_of(passes, named[key]) for key, passes in PASSES.items()}


def time_of(passes: list[Row], named: int) -> Row:
    profiled = [row for row in passes if row["profiled"]]
    unprofiled = [row for row in passes if not row["profiled"]]
    gpu_ms = statistics.median(row["busy_ns"] for row in profiled) / 1e6
    projected_ms = statistics.median(row["projected_ns"] for row in profiled) / 1e6
    wall_ms = enqueue_ms = NAN
    if unprofiled:
        wall_ms = statistics.median(row["wall_ms"] for row in unprofiled)
        enqueue_ms = statistics.median(row["enqueue_ms"] for row in unprofiled)
    ratio = projected_ms / wall_ms
    return {
        "gpu_ms": gpu_ms,
        "projected_ms": projected_ms,
        "wall_ms": wall_ms,
        "operations": statistics.median(row["operations"] for row in profiled),
        "conserved": {row["operations"] for row in profiled} == {named},
        "launch_bound": gpu_ms / wall_ms < 0.95 and enqueue_ms > gpu_ms,
        "projected_ratio": ratio,
        "single_error": max(abs(row["projected_ns"] / 1e6 / wall_ms - 1) for row in profiled),
        "slowed": ratio > 1.2,
    }


def ranks(times_ns: dict[Any, float]) -> dict[Any, int]:
    """Rank keys by time, longest first; equal times keep their order."""
    order = sorted(times_ns, key=lambda key: -times_ns[key])
    return {key: place for place, key in enumerate(order, 1)}


def parts(*names: str, phases: bool = False) -> dict[tuple, Row]:
    """Return each group's time and its share of the profile."""
    result = {}
    for key, own in grouped(WITH_TOTALS if phases else OPERATIONS, "mode", *names).items():
        total_ns = summed(PROFILES[key[: len(CONFIG) + 1]])
        result[key] = {"gpu_ms": summed(own) / 1e6, "share": summed(own) / total_ns}
    return result


def places(result: dict[tuple, Row], depth: int, skipped: Set[tuple] = frozenset()) -> dict[tuple, int]:
    """Rank groups by time among groups with equal first ``depth`` fields; skipped groups get rank 0."""
    together = defaultdict(dict)
    for key, row in result.items():
        if key not in skipped:
            together[key[:depth]][key] = row["gpu_ms"]
    placed = [ranks(times_ms) for times_ms in together.values()]
    return dict.fromkeys(skipped, 0) | {key: place for each in placed for key, place in each.items()}


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


def attention() -> dict[tuple, Row]:
    return {key[:-1]: attention_of(key, rows) for key, rows in PROFILES.items() if key[-1] == "forward"}


def attention_of(key: tuple, rows: list[Row]) -> Row:
    size, context_length, batch_size = key[:3]
    width, _, layers, heads = DIMENSIONS[size]
    matmuls = [row for row in rows if row["kernel_category"] == MATMUL]
    matmul_ns = summed(row for row in matmuls if row["region"] in ("attention.scores", "attention.value"))
    softmax_ns = summed(row for row in rows if row["region"] == "attention.softmax")
    numbers = batch_size * heads * context_length**2
    return {
        "time_share": softmax_ns / matmul_ns,
        "matmul_flops": layers * numbers * 2 * (width // heads),
        "softmax_flops": 5 * numbers * layers,
        "flops_share": 5 / (4 * (width // heads)),
        "softmax_bytes": layers * numbers * 4 * 8,
    }


def agreement() -> dict[tuple, Row]:
    profiled, expected = times(), {}
    for study in ("benchmark", "mixed_precision"):
        for row in TABLES[f"{study}.times"].to_dict("records"):
            ours = profiled.get(of(row, "mode", "phase"))
            if ours:
                key = of(row | {"study": study, "repeat": row.get("repeat", 0)}, "study", "compile", "repeat")
                expected[(*key, row["mode"], row["phase"])] = {
                    "in_process_gpu_ms": row["gpu_ms"],
                    "gpu_error": abs(ours["gpu_ms"] / row["gpu_ms"] - 1),
                }
    return expected


def busy() -> dict[tuple, Row]:
    result = {}
    for key, rows in grouped(TABLES["nsys.timeline"].to_dict("records"), "mode").items():
        runs = np.zeros(1_000_000, dtype=bool)  # each nanosecond of the first millisecond
        for row in rows:
            begin, end = row["start_ns"], row["start_ns"] + row["duration_ns"]
            runs[max(begin, 0) : max(end, 0)] = True
        result[key] = {"busy": runs.mean()}
    return result


EXPECTED: dict[str, tuple[tuple[str, ...], Callable[[], dict[tuple, Row]]]] = {
    "profile_times": (("mode", "phase"), times),
    "region_kernels": (("mode", "region", "name"), regions),
    "profile_categories": (("mode", "phase", "kernel_category"), categories),
    "profiled_attention": ((), attention),
    "profiler_agreement": (("study", "compile", "repeat", "mode", "phase"), agreement),
    "launch_timeline_busy": (("mode",), busy),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_nsys_view_matches_recomputation_from_files(name: str):
    names, expect = EXPECTED[name]
    assert_same(keyed(VIEWS[name], (*CONFIG, *names)), expect())


def test_profile_shares_sum_to_one():
    for name in ("profile_kernels", "region_kernels", "model_parts"):
        assert VIEWS[name].groupby([*CONFIG, "mode"])["share"].sum().to_numpy() == pytest.approx(1)


def test_readable_kernel_names_are_distinct_and_keep_the_tile():
    names = {*TABLES["nsys.operations"]["name"]}
    short = readable(sorted(names))
    assert len({*short.values()}) == len(names)
    tiled = {name: text for name, text in short.items() if "_tilesize" in name}
    assert tiled
    for name, text in tiled.items():
        tile = name.partition("_tilesize")[2].partition("_")[0]
        assert tile in text and "tilesize" not in text


def test_agreement_with_nsys_is_unknown_without_its_reports():
    results = TABLES["nsys.results"].drop(columns="nsys_ns")
    assert Views({"nsys.results": results})["profile_runs"]["same_as_nsys"].isna().all()
