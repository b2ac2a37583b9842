"""Test the ladder's views against an independent recomputation from the files in runs/h200."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

from reference_runs import DIMENSIONS, NAN, RUNS, Row, Rows, assert_same, keyed, read_tables
from stepscope.views import Views

CPU_FOLDER = Path(__file__).parent / "data" / "cpu"
CASE = ("size", "context_length", "vocab_size", "batch_size")
LADDER = (
    "fp32",
    "tf32",
    "bf16",
    "sdpa",
    "fused_adamw",
    "compiled_blocks",
    "cuda_graph",
    "bf16_weights",
    "bf16_moments",
)
BF16_MOMENTS = (
    "bf16_moments",
    "fp8",
    "chunked_loss",
    "filled",
    "without_sdpa",
    "without_compiled_blocks",
    "without_cuda_graph",
)


def read_ladder(folder: Path = RUNS) -> dict[str, pd.DataFrame]:
    """Return the tables of a folder's ladders, excluding rows marked as inconsistent."""
    tables = read_tables({"ladder": CASE[:3]}, folder)
    steps, kernels = tables["ladder.steps"], tables["ladder.kernels"]
    marked = steps[steps.inconsistent.fillna("") != ""]
    case = ["run_id", "optimization", "batch_size"]
    is_marked = kernels.set_index(case).index.isin(marked.set_index(case).index)
    consistent = steps.drop(marked.index).assign(inconsistent="")
    return tables | {"ladder.kernels": kernels[~is_marked], "ladder.steps": consistent}


TABLES = read_ladder()
RAW = {name.removeprefix("ladder."): table for name, table in TABLES.items()}
VIEWS = Views(TABLES)
STEPS: Rows = {
    (*(row[name] for name in CASE), row["optimization"]): row for row in RAW["steps"].to_dict("records")
}
MOST = {name: RAW["results"][name].max() for name in ("matmul_bf16", "copy")}
SUSTAINED = RAW["results"].sustained_tflops.median()


def dense_flops(case: tuple) -> float:
    """Return a forward pass's FLOPs, excluding the T x T matmuls."""
    size, context, vocabulary, batch = case
    d, f, layers, _ = DIMENSIONS[size]
    return 2 * batch * context * (layers * (4 * d * d + 3 * d * f) + d * vocabulary)


def square_flops(case: tuple) -> float:
    size, context, _, batch = case
    d, _, layers, _ = DIMENSIONS[size]
    return 4 * batch * context**2 * d * layers


def causal_flops(case: tuple) -> float:
    """Return a step's FLOPs for T x T matrices on and below the diagonal: T (T + 1) / 2 of the T² elements."""
    context = case[1]
    return 3 * square_flops(case) * (context * (context + 1) / 2) / context**2


def parameters(case: tuple) -> int:
    size, _, vocabulary, _ = case
    d, f, layers, _ = DIMENSIONS[size]
    return 2 * vocabulary * d + layers * (4 * d * d + 3 * d * f + 2 * d) + d


def waits(step: Row) -> bool:
    return bool(step["busy"] < 0.95 and not step["enqueue_ms"] <= step["gpu_ms"])


def wall_speedup(before: Row, after: Row) -> float:
    if not waits(before) and not waits(after):
        return before["wall_ms"] / after["wall_ms"]
    speedup = before["wall_min_ms"] / after["wall_min_ms"]
    return NAN if 1 / 1.2 < speedup < 1.2 else speedup


def spread(step: Row) -> float:
    return step["wall_q3_ms"] - step["wall_q1_ms"]


def clear(ratio: float) -> float:
    return ratio if abs(ratio - 1) >= 0.03 else NAN


def step_of(case: tuple, optimization: str) -> Row:
    """Return a timed step, or an empty one if it wasn't timed."""
    step = STEPS.get((*case, optimization), {})
    return step if step.get("wall_ms", 0) > 0 else {}


def previous_of(case: tuple, optimization: str) -> Row:
    """Return the timed step that an optimization builds on, or an empty one if there is none."""
    if optimization in ("fp8", "chunked_loss"):
        return step_of(case, "bf16_moments")
    if optimization not in LADDER or not step_of(case, optimization):
        return {}
    earlier = [step_of(case, name) for name in LADDER[: LADDER.index(optimization)]]
    return next((step for step in reversed(earlier) if step), {})


def speedup_of(case: tuple, optimization: str) -> float:
    """Return the speedup over the previous step, as printed in tables."""
    step, before = step_of(case, optimization), previous_of(case, optimization)
    if not step or not before:
        return NAN
    if optimization != "cuda_graph":
        return clear(before["gpu_ms"] / step["gpu_ms"])
    is_apart = abs(before["wall_ms"] - step["wall_ms"]) >= max(spread(before), spread(step))
    return clear(wall_speedup(before, step)) if is_apart else NAN


