"""The nsys study: the captures of one size and context, as tables in which everything adds up."""
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd

from stepscope.config import PHASES
from stepscope.studies.nsys.config import Config
from stepscope.traces.conservation import check_conservation, phase_clocks
from stepscope.traces.export import (
    OUTSIDE,
    UNATTRIBUTED,
    ConservationError,
    activity_totals,
    load_trace,
    scrub,
)
from stepscope.traces.families import OTHER
from stepscope.traces.kernel_names import short_names
from stepscope.traces.nsys_program import (
    REPORTS,
    Capture,
    capture,
    find_nsys,
    make_reports,
    missing_libraries,
    nsys_version,
)
from stepscope.traces.nsys_reports import load_reports
from stepscope.traces.torch_profiler import convert

# What no region's range was open for. In backward, the engine itself sums the gradients of a tensor that was
# used twice.
UNNAMED = {"backward": "gradient accumulation", "optimizer": "optimizer", OUTSIDE: OUTSIDE}


def profiler_here(device: str) -> tuple[str, Path | None]:
    """What profiles on this machine, in words, and the nsys that does (None: torch.profiler)."""
    if device == "cpu":
        return "torch.profiler, CPU operators", None
    nsys = find_nsys()
    if nsys is None or missing_libraries(nsys):
        return "torch.profiler (CUPTI)", None
    return f"nsys {nsys_version(nsys)}", nsys


def analyse(export: Path) -> dict[str, pd.DataFrame]:
    """One capture's tables, after checking that phases, regions and steps each hold every operation once.

    Returns, all times in ns and summed over the captured steps:
        operations: a row for each phase, region, family and name; count, total_ns.
        clocks: a row for each step and phase (see ``trace.phase_clocks``).
        regions: host_ns and ranges for each phase and region.
        timeline: the first captured step, a row an operation; start_ns counts from the step's start.

    Raises:
        TraceError, ConservationError: the capture cannot be read, or does not add up.
    """
    operations, ranges = load_trace(export)
    check_conservation(operations, activity_totals(export))
    clocks = phase_clocks(operations, ranges, ("step", "phase"))
    region = operations["region"].astype(str)
    for phase, name in UNNAMED.items():
        region = region.where((operations["phase"] != phase) | (region != UNATTRIBUTED), name)
    operations = operations.assign(region=region, phase=operations["phase"].astype(str),
                                   family=operations["family"].astype(str),
                                   name=operations["name"].astype(str))
    summed = operations.groupby(["phase", "region", "family",
                                 "name"])["duration_ns"].agg(count="size", total_ns="sum").reset_index()
    if summed["total_ns"].sum() != operations["duration_ns"].sum():
        raise ConservationError(
            f"{export.name}: the table of operations lost"
            f" {operations['duration_ns'].sum() - summed['total_ns'].sum()} ns"
        )
    return {"operations": summed, "clocks": clocks.assign(phase=clocks["phase"].astype(str)),
            "regions": _host_times(ranges), "timeline": _timeline(operations, ranges)}


def _host_times(ranges: pd.DataFrame) -> pd.DataFrame:
    """Host time of each region's ranges, by the phase that was open in the process when they began."""
    phases = ranges[ranges["role"] == "phase"].sort_values("start_ns")
    regions = ranges[ranges["role"] == "region"].sort_values("start_ns")
    joined = pd.merge_asof(regions[["start_ns", "end_ns", "name"]], phases[["start_ns", "end_ns", "name"]],
                           on="start_ns",
                           suffixes=("", "_phase"))
    joined = joined.assign(
        phase=joined["name_phase"].astype(str).where(joined["start_ns"] < joined["end_ns_phase"], OUTSIDE),
        region=joined["name"].astype(str),
        host_ns=joined["end_ns"] - joined["start_ns"],
    )
    return joined.groupby(["phase", "region"])["host_ns"].agg(ranges="size", host_ns="sum").reset_index()


