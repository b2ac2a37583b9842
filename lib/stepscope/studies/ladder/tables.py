"""The ladder's tables: what is in a run's files, and what is printed of all runs."""
from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

import pandas as pd
import pandera.pandas as pa

from stepscope.config import SIZES
from stepscope.report.schemas import STATUSES, measured, tidy, word
from stepscope.report.tables import ratio, table
from stepscope.studies.ladder.config import BEYOND, CHANGES, FILLED, MEASURES, PEERS
from stepscope.studies.ladder.names import LINES, NAMES

Tables = dict[str, pd.DataFrame]

CONFIG = ("size", "context_length", "vocab_size")
PLACE = [*CONFIG, "batch_size"]
CELL = ("change", "batch_size")
KEY = {"change": word(*CHANGES, *BEYOND, FILLED, *PEERS),
       "batch_size": pa.Column(int, pa.Check.in_range(1, 2**20), coerce=True)}
COUNT = pa.Column(int, pa.Check.ge(0), coerce=True)
SCHEMAS = {
    "steps": tidy(
        CELL, **KEY, status=word(*STATUSES), reason=word(), **{name: measured() for name in MEASURES}),
    "kernels": tidy((*CELL, "name"), **KEY, name=word(), family=word(), count=measured(), gpu_ms=measured()),
    "curves": tidy((*CELL, "seed", "step"), **KEY, seed=COUNT, step=COUNT, loss=measured()),
}
KEYS = {"steps": (*CONFIG, *CELL), "kernels": (*CONFIG, *CELL, "name"),
        "curves": (*CONFIG, *CELL, "seed", "step")}
CONTEXT = 512  # of what is said of all sizes, where there is such a run
LEAST_GAIN = 0.02  # a smaller one is none
LAST = CHANGES[-1]


class Shape(NamedTuple):
    """One ladder: a shape and the batch that it was climbed at."""

    size: str
    context_length: int
    vocab_size: int
    batch_size: int


def _order(size: str) -> int:
    return [*SIZES].index(size) if size in SIZES else len(SIZES)


def ladders(tables: Tables, context: int | None = None) -> dict[Shape, pd.DataFrame]:
    """The rows of every shape that has a timed fp32 step, by change; sizes in order, then contexts.

    Raises:
        LookupError: there is none.
    """
    steps = tables["ladder.steps"]
    shapes = steps[(steps["change"] == "fp32") & steps["wall_ms"].notna()]
    if context is not None:
        shapes = shapes[shapes["context_length"] == context]
    found = [Shape(*key) for key in shapes[PLACE].itertuples(index=False)]
    found.sort(key=lambda shape: (_order(shape.size), shape.context_length, shape.vocab_size))
    if not found:
        raise LookupError("no ladder")
    whole = steps.set_index(PLACE)
    return {shape: whole.loc[[tuple(shape)]].reset_index().set_index("change") for shape in found}


def at_context(tables: Tables) -> dict[Shape, pd.DataFrame]:
    """One ladder a size: of the plainest vocabulary, at :data:`CONTEXT` where anything was measured there."""
    every = ladders(tables)
    contexts = {shape.context_length for shape in every}
    context = CONTEXT if CONTEXT in contexts else max(contexts)
    vocab = min(shape.vocab_size for shape in every)
    return {shape: rows for shape, rows in every.items()
            if (shape.context_length, shape.vocab_size) == (context, vocab)}


def largest(tables: Tables) -> tuple[Shape, pd.DataFrame]:
    """The ladder whose fp32 step takes longest, of those that compare sizes."""
    return max(at_context(tables).items(), key=lambda item: item[1].loc["fp32", "wall_ms"])


def climbed(rows: pd.DataFrame) -> pd.DataFrame:
    """A ladder's timed changes in their order."""
    timed = rows[rows["wall_ms"].notna()]
    return timed.reindex([change for change in CHANGES if change in timed.index])


def gain(rows: pd.DataFrame, change: str) -> float | None:
    """How many times faster than the change before: in GPU time, and of the CUDA graph, which removes
    launches and no kernel, in wall time. None for less than :data:`LEAST_GAIN`, and where one is not known.
    """
    own = climbed(rows)
    if change not in own.index or change == own.index[0]:
        return None
    before = own.iloc[own.index.get_loc(change) - 1]
    column = "wall_ms" if change == "cuda_graph" else "gpu_ms"
    found = ratio(before[column], own.loc[change, column])
    return found if abs(found - 1) >= LEAST_GAIN else None


def shares(kernels: pd.DataFrame, shape: Shape, change: str) -> pd.Series:
    """Each family's share of the kernels' time in a change's step.

    Raises:
        LookupError: it was not captured.
    """
    own = kernels.set_index([*PLACE, "change"]).sort_index().loc[(*shape, change)]
    times = own.groupby("family")["gpu_ms"].sum()
    return times / times.sum()


