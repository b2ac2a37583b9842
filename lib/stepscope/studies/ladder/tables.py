"""The ladder's tables: what is in a run's files, and what is printed of all runs."""
import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

import pandas as pd
import pandera.pandas as pa

from stepscope.config import SIZES
from stepscope.report.schemas import STATUSES, measured, tidy, word
from stepscope.report.shapes import chosen, reference
from stepscope.report.tables import headed, ratio, table
from stepscope.studies.ladder.config import BEYOND, CHANGES, FILLED, MEASURES, PEERS

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
LEAST_GAIN = 0.02  # a smaller one is none
LAST = CHANGES[-1]
NAMES = {"fp32": "fp32, naive attention", "tf32": "TF32", "bf16": "bf16 autocast", "sdpa": "fused attention",
         "fused": "fused AdamW", "blocks": "compiled blocks", "cuda_graph": "CUDA graph of the step",
         "bf16_weights": "bf16 weights, fp32 masters", "bf16_moments": "bf16 moments",
         "chunked": "chunked loss", "fp8": "FP8 matmuls", "filled": "batch that fills the memory",
         "hugging_face": "Hugging Face, compiled", "hugging_face_graphs": "Hugging Face, reduce-overhead"}


class Shape(NamedTuple):
    """One ladder: a shape and the batch that it was climbed at."""

    size: str
    context_length: int
    vocab_size: int
    batch_size: int


def in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows by size, from the smallest, then by context, vocabulary and batch."""
    sizes = {size: at for at, size in enumerate(SIZES)}
    return rows.sort_values(PLACE, kind="stable", key=lambda values: (
        values.map(sizes) if values.name == "size" else values))


def ladders(tables: Tables) -> dict[Shape, pd.DataFrame]:
    """The rows of every shape and batch that has a timed fp32 step, by change, in order.

    Raises:
        LookupError: there is none.
    """
    every = in_order(tables["ladder.steps"]).groupby(PLACE, sort=False)
    found = {Shape(*place): rows.set_index("change") for place, rows in every}
    found = {shape: rows for shape, rows in found.items() if "fp32" in climbed(rows).index}
    if not found:
        raise LookupError("no ladder")
    return found


def at_context(tables: Tables) -> dict[Shape, pd.DataFrame]:
    """One ladder a size: of the plainest vocabulary, at the reference context."""
    every = ladders(tables)
    shapes = pd.DataFrame([*every])
    context, vocab = reference(shapes), shapes["vocab_size"].min()
    return {shape: rows for shape, rows in every.items()
            if (shape.context_length, shape.vocab_size) == (context, vocab)}


def smallest(tables: Tables) -> tuple[Shape, pd.DataFrame]:
    """The ladder of the smallest size, of those that compare sizes."""
    return next(iter(at_context(tables).items()))


def largest(tables: Tables) -> tuple[Shape, pd.DataFrame]:
    """The ladder whose fp32 step takes longest, of those that compare sizes."""
    return max(at_context(tables).items(), key=lambda item: item[1].loc["fp32", "wall_ms"])


def climbed(rows: pd.DataFrame, names: Sequence[str] = CHANGES) -> pd.DataFrame:
    """A ladder's timed changes in their order."""
    return rows.reindex([*names]).dropna(subset="wall_ms")


def gain(rows: pd.DataFrame, change: str) -> float | None:
    """How many times faster than the change before: in GPU time, and of the CUDA graph, which removes
    launches and no kernel, in wall time. None for less than :data:`LEAST_GAIN`, and where one is not known.
    """
    times = climbed(rows)["wall_ms" if change == "cuda_graph" else "gpu_ms"]
    found = ratio(times.shift().get(change), times.get(change))
    return found if abs(found - 1) >= LEAST_GAIN else None


def shares(kernels: pd.DataFrame, shape: Shape, change: str) -> pd.Series:
    """Each family's share of the kernels' time in a change's step; empty where it was not captured."""
    own = kernels[kernels["change"] == change].merge(pd.DataFrame([shape]))
    times = own.groupby("family")["gpu_ms"].sum()
    return times / times.sum()


