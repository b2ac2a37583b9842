"""Test the benchmark's views against an independent recomputation from the files in runs/h200."""

import datetime
import statistics
from collections import Counter, defaultdict

import pandas as pd
import pytest

from reference_runs import DIMENSIONS, NAN, Row, Rows, assert_same, keyed, read_records, read_tables
from stepscope.views import Views, all_views

CONFIG = (
    "size",
    "context_length",
    "batch_size",
    "vocab_size",
    "precision",
    "attention",
    "compile",
    "optimizer",
    "repeat",
)
SHEET_TFLOPS = {"fp32": 67, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5}


RECORDS = read_records()
RUNS = {record["run_id"]: record for _, record in RECORDS if record["study"] == "benchmark"}
RAW = read_tables(
    {
        "benchmark": CONFIG,
        "mixed_precision": CONFIG,
    }
)
RAW["runs"] = pd.DataFrame(
    {
        "study": record["study"],
        "run_id": record["run_id"],
        "started_at": pd.Timestamp(record["started_at"]),
        "seconds": record["duration_s"],
        "device": record["machine"]["device_name"],
        "machine_ram_gib": record["machine"]["ram_gib"],
    }
    for _, record in RECORDS
)
VIEWS = Views(RAW)


def dicts(table: str) -> list[Row]:
    return RAW[table].to_dict("records")


def timed_rows() -> Rows:
    rows = [
        row | {"study": study}
        for study in ("benchmark", "mixed_precision")
        for row in dicts(f"{study}.times")
    ]
    return keyed(pd.DataFrame(rows), ("study", *CONFIG, "mode", "phase"))


def samples_by_process() -> dict[tuple, list[Row]]:
    """Return a process's ordered steps, grouped by configuration, mode and phase."""
    result = defaultdict(list)
    for row in sorted(dicts("benchmark.samples"), key=lambda row: row["step"]):
        result[*(row[name] for name in CONFIG), row["mode"], row["phase"]].append(row)
    return result


TIMES = timed_rows()
SAMPLES = samples_by_process()


def is_launch_bound(row: Row) -> bool:
    return row["enqueue_ms"] > row["gpu_ms"] and row["gpu_ms"] < 0.95 * row["wall_ms"]


def forward_flops(size: str, context_length: int, batch_size: int, vocab_size: int) -> float:
    width, feed_forward, layers, _ = DIMENSIONS[size]
    tokens = batch_size * context_length
    weights = layers * (4 * width**2 + 3 * width * feed_forward) + vocab_size * width
    return 2 * tokens * weights + 4 * tokens * context_length * width * layers


def expected_times() -> Rows:
    matmul = RAW["benchmark.results"].groupby("precision").matmul_tflops.max()
    expected = {}
    for key, row in TIMES.items():
        phases = [TIMES.get((*key[:-1], phase)) for phase in ("forward", "loss", "backward", "optimizer")]
        phases_ms = sum(phase["gpu_ms"] for phase in phases if phase)
        bound = is_launch_bound(row)
        fastest_ms = row["wall_min_ms"] if bound else NAN
        total = {"forward": 1, "forward_backward": 3, "step": 3}[row["mode"]]
        passes = {"forward": 1, "loss": NAN, "backward": 2, "optimizer": NAN}.get(row["phase"], total)
        tflops_ms = passes * forward_flops(*key[1:5]) / 1e9
        expected[key] = {
            "wall_ms": row["wall_ms"],
            "launch_bound": bound,
            "fastest_idle_share": (fastest_ms - row["gpu_ms"]) / fastest_ms,
            "launch_us": 1000 * row["wall_ms"] / row["operations"] if bound else NAN,
            "phase_share": NAN if row["phase"] == "total" else row["gpu_ms"] / phases_ms,
            "matmul_rate_share": tflops_ms / row["wall_ms"] / matmul.get(row["precision"], NAN),
            "gpu_mfu": tflops_ms / row["gpu_ms"] / SHEET_TFLOPS[row["precision"]],
        }
    return expected


def category_sums() -> Rows:
    result: Rows = defaultdict(lambda: {"gpu_ms": 0.0, "count": 0.0})
    for study in ("benchmark", "mixed_precision"):
        for row in dicts(f"{study}.operations"):
            key = (study, *(row[name] for name in CONFIG), row["mode"], row["kernel_category"])
            result[key]["gpu_ms"] += row["gpu_ms"]
            result[key]["count"] += row["count"]
    return result


def expected_kernel_categories() -> Rows:
    sums, total_ms = category_sums(), Counter()
    for key, row in sums.items():
        total_ms[key[:-1]] += row["gpu_ms"]
    return {
        key: row | {"share": row["gpu_ms"] / total_ms[key[:-1]], "is_matmul": key[-1] == "matrix multiply"}
        for key, row in sums.items()
    }


def expected_timed_steps() -> Rows:
    result = {}
    for key, steps in SAMPLES.items():
        ten = [row["wall_ms"] for row in steps if not row["warmup"]][:10]
        result[key] = {
            "steps": len(ten),
            "warmup_steps": sum(row["warmup"] for row in steps),
            "mean_ms": statistics.mean(ten),
            "std_ms": statistics.stdev(ten),
        }
    return result


