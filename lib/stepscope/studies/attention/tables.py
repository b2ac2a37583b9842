"""The attention study's tables: what is in a run's files, what follows from it, and what is printed."""

from collections.abc import Callable, Mapping
from contextlib import suppress

import pandas as pd
import pandera.pandas as pa

from stepscope.report.schemas import STATUSES, Tables, measured, tidy, word
from stepscope.report.shapes import PRECISION_NAMES, preferred, select
from stepscope.report.tables import number, quartiles, table, wall_cell
from stepscope.stats import MOST_BUSY
from stepscope.studies.attention.config import IMPLEMENTATIONS, PASSES, QUANTITIES, Config
from stepscope.studies.attention.memory import peak_parts

CONFIG = ("d_model", "precision", "batch_size")
CASE = ("implementation", "sequence")
KEY = {
    "implementation": word(*IMPLEMENTATIONS),
    "sequence": pa.Column(int, pa.Check.in_range(1, 2**24), coerce=True),
}
MEASURES = (
    "wall_ms",
    "wall_std_ms",
    "wall_q1_ms",
    "wall_q3_ms",
    "wall_min_ms",
    "sm_clock_mhz",
    "passes",
    "gpu_ms",
    "operations",
    "saved_mib",
    "in_use_mib",
    "peak_mib",
    "asked_gib",
    "allocated_gib",
    "device_gib",
)
READS = ("nsys.operations",)  # of other studies
SCHEMAS = {
    "cases": tidy(
        (*CASE, "phase"),
        **KEY,
        phase=word(*PASSES),
        status=word(*STATUSES),
        reason=word(),
        kernel=word(),
        unsteady=word(),
        **{name: measured() for name in MEASURES},
    ),
    "checks": tidy(
        CASE,
        **KEY,
        **{f"{quantity}_error": measured() for quantity in QUANTITIES},
        allowed_error=measured(nullable=False),
    ),
}
LABELS = {
    "naive": "naive",
    "compiled": "compiled",
    "flash": "flash",
    "efficient": "memory-efficient",
    "cudnn": "cuDNN",
    "math": "math",
    "flex": "FlexAttention",
}
HEAD = 64  # what sentences and tables are about, where it was measured
USUAL = {"d_model": preferred(HEAD), "precision": preferred("bf16")}
GRID_ENDS = max(Config.model_fields["sequences"].default)  # the longest of the handout's sequences


def tables(frames: Tables) -> Tables:
    """``passes``: forward and backward together, a row for each implementation and sequence: ``wall_ms``,
    ``gpu_ms`` (missing where a GPU's exceeds wall time by more than :data:`MOST_BUSY` allows), memory, and
    ``predicted_mib``, the peak by formula."""
    cases = frames["cases"]
    key = [*CONFIG, *CASE]
    cannot_be = cases["device_gib"].notna() & (cases["gpu_ms"] > MOST_BUSY * cases["wall_ms"])
    odd = cases.get("unsteady", pd.Series("", cases.index)) != ""
    clocks = cases.assign(gpu_ms=cases["gpu_ms"].mask(cannot_be | odd), wall_ms=cases["wall_ms"].mask(odd))
    times = clocks.groupby(key, sort=False)[["wall_ms", "gpu_ms"]].sum(min_count=len(PASSES))
    others = cases[cases["phase"] == "backward"].set_index(key)
    passes = times.join(others[["status", "reason", "saved_mib", "in_use_mib", "peak_mib", "device_gib"]])
    passes = passes.reset_index()
    shapes = passes[["implementation", "batch_size", "d_model", "sequence", "precision"]]
    predicted = [sum(peak_parts(*shape).values()) / 2**20 for shape in shapes.itertuples(index=False)]
    return {"passes": passes.assign(predicted_mib=predicted)}


