"""Which rows of the ladder's tables sentences and pictures speak of, and what follows from them."""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import pandas as pd

from stepscope.data_sheets import data_sheet
from stepscope.report.schemas import Tables
from stepscope.report.shapes import ORDER, reference, select
from stepscope.report.tables import digits, number, quartiles
from stepscope.stats import LEAST_GAIN, MOSTLY_WAITS, launch_bound_rows, spread_ms, wall_gain
from stepscope.studies.ladder.config import AS_IT_COMES, FAIR, FILLED, LEFT_OUT, RUNGS, WITHOUT

PLACE = [*ORDER]
LAST = RUNGS[-1]
CAPTURED = RUNGS[RUNGS.index("cuda_graph") :]  # the graph, and what comes after it


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
    found = {Shape(*place): rows.set_index("optimization") for place, rows in groups}
    found = {shape: rows for shape, rows in found.items() if "fp32" in timed(rows).index}
    if not found:
        raise LookupError("no ladder")
    return found


def at_context(tables: Tables, context: int | None = None) -> dict[Shape, pd.DataFrame]:
    """One ladder a size: of the plainest vocabulary, at a context, if not another at the reference's."""
    found = ladders(tables)
    shapes = pd.DataFrame([*found])
    context, vocab = context or reference(shapes["context_length"]), shapes["vocab_size"].min()
    return {
        shape: rows
        for shape, rows in found.items()
        if (shape.context_length, shape.vocab_size) == (context, vocab)
    }


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
    launches and no kernel, in wall time (as of :func:`faster`). None for less than :data:`LEAST_GAIN` or
    than the steps of either spread, and where one is not known."""
    own = timed(rows)
    before = own.index[max(own.index.get_loc(rung) - 1, 0)] if rung in own.index else rung
    if rung == "cuda_graph":
        both = own.reindex([before, rung])
        apart = both["wall_ms"].max() - both["wall_ms"].min()
        found = math.nan if apart < spread_ms(both).max() else faster(own, rung, before)
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
    """What a GPU's large bf16 matmul reaches, in TFLOP/s, and its copy, in TB/s: the fastest of the folder's
    runs of the ladder on it, since what disturbs a burst only slows it, by a tenth at times; with the
    matmul's slowest, and how many runs; and what one matmul after another keeps up at the power cap, at which
    SM clock in MHz, their medians, nan on records that lack them."""

    matmul: float
    copy: float
    least: float
    runs: int
    kept_up: float
    kept_up_mhz: float


def rated(tables: Tables, run_id: str = "") -> pd.DataFrame:
    """The results of runs that have a matmul's rate, on the GPU that this run was on; of a notebook's own run
    without a name all."""
    results = tables["ladder.results"].dropna(subset="matmul_bf16")
    if "runs" in tables and {"run_id", "device"} <= {*tables["runs"]} and "run_id" in results:
        devices = tables["runs"].drop_duplicates("run_id").set_index("run_id")["device"]
        if run_id in devices.index:
            results = results[results["run_id"].map(devices) == devices[run_id]]
    return results


def ceilings(tables: Tables, run_id: str = "") -> Ceilings:
    """Of :func:`rated` runs.

    Raises:
        LookupError: no run measured them.
    """
    results = rated(tables, run_id)
    if results.empty:
        raise LookupError("no rate of a large matmul")
    matmul, columns = results["matmul_bf16"], ["kept_up_tflops", "kept_up_clock_mhz"]
    kept_up = results.reindex(columns=columns).median()
    return Ceilings(matmul.max(), results["copy"].max(), matmul.min(), len(results), *kept_up)


def roofs(tables: Tables) -> pd.Series:
    """Of the GPU that the largest size's ladder was on: ``matmul_fp32`` and ``matmul_bf16`` in TFLOP/s and
    ``copy`` in TB/s, the fastest of its runs.

    Raises:
        LookupError: not all are known.
    """
    run_id = str(largest_ladder(tables)[1].iloc[0].get("run_id", ""))
    found = rated(tables, run_id).reindex(columns=["matmul_fp32", "matmul_bf16", "copy"]).max()
    if found.isna().any():
        raise LookupError("a rate is not known")
    return found


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
        made.append(
            part.assign(
                matmul_ms=matmul,
                moved_ms=moved,
                bound_ms=matmul + moved,
                reference_ms=matmul * rates.matmul / rates.kept_up + moved,
            )
        )
    return pd.concat(made).reindex(rows.index) if made else rows


def at_clock(tables: Tables, rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of steps in bf16 with ``mfu_at_clock`` of the data sheet's rate at their SM clock, by the clock
    that this rate is of; as they were measured where that is not known."""
    devices = tables["runs"]["device"].unique() if "runs" in tables else []
    of_sheet = data_sheet(str(devices[0])).get("tensor_mhz") if len(devices) == 1 else None
    return rows.assign(mfu_at_clock=rows["mfu"] * of_sheet / rows["sm_clock_mhz"]) if of_sheet else rows