def expected_warm_up() -> Rows:
    result = {}
    for key, steps in SAMPLES.items():
        walls = [row["wall_ms"] for row in steps]
        for skipped in (0, 1, 2, 5):
            ten = walls[skipped : skipped + 10]
            if key[-2:] == ("step", "total"):
                result[*key[:-2], skipped] = {
                    "steps": 10,
                    "mean_ms": statistics.mean(ten),
                    "std_ms": statistics.stdev(ten),
                    "first_ms": walls[skipped],
                }
    return result


def expected_first_steps() -> Rows:
    expected = {}
    for (*config, mode, phase), steps in SAMPLES.items():
        if mode != "step":
            continue
        later = [row for row in steps if not row["warmup"]]
        later_ms = statistics.median(row["wall_ms"] for row in later)
        limit = 1.2 if is_launch_bound(TIMES["benchmark", *config, "step", "total"]) else 1.01
        row = {
            "later_ms": later_ms,
            "later_enqueue_ms": statistics.median(row["enqueue_ms"] for row in later),
            "later_std_share": statistics.stdev(row["wall_ms"] for row in later) / later_ms,
        }
        for name, step in zip(("first", "second", "third"), steps):
            row[f"{name}_excess_ms"] = step["wall_ms"] - later_ms
            row[f"is_{name}_slow"] = step["wall_ms"] > limit * later_ms
        expected[*config, phase] = row
    for (*config, _), row in expected.items():
        row["first_delay_share"] = row["first_excess_ms"] / expected[*config, "total"]["first_excess_ms"]
    return expected


def expected_repeats() -> Rows:
    groups = defaultdict(list)
    for (study, *config, _, mode, phase), row in TIMES.items():
        if study == "benchmark":
            groups[*config, mode, phase].append(row)
    expected = {}
    for key, rows in groups.items():
        if len(rows) == 1:
            continue
        walls_ms = [row["wall_ms"] for row in rows]
        hosts = [RUNS[row["run_id"]] for row in rows]
        starts = [datetime.datetime.fromisoformat(host["started_at"]) for host in hosts]
        expected[key] = {
            "processes": len(rows),
            "is_ever_launch_bound": any(map(is_launch_bound, rows)),
            "is_always_launch_bound": all(map(is_launch_bound, rows)),
            "wall_ratio": max(walls_ms) / min(walls_ms),
            "apart_h": (max(starts) - min(starts)).total_seconds() / 3600,
            "has_other_ram": len({host["machine"]["ram_gib"] for host in hosts}) > 1,
            "steps_min": min(row["steps"] for row in rows),
        }
    return expected


def expected_compiled() -> Rows:
    others = defaultdict(float)
    for key, row in category_sums().items():
        if key[-1] != "matrix multiply":
            others[key[:-1]] += row["gpu_ms"]
    expected = {}
    for key, row in TIMES.items():
        study, *config, mode, phase = key
        parts = config[CONFIG.index("compile")]
        if study != "benchmark" or parts == "none" or phase != "total":
            continue
        config[CONFIG.index("compile")] = "none"
        eager_study = "benchmark" if ("benchmark", *config, mode, phase) in TIMES else "mixed_precision"
        eager_key = (eager_study, *config, mode, phase)
        eager = TIMES[eager_key]
        bound = is_launch_bound(row) or is_launch_bound(eager)
        column = "wall_min_ms" if bound else "wall_ms"
        gain = eager[column] / row[column]
        gain = NAN if bound and 1 / 1.2 < gain < 1.2 else gain
        saved_ms = eager[column] - row[column]
        expected[key[1:-1]] = {
            "eager_study": eager_study,
            "gpu_speedup": eager["gpu_ms"] / row["gpu_ms"],
            "wall_speedup": gain,
            "break_even_steps": 1000 * row["compile_s"] / saved_ms if gain > 1 else NAN,
            "other_gpu_ms": others[key[:-1]],
            "eager_other_gpu_ms": others[eager_key[:-1]],
        }
    return expected


def expected_runs() -> Rows:
    spans = []
    for _, record in RECORDS:
        start = datetime.datetime.fromisoformat(record["started_at"])
        spans.append((start, start + datetime.timedelta(seconds=record["duration_s"])))
    return {
        (row["study"], row["run_id"]): {"concurrent_runs": sum(begin <= start < end for begin, end in spans)}
        for (start, _), row in zip(spans, dicts("runs"))
    }


EXPECTED = {
    "times": expected_times,
    "kernel_categories": expected_kernel_categories,
    "timed_steps": expected_timed_steps,
    "warm_up": expected_warm_up,
    "first_steps": expected_first_steps,
    "repeats": expected_repeats,
    "compiled": expected_compiled,
    "runs": expected_runs,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_benchmark_view_matches_recomputation_from_files(name: str):
    assert_same(keyed(VIEWS[name], all_views()[name].key), EXPECTED[name]())
