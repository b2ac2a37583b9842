"""Test the benchmark study's views against an independent recomputation from the files in runs/h200."""

import math
import statistics
from collections import Counter, defaultdict

import pandas as pd
import pytest

from reference_runs import DIMENSIONS, MODES, NAN, Row, Rows, assert_same, keyed, read_tables
from stepscope.views import Views, all_views
from stepscope.views.facts import FACTS

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


# -- the files ------------------------------------------------------------------------------------------------


RAW = read_tables(
    {
        "benchmark": CONFIG,
        "mixed_precision": CONFIG,
        "ladder": ("size", "context_length", "vocab_size"),
    }
)
RAW["ladder.steps"] = RAW["ladder.steps"].query("inconsistent == ''")
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
    """Return the samples in step order, keyed by configuration (including the repeat), mode and phase."""
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


def shown(value: float) -> str:
    """Format a number with three significant digits, or as an integer if the number is at least 99.95."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.{2 - math.floor(math.log10(float(f'{value:.2e}')))}f}"


# -- each view's expected rows -------------------------------------------------------------------------------


def expected_times() -> Rows:
    matmul = defaultdict(float)
    for row in dicts("benchmark.results"):
        matmul[row["precision"]] = max(matmul[row["precision"]], row["matmul_tflops"])
    result = {}
    for key, row in TIMES.items():
        phases_ms = [TIMES[*key[:-1], phase]["gpu_ms"] for phase in ("forward", "loss", "backward", "optimizer")
                     if (*key[:-1], phase) in TIMES]  # fmt: skip
        bound = is_launch_bound(row)
        fastest_ms = row["wall_min_ms"] if bound else NAN
        whole = {"forward": 1, "forward_backward": 3, "step": 3}[row["mode"]]
        passes = {"forward": 1, "loss": NAN, "backward": 2, "optimizer": NAN}.get(row["phase"], whole)
        flops = passes * forward_flops(*key[1:5])
        gpu_tflops = flops / row["gpu_ms"] / 1e9
        peak, best = SHEET_TFLOPS[row["precision"]], matmul.get(row["precision"], NAN)
        result[key] = {name: row[name] for name in RAW["benchmark.times"] if name in DECLARED["times"]} | {
            "mode_name": MODES[row["mode"]],
            "launch_bound": bound,
            "fastest_ms": fastest_ms,
            "fastest_idle_share": (fastest_ms - row["gpu_ms"]) / fastest_ms,
            "fastest_launch_us": 1000 * fastest_ms / row["operations"],
            "launch_us": 1000 * row["wall_ms"] / row["operations"] if bound else NAN,
            "kernel_us": 1000 * row["gpu_ms"] / row["operations"],
            "quartiles": f"{shown(row['wall_q1_ms'])} to {shown(row['wall_q3_ms'])}",
            "wall_std_share": row["wall_std_ms"] / row["wall_ms"],
            "phase_share": NAN if row["phase"] == "total" else row["gpu_ms"] / sum(phases_ms),
            "matmul_rate_share": flops / row["wall_ms"] / 1e9 / best,
            "gpu_mfu": gpu_tflops / peak,
            "gpu_matmul_rate_share": gpu_tflops / best,
            "gpu_tflops": gpu_tflops,
        }
    return result


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


def expected_first_steps() -> Rows:
    result, delay_ms = {}, {}
    for (*config, mode, phase), steps in SAMPLES.items():
        if mode != "step":
            continue
        later = [row for row in steps if not row["warmup"]]
        later_ms = statistics.median(row["wall_ms"] for row in later)
        total = TIMES["benchmark", *config, "step", "total"]
        row = {
            "later_ms": later_ms,
            "later_enqueue_ms": statistics.median(row["enqueue_ms"] for row in later),
            "later_std_share": statistics.stdev(row["wall_ms"] for row in later) / later_ms,
            "launch_bound": is_launch_bound(total),
        }
        limit = 1.2 if row["launch_bound"] else 1.01
        for name, step in zip(("first", "second", "third"), steps):
            row |= {
                f"{name}_ms": step["wall_ms"],
                f"{name}_enqueue_ms": step["enqueue_ms"],
                f"{name}_excess_ms": step["wall_ms"] - later_ms,
                f"{name}_excess_share": step["wall_ms"] / later_ms - 1,
                f"is_{name}_slow": step["wall_ms"] > limit * later_ms,
            }
        result[*config, phase] = row
        if phase == "total":
            delay_ms[tuple(config)] = row["first_excess_ms"]
    for (*config, _), row in result.items():
        row["first_delay_share"] = row["first_excess_ms"] / delay_ms[tuple(config)]
    return result


def expected_compiled() -> Rows:
    sums = category_sums()
    others = defaultdict(lambda: [0.0, 0.0])
    for key, row in sums.items():
        if key[-1] != "matrix multiply":
            others[key[:-1]][0] += row["gpu_ms"]
            others[key[:-1]][1] += row["count"]
    described = expected_times()
    compared = [
        name.removeprefix("eager_")
        for name in DECLARED["compiled"]
        if f"eager_{name}" in DECLARED["compiled"]
    ]
    compared = [name for name in compared if not name.startswith("other")]
    result = {}
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
        step_ms = [TIMES[*key[:-1], name]["gpu_ms"] for name in ("forward", "loss", "backward", "optimizer")
                   if mode == "step"]  # fmt: skip
        made = {name: described[key][name] for name in compared}
        made |= {f"eager_{name}": described[eager_key][name] for name in compared}
        result[*key[1:-1],] = made | {
            "eager_study": eager_study,
            "mode_name": MODES[mode],
            "wall_std_ms": row["wall_std_ms"],
            "compile_s": row["compile_s"],
            "gpu_speedup": eager["gpu_ms"] / row["gpu_ms"],
            "wall_speedup": gain,
            "break_even_steps": 1000 * row["compile_s"] / (eager[column] - row[column]) if gain > 1 else NAN,
            **dict(zip(("other_gpu_ms", "other_count"), others[key[:-1]])),
            **dict(zip(("eager_other_gpu_ms", "eager_other_count"), others[eager_key[:-1]])),
            "optimizer_share": step_ms[-1] / sum(step_ms) if step_ms else NAN,
        }
    return result


def expected_same_steps() -> Rows:
    result = {}
    for ladder in dicts("ladder.steps"):
        shape = [ladder[name] for name in ("size", "context_length", "batch_size", "vocab_size")]
        key = (*shape, ladder["optimization"], "naive", "none", "foreach")
        other = TIMES.get(("mixed_precision", *key, 0, "step", "total"))
        if other is None or ladder["optimization"] not in ("tf32", "bf16"):
            continue
        row: Row = {"is_launch_bound_in_both": is_launch_bound(ladder) and is_launch_bound(other)}
        for prefix, source in (("back_to_back", ladder), ("synchronized", other)):
            row |= {f"{prefix}_{name}": source[name] for name in ("wall_ms", "enqueue_ms", "gpu_ms")}
            row[f"{prefix}_launch_bound"] = is_launch_bound(source)
        ratio = ladder["wall_ms"] / other["wall_ms"]
        row |= {"wall_ratio": max(ratio, 1 / ratio), "gpu_error": abs(ladder["gpu_ms"] / other["gpu_ms"] - 1)}
        result[key] = row
    return result


DECLARED = {name: view.columns for name, view in all_views().items()}
EXPECTED = {
    "times": expected_times,
    "kernel_categories": expected_kernel_categories,
    "first_steps": expected_first_steps,
    "compiled": expected_compiled,
    "same_steps": expected_same_steps,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_view_matches_recomputation_from_files(name: str):
    view, expected = all_views()[name], EXPECTED[name]()
    assert_same(keyed(VIEWS[name], view.key), expected)
    lacking = {column for row in expected.values() for column in view.columns if column not in row}
    assert not lacking


@pytest.mark.parametrize(
    ("view", "table"),
    [("samples", "benchmark.samples"), ("peak_rates", "benchmark.results")],
)
def test_view_keeps_every_row_of_its_table(view: str, table: str):
    assert len(VIEWS[view]) == len(RAW[table])


@pytest.mark.parametrize(("timed", "warmup_steps"), [(1, []), (2, [0, 1, 2, 5])])
def test_warm_up_omits_configurations_with_one_timed_step(timed: int, warmup_steps: list[int]):
    samples = RAW["benchmark.samples"]
    first = samples[(samples["run_id"] == samples["run_id"].iloc[0]) & (samples["step"] < 5 + timed)]
    assert [*Views({"benchmark.samples": first})["warm_up"]["warmup_steps"]] == warmup_steps


def test_operations_include_both_studies():
    both = (RAW[f"{study}.operations"] for study in ("benchmark", "mixed_precision"))
    gpu_ms = sum(table["gpu_ms"].sum() for table in both)
    assert VIEWS["operations"]["gpu_ms"].sum() == pytest.approx(gpu_ms)


def test_step_flops_match_a_hand_calculation():
    step = pd.Series({"size": "small", "context_length": 512, "batch_size": 4, "vocab_size": 10_000})
    width, feed_forward, layers, _ = DIMENSIONS["small"]
    weights = layers * (4 * width**2 + 3 * width * feed_forward) + 10_000 * width
    tokens = 4 * 512
    parts = {
        "weights_tflop": 6 * tokens * weights / 1e12,
        "attention_tflop": 3 * 4 * tokens * 512 * width * layers / 1e12,
    }
    expected = {"tokens": tokens, "weights": weights, "total_tflop": sum(parts.values())} | parts
    assert FACTS["flops_of_step"](step) == pytest.approx(expected)
