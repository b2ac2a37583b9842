"""The nsys study: the captures of one size and context, as tables in which everything adds up."""
import shutil
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd

from stepscope.config import PHASES
from stepscope.say.formats import code, ms, percent, plain
from stepscope.studies.nsys.config import Config
from stepscope.traces.attention_kernels import WRITTEN_OUT, sdpa_taken
from stepscope.traces.conservation import check_conservation, phase_clocks
from stepscope.traces.cut import cut
from stepscope.traces.export import (
    OUTSIDE,
    UNATTRIBUTED,
    ConservationError,
    activity_totals,
    load_trace,
    scrub,
)
from stepscope.traces.families import OTHER, shown_family
from stepscope.traces.kernel_names import short_names
from stepscope.traces.named_steps import UNMATCHED, carry_regions
from stepscope.traces.nsys_program import (
    REPORTS,
    Capture,
    capture,
    export_capture,
    make_reports,
    profiler_here,
    start_watched,
)
from stepscope.traces.nsys_reports import load_reports
from stepscope.traces.torch_profiler import convert
from stepscope.traces.turns import own_mark

WALLS = ["capture", "place", "step", "phase", "time_ms", "enqueue_ms", "sm_clock_mhz"]
# What no region's range was open for. In backward, the engine itself sums the gradients of a tensor that was
# used twice.
UNNAMED = {"backward": "gradient accumulation", "optimizer": "optimizer", OUTSIDE: OUTSIDE}


class Profiler:
    """A process that is going to be watched: it gets ready while its asker imports what the analysis needs.

    Args:
        device: where the captured steps will run.
    """

    def __init__(self, device: str):
        self.tool, self.nsys = profiler_here(device)
        self.temporary = tempfile.TemporaryDirectory(prefix="stepscope-nsys-")
        self.folder = Path(self.temporary.name)
        self.process = start_watched(self.folder / "process0", self.nsys)


def analyse(export: Path) -> dict[str, pd.DataFrame]:
    """One capture's tables, after checking that phases, regions and steps each hold every operation once.

    Where only one of the captured steps has its regions named, the others have them from it by place, and it
    is in none of the tables but ``regions``.

    Returns, all times in ns and summed over the captured steps:
        operations: a row for each phase, region, family and name; count, total_ns.
        clocks: a row for each step and phase (see ``trace.phase_clocks``).
        regions: host_ns and ranges for each phase and region, of so many ``steps``.
        timeline: the first captured step, a row an operation; start_ns counts from the step's start.

    Raises:
        TraceError, ConservationError: the capture cannot be read, or does not add up.
    """
    operations, ranges = load_trace(export)
    check_conservation(operations, activity_totals(export))
    operations, named = carry_regions(operations, ranges)
    host_times = _host_times(ranges)
    operations = operations[~operations["step"].isin(named)]
    clocks = phase_clocks(operations, ranges[~ranges["step"].isin(named)], ("step", "phase"))
    region = operations["region"]
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
    first = clocks.loc[clocks["step"] >= 0, "step"].min()
    clocks = clocks.assign(phase=clocks["phase"].astype(str),
                           step=clocks["step"].where(clocks["step"] < 0, clocks["step"] - first))
    return {"operations": summed, "clocks": clocks, "regions": host_times,
            "timeline": _timeline(operations, ranges, first)}


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
    table = joined.groupby(["phase", "region"])["host_ns"].agg(ranges="size", host_ns="sum").reset_index()
    named = ranges[(ranges["role"] == "region") & (ranges["step"] >= 0)]
    return table.assign(steps=named["step"].nunique())


def _timeline(operations: pd.DataFrame, ranges: pd.DataFrame, step: int) -> pd.DataFrame:
    first = operations[operations["step"] == step]
    begin = ranges.loc[(ranges["role"] == "step") & (ranges["step"] == step), "start_ns"].min()
    launch = first["launch_start_ns"].astype("Int64") - begin
    return first.assign(start_ns=first["start_ns"] - begin, launch_ns=launch)[
        ["phase", "region", "family", "start_ns", "duration_ns", "launch_ns"]].reset_index(drop=True)


