"""The memory study's tables, and those that chapters print."""
from collections.abc import Mapping
from contextlib import suppress

import pandas as pd
import pandera.pandas as pa

from stepscope.config import PHASES, SIZES, StepConfig
from stepscope.report.schemas import STATUSES, WITHIN, measured, tidy, word
from stepscope.report.tables import headed, table
from stepscope.step.accounting import GIB, KINDS, fit
from stepscope.studies.memory.config import Config
from stepscope.studies.memory.history import LIVE, column

CONFIG = ("size", "context_length", "batch_size", "vocab_size", "precision", "attention", "optimizer",
          "expandable_segments")
Tables = Mapping[str, pd.DataFrame]
WHAT = ("allocated in forward", "saved by a block", "gradients of a block")
OUTCOME = {"status": word(*STATUSES), "reason": word()}


def whole(nullable: bool = False) -> pa.Column:
    return pa.Column(int, pa.Check.in_range(0, 2**53), nullable=nullable, coerce=True)


SCHEMAS = {
    "peaks": tidy(("mode", "phase"), **WITHIN, **OUTCOME, **{name: measured() for name in (
        "peak_gib", "requested_gib", "reserved_gib", "predicted_gib", "predicted_requested_gib", "layer",
        "allocation_gib", *map(column, KINDS))}, peak_in=word("", *PHASES["step"]), region=word(),
        line=word()),
    "allocations": tidy(("what", "rank"), what=word(*WHAT), rank=whole(), line=word(), source=word(),
                        region=word(), tensor=word(), mib=measured(nullable=False), count=whole()),
    "timeline": tidy(("mode", "event"), mode=word(*PHASES), event=whole(), phase=word(*PHASES["step"]),
                     **{column(kind): measured(nullable=False) for kind in LIVE}),
    "checkpoints": tidy(
        ("mode", "blocks", "arrangement"), mode=word(*PHASES), blocks=whole(), arrangement=word(), **OUTCOME,
        **{name: measured() for name in (
            "blocks_per_checkpoint", "wall_ms", "gpu_ms", "busy", "peak_gib", "reserved_gib", "predicted_gib",
            "state_gib", "block_runs", "expected_runs", "expected_kept_gib")}),
}
KEYS = {name: (*CONFIG, *schema.unique) for name, schema in SCHEMAS.items()}