def power_cap_w(tables: Tables) -> float:
    """The power cap, in W, under which the ladders ran."""
    return tables["ladder.results"]["power_limit_w"].median()


def draws_cap(tables: Tables, rows: pd.DataFrame) -> pd.Series:
    """Which of a ladder's rows draw as much power as the cap lets them."""
    return rows["power_w"] > 0.95 * power_cap_w(tables)


def rates_said(rates: Ceilings) -> str:
    """ "777 TFLOP/s, the fastest of 13 runs (the slowest 708)"."""
    many = f", the fastest of {rates.runs} runs (the slowest {digits(rates.least)})"
    return number(rates.matmul, "TFLOP/s") + many * (rates.runs > 1)


def shares(kernels: pd.DataFrame, shape: Shape, rung: str) -> pd.Series:
    """Each family's share of the kernels' time in a rung's step.

    Raises:
        LookupError: it was not captured.
    """
    times = select(kernels, shape._asdict(), optimization=rung).groupby("family")["gpu_ms"].sum()
    return times / times.sum()


def trained(tables: Tables) -> tuple[Shape, pd.DataFrame]:
    """The shape that fp32 was trained at, and by step the loss of each rung and seed there less fp32's of
    the first seed: of means of ten steps, as text is learnt unevenly.

    Raises:
        LookupError: there is none.
    """
    curves = tables["ladder.curves"]
    shape = Shape(*select(curves, optimization="fp32")[PLACE].iloc[0])
    return shape, shifts_of(select(curves, shape._asdict()), "fp32")


def shifts_of(curves: pd.DataFrame, base: str) -> pd.DataFrame:
    """By step one shape's losses of each rung and seed, less the base's of its first seed."""
    losses = curves.pivot(index="step", columns=["optimization", "seed"], values="loss")
    smooth = losses.rolling(10, min_periods=5).mean()
    return smooth.sub(smooth[base].iloc[:, 0], axis=0)


def seeds_apart(losses: pd.DataFrame) -> list[float]:
    """How far the losses of any two seeds, a column each, are from each other: means over steps, in nats."""
    return [(losses[a] - losses[b]).abs().mean() for a, b in combinations(losses, 2)]


def loss_shift(shifts: pd.DataFrame, base: str = "fp32") -> tuple[pd.Series, float]:
    """Of :func:`shifts_of` how far each rung's loss is from the base's of the same weights, the mean over
    steps; and the nearest that the base's losses of two seeds are, nan of one seed."""
    first, nearest = shifts[base].columns[0], min(seeds_apart(shifts[base]), default=math.nan)
    return shifts.xs(first, axis="columns", level="seed").abs().mean().drop(base), nearest


def all_of_them(rows: pd.DataFrame, clock: str) -> float:
    """How many times faster the last rung's step is than fp32's, by ``wall_ms`` or ``gpu_ms``; nan in wall
    time where fp32's few steps were disturbed: they differ by more than what counts as a gain."""
    if clock == "gpu_ms":
        return rows[clock].get(RUNGS[0], math.nan) / rows[clock].get(LAST, math.nan)
    disturbed = spread_ms(rows) > LEAST_GAIN * rows["wall_ms"]
    return math.nan if disturbed.get(RUNGS[0], False) else faster(rows, LAST, RUNGS[0])