def profile_run(config: Config, kept: Path | None,
                profiler: Profiler | None = None) -> tuple[dict[str, pd.DataFrame], list[Path], dict]:
    """Capture every mode of a configuration and make its tables.

    Args:
        kept: where nsys's own reports (CSV) are kept; None keeps none.
        profiler: one that was started before; it is used up, and another one is started where it was already.

    Returns:
        tables: operations, clocks, regions, timeline, walls, statuses, each with a column ``mode``.
        files: nsys's reports, and with ``keep_export`` the scrubbed exports. A report that cannot be used is
            left out, and ``statuses`` says why.
        results: tool, the number of profiles by status, which implementation of attention ran, whether it
            shared its GPU by turns (``took_turns``, absent where it did not), and seconds:
            ``watched_s`` of the watched process since it was asked, of which ``ready_s`` until it was ready,
            ``turn_s`` until it had its turn (see ``traces/turns.py``), ``steps_s`` of steps, ``others_s``
            while others had theirs, and the rest until the profiler had made its report; ``analysis_s`` of
            all after the process, of which ``export_s`` of the export and its parts.

    Raises:
        NsysError, TraceError, ConservationError: as the functions that this calls.
    """
    if profiler is None or not profiler.folder.exists():
        profiler = Profiler(config.device)
    nsys, started = profiler.nsys, time.perf_counter()
    with profiler.temporary:
        steps = [config.step(mode=mode) for mode in PHASES]
        print("running and capturing the steps in a process of their own", flush=True)
        captures = capture(steps, profiler.folder, nsys, profiler.process)
        watched = time.perf_counter()
        print(f"captured after {watched - started:.0f} s; now the tables", flush=True)
        exports = {mode: export for item in captures for mode, export in _exports(item, nsys).items()}
        exported = time.perf_counter()
        outcomes = {mode: outcome for item in captures for mode, outcome in item.outcomes.items()}
        with ThreadPoolExecutor() as pool:  # each of nsys's reports is a process of its own
            made = list(pool.map(lambda mode: _tables(mode, outcomes[mode], exports.get(mode), nsys), PHASES))
        files = [file for mode, (_, reports) in zip(PHASES, made) if kept and mode in exports
                 for file in _keep(exports[mode], kept, reports, config.keep_export)]
    found: dict[str, list[pd.DataFrame]] = {}
    for mode, (own, _) in zip(PHASES, made):
        for name, table in own.items():
            found.setdefault(name, []).append(table.assign(mode=mode))
    tables = {name: pd.concat(stacked, ignore_index=True) for name, stacked in found.items()}
    statuses = [outcomes[mode]["status"] for mode in PHASES]
    results = {"tool": profiler.tool} | {f"{status}_profiles": statuses.count(status)
                                         for status in ("captured", "oom", "crashed")}
    if "operations" in tables:
        results["attention_implementation"] = attention_implementation(config, tables["operations"])
    if own_mark():
        results["took_turns"] = True
    seconds = pd.DataFrame([item.seconds for item in captures]).sum().to_dict()
    seconds |= {"watched_s": watched - started, "export_s": exported - watched,
                "analysis_s": time.perf_counter() - watched}
    return tables, files, results | {name: round(value, 3) for name, value in seconds.items()}


def _exports(item: Capture, nsys: Path | None) -> dict[str, Path]:
    """Of each mode that was captured its event-level export ``<mode>.sqlite``."""
    if item.file is None:
        return {}
    whole = item.file.parent / "whole.sqlite"
    if nsys:
        export_capture(nsys, item.file, whole)
    else:
        convert(item.file, whole)
    exports = cut(whole, item.inside)
    return {mode: exports[mode] for mode, outcome in item.outcomes.items() if outcome["status"] == "captured"}


def attention_implementation(config: Config, operations: pd.DataFrame) -> str:
    """Which implementation of attention ran, by its kernels: "written out" where the model does the parts."""
    return WRITTEN_OUT if config.attention == "eager" else sdpa_taken(operations)