def of_run(config: Config, frames: Tables) -> Tables:
    """One run's tables as those of all runs are, for its notebook."""
    fields = {field: getattr(config, field) for field in CONFIG}
    own = {name: frame.assign(**fields) for name, frame in frames.items()}
    return {f"attention.{name}": frame for name, frame in (own | tables(own)).items()}


def within_grid(sequences: pd.Series) -> pd.Series:
    """Which are sequences of the handout's grid."""
    return sequences <= GRID_ENDS


def setting(rows: pd.DataFrame) -> str:
    """What was measured in these rows, in words."""
    batch, d, precision = rows[["batch_size", "d_model", "precision"]].iloc[0]
    return f"batch {batch}, d {d}, {PRECISION_NAMES[precision]}, causal"


def attention_times(tables: Tables) -> pd.DataFrame:
    return _pivot(tables, "gpu_ms", "ms", "GPU time of forward and backward, ms", ("min", "row"))


def attention_memory(tables: Tables) -> pd.DataFrame:
    return _pivot(tables, "saved_mib", "MiB", "Saved for backward besides q, k, v and the output, MiB")


def _pivot(tables: Tables, value: str, unit: str, words: str, bold: tuple | None = None) -> pd.DataFrame:
    """A row a sequence, a column an implementation, at the d and precision that are spoken of."""
    rows = select(tables["attention.passes"], USUAL, **{value: pd.Series.notna})
    pivot = rows.pivot(index="sequence", columns="implementation", values=value)
    pivot = pivot[[name for name in IMPLEMENTATIONS if name in pivot]].rename(columns=LABELS)
    return table(pivot.rename_axis(columns=None), unit, bold, note=f"{words} ({setting(rows)}).")


def handout_attention(tables: Tables) -> pd.DataFrame:
    """The assignment's table at one d: naive attention and the same compiled, in fp32, by wall time."""
    fp32 = USUAL | {"precision": preferred("fp32")}
    cases = _handout(select(tables["attention.cases"], fp32))
    made, note = _points(cases), f"{setting(cases)}; {_passes(cases)}"
    return table(made.drop(columns=["precision", "d"]), note=f"Wall time ({note}).")


def attention_grid(tables: Tables) -> pd.DataFrame:
    """All of the assignment's points, by wall time: naive attention and compiled, each d and precision."""
    cases = _handout(tables["attention.cases"])
    batch = cases["batch_size"].iloc[0]
    return table(_points(cases), rows=60, note=f"Wall time (batch {batch}, causal; {_passes(cases)}).")


def _handout(cases: pd.DataFrame) -> pd.DataFrame:
    """Cases of the handout's implementations and sequences that were timed."""
    return select(cases, implementation=["naive", "compiled"], sequence=within_grid, wall_ms=pd.Series.notna)


def _passes(cases: pd.DataFrame) -> str:
    most, least = int(cases["passes"].max()), int(cases["passes"].min())
    fewer = f", of fewer where they are long, {least} at least" if least < most else ""
    return f"median (quartiles) of {most} passes{fewer}"


def _points(cases: pd.DataFrame) -> pd.DataFrame:
    """A row each precision, d and sequence: time and memory of forward and backward."""
    order = [name for name in PRECISION_NAMES if name in set(cases["precision"])]
    cases = cases.assign(precision=pd.Categorical(cases["precision"], order, ordered=True))
    busy = cases["gpu_ms"] / cases["wall_ms"]
    cases = cases.assign(text=[wall_cell(row) for row in cases.assign(busy=busy).to_dict("records")])
    pivoted = cases.pivot(
        index=["precision", "d_model", "sequence"],
        columns=["implementation", "phase"],
        values=["text", "in_use_mib", "passes"],
    ).sort_index()
    found = {}
    for name in ("naive", "compiled"):
        found |= {f"{name} {phase}, ms": pivoted.get(("text", name, phase)) for phase in PASSES}
        found[f"{name}, in use before backward, MiB"] = pivoted.get(("in_use_mib", name, "backward"))
    made = pd.DataFrame({name: column for name, column in found.items() if column is not None})
    memory = [name for name in made if name.endswith("MiB")]
    made = made.astype(dict.fromkeys(memory, float)).reset_index().rename(columns={"d_model": "d"})
    return made.assign(precision=made["precision"].astype(str).map(PRECISION_NAMES))


