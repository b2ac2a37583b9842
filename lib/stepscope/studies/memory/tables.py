"""The memory study's tables, and those that chapters print."""

from contextlib import suppress
from itertools import product

import pandas as pd
import pandera.pandas as pa

from stepscope.config import EDITIONS, PHASES, SIZES, StepConfig, configure
from stepscope.model.accounting import GIB, KINDS, peak
from stepscope.model.fit import FAST, STEPS, WRITTEN
from stepscope.report.schemas import STATUSES, WITHIN, Tables, measured, tidy, word
from stepscope.report.shapes import (
    MODES,
    PLAIN,
    REFERENCE,
    SHAPE,
    largest,
    reference,
    select,
)
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
READS = ("ladder.steps",)  # of other studies
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
    config = configure("benchmark", size=size, context_length=REFERENCE, device="cpu").step(mode="step")
    return config.model_copy(update=WRITTEN | fields)


def of_run(config: Config, frames: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """One run's tables as the report has them, for its notebook's pictures."""
    fields = {name: getattr(config, name) for name in CONFIG}
    return {f"memory.{name}": frame.assign(**fields) for name, frame in frames.items()}


def usual(frame: pd.DataFrame, **fields: object) -> pd.DataFrame:
    """The rows that sentences speak of: the largest size's plain fp32 step (but for ``fields``) at the
    context at which sizes are compared.

    Raises:
        LookupError: there are none.
    """
    return select(frame, PLAIN, **{"precision": "fp32"} | fields, size=largest, context_length=reference)


def begins_backward(whole: pd.Series) -> bool:
    """Whether a step peaks where its backward begins: in the loss's or the last block's."""
    known = SIZES.get(whole["size"])
    last = known is None or whole["layer"] == known.num_layers - 1
    return whole["peak_in"] == "backward" and (bool(pd.isna(whole["layer"])) or last)


def one_level(tables: Tables) -> pd.DataFrame:
    """Forward and backward under one level of checkpoints: the settings of each context by blocks a
    checkpoint, none at the end.

    Raises:
        LookupError: it was not measured.
    """
    rows = select(
        tables["memory.checkpoints"], mode="forward_backward", blocks_per_checkpoint=pd.Series.notna
    )
    settings = rows.groupby("size")["checkpoint_policy"].transform("nunique")  # 10B has two
    rows = select(rows[settings == settings.max()], size=largest)
    return select(rows.sort_values("blocks_per_checkpoint", key=lambda numbers: numbers.replace(0, 1e9)))


def nested(tables: Tables) -> pd.DataFrame:
    """Nested checkpoints, with what each takes beyond weights and gradients.

    Raises:
        LookupError: none was measured.
    """
    rows = select(
        tables["memory.checkpoints"], mode="forward_backward", status="ok", expected_saved_gib=pd.Series.notna
    )
    return rows.assign(beyond_gib=rows["peak_gib"] - rows["state_gib"])


# -- what chapters print -------------------------------------------------------------------------------------

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


def handout_peaks(tables: Tables) -> pd.DataFrame:
    """(b), (c): peak by context, mode and precision; what ran out of memory is empty."""
    rows = select(tables["memory.peaks"], PLAIN, phase="whole", size=largest)
    pivoted = rows.pivot(index="context_length", columns=["mode", "precision"], values="peak_gib")
    pivoted = pivoted[[key for key in product(MODES, ("fp32", "bf16")) if key in pivoted]]
    pivoted.columns = [f"{MODES[mode]}, {precision}" for mode, precision in pivoted.columns]
    out = " –: out of memory." if (rows["status"] == "oom").any() else ""
    return table(
        pivoted.rename_axis("context"),
        unit="GiB",
        note=(
            f"Peak of allocated memory in GiB, {rows['size'].iloc[0]}, batch {rows['batch_size'].iloc[0]}.{out}"
        ),
    )


def peak_by_kind(tables: Tables) -> pd.DataFrame:
    """What is held at the peak of each phase of a full step, and of forward alone."""
    rows = usual(tables["memory.peaks"], status="ok", phase=["forward", "backward", "optimizer"])
    names = [f"{row.phase} alone" if row.mode == "forward" else row.phase for row in rows.itertuples()]
    pivoted = rows[[*map(column, KINDS), "peak_gib"]].set_axis([*KINDS, "all"], axis=1).set_axis(names).T
    return table(pivoted[pivoted.gt(0.005).any(axis=1)].rename_axis("held at the peak, GiB"), unit="GiB")


def stage_peaks(tables: Tables) -> pd.DataFrame:
    """(a): the peak of each stage of the full step by context and precision, and what the whole reserves."""
    rows = select(tables["memory.peaks"], PLAIN, mode="step", status="ok", size=largest)
    stages = rows.pivot(index=["context_length", "precision"], columns="phase", values="peak_gib")
    whole = select(rows, phase="whole").set_index(["context_length", "precision"])
    made = stages[[name for name in ("forward", "loss", "backward", "optimizer") if name in stages]]
    made = (
        made.rename(columns=lambda name: f"{name}, GiB")
        .assign(
            **{
                "peak in": whole["peak_in"],
                "rounding, GiB": whole["rounding_gib"],
                "reserved, GiB": whole["reserved_gib"],
            }
        )
        .sort_index(level=[1, 0], ascending=[False, True])
    )
    return table(
        made.reset_index().rename(columns={"context_length": "context"}),
        note=(
            f"Peaks of the full step's stages, {rows['size'].iloc[0]}, batch {rows['batch_size'].iloc[0]}."
        ),
    )


def largest_allocations(tables: Tables) -> pd.DataFrame:
    """(e): the largest allocations of a forward pass, with the line that makes them."""
    rows = usual(tables["memory.allocations"], what="allocated in forward").sort_values("rank").head(6)
    rows = rows.assign(together_gib=rows["mib"] * rows["count"] / 1024).rename(columns={"count": "how often"})
    return table(_headed(rows, "mib", "how often", "together_gib", "region", "line", "source"))


def saved_by_block(tables: Tables) -> pd.DataFrame:
    """2026 (f): the five largest groups of tensors that a block saves."""
    rows = usual(tables["memory.allocations"], what="saved by a block")
    sums = rows["mib"] * rows["count"]
    rows = rows.assign(share=sums / sums.sum()).nlargest(5, "share").rename(columns={"count": "tensors"})
    return table(_headed(rows, "region", "source", "tensors", "mib", "share"))


def less_memory(tables: Tables) -> pd.DataFrame | None:
    """What lowers the peak: each optimization beside the step without it."""
    low, fused = {"precision": "bf16"}, {"attention": "sdpa", "optimizer": "fused"}
    optimizations: list[tuple[str, str, str, dict, dict]] = [
        ("bf16 autocast", "full step, fp32", "peak_gib", {}, low),
        ("fused attention and AdamW", "full step, fp32", "peak_gib", {}, fused),
        ("fused attention and AdamW", "full step, bf16", "peak_gib", low, low | fused),
        (
            "expandable segments",
            "reserved, full step, bf16",
            "reserved_gib",
            low,
            low | {"expandable_segments": True},
        ),
    ]
    rows = []
    for optimization, of, name, without, with_it in optimizations:
        with suppress(LookupError):
            before, after = (
                usual(tables["memory.peaks"], mode="step", phase="whole", **fields).iloc[0]
                for fields in (without, with_it)
            )
            rows.append(
                (optimization, before["size"], of, before["context_length"], before[name], after[name])
            )
    with suppress(LookupError):
        steps = select(tables["ladder.steps"], SHAPE, status="ok", size=largest, context_length=reference)
        peaks = steps.set_index("optimization")["peak_gib"]
        size, context = steps[["size", "context_length"]].iloc[0]
        if not any(row[0].startswith("fused") for row in rows):
            rows.append(
                ("fused attention and AdamW", size, "full step, bf16", context, *peaks[["bf16", "fused"]])
            )
        rows.append(
            (
                "compiled blocks",
                size,
                "full step, bf16, fused attention and AdamW",
                context,
                *peaks[["fused", "blocks"]],
            )
        )
        rows.append(
            (
                "bf16 moments",
                size,
                "the same as a CUDA graph, with bf16 weights",
                context,
                *peaks[["bf16_weights", "bf16_moments"]],
            )
        )
    with suppress(LookupError):
        settings = one_level(tables)
        context = settings["context_length"].min()
        peaks = select(settings, context_length=context).set_index("checkpoint_policy")["peak_gib"]
        rows.append(
            (
                "a checkpoint around each block",
                settings["size"].iloc[0],
                "forward and backward, bf16",
                context,
                peaks["none"],
                peaks["every 1"],
            )
        )
    found = pd.DataFrame(rows, columns=["change", "size", "of", "context", "before_gib", "after_gib"])
    found["less"] = 1 - found["after_gib"] / found["before_gib"]
    return table(_headed(found, *found)) if rows else None


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


def reach_10b(tables: Tables) -> pd.DataFrame:
    """How far the largest model runs on one GPU."""
    rows = select(tables["memory.checkpoints"], size="10B")
    note = _measured(tables, rows)
    rows = rows.assign(mode=rows["mode"].map(MODES), checkpoints=rows["checkpoint_policy"])
    rows = rows.sort_values("context_length", kind="stable")
    return table(
        _headed(
            rows,
            "mode",
            "checkpoints",
            "context_length",
            "status",
            "peak_gib",
            "predicted_gib",
            "reserved_gib",
            "gpu_ms",
        ),
        note=note,
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


def formula_peaks(tables: Tables) -> pd.DataFrame:
    """Predicted, measured and reserved peaks of the modes that were recorded, the worst predicted first."""
    rows = select(tables["memory.peaks"], phase="whole", status="ok")
    beyond = (rows["requested_gib"] - rows["predicted_requested_gib"]) * GIB
    rows = rows.assign(beyond=beyond.round().astype(int), mode=rows["mode"].map(MODES))
    rows = rows.sort_values(["beyond", "peak_gib"], key=abs, ascending=False)
    return table(
        _headed(
            rows,
            "size",
            "context_length",
            "mode",
            "precision",
            "attention",
            "expandable_segments",
            "peak_gib",
            "predicted_gib",
            "beyond",
            "reserved_gib",
        ),
        rows=40,
        note=(
            "Predicted: what is requested by formula, and what rounding adds to tensors made one"
            " after another in fresh memory, which is more than where memory is used again."
        ),
    )


def predicted_kinds(tables: Tables) -> pd.DataFrame:
    """By formula what the handout's largest size holds at its step's peak, by kind: as the assignment writes
    it, with what makes it faster, and with that a checkpoint around each block."""
    plain, *fast = STEPS
    tops = {
        plain: peak(predicted()),
        fast[0]: peak(predicted(**FAST)),
        fast[1]: peak(predicted(**FAST), blocks_per_checkpoint=1),
    }
    rows = pd.DataFrame(
        {name: {kind: size / GIB for kind, size in top.kinds.items()} for name, top in tops.items()}
    )
    rows = rows[rows.gt(0.005).any(axis=1)]
    rows.loc["all"] = rows.sum()
    return table(rows.rename_axis("held at the peak, GiB"), unit="GiB", note=_of_predicted(predicted()))


def predicted_sizes(tables: Tables) -> pd.DataFrame:
    """By formula the peaks of the handout's sizes: as the assignment writes the step, and with what needs
    less."""
    rows = {
        size: {name: bytes_of(predicted(size, **fields)) / GIB for name, (fields, bytes_of) in STEPS.items()}
        for size in EDITIONS[2025]
    }
    found = pd.DataFrame.from_dict(rows, orient="index").rename_axis("peak, GiB")
    return table(found, unit="GiB", note=_of_predicted(predicted()))


def _of_predicted(config: StepConfig) -> str:
    return (
        f"Predicted, context {config.context_length:,}, batch {config.batch_size:,}, vocabulary"
        f" {config.vocab_size:,}; the allocator reserves some more."
    )


PRINTED = {
    one.__name__: one
    for one in (
        handout_peaks,
        stage_peaks,
        peak_by_kind,
        largest_allocations,
        less_memory,
        checkpoint_settings,
        nested_checkpoints,
        saved_by_block,
        reach_10b,
        formula_peaks,
        predicted_kinds,
        predicted_sizes,
    )
}