def of_run(config: Config, frames: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """One run's tables as the report has them, for its notebook's pictures."""
    fields = {name: getattr(config, name) for name in CONFIG}
    return {f"memory.{name}": frame.assign(**fields) for name, frame in frames.items()}


USUAL = 512  # the context that sentences speak of
MODE_NAMES = {"forward": "forward", "forward_backward": "forward and backward", "step": "full step"}
PLAIN = {"attention": "naive", "optimizer": "foreach", "expandable_segments": False}


def of_largest(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the largest size."""
    order = {name: shape.d_model * shape.num_layers for name, shape in SIZES.items()}
    sizes = frame["size"].map(order).fillna(0)
    return frame[sizes == sizes.max()]


def usual(frame: pd.DataFrame, **fields: object) -> pd.DataFrame:
    """The rows that sentences speak of: the largest size's plain step (fp32 unless ``fields`` say another
    precision) at the context nearest to 512.

    Raises:
        LookupError: there are none.
    """
    rows = of_largest(where(frame, **PLAIN | {"precision": "fp32"} | fields))
    distance = (rows["context_length"] - USUAL).abs()
    return rows[distance == distance.min()]


def where(frame: pd.DataFrame, **fields: object) -> pd.DataFrame:
    """The rows in which columns have these values.

    Raises:
        LookupError: there are none.
    """
    for name, value in fields.items():
        frame = frame[frame[name] == value]
    if frame.empty:
        raise LookupError(f"no rows with {fields}")
    return frame


def begins_backward(whole: pd.Series) -> bool:
    """Whether a step peaks where its backward begins: in the loss's or the last block's."""
    known = SIZES.get(whole["size"])
    last = known is None or whole["layer"] == known.num_layers - 1
    return whole["peak_in"] == "backward" and (bool(pd.isna(whole["layer"])) or last)


def config_of(row: pd.Series | dict) -> StepConfig:
    """A row's shape on a GPU, for the formulas."""
    fields = {name: row[name] for name in ("size", "precision", "attention", "optimizer")}
    fields |= {name: int(row[name]) for name in ("context_length", "batch_size", "vocab_size")}
    return StepConfig(**fields, device="cpu").model_copy(update={"device": "cuda"})


# -- what chapters print -------------------------------------------------------------------------------------

def handout_peaks(tables: Tables) -> pd.DataFrame:
    """(b), (c): peak by context, mode and precision; what ran out of memory is empty."""
    rows = of_largest(where(tables["memory.peaks"], phase="whole", **PLAIN))
    rows = rows[rows["precision"].isin(["fp32", "bf16"]) & rows["mode"].isin(MODE_NAMES)]
    names = rows["mode"].map(MODE_NAMES) + ", " + rows["precision"]
    wide = rows.assign(name=names).pivot(index="context_length", columns="name", values="peak_gib")
    columns = [name for mode in MODE_NAMES.values() for precision in ("fp32", "bf16")
               if (name := f"{mode}, {precision}") in wide]
    out = " Empty: out of memory." if (rows["status"] == "oom").any() else ""
    first = rows.iloc[0]
    return table(wide[columns].rename_axis("context"), unit="GiB", note=(
        f"Peak of allocated memory in GiB, {first['size']}, batch {first['batch_size']}.{out}"))


def peak_by_kind(tables: Tables) -> pd.DataFrame:
    """What is held at the peak of each phase of a full step, and of forward alone."""
    rows = usual(tables["memory.peaks"])
    rows = rows[(rows["phase"] != "whole") & (rows["phase"] != "loss") & (rows["status"] == "ok")]
    names = [f"{row.phase} alone" if row.mode == "forward" else row.phase for row in rows.itertuples()]
    wide = rows[[*map(column, KINDS), "peak_gib"]].set_axis([*KINDS, "all"], axis=1).set_axis(names).T
    return table(wide[wide.gt(0.005).any(axis=1)].rename_axis("held at the peak, GiB"), unit="GiB")


def largest(tables: Tables) -> pd.DataFrame:
    """(e): the largest allocations of a forward pass, with the line that makes them."""
    rows = usual(where(tables["memory.allocations"], what="allocated in forward")).sort_values("rank").head(6)
    return table(rows[["mib", "count", "region", "line", "source"]].rename(columns={
        "mib": "each, MiB", "count": "how often", "line": "made by", "source": "code"}))


def less_memory(tables: Tables) -> pd.DataFrame:
    """What lowers the peak: each change beside the step without it."""
    peaks = where(tables["memory.peaks"], mode="step", phase="whole")
    rows: list[dict] = []

    def add(change: str, of: str, column: str, before: pd.DataFrame, after: pd.DataFrame) -> None:
        both = before.merge(after, on="context_length", suffixes=("", "_after"))
        rows.extend({"change": change, "of": of, "context": one["context_length"], "before, GiB": one[column],
                     "after, GiB": one[f"{column}_after"]} for _, one in both.iterrows())
    fused = {"attention": "sdpa", "optimizer": "fused"}
    plain, low = usual(peaks), usual(peaks, precision="bf16")
    add("bf16 autocast", "full step, fp32", "peak_gib", plain, low)
    for precision, before in (("fp32", plain), ("bf16", low)):
        with suppress(LookupError):
            after = usual(peaks, precision=precision, **fused)
            add("fused attention and AdamW", f"full step, {precision}", "peak_gib", before, after)
    with suppress(LookupError):
        add("expandable segments", "reserved, full step, bf16", "reserved_gib", low,
            usual(peaks, precision="bf16", expandable_segments=True))
    with suppress(LookupError):
        settings = one_level(tables).set_index("arrangement")
        add("a checkpoint around each block", "forward and backward, bf16", "peak_gib",
            settings.loc[["none"]], settings.loc[["every 1"]])
    return table(pd.DataFrame(rows).assign(less=lambda all: 1 - all["after, GiB"] / all["before, GiB"])
                 .rename(columns={"less": "less, %"})) if rows else None


def one_level(tables: Tables, longest: bool = False) -> pd.DataFrame:
    """Forward and backward under one level of checkpoints, by blocks a checkpoint (none at the end): at the
    shortest context where it was measured, or at the longest.

    Raises:
        LookupError: it was not measured.
    """
    rows = where(tables["memory.checkpoints"], mode="forward_backward")
    rows = rows[rows["blocks_per_checkpoint"].notna()]
    settings = rows.groupby("size")["arrangement"].transform("nunique")  # 10B has two
    rows = of_largest(rows[settings == settings.max()])
    contexts = sorted(rows["context_length"].unique())
    if not contexts or (longest and len(contexts) < 2):
        raise LookupError("no context with checkpoints")
    rows = rows[rows["context_length"] == contexts[-1 if longest else 0]]
    return rows.sort_values("blocks_per_checkpoint", key=lambda blocks: blocks.where(blocks > 0, 1e9))


def _settings(rows: pd.DataFrame) -> pd.DataFrame:
    blocks = rows["blocks_per_checkpoint"].astype(int).astype(str).replace("0", "none")
    shown = rows.assign(blocks=blocks)[["blocks", "peak_gib", "predicted_gib", "gpu_ms", "wall_ms", "status"]]
    shown = shown.rename(columns={"blocks": "blocks a checkpoint", "gpu_ms": "GPU time, ms"})
    first = rows.iloc[0]
    return table(headed(shown), bold=("min", "column", "peak, GiB", "GPU time, ms"), note=(
        f"{first['size']}, context {first['context_length']:,}, batch {first['batch_size']},"
        f" {first['precision']}, forward and backward."))


def nested_checkpoints(tables: Tables) -> pd.DataFrame:
    """Arrangements of checkpoints over the fewest and the most blocks."""
    rows = where(tables["memory.checkpoints"], mode="forward_backward")
    rows = rows[rows["expected_kept_gib"].notna()]
    rows = rows[rows["blocks"].isin([rows["blocks"].min(), rows["blocks"].max()])]
    if rows.empty:
        raise LookupError("no nested checkpoints")
    shown = rows.assign(beyond_gib=rows["peak_gib"] - rows["state_gib"], block_runs=rows["block_runs"])[
        ["blocks", "arrangement", "expected_kept_gib", "beyond_gib", "block_runs", "gpu_ms"]]
    return table(shown.rename(columns={
        "expected_kept_gib": "kept by formula, GiB", "beyond_gib": "beyond weights and gradients, GiB",
        "block_runs": "blocks run, n", "gpu_ms": "GPU time, ms"}))


def saved_by_block(tables: Tables) -> pd.DataFrame:
    """2026 (f): the five largest groups of tensors that a block saves."""
    rows = usual(where(tables["memory.allocations"], what="saved by a block"))
    rows = rows.assign(sum=rows["mib"] * rows["count"])
    share = rows["sum"] / rows["sum"].sum()
    shown = rows.assign(share=share).sort_values("sum", ascending=False).head(5)
    return table(shown[["region", "source", "count", "mib", "share"]].rename(columns={
        "source": "code", "count": "tensors", "mib": "each, MiB", "share": "of all, %"}))


def reach_10b(tables: Tables) -> pd.DataFrame:
    """How far the largest model runs on one GPU."""
    rows = where(tables["memory.checkpoints"], size="10B")
    shown = rows.assign(mode=rows["mode"].map(MODE_NAMES), checkpoints=rows["arrangement"])[
        ["mode", "checkpoints", "context_length", "status", "peak_gib", "predicted_gib", "gpu_ms"]]
    return table(headed(shown.rename(columns={"context_length": "context", "gpu_ms": "GPU time, ms"})))


def reserved(tables: Tables) -> pd.DataFrame:
    """What the allocator reserves beyond tensors, most first."""
    rows = where(tables["memory.peaks"], phase="whole", status="ok")
    rows = rows.assign(idle=1 - rows["peak_gib"] / rows["reserved_gib"], mode=rows["mode"].map(MODE_NAMES))
    rows = rows.rename(columns={"context_length": "context", "idle": "idle, %"})
    return table(headed(rows.sort_values("idle, %", ascending=False)[
        ["size", "context", "mode", "precision", "expandable_segments", "peak_gib", "reserved_gib",
         "idle, %"]]), rows=10)


def formula_peaks(tables: Tables) -> pd.DataFrame:
    """Predicted and measured peaks of every mode that was recorded."""
    rows = where(tables["memory.peaks"], phase="whole", status="ok")
    off = (rows["requested_gib"] - rows["predicted_requested_gib"]) * GIB
    shown = rows.assign(off=off.round().astype(int), mode=rows["mode"].map(MODE_NAMES))
    shown = shown.rename(columns={"context_length": "context", "off": "requested beyond formula, B"})
    return table(headed(shown[["size", "context", "mode", "precision", "attention", "peak_gib",
                               "predicted_gib", "requested beyond formula, B"]]))


def what_fits(tables: Tables) -> pd.DataFrame:
    """Predicted steps of the largest size on 80 GiB."""
    rows = usual(where(tables["memory.peaks"], phase="whole"))
    fits = pd.DataFrame(fit(config_of(rows.iloc[0]), 80))
    return table(headed(fits), note=f"{rows['size'].iloc[0]} in 80 GiB, largest context at batch"
                 f" {rows['batch_size'].iloc[0]}, largest batch at context {rows['context_length'].iloc[0]}.")


PRINTED = {
    "handout_peaks": handout_peaks, "peak_by_kind": peak_by_kind, "largest": largest,
    "less_memory": less_memory,
    "checkpoint_settings": lambda tables: _settings(one_level(tables)),
    "checkpoint_settings_longest": lambda tables: _settings(one_level(tables, longest=True)),
    "nested_checkpoints": nested_checkpoints, "saved_by_block": saved_by_block, "reach_10b": reach_10b,
    "reserved": reserved, "formula_peaks": formula_peaks, "what_fits": what_fits}