def expected_steps() -> Iterator[tuple[tuple, Row]]:
    for (*place, optimization), step in STEPS.items():
        case = tuple(place)
        mean_s = step["energy_per_step_j"] / step["power_w"]
        mean_mfu = step["mfu"] * step["wall_ms"] / mean_s / 1e3
        is_ok = step["status"] == "ok"
        matmul_ms = (3 * dense_flops(case) + causal_flops(case)) / MOST["matmul_bf16"] / 1e9
        matmul_ms = matmul_ms if is_ok and optimization != "fp8" else NAN
        width = 20 if optimization in BF16_MOMENTS else 28
        moved_ms = width * parameters(case) / MOST["copy"] / 1e9 if is_ok else NAN
        derived = {
            "parameters": parameters(case),
            "launch_bound": waits(step),
            "best_ms": step["wall_min_ms"] if waits(step) else NAN,
            "mean_ms": mean_s * 1e3,
            "sustained_matmul_share": mean_mfu * 989.5 / SUSTAINED,
            "at_clock_mfu": mean_mfu * 1830 / step["sm_clock_mhz"],
            "sustained_reference_ms": matmul_ms * MOST["matmul_bf16"] / SUSTAINED + moved_ms,
            "speedup": speedup_of(case, optimization),
        }
        others = {
            "previous": previous_of(case, optimization),
            "fp32": step_of(case, "fp32"),
        }
        for name, other in others.items():
            derived[f"{name}_gpu_speedup"] = other.get("gpu_ms", NAN) / step["gpu_ms"]
            derived[f"{name}_wall_speedup"] = wall_speedup(other, step) if other else NAN
        yield (*case, optimization), derived


def cases() -> list[tuple]:
    return [*dict.fromkeys(key[:-1] for key in STEPS)]


def expected_speedups() -> Iterator[tuple[tuple, Row]]:
    for case in cases():
        printed = [name for name in (*LADDER[1:], "fp8") if step_of(case, name)]
        for name in printed:
            yield (*case, name), {"speedup": speedup_of(case, name), "product_error": NAN}
        first, last = step_of(case, "fp32"), step_of(case, "bf16_moments")
        if first and last:
            total = first["gpu_ms"] / last["gpu_ms"]
            factors = [speedup_of(case, name) for name in LADDER[1:] if name != "cuda_graph"]
            product = math.prod(factor for factor in factors if factor > 0)
            yield (*case, "all"), {"speedup": total, "product_error": abs(product / total - 1)}
            is_steady = spread(first) <= 0.03 * first["wall_ms"]
            yield (*case, "all_wall"), {"speedup": wall_speedup(first, last) if is_steady else NAN}


def expected_ablations() -> Iterator[tuple[tuple, Row]]:
    twins = {"bf16_weights": "cuda_graph", "bf16_moments": "bf16_weights"}
    for (*place, optimization), step in STEPS.items():
        case, removed = tuple(place), optimization.removeprefix("without_")
        if removed == optimization:
            continue
        last = step_of(case, "bf16_moments")
        in_wall_time = wall_speedup(step, last)
        slowdown = in_wall_time if removed == "cuda_graph" else step["gpu_ms"] / last["gpu_ms"]
        twin = step_of(case, twins.get(removed, ""))
        times = (step["gpu_ms"], twin["gpu_ms"]) if twin else (NAN, NAN)
        derived = {"slowdown_ratio": clear(slowdown), "repeat_ratio": max(times) / min(times)}
        derived["power_limited"] = bool(twin) and min(step["power_w"], twin["power_w"]) > 665
        yield (*case, removed), derived