def _tables(mode: str, outcome: dict, export: Path | None,
            nsys: Path | None) -> tuple[dict[str, pd.DataFrame], dict]:
    """One mode's tables, and those of nsys's reports, beside its export, that can be used."""
    status = {"status": outcome["status"], "cause": outcome.get("cause")}
    if export is None:
        return {"statuses": pd.DataFrame([status])}, {}
    folder, reports, errors = export.parent, {}, []
    if nsys:
        make_reports(nsys, export, folder, mode)
        reports, errors = load_reports(folder, mode, REPORTS)
        _same_total(activity_totals(export), reports, export.name)
    tables = analyse(export)
    operations = tables["operations"]
    status |= {"left_out": "; ".join(map(str, errors)).replace(f"{folder}/", "") or None,
               "unmatched": int(operations.loc[operations["region"] == UNMATCHED, "count"].sum())}
    return tables | {"statuses": pd.DataFrame([status]),
                     "walls": pd.DataFrame(outcome["walls"], columns=WALLS)}, reports


def _same_total(totals: pd.DataFrame, reports: dict[str, pd.DataFrame], name: str) -> None:
    """What was accounted for against nsys's own totals, as far as its reports could be used.

    Args:
        totals: as activity_totals returns them, to which all operations have been added up.
    """
    for report, kinds in (("cuda_gpu_kern_sum", ["kernel"]),
                          ("cuda_gpu_mem_time_sum", ["memcpy", "memset"])):
        ours = totals.loc[kinds, "duration_ns"].sum()
        if report in reports and (theirs := reports[report]["total_time_ns"].sum()) != ours:
            raise ConservationError(
                f"{name}: operations sum to {ours} ns, and nsys's own {report} to {theirs} ns"
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


def captured_steps(clocks: pd.DataFrame, mode: str) -> int:
    """How many captured steps of a mode are in the tables of one run."""
    return clocks.loc[(clocks["mode"] == mode) & (clocks["step"] >= 0), "step"].nunique()


def states(walls: pd.DataFrame) -> pd.DataFrame:
    """Median ms of each mode's steps and phases: plain, annotated, named, captured; the steps of each; and
    the others over plain.
    """
    timed = walls[walls["capture"] != "warm-up"]
    keys = [*_run_columns(walls), "mode", "phase"]
    kinds = [kind for kind in ("plain", "annotated", "named", "captured") if kind in set(timed["capture"])]
    times = timed.pivot_table(index=keys, columns="capture", values="time_ms", aggfunc=["median", "size"],
                              sort=False)
    table = times["median"][kinds].add_suffix("_ms").join(times["size"][kinds].add_suffix("_steps"))
    for kind in kinds[1:]:
        table[f"{kind}_over_plain"] = table[f"{kind}_ms"] / table["plain_ms"]
    return table.reset_index()


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
    """Share of operations' time by family, for each mode and phase, and (phase ``all``) for each mode.
    Softmax is told by whose it is (see ``families.shown_family``)."""
    run, operations = _run_columns(operations), operations.assign(family=shown_family(operations))
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


def reading(tables: dict[str, pd.DataFrame]) -> str:
    """What one run says, in a sentence or two of markdown."""
    captured = tables["statuses"].set_index("mode")["status"]
    text = "; ".join(f"{mode}: {status}" for mode, status in captured.items() if status != "captured")
    if "operations" not in tables or "forward" not in set(tables["operations"]["mode"]):
        return text or "Nothing was captured."
    steps = captured_steps(tables["clocks"], "forward")
    top = top_kernels(tables["operations"], steps, "forward", "forward", 1).iloc[0]
    clocks = three_clocks(tables["clocks"]).set_index(["mode", "phase"]).loc[("forward", "forward")]
    return (
        f"Forward's operations take {ms(clocks.operations_ms)} of the {ms(clocks.projected_ms)} from its"
        f" first to its last ({percent(clocks.busy_share)} busy), and the host needs {ms(clocks.host_ms)} to"
        f" enqueue them. Most of their time, {percent(top.share)}, is {code(top.kernel)}'s, which runs"
        f" {plain(top.launches)} times a pass. {text}".rstrip()
    )