def with_baseline(tables: Tables, modes: Sequence[str] = AS_IT_COMES) -> pd.DataFrame:
    """A row a ladder that has baselines: ``ours``, ``fp32`` (ours with PyTorch's AdamW, before bf16 weights)
    and ``baseline``, the quickest of the baseline's modes by wall time: wall, quartiles, steps, SM clock and
    GPU time of each; ``faster``, ours than the baseline in wall time, and ``same_faster``, the same
    of ours with its AdamW. And of the latter two the milliseconds of attention's kernels, and whether these
    have the same names.

    Args:
        modes: the baseline's: as Hugging Face's Llama comes, or the fair ones, :data:`FAIR`.

    Raises:
        LookupError: none has.
    """
    compared, kernels = [], tables["ladder.kernels"]
    for shape, rows in ladders(tables).items():
        own = timed(rows, [LAST, "cuda_graph", *modes])
        if {LAST, "cuda_graph"} - {*own.index} or own.index.isin(modes).sum() == 0:
            continue
        baseline = timed(rows, modes)["wall_ms"].idxmin()
        found = shape._asdict() | {
            "baseline": baseline,
            "faster": faster(own, LAST, baseline),
            "same_faster": faster(own, "cuda_graph", baseline),
        }
        own = own.assign(quartiles=quartiles(own))
        for name, rung in {"ours": LAST, "fp32": "cuda_graph", "baseline": baseline}.items():
            row = own.loc[rung]
            found |= {
                f"{name}_ms": row["wall_ms"],
                f"{name}_quartiles": row["quartiles"],
                f"{name}_clock": row["sm_clock_mhz"],
                f"{name}_steps": row["steps"],
                f"{name}_gpu_ms": row["gpu_ms"],
            }
        attention = kernels.merge(pd.DataFrame([shape._asdict() | {"family": "fused attention"}]))
        fp32, other = (attention[attention["optimization"] == rung] for rung in ("cuda_graph", baseline))
        compared.append(
            found
            | {
                "fp32_attention_ms": fp32["gpu_ms"].sum(),
                "baseline_attention_ms": other["gpu_ms"].sum(),
                "same_kernels": len(fp32) > 0 and {*fp32["name"]} == {*other["name"]},
            }
        )
    if not compared:
        raise LookupError("no baseline")
    return pd.DataFrame(compared)


def fair_modes(tables: Tables) -> Sequence[str]:
    """Of Hugging Face's modes the fair ones, where one was measured, else those as it comes."""
    steps = tables["ladder.steps"]
    return FAIR if steps.loc[steps["wall_ms"].notna(), "optimization"].isin(FAIR).any() else AS_IT_COMES


def baseline_attention(tables: Tables) -> pd.DataFrame:
    """Of :func:`with_baseline` with CUDA graphs, as ours is, by GPU time: how many times the baseline's whole
    step, and its attention, take ours with PyTorch's AdamW (``whole``, ``attention``), and the step with our
    attention's time in the place of its own (``without``). Where both run the same attention kernels.

    Raises:
        LookupError: nowhere.
    """
    rows = select(with_baseline(tables, AS_IT_COMES[1:]), same_kernels=True, baseline_gpu_ms=pd.Series.notna)
    more = rows["baseline_attention_ms"] - rows["fp32_attention_ms"]
    return rows.assign(
        whole=rows["baseline_gpu_ms"] / rows["fp32_gpu_ms"],
        attention=rows["baseline_attention_ms"] / rows["fp32_attention_ms"],
        without=(rows["baseline_gpu_ms"] - more) / rows["fp32_gpu_ms"],
    )


def launch_us(tables: Tables) -> pd.Series:
    """Microseconds a kernel of the fastest steps of all that wait for launches more than they compute."""
    steps = tables["ladder.steps"]
    waits = steps[launch_bound_rows(steps) & (steps["busy"] < MOSTLY_WAITS)]
    return waits["wall_min_ms"] / waits["operations"] * 1e3


def by_tokens(tables: Tables, rungs: Sequence[str]) -> dict[Shape, pd.Series]:
    """By shape, how many times faster each of some rungs makes the step (:func:`gain`; FP8 beside the last),
    at the context and vocabulary at which sizes are compared; of sizes that were measured at several batches.

    Raises:
        LookupError: none was, with more of the rungs than FP8.
    """
    compared, found = next(iter(at_context(tables))), {}
    own = select(
        tables["ladder.steps"],
        context_length=compared.context_length,
        vocab_size=compared.vocab_size,
        optimization=[*RUNGS, "fp8"],
        wall_ms=pd.Series.notna,
    )
    for place, rows in own.groupby(PLACE, sort=False):
        rows = rows.set_index("optimization")
        gains = {rung: gain(rows, rung) for rung in rungs if rung != "fp8"}
        eight = rows["gpu_ms"].get(LAST, math.nan) / rows["gpu_ms"].get("fp8", math.nan)
        gains["fp8"] = eight if abs(eight - 1) >= LEAST_GAIN else None
        if {*rungs} & {*rows.index} - {LAST, "fp8"}:
            found[Shape(*place)] = pd.Series(gains, dtype=float)
    batches = pd.Series([shape.size for shape in found]).value_counts()
    found = {shape: gains for shape, gains in found.items() if batches[shape.size] > 1}
    if not found:
        raise LookupError("no size at several batches")
    return found


