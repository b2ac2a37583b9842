"""Write a report that compares any runs folder with the reference machine, in a summary, tables and figures.

The report shows the writeup's views for which the folder contains data, next to the reference rows with the same
keys. The reference comes from ``reference.parquet``, which is part of the package. The templates in ``machine/``
are rendered in order, once per device.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from stepscope import PROJECT
from stepscope.figures import all_figures
from stepscope.files import one_line
from stepscope.report.document import Document, DocumentError, table
from stepscope.report.load import Read, read, steady
from stepscope.report.output import OutputError, Report, foot
from stepscope.report.page import anchor_of, page
from stepscope.report.runs_list import left_out, runs_found
from stepscope.report.tables import digits, escape, headed, missing, number
from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.studies.ladder.config import LADDER_OPTIMIZATIONS
from stepscope.views import MissingTable, Views, all_views, unit_of, varying
from stepscope.views.benchmark import MODE_NAMES
from stepscope.views.ladder import NAMES

FOLDER = Path(__file__).with_name("machine")
REFERENCE = Path(__file__).with_name("reference.parquet")
TWO_GPUS = "h200x2"  # the reference's runs on two GPUs, in a folder next to its other runs
THERE = "_there"  # suffix of the reference's columns
MAX_ROWS_OPEN = 30  # longer tables are folded
MAX_ROWS = 1_000
RELATIVE_TOLERANCE = 1e-9  # for sums, whose last digits depend on the order of their terms
# Views that the templates use, and the columns that are compared with the reference.
COMPARED = {
    "handout_times": ["forward", "backward", "forward_and_backward", "full_step"],
    "warm_up": ["text"],
    "times": ["wall_ms", "gpu_ms", "peak_gib"],
    "phases": ["forward_ms", "backward_ms", "optimizer_ms"],
    "kernel_categories": ["share"],
    "steps": ["wall_ms", "gpu_ms", "speedup"],
    "parts": ["ms"],
    "training": ["mean_nats"],
    "profile_times": ["wall_ms", "gpu_ms", "operations"],
    "profile_categories": ["share"],
    "profile_kernels": [],
    "precision_gains": ["gpu_ms", "gpu_speedup"],
    "repeated_sums": ["result_text"],
    "autocast_dtypes": ["dtype"],
    "rounded_gradients": ["norm_error"],
    "precision_training": ["final_nats"],
    "peaks": ["peak_gib"],
    "allocations": [],
    "checkpoints": ["peak_gib", "gpu_ms"],
    "attention": ["wall_ms", "gpu_ms", "saved_mib"],
    "attention_errors": [],
    "model_steps": [],
    "model_modules": [],
    "strategies": ["wall_ms", "exposed_ms"],
    "strategy_ranks": [],
}
# A machine's peak rates, each taken from the fastest run: view, column, printed words, and unit.
RATES = (
    ("peak_rates", "matmul_tflops", "large fp32 matmul", "TFLOP/s"),
    ("rates", "bf16_tflops", "large bf16 matmul", "TFLOP/s"),
    ("rates", "fp8_tflops", "large FP8 matmul", "TFLOP/s"),
    ("rates", "sustained_tflops", "bf16 matmuls, sustained for a second", "TFLOP/s"),
    ("rates", "sustained_clock_mhz", "SM clock during these matmuls", "MHz"),
    ("rates", "power_limit_w", "power limit", "W"),
    ("peak_rates", "copy_tb_per_s", "large copy", "TB/s"),
)
FIXED = "The same in all rows: "
# Printed names for the values of key fields.
LABELS = {"mode": MODE_NAMES, "optimization": NAMES}
# Only the attention study, whose model is one head, has d_model in its views' keys.
WORDS = {
    "vocab_size": "vocabulary size",
    "kernel_category": "category",
    "checkpoint_policy": "policy",
    "d_model": "head dimension",
}
SELF_SPOKEN = ("size", "precision", "model")  # fields whose values are printed without the field's name
# Key fields that share one column, which identifies the row.
JOINED = (*SELF_SPOKEN, "mode", "kernel_category")
ALWAYS_NAMED = ("model", "size", "context_length", "batch_size", "d_model", "precision")


# -- the reference --------------------------------------------------------------------------------------------


def reference_views(runs: Path) -> dict[str, pd.DataFrame]:
    """Return the key and the compared columns of each view, and the tables ``about`` and ``machine_rates``.

    The distributed study's views are those of the folder of two GPUs next to ``runs``, if it exists.
    """
    views = _views_in(runs)
    two_gpus = _views_in(runs.parent / TWO_GPUS) if (runs.parent / TWO_GPUS).is_dir() else None
    declared = all_views()
    frames = {}
    for name, columns in COMPARED.items():
        source = two_gpus if declared[name].studies == ["distributed"] else views
        if columns and source is not None:
            key = declared[name].key
            frames[name] = pd.DataFrame(source[name][[*key, *columns]]).sort_values(key, ignore_index=True)
    return frames | {"about": about(views.table("runs")), "machine_rates": machine_rates(views)}


def _views_in(runs: Path) -> Views:
    return Views(steady(read(Store(runs)).tables))


def machine_rates(views: Views) -> pd.DataFrame:
    """Return a machine's peak rates, with columns ``what`` (the name) and ``text`` (the value with its unit)."""
    rates = []
    for name, column, what, unit in RATES:
        with suppress(MissingTable):
            view = views[name]
            fastest = (view[view["precision"] == "fp32"] if "precision" in view else view)[column].max()
            if not missing(fastest):
                rates.append((what, number(fastest, unit)))
    return pd.DataFrame(rates, columns=["what", "text"])


