"""Test the ladder study's views against an independent recomputation from the files in runs/h200."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

from reference_runs import DIMENSIONS, NAN, RUNS, Row, Rows, is_same, keyed, read_tables
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
    """Return a folder's ladder tables; omit each inconsistent row unless the power limit explains it."""
    tables = read_tables({"ladder": CASE[:3]}, folder)
    steps, kernels = tables["ladder.steps"], tables["ladder.kernels"]
    at_power_limit = steps.inconsistent.str.contains("profiled steps range") & (
        steps.clock_reasons == "power cap"
    )
    marked = steps[(steps.inconsistent.fillna("") != "") & ~at_power_limit]
    case = ["run_id", "optimization", "batch_size"]
    is_marked = kernels.set_index(case).index.isin(marked.set_index(case).index)
    return tables | {"ladder.kernels": kernels[~is_marked], "ladder.steps": steps.drop(marked.index)}


TABLES = read_ladder()
RAW = {name.removeprefix("ladder."): table for name, table in TABLES.items()}
VIEWS = Views(TABLES)
STEPS: Rows = {
    (*(row[name] for name in CASE), row["optimization"]): row for row in RAW["steps"].to_dict("records")
}
MOST = {name: RAW["results"][name].max() for name in ("matmul_bf16", "copy")}
SUSTAINED = RAW["results"].sustained_tflops.median()


def forward_flops(case: tuple) -> float:
    return dense_flops(case) + square_flops(case)


def dense_flops(case: tuple) -> float:
    """Return a forward pass's FLOPs, excluding those of its T x T matmuls."""
    size, context, vocabulary, batch = case
    d, f, layers, _ = DIMENSIONS[size]
    return 2 * batch * context * (layers * (4 * d * d + 3 * d * f) + d * vocabulary)


def square_flops(case: tuple) -> float:
    size, context, _, batch = case
    d, _, layers, _ = DIMENSIONS[size]
    return 4 * batch * context**2 * d * layers


def causal_flops(case: tuple) -> float:
    """Return the FLOPs of a step's T x T matmuls for the T (T + 1) / 2 elements on and below the diagonal."""
    context = case[1]
    return 3 * square_flops(case) * (context * (context + 1) / 2) / context**2


def parameters(case: tuple) -> int:
    size, _, vocabulary, _ = case
    d, f, layers, _ = DIMENSIONS[size]
    return 2 * vocabulary * d + layers * (4 * d * d + 3 * d * f + 2 * d) + d


def waits(step: Row) -> bool:
    return bool(step["busy"] < 0.95 and not step["enqueue_ms"] <= step["gpu_ms"])


def is_power_limited(step: Row) -> bool:
    return "power cap" in str(step["clock_reasons"])


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
    """Return the timed step of an optimization; if it wasn't timed, return an empty dictionary."""
    step = STEPS.get((*case, optimization), {})
    return step if step.get("wall_ms", 0) > 0 else {}


def previous_of(case: tuple, optimization: str) -> Row:
    """Return the timed step to which an optimization was added; if there is none, return an empty dictionary."""
    if optimization in ("fp8", "chunked_loss"):
        return step_of(case, "bf16_moments")
    if optimization not in LADDER or not step_of(case, optimization):
        return {}
    earlier = [step_of(case, name) for name in LADDER[: LADDER.index(optimization)]]
    return next((step for step in reversed(earlier) if step), {})


def speedup_of(case: tuple, optimization: str) -> float:
    """Return the speedup over the previous step, or NaN if the tables show none."""
    step, before = step_of(case, optimization), previous_of(case, optimization)
    if not step or not before:
        return NAN
    if optimization == "cuda_graph":
        is_apart = abs(before["wall_ms"] - step["wall_ms"]) >= max(spread(before), spread(step))
        return clear(wall_speedup(before, step)) if is_apart else NAN
    fluctuates = step["inconsistent"] or before["inconsistent"]
    return clear(wall_speedup(before, step) if fluctuates else before["gpu_ms"] / step["gpu_ms"])