def _timeline(operations: pd.DataFrame, ranges: pd.DataFrame) -> pd.DataFrame:
    first = operations[operations["step"] == 0]
    begin = ranges.loc[(ranges["role"] == "step") & (ranges["step"] == 0), "start_ns"].min()
    launch = first["launch_start_ns"].astype("Int64") - begin
    return first.assign(start_ns=first["start_ns"] - begin, launch_ns=launch)[
        ["phase", "region", "family", "start_ns", "duration_ns", "launch_ns"]].reset_index(drop=True)


def profile_run(config: Config, kept: Path | None) -> tuple[dict[str, pd.DataFrame], list[Path], dict]:
    """Capture every mode of a configuration and make its tables.

    Args:
        kept: where nsys's own reports (CSV) are kept; None keeps none.

    Returns:
        tables: operations, clocks, regions, timeline, walls, statuses, each with a column ``mode``.
        files: nsys's reports, and with ``keep_export`` the scrubbed exports. A report that cannot be used is
            left out, and ``statuses`` says why.
        results: tool, and the number of profiles by status.

    Raises:
        NsysError, TraceError, ConservationError: as the functions that this calls.
    """
    tool, nsys = profiler_here(config.device)
    with tempfile.TemporaryDirectory(prefix="stepscope-nsys-") as temporary:
        captures = capture([config.step(mode=mode) for mode in PHASES], Path(temporary), nsys)
        with ThreadPoolExecutor() as pool:  # nsys stats is a process of its own for each capture
            exports = list(pool.map(lambda item: _export(item, nsys), captures))
        tables: dict[str, list[pd.DataFrame]] = {}
        files: list[Path] = []
        for item, export in zip(captures, exports):
            outcome = item.outcome
            made = {"statuses": pd.DataFrame([{"status": outcome["status"], "cause": outcome.get("cause")}])}
            if export:
                walls = [(which, i, ms) for which in ("before", "within") for i,
                         ms in enumerate(outcome[f"{which}_ms"])]
                made |= analyse(export) | {"walls": pd.DataFrame(walls,
                                                                 columns=["capture", "step", "wall_ms"])}
                reports, errors = load_reports(export.parent, export.stem, REPORTS) if nsys else ({}, [])
                _same_total(made["operations"], reports, export.name)
                made["statuses"]["left_out"] = "; ".join(map(str, errors)).replace(f"{export.parent}/",
                                                                                   "") or None
                files += _keep(export, kept, reports, config.keep_export) if kept else []
            for name, table in made.items():
                tables.setdefault(name, []).append(table.assign(mode=item.config.mode))
    statuses = [item.outcome["status"] for item in captures]
    results = {"tool": tool} | {f"{status}_profiles": statuses.count(status)
                                for status in ("captured", "oom", "crashed")}
    return {name: pd.concat(parts, ignore_index=True) for name, parts in tables.items()}, files, results


def _export(item: Capture, nsys: Path | None) -> Path | None:
    """The event-level export of a capture, ``<mode>.sqlite``; under nsys its reports beside it."""
    if item.file is None:
        return None
    mode, folder = item.config.mode, item.file.parent
    export = folder / f"{mode}.sqlite"
    if nsys:
        return make_reports(nsys, item.file, folder, mode).rename(export)
    convert(item.file, export)
    return export


def _same_total(operations: pd.DataFrame, reports: dict[str, pd.DataFrame], name: str) -> None:
    """Our totals against nsys's own, as far as its reports could be used: kernels, and copies and fills."""
    is_memory = operations["family"] == "memory"
    for report, rows in (("cuda_gpu_kern_sum", operations[~is_memory]),
                        ("cuda_gpu_mem_time_sum", operations[is_memory])):
        if report in reports and (theirs := reports[report]["total_time_ns"].sum()) != rows["total_ns"].sum():
            raise ConservationError(
                f"{name}: operations sum to {rows['total_ns'].sum()} ns,"
                f" and nsys's own {report} to {theirs} ns"
            )


