"""The ladder's tables: what is in a run's files, and what is printed of all runs."""
import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

import pandas as pd
import pandera.pandas as pa

from stepscope.report.schemas import STATUSES, Tables, measured, tidy, word
from stepscope.report.shapes import ORDER, reference, select
from stepscope.report.tables import MOST_ROWS, counted, digits, headed, number, quartiles, table
from stepscope.stats import AT_CAP, LEAST_GAIN, MOST_BUSY, launch_bound_rows, spread_ms, wall_gain
from stepscope.studies.ladder.config import (
    BASELINES,
    BEYOND,
    FILLED,
    MEASURES,
    OF_BEFORE,
    RUNGS,
    SPREAD,
)

CONFIG = ("size", "context_length", "vocab_size")
PLACE = [*ORDER]
CASE = ("change", "batch_size")
KEY = {"change": word(*RUNGS, *BEYOND, FILLED, *BASELINES),
       "batch_size": pa.Column(int, pa.Check.in_range(1, 2**20), coerce=True)}
COUNT = pa.Column(int, pa.Check.ge(0), coerce=True)
SCHEMAS = {
    "steps": tidy(
        CASE, **KEY, status=word(*STATUSES), reason=word(), **{name: measured() for name in MEASURES},
        **{name: measured(required=False) for name in (*SPREAD, *OF_BEFORE)},
        unsteady=word(required=False)),
    "kernels": tidy((*CASE, "name"), **KEY, name=word(), family=word(), count=measured(), gpu_ms=measured()),
    "curves": tidy((*CASE, "seed", "step"), **KEY, seed=COUNT, step=COUNT, loss=measured()),
}
NUMBERS = ("parameters", "power_limit_w", "matmul_bf16", "copy", "sheet_bf16", "kept_up_tflops",
           "kept_up_clock_mhz", "kept_up_power_w", "v_nearest", "v_by_chance", "v_fp32", "compared",
           "unequal", "low_compared", "low_unequal")  # results that are read as such
LAST = RUNGS[-1]
NAMES = {"fp32": "fp32, naive attention", "tf32": "TF32", "bf16": "bf16 autocast", "sdpa": "fused attention",
         "fused": "fused AdamW", "blocks": "compiled blocks", "cuda_graph": "CUDA graph of the step",
         "bf16_weights": "bf16 weights, fp32 masters", "bf16_moments": "bf16 moments",
         "chunked": "chunked loss", "fp8": "FP8 matmuls", "filled": "batch that fills the memory",
         "hugging_face": "Hugging Face, compiled", "hugging_face_graphs": "Hugging Face, reduce-overhead"}


class Shape(NamedTuple):
    """One ladder: a shape and the batch that it was measured at."""

    size: str
    context_length: int
    vocab_size: int
    batch_size: int


def ladders(tables: Tables) -> dict[Shape, pd.DataFrame]:
    """The rows of every shape and batch that has a timed fp32 step, by rung, in order.

    Raises:
        LookupError: there is none.
    """
    groups = select(tables["ladder.steps"]).groupby(PLACE, sort=False)
    found = {Shape(*place): rows.set_index("change") for place, rows in groups}
    found = {shape: rows for shape, rows in found.items() if "fp32" in timed(rows).index}
    if not found:
        raise LookupError("no ladder")
    return found


def at_context(tables: Tables, context: int | None = None) -> dict[Shape, pd.DataFrame]:
    """One ladder a size: of the plainest vocabulary, at a context, if not another at the reference's."""
    found = ladders(tables)
    shapes = pd.DataFrame([*found])
    context, vocab = context or reference(shapes["context_length"]), shapes["vocab_size"].min()
    return {shape: rows for shape, rows in found.items()
            if (shape.context_length, shape.vocab_size) == (context, vocab)}


def at_longest(tables: Tables) -> dict[Shape, pd.DataFrame]:
    """:func:`at_context` of the longest context.

    Raises:
        LookupError: sizes are compared at no longer one.
    """
    longest = max(shape.context_length for shape in ladders(tables))
    if longest <= next(iter(at_context(tables))).context_length:
        raise LookupError("no longer context")
    return at_context(tables, longest)


def smallest_ladder(tables: Tables) -> tuple[Shape, pd.DataFrame]:
    """The ladder of the smallest size, of those that compare sizes."""
    return next(iter(at_context(tables).items()))


