"""From a runs folder to the report: every answer computed, every figure drawn, one markdown text and one HTML page."""
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure
from matplotlib.testing.compare import compare_images
from matplotlib.testing.exceptions import ImageComparisonFailure

from stepscope import StepscopeError
from stepscope.studies.attention import measure as attention
from stepscope.studies.benchmark import measure as benchmark
from stepscope.studies.compile import measure as compiled
from stepscope.studies.memory import measure as memory
from stepscope.studies.mixed_precision import measure as mixed_precision
from stepscope.studies.neighbours import measure as neighbours
from stepscope.studies.nsys import measure as profiles
from stepscope.studies.warmup import measure as warmup
from stepscope.say.formats import Answer
from stepscope.say.formats import listing
from stepscope.studies.memory import options_answers as memory_options
from stepscope.say.formats import number
from stepscope.studies.attention import answers as attention_answers
from stepscope.studies.attention import memory_answers as attention_memory_answers
from stepscope.studies.benchmark import answers as benchmark_answers
from stepscope.studies.nsys import claims as claims_answers
from stepscope.studies.compile import answers as compiled_answers
from stepscope.studies.memory import answers as memory_answers
from stepscope.studies.mixed_precision import answers as mixed_answers
from stepscope.studies.neighbours import answers as neighbours_answers
from stepscope.studies.nsys import answers as nsys_answers
from stepscope.studies.benchmark import published_answers as published_answers
from stepscope.studies.warmup import answers as warmup_answers
from stepscope.studies.attention import figures as attention_figures
from stepscope.studies.benchmark import figures as benchmark_figures
from stepscope.studies.memory import figures as memory_figures
from stepscope.studies.mixed_precision import figures as mixed_figures
from stepscope.studies.neighbours import figures as neighbours_figures
from stepscope.studies.nsys import figures as nsys_figures
from stepscope.config import studies
from stepscope.say.style import save
from stepscope.step.flops import parameter_count
from stepscope.report.page import render_page
from stepscope.say.published import load_published
from stepscope.runs.selection import told_apart
from stepscope.runs.record import Record, RecordError, check_notebook
from stepscope.runs.store import Store
from stepscope.runs.tables import by_size, load_table, runs_frame
from stepscope.studies.memory.timeline_page import timeline_page

TABLE_BEGIN, TABLE_END = "<!-- h200-table -->\n", "<!-- /h200-table -->"  # in README.md
PIXEL_TOLERANCE = 8  # root mean square over 255: other font rasterisers pass, other data do not


class StaleReport(StepscopeError, RuntimeError):
    """The committed report is not what the records say; the text names the first difference."""


@dataclass
class Data:
    """All tables that answers and figures are made from, and what they were measured on."""

    records: list[Record]
    aside: list[Record]      # of these, those no answer is made from (see told_apart)
    errors: list[RecordError]
    times: pd.DataFrame      # benchmark: a row a run and phase
    times_aside: pd.DataFrame  # the same of runs that are aside
    ceilings: pd.DataFrame
    warm_samples: pd.DataFrame
    warm_costs: pd.DataFrame
    warm_calls: pd.DataFrame
    published: pd.DataFrame
    operations: pd.DataFrame  # nsys, in fp32: a row a run, mode, phase, region and kernel
    clocks: pd.DataFrame
    regions: pd.DataFrame
    timeline: pd.DataFrame
    walls: pd.DataFrame
    statuses: pd.DataFrame
    mixed: dict[str, pd.DataFrame]  # mixed_precision.load's tables by name
    memory: dict[str, pd.DataFrame]  # see memory.all_runs
    attention: dict[str, pd.DataFrame]  # cells, ends, predicted, accounting
    compiled: pd.DataFrame  # a row a run, variant, mode and phase
    neighbours: dict[str, pd.DataFrame]  # see neighbours.load

    @property
    def device_name(self) -> str:
        return listing(sorted({r.machine.get("device_name", "unknown device") for r in self.records})) if self.records else "no device"

    @property
    def is_preset(self) -> bool:
        """Whether these are the tiny models of the CPU preset: nothing then says anything about a GPU."""
        return bool(self.records) and all(record.config["device"] == "cpu" for record in self.records)

    @property
    def where(self) -> str:
        """What stands in every figure's title."""
        return f"CPU preset: tiny models on {self.device_name}" if self.is_preset else self.device_name