def trained(tables: Tables) -> tuple[Shape, pd.DataFrame]:
    """The shape that fp32 was trained at, and by step the loss of each change and seed there less fp32's of
    the first seed: of means of ten steps, as text is learnt unevenly.

    Raises:
        LookupError: there is none.
    """
    curves = tables["ladder.curves"]
    shape = Shape(*curves.loc[curves["change"] == "fp32", PLACE].iloc[0])
    own = curves.merge(pd.DataFrame([shape]))
    losses = own.pivot(index="step", columns=["change", "seed"], values="loss")
    smooth = losses.rolling(10, min_periods=5).mean()
    return shape, smooth.sub(smooth["fp32"].iloc[:, 0], axis=0)


def moved(off: pd.DataFrame) -> tuple[pd.Series, float]:
    """Of :func:`trained` how far each change's loss is from fp32's of the same weights, the mean over steps;
    and the nearest that fp32's losses of two seeds are, nan of one seed."""
    seeds = off["fp32"]
    nearest = min(((seeds[a] - seeds[b]).abs().mean() for a, b in combinations(seeds, 2)), default=math.nan)
    return off.xs(seeds.columns[0], axis="columns", level="seed").abs().mean().drop("fp32"), nearest


def by_batch(tables: Tables) -> pd.DataFrame:
    """``bf16_ms``, ``fp8_ms`` (wall), ``gain``, MFU of bf16 and millijoules a token, of every shape and batch
    that has both.

    Raises:
        LookupError: none has.
    """
    steps = in_order(tables["ladder.steps"].dropna(subset="wall_ms"))
    low, eight = (steps[steps["change"] == name] for name in (LAST, "fp8"))
    both = low.merge(eight, on=PLACE, suffixes=("", "_fp8"))
    if both.empty:
        raise LookupError("no FP8 beside bf16")
    tokens = both["batch_size"] * both["context_length"]
    return both[PLACE].assign(
        tokens=tokens, bf16_ms=both["wall_ms"], fp8_ms=both["wall_ms_fp8"],
        gain=[ratio(a, b) for a, b in zip(both["wall_ms"], both["wall_ms_fp8"])], bf16_mfu=both["mfu"],
        bf16_mj=both["step_j"] / tokens * 1e3, fp8_mj=both["step_j_fp8"] / tokens * 1e3)


def pays_from(found: pd.DataFrame) -> int | None:
    """Of :func:`by_batch` the tokens a step from which on FP8 gains at every size; None where it does not."""
    vain = found.loc[found["gain"] < 1 + LEAST_GAIN, "tokens"].max()
    pays = found.loc[~(found["tokens"] <= vain), "tokens"]
    return int(pays.min()) if len(pays) else None


# -- printed ------------------------------------------------------------------------------------------------

HEADINGS = {
    "context_length": "context", "batch_size": "batch", "tokens": "tokens a step", "fp8_ms": "FP8, ms",
    "gain": "faster, x", "busy": "busy, %", "operations": "kernels, n", "tokens_per_s": "tokens/s, n",
    "mfu": "MFU, %", "mfu_measured": "of a large matmul, %", "mfu_at_clock": "at its clock, %",
    "step_j": "energy, J", "compile_s": "compiling, s", "bf16_mfu": "MFU of bf16, %",
    "bf16_mj": "bf16, mJ a token", "fp8_mj": "FP8, mJ a token"}