def expected_steps() -> Iterator[tuple[tuple, Row]]:
    for (*place, optimization), step in STEPS.items():
        case = tuple(place)
        tokens, launch_bound = case[1] * case[3], waits(step)
        mean_s = step["wall_mean_ms"] / 1e3
        mean_mfu = step["mfu"] * step["wall_ms"] / mean_s / 1e3
        best = step["wall_min_ms"] if launch_bound else NAN
        matmul = (3 * dense_flops(case) + causal_flops(case)) / MOST["matmul_bf16"] / 1e9
        has_reference = step["status"] == "ok" and optimization != "fp8"
        matmul = matmul if has_reference else NAN
        width = 20 if optimization in BF16_MOMENTS else 28
        moved = width * parameters(case) / MOST["copy"] / 1e9 if step["status"] == "ok" else NAN
        derived = {
            "device": "NVIDIA H200",
            "case": f"{case[0]} {case[1]:,}",
            "parameters": parameters(case),
            "tokens": tokens,
            "step_flops": 3 * forward_flops(case),
            "spread_ms": spread(step),
            "launch_bound": launch_bound,
            "best_ms": best,
            "launch_us": best / step["operations"] * 1e3,
            "power_limited": is_power_limited(step),
            "mean_ms": mean_s * 1e3,
            "mean_tokens_per_s": tokens / mean_s,
            "mean_mfu": mean_mfu,
            "thousand_tokens_j": step["energy_per_step_j"] / (tokens / 1e3),
            "billion_tokens_h": 1e9 / (tokens / mean_s) / 3600,
            "billion_tokens_kwh": step["energy_per_step_j"] / (tokens / 1e9) / 3.6e6,
            "large_matmul_share": mean_mfu * 989.5 / MOST["matmul_bf16"],
            "sustained_matmul_share": mean_mfu * 989.5 / SUSTAINED,
            "at_clock_mfu": mean_mfu * 1830 / step["sm_clock_mhz"],
            "matmul_ms": matmul,
            "memory_traffic_ms": moved,
            "reference_ms": matmul + moved,
            "sustained_reference_ms": matmul * MOST["matmul_bf16"] / SUSTAINED + moved,
            "speedup": speedup_of(case, optimization),
        }
        others = {
            "previous": previous_of(case, optimization),
            "fp32": step_of(case, "fp32"),
            "graph": step_of(case, "cuda_graph"),
        }
        for name, other in others.items():
            for column in ("wall_ms", "gpu_ms", "operations"):
                derived[f"{name}_{column}"] = other.get(column, NAN)
            derived[f"{name}_gpu_speedup"] = other.get("gpu_ms", NAN) / step["gpu_ms"]
            derived[f"{name}_wall_speedup"] = wall_speedup(other, step) if other else NAN
        yield (*case, optimization), step | derived


def cases() -> list[tuple]:
    return [*dict.fromkeys(key[:-1] for key in STEPS)]


def expected_speedups() -> Iterator[tuple[tuple, Row]]:
    for case in cases():
        printed = [name for name in (*LADDER[1:], "fp8") if step_of(case, name)]
        tokens = case[1] * case[3]
        common = {"tokens": tokens, "column": f"{case[0]}, {tokens:,}"}
        for name in printed:
            yield (*case, name), common | {"speedup": speedup_of(case, name), "product_error": NAN}
        first, last = step_of(case, "fp32"), step_of(case, "bf16_moments")
        if first and last:
            total = first["gpu_ms"] / last["gpu_ms"]
            factors = [speedup_of(case, name) for name in LADDER[1:] if name != "cuda_graph"]
            product = math.prod(factor for factor in factors if factor > 0)
            yield (*case, "all"), common | {"speedup": total, "product_error": abs(product / total - 1)}
            is_steady = spread(first) <= 0.03 * first["wall_ms"]
            in_wall_time = wall_speedup(first, last) if is_steady else NAN
            yield (*case, "all_wall"), common | {"speedup": in_wall_time, "product_error": NAN}


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
        yield (
            (*case, removed),
            {
                "column": f"{case[0]} {case[1]:,}",
                "slowdown_ratio": clear(slowdown),
                "repeat_ratio": max(times) / min(times),
                "power_limited": bool(twin) and is_power_limited(step) and is_power_limited(twin),
            },
        )