def load_data(store: Store) -> Data:
    """Read a runs folder. Unusable records are left out and named in ``errors``.

    Raises:
        RecordError: there is no such folder, or a table that a record names cannot be read.
    """
    if not store.root.is_dir():
        raise RecordError(f"{store.root}: no such runs folder")
    everything, errors = store.records(check_tables=True)
    records, aside = told_apart(everything)
    done = [record for record in records if record.study == "benchmark" and record.status == "ok"]
    in_fp32 = [record for record in records if record.config["precision"] == "fp32"]  # others' profiles are mixed precision's
    return Data(everything, aside, errors, benchmark.all_times(store, records), benchmark.all_times(store, aside), load_table(store, done, "ceilings"),
                *(warmup.all_runs(store, records, table) for table in ("samples", "costs", "calls")), load_published(),
                *(profiles.all_runs(store, in_fp32, table) for table in
                  ("operations.parquet", "clocks", "regions", "timeline.parquet", "walls", "statuses")),
                mixed_precision.load(store, records), memory.all_runs(store, records), attention.all_tables(store, records),
                compiled.all_times(store, records), neighbours.load(store.root))


def _clocks(data: Data) -> pd.DataFrame:
    return data.clocks if data.clocks.empty else nsys_answers.clocks_beside(data.clocks, data.walls, data.times)