def moved(curves: pd.DataFrame) -> tuple[pd.Series, float]:
    """How far each change's loss is from fp32's of the same weights: the mean over steps of the distance, as
    text is learnt unevenly of means of ten steps; and the nearest that two seeds' fp32 losses are.

    Raises:
        LookupError: fp32 was not trained from several seeds.
    """
    key = [*CONFIG, *CELL, "seed"]
    smooth = curves.sort_values("step")
    means = smooth.groupby(key)["loss"].transform(lambda loss: loss.rolling(10, min_periods=1).mean())
    smooth = smooth.assign(loss=means)
    plain = smooth[smooth["change"] == "fp32"].pivot(index="step", columns="seed", values="loss")
    if len(plain.columns) < 2:
        raise LookupError("no seeds")
    first = plain.columns[0]
    others = smooth[(smooth["change"] != "fp32") & (smooth["seed"] == first)]
    by_change = others.pivot(index="step", columns="change", values="loss")
    nearest = min((plain[a] - plain[b]).abs().mean() for a, b in combinations(plain, 2))
    return by_change.sub(plain[first], axis=0).abs().mean(), nearest


def trained(tables: Tables) -> pd.DataFrame:
    """The curves of the shape that fp32 was trained at, too.

    Raises:
        LookupError: there is none.
    """
    curves = tables["ladder.curves"]
    plain = curves[curves["change"] == "fp32"]
    if plain.empty:
        raise LookupError("fp32 was not trained")
    return curves.merge(plain[PLACE].head(1), on=PLACE)


def by_batch(tables: Tables) -> pd.DataFrame:
    """``bf16_ms``, ``fp8_ms`` (wall), ``gain``, ``mfu`` of bf16 and joules a token, of every shape and batch
    that has both.

    Raises:
        LookupError: none has.
    """
    steps = tables["ladder.steps"]
    low, eight = (steps[(steps["change"] == name) & steps["wall_ms"].notna()] for name in (LAST, "fp8"))
    both = low.merge(eight, on=PLACE, suffixes=("", "_fp8"))
    if both.empty:
        raise LookupError("no FP8 beside bf16")
    tokens = both["batch_size"] * both["context_length"]
    return by_size(both[PLACE].assign(
        tokens=tokens, bf16_ms=both["wall_ms"], fp8_ms=both["wall_ms_fp8"], mfu=both["mfu"],
        gain=[ratio(a, b) for a, b in zip(both["wall_ms"], both["wall_ms_fp8"])],
        bf16_j=both["step_j"] / tokens, fp8_j=both["step_j_fp8"] / tokens))


def pays_from(found: pd.DataFrame) -> int | None:
    """Of :func:`by_batch` the tokens a step from which on FP8 gains at every size; None where it does not."""
    vain = found.loc[found["gain"] < 1 + LEAST_GAIN, "tokens"].max()
    pays = found.loc[~(found["tokens"] <= vain), "tokens"]
    return int(pays.min()) if len(pays) else None