def attention_long(tables: Tables) -> pd.DataFrame:
    """2026: beyond the handout's sequences, forward and backward apart, by wall time, and what ran out."""
    cases = select(
        tables["attention.cases"],
        sequence=lambda sequence: ~within_grid(sequence),
        status=lambda status: status != "unsupported",
    )
    key = ["precision", "d_model", "sequence", "implementation"]
    forward, backward = (cases[cases["phase"] == phase].set_index(key) for phase in PASSES)
    passes = tables["attention.passes"].set_index(key)
    made = pd.DataFrame(
        {
            "forward, ms": forward["wall_ms"],
            "quartiles of forward, ms": quartiles(forward),
            "backward, ms": backward["wall_ms"],
            "quartiles of backward, ms": quartiles(backward),
            "GPU time of both, ms": passes["gpu_ms"].reindex(forward.index),
            "in use before backward, MiB": backward["in_use_mib"],
            "passes, n": backward["passes"],
            "ran out": [outcome(tables, row) for row in backward.reset_index().to_dict("records")],
        }
    )
    made = made.reset_index().rename(columns={"d_model": "d"})
    made["implementation"], made["precision"] = (
        made["implementation"].map(LABELS),
        made["precision"].map(PRECISION_NAMES),
    )
    batch = cases["batch_size"].iloc[0]
    return table(made, rows=40, note=f"Wall time, median and quartiles (batch {batch}, causal).")


def outcome(tables: Tables, row: Mapping) -> str:
    """Where a case ran out of memory, in which phase and of what; empty where it ran.

    The check that every case passes first runs forward and backward and has one status for both. Forward
    alone needs what it needed at the longest sequence that ran, times the square of the sequences' ratio.
    """
    if row["status"] != "oom":
        return ""
    cases, reason = tables["attention.cases"], str(row["reason"]).removesuffix(": not compiled")
    same = {name: row[name] for name in ("implementation", "precision", "d_model", "batch_size")}
    fits = False
    with suppress(LookupError):  # none ran
        longest = select(cases, same, phase="forward", peak_mib=pd.Series.notna, sequence=max).iloc[0]
        need = longest["peak_mib"] / 1024 * (row["sequence"] / longest["sequence"]) ** 2
        fits = need <= row["device_gib"]
    if reason != row["reason"]:
        return f"not run: {reason}{', though forward alone would fit' if fits else ''}"
    return f"in {'backward' if fits else 'forward'}: {reason}"


def attention_compiled(tables: Tables) -> pd.DataFrame:
    """What compiling naive attention gains, by GPU time of forward and backward."""
    passes = select(tables["attention.passes"], gpu_ms=pd.Series.notna, sequence=within_grid)
    key = ["precision", "d_model", "sequence"]
    times = passes.pivot(index=key, columns="implementation", values="gpu_ms")
    times = select(times[["naive", "compiled"]].dropna())
    gains = times.iloc[:, 0] / times.iloc[:, 1]
    gains = gains.unstack(["precision", "d_model"]).sort_index(axis=1)
    gains.columns = [f"{PRECISION_NAMES[precision]}, d {d}, x" for precision, d in gains.columns]
    return table(gains, note="Compiled against naive attention, GPU time of forward and backward.")