def largest_ladder(tables: Tables) -> tuple[Shape, pd.DataFrame]:
    """The ladder whose fp32 step takes longest, of those that compare sizes."""
    return max(at_context(tables).items(), key=lambda item: item[1].loc["fp32", "wall_ms"])


def timed(rows: pd.DataFrame, names: Sequence[str] = RUNGS) -> pd.DataFrame:
    """A ladder's timed rungs in their order."""
    return rows.reindex([*names]).dropna(subset="wall_ms")


def gain(rows: pd.DataFrame, rung: str) -> float | None:
    """How many times faster than the rung before: in GPU time, and of the CUDA graph, which removes
    launches and no kernel, in wall time (as of :func:`faster`). None for less than :data:`LEAST_GAIN`, and
    where one is not known."""
    own = timed(rows)
    before = own.index[max(own.index.get_loc(rung) - 1, 0)] if rung in own.index else rung
    if rung == "cuda_graph":
        found = faster(own, rung, before)
    else:
        found = own["gpu_ms"].get(before, math.nan) / own["gpu_ms"].get(rung, math.nan)
    return found if abs(found - 1) >= LEAST_GAIN else None


def faster(rows: pd.DataFrame, rung: str, than: str) -> float:
    """How many times faster in wall time a rung's step is than another's: launch-bound ones by their fastest
    steps; nan for less than such times differ by (:func:`stepscope.stats.wall_gain`), and where one is not
    known."""
    if not {rung, than} <= {*rows.index}:
        return math.nan
    return wall_gain(rows.loc[than], rows.loc[rung])


class Ceilings(NamedTuple):
    """What a GPU's large bf16 matmul reaches, in TFLOP/s, and its copy, in TB/s: medians of the folder's runs
    of the ladder on it, since one run's own are a few percent off, with the matmul's least and most; how many
    runs; and what one matmul after another keeps up at the power cap, nan on records that lack it."""

    matmul: float
    copy: float
    least: float
    most: float
    runs: int
    kept_up: float


def ceilings(tables: Tables, run_id: str = "") -> Ceilings:
    """Of the GPU that this run was on; of a notebook's own run without a name that of all.

    Raises:
        LookupError: no run measured them.
    """
    results = tables["ladder.results"].dropna(subset="matmul_bf16")
    if "runs" in tables and {"run_id", "device"} <= {*tables["runs"]} and "run_id" in results:
        devices = tables["runs"].drop_duplicates("run_id").set_index("run_id")["device"]
        if run_id in devices.index:
            results = results[results["run_id"].map(devices) == devices[run_id]]
    if results.empty:
        raise LookupError("no rate of a large matmul")
    matmul, kept_up = results["matmul_bf16"], results.get("kept_up_tflops", pd.Series(dtype=float))
    return Ceilings(matmul.median(), results["copy"].median(), matmul.min(), matmul.max(), len(results),
                    kept_up.median())