# The report's order: sections, and in each its answers.
SECTIONS: dict[str, list[Callable[[Data], Answer]]] = {
    "Benchmarking": [
        lambda d: benchmark_answers.how_long(d.times),
        lambda d: benchmark_answers.how_variable(d.times),
        lambda d: benchmark_answers.launch_bound(d.times),
        lambda d: benchmark_answers.utilisation(d.times, d.ceilings),
        lambda d: benchmark_answers.optimizer(d.times, d.ceilings),
        lambda d: published_answers.beside(d.times, d.published),
        lambda d: published_answers.cannot_be(d.published),
    ],
    "Warm-up": [
        lambda d: warmup_answers.what_changes(d.warm_samples),
        lambda d: warmup_answers.what_it_pays_for(d.warm_costs, d.warm_calls),
        lambda d: warmup_answers.enough(d.warm_samples),
    ],
    "Profiling": [
        lambda d: nsys_answers.forward_total(d.clocks, d.walls, d.times),
        lambda d: nsys_answers.every_phase(d.clocks),
        lambda d: nsys_answers.top_kernel(d.operations),
        lambda d: nsys_answers.not_matmul(d.operations),
        lambda d: nsys_answers.full_step(d.operations),
        lambda d: nsys_answers.softmax_against_matmul(d.operations, d.regions, d.ceilings),
        lambda d: nsys_answers.regions_against_ceilings(d.operations, d.ceilings),
        lambda d: claims_answers.claims_beside(d.operations, d.regions, _clocks(d)),
        lambda d: nsys_answers.conserved(d.operations, d.statuses),
    ],
    "Mixed precision": [
        lambda d: mixed_answers.accumulation(d.mixed),
        lambda d: mixed_answers.toy(d.mixed),
        lambda d: mixed_answers.norms(d.mixed),
        lambda d: mixed_answers.speed(d.mixed, d.times, d.operations),
        lambda d: mixed_answers.slower(d.mixed, d.times, d.operations),
        lambda d: mixed_answers.casts(d.mixed),
        lambda d: mixed_answers.left(d.mixed, d.operations),
        lambda d: mixed_answers.memory(d.mixed),
        lambda d: mixed_answers.health(d.mixed),
        lambda d: mixed_answers.published_speedups(d.mixed, d.published),
    ],
    "Memory": [
        lambda d: memory_answers.timeline(d.memory),
        lambda d: memory_answers.peaks(d.memory),
        lambda d: memory_answers.accounting(d.memory),
        lambda d: memory_answers.residual(d.memory),
        lambda d: memory_answers.largest_of_forward(d.memory),
        lambda d: memory_answers.block(d.memory),
        lambda d: memory_options.checkpointing(d.memory),
        lambda d: memory_options.fragmentation(d.memory),
    ],
    "Attention": [
        lambda d: attention_answers.same_result(d.attention["cells"]),
        lambda d: attention_answers.how_long(d.attention["cells"]),
        lambda d: attention_answers.against_ceiling(d.attention["cells"]),
        lambda d: attention_answers.the_mask(d.attention["cells"]),
        lambda d: attention_answers.compile_cost(d.attention["cells"]),
        lambda d: attention_answers.tf32(d.attention["cells"]),
        lambda d: attention_memory_answers.saved_for_backward(d.attention["cells"]),
        lambda d: attention_memory_answers.where_it_ends(d.attention),
    ],
    "The compiled model": [
        lambda d: compiled_answers.whole_model(d.compiled),
        lambda d: compiled_answers.launches(d.compiled),
        lambda d: compiled_answers.peak_memory(d.compiled),
        lambda d: compiled_answers.cost(d.compiled),
        lambda d: compiled_answers.sdpa(d.compiled),
    ],
    "Sweeps side by side": [
        lambda d: neighbours_answers.sooner(d.neighbours["sweeps"]),
        lambda d: neighbours_answers.agree(d.neighbours["timings"], d.neighbours["sweeps"]),
        lambda d: neighbours_answers.repeated(d.neighbours["experiment"]),
    ],
}
FIGURES: dict[str, Callable[[Data], Figure | None]] = {
    "benchmark_phases": lambda d: benchmark_figures.phases(d.times, d.where),
    "benchmark_scaling": lambda d: benchmark_figures.scaling(d.times, d.where),
    "benchmark_utilisation": lambda d: benchmark_figures.utilisation(d.times, d.where),
    "benchmark_optimizer": lambda d: benchmark_figures.optimizer(d.times, d.where),
    "benchmark_published": lambda d: benchmark_figures.published(d.times, d.published, d.where),
    "warmup_steps": lambda d: benchmark_figures.warmup_steps(d.warm_samples, d.where),
    "warmup_costs": lambda d: benchmark_figures.warmup_costs(d.warm_costs, d.where),
    "nsys_clocks": lambda d: nsys_figures.clocks(_clocks(d), d.where),
    "nsys_families": lambda d: nsys_figures.families_by_size(d.operations, d.where, "forward", ["forward"], "Forward's device time by family"),
    "nsys_step_families": lambda d: nsys_figures.families_by_size(
        d.operations, d.where, "step", ["forward", "backward", "all"], "A full step's device time by family"),
    "nsys_attention": lambda d: nsys_figures.attention(d.operations, d.regions, d.where),
    "nsys_roofline": lambda d: _roofline(d),
    "nsys_timeline": lambda d: _timeline(d),
    "mixed_running": lambda d: mixed_figures.running(d.mixed["running"], d.where),
    "mixed_norms": lambda d: mixed_figures.norms(d.mixed["norms"], d.where),
    "mixed_speed": lambda d: mixed_figures.speed(d.mixed, d.where),
    "mixed_left": lambda d: mixed_figures.left(d.mixed, d.operations, d.where),
    "mixed_memory": lambda d: mixed_figures.memory(d.mixed, d.where),
    "mixed_health": lambda d: mixed_figures.health(d.mixed, d.where),
    "memory_timeline": lambda d: _memory_timeline(d, "step"),
    "memory_timeline_forward": lambda d: _memory_timeline(d, "forward"),
    "memory_peaks": lambda d: memory_figures.peaks(memory_answers.matrix(d.memory), d.where),
    "memory_checkpoints": lambda d: memory_figures.checkpoints(memory_options.curve(d.memory), d.where),
    "attention_time": lambda d: attention_figures.over_sequence(d.attention["cells"], d.attention["ends"], d.where),
    "attention_speedup": lambda d: attention_figures.speedup(d.attention["cells"], d.where),
    "attention_ceiling": lambda d: attention_figures.ceiling(d.attention["cells"], d.where),
    "compile_model": lambda d: attention_figures.whole_model(d.compiled, d.where),
    "workers_agree": lambda d: neighbours_figures.agree(d.neighbours["timings"], d.where),
}


