"""The ladder's tables: what is in a run's files, and what is printed of all runs."""

import math

import pandas as pd
import pandera.pandas as pa

from stepscope.report.schemas import STATUSES, Tables, measured, tidy, word
from stepscope.report.shapes import select
from stepscope.report.tables import MOST_ROWS, counted, digits, headed, number, quartiles, table
from stepscope.stats import AT_CAP, LEAST_GAIN, MOST_BUSY, launch_bound_rows
from stepscope.studies.ladder.config import (
    ADDED,
    BASELINES,
    BEYOND,
    FILLED,
    LEFT_OUT,
    MEASURES,
    RUNGS,
    SCRIPT,
    WITHOUT,
)
from stepscope.studies.ladder.parts import GAPS, last_step, milliseconds
from stepscope.studies.ladder.rows import (
    LAST,
    PLACE,
    Shape,
    all_of_them,
    at_clock,
    at_context,
    at_longest,
    baseline_attention,
    by_tokens,
    ceilings,
    costs,
    fair_modes,
    gain,
    ladders,
    largest_ladder,
    loss_shift,
    rates_said,
    smallest_ladder,
    timed,
    trained,
    with_baseline,
    without,
)
from stepscope.studies.ladder.rows_fp8 import by_batch

CONFIG = ("size", "context_length", "vocab_size")
CASE = ("optimization", "batch_size")
KEY = {
    "optimization": word(*RUNGS, *BEYOND, FILLED, *WITHOUT, *BASELINES),
    "batch_size": pa.Column(int, pa.Check.in_range(1, 2**20), coerce=True),
}
COUNT = pa.Column(int, pa.Check.ge(0), coerce=True)
SCHEMAS = {
    "steps": tidy(
        CASE,
        **KEY,
        status=word(*STATUSES),
        reason=word(),
        unsteady=word(),
        **{name: measured() for name in (*MEASURES, *ADDED)},
    ),
    "kernels": tidy((*CASE, "name"), **KEY, name=word(), family=word(), count=measured(), gpu_ms=measured()),
    "curves": tidy((*CASE, "seed", "step"), **KEY, seed=COUNT, step=COUNT, loss=measured()),
}
NUMBERS = (
    "parameters",
    "power_limit_w",
    "matmul_fp32",
    "matmul_bf16",
    "matmul_fp8",
    "copy",
    "sheet_bf16",
    "kept_up_tflops",
    "kept_up_clock_mhz",
    "kept_up_power_w",
    "v_nearest",
    "v_stochastic",
    "v_fp32",
    "compared",
    "unequal",
    "low_compared",
    "low_unequal",
)  # results that are read as such
NAMES = {
    "fp32": "fp32, naive attention",
    "tf32": "TF32",
    "bf16": "bf16 autocast",
    "sdpa": "fused attention",
    "fused": "fused AdamW",
    "blocks": "compiled blocks",
    "cuda_graph": "CUDA graph of the step",
    "bf16_weights": "bf16 weights, fp32 masters",
    "bf16_moments": "bf16 moments",
    "chunked": "chunked loss",
    "fp8": "FP8 matmuls",
    "filled": "batch that fills the memory",
    "hugging_face": "Hugging Face, compiled",
    "hugging_face_graphs": "Hugging Face, reduce-overhead",
    "hugging_face_causal": "Hugging Face, no mask",
    "hugging_face_captured": "Hugging Face, no mask, one graph",
    "fast_step": "fast_step.py",
    "without_sdpa": "without fused attention",
    "without_blocks": "without compiled blocks",
    "without_cuda_graph": "without a CUDA graph",
    "without_bf16_weights": "without bf16 weights",
    "without_bf16_moments": "without bf16 moments",
}


# -- printed ------------------------------------------------------------------------------------------------

