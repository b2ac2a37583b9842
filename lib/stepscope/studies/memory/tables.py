"""The memory study's tables, and those that its notebooks print."""

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
WHAT = ("allocated in forward", "saved by a block", "gradients of a block")
OUTCOME = {"status": text_column(*STATUSES), "reason": text_column()}
# What has a history of its own; what the allocator's rounding adds is known at peaks only.
LIVE = [kind for kind in KINDS if kind != "rounding"]


def column(kind: str) -> str:
    """A kind's column, in GiB."""
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
        what=text_column(*WHAT),
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
    """The rows of a run's table, in the columns and types of its schema; a text that is missing is empty."""
    rows = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    rows = rows.reindex(columns=list(SCHEMAS[name].columns))
    types = {column: str(kind) for column, kind in SCHEMAS[name].dtypes.items()}
    texts = [column for column, kind in types.items() if kind.startswith("str")]
    rows[texts] = rows[texts].astype(object).fillna("")
    return rows.astype(types | dict.fromkeys(texts, "str"))


def checkpoint_rows(
    times: pd.DataFrame,
    readings: Mapping[Any, Mapping[str, float]],
    expected: Mapping[Any, Mapping[str, float]],
    block_runs: Mapping[Any, int],
    blocks: int,
) -> pd.DataFrame:
    """Return the rows of ``checkpoints`` for one model, one per case (checkpoint policy, mode).

    Args:
        times, readings: of :class:`stepscope.measure.Results`.
        expected: further columns by case, such as the predicted peak.
        block_runs: how often blocks ran forward in one step, by case; a case without a complete step has none.
        blocks: of the model.
    """
    rows = times[times["phase"] == TOTAL].copy()
    cases = [*zip(rows["checkpoint_policy"], rows["mode"])]
    rows["state_gib"] = [readings.get(case, {}).get("state_gib") for case in cases]
    rows["block_runs"] = [block_runs.get(case) for case in cases]
    further = pd.DataFrame([expected[case] for case in cases], index=rows.index)
    return typed("checkpoints", rows.assign(blocks=blocks, **further))


def predicted(size: str = "", **fields: str) -> StepConfig:
    """A step on a GPU, to be computed and not run: of a size, if not another the handout's largest, at the
    context at which sizes are compared."""
    size = size or [*EDITIONS[2025]][-1]
    config = configure("benchmark", size=size, context_length=512, device="cpu").step(mode="step")
    return config.model_copy(update=BASELINE_FIELDS | fields)


