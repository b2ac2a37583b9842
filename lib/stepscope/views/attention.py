"""Define the attention study's views: the time, memory and error of attention alone."""

import pandas as pd

from stepscope.config import PRECISION_NAMES
from stepscope.report.tables import quartiles, wall_cell
from stepscope.studies.attention.config import IMPLEMENTATIONS, PASSES, QUANTITIES
from stepscope.studies.attention.memory import SQUARES, peak_parts
from stepscope.studies.attention.tables import CONFIG, LABELS
from stepscope.views import Views, view

SETTING = [*CONFIG]
CASE = [*SETTING, "implementation", "context_length"]
ITEM_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
PART_ARGUMENTS = ("implementation", "batch_size", "d_model", "context_length", "precision")
PART_NAMES = {"rows": "one number per row"}


@view(
    key=[*CASE, "phase"],
    columns=[
        "name",
        "precision_name",
        "status",
        "wall_ms",
        "wall_text",
        "quartiles",
        "gpu_ms",
        "gpu_wall_ratio",
        "sm_clock_mhz",
        "passes",
        "saved_mib",
        "in_use_mib",
        "peak_gib",
        "allocated_gib",
        "requested_gib",
        "device_gib",
        "out_of_memory",
    ],
    studies=["attention"],
)
def attention_phases(data: Views) -> pd.DataFrame:
    """Return one row per case (implementation, context length and setting) and phase, forward or backward.

    ``wall_text`` gives the median wall time with its quartiles. ``gpu_wall_ratio`` is GPU time divided by wall
    time. If a case runs out of memory, ``allocated_gib`` is the memory that was already allocated,
    ``requested_gib`` is the size of the failed request, and ``out_of_memory`` describes the failure.
    ``device_gib`` is the GPU memory that was free before the run.
    """
    frame = _cases(data)
    texts = [
        wall_cell(row) for row in frame.assign(busy=frame["gpu_ms"] / frame["wall_ms"]).to_dict("records")
    ]
    return frame.assign(
        wall_text=texts,
        quartiles=quartiles(frame),
        gpu_wall_ratio=frame["gpu_ms"] / frame["wall_ms"],
        peak_gib=frame["peak_mib"] / 1024,
        out_of_memory=_outcomes(frame),
    )


def _cases(data: Views) -> pd.DataFrame:
    """Return the cases table, sorted by :func:`_ordered`, with readable names."""
    return _ordered(data.table("attention.cases"))


def _ordered(frame: pd.DataFrame) -> pd.DataFrame:
    """Sort rows by precision (fp32 first), head dimension, context length, implementation; add readable names."""
    ranks = {name: rank for rank, name in enumerate((*PRECISION_NAMES, *IMPLEMENTATIONS))}
    ranked = frame.sort_values(
        ["precision", "d_model", "context_length", "implementation"],
        kind="stable",
        key=lambda values: values.map(ranks) if values.name in ("precision", "implementation") else values,
    )
    return ranked.assign(
        name=ranked["implementation"].map(LABELS),
        precision_name=ranked["precision"].map(PRECISION_NAMES),
    )


def _outcomes(frame: pd.DataFrame) -> pd.Series:
    """Describe in which phase and why each case ran out of memory ("" for cases that didn't).

    Both phases of a case share one status, because a case is checked before it is timed. To find the phase that
    failed, we take the forward peak at the longest context length that ran, and scale it by the square
    of the ratio of context lengths. If the result fits into GPU memory, the case ran out of memory in backward.
    """
    alike = [*SETTING, "implementation"]
    ran = frame[(frame["phase"] == "forward") & frame["peak_mib"].notna()]
    longest = ran.sort_values("context_length").drop_duplicates(alike, keep="last")
    longest = longest[[*alike, "context_length", "peak_mib"]]
    needs = frame.merge(longest, on=alike, how="left", suffixes=("", "_ran"), validate="many_to_one")
    growth = (needs["context_length"] / needs["context_length_ran"]) ** 2
    forward_fits = needs["peak_mib_ran"] / 1024 * growth <= needs["device_gib"]
    texts = [
        _outcome(reason, fits) if status == "oom" else ""
        for status, reason, fits in zip(needs["status"], needs["reason"], forward_fits)
    ]
    return pd.Series(texts, frame.index)