def by_size(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows in the order of sizes, contexts and batches."""
    return rows.sort_values(["size", "context_length", "batch_size"],
                            key=lambda values: values.map(_order) if values.name == "size" else values)


# -- printed ------------------------------------------------------------------------------------------------

HEADINGS = {
    "size": "size", "context_length": "context", "batch_size": "batch", "tokens": "tokens a step",
    "wall_ms": "wall, ms", "gpu_ms": "GPU time, ms", "bf16_ms": "bf16, ms", "fp8_ms": "FP8, ms",
    "gain": "faster, x", "busy": "busy, %", "operations": "kernels, n", "tokens_per_s": "tokens/s, n",
    "mfu": "MFU, %", "mfu_measured": "of a large matmul, %", "mfu_at_clock": "at its clock, %",
    "step_j": "energy, J", "energy_ms": "its energy at the power limit, ms", "bound_ms": "lower bound, ms",
    "power_w": "power, W", "sm_clock_mhz": "clock, MHz", "peak_gib": "peak, GiB", "compile_s": "compiling, s",
    "bf16_mj": "bf16, mJ a token", "fp8_mj": "FP8, mJ a token"}


def _headed(rows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    return rows[[*columns]].rename(columns=HEADINGS).dropna(axis="columns", how="all")


def _named(rows: pd.DataFrame, heading: str = "change") -> pd.DataFrame:
    """Rows by change, under the changes' names."""
    return rows.set_axis(pd.Index(rows.index.map(NAMES), name=heading))


def ladder_steps(tables: Tables) -> pd.DataFrame:
    """The largest size's ladder, and the peers."""
    _, rows = largest(tables)
    own = pd.concat([climbed(rows), rows[rows.index.isin(PEERS) & rows["wall_ms"].notna()]])
    own = own.assign(gain=[gain(rows, change) for change in own.index])
    printed = _headed(own, "wall_ms", "gpu_ms", "gain", "busy", "operations", "tokens_per_s", "mfu",
                      "peak_gib", "step_j", "power_w", "sm_clock_mhz", "compile_s")
    return table(_named(printed), bold=("min", "column", "wall, ms", "GPU time, ms", "energy, J"))


def which_change(tables: Tables) -> pd.DataFrame | None:
    """Changes x sizes: how many times faster than the row above."""
    columns = {shape.size: [gain(rows, change) for change in CHANGES[1:]]
               for shape, rows in at_context(tables).items()}
    found = _named(pd.DataFrame(columns, index=CHANGES[1:], dtype=float)).dropna(how="all")
    return table(found, unit="x", note="–: under 2%, or not measured.") if len(found) else None


def fast_step(tables: Tables) -> pd.DataFrame:
    """What a step takes with each line of the complete script and those above it, at the smallest and largest
    size."""
    ends = dict([next(iter(at_context(tables).items())), largest(tables)])
    found = pd.DataFrame({f"{shape.size}, ms": rows["wall_ms"].reindex(["fp32", *LINES, "cuda_graph"])
                          for shape, rows in ends.items()})
    return table(_named(found.dropna(how="all"), "with"))


def launch_cure(tables: Tables) -> pd.DataFrame | None:
    """The smallest size's bf16 step: eager, compiled, as a CUDA graph."""
    shape, rows = next(iter(at_context(tables).items()))
    kinds = {"fused": "eager", "blocks": "compiled blocks", "cuda_graph": "CUDA graph of compiled blocks"}
    own = rows.reindex([*kinds])
    if own["wall_ms"].isna().any():
        return None
    printed = _headed(own, "operations", "wall_ms", "gpu_ms", "busy").reset_index(drop=True)
    printed.insert(0, f"{shape.size}, context {shape.context_length}, bf16", [*kinds.values()])
    return table(printed)


def peers(tables: Tables) -> pd.DataFrame | None:
    """Our last step beside Hugging Face's, at every shape."""
    found = []
    for shape, rows in ladders(tables).items():
        walls = rows["wall_ms"].reindex([LAST, *reversed(PEERS)])
        if walls.notna().all():
            ours, graphs, default = walls
            found.append({"size": shape.size, "context": shape.context_length, "ours, ms": ours,
                          "reduce-overhead, ms": graphs, "default, ms": default,
                          "ours faster than the best, x": ratio(min(graphs, default), ours)})
    return table(pd.DataFrame(found)) if found else None


def fp8_batches(tables: Tables) -> pd.DataFrame:
    """FP8 beside bf16's last step: a row a size and batch."""
    found = by_batch(tables)
    found = found.assign(bf16_mj=found["bf16_j"] * 1e3, fp8_mj=found["fp8_j"] * 1e3)
    return table(_headed(found.rename(columns={"mfu": "MFU of bf16, %"}), "size", "batch_size", "tokens",
                         "bf16_ms", "fp8_ms", "gain", "MFU of bf16, %", "bf16_mj", "fp8_mj"))


def mfu(tables: Tables) -> pd.DataFrame | None:
    """MFU of the last step at every shape, and of the batch that fills the memory."""
    steps = tables["ladder.steps"]
    plain = steps["vocab_size"] == steps["vocab_size"].min()
    own = steps[steps["change"].isin([LAST, FILLED]) & steps["mfu"].notna() & plain]
    small = own["batch_size"] == own.groupby([*CONFIG])["batch_size"].transform("min")
    own = by_size(own[small | (own["change"] == FILLED)])
    printed = _headed(own, "size", "context_length", "batch_size", "wall_ms", "tokens_per_s", "mfu",
                      "mfu_measured", "mfu_at_clock", "sm_clock_mhz", "power_w", "peak_gib")
    return table(printed) if len(own) else None


def energy(tables: Tables) -> pd.DataFrame | None:
    """Each change's joules, and the time that they take at the power limit, at the largest size."""
    own = climbed(largest(tables)[1]).dropna(subset="step_j")
    printed = _headed(own, "step_j", "power_w", "sm_clock_mhz", "energy_ms", "bound_ms", "wall_ms")
    return table(_named(printed)) if len(own) else None


def training_check(tables: Tables) -> pd.DataFrame:
    """How far gradients and losses are from fp32's."""
    curves = trained(tables)
    distance, seeds = moved(curves)
    steps = tables["ladder.steps"].merge(curves[PLACE].head(1), on=PLACE).set_index("change")
    order = [change for change in (*CHANGES, *BEYOND) if change in distance]
    found = pd.DataFrame({"gradient off, %": steps["gradient_off"].reindex(order),
                          "loss moved": distance[order], "of another seed, %": distance[order] / seeds})
    return table(_named(found), note="Loss moved: mean distance over the steps, in nats.")


PRINTED: dict[str, Callable[[Tables], pd.DataFrame | None]] = {
    "ladder_steps": ladder_steps, "which_change": which_change, "fast_step": fast_step,
    "launch_cure": launch_cure, "peers": peers, "fp8_batches": fp8_batches, "mfu": mfu, "energy": energy,
    "training_check": training_check}
