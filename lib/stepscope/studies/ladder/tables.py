"""The ladder's tables: what is in a run's files, and what is printed of all runs."""
import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import pandas as pd
import pandera.pandas as pa

from stepscope.report.schemas import STATUSES, Tables, measured, tidy, word
from stepscope.report.shapes import ORDER, reference, select
from stepscope.report.tables import MOST_ROWS, headed, table
from stepscope.stats import LEAST_GAIN, MOST_BUSY
from stepscope.studies.ladder.config import BEYOND, CHANGES, FILLED, MEASURES, PEERS, SPREAD

CONFIG = ("size", "context_length", "vocab_size")
PLACE = [*ORDER]
CASE = ("change", "batch_size")
KEY = {"change": word(*CHANGES, *BEYOND, FILLED, *PEERS),
       "batch_size": pa.Column(int, pa.Check.in_range(1, 2**20), coerce=True)}
COUNT = pa.Column(int, pa.Check.ge(0), coerce=True)
SCHEMAS = {
    "steps": tidy(
        CASE, **KEY, status=word(*STATUSES), reason=word(), **{name: measured() for name in MEASURES},
        **{name: measured(required=False) for name in SPREAD}, unsteady=word(required=False)),
    "kernels": tidy((*CASE, "name"), **KEY, name=word(), family=word(), count=measured(), gpu_ms=measured()),
    "curves": tidy((*CASE, "seed", "step"), **KEY, seed=COUNT, step=COUNT, loss=measured()),
}
NUMBERS = ("parameters", "power_limit_w", "matmul_bf16", "sheet_bf16", "kept_up_tflops", "kept_up_clock_mhz",
           "kept_up_power_w", "v_nearest", "v_by_chance", "v_fp32", "compared", "unequal", "low_compared",
           "low_unequal")  # results that are read as such
LAST = CHANGES[-1]
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


def timed(rows: pd.DataFrame, names: Sequence[str] = CHANGES) -> pd.DataFrame:
    """A ladder's timed rungs in their order."""
    return rows.reindex([*names]).dropna(subset="wall_ms")


def gain(rows: pd.DataFrame, rung: str) -> float | None:
    """How many times faster than the rung before: in GPU time, and of the CUDA graph, which removes
    launches and no kernel, in wall time. None for less than :data:`LEAST_GAIN`, and where one is not known.
    """
    times = timed(rows)["wall_ms" if rung == "cuda_graph" else "gpu_ms"]
    found = (times.shift() / times).get(rung, math.nan)
    return found if abs(found - 1) >= LEAST_GAIN else None


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
    first = rows.loc[CHANGES[0]] if CHANGES[0] in rows.index else rows.iloc[0] * math.nan
    if clock == "wall_ms" and first["wall_std_ms"] > LEAST_GAIN * first["wall_ms"]:
        return math.nan
    return rows[clock].get(CHANGES[0], math.nan) / rows[clock].get(LAST, math.nan)