def _outcome(reason: str, forward_fits: bool) -> str:
    cause, not_compiled, _ = reason.partition(": not compiled")
    if not_compiled:
        return f"not run: {cause}{', though forward alone would fit' if forward_fits else ''}"
    return f"in {'backward' if forward_fits else 'forward'}: {cause}"


@view(
    key=CASE,
    columns=[
        "name",
        "precision_name",
        "status",
        "wall_ms",
        "gpu_ms",
        "wall_speedup",
        "gpu_speedup",
        "lead_speedup",
        "rank",
        "forward_ms",
        "forward_quartiles",
        "forward_text",
        "backward_ms",
        "backward_quartiles",
        "backward_text",
        "passes",
        "saved_mib",
        "saved_gib",
        "in_use_mib",
        "in_use_gib",
        "peak_gib",
        "predicted_gib",
        "formula_error",
        "stores_squares",
        "square_gib",
        "row_mib",
        "device_gib",
        "out_of_memory",
    ],
    studies=["attention"],
)
def attention(data: Views) -> pd.DataFrame:
    """Return one row per case, with the results of forward and backward together and each phase's wall time.

    Speedups are relative to naive attention in the same setting. ``rank`` orders a setting's implementations by
    GPU time, where 1 is the fastest; ``lead_speedup`` is the speedup of the fastest implementation over the
    second fastest. ``saved_mib`` is the memory saved for backward, excluding q, k, v and the output;
    ``in_use_mib`` is all memory allocated when backward begins. ``formula_error`` is the relative difference
    between the peak and its prediction. ``square_gib`` is the size of one T x T matrix per sequence in the
    setting's precision, and ``row_mib`` is the size of one fp32 number per row.
    """
    frame = _cases(data).drop_duplicates(CASE)[[*CASE, "name", "precision_name", "status", "device_gib"]]
    for phase in PASSES:
        frame = frame.merge(_phase_columns(data, phase), on=CASE, how="left", validate="one_to_one")
    wall_ms = frame["forward_ms"] + frame["backward_ms"]
    gpu_ms = frame["forward_gpu_ms"] + frame["backward_gpu_ms"]
    frame = frame.assign(wall_ms=wall_ms, gpu_ms=gpu_ms)
    alike = [*SETTING, "context_length"]
    naive = frame.loc[frame["implementation"] == "naive", [*alike, "wall_ms", "gpu_ms"]]
    frame = frame.merge(naive, on=alike, how="left", suffixes=("", "_naive"), validate="many_to_one")
    by_setting = frame.groupby(alike)["gpu_ms"]
    rank = by_setting.rank(method="first")
    second_ms = by_setting.transform(_second_smallest)
    sequences = frame["batch_size"] * frame["context_length"]
    square_bytes = sequences * frame["context_length"] * frame["precision"].map(ITEM_BYTES)
    predicted_gib = data["attention_parts"].query("part == 'total'").set_index(CASE)["part_gib"]
    frame["predicted_gib"] = frame[CASE].merge(predicted_gib, left_on=CASE, right_index=True)["part_gib"]
    return frame.assign(
        rank=rank,
        wall_speedup=frame["wall_ms_naive"] / frame["wall_ms"],
        gpu_speedup=frame["gpu_ms_naive"] / frame["gpu_ms"],
        lead_speedup=(second_ms / frame["gpu_ms"]).where(rank == 1),
        saved_gib=frame["saved_mib"] / 1024,
        in_use_gib=frame["in_use_mib"] / 1024,
        formula_error=(frame["peak_gib"] / frame["predicted_gib"] - 1).abs(),
        stores_squares=frame["implementation"].isin([*SQUARES]),
        square_gib=square_bytes / 2**30,
        row_mib=4 * sequences / 2**20,
    )