HEADINGS = {
    "context_length": "context",
    "batch_size": "batch",
    "tokens": "tokens a step",
    "fp8_ms": "FP8, ms",
    "gain": "faster, x",
    "busy": "busy, %",
    "operations": "kernels, n",
    "steps": "steps, n",
    "tokens_per_s": "speed, tokens/s",
    "vocab_size": "vocabulary",
    "mfu": "MFU, %",
    "mfu_measured": "of a large matmul, %",
    "mfu_at_clock": "at its clock, %",
    "compile_s": "compiling, s",
    "bf16_mfu": "MFU of bf16, %",
    "quartiles": "quartiles, ms",
    "best_ms": "at best, ms",
    "bf16_quartiles": "quartiles of bf16, ms",
    "fp8_quartiles": "quartiles of FP8, ms",
    "bf16_clock": "SM clock of bf16, MHz",
    "fp8_clock": "SM clock of FP8, MHz",
}


def _headed(rows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    if "busy" in columns:
        rows = rows.assign(busy=rows["busy"].where(rows["busy"] <= MOST_BUSY))
    return headed(rows[[*columns]].rename(columns=HEADINGS)).dropna(axis="columns", how="all")


def _walls(rows: pd.DataFrame) -> pd.DataFrame:
    """Steps as tables tell their wall times: with ``quartiles``, and ``best_ms`` of those that are
    launch-bound."""
    return rows.assign(quartiles=quartiles(rows), best_ms=rows["wall_min_ms"].where(launch_bound_rows(rows)))


def _capped_clock(rows: pd.DataFrame) -> pd.Series:
    """The rows' SM clock, where the power cap held that of any down; else of none."""
    clocks = rows["sm_clock_mhz"]
    return clocks if clocks.min() < AT_CAP * clocks.max() else clocks * math.nan


def _named(rows: pd.DataFrame, heading: str = "optimization") -> pd.DataFrame:
    """Rows by rung, under the optimizations' names."""
    return rows.set_axis(pd.Index(rows.index.map(NAMES), name=heading))


def _place(rows: pd.DataFrame) -> dict[str, str]:
    """The headings of size and context, and of what else tells rows apart."""
    return {
        name: HEADINGS.get(name, name)
        for name in PLACE
        if name in ("size", "context_length") or rows[name].nunique() > 1
    }


def ladder_steps(tables: Tables) -> pd.DataFrame:
    """The largest size's ladder, and the baselines."""
    _, rows = largest_ladder(tables)
    own = _walls(timed(rows, [*RUNGS, *BASELINES]))
    own = own.assign(gain=[gain(rows, rung) for rung in own.index])
    printed = _headed(
        own,
        "wall_ms",
        "quartiles",
        "best_ms",
        "steps",
        "gpu_ms",
        "replayed_ms",
        "gain",
        "busy",
        "operations",
        "tokens_per_s",
        "mfu",
        "peak_gib",
        "reserved_gib",
        "power_w",
        "sm_clock_mhz",
        "compile_s",
    )
    return table(_named(printed), bold=("min", "column", "wall, ms", "GPU time, ms"))


def _rungs(found: dict[Shape, pd.DataFrame]) -> pd.DataFrame | None:
    columns = {shape.size: [gain(rows, rung) for rung in RUNGS[1:]] for shape, rows in found.items()}
    first = next(iter(found))
    heading = f"context {first.context_length:,}, batch {first.batch_size:,}"
    printed = _named(pd.DataFrame(columns, index=RUNGS[1:], dtype=float), heading).dropna(how="all")
    rungs = len(printed)
    for words, clock in {"all of them": "gpu_ms", "all of them, in wall time": "wall_ms"}.items():
        printed.loc[words] = {shape.size: all_of_them(rows, clock) for shape, rows in found.items()}
    return table(printed.dropna(how="all"), unit="x") if rungs else None


def which_optimization(tables: Tables) -> pd.DataFrame | None:
    """Optimizations x sizes: how many times faster than the row above; last, all of them."""
    return _rungs(at_context(tables))


def which_optimization_longer(tables: Tables) -> pd.DataFrame | None:
    """The same at the longest context."""
    return _rungs(at_longest(tables))


AT_TOKENS = ("blocks", "cuda_graph", "bf16_weights", "bf16_moments", "fp8")


def which_at_tokens(tables: Tables) -> pd.DataFrame:
    """Gains of changes x sizes and tokens a step."""
    found = by_tokens(tables, AT_TOKENS)
    printed = (
        pd.DataFrame(
            {
                f"{shape.size}, {shape.batch_size * shape.context_length:,}": gains
                for shape, gains in found.items()
            }
        )
        .reindex(AT_TOKENS)
        .dropna(how="all")
    )
    heading = f"context {next(iter(found)).context_length:,}, tokens a step"
    return table(
        _named(printed, heading),
        unit="x",
        note=(
            "As above; FP8 over the step with bf16 moments. –: less than steps differ by, or one of the two did"
            " not fit or was not measured."
        ),
    )


def which_without(tables: Tables) -> pd.DataFrame:
    """How many times as long the last step takes without one change, a column a shape."""
    ratios = {f"{shape.size} {shape.context_length:,}": own for shape, own in without(tables).items()}
    printed = pd.DataFrame(ratios).reindex(LEFT_OUT).dropna(how="all")
    return table(
        _named(printed, "the last step without"),
        unit="x",
        note=(
            "GPU time, without the CUDA graph wall time. Compiling fuses naive attention's mask and softmax, too."
            " Without bf16 weights, and so bf16 moments, it is the CUDA graph's step again, without bf16 moments"
            " that of bf16 weights. –: less than steps differ by, or not measured."
        ),
    )


def cost(tables: Tables) -> pd.DataFrame:
    """What training costs at the last step's speed: a row a size."""
    names = {
        "tokens_per_s": "tokens/s",
        "thousand_j": "a thousand tokens, J",
        "billion_h": "a billion tokens, h",
        "billion_kwh": "a billion tokens, kWh",
    }
    context = next(iter(at_context(tables))).context_length
    return table(
        costs(tables).rename(columns=names).rename_axis("size"),
        note=(f"Energy of the GPU alone, at context {context:,}."),
    )


def last_parts(tables: Tables) -> pd.DataFrame:
    """The largest size's last step in parts, with FP8's beside it, where that was captured."""
    shape, parts, rates = last_step(tables)
    printed = parts.drop(columns=["flops", "bytes"])
    printed.loc["the step"] = printed[["ms", "bound_ms", "over"]].sum()
    try:
        eight = milliseconds(tables, shape, "fp8")
        wall = select(tables["ladder.steps"], shape._asdict(), optimization="fp8")["wall_ms"].iloc[0]
        eight[GAPS], eight["the step"] = wall - eight.sum(), wall
        printed["fp8_ms"] = eight
    except LookupError:
        pass  # it was not measured
    names = {
        "bound_ms": "at the bound, ms",
        "over": "over it, ms",
        "tflops": "achieved, TFLOP/s",
        "tb_s": "achieved, TB/s",
        "fp8_ms": "with FP8, ms",
    }
    heading = pd.Index(printed.index, name=f"{shape.size}, {NAMES[LAST]}")
    return table(
        printed.rename(columns=names).set_axis(heading),
        note=(f"The bound: {rates_said(rates)}, and a copy's {number(rates.copy, 'TB/s')}."),
    )


def fast_step(tables: Tables) -> pd.DataFrame:
    """The script as measured, a row a size; where it was not, what a step takes with each of its lines and
    those above it in the ladder, at the smallest and largest size: the last two rungs need our optimizer."""
    scripts = [
        timed(rows, [SCRIPT]).assign(size=shape.size, same_ms=rows["wall_ms"].get("cuda_graph"))
        for shape, rows in at_context(tables).items()
        if SCRIPT in timed(rows, [SCRIPT]).index
    ]
    if scripts:
        same = "the ladder's, to its CUDA graph, ms"
        own = _walls(pd.concat(scripts, ignore_index=True)).rename(columns={"same_ms": same})
        return table(
            _headed(own, "size", "wall_ms", "quartiles", "steps", "gpu_ms", "operations", "peak_gib", same),
            note="The last column is the ladder's step of the same lines.",
        )
    found, counts = {}, []
    for shape, rows in (smallest_ladder(tables), largest_ladder(tables)):
        own = _walls(rows.reindex(RUNGS[:-2]))
        counts.append(own["steps"])
        found |= {
            f"{shape.size}, ms": own["wall_ms"],
            f"quartiles of {shape.size}, ms": own["quartiles"],
            f"{shape.size} at best, ms": own["best_ms"],
            f"SM clock of {shape.size}, MHz": _capped_clock(own),
        }
    printed = pd.DataFrame(found).dropna(how="all").dropna(axis="columns", how="all")
    return table(
        _named(printed, "with"),
        note=(
            f"The ladder's steps, which compile the embedding and the loss, too: wall time, medians of"
            f" {counted(pd.concat(counts))} steps. Where launches set the pace, fewer kernels help, and faster"
            " ones not before the CUDA graph."
        ),
    )


def launch_cure(tables: Tables) -> pd.DataFrame | None:
    """The smallest size's bf16 step: eager, compiled, as a CUDA graph."""
    shape, rows = smallest_ladder(tables)
    kinds = {
        "fused": "eager, fused attention and AdamW",
        "blocks": "compiled blocks",
        "cuda_graph": "CUDA graph of compiled blocks",
    }
    own = timed(rows, [*kinds])
    if len(own) < len(kinds):
        return None
    printed = _headed(_walls(own), "operations", "wall_ms", "quartiles", "best_ms", "steps", "gpu_ms", "busy")
    heading = f"{shape.size}, context {shape.context_length}, bf16"
    return table(printed.set_axis(pd.Index(kinds.values(), name=heading)))


def baselines(tables: Tables) -> pd.DataFrame:
    """Our last step, and the last with PyTorch's AdamW, against Hugging Face's: wall time at every shape."""
    modes = fair_modes(tables)
    rows = with_baseline(tables, modes)
    words = {
        "ours": ("ours", "of ours"),
        "fp32": ("ours with PyTorch's AdamW", "with it"),
        "baseline": ("Hugging Face", "of Hugging Face"),
    }
    names = _place(rows)
    for name, (said, of) in words.items():
        names |= {
            f"{name}_ms": f"{said}, ms",
            f"{name}_quartiles": f"quartiles {of}, ms",
            f"{name}_clock": f"clock {of}, MHz",
        }
    steps = pd.concat([rows[f"{name}_steps"] for name in words])
    note = (
        f"Medians of {counted(steps)} steps, with the SM clock of each; the quicker of"
        f" {' and '.join(NAMES[mode] for mode in modes)}."
    )
    told = rows["faster"].where((rows["faster"] - 1).abs() >= LEAST_GAIN)
    return table(rows[[*names]].rename(columns=names).assign(**{"ours faster, x": told}), note=note)


def baselines_attention(tables: Tables) -> pd.DataFrame:
    """The same step of Hugging Face's beside ours with PyTorch's AdamW, in GPU time: what attention makes."""
    rows = baseline_attention(tables)
    names = _place(rows) | {
        "fp32_gpu_ms": "ours with PyTorch's AdamW, ms",
        "fp32_clock": "its SM clock, MHz",
        "baseline_gpu_ms": "Hugging Face, ms",
        "baseline_clock": "its clock, MHz",
        "whole": "its step over ours, x",
        "fp32_attention_ms": "our attention, ms",
        "baseline_attention_ms": "its attention, ms",
        "attention": "its attention over ours, x",
        "without": "its step with our attention over ours, x",
    }
    return table(rows[[*names]].rename(columns=names))


def fp8_batches(tables: Tables) -> pd.DataFrame:
    """FP8 beside bf16's last step: a row a size and batch."""
    rows = by_batch(tables)
    told = rows["gain"].where((rows["gain"] - 1).abs() >= LEAST_GAIN)
    steps = counted(pd.concat([rows["bf16_steps"], rows["fp8_steps"]]))
    return table(
        _headed(
            rows.assign(gain=told),
            "size",
            "batch_size",
            "tokens",
            "bf16_ms",
            "bf16_quartiles",
            "bf16_clock",
            "fp8_ms",
            "fp8_quartiles",
            "fp8_clock",
            "gain",
            "bf16_mfu",
        ),
        note=(
            f"Faster: in GPU time, –: by under {number(LEAST_GAIN, '%')}. Wall times are medians of {steps}"
            " steps."
        ),
    )


def mfu(tables: Tables) -> pd.DataFrame:
    """The last timed rung at every shape and batch, and the batch that fills the memory: rates, power and
    memory."""
    order = [*RUNGS, FILLED]
    steps = select(tables["ladder.steps"], optimization=order, wall_ms=pd.Series.notna)
    steps = steps.sort_values("optimization", key=lambda names: names.map(order.index), kind="stable")
    own, note = _walls(at_clock(tables, select(steps.groupby(PLACE, sort=False).tail(1)))), ""
    if own["mfu"].notna().any():
        rates, sheet = ceilings(tables, _run(own)), tables["ladder.results"]["sheet_bf16"].median()
        own["mfu_measured"] = own["mfu"] * sheet / rates.matmul
        note = f"A large matmul's rate: {rates_said(rates)}."
    own["optimization"] = own["optimization"].map(NAMES)
    printed = _headed(
        own,
        "optimization",
        "size",
        "context_length",
        "vocab_size",
        "batch_size",
        "wall_ms",
        "quartiles",
        "best_ms",
        "steps",
        "tokens_per_s",
        "mfu",
        "mfu_measured",
        "mfu_at_clock",
        "sm_clock_mhz",
        "power_w",
        "peak_gib",
        "reserved_gib",
    )
    return table(printed, rows=2 * MOST_ROWS, note=note)


def _run(rows: pd.DataFrame) -> str:
    return str(rows["run_id"].iloc[0]) if "run_id" in rows else ""


def ladder_memory(tables: Tables) -> pd.DataFrame:
    """Peak and reserved memory of every rung: a row a rung, a column a shape."""
    found = {}
    for shape, rows in ladders(tables).items():
        own, words = timed(rows, [*RUNGS, *BEYOND]), f"{shape.size} {shape.context_length:,}"
        words += f", vocabulary {shape.vocab_size:,}" * (f"{words}, GiB" in found)
        pairs = own[["peak_gib", "reserved_gib"]].map(lambda gib: digits(gib, "GiB")).agg("/".join, axis=1)
        found[f"{words}, GiB"] = pairs
    printed = pd.DataFrame(found).reindex([*RUNGS, *BEYOND]).dropna(how="all")
    return table(
        _named(printed),
        note=(
            "Peak of what tensors hold/what the process reserves, by size and context. A CUDA graph's pool keeps"
            " the memory of all tensors of a step for itself."
        ),
    )


def training_check(tables: Tables) -> pd.DataFrame:
    """How far gradients and losses are from fp32's."""
    shape, shifts = trained(tables)
    distance, seeds = loss_shift(shifts)
    steps = select(tables["ladder.steps"], shape._asdict()).set_index("optimization")
    order = [rung for rung in (*RUNGS, *BEYOND) if rung in distance]
    found = pd.DataFrame(
        {
            "gradient off, %": steps["gradient_error"].reindex(order),
            "loss moved": distance[order],
            "of another seed, %": distance[order] / seeds,
        }
    )
    return table(_named(found), note="Loss moved: mean distance of means of ten steps, in nats.")


PRINTED = {
    printed.__name__: printed
    for printed in (
        ladder_steps,
        which_optimization,
        which_optimization_longer,
        which_at_tokens,
        which_without,
        cost,
        last_parts,
        fast_step,
        launch_cure,
        baselines,
        baselines_attention,
        fp8_batches,
        mfu,
        ladder_memory,
        training_check,
    )
}
