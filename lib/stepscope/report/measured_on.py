"""What a report was measured on: the models' shapes, the machine, and how the runs went."""
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

import pandas as pd

from stepscope.config import StepConfig, configure, size_label
from stepscope.report.load import Data
from stepscope.runs.estimate import waited_s
from stepscope.runs.record import Record
from stepscope.runs.tables import by_size, runs_frame
from stepscope.say.formats import listing, number
from stepscope.step.flops import parameter_count
from stepscope.step.summary import UNLIKE_CLOCKS, unlike_clocks
from stepscope.step.timing import WHOLE

STATUS_WORDS: dict[Literal["ok", "oom", "failed"], str] = {
    "ok": "done",
    "oom": "out of memory",
    "failed": "failed",
}


def sizes(data: Data) -> pd.DataFrame:
    """A row for each shape of the model that was run, its parameters and contexts; a study of less than the
    model has none.
    """
    of_steps = [(record, config) for record in data.records
                if isinstance(config := configure(**record.config), StepConfig)]
    runs = runs_frame([record for record, _ in of_steps])
    if runs.empty:
        return runs
    runs = by_size(runs.assign(parameters=[parameter_count(config) for _, config in of_steps]))
    rows = []
    for (size, parameters), group in runs.groupby(["size", "parameters"], sort=False, observed=True):
        first = group.iloc[0]
        rows.append({"size": size_label(str(size)), "layers": first["num_layers"],
                     "d_model": first["d_model"], "d_ff": first["d_ff"], "heads": first["num_heads"],
                     "vocabulary": f"{first['vocab_size']:,}", "parameters": _parameters(parameters),
                     "contexts": listing(map(str, _contexts(group))),
                     "batch": listing(map(str, sorted(group["batch_size"].unique())))})
    return pd.DataFrame(rows)


def _contexts(runs: pd.DataFrame) -> list[int]:
    """All contexts of some runs, some of which were each of several."""
    several = runs["contexts"].dropna() if "contexts" in runs else ()
    return sorted({int(one) for one in (*runs["context_length"], *(one for own in several for one in own))})


def _parameters(n: int) -> str:
    if n < 1e6:
        return f"{n:,}"
    return f"{number(n / 1e6)} million" if n < 1e9 else f"{number(n / 1e9)} billion"


def distinct(values: Iterable) -> str:
    """All different values, "not recorded" where there are none."""
    return ", ".join(sorted({str(value) for value in values if value is not None})) or "not recorded"


def machine(data: Data) -> dict[str, str]:
    """What everything was measured on, each a short text; several values where the records differ."""
    records, on_gpu = data.records, not data.is_preset
    rows = {"device": data.device_name}
    if on_gpu:
        memory = (r.machine["gpu_memory_mib"] for r in records if "gpu_memory_mib" in r.machine)
        rows["GPU memory"] = distinct(f"{mib / 1024:.1f} GiB" for mib in memory)
        rows["driver, CUDA"] = distinct(f"{r.software.get('driver')}, {r.software.get('cuda')}"
                                        for r in records if r.software)
    cores: dict[str, set[int]] = {}
    for record in records:
        if record.machine:
            cores.setdefault(str(record.machine.get("cpu")), set()).add(record.machine.get("cpu_cores") or 0)
    rows["processor, cores open to a run"] = distinct(f"{cpu}, {listing(sorted(own))}"
                                                      for cpu, own in cores.items())
    rows["Python, torch"] = distinct(f"{r.software.get('python')}, {r.software.get('torch')}" for r in records
                                     if r.software)
    rows["measured"] = _dates(records)
    ended: Counter[str] = Counter(record.status for record in records)
    rows["runs"] = ", ".join(f"{ended[status]} {words}" for status, words in STATUS_WORDS.items()
                             if ended[status]) or "none"
    taken_s = sum(r.duration_s - waited_s(r) for r in records)
    rows["time in runs"] = f"{taken_s / 60:.0f} min"
    if on_gpu:  # a run has one GPU
        hours = number(taken_s / 3600)
        rows["time in runs"] += f", {hours} GPU-hours, without what runs waited for their turns"
    rows["measured by code"] = _code(records)
    if on_gpu:
        rows |= _clocks(data.tables)
        busy = sum(bool(r.gpu_before.get("other_processes")) for r in records)
        rows["other processes on the GPU"] = f"seen at the start of {busy} of {len(records)} runs"
    return rows | _hosts(records)


def _code(records: list[Record]) -> str:
    """How many versions of the package measured what, by the digest of its source that each record has."""
    by_study: dict[str, set[str]] = {}
    for record in records:
        if source := record.software.get("stepscope_source"):
            by_study.setdefault(record.study, set()).add(str(source))
    versions = set().union(*by_study.values())
    if len(versions) < 2:
        return distinct(versions)
    parts = listing([f"{study} {len(own)}" for study, own in sorted(by_study.items())])
    return (f"{len(versions)} versions (`stepscope_source`): {parts};"
            " each run's stands in the list of all runs")


def _dates(records: list[Record]) -> str:
    days = sorted(f"{record.started_at:%Y-%m-%d}" for record in records)
    return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "never"


def _clocks(tables: Mapping[str, pd.DataFrame]) -> dict[str, str]:
    """The SM clock that was read after each timed step, over every table of timed cells."""
    columns = ["sm_clock_mhz", "sm_clock_least_mhz"]
    named = {name: rows for name, table in tables.items() if {"phase", *columns} <= set(table)
             and len(rows := table.loc[table["phase"] == WHOLE, columns].dropna())}
    cells, studies = [*named.values()], [*dict.fromkeys(name.split(".")[0] for name in named)]
    clocks = pd.concat(cells, ignore_index=True) if cells else pd.DataFrame()
    if clocks.empty:
        return {}
    full = clocks["sm_clock_mhz"].max()
    held = int(unlike_clocks(clocks["sm_clock_least_mhz"], full).sum())
    least = f", the least single reading {clocks['sm_clock_least_mhz'].min():,.0f} MHz" if held else ""
    return {"SM clock after timed steps": f"{full:,.0f} MHz; a reading lower by over {UNLIKE_CLOCKS:.1%} in"
                                          f" {held} of {len(clocks)} timed cells{least}"
                                          f" of {listing(studies)} (others: on their pages)"}


def _hosts(records: list[Record]) -> dict[str, str]:
    """Where there were several hosts, how many at least, and their memory; and which studies' runs had others
    beside them, since a timing is only as good as its neighbours are quiet."""
    rows = {}
    hosts = sorted({r.machine["ram_gib"] for r in records if r.machine.get("ram_gib")})
    told = {(*(r.machine.get(name) for name in ("cpu", "ram_gib")), r.software.get("driver"))
            for r in records if r.machine}
    if len(told) > 1:
        rows["hosts"] = f"at least {len(told)}, told apart by processor, memory and driver"
    if len(hosts) > 1:
        rows["memory of the hosts"] = ", ".join(f"{ram:.0f} GiB" for ram in hosts)
    of_study = Counter(r.study for r in records)
    if beside := Counter(r.study for r in records if r.beside):
        turns = Counter(r.study for r in records if r.beside and r.results.get("took_turns"))
        parts = listing(f"{n} of {of_study[study]} in {study}"
                        + (f" ({turns[study]} timed in turns, the others on their GPU idle)"
                           if turns[study] else "")
                        for study, n in beside.items())
        rows["runs with others beside them"] = f"at least {beside.total()} of {len(records)}: {parts}"
    return rows