def kernel_ms() -> dict[tuple, dict[str, float]]:
    """Return each kernel category's GPU time in ms, by step."""
    times: dict[tuple, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in RAW["kernels"].to_dict("records"):
        times[*(row[name] for name in CASE), row["optimization"]][row["kernel_category"]] += row["gpu_ms"]
    return times


def expected_baselines() -> Iterator[tuple[tuple, Row]]:
    times = kernel_ms()
    fair = ("hugging_face_no_mask", "hugging_face_no_mask_cuda_graph")
    for (*place, optimization), step in STEPS.items():
        case = tuple(place)
        if not optimization.startswith("hugging_face"):
            continue
        ours, graph = step_of(case, "bf16_moments"), step_of(case, "cuda_graph")
        attention_ms, graph_attention_ms = (
            times[*case, name]["fused attention"] for name in (optimization, "cuda_graph")
        )
        candidates = [step_of(case, name)["wall_ms"] for name in fair if step_of(case, name)]
        substituted_ms = step["gpu_ms"] - attention_ms + graph_attention_ms
        derived = {
            "fastest_without_mask": bool(candidates) and step["wall_ms"] == min(candidates),
            "speedup": clear(wall_speedup(step, ours)),
            "attention_ratio": attention_ms / graph_attention_ms,
            "substituted_ratio": substituted_ms / graph["gpu_ms"],
            "low_precision_speedup": graph["gpu_ms"] / ours["gpu_ms"],
        }
        yield (*case, optimization), derived


def expected_fp8() -> Iterator[tuple[tuple, Row]]:
    for case in cases():
        bf16, low = step_of(case, "bf16_moments"), step_of(case, "fp8")
        if not bf16 or not low:
            continue
        speedup = bf16["gpu_ms"] / low["gpu_ms"]
        is_apart = bf16["wall_ms"] - low["wall_ms"] > max(spread(bf16), spread(low))
        is_gain = speedup >= 1.03 and is_apart
        yield case, {"gpu_speedup": speedup, "speedup": clear(speedup), "clear_gain": is_gain}


def expected_training() -> Iterator[tuple[tuple, Row]]:
    for case, rows in RAW["curves"].groupby([*CASE]):
        wide = rows.pivot(index="step", columns=["optimization", "seed"], values="loss").sort_index()
        smooth = wide.rolling(10, min_periods=5).mean()
        curves = [*wide]
        baseline = next(name for name, seed in curves if seed == 1)
        seeds = sorted(seed for name, seed in curves if name == baseline)
        pairs = [("seeds", (baseline, b), (baseline, a)) for a, b in itertools.combinations(seeds, 2)]
        pairs += [("optimization", key, (baseline, 0)) for key in curves if key[0] != baseline]
        if ("cuda_graph", 0) in curves:
            pairs.append(("graph", ("cuda_graph", 0), ("compiled_blocks", 0)))
        for kind, one, other in pairs:
            apart = (smooth[one] - smooth[other]).abs()
            derived = {"kind": kind, "mean_nats": apart.mean(), "final_nats": apart.iloc[-50:].mean()}
            yield (*case, *one, *other), derived


def parts_ms(step: tuple, times: dict[str, float]) -> dict[str, float]:
    names = {"matrix multiply": "matmuls", "optimizer": "AdamW", "fused attention": "attention"}
    names["compiler-generated"] = "generated kernels"
    ms = dict.fromkeys([*names.values(), "casts, copies, rest"], 0.0)
    for category, value in times.items():
        ms[names.get(category, "casts, copies, rest")] += value
    return ms | {"between kernels": STEPS[step]["wall_ms"] - sum(times.values())}


def attention_bytes(case: tuple) -> float:
    size, context, _, batch = case
    d, _, layers, _ = DIMENSIONS[size]
    return 12 * layers * batch * context * d * 2


def expected_parts() -> Iterator[tuple[tuple, Row]]:
    for step, times in kernel_ms().items():
        case, optimization = step[:-1], step[-1]
        ms = parts_ms(step, times)
        is_fused = ms["attention"] > 0
        flops = {"matmuls": 3 * dense_flops(case) + (0 if is_fused else causal_flops(case))}
        if optimization == "fp8":
            flops["matmuls"] = NAN
        width = 20 if optimization in BF16_MOMENTS else 28
        moved: dict[str, float] = {"AdamW": width * parameters(case)}
        if is_fused:
            flops["attention"], moved["attention"] = causal_flops(case), attention_bytes(case)
        total = {"ms": 0.0, "reference_ms": 0.0}
        for part, value in ms.items():
            work, bytes_ = flops.get(part, NAN), moved.get(part, NAN)
            reference = work / MOST["matmul_bf16"] / 1e9 if part in flops else 0.0
            reference = bytes_ / MOST["copy"] / 1e9 if part == "AdamW" else reference
            row = {"ms": value, "reference_ms": reference}
            total = {name: total[name] + row[name] for name in total}
            achieved = value or NAN
            yield (*step, part), row | {"tflops": work / achieved / 1e9, "tb_per_s": bytes_ / achieved / 1e9}
        yield (*step, "the step"), total


EXPECTED: dict[str, Callable[[], Iterator[tuple[tuple, Row]]]] = {
    "steps": expected_steps,
    "speedups": expected_speedups,
    "ablations": expected_ablations,
    "baselines": expected_baselines,
    "fp8": expected_fp8,
    "training": expected_training,
    "parts": expected_parts,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_ladder_view_matches_recomputation_from_files(name: str):
    view = VIEWS[name]
    assert_same(keyed(view, view.attrs["key"]), dict(EXPECTED[name]()))


def test_cpu_run_views_omit_only_gpu_measurements():
    raw = {name: table.assign(size="nano") for name, table in read_ladder(CPU_FOLDER).items()}
    views = Views(raw)
    rows = {name: len(views[name]) for name in EXPECTED}
    assert rows["steps"] == len(raw["ladder.steps"]) > 0
    assert len(views["loss_curves"]) == len(raw["ladder.curves"]) > 0
    assert rows["ablations"] == rows["baselines"] == rows["fp8"] == 0
    steps = views["steps"]
    assert not steps.launch_bound.any()
    assert not steps.power_limited.any()
    assert steps.mean_ms.isna().all()
    assert steps.speedup.notna().any()
