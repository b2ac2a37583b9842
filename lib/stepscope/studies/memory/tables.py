"""Define the schemas of the memory study's run files, and derive the tables that the study's notebooks print."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import pandera.pandas as pa

from stepscope.config import (
    EDITIONS,
    PHASES,
    PRECISION_NAMES,
    SIZE_RANKS,
    SIZES,
    TOTAL,
    StepConfig,
    configure,
)
from stepscope.model.accounting import GIB, KINDS
from stepscope.model.fit import BASELINE_FIELDS
from stepscope.report.schemas import STATUSES, WITHIN, Tables, number_column, table_schema, text_column
from stepscope.report.tables import headed, number
from stepscope.studies.memory.config import Config

CONFIG = (
    "size",
    "context_length",
    "batch_size",
    "vocab_size",
    "precision",
    "attention",
    "optimizer",
    "expandable_segments",
)
TENSOR_GROUPS = ("allocated in forward", "saved by a block", "gradients of a block")
OUTCOME = {"status": text_column(*STATUSES), "reason": text_column()}
# The kinds whose memory is known at every event. The memory lost to the allocator's rounding is known only at
# peaks.
LIVE = [kind for kind in KINDS if kind != "rounding"]


def column(kind: str) -> str:
    """Return the name of the column that contains a kind's memory in GiB."""
    return f"{kind.replace(' ', '_')}_gib"


COUNT = pa.Column(int, pa.Check.in_range(0, 2**53), coerce=True)
SCHEMAS = {
    "peaks": table_schema(
        ("mode", "phase"),
        **WITHIN,
        **OUTCOME,
        **{
            name: number_column()
            for name in (
                "peak_gib",
                "requested_gib",
                "reserved_gib",
                "predicted_gib",
                "predicted_requested_gib",
                "layer",
                "allocation_gib",
                *map(column, KINDS),
            )
        },
        peak_in=text_column("", *PHASES["step"]),
        region=text_column(),
        line=text_column(),
    ),
    "allocations": table_schema(
        ("what", "rank"),
        what=text_column(*TENSOR_GROUPS),
        rank=COUNT,
        line=text_column(),
        source=text_column(),
        region=text_column(),
        tensor=text_column(),
        mib=number_column(nullable=False),
        count=COUNT,
    ),
    "timeline": table_schema(
        ("mode", "event"),
        mode=text_column(*PHASES),
        event=COUNT,
        phase=text_column(*PHASES["step"]),
        **{column(kind): number_column(nullable=False) for kind in LIVE},
    ),
    "checkpoints": table_schema(
        ("mode", "blocks", "checkpoint_policy"),
        mode=text_column(*PHASES),
        blocks=COUNT,
        checkpoint_policy=text_column(),
        **OUTCOME,
        **{
            name: number_column()
            for name in (
                "blocks_per_checkpoint",
                "steps",
                "wall_ms",
                "wall_std_ms",
                "gpu_ms",
                "busy",
                "peak_gib",
                "reserved_gib",
                "predicted_gib",
                "state_gib",
                "block_runs",
                "expected_runs",
                "expected_saved_gib",
            )
        },
        inconsistent=text_column(),
    ),
}


def typed(name: str, *frames: pd.DataFrame) -> pd.DataFrame:
    """Concatenate rows of a run's table, with the columns and types of its schema; missing text becomes ""."""
    schema = SCHEMAS[name]
    rows = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    rows = rows.reindex(columns=list(schema.columns))
    types = {column: str(kind) for column, kind in schema.dtypes.items()}
    texts = [column for column, kind in types.items() if kind.startswith("str")]
    types |= dict.fromkeys(texts, "str")
    rows[texts] = rows[texts].astype(object).fillna("")
    return rows.astype(types)


def checkpoint_rows(
    times: pd.DataFrame,
    readings: Mapping[Any, Mapping[str, float]],
    expected: Mapping[Any, Mapping[str, float]],
    block_runs: Mapping[Any, int],
    blocks: int,
) -> pd.DataFrame:
    """Return the rows of ``checkpoints`` for one model, with one row per case (checkpoint policy and mode).

    Args:
        times, readings: as in :class:`stepscope.measure.Results`.
        expected: values of additional columns by case, such as the predicted peak.
        block_runs: the number of block forward passes in one step, by case; only for cases whose step was
            completed.
        blocks: the number of the model's blocks.
    """
    rows = times[times["phase"] == TOTAL].copy()
    cases = [*zip(rows["checkpoint_policy"], rows["mode"])]
    rows["state_gib"] = [readings.get(case, {}).get("state_gib") for case in cases]
    rows["block_runs"] = [block_runs.get(case) for case in cases]
    more_columns = pd.DataFrame([expected[case] for case in cases], index=rows.index)
    return typed("checkpoints", rows.assign(blocks=blocks, **more_columns))


