"""The memory study's tables, and those that its notebooks print."""

import pandas as pd
import pandera.pandas as pa

from stepscope.config import EDITIONS, PHASES, SIZE_RANKS, SIZES, StepConfig, configure
from stepscope.model.accounting import KINDS
from stepscope.model.fit import BASELINE_FIELDS
from stepscope.report.schemas import STATUSES, WITHIN, Tables, measured, tidy, word
from stepscope.report.tables import counted, headed, table
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
OUTCOME = {"status": word(*STATUSES), "reason": word()}
FEW = 3  # steps from which on a median leaves out one that was disturbed
# What has a history of its own; what the allocator's rounding adds is known at peaks only.
LIVE = [kind for kind in KINDS if kind != "rounding"]


def column(kind: str) -> str:
    """A kind's column, in GiB."""
    return f"{kind.replace(' ', '_')}_gib"


WHOLE = pa.Column(int, pa.Check.in_range(0, 2**53), coerce=True)
SCHEMAS = {
    "peaks": tidy(
        ("mode", "phase"),
        **WITHIN,
        **OUTCOME,
        **{
            name: measured()
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
        peak_in=word("", *PHASES["step"]),
        region=word(),
        line=word(),
    ),
    "allocations": tidy(
        ("what", "rank"),
        what=word(*WHAT),
        rank=WHOLE,
        line=word(),
        source=word(),
        region=word(),
        tensor=word(),
        mib=measured(nullable=False),
        count=WHOLE,
    ),
    "timeline": tidy(
        ("mode", "event"),
        mode=word(*PHASES),
        event=WHOLE,
        phase=word(*PHASES["step"]),
        **{column(kind): measured(nullable=False) for kind in LIVE},
    ),
    "checkpoints": tidy(
        ("mode", "blocks", "checkpoint_policy"),
        mode=word(*PHASES),
        blocks=WHOLE,
        checkpoint_policy=word(),
        **OUTCOME,
        **{
            name: measured()
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
        unsteady=word(),
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
    "context_length": "context",
    "gpu_ms": "GPU time, ms",
    "blocks_per_checkpoint": "blocks a checkpoint",
    "expected_saved_gib": "kept by formula, GiB",
    "beyond_gib": "beyond weights and gradients, GiB",
    "block_runs": "blocks run, n",
    "mib": "each, MiB",
    "share": "of all, %",
    "line": "made by",
    "source": "code",
    "beyond": "requested beyond formula, B",
    "less": "less, %",
    "wall_std_ms": "std, ms",
}


def _headed(rows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    return headed(rows[[*columns]].rename(columns=HEADINGS))


def peak_by_kind(tables: Tables) -> pd.DataFrame:
    """What is held at the peak of each phase of a full step, and of forward alone."""
    rows = largest_plain(tables["memory.peaks"])
    rows = rows[(rows["status"] == "ok") & rows["phase"].isin(["forward", "backward", "optimizer"])]
    names = [f"{row.phase} alone" if row.mode == "forward" else row.phase for row in rows.itertuples()]
    pivoted = rows[[*map(column, KINDS), "peak_gib"]].set_axis([*KINDS, "all"], axis=1).set_axis(names).T
    return table(pivoted[pivoted.gt(0.005).any(axis=1)].rename_axis("held at the peak, GiB"), unit="GiB")


def checkpoint_settings(tables: Tables) -> pd.DataFrame:
    """Time and peak by blocks a checkpoint, at each context."""
    rows = one_level(tables)
    blocks = rows["blocks_per_checkpoint"].astype(int).astype(str).replace("0", "none")
    printed = _headed(
        rows.assign(blocks_per_checkpoint=blocks),
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
    return table(printed.dropna(axis="columns", how="all"), note=_measured(tables, rows))


def nested_checkpoints(tables: Tables) -> pd.DataFrame:
    """Checkpoint policies over the fewest and the most blocks."""
    rows = nested(tables)
    rows = rows[rows["blocks"].isin([rows["blocks"].min(), rows["blocks"].max()])]
    return table(
        _headed(
            rows, "blocks", "checkpoint_policy", "expected_saved_gib", "beyond_gib", "block_runs", "gpu_ms"
        ),
        note=_measured(tables, rows),
    )


def _measured(tables: Tables, rows: pd.DataFrame) -> str:
    """What these rows of checkpoints are of, and how many steps."""
    first = rows.iloc[0]
    precision = "TF32" if first["precision"] == "tf32" else first["precision"]
    what = f"{first['size']}, batch {first['batch_size']}, {precision}, {first['attention']} attention"
    if set(rows["mode"]) == {"forward_backward"}:
        what += ", forward and backward"
    if rows["context_length"].nunique() == 1:
        what += f", context {first['context_length']:,}"
    steps = rows["steps"]
    what += f"; steps timed: {counted(steps)}, captured: 2" * bool(steps.notna().any())
    few = ", too few to leave out one that was disturbed" if steps.min() < FEW else ""
    return f"{what}{few}."