def _memory_timeline(data: Data, mode: str) -> Figure | None:
    run = memory_answers.reference(data.memory, mode)
    if run is None:
        return None
    table = data.memory["allocations.parquet"]
    words = memory_answers.MODE_WORDS[mode]
    return memory_figures.timeline(table[table["run_id"] == run["run_id"]],
                                   f"{run['size']}, context {run['context_length']}, {words}, {run['precision']}, {data.where}")


def interactive_timeline(data: Data) -> str | None:
    """The page with the allocations of the full step and of forward alone, fp32 and bf16; None where there are none."""
    shown = {}
    for mode, precision in (("step", "fp32"), ("forward", "fp32"), ("forward", "bf16")):
        if (run := memory_answers.reference(data.memory, mode, precision)) is not None:
            table = data.memory["allocations.parquet"]
            shown[f"{memory_answers.MODE_WORDS[mode]}, {precision}, {run['size']}, context {run['context_length']}"] = table[table["run_id"] == run["run_id"]]
    return timeline_page(f"Live memory by category, {data.where}", shown) if shown else None


def _roofline(data: Data) -> Figure | None:
    if data.operations.empty or data.ceilings.empty:
        return None
    values = data.ceilings.groupby("ceiling")["value"].median()
    rates = nsys_answers.region_rates(data.operations)
    return nsys_figures.roofline(rates[rates["tflops"] > 0], values["matmul_fp32"], values["copy"], data.where)


def _timeline(data: Data) -> Figure | None:
    if data.timeline.empty:
        return None
    size, context = benchmark_answers.reference(data.timeline)
    own = data.timeline[(data.timeline["size"] == size) & (data.timeline["context_length"] == context)]
    return nsys_figures.timeline(own, f"{size}, context {context}, {data.where}")


def draw_figures(data: Data, folder: Path) -> list[str]:
    """Draw every figure that there are data for; the stems of those drawn."""
    drawn = []
    for stem, draw in FIGURES.items():
        if (figure := draw(data)) is not None:
            save(figure, folder / f"{stem}.png")
            drawn.append(stem)
    return drawn


def writeup(data: Data, figures: list[str], runs_link: str, figures_link: str) -> str:
    """The report as GitHub markdown.

    Args:
        figures: stems of the figures that exist.
        runs_link, figures_link: paths from the report to the runs folder and to the figures.
    """
    sections = {title: [answer(data) for answer in answers] for title, answers in SECTIONS.items()}
    shown = {run for answers in sections.values() for answer in answers for run in answer.runs}
    left = [run for record in data.records if record.done and (run := f"{record.study}/{record.run_id}") not in shown]
    if left:
        sections["Other runs"] = [benchmark_answers.other_runs(pd.concat([data.times, data.times_aside], ignore_index=True), left)]
    for answers in sections.values():
        for answer in answers:
            answer.figures = [figure for figure in answer.figures if figure[0] in figures]
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent / "templates"), undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters["table"] = _markdown_table
    # Another program's reports are many and in a folder of their own: one link stands for them.
    tables = {f"{record.study}/{record.run_id}": list(dict.fromkeys(
        f"{table.file.split('/')[0]}/" if "/" in table.file else table.file for table in record.tables.values())) for record in data.records}
    return environment.get_template("writeup.md.j2").render(
        data=data, sections=sections, machine=_machine(data), sizes=_sizes(data), launch_bound=benchmark.LAUNCH_BOUND, runs_link=runs_link, figures_link=figures_link, tables=tables)


def _markdown_table(table: pd.DataFrame) -> str:
    """Text columns to the left, all else to the right, as a reader expects numbers."""
    def is_number(cell: object) -> bool:
        return not isinstance(cell, str) or cell[:1].isdigit() or cell[:1] in "-–"
    align = ["right" if all(map(is_number, table[column])) else "left" for column in table]
    padded = table.to_markdown(index=False, disable_numparse=True, colalign=align)
    return re.sub(r" +\|", " |", re.sub(r"\| +", "| ", re.sub(r"-{4,}", "---", padded)))  # GitHub renders no file over 512 KB