def kernel_ms() -> dict[tuple, dict[str, float]]:
    """Return each step's GPU time in ms, keyed by kernel category."""
    times: dict[tuple, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in RAW["kernels"].to_dict("records"):
        times[*(row[name] for name in CASE), row["optimization"]][row["kernel_category"]] += row["gpu_ms"]
    return times


def attention_names(step: tuple) -> set[str]:
    kernels = RAW["kernels"]
    is_step = kernels.optimization == step[-1]
    for name, value in zip(CASE, step):
        is_step &= kernels[name] == value
    return {*kernels[is_step & (kernels.kernel_category == "fused attention")].name}


def expected_baselines() -> Iterator[tuple[tuple, Row]]:
    times = kernel_ms()
    fair = ("hugging_face_no_mask", "hugging_face_no_mask_cuda_graph")
    for (*place, optimization), step in STEPS.items():
        case = tuple(place)
        if not optimization.startswith("hugging_face"):
            continue
        ours, graph = step_of(case, "bf16_moments"), step_of(case, "cuda_graph")
        ms = {
            name: times[*case, name]["fused attention"]
            for name in (optimization, "bf16_moments", "cuda_graph")
        }
        candidates = [step_of(case, name)["wall_ms"] for name in fair if step_of(case, name)]
        names = attention_names((*case, optimization))
        derived = {
            "attention_ms": ms[optimization],
            "fastest_without_mask": bool(candidates) and step["wall_ms"] == min(candidates),
            "speedup": clear(wall_speedup(step, ours)),
            "gpu_ratio": step["gpu_ms"] / graph["gpu_ms"],
            "attention_ratio": ms[optimization] / ms["cuda_graph"],
            "same_kernels": names == attention_names((*case, "cuda_graph")),
            "cudnn_attention": any("cudnn" in name for name in names),
            "substituted_ratio": 1
            + (step["gpu_ms"] - ms[optimization] - graph["gpu_ms"] + ms["cuda_graph"]) / graph["gpu_ms"],
            "low_precision_speedup": graph["gpu_ms"] / ours["gpu_ms"],
        }
        for prefix, name, other in (("ours", "bf16_moments", ours), ("torch_adamw", "cuda_graph", graph)):
            derived[f"{prefix}_attention_ms"] = ms[name]
            for column in ("wall_ms", "gpu_ms", "steps", "sm_clock_mhz"):
                derived[f"{prefix}_{column}"] = other[column]
        yield (*case, optimization), step | derived


def expected_fp8() -> Iterator[tuple[tuple, Row]]:
    for case in cases():
        bf16, low = step_of(case, "bf16_moments"), step_of(case, "fp8")
        if not bf16 or not low:
            continue
        speedup = bf16["gpu_ms"] / low["gpu_ms"]
        is_apart = bf16["wall_ms"] - low["wall_ms"] > max(spread(bf16), spread(low))
        derived = {
            "tokens": case[1] * case[3],
            "gpu_speedup": speedup,
            "speedup": clear(speedup),
            "clear_gain": speedup >= 1.03 and is_apart,
        }
        for prefix, step in (("bf16", bf16), ("fp8", low)):
            for column in ("wall_ms", "gpu_ms", "steps", "sm_clock_mhz"):
                derived[f"{prefix}_{column}"] = step[column]
        derived["bf16_mean_mfu"] = bf16["mfu"] * bf16["wall_ms"] / bf16["wall_mean_ms"]
        yield case, derived


def smooth_losses() -> dict[tuple, dict[tuple, list[float]]]:
    """Return ten-step moving averages of the loss, keyed by case, then by optimization and seed.

    The averages of the first four steps are NaN.
    """
    smooth: dict[tuple, dict[tuple, list[float]]] = defaultdict(dict)
    columns = [*CASE, "optimization", "seed"]
    for key, rows in RAW["curves"].groupby(columns):
        losses = rows.sort_values("step").loss.tolist()
        means = [sum(losses[max(0, end - 10) : end]) / min(end, 10) for end in range(1, len(losses) + 1)]
        smooth[key[:4]][key[4:]] = [NAN] * 4 + means[4:]
    return smooth


def expected_loss_curves() -> Iterator[tuple[tuple, Row]]:
    raw = RAW["curves"].set_index([*CASE, "optimization", "seed", "step"]).loss
    for case, curves in smooth_losses().items():
        baseline = next(name for name, seed in curves if seed == 1)
        for (optimization, seed), losses in curves.items():
            for step, loss in enumerate(losses):
                key = (*case, optimization, seed, step)
                shift = loss - curves[baseline, 0][step]
                values = {
                    "loss_nats": raw[key],
                    "smooth_nats": loss,
                    "shift_nats": shift,
                    "baseline": baseline,
                }
                yield key, values


def parts_ms(step: tuple, times: dict[str, float]) -> dict[str, float]:
    names = {"matrix multiply": "matmuls", "optimizer": "AdamW", "fused attention": "attention"}
    names["compiler-generated"] = "generated kernels"
    ms = dict.fromkeys([*names.values(), "other kernels"], 0.0)
    for category, value in times.items():
        ms[names.get(category, "other kernels")] += value
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
        total = {"ms": 0.0, "reference_ms": 0.0, "over_ms": 0.0}
        for part, value in ms.items():
            work, bytes_ = flops.get(part, NAN), moved.get(part, NAN)
            moving = bytes_ / MOST["copy"] / 1e9
            reference = work / MOST["matmul_bf16"] / 1e9 if part in flops else 0.0
            reference = moving if part == "AdamW" else reference
            row = {"ms": value, "reference_ms": reference, "over_ms": value - reference}
            total = {name: total[name] + row[name] for name in total}
            achieved = value or NAN
            row |= {"flops": work, "bytes": bytes_, "memory_traffic_ms": moving}
            row |= {"sustained_ms": work / SUSTAINED / 1e9}
            row |= {"tflops": work / achieved / 1e9, "tb_per_s": bytes_ / achieved / 1e9}
            yield (*step, part), row
        yield (*step, "the step"), total


def expected_roofline() -> Iterator[tuple[tuple, Row]]:
    for step, times in kernel_ms().items():
        case, optimization = step[:-1], step[-1]
        if optimization not in ("fp32", "bf16_moments"):
            continue
        size, context, vocabulary, batch = case
        d, f, layers, heads = DIMENSIONS[size]
        tokens, is_naive = batch * context, optimization == "fp32"
        width, square = (4, batch * heads * context**2) if is_naive else (2, 0)
        ms = parts_ms(step, times)
        shapes = layers * (4 * [(d, d)] + 3 * [(d, f)]) + [(d, vocabulary)]
        numbers = sum(tokens * a + a * b + tokens * b for a, b in shapes)
        numbers += layers * 2 * (square + 2 * tokens * d) * is_naive
        streamed = layers * (tokens * (27 * d + 8 * f) + 5 * square)
        operations = layers * (tokens * (45 * d + 16 * f) + 12 * square)
        flops = forward_flops(case) if is_naive else dense_flops(case)
        rest = ms["generated kernels"] + ms["other kernels"]
        work: dict[str, tuple[float, float, float]] = {
            "matmuls": (3 * flops, 3 * numbers * width, ms["matmuls"]),
            "AdamW": (14 * parameters(case), (28 if is_naive else 20) * parameters(case), ms["AdamW"]),
            "between matmuls": (operations, streamed * width, rest),
        }
        if not is_naive:
            work["attention"] = (causal_flops(case), attention_bytes(case), ms["attention"])
        for part, (done, bytes_, value) in work.items():
            row = {"flops": done, "bytes": bytes_, "ms": value}
            yield (*step, part), row | {"intensity": done / bytes_, "tflops": done / value / 1e9}


EXPECTED: dict[str, Callable[[], Iterator[tuple[tuple, Row]]]] = {
    "steps": expected_steps,
    "speedups": expected_speedups,
    "ablations": expected_ablations,
    "baselines": expected_baselines,
    "fp8": expected_fp8,
    "loss_curves": expected_loss_curves,
    "parts": expected_parts,
    "roofline": expected_roofline,
}


def is_text(name: str) -> bool:
    """Return whether a column contains printed text (an optimization's name, or quartiles)."""
    return name == "name" or name.endswith("quartiles")


@pytest.mark.parametrize("name", EXPECTED)
def test_view_matches_recomputation_from_files(name: str):
    view, expected = VIEWS[name], dict(EXPECTED[name]())
    key = view.attrs["key"]
    columns = [column for column in view if column not in key and not is_text(column)]
    actual = keyed(view, key)
    assert {*actual} == {*expected}
    wrong = []
    for place, row in actual.items():
        for column in columns:
            if not is_same(row[column], expected[place].get(column, NAN if column != "reason" else "")):
                wrong.append((place, column, row[column], expected[place].get(column)))
    assert not wrong[:10]


def test_cpu_run_views_omit_only_gpu_measurements():
    # the CPU run's size is custom, so give it a known name, from which the views compute FLOPs
    raw = {name: table.assign(size="nano") for name, table in read_ladder(CPU_FOLDER).items()}
    views = Views(raw)
    rows = {name: len(views[name]) for name in (*EXPECTED, "rates", "kernel_shares", "training")}
    assert rows["steps"] == len(raw["ladder.steps"]) > 0
    assert rows["loss_curves"] == len(raw["ladder.curves"]) > 0
    assert rows["ablations"] == rows["baselines"] == rows["fp8"] == 0
    steps = views["steps"]
    assert not steps.launch_bound.any()
    assert not steps.power_limited.any()
    assert steps.thousand_tokens_j.isna().all()
    assert steps.speedup.notna().any()


def test_step_is_power_limited_by_its_power_if_the_driver_reports_no_reasons():
    steps = TABLES["ladder.steps"].assign(clock_reasons=None)
    views = Views(TABLES | {"ladder.steps": steps})["steps"]
    assert (views.power_limited == (views.power_w > 0.95 * 700)).all() and views.power_limited.nunique() == 2