def attention_precisions(tables: Tables) -> pd.DataFrame:
    """GPU time at the longest sequence of the grid, by precision."""
    rows = select(tables["attention.passes"], d_model=preferred(HEAD), sequence=within_grid)
    rows = select(rows, sequence=max, gpu_ms=pd.Series.notna)
    times = rows.pivot(index="implementation", columns="precision", values="gpu_ms")
    times = times.reindex([name for name in IMPLEMENTATIONS if name in times.index]).rename(index=LABELS)
    times = times[[name for name in PRECISION_NAMES if name in times]].rename(columns=PRECISION_NAMES)
    at = f"sequence {rows['sequence'].iloc[0]:,}, d {rows['d_model'].iloc[0]}"
    return table(
        times.rename_axis(columns=None),
        "ms",
        ("min", "column"),
        note=f"GPU time of forward and backward, ms, {at}. –: it does not run so, was not measured,"
        " or its steps differed.",
    )


def attention_account(tables: Tables) -> pd.DataFrame:
    """The bytes of the shortest sequence that ran out of memory: by formula, and as recorded."""
    row, parts = first_out_of_memory(tables)
    parts = parts | {
        "together, by formula": sum(parts.values()),
        "recorded when it ran out: allocated": row["allocated_gib"],
        "recorded when it ran out: asked for": row["asked_gib"],
    }
    frame = pd.DataFrame({"part": parts.keys(), "GiB": parts.values()})
    return table(
        frame,
        note=f"Naive attention, {PRECISION_NAMES[row['precision']]}, batch"
        f" {row['batch_size']}, d {row['d_model']}, {row['sequence']:,} positions, on"
        f" {number(gpu_memory_gib(tables), 'GiB')}.",
    )


def gpu_memory_gib(tables: Tables) -> float:
    """The GPU's memory as the machine has it; of a notebook's own run what its cases were given."""
    if "runs" in tables:
        return tables["runs"]["machine_gpu_memory_gib"].max()
    return tables["attention.cases"]["device_gib"].max()


def first_out_of_memory(tables: Tables) -> tuple[pd.Series, dict[str, float]]:
    """The shortest sequence, of those measured, at which naive attention runs out of memory, of several
    precisions the one that needs most; and the parts of its peak by formula, in GiB.

    Raises:
        LookupError: it never does.
    """
    rows, cases = tables["attention.passes"], tables["attention.cases"]
    rows = select(rows, status="oom", implementation="naive")
    asked = select(cases, phase="backward")[[*CONFIG, *CASE, "asked_gib", "allocated_gib"]]
    rows = rows.merge(asked, on=[*CONFIG, *CASE])
    row = rows.sort_values(["sequence", "predicted_mib"], ascending=[True, False]).iloc[0]
    parts = peak_parts(*row[["implementation", "batch_size", "d_model", "sequence", "precision"]])
    return row, {part: size / 2**30 for part, size in parts.items()}


def attention_checks(tables: Tables) -> pd.DataFrame:
    """The largest relative error of an output or a gradient against float64."""
    checks = select(tables["attention.checks"])
    worst = checks.assign(error=checks[[f"{quantity}_error" for quantity in QUANTITIES]].max(axis=1))
    pivoted = worst.pivot_table(index="implementation", columns="precision", values="error", aggfunc="max")
    pivoted = pivoted[[name for name in PRECISION_NAMES if name in pivoted]]
    pivoted.loc["allowed"] = checks.groupby("precision")["allowed_error"].first()
    pivoted = pivoted.reindex([name for name in (*IMPLEMENTATIONS, "allowed") if name in pivoted.index])
    printed = pivoted.map(lambda value: None if pd.isna(value) else f"{value:.1e}")
    return table(
        printed.rename(index=LABELS, columns=PRECISION_NAMES).rename_axis(columns=None),
        note=f"Largest of {len(checks):,} cells, each checked before it was timed.",
    )


PRINTED: dict[str, Callable[[Tables], pd.DataFrame]] = {
    one.__name__: one
    for one in (
        attention_times,
        attention_memory,
        handout_attention,
        attention_grid,
        attention_long,
        attention_compiled,
        attention_precisions,
        attention_account,
        attention_checks,
    )
}