def _sizes(data: Data) -> pd.DataFrame:
    """A row for each shape of the model that was run, its parameters and contexts; the attention study has no model."""
    records = [record for record in data.records if record.study != "attention"]
    runs = runs_frame(records)
    if runs.empty:
        return runs
    runs = by_size(runs.assign(parameters=[parameter_count(studies()[record.study](**record.config)) for record in records]))
    rows = []
    for (size, parameters), own in runs.groupby(["size", "parameters"], sort=False, observed=True):
        first = own.iloc[0]
        rows.append({"size": size, "layers": first["num_layers"], "d_model": first["d_model"], "d_ff": first["d_ff"], "heads": first["num_heads"],
                     "vocabulary": f"{first['vocab_size']:,}", "parameters": f"{number(parameters / 1e6)} million" if parameters < 1e9 else f"{number(parameters / 1e9)} billion",
                     "contexts": listing(map(str, sorted(own["context_length"].unique()))),
                     "batch": listing(map(str, sorted(own["batch_size"].unique())))})
    return pd.DataFrame(rows)


def _machine(data: Data) -> dict[str, str]:
    """What everything was measured on, each a short text; several values where the records differ."""
    def distinct(values) -> str:
        return ", ".join(sorted({str(value) for value in values if value is not None})) or "not recorded"
    records = data.records
    dates = sorted(record.started_at for record in records)
    rows = {"device": data.device_name}
    if not data.is_preset:
        rows |= {"GPU memory": distinct(f"{r.machine['gpu_memory_mib'] / 1024:.1f} GiB" for r in records if "gpu_memory_mib" in r.machine),
                 "driver, CUDA": distinct(f"{r.software.get('driver')}, {r.software.get('cuda')}" for r in records if r.software)}
    rows |= {"processor": distinct(f"{r.machine.get('cpu')}, {r.machine.get('cpu_cores')} cores" for r in records if r.machine),
             "Python, torch": distinct(f"{r.software.get('python')}, {r.software.get('torch')}" for r in records if r.software),
             "measured": " to ".join(dict.fromkeys(f"{d:%Y-%m-%d}" for d in (dates[0], dates[-1]))) if dates else "never",
             "runs": ", ".join(f"{sum(r.status == status for r in records)} {words}" for status, words in
                               (("ok", "done"), ("oom", "out of memory"), ("failed", "failed")) if any(r.status == status for r in records))
                     or "none",
             "time in runs": f"{sum(r.duration_s for r in records) / 60:.0f} min"}
    throttled = sum(bool(r.gpu_after.get("throttle_reasons")) for r in records)
    busy = sum(bool(r.gpu_before.get("other_processes")) for r in records)
    if not data.is_preset:
        rows |= {"GPU after the run": f"clocks held back in {throttled} of {len(records)} runs"
                 + (f" ({distinct(reason for r in records for reason in r.gpu_after.get('throttle_reasons') or [])})" if throttled else ""),
                 "other processes on the GPU": f"in {busy} of {len(records)} runs"}
    hosts = sorted({r.machine["ram_gib"] for r in records if r.machine.get("ram_gib")})
    if len(hosts) > 1:
        rows |= {"memory of the hosts": ", ".join(f"{ram:.0f} GiB" for ram in hosts)}
    if beside := Counter(r.study for r in records if r.beside):  # a timing is only as good as its neighbours are quiet
        rows |= {"runs with others beside them": f"{beside.total()} of {len(records)}: " + listing(
            f"{n} of {sum(r.study == study for r in records)} in {study}" for study, n in beside.items())}
    return rows