def of_run(config: Config, frames: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """One run's tables as the report has them, for its notebook's pictures."""
    fields = {name: getattr(config, name) for name in CONFIG}
    return {f"memory.{name}": frame.assign(**fields) for name, frame in frames.items()}


def largest_plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the largest size's plain step at context length 512: fp32, naive attention, PyTorch's
    default AdamW. A folder without it, such as a notebook's own run, keeps all its rows."""
    is_plain = (
        (frame["precision"] == "fp32") & (frame["attention"] == "naive") & (frame["optimizer"] == "foreach")
    )
    plain = frame[is_plain & (frame["context_length"] == 512) & ~frame["expandable_segments"].astype(bool)]
    if plain.empty:
        return frame
    ranks = plain["size"].map(SIZE_RANKS).fillna(0)
    return plain[ranks == ranks.max()]


def begins_backward(whole: pd.Series) -> bool:
    """Whether a step peaks where its backward begins: in the loss's or the last block's."""
    known = SIZES.get(whole["size"])
    last = known is None or whole["layer"] == known.num_layers - 1
    return whole["peak_in"] == "backward" and (bool(pd.isna(whole["layer"])) or last)


def timeline(tables: Tables) -> tuple[str, pd.DataFrame, pd.DataFrame]:
    """Return what :func:`stepscope.figures.memory.memory_timeline` draws: a title, one configuration's timeline,
    and the peaks of its modes.

    Raises:
        LookupError: no mode was recorded.
    """
    if tables["memory.timeline"].empty:
        raise LookupError("no mode was recorded")
    rows = largest_plain(tables["memory.timeline"])
    one = rows.iloc[0]
    rows, peaks = (
        frame[(frame[[*CONFIG]] == one[[*CONFIG]]).all(axis=1)] for frame in (rows, tables["memory.peaks"])
    )
    peaks = peaks[peaks["phase"] == TOTAL].set_index("mode", drop=False)
    last = peaks.loc[[mode for mode in PHASES if (rows["mode"] == mode).any()][-1]]
    place = "where backward begins" if begins_backward(last) else f"in {last['peak_in']}"
    title = (
        f"{one['size']} at context length {one['context_length']:,} in {PRECISION_NAMES[one['precision']]}:"
        f" the peak is {place}, {number(last['peak_gib'], 'GiB')}"
    )
    return title, rows, peaks


def one_level(tables: Tables) -> pd.DataFrame:
    """Return forward and backward under one level of checkpoints, of the largest size with several settings: the
    settings of each context length by blocks per checkpoint, none at the end.

    Raises:
        LookupError: it was not measured.
    """
    rows = tables["memory.checkpoints"]
    rows = rows[(rows["mode"] == "forward_backward") & rows["blocks_per_checkpoint"].notna()]
    if rows.empty:
        raise LookupError("no run measured one level of checkpoints")
    settings = rows.groupby("size")["checkpoint_policy"].transform("nunique")
    rows = rows[settings == settings.max()]
    ranks = rows["size"].map(SIZE_RANKS).fillna(0)
    order = rows["blocks_per_checkpoint"].replace(0, 1e9)
    return (
        rows[ranks == ranks.max()].assign(order=order).sort_values(["context_length", "order"], kind="stable")
    )


def nested(tables: Tables) -> pd.DataFrame:
    """Return nested checkpoints, with what each takes beyond weights and gradients.

    Raises:
        LookupError: none was measured.
    """
    rows = tables["memory.checkpoints"]
    is_nested = rows["expected_saved_gib"].notna() & (rows["status"] == "ok")
    rows = rows[(rows["mode"] == "forward_backward") & is_nested]
    if rows.empty:
        raise LookupError("no run measured nested checkpoints")
    return rows.assign(beyond_gib=rows["peak_gib"] - rows["state_gib"])


# -- what notebooks print -------------------------------------------------------------------------------------

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
    """Return what is held at the peak of each phase of a full step, and of forward alone."""
    rows = largest_plain(tables["memory.peaks"])
    rows = rows[(rows["status"] == "ok") & rows["phase"].isin(["forward", "backward", "optimizer"])]
    names = [f"{row.phase} alone" if row.mode == "forward" else row.phase for row in rows.itertuples()]
    pivoted = rows[[*map(column, KINDS), "peak_gib"]].set_axis([*KINDS, "total"], axis=1).set_axis(names).T
    return pivoted[pivoted.gt(0.005).any(axis=1)].rename_axis("held at the peak, GiB")


def recorded_peaks(peaks: pd.DataFrame, unit: str, scale: float) -> pd.DataFrame:
    """Return one run's peaks of each phase next to the prediction, with the allocation that reached each, in
    ``scale`` bytes."""
    names = {
        "peak_gib": "peak",
        "predicted_gib": "predicted",
        "reserved_gib": "reserved",
        "allocation_gib": "last allocation",
    }
    sizes = {f"{words}, {unit}": peaks[name] * GIB / scale for name, words in names.items()}
    reason = ["reason"] if peaks["reason"].any() else []
    return peaks.assign(**sizes)[["mode", "phase", "status", *reason, *sizes, "layer", "region", "line"]]


def checkpoint_settings(tables: Tables) -> pd.DataFrame:
    """Return time and peak by blocks per checkpoint, at each context length."""
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
    """Return checkpoint policies over the fewest and the most blocks."""
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
