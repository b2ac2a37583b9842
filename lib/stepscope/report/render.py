"""From a runs folder to the report: every answer computed, every figure drawn, one markdown text and one HTML page."""
import os
from collections import Counter
from pathlib import Path

import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from stepscope.config import studies
from stepscope.report.load import Data, chapters, load_data
from stepscope.report.page import render_page
from stepscope.runs.store import Store, by_size, runs_frame
from stepscope.say.chapter import Page, Picture, answer, given
from stepscope.say.formats import listing, number
from stepscope.say.selections import matrix
from stepscope.say.style import save
from stepscope.say.tables import markdown_table
from stepscope.say.words import environment
from stepscope.step.model import parameter_count
from stepscope.step.rates import LAUNCH_BOUND
from stepscope.studies.benchmark import answers as benchmark_answers

TABLE_BEGIN, TABLE_END = "<!-- h200-table -->\n", "<!-- /h200-table -->"  # in README.md


def sections(data: Data) -> dict[str, list]:
    """The report's order: its headings, and under each the answers."""
    return {chapter.title: [old(data.tables) for old in chapter.old]
            + [answer(chapter, question, data.tables) for question in chapter.questions] for chapter in chapters()}


def _made(data: Data, asks: Picture | Page, make) -> Figure | str | None:
    asked = given(data.tables, asks)
    return None if asked is None else make(*asked, where=data.where)


def draw_figures(data: Data, folder: Path) -> list[str]:
    """Draw every figure that there are data for; the stems of those drawn."""
    drawn = []
    for chapter in chapters():
        made = {picture.stem: _made(data, picture, picture.draw) for picture in chapter.pictures}
        made |= {stem: draw(data.tables, data.where) for stem, draw in chapter.old_pictures.items()}
        for stem, figure in made.items():
            if figure is not None:
                save(figure, folder / f"{stem}.png")
                drawn.append(stem)
    return drawn


def pages(data: Data) -> dict[str, str]:
    """The HTML pages that stand beside the figures, by name."""
    made = {page.name: _made(data, page, page.make) for chapter in chapters() for page in chapter.pages}
    made |= {name: make(data.tables, data.where) for chapter in chapters() for name, make in chapter.old_pages.items()}
    return {name: text for name, text in made.items() if text is not None}


def writeup(data: Data, figures: list[str], runs_link: str, figures_link: str) -> str:
    """The report as GitHub markdown.

    Args:
        figures: stems of the figures that exist.
        runs_link, figures_link: paths from the report to the runs folder and to the figures.
    """
    parts = sections(data)
    shown = {run for answers in parts.values() for answer in answers for run in answer.runs}
    left = [run for record in data.records if record.done and (run := f"{record.study}/{record.run_id}") not in shown]
    if left:
        times = pd.concat([data.tables["benchmark.times"], data.aside_times], ignore_index=True)
        parts["Other runs"] = [benchmark_answers.other_runs(times, left)]
    for of_section in (one for answers in parts.values() for one in answers):
        of_section.figures = [figure for figure in of_section.figures if figure[0] in figures]
    templates = environment(Path(__file__).parent / "templates")
    templates.keep_trailing_newline = True
    templates.filters |= {"table": markdown_table, "markdown": Markup}
    # Another program's reports are many and in a folder of their own: one link stands for them.
    tables = {f"{record.study}/{record.run_id}": list(dict.fromkeys(
        f"{table.file.split('/')[0]}/" if "/" in table.file else table.file for table in record.tables.values())) for record in data.records}
    return templates.get_template("writeup.md.j2").render(
        data=data, sections=parts, machine=_machine(data), sizes=_sizes(data), launch_bound=LAUNCH_BOUND,
        measured_neighbours=len(data.tables["neighbours.timings"]) > 0, runs_link=runs_link, figures_link=figures_link, tables=tables)


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
    if TABLE_BEGIN not in readme or data.tables["benchmark.times"].empty:
        return readme
    times = matrix(data.tables["benchmark.times"])
    table = benchmark_answers.wall_table(times[times["context_length"] == 512]).drop(columns="context")
    row = times.iloc[0]
    caption = (f"*{data.where}, fp32, context 512, batch {row.batch_size}: host wall time in ms, mean ± standard deviation of {row.timed_steps}"
               f" steps after {row.warmup_steps} warm-up steps.*")
    before, _, rest = readme.partition(TABLE_BEGIN)
    return f"{before}{TABLE_BEGIN}{caption}\n\n{markdown_table(table)}\n{TABLE_END}{rest.partition(TABLE_END)[2]}"


def texts(store: Store, data: Data, figures: list[str], folder: Path) -> dict[Path, str]:
    """Every text of the report with its place in ``folder``: the writeup, pages beside the figures, and the README there, if
    there is one, with its table."""
    runs_link = os.path.relpath(store.root, folder).replace(os.sep, "/")
    made = {folder / "writeup.md": writeup(data, figures, runs_link, "figures")}
    made |= {folder / "figures" / name: text for name, text in pages(data).items()}
    if (readme := folder / "README.md").exists():
        made[readme] = with_table(readme.read_text(encoding="utf-8"), data)
    return made


def render(store: Store, folder: Path) -> list[Path]:
    """Write ``writeup.md``, ``writeup.html``, ``figures/`` and the table in README.md, if there is one, into ``folder``.

    Returns what was written.
    """
    data = load_data(store)
    folder.mkdir(parents=True, exist_ok=True)
    figures = draw_figures(data, folder / "figures")
    written = texts(store, data, figures, folder)
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
    page = folder / "writeup.html"
    page.write_text(render_page(written[folder / "writeup.md"], folder), encoding="utf-8")
    return [folder / "writeup.md", page, *(folder / "figures" / f"{stem}.png" for stem in figures)]