def with_table(readme: str, data: Data) -> str:
    """A README with what is between its two marks made anew: wall times at context 512. Without marks it stays as it is."""
    if TABLE_BEGIN not in readme or data.times.empty:
        return readme
    times = benchmark_answers.matrix(data.times)
    table = benchmark_answers.wall_table(times[times["context_length"] == 512]).drop(columns="context")
    row = times.iloc[0]
    caption = (f"*{data.where}, fp32, context 512, batch {row.batch_size}: host wall time in ms, mean ± standard deviation of {row.timed_steps}"
               f" steps after {row.warmup_steps} warm-up steps.*")
    before, _, rest = readme.partition(TABLE_BEGIN)
    return f"{before}{TABLE_BEGIN}{caption}\n\n{_markdown_table(table)}\n{TABLE_END}{rest.partition(TABLE_END)[2]}"


def render(store: Store, folder: Path) -> list[Path]:
    """Write ``writeup.md``, ``writeup.html``, ``figures/`` and the table in README.md, if there is one, into ``folder``.

    Returns what was written.
    """
    data = load_data(store)
    folder.mkdir(parents=True, exist_ok=True)
    figures = draw_figures(data, folder / "figures")
    runs_link = os.path.relpath(store.root, folder).replace(os.sep, "/")
    text = writeup(data, figures, runs_link, "figures")
    (folder / "writeup.md").write_text(text, encoding="utf-8")
    if page := interactive_timeline(data):
        (folder / "figures" / memory_answers.TIMELINE).write_text(page, encoding="utf-8")
    (folder / "writeup.html").write_text(render_page(text, folder), encoding="utf-8")
    if (readme := folder / "README.md").exists():
        readme.write_text(with_table(readme.read_text(encoding="utf-8"), data), encoding="utf-8")
    return [folder / "writeup.md", folder / "writeup.html", *(folder / "figures" / f"{stem}.png" for stem in figures)]


def check(store: Store, folder: Path) -> None:
    """Compare the report in ``folder`` with what the records say now.

    Raises:
        StaleReport: the writeup or its page is not there or differs by a byte, or a figure shows something else.
        RecordError: a record cannot be used, or a table differs from the one its record was written with.
    """
    data = load_data(store)
    for path in (folder / "writeup.md", folder / "writeup.html"):
        if not path.exists():
            out = "" if folder.resolve() == store.root.resolve() else f" --out {folder}"
            raise StaleReport(f"{path}: not there; render it first (stepscope render --runs {store.root}{out})")
    if data.errors:
        raise data.errors[0]
    for record in data.records:
        if record.done:
            check_notebook(store.root, record)
    with tempfile.TemporaryDirectory() as temporary:
        figures = draw_figures(data, Path(temporary))
        for stem in figures:
            committed = folder / "figures" / f"{stem}.png"
            if not committed.exists():
                raise StaleReport(f"{committed}: missing; `make reference` draws it")
            try:
                difference = compare_images(str(committed), str(Path(temporary) / f"{stem}.png"), PIXEL_TOLERANCE)
            except ImageComparisonFailure as sizes:  # pictures of different sizes
                difference = str(sizes)
            if difference:
                raise StaleReport(f"{committed}: shows something else than the records say ({' '.join(difference.split())})")
    text = writeup(data, figures, os.path.relpath(store.root, folder).replace(os.sep, "/"), "figures")
    _same_text(folder / "writeup.md", text)
    _same_text(folder / "writeup.html", render_page(text, folder))
    if page := interactive_timeline(data):
        _same_text(folder / "figures" / memory_answers.TIMELINE, page)
    if (readme := folder / "README.md").exists():
        if TABLE_BEGIN not in readme.read_text(encoding="utf-8"):
            raise StaleReport(f"{readme}: has no line {TABLE_BEGIN.strip()!r}, expected the table of times behind it")
        _same_text(readme, with_table(readme.read_text(encoding="utf-8"), data))


def _same_text(path: Path, expected: str) -> None:
    found = path.read_text(encoding="utf-8") if path.exists() else ""
    if found == expected:
        return
    lines = zip([*found.splitlines(), "(end)"], [*expected.splitlines(), "(end)"])
    number, (old, new) = next((n, pair) for n, pair in enumerate(lines, start=1) if pair[0] != pair[1])
    raise StaleReport(f"{path}, line {number}: is {old[:120]!r}, but the records say {new[:120]!r}")