def _headed(rows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    if "busy" in columns:  # a capture at the power cap may have met a lower clock than the timed steps
        rows = rows.assign(busy=rows["busy"].clip(upper=1))
    return headed(rows[[*columns]].rename(columns=HEADINGS)).dropna(axis="columns", how="all")


def _named(rows: pd.DataFrame, heading: str = "change") -> pd.DataFrame:
    """Rows by change, under the changes' names."""
    return rows.set_axis(pd.Index(rows.index.map(NAMES), name=heading))


def ladder_steps(tables: Tables) -> pd.DataFrame:
    """The largest size's ladder, and the peers."""
    _, rows = largest(tables)
    own = climbed(rows, [*CHANGES, *PEERS])
    own = own.assign(gain=[gain(rows, change) for change in own.index])
    printed = _headed(own, "wall_ms", "gpu_ms", "replayed_ms", "gain", "busy", "operations", "tokens_per_s",
                      "mfu", "peak_gib", "step_j", "power_w", "sm_clock_mhz", "compile_s")
    return table(_named(printed), bold=("min", "column", "wall, ms", "GPU time, ms", "energy, J"))


def which_change(tables: Tables) -> pd.DataFrame | None:
    """Changes x sizes: how many times faster than the row above; last, all of them in wall time."""
    columns, together = {}, {}
    for shape, rows in at_context(tables).items():
        columns[shape.size] = [gain(rows, change) for change in CHANGES[1:]]
        together[shape.size] = ratio(*rows["wall_ms"].reindex([CHANGES[0], LAST]))
    found = _named(pd.DataFrame(columns, index=CHANGES[1:], dtype=float)).dropna(how="all")
    found.loc["all of them, in wall time"] = together
    return table(found, unit="x") if len(found) > 1 else None


def fast_step(tables: Tables) -> pd.DataFrame:
    """What a step takes with each line of the complete script and those above it, at the smallest and largest
    size; the last two changes need an optimizer of ours."""
    found = pd.DataFrame({f"{shape.size}, ms": rows["wall_ms"].reindex(CHANGES[:-2])
                          for shape, rows in (smallest(tables), largest(tables))})
    note = "Wall time: where launches set the pace, faster kernels change nothing until the CUDA graph."
    return table(_named(found.dropna(how="all"), "with"), note=note)


def launch_cure(tables: Tables) -> pd.DataFrame | None:
    """The smallest size's bf16 step: eager, compiled, as a CUDA graph."""
    shape, rows = smallest(tables)
    kinds = {"fused": "eager, fused attention and AdamW", "blocks": "compiled blocks",
             "cuda_graph": "CUDA graph of compiled blocks"}
    own = climbed(rows, [*kinds])
    if len(own) < len(kinds):
        return None
    printed = _headed(own, "operations", "wall_ms", "gpu_ms", "busy")
    heading = f"{shape.size}, context {shape.context_length}, bf16"
    return table(printed.set_axis(pd.Index(kinds.values(), name=heading)))


def peers(tables: Tables) -> pd.DataFrame | None:
    """Our last step, and the last with PyTorch's AdamW, beside Hugging Face's, at every shape."""
    found = []
    for shape, rows in ladders(tables).items():
        walls = rows["wall_ms"].reindex([LAST, "cuda_graph", *reversed(PEERS)])
        if walls.notna().all():
            ours, torchs, graphs, default = walls
            found.append({"size": shape.size, "context": shape.context_length, "ours, ms": ours,
                          "ours with PyTorch's AdamW, ms": torchs, "reduce-overhead, ms": graphs,
                          "default, ms": default,
                          "ours faster than the best, x": ratio(min(graphs, default), ours)})
    return table(pd.DataFrame(found)) if found else None


def fp8_batches(tables: Tables) -> pd.DataFrame:
    """FP8 beside bf16's last step: a row a size and batch."""
    return table(_headed(by_batch(tables), "size", "batch_size", "tokens", "bf16_ms", "fp8_ms", "gain",
                         "bf16_mfu", "bf16_mj", "fp8_mj"))


def mfu(tables: Tables) -> pd.DataFrame | None:
    """MFU of the last step at every shape, and of the batch that fills the memory."""
    steps = tables["ladder.steps"].dropna(subset="mfu")
    own = in_order(pd.concat([chosen(steps, change=LAST), steps[steps["change"] == FILLED]]))
    printed = _headed(own, "size", "context_length", "batch_size", "wall_ms", "tokens_per_s", "mfu",
                      "mfu_measured", "mfu_at_clock", "sm_clock_mhz", "power_w", "peak_gib")
    return table(printed) if len(own) else None


def training_check(tables: Tables) -> pd.DataFrame:
    """How far gradients and losses are from fp32's."""
    shape, off = trained(tables)
    distance, seeds = moved(off)
    steps = tables["ladder.steps"].merge(pd.DataFrame([shape])).set_index("change")
    order = [change for change in (*CHANGES, *BEYOND) if change in distance]
    found = pd.DataFrame({"gradient off, %": steps["gradient_off"].reindex(order),
                          "loss moved": distance[order], "of another seed, %": distance[order] / seeds})
    return table(_named(found), note="Loss moved: mean distance over the steps, in nats.")


PRINTED: dict[str, Callable[[Tables], pd.DataFrame | None]] = {
    "ladder_steps": ladder_steps, "which_change": which_change, "fast_step": fast_step,
    "launch_cure": launch_cure, "peers": peers, "fp8_batches": fp8_batches, "mfu": mfu,
    "training_check": training_check}