def _keep(export: Path, folder: Path, reports: Iterable[str], keep_export: bool) -> list[Path]:
    if reports or keep_export:
        folder.mkdir(exist_ok=True)
    files = []
    for report in reports:
        files.append(Path(shutil.copy(export.with_name(f"{export.stem}_{report}.csv"), folder)))
    if keep_export:
        scrub(export, folder / export.name)
        files.append(folder / export.name)
    return files


def three_clocks(clocks: pd.DataFrame) -> pd.DataFrame:
    """Medians over the captured steps, in ms, for each mode and phase: host, GPU-projected, sum of
    operations; busy share, gaps.
    """
    steps = clocks[clocks["phase"] != OUTSIDE]
    median = steps.groupby([*_run_columns(clocks), "mode", "phase"], sort=False)[
        ["host_ns", "projected_ns", "operations_ns", "busy_ns", "gap_ns", "gaps", "operations"]].median()
    table = median[["host_ns", "projected_ns", "operations_ns", "gap_ns"]] / 1e6
    table.columns = ["host_ms", "projected_ms", "operations_ms", "gap_ms"]
    return table.assign(busy_share=median["busy_ns"] / median["projected_ns"], gaps=median["gaps"],
                        operations=median["operations"]).reset_index()


def by_family(operations: pd.DataFrame) -> pd.DataFrame:
    """Share of operations' time by family, for each mode and phase, and (phase ``all``) for each mode."""
    run = _run_columns(operations)
    both = pd.concat([operations, operations.assign(phase="all")])
    time = both.groupby([*run, "mode", "phase", "family"])["total_ns"].sum()
    return (time / time.groupby([*run, "mode", "phase"]).transform("sum")).rename("share").reset_index()


def top_kernels(operations: pd.DataFrame, steps: int, mode: str, phase: str | None = None,
                count: int = 10) -> pd.DataFrame:
    """The operations with the most time in a mode (and phase): short name, family, ms and launches a step,
    share.
    """
    rows = operations[(operations["mode"] == mode) & ((operations["phase"] == phase) if phase else True)]
    summed = (
        rows.groupby(["name", "family"])[["count", "total_ns"]]
        .sum()
        .sort_values("total_ns", ascending=False)
        .reset_index()
    )
    shown = summed.head(count)
    return pd.DataFrame({"kernel": shown["name"].map(short_names(shown["name"])), "family": shown["family"],
                         "ms_per_step": shown["total_ns"] / steps / 1e6, "launches": shown["count"] / steps,
                         "share": shown["total_ns"] / summed["total_ns"].sum()})


def unknown_kernels(operations: pd.DataFrame) -> pd.DataFrame:
    """The names that no family's rule knows, with their share of all time; empty is best."""
    other = operations[operations["family"] == OTHER]
    return (
        (other.groupby("name")["total_ns"].sum() / operations["total_ns"].sum()).rename("share").reset_index()
    )


def _run_columns(table: pd.DataFrame) -> list[str]:
    return ["run_id"] if "run_id" in table else []


def reading(tables: dict[str, pd.DataFrame], steps: int) -> str:
    """What one run says, in a sentence or two of markdown."""
    captured = tables["statuses"].set_index("mode")["status"]
    text = "; ".join(f"{mode}: {status}" for mode, status in captured.items() if status != "captured")
    if "operations" not in tables or "forward" not in set(tables["operations"]["mode"]):
        return text or "Nothing was captured."
    top = top_kernels(tables["operations"], steps, "forward", "forward", 1).iloc[0]
    clocks = three_clocks(tables["clocks"]).set_index(["mode", "phase"]).loc[("forward", "forward")]
    return (
        f"Forward takes {clocks.operations_ms:.4g} ms of operations"
        f" in {clocks.projected_ms:.4g} ms on the device"
        f" ({clocks.busy_share:.0%} busy), enqueued in {clocks.host_ms:.4g} ms. Most of it is `{top.kernel}`:"
        f" {top.share:.0%}, {top.launches:g} times a pass. {text}"
    )