def about(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row about a device's runs: its name, their number, and the newest run's software and CPU."""
    newest = runs.sort_values("started_at").iloc[[-1]]
    named = newest.rename(columns={"machine_cpu": "cpu"}).reindex(
        columns=["device", "torch", "driver", "cpu"]
    )
    texts = named.astype(object).fillna("")
    return texts.assign(runs=len(runs)).reset_index(drop=True)


def write_reference(runs: Path | str) -> None:
    """Write the package's ``reference.parquet`` from a runs folder.

    The file has a single row. Each of its columns is a view, whose rows are stored as a list. This format keeps
    all views in one file, and preserves their types.
    """
    frames = reference_views(Path(runs))
    columns = {}
    for name, frame in frames.items():
        rows = pa.Table.from_pandas(frame, preserve_index=False).to_struct_array().combine_chunks()
        columns[name] = pa.ListArray.from_arrays([0, len(rows)], rows)
    pq.write_table(pa.table(columns), REFERENCE, compression="zstd")


def reference() -> dict[str, pd.DataFrame]:
    """Read the reference's views, which :func:`reference_views` created."""
    stored = pq.read_table(REFERENCE)
    frames = {}
    for name in stored.column_names:
        rows = stored[name].combine_chunks().flatten()
        frames[name] = pa.RecordBatch.from_struct_array(rows).to_pandas()
    return frames


def reference_difference(runs: Path) -> str:
    """Describe how ``reference.parquet`` differs from :func:`reference_views`; return "" if it matches."""
    expected, stored = reference_views(runs), reference()
    for name, frame in expected.items():
        try:
            pd.testing.assert_frame_equal(
                stored[name],
                frame,
                check_dtype=False,
                check_names=False,
                rtol=RELATIVE_TOLERANCE,
                atol=0,
                obj=name,
            )
        except (AssertionError, KeyError) as error:
            return f"{REFERENCE.name} doesn't match the records ({one_line(error, 300)})"
    return ""


# -- functions for templates -------------------------------------------------------------------------------------


def with_reference(name: str, view: pd.DataFrame, there: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Add the reference's columns, such as ``wall_ms_there``, to a view's rows, matched by key."""
    declared = all_views()[name]
    joined = view
    if name in there and len(view):
        others = there[name].rename(columns={column: column + THERE for column in COMPARED[name]})
        joined = view.merge(others, on=declared.key, how="left", validate="one_to_one")
    config = [field for field in declared.key if field in (*declared.config, "batch_size", "study")]
    joined.attrs = {"key": declared.key, "config": config, "named": config, "chosen": []}
    return joined


def some(view: pd.DataFrame, **values: object) -> pd.DataFrame:
    """Return the rows with the given values, if there are any; a list matches any of its values."""
    rows = view
    for column, value in values.items():
        rows = rows[rows[column].isin(value if isinstance(value, list) else [value])]
    rows.attrs = view.attrs | {"chosen": [*view.attrs["chosen"], *values]}
    return rows


def ratios(column: str, *views: pd.DataFrame) -> pd.Series:
    """Return a column's values divided by the reference's, for the rows that the reference also measured."""
    shared = [view for view in views if column + THERE in view]
    found = [pd.Series(dtype=float), *(view[column] / view[column + THERE] for view in shared)]
    return pd.concat(found).dropna()


def compared(view: pd.DataFrame, *columns: str, hide: Sequence[str] = ()) -> str:
    """Format a view's rows as a table: the key fields, then each column next to the reference's column.

    A configuration field that has the same value in all rows is listed below the table instead. A field whose
    value the template has chosen is omitted.

    Args:
        columns: "name" or "name: heading, unit"; empty strings and columns without values are omitted.
        hide: key fields to omit, because another column already shows them.
    """
    formatted = {*view.attrs["config"], *view.attrs["chosen"]} - {*varying(view, view.attrs["key"])}
    fields = [name for name in view.attrs["key"] if name not in (*formatted, *hide)]
    labels = {name: view[name].replace(words) for name, words in LABELS.items() if name in view}
    shown = view.assign(**labels)
    joined = [name for name in fields if name in JOINED]
    columns_shown, others = [], fields
    if len(joined) > 1:  # a phone keeps only one column in view
        shown = shown.assign(joined=shown[joined].agg(", ".join, axis=1))
        columns_shown = [f"joined: {' and '.join(map(_words, joined))}"]
        others = [name for name in fields if name not in joined]
    columns_shown += [f"{name}: {_words(name)}" for name in others]
    for column in filter(None, columns):
        name, _, heading = column.partition(": ")
        heading = heading or _heading(name)
        columns_shown.append(f"{name}: {heading}")
        if name + THERE in view:
            columns_shown.append(f"{name + THERE}: {_heading_there(heading)}")
    printed = table(shown, *columns_shown, rows=MAX_ROWS, drop_empty=True)
    if len(view) > MAX_ROWS_OPEN:
        printed = f"<details><summary>All {len(view):,} rows</summary>\n\n{printed}\n\n</details>"
    fixed = [name for name in view.attrs["named"] if name in view and name not in fields]
    words = [f"{_words(name)} {_value(view[name].iloc[0])}" for name in fixed]
    return f"{printed}\n\n{FIXED}{', '.join(words)}." if words else printed


def by_case(view: pd.DataFrame, *within: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the name and the rows of each configuration.

    A name contains the fields in which the view's rows differ, and a few fields that are always named: for
    example, "small, context length 512, batch size 4".

    Args:
        within: configuration fields in which one case's rows may differ.
    """
    fields = [name for name in view.attrs["named"] if name not in within]
    spoken = [*ALWAYS_NAMED, *varying(view, fields)]
    for values, rows in view.groupby(fields, sort=False):
        named = [(name, value) for name, value in zip(fields, values) if name in spoken and value != ""]
        words = [
            _value(value) if name in SELF_SPOKEN else f"{_words(name)} {_value(value)}"
            for name, value in named
        ]
        rows.attrs = view.attrs | {"named": []}
        yield ", ".join(words), rows


def ordered(view: pd.DataFrame, column: str, ascending: bool = False) -> pd.DataFrame:
    """Sort rows by a column within each group of rows that agree in all key fields except the last."""
    group = view.groupby(view.attrs["key"][:-1], sort=False, dropna=False).ngroup()
    values = view[column] if ascending else -view[column]
    order = pd.DataFrame({"group": group, "value": values}).sort_values(["group", "value"], kind="stable")
    return view.loc[order.index]


def _words(name: str) -> str:
    return WORDS.get(name, name.replace("_", " "))


def _heading_there(heading: str) -> str:
    """Return the reference column's heading, such as "wall (reference), ms" for "wall, ms"."""
    words, comma, unit = heading.rpartition(", ")
    return f"{words} (reference), {unit}" if comma else f"{heading} (reference)"


def _heading(name: str) -> str:
    """Return a column's heading with its unit, such as "wall, ms" for wall_ms or "speedup, x" for speedup."""
    unit = unit_of(name)
    [heading] = headed(pd.DataFrame(columns=[name]))
    return heading if ", " in heading or not unit else f"{heading}, {unit}"


def _value(value: object) -> str:
    return escape(value) if isinstance(value, str) else digits(value, "n")


def link(out: Path) -> Callable[[str], str]:
    """Return a function that formats a link to one of the writeup's headings.

    For a report outside the checkout, the function only names the heading, because a link would contain a local
    path.
    """
    is_inside = PROJECT is not None and out.resolve().is_relative_to(PROJECT)

    def why(heading: str = "") -> str:
        if PROJECT is None or not is_inside:
            return f'"{heading}" in the writeup' if heading else "the project's writeup.md"
        path = os.path.relpath(PROJECT / "writeup.md", out).replace(os.sep, "/")
        return (
            f"[{heading}]({quote(path)}#{anchor_of(heading)})" if heading else f"[the writeup]({quote(path)})"
        )

    return why


# -- the report -----------------------------------------------------------------------------------------------


def compose(found: Read, runs: Path, out: Path) -> Report:
    """Return the report of a runs folder, with one part per device.

    Args:
        found: the contents of ``runs``.
        out: the folder into which the report will be written; links are relative to it.

    Raises:
        OutputError: If the folder contains no usable run.
    """
    if not found.records:
        raise OutputError(f"{runs}: {found.errors[0] if found.errors else 'contains no runs'}")
    parts = by_device(found, runs)
    there = reference()
    serial = itertools.count(1)
    shared = {
        "some": some,
        "by_case": by_case,
        "ordered": ordered,
        "ratios": ratios,
        "ladder_optimizations": [*LADDER_OPTIMIZATIONS],
        "why": link(out),
        "serial": lambda: next(serial),
        "compared": compared,
        "reference": there["about"].iloc[0],
    }
    texts: list[str] = []
    figures: dict[str, str] = {}
    errors = [*found.errors]
    notes = [*found.notes]
    for device, part in parts.items():
        names, missing = _names(part, there)
        names |= {
            "left_out": left_out(part),
            "runs_found": runs_found(part, runs, out),
            "studies": sorted({record.study for record in part.records}),
            "on_device": f" ({escape(device)})" if len(parts) > 1 else "",
        }
        document = Document(FOLDER, shared | names, all_figures())
        first, *sections = sorted(FOLDER.glob("*.md.j2"))
        chosen = sections if texts else [first, *sections]
        texts += [document.render(path.name) for path in chosen]
        figures |= document.figures
        errors += [error for error in part.errors if error not in errors]
        notes += missing
        try:
            document.check()
        except DocumentError as error:
            notes.append(f"omitted, because rendering failed: {one_line(error, 1000)}")
    text = _without_repetition("".join(texts))
    html = page(text.replace("writeup.md", "writeup.html"), [], figures, foot(found.records))
    drawings = {f"figures/{name}.svg": figure for name, figure in figures.items()}
    return Report({"report.md": text, "report.html": html} | drawings, errors, notes)


def _without_repetition(text: str) -> str:
    """Remove repeated lines of fixed fields, so that each chapter shows each of these lines only once."""
    kept: list[str] = []
    last = ""
    for line in text.splitlines():
        is_repeated = line.startswith(FIXED) and line == last
        if line.startswith(FIXED):
            last = line
        elif line.startswith("## "):
            last = ""
        if not is_repeated:
            kept.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)) + "\n"