def predicted(size: str = "", **fields: str) -> StepConfig:
    """Return the configuration of a baseline step at context length 512, for predictions.

    Args:
        size: the model's size; by default, the largest size of the 2025 handout.
        fields: changes to the baseline's fields.
    """
    size = size or [*EDITIONS[2025]][-1]
    config = configure("benchmark", size=size, context_length=512, device="cpu").step(mode="step")
    return config.model_copy(update=BASELINE_FIELDS | fields)


def run_tables(config: Config, frames: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Return one run's tables, with the same names and columns as in a report on all runs."""
    fields = {name: getattr(config, name) for name in CONFIG}
    return {f"memory.{name}": frame.assign(**fields) for name, frame in frames.items()}


def largest_baseline(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the largest size's fp32 baseline at context length 512.

    The baseline has naive attention and PyTorch's default AdamW. If a frame has no such rows, for example because
    it is from a single run, it is returned unchanged.
    """
    is_baseline = (
        (frame["precision"] == "fp32")
        & (frame["attention"] == "naive")
        & (frame["optimizer"] == "foreach")
        & (frame["context_length"] == 512)
        & ~frame["expandable_segments"].astype(bool)
    )
    baseline = frame[is_baseline]
    if baseline.empty:
        return frame
    ranks = baseline["size"].map(SIZE_RANKS).fillna(0)
    return baseline[ranks == ranks.max()]


def peaks_at_backward_start(total: pd.Series) -> bool:
    """Return whether a step's peak occurs at the start of the backward pass.

    The start consists of the backward passes of the loss and of the last block.

    Args:
        total: the step's row of ``peaks`` whose phase is "total".
    """
    if total["peak_in"] != "backward":
        return False
    if pd.isna(total["layer"]):  # outside the blocks
        return True
    dimensions = SIZES.get(total["size"])
    return dimensions is None or bool(total["layer"] == dimensions.num_layers - 1)


def timeline(tables: Tables) -> tuple[str, pd.DataFrame, pd.DataFrame]:
    """Return the arguments for :func:`stepscope.figures.memory.memory_timeline`.

    These are a title, the timeline of one configuration, and the peaks of its modes.

    Raises:
        LookupError: If no mode was recorded.
    """
    if tables["memory.timeline"].empty:
        raise LookupError("no mode was recorded")
    rows = largest_baseline(tables["memory.timeline"])
    config = rows.iloc[0][[*CONFIG]]
    rows = rows[(rows[[*CONFIG]] == config).all(axis=1)]
    peaks = tables["memory.peaks"]
    peaks = peaks[(peaks[[*CONFIG]] == config).all(axis=1)]
    peaks = peaks[peaks["phase"] == TOTAL].set_index("mode", drop=False)
    recorded_modes = [mode for mode in PHASES if (rows["mode"] == mode).any()]
    total = peaks.loc[recorded_modes[-1]]
    place = "where backward begins" if peaks_at_backward_start(total) else f"in {total['peak_in']}"
    precision = PRECISION_NAMES[config["precision"]]
    title = (
        f"{config['size']} at context length {config['context_length']:,} in {precision}:"
        f" the peak is {place}, {number(total['peak_gib'], 'GiB')}"
    )
    return title, rows, peaks


def one_level(tables: Tables) -> pd.DataFrame:
    """Return the rows of forward and backward with one level of checkpoints, for one model size.

    The size is the one with the most checkpoint settings; if several sizes tie, the largest is used.

    The rows are ordered by context length, and then by blocks per checkpoint. Rows without checkpoints come last.

    Raises:
        LookupError: If no run measured one level of checkpoints.
    """
    rows = tables["memory.checkpoints"]
    rows = rows[(rows["mode"] == "forward_backward") & rows["blocks_per_checkpoint"].notna()]
    if rows.empty:
        raise LookupError("no run measured one level of checkpoints")
    settings = rows.groupby("size")["checkpoint_policy"].transform("nunique")
    rows = rows[settings == settings.max()]
    ranks = rows["size"].map(SIZE_RANKS).fillna(0)
    order = rows["blocks_per_checkpoint"].replace(0, 1e9)
    largest = rows[ranks == ranks.max()].assign(order=order)
    return largest.sort_values(["context_length", "order"], kind="stable")


def nested(tables: Tables) -> pd.DataFrame:
    """Return the rows for nested checkpoints, with the memory that each policy needs beyond weights and gradients.

    Raises:
        LookupError: If no run measured nested checkpoints.
    """
    rows = tables["memory.checkpoints"]
    is_nested = rows["expected_saved_gib"].notna() & (rows["status"] == "ok")
    rows = rows[(rows["mode"] == "forward_backward") & is_nested]
    if rows.empty:
        raise LookupError("no run measured nested checkpoints")
    return rows.assign(beyond_gib=rows["peak_gib"] - rows["state_gib"])


# -- tables that notebooks print -----------------------------------------------------------------------------

HEADINGS = {
    "context_length": "context length",
    "gpu_ms": "GPU time, ms",
    "blocks_per_checkpoint": "blocks per checkpoint",
    "expected_saved_gib": "saved by formula, GiB",
    "beyond_gib": "beyond weights and gradients, GiB",
    "block_runs": "blocks run, n",
    "wall_std_ms": "std, ms",
}


def _headed(rows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    return headed(rows[[*columns]].rename(columns=HEADINGS))


def peak_by_kind(tables: Tables) -> pd.DataFrame:
    """Return the memory by kind at the peak of each phase of a full step, and of a forward pass alone."""
    rows = largest_baseline(tables["memory.peaks"])
    rows = rows[(rows["status"] == "ok") & rows["phase"].isin(["forward", "backward", "optimizer"])]
    names = [f"{row.phase} alone" if row.mode == "forward" else row.phase for row in rows.itertuples()]
    kinds = rows[[*map(column, KINDS), "peak_gib"]]
    by_kind = kinds.set_axis([*KINDS, "total"], axis=1).set_axis(names).T
    is_shown = by_kind.gt(0.005).any(axis=1)
    return by_kind[is_shown].rename_axis("held at the peak, GiB")


def recorded_peaks(peaks: pd.DataFrame, unit: str, scale: float) -> pd.DataFrame:
    """Return one run's peaks by phase, the prediction, and the allocation that reached each peak.

    Args:
        peaks: the run's table ``peaks``.
        unit: the unit of the sizes, for the headings.
        scale: the number of bytes per unit.
    """
    names = {
        "peak_gib": "peak",
        "predicted_gib": "predicted",
        "reserved_gib": "reserved",
        "allocation_gib": "last allocation",
    }
    sizes = {f"{heading}, {unit}": peaks[name] * GIB / scale for name, heading in names.items()}
    reason = ["reason"] if peaks["reason"].any() else []
    return peaks.assign(**sizes)[["mode", "phase", "status", *reason, *sizes, "layer", "region", "line"]]


def checkpoint_settings(tables: Tables) -> pd.DataFrame:
    """Return time and peak memory for each context length and number of blocks per checkpoint."""
    rows = one_level(tables)
    blocks = rows["blocks_per_checkpoint"].astype(int).astype(str).replace("0", "none")
    printed = _headed(
        rows.assign(blocks_per_checkpoint=blocks),
        "size",
        "precision",
        "context_length",
        "blocks_per_checkpoint",
        "peak_gib",
        "predicted_gib",
        "reserved_gib",
        "gpu_ms",
        "wall_ms",
        "wall_std_ms",
        "status",
    )
    return printed.dropna(axis="columns", how="all")


def nested_checkpoints(tables: Tables) -> pd.DataFrame:
    """Return the results of each checkpoint policy for the models with the fewest and with the most blocks."""
    rows = nested(tables)
    rows = rows[rows["blocks"].isin([rows["blocks"].min(), rows["blocks"].max()])]
    return _headed(
        rows,
        "size",
        "precision",
        "context_length",
        "blocks",
        "checkpoint_policy",
        "expected_saved_gib",
        "beyond_gib",
        "block_runs",
        "gpu_ms",
    )