def with_baseline(tables: Tables) -> pd.DataFrame:
    """A row a ladder that has baselines: ``ours``, ``fp32`` (ours with PyTorch's AdamW, before bf16 weights)
    and ``baseline``, the quicker of the baseline's modes by wall time: wall, deviation, steps and GPU time
    of each. And of the latter two the milliseconds of attention's kernels, and whether these have the same
    names.

    Raises:
        LookupError: none has.
    """
    compared, kernels = [], tables["ladder.kernels"]
    for shape, rows in ladders(tables).items():
        own = timed(rows, [LAST, "cuda_graph", *PEERS])
        if {LAST, "cuda_graph"} - {*own.index} or own.index.isin(PEERS).sum() == 0:
            continue
        baseline = timed(rows, PEERS)["wall_ms"].idxmin()
        found = shape._asdict() | {"baseline": baseline}
        for name, rung in {"ours": LAST, "fp32": "cuda_graph", "baseline": baseline}.items():
            row = own.loc[rung]
            found |= {f"{name}_ms": row["wall_ms"], f"{name}_std_ms": row["wall_std_ms"],
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
    """Wall time and its deviation of the last step in bf16 and with FP8 (``bf16_ms``, ``fp8_ms``), ``gain``
    in GPU time, whether it is ``clear`` (not small, and in wall time more than the deviation), and MFU of
    bf16, of every shape and batch that has both.

    Raises:
        LookupError: none has.
    """
    low, eight = (select(tables["ladder.steps"], change=name, wall_ms=pd.Series.notna)
                  for name in (LAST, "fp8"))
    both = select(low.merge(eight, on=PLACE, suffixes=("", "_fp8")))
    wall, spread = both["wall_ms"] - both["wall_ms_fp8"], both[["wall_std_ms", "wall_std_ms_fp8"]].max(axis=1)
    gains = both["gpu_ms"] / both["gpu_ms_fp8"]
    return both[PLACE].assign(
        tokens=both["batch_size"] * both["context_length"], bf16_ms=both["wall_ms"],
        bf16_std_ms=both["wall_std_ms"], fp8_ms=both["wall_ms_fp8"], fp8_std_ms=both["wall_std_ms_fp8"],
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
    "fp8_std_ms": "std of FP8, ms"}


def _headed(rows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    if "busy" in columns:
        rows = rows.assign(busy=rows["busy"].where(rows["busy"] <= MOST_BUSY))
    return headed(rows[[*columns]].rename(columns=HEADINGS)).dropna(axis="columns", how="all")


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
    own = timed(rows, [*CHANGES, *PEERS])
    own = own.assign(gain=[gain(rows, rung) for rung in own.index])
    printed = _headed(own, "wall_ms", "wall_std_ms", "steps", "gpu_ms", "replayed_ms", "gain", "busy",
                      "operations", "tokens_per_s", "mfu", "peak_gib", "reserved_gib", "power_w",
                      "sm_clock_mhz", "compile_s")
    return table(_named(printed), bold=("min", "column", "wall, ms", "GPU time, ms"))


def _rungs(found: dict[Shape, pd.DataFrame]) -> pd.DataFrame | None:
    columns = {shape.size: [gain(rows, rung) for rung in CHANGES[1:]] for shape, rows in found.items()}
    first = next(iter(found))
    heading = f"context {first.context_length:,}, batch {first.batch_size:,}"
    printed = _named(pd.DataFrame(columns, index=CHANGES[1:], dtype=float), heading).dropna(how="all")
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
    found = {}
    for shape, rows in (smallest_ladder(tables), largest_ladder(tables)):
        own = rows.reindex(CHANGES[:-2])
        found |= {f"{shape.size}, ms": own["wall_ms"], f"std of {shape.size}, ms": own["wall_std_ms"]}
    note = "Wall time: where launches set the pace, faster kernels change nothing until the CUDA graph."
    return table(_named(pd.DataFrame(found).dropna(how="all"), "with"), note=note)


def launch_cure(tables: Tables) -> pd.DataFrame | None:
    """The smallest size's bf16 step: eager, compiled, as a CUDA graph."""
    shape, rows = smallest_ladder(tables)
    kinds = {"fused": "eager, fused attention and AdamW", "blocks": "compiled blocks",
             "cuda_graph": "CUDA graph of compiled blocks"}
    own = timed(rows, [*kinds])
    if len(own) < len(kinds):
        return None
    printed = _headed(own, "operations", "wall_ms", "wall_std_ms", "steps", "gpu_ms", "busy")
    heading = f"{shape.size}, context {shape.context_length}, bf16"
    return table(printed.set_axis(pd.Index(kinds.values(), name=heading)))


def baselines(tables: Tables) -> pd.DataFrame:
    """Our last step, and the last with PyTorch's AdamW, against Hugging Face's: wall time at every shape."""
    rows = with_baseline(tables)
    names = _place(rows) | {
        "ours_ms": "ours, ms", "ours_std_ms": "std of ours, ms", "fp32_ms": "ours with PyTorch's AdamW, ms",
        "fp32_std_ms": "std with it, ms", "baseline_ms": "Hugging Face, ms",
        "baseline_std_ms": "std of its, ms"}
    steps = rows[["ours_steps", "fp32_steps", "baseline_steps"]].to_numpy()
    note = f"Medians of {steps.min():.0f} to {steps.max():.0f} steps; of Hugging Face's modes the quicker."
    faster = rows["baseline_ms"] / rows["ours_ms"]
    return table(rows[[*names]].rename(columns=names).assign(**{"ours faster, x": faster}), note=note)


def baselines_attention(tables: Tables) -> pd.DataFrame:
    """The same step of Hugging Face's beside ours with PyTorch's AdamW, in GPU time: what attention makes."""
    rows = baseline_attention(tables)
    names = _place(rows) | {
        "fp32_gpu_ms": "ours with PyTorch's AdamW, ms", "baseline_gpu_ms": "Hugging Face, ms",
        "whole": "its step over ours, x", "fp32_attention_ms": "our attention, ms",
        "baseline_attention_ms": "its attention, ms", "attention": "its attention over ours, x",
        "without": "its step with our attention over ours, x"}
    return table(rows[[*names]].rename(columns=names))


def fp8_batches(tables: Tables) -> pd.DataFrame:
    """FP8 beside bf16's last step: a row a size and batch."""
    return table(_headed(by_batch(tables), "size", "batch_size", "tokens", "bf16_ms", "bf16_std_ms", "fp8_ms",
                         "fp8_std_ms", "gain", "bf16_mfu"), note="Faster: in GPU time.")


def mfu(tables: Tables) -> pd.DataFrame:
    """The last timed rung at every shape and batch, and the batch that fills the memory: rates, power and
    memory. Of what a large matmul reaches: the median of all runs, since a run's own is not steady."""
    order = [*CHANGES, FILLED]
    steps = select(tables["ladder.steps"], change=order, wall_ms=pd.Series.notna)
    steps = steps.sort_values("change", key=lambda names: names.map(order.index), kind="stable")
    own = select(steps.groupby(PLACE, sort=False).tail(1))
    if own["mfu"].notna().any():
        results = tables["ladder.results"]
        own["mfu_measured"] = own["mfu"] / (results["matmul_bf16"] / results["sheet_bf16"]).median()
    own["change"] = own["change"].map(NAMES)
    printed = _headed(own, "change", "size", "context_length", "vocab_size", "batch_size", "wall_ms",
                      "wall_std_ms", "steps", "tokens_per_s", "mfu", "mfu_measured", "mfu_at_clock",
                      "sm_clock_mhz", "power_w", "peak_gib", "reserved_gib")
    return table(printed, rows=2 * MOST_ROWS)


def training_check(tables: Tables) -> pd.DataFrame:
    """How far gradients and losses are from fp32's."""
    shape, shifts = trained(tables)
    distance, seeds = loss_shift(shifts)
    steps = select(tables["ladder.steps"], shape._asdict()).set_index("change")
    order = [rung for rung in (*CHANGES, *BEYOND) if rung in distance]
    found = pd.DataFrame({"gradient off, %": steps["gradient_off"].reindex(order),
                          "loss moved": distance[order], "of another seed, %": distance[order] / seeds})
    return table(_named(found), note="Loss moved: mean distance of means of ten steps, in nats.")


PRINTED = {printed.__name__: printed for printed in (
    ladder_steps, which_optimization, which_optimization_longer, fast_step, launch_cure, baselines,
    baselines_attention, fp8_batches, mfu, training_check)}