def costs(tables: Tables) -> pd.DataFrame:
    """By size the last step's ``tokens_per_s``, of a thousand tokens the joules (``thousand_j``) and of a
    billion the hours and kilowatt hours (``billion_h``, ``billion_kwh``), the GPU's alone, at the context at
    which sizes are compared.

    Raises:
        LookupError: no joules are known.
    """
    last = {shape.size: timed(rows, [LAST]) for shape, rows in at_context(tables).items()}
    found = cost_of(pd.concat(last).droplevel("optimization")).dropna()
    if found.empty:
        raise LookupError("no joules of a last step")
    return found


def cost_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Of steps with ``tokens_per_s`` and ``power_w`` the columns of :func:`costs`."""
    rate, each = rows["tokens_per_s"], rows["power_w"] / rows["tokens_per_s"]
    return pd.DataFrame(
        {
            "tokens_per_s": rate,
            "thousand_j": 1e3 * each,
            "billion_h": 1e9 / rate / 3600,
            "billion_kwh": 1e9 * each / 3.6e6,
        }
    )


def without(tables: Tables) -> dict[Shape, pd.Series]:
    """By shape, how many times as long the last step takes without one change, by the name of that: in GPU
    time, without the CUDA graph in wall time; nan for less than steps differ by.

    Raises:
        LookupError: no step without one was measured.
    """
    found = {}
    for shape, rows in ladders(tables).items():
        own, ratios = timed(rows, [LAST, *WITHOUT]), {}
        for name, rung in zip(WITHOUT, LEFT_OUT):
            if {name, LAST} <= {*own.index}:
                ratio = (
                    faster(own, LAST, name)
                    if rung == "cuda_graph"
                    else own.loc[name, "gpu_ms"] / own.loc[LAST, "gpu_ms"]
                )
                ratios[rung] = ratio if abs(ratio - 1) >= LEAST_GAIN else math.nan
        if ratios:
            found[shape] = pd.Series(ratios, dtype=float)
    if not found:
        raise LookupError("no step without one of the changes")
    return found


def two_batches(tables: Tables) -> pd.DataFrame:
    """The largest size's last step at the batch at which steps are compared, and at the largest measured."""
    shape, _ = largest_ladder(tables)
    own = select(
        tables["ladder.steps"],
        size=shape.size,
        context_length=shape.context_length,
        vocab_size=shape.vocab_size,
        optimization=[LAST, FILLED],
        wall_ms=pd.Series.notna,
    )
    compared = own["batch_size"].eq(shape.batch_size) & own["optimization"].eq(LAST)
    return own.loc[[compared.idxmax(), own["batch_size"].idxmax()]]


def measured_again(tables: Tables) -> dict[str, list[float]]:
    """By size, how far GPU times of one and the same step are apart that was measured twice in a process,
    under the power cap: without bf16 weights the last step is that of the CUDA graph, without bf16 moments
    that of bf16 weights.

    Raises:
        LookupError: none was.
    """
    found: dict[str, list[float]] = {}
    for shape, rows in ladders(tables).items():
        for again, rung in (("without_bf16_weights", "cuda_graph"), ("without_bf16_moments", "bf16_weights")):
            own = timed(rows, [rung, again])
            if len(own) == 2 and draws_cap(tables, own).all():
                found.setdefault(shape.size, []).append(own["gpu_ms"].max() / own["gpu_ms"].min() - 1)
    if not found:
        raise LookupError("no step was measured twice under the power cap")
    return found


def made_to_fit(tables: Tables) -> dict[Shape, str]:
    """Of shapes that ran out of memory with each rung that was tried until one, and fitted with it: that one.

    Raises:
        LookupError: there is none.
    """
    found = {}
    for place, rows in select(tables["ladder.steps"], optimization=[*RUNGS]).groupby(PLACE, sort=False):
        status = rows.set_index("optimization")["status"].reindex([*RUNGS]).dropna()
        fits = status.index[status == "ok"]
        if len(fits) and fits[0] != status.index[0] and (status[: fits[0]].iloc[:-1] == "oom").all():
            found[Shape(*place)] = fits[0]
    if not found:
        raise LookupError("every shape fitted with its first rung, or with none")
    return found