def by_device(found: Read, runs: Path) -> dict[str, Read]:
    """Split a folder's contents by device, because runs of different devices may share a key."""
    devices = dict.fromkeys(map(device_of, [*found.records, *found.replaced]))
    if len(devices) == 1:
        return dict.fromkeys(devices, found)
    parts = {device: read(Store(runs), partial(is_of, device)) for device in devices}
    return {device: part for device, part in parts.items() if part.records}


def is_of(device: str, record: Record) -> bool:
    return device_of(record) == device


def device_of(record: Record) -> str:
    return record.machine.get("device_name") or record.config["device"]


def _names(found: Read, there: Mapping[str, pd.DataFrame]) -> tuple[dict[str, Any], list[str]]:
    """Return the names that one device's templates can use, such as views, and a note for each view that failed.

    A view is empty if its study has no runs.
    """
    views, declared = Views(steady(found.tables)), all_views()
    names: dict[str, Any] = {}
    notes = []
    for name in COMPARED:
        empty = pd.DataFrame(columns=[*declared[name].key, *declared[name].columns])
        try:
            view = views[name]
        except MissingTable:
            view = empty
        except Exception as error:  # noqa: BLE001 a table may be missing or empty
            notes.append(f"cannot compute view {name} ({type(error).__name__}: {one_line(error, 200)})")
            view = empty
        names[name] = with_reference(name, view, there)
    rates = machine_rates(views).merge(there["machine_rates"], on="what", how="left", suffixes=("", THERE))
    names["machine_rates"] = rates
    names["here"] = about(found.tables["runs"]).iloc[0]
    names["on_gpu"] = found.records[0].config["device"] != "cpu"
    return names, notes