def _second_smallest(values: pd.Series) -> float:
    return values.nsmallest(2).max() if values.count() > 1 else float("nan")


def _phase_columns(data: Views, phase: str) -> pd.DataFrame:
    """Return each case's times in one phase; for backward, also the number of passes, memory and outcome."""
    phases = data["attention_phases"]
    own = phases[phases["phase"] == phase]
    names = {
        "wall_ms": f"{phase}_ms",
        "gpu_ms": f"{phase}_gpu_ms",
        "quartiles": f"{phase}_quartiles",
        "wall_text": f"{phase}_text",
    }
    shared = ["passes", "saved_mib", "in_use_mib", "peak_gib", "out_of_memory"] if phase == "backward" else []
    return own[[*CASE, *names, *shared]].rename(columns=names)


@view(
    key=[*SETTING, "context_length"],
    columns=[
        "precision_name",
        "setting",
        "compiled_speedup",
        *(
            f"{name}_{what}"
            for name in ("naive", "compiled")
            for what in ("forward", "backward", "in_use_mib")
        ),
    ],
    studies=["attention"],
)
def compiled_attention(data: Views) -> pd.DataFrame:
    """Return one row per setting and context length, comparing uncompiled with compiled naive attention.

    ``setting`` names the precision and the head dimension. ``naive_forward`` and similar columns give wall times
    with quartiles; ``compiled_speedup`` compares the GPU times of forward and backward together.
    """
    frame = data["attention"]
    key = [*SETTING, "context_length"]
    columns = {
        "forward_text": "forward",
        "backward_text": "backward",
        "in_use_mib": "in_use_mib",
    }
    found = frame.loc[frame["implementation"] == "naive", [*key, "precision_name"]]
    for name in ("naive", "compiled"):
        own = frame.loc[frame["implementation"] == name, [*key, *columns, "gpu_speedup"]]
        own = own.rename(columns={old: f"{name}_{new}" for old, new in columns.items()})
        own = own.rename(columns={"gpu_speedup": f"{name}_speedup"})
        found = found.merge(own, on=key, validate="one_to_one")
    return found.assign(setting=found["precision_name"] + found["d_model"].map(", d {}".format))


@view(
    key=[*CASE, "part"],
    columns=["part_gib"],
    studies=["attention"],
)
def attention_parts(data: Views) -> pd.DataFrame:
    """Return one row per case and part of its predicted peak, in GiB.

    The part "total" is the peak itself.
    """
    rows = []
    for case in _cases(data).drop_duplicates(CASE)[CASE].to_dict("records"):
        arguments = [case[name] for name in PART_ARGUMENTS]
        parts = peak_parts(*arguments)
        parts["total"] = sum(parts.values())
        rows += [
            case | {"part": PART_NAMES.get(part, part), "part_gib": size / 2**30}
            for part, size in parts.items()
        ]
    return pd.DataFrame(rows)


@view(
    key=["precision", "implementation"],
    columns=["name", "precision_name", "worst_error", "worst", "allowed_error", "allowed", "cases"],
    studies=["attention"],
    over=["d_model", "batch_size"],
)
def attention_errors(data: Views) -> pd.DataFrame:
    """Return one row per precision and implementation, with the largest relative error compared with float64.

    The maximum is over outputs, gradients, head dimensions and context lengths. ``worst`` and ``allowed`` give
    the largest error and the error limit as text.
    """
    checks = data.table("attention.checks")
    checks["error"] = checks[[f"{quantity}_error" for quantity in QUANTITIES]].max(axis=1)
    groups = _ordered(checks).groupby(["precision", "implementation", "name", "precision_name"], sort=False)
    frame = groups.agg(
        worst_error=("error", "max"), allowed_error=("allowed_error", "min"), cases=("error", "size")
    ).reset_index()
    return frame.assign(
        worst=frame["worst_error"].map("{:.1e}".format),
        allowed=frame["allowed_error"].map("{:.1e}".format),
    )