def bounds(tables: Tables, rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of steps with ``matmul_ms``, ``moved_ms`` and their sum ``bound_ms`` at the rates of
    :class:`Ceilings`, where each run has them at its own; and ``reference_ms``, the same with matmuls at the
    rate that one of them keeps up at the power cap: a reference, no bound."""
    results = tables.get("ladder.results", pd.DataFrame())
    if not {"run_id", "matmul_bf16", "copy"} <= {*results} or "run_id" not in rows:
        return rows.assign(reference_ms=math.nan)
    own, made = results.drop_duplicates("run_id").set_index("run_id"), []
    for run_id, part in rows.groupby("run_id", sort=False):
        rates = ceilings(tables, str(run_id))
        matmul = part["matmul_ms"] * own.loc[run_id, "matmul_bf16"] / rates.matmul
        moved = part["moved_ms"] * own.loc[run_id, "copy"] / rates.copy
        made.append(part.assign(matmul_ms=matmul, moved_ms=moved, bound_ms=matmul + moved,
                                reference_ms=matmul * rates.matmul / rates.kept_up + moved))
    return pd.concat(made).reindex(rows.index) if made else rows


def rates_said(rates: Ceilings) -> str:
    """"764 TFLOP/s, the median of 13 runs, 708 to 777"."""
    many = f", the median of {rates.runs} runs, {digits(rates.least)} to {digits(rates.most)}"
    return number(rates.matmul, "TFLOP/s") + many * (rates.runs > 1)


def shares(kernels: pd.DataFrame, shape: Shape, rung: str) -> pd.Series:
    """Each family's share of the kernels' time in a rung's step.

    Raises:
        LookupError: it was not captured.
    """
    times = select(kernels, shape._asdict(), change=rung).groupby("family")["gpu_ms"].sum()
    return times / times.sum()


def trained(tables: Tables) -> tuple[Shape, pd.DataFrame]:
    """The shape that fp32 was trained at, and by step the loss of each rung and seed there less fp32's of
    the first seed: of means of ten steps, as text is learnt unevenly.

    Raises:
        LookupError: there is none.
    """
    curves = tables["ladder.curves"]
    shape = Shape(*select(curves, change="fp32")[PLACE].iloc[0])
    own = select(curves, shape._asdict())
    losses = own.pivot(index="step", columns=["change", "seed"], values="loss")
    smooth = losses.rolling(10, min_periods=5).mean()
    return shape, smooth.sub(smooth["fp32"].iloc[:, 0], axis=0)


def loss_shift(shifts: pd.DataFrame) -> tuple[pd.Series, float]:
    """Of :func:`trained` how far each rung's loss is from fp32's of the same weights, the mean over steps;
    and the nearest that fp32's losses of two seeds are, nan of one seed."""
    seeds = shifts["fp32"]
    nearest = min(((seeds[a] - seeds[b]).abs().mean() for a, b in combinations(seeds, 2)), default=math.nan)
    return shifts.xs(seeds.columns[0], axis="columns", level="seed").abs().mean().drop("fp32"), nearest


def all_of_them(rows: pd.DataFrame, clock: str) -> float:
    """How many times faster the last rung's step is than fp32's, by ``wall_ms`` or ``gpu_ms``; nan in wall
    time where fp32's few steps were disturbed: they differ by more than what counts as a gain."""
    if clock == "gpu_ms":
        return rows[clock].get(RUNGS[0], math.nan) / rows[clock].get(LAST, math.nan)
    disturbed = spread_ms(rows) > LEAST_GAIN * rows["wall_ms"]
    return math.nan if disturbed.get(RUNGS[0], False) else faster(rows, LAST, RUNGS[0])


def with_baseline(tables: Tables) -> pd.DataFrame:
    """A row a ladder that has baselines: ``ours``, ``fp32`` (ours with PyTorch's AdamW, before bf16 weights)
    and ``baseline``, the quicker of the baseline's modes by wall time: wall, deviation, quartiles, steps, SM
    clock and GPU time of each; ``faster``, ours than the baseline in wall time, and ``same_faster``, the same
    of ours with its AdamW. And of the latter two the milliseconds of attention's kernels, and whether these
    have the same names.

    Raises:
        LookupError: none has.
    """
    compared, kernels = [], tables["ladder.kernels"]
    for shape, rows in ladders(tables).items():
        own = timed(rows, [LAST, "cuda_graph", *BASELINES])
        if {LAST, "cuda_graph"} - {*own.index} or own.index.isin(BASELINES).sum() == 0:
            continue
        baseline = timed(rows, BASELINES)["wall_ms"].idxmin()
        found = shape._asdict() | {"baseline": baseline, "faster": faster(own, LAST, baseline),
                                   "same_faster": faster(own, "cuda_graph", baseline)}
        own = own.assign(quartiles=quartiles(own))
        for name, rung in {"ours": LAST, "fp32": "cuda_graph", "baseline": baseline}.items():
            row = own.loc[rung]
            found |= {f"{name}_ms": row["wall_ms"], f"{name}_std_ms": row["wall_std_ms"],
                      f"{name}_quartiles": row["quartiles"], f"{name}_clock": row["sm_clock_mhz"],
                      f"{name}_steps": row["steps"], f"{name}_gpu_ms": row["gpu_ms"]}
        attention = kernels.merge(pd.DataFrame([shape._asdict() | {"family": "fused attention"}]))
        fp32, other = (attention[attention["change"] == rung] for rung in ("cuda_graph", baseline))
        compared.append(found | {
            "fp32_attention_ms": fp32["gpu_ms"].sum(), "baseline_attention_ms": other["gpu_ms"].sum(),
            "same_kernels": len(fp32) > 0 and {*fp32["name"]} == {*other["name"]}})
    if not compared:
        raise LookupError("no baseline")
    return pd.DataFrame(compared)


def baseline_attention(tables: Tables) -> pd.DataFrame:
    """Of :func:`with_baseline`, by GPU time: how many times the baseline's whole step, and its attention,
    take ours with PyTorch's AdamW (``whole``, ``attention``), and the step with our attention's time in the
    place of its own (``without``). Where both run the same attention kernels.

    Raises:
        LookupError: nowhere.
    """
    rows = select(with_baseline(tables), same_kernels=True, baseline_gpu_ms=pd.Series.notna)
    more = rows["baseline_attention_ms"] - rows["fp32_attention_ms"]
    return rows.assign(whole=rows["baseline_gpu_ms"] / rows["fp32_gpu_ms"],
                       attention=rows["baseline_attention_ms"] / rows["fp32_attention_ms"],
                       without=(rows["baseline_gpu_ms"] - more) / rows["fp32_gpu_ms"])


def by_batch(tables: Tables) -> pd.DataFrame:
    """Wall time, deviation, quartiles and SM clock of the last step in bf16 and with FP8 (``bf16_ms``,
    ``fp8_ms``, ...), ``gain`` in GPU time, whether it is ``clear`` (not small, and in wall time more than
    one step differs by: :func:`stepscope.stats.spread_ms`), and MFU of bf16, of every shape and batch that
    has both.

    Raises:
        LookupError: none has.
    """
    low, eight = (select(tables["ladder.steps"], change=name, wall_ms=pd.Series.notna)
                  for name in (LAST, "fp8"))
    both = select(low.merge(eight, on=PLACE, suffixes=("", "_fp8")))
    other = both.filter(like="_fp8").rename(columns=lambda name: name.removesuffix("_fp8"))
    wall = both["wall_ms"] - other["wall_ms"]
    spread = pd.concat([spread_ms(both), spread_ms(other)], axis=1).max(axis=1)
    gains = both["gpu_ms"] / both["gpu_ms_fp8"]
    return both[PLACE].assign(
        tokens=both["batch_size"] * both["context_length"], bf16_ms=both["wall_ms"],
        bf16_std_ms=both["wall_std_ms"], fp8_ms=both["wall_ms_fp8"], fp8_std_ms=both["wall_std_ms_fp8"],
        bf16_steps=both["steps"], fp8_steps=both["steps_fp8"], bf16_clock=both["sm_clock_mhz"],
        fp8_clock=both["sm_clock_mhz_fp8"], bf16_quartiles=quartiles(both),
        fp8_quartiles=quartiles(other),
        gain=gains, clear=(gains >= 1 + LEAST_GAIN) & (wall > spread), bf16_mfu=both["mfu"])


def pays_from(found: pd.DataFrame) -> int | None:
    """Of :func:`by_batch` the tokens a step from which on FP8 clearly gains at every size; None where it does
    not."""
    vain = found.loc[~found["clear"], "tokens"].max()
    pays = found.loc[~(found["tokens"] <= vain), "tokens"]
    return int(pays.min()) if len(pays) else None


# -- printed ------------------------------------------------------------------------------------------------

HEADINGS = {
    "context_length": "context", "batch_size": "batch", "tokens": "tokens a step", "fp8_ms": "FP8, ms",
    "gain": "faster, x", "busy": "busy, %", "operations": "kernels, n", "steps": "steps, n",
    "wall_std_ms": "std, ms", "tokens_per_s": "speed, tokens/s", "vocab_size": "vocabulary",
    "mfu": "MFU, %", "mfu_measured": "of a large matmul, %", "mfu_at_clock": "at its clock, %",
    "compile_s": "compiling, s", "bf16_mfu": "MFU of bf16, %", "bf16_std_ms": "std of bf16, ms",
    "fp8_std_ms": "std of FP8, ms", "quartiles": "quartiles, ms", "best_ms": "at best, ms",
    "bf16_quartiles": "quartiles of bf16, ms", "fp8_quartiles": "quartiles of FP8, ms",
    "bf16_clock": "SM clock of bf16, MHz", "fp8_clock": "SM clock of FP8, MHz"}


def _headed(rows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    if "busy" in columns:
        rows = rows.assign(busy=rows["busy"].where(rows["busy"] <= MOST_BUSY))
    return headed(rows[[*columns]].rename(columns=HEADINGS)).dropna(axis="columns", how="all")


def _walls(rows: pd.DataFrame) -> pd.DataFrame:
    """Steps as tables tell their wall times: with quartiles in place of the deviation, where they are known,
    and ``best_ms`` of those that are launch-bound."""
    known = quartiles(rows)
    best = rows.reindex(columns=["wall_min_ms"])["wall_min_ms"].where(launch_bound_rows(rows))
    return rows.assign(quartiles=known, best_ms=best, wall_std_ms=rows["wall_std_ms"].where(known.isna()))


def _capped_clock(rows: pd.DataFrame) -> pd.Series:
    """The rows' SM clock, where the power cap held that of any down; else of none."""
    clocks = rows["sm_clock_mhz"]
    return clocks if clocks.min() < AT_CAP * clocks.max() else clocks * math.nan


def _spread(rows: pd.DataFrame, names: Iterable[str]) -> dict[str, str]:
    """Of each name's columns that which says its spread: "<name>_quartiles" where it is known, else
    "<name>_std_ms"; as both are called."""
    return {name: f"{name}_quartiles" if rows[f"{name}_quartiles"].notna().any() else f"{name}_std_ms"
            for name in names}


def _named(rows: pd.DataFrame, heading: str = "change") -> pd.DataFrame:
    """Rows by rung, under the optimizations' names."""
    return rows.set_axis(pd.Index(rows.index.map(NAMES), name=heading))


def _place(rows: pd.DataFrame) -> dict[str, str]:
    """The headings of size and context, and of what else tells rows apart."""
    return {name: HEADINGS.get(name, name) for name in PLACE
            if name in ("size", "context_length") or rows[name].nunique() > 1}


def ladder_steps(tables: Tables) -> pd.DataFrame:
    """The largest size's ladder, and the baselines."""
    _, rows = largest_ladder(tables)
    own = _walls(timed(rows, [*RUNGS, *BASELINES]))
    own = own.assign(gain=[gain(rows, rung) for rung in own.index])
    printed = _headed(own, "wall_ms", "wall_std_ms", "quartiles", "best_ms", "steps", "gpu_ms",
                      "replayed_ms", "gain", "busy", "operations", "tokens_per_s", "mfu", "peak_gib",
                      "reserved_gib", "power_w", "sm_clock_mhz", "compile_s")
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


def fast_step(tables: Tables) -> pd.DataFrame:
    """What a step takes with each line of the complete script and those above it, at the smallest and largest
    size; the last two rungs need an optimizer of ours."""
    found, counts = {}, []
    for shape, rows in (smallest_ladder(tables), largest_ladder(tables)):
        own = _walls(rows.reindex(RUNGS[:-2]))
        counts.append(own["steps"])
        found |= {f"{shape.size}, ms": own["wall_ms"], f"std of {shape.size}, ms": own["wall_std_ms"],
                  f"quartiles of {shape.size}, ms": own["quartiles"],
                  f"{shape.size} at best, ms": own["best_ms"],
                  f"SM clock of {shape.size}, MHz": _capped_clock(own)}
    printed = pd.DataFrame(found).dropna(how="all").dropna(axis="columns", how="all")
    return table(_named(printed, "with"), note=(
        f"Wall time, medians of {counted(pd.concat(counts))} steps: where launches set the pace, faster"
        " kernels change nothing until the CUDA graph."))


def launch_cure(tables: Tables) -> pd.DataFrame | None:
    """The smallest size's bf16 step: eager, compiled, as a CUDA graph."""
    shape, rows = smallest_ladder(tables)
    kinds = {"fused": "eager, fused attention and AdamW", "blocks": "compiled blocks",
             "cuda_graph": "CUDA graph of compiled blocks"}
    own = timed(rows, [*kinds])
    if len(own) < len(kinds):
        return None
    printed = _headed(_walls(own), "operations", "wall_ms", "wall_std_ms", "quartiles", "best_ms", "steps",
                      "gpu_ms", "busy")
    heading = f"{shape.size}, context {shape.context_length}, bf16"
    return table(printed.set_axis(pd.Index(kinds.values(), name=heading)))


def baselines(tables: Tables) -> pd.DataFrame:
    """Our last step, and the last with PyTorch's AdamW, against Hugging Face's: wall time at every shape."""
    rows = with_baseline(tables)
    words = {"ours": ("ours", "of ours"), "fp32": ("ours with PyTorch's AdamW", "with it"),
             "baseline": ("Hugging Face", "of Hugging Face")}
    spread, names = _spread(rows, words), _place(rows)
    for name, (said, of) in words.items():
        kind = "std" if spread[name].endswith("std_ms") else "quartiles"
        names |= {f"{name}_ms": f"{said}, ms", spread[name]: f"{kind} {of}, ms",
                  f"{name}_clock": f"clock {of}, MHz"}
    steps = pd.concat([rows[f"{name}_steps"] for name in words])
    note = (f"Medians of {counted(steps)} steps, with the SM clock of each; of Hugging Face's modes the"
            " quicker.")
    told = rows["faster"].where((rows["faster"] - 1).abs() >= LEAST_GAIN)
    return table(rows[[*names]].rename(columns=names).assign(**{"ours faster, x": told}), note=note)


def baselines_attention(tables: Tables) -> pd.DataFrame:
    """The same step of Hugging Face's beside ours with PyTorch's AdamW, in GPU time: what attention makes."""
    rows = baseline_attention(tables)
    names = _place(rows) | {
        "fp32_gpu_ms": "ours with PyTorch's AdamW, ms", "fp32_clock": "its SM clock, MHz",
        "baseline_gpu_ms": "Hugging Face, ms", "baseline_clock": "its clock, MHz",
        "whole": "its step over ours, x", "fp32_attention_ms": "our attention, ms",
        "baseline_attention_ms": "its attention, ms", "attention": "its attention over ours, x",
        "without": "its step with our attention over ours, x"}
    return table(rows[[*names]].rename(columns=names))


def fp8_batches(tables: Tables) -> pd.DataFrame:
    """FP8 beside bf16's last step: a row a size and batch."""
    rows = by_batch(tables)
    spread = _spread(rows, ("bf16", "fp8"))
    told = rows["gain"].where((rows["gain"] - 1).abs() >= LEAST_GAIN)
    steps = counted(pd.concat([rows["bf16_steps"], rows["fp8_steps"]]))
    return table(_headed(rows.assign(gain=told), "size", "batch_size", "tokens", "bf16_ms", spread["bf16"],
                         "bf16_clock", "fp8_ms", spread["fp8"], "fp8_clock", "gain", "bf16_mfu"), note=(
        f"Faster: in GPU time, –: by under {number(LEAST_GAIN, '%')}. Wall times are medians of {steps}"
        " steps."))


def mfu(tables: Tables) -> pd.DataFrame:
    """The last timed rung at every shape and batch, and the batch that fills the memory: rates, power and
    memory."""
    order = [*RUNGS, FILLED]
    steps = select(tables["ladder.steps"], change=order, wall_ms=pd.Series.notna)
    steps = steps.sort_values("change", key=lambda names: names.map(order.index), kind="stable")
    own, note = _walls(select(steps.groupby(PLACE, sort=False).tail(1))), ""
    if own["mfu"].notna().any():
        rates, sheet = ceilings(tables, _run(own)), tables["ladder.results"]["sheet_bf16"].median()
        own["mfu_measured"] = own["mfu"] * sheet / rates.matmul
        note = f"A large matmul's rate: {rates_said(rates)}."
    own["change"] = own["change"].map(NAMES)
    printed = _headed(own, "change", "size", "context_length", "vocab_size", "batch_size", "wall_ms",
                      "wall_std_ms", "quartiles", "best_ms", "steps", "tokens_per_s", "mfu", "mfu_measured",
                      "mfu_at_clock", "sm_clock_mhz", "power_w", "peak_gib", "reserved_gib")
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
    return table(_named(printed), note=(
        "Peak of what tensors hold/what the process reserves, by size and context. A CUDA graph's pool keeps"
        " the memory of all tensors of a step for itself."))


def training_check(tables: Tables) -> pd.DataFrame:
    """How far gradients and losses are from fp32's."""
    shape, shifts = trained(tables)
    distance, seeds = loss_shift(shifts)
    steps = select(tables["ladder.steps"], shape._asdict()).set_index("change")
    order = [rung for rung in (*RUNGS, *BEYOND) if rung in distance]
    found = pd.DataFrame({"gradient off, %": steps["gradient_off"].reindex(order),
                          "loss moved": distance[order], "of another seed, %": distance[order] / seeds})
    return table(_named(found), note="Loss moved: mean distance of means of ten steps, in nats.")


PRINTED = {printed.__name__: printed for printed in (
    ladder_steps, which_optimization, which_optimization_longer, fast_step, launch_cure, baselines,
    baselines_attention, fp8_batches, mfu, ladder_memory, training_check)}
