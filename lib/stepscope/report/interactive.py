"""What a reader works with in the page: "does it fit?", and the ladder of one's own shape.

Python gives data and a form, a script of :mod:`templates` does the rest. The calculator's data are the memory
formulas themselves, as terms, so that there is one set of formulas; how instants are made from them stands in
``calculator.js`` as it does in :func:`stepscope.step.accounting.instants`, and a test compares both by the
byte.
"""
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from stepscope.config import PHASES, PRECISIONS, SIZES, size_label
from stepscope.runs.record import Record
from stepscope.step import accounting
from stepscope.studies.ladder.rungs import BRANCHES
from stepscope.studies.memory.facts_options import fragmentation

TEMPLATES = Path(__file__).parent / "templates"
# Of a GPU that no record names, to begin with; any other can be typed in.
USUAL_GPU = ("a GPU with 80 GB", 80.0)
START = "2.7B"
# What a letter of the formulas is the product of (see accounting.terms); ``head_dim`` is d_model / num_heads.
LETTERS = {
    "X": ("batch_size", "context_length", "d_model"),
    "G": ("batch_size", "context_length", "d_ff"),
    "S": ("batch_size", "num_heads", "context_length", "context_length"),
    "V": ("batch_size", "context_length", "vocab_size"),
    "n": ("batch_size", "num_heads", "context_length"),
    "r": ("batch_size", "context_length"),
    "A": ("d_model", "d_model"),
    "M": ("d_model", "d_ff"),
    "E": ("d_model", "vocab_size"),
    "C": ("d_model",),
    "t": ("context_length", "head_dim"),
    "": (),
}
MODE_NAMES = {"forward": "forward only", "forward_backward": "forward and backward", "step": "full step"}
# The types of a rung's products, from the widest; of those not named here they are bf16.
PRODUCTS = ("fp32", "tf32", "bf16", "fp8")


@dataclass(frozen=True)
class Piece:
    """One interactive part of the page.

    Args:
        place: the id of the element of the report that it takes the place of.
        html: what is shown.
        data: what its script reads, as JSON.
        script: the script's file among the templates.
    """

    place: str
    html: Markup
    data: Any
    script: str


@dataclass(frozen=True)
class Rung:
    """A row of the ladder picker.

    ``products`` is the type of its matrix products; rows on which no later one stands (of another batch, of
    another program) say so in ``beside``; ``gain`` is how many times as fast as the rung before, ``faster``
    as the first, both within one process. What is not known is None.
    """

    size: str
    context_length: int
    rung: str
    label: str
    time_ms: float
    tokens_per_s: float | None = None
    peak_gib: float | None = None
    mfu: float | None = None  # a share of the data sheet's, or else of the measured, rate
    products: str = "bf16"
    beside: bool = False
    gain: float | None = None
    faster: float | None = None


def pieces(records: Iterable[Record], tables: Mapping[str, pd.DataFrame],
           rung_names: Mapping[str, str] | None = None) -> list[Piece]:
    """Every interactive part that there are data for."""
    rows = ladder_rows(tables.get("ladder.rungs", pd.DataFrame()), rung_names or {})
    return [calculator(records, tables), *([ladder_picker(rows)] if rows else [])]


def calculator(records: Iterable[Record], tables: Mapping[str, pd.DataFrame] | None = None) -> Piece:
    """Whether a training step fits a GPU's memory, by the report's own formula; it is tight where it leaves
    less free than the allocator had reserved and unused at worst, in these runs or else in the reference."""
    runs = (tables or {}).get("memory.runs", pd.DataFrame())
    idle = fragmentation(runs) if len(runs) else None
    allowance = idle["most"]["idle_share"] if idle and idle["most"] else accounting.ALLOWANCE
    gpus = {record.machine["device_name"]: round(record.machine["gpu_memory_mib"] / 1024, 2)
            for record in records if record.machine.get("gpu_memory_mib")}
    gpu = max(gpus.items(), key=lambda one: one[1], default=USUAL_GPU)
    html = _html("calculator.html.j2", named=[(name, size_label(name)) for name in SIZES], start=START,
                 shape=SIZES[START], modes=[(mode, MODE_NAMES[mode]) for mode in PHASES],
                 precisions=[(name, name) for name in PRECISIONS], gpu=gpu, allowance=f"{allowance:.0%}")
    return Piece("calculator", html, calculator_data(allowance), "calculator.js")


def calculator_data(allowance: float = accounting.ALLOWANCE) -> dict:
    """The memory formulas as data, by attention and type: each a list of [bytes, letter], each letter a list
    of dimensions; and the share of the memory to leave free."""
    def of(formulas: accounting.Formulas) -> dict[str, Any]:
        values = {field.name: getattr(formulas, field.name) for field in fields(formulas)}
        return {name: {key: _terms(text) for key, text in value.items()} if isinstance(value, dict)
                else _terms(value) for name, value in values.items()}
    by_attention = {"eager": accounting.FORMULAS, "sdpa": accounting.FUSED_FORMULAS}
    return {
        "letters": LETTERS,
        "formulas": {attention: {name: of(formulas) for name, formulas in by_type.items()}
                     for attention, by_type in by_attention.items()},
        "fused_backward": accounting.FUSED_BACKWARD,
        "allowance": allowance,
        "of_precision": {name: "fp32" if name in ("fp32", "tf32") else "bf16" for name in PRECISIONS},
        "block_gradients": _terms(accounting.BLOCK_GRADIENTS),
        "head_gradients": _terms(accounting.HEAD_GRADIENTS),
        "stream": _terms("4X"),
        "workspace": accounting.WORKSPACE,
        "categories": accounting.CATEGORIES,
        "sizes": {name: size._asdict() for name, size in SIZES.items()},
    }


def _terms(formula: str) -> list[list]:
    return [[int(number), letter] for number, letter in re.findall(r"(\d+)([A-Za-z]?)", formula)]


def ladder_rows(rungs: pd.DataFrame, names: Mapping[str, str]) -> list[dict]:
    """The picker's rows from the ladder's table of rungs (``studies.ladder.tables.over_processes``), in its
    order. Rungs left out of the finished step are none of them; of a shape the smallest vocabulary is shown.

    Args:
        names: what rungs are called; one that is not in it is called by its key.
    """
    if rungs.empty:
        return []
    rungs = rungs[(rungs["status"] == "ok") & (rungs["kind"] != "left_out") & rungs["median_ms"].notna()]
    smallest = rungs.groupby(["size", "context_length"], observed=True)["vocab_size"].transform("min")
    shown = []
    for row in rungs[rungs["vocab_size"] == smallest].to_dict("records"):
        def known(*columns: str, row: dict = row, factor: float = 1.0) -> float | None:
            """The first of these columns that has a number, to six digits."""
            value = next((row[column] for column in columns if pd.notna(row.get(column))), None)
            return None if value is None else float(f"{value * factor:.6g}")
        rung = row["rung"]
        shown.append(vars(Rung(
            str(row["size"]), int(row["context_length"]), rung, names.get(rung, rung.replace("_", " ")),
            known("median_ms") or 0.0, known("tokens_per_s"), known("peak_mib", factor=1 / 1024),
            known("of_sheet", "of_measured"), rung if rung in PRODUCTS else "bf16",
            rung == "fill" or rung in BRANCHES or row["kind"] == "beside", known("gain"),
            known("times_as_fast"))))
    return shown


def ladder_picker(rows: list[dict]) -> Piece:
    """The ladder of one size and context, up to the type of products that one wants.

    Args:
        rows: as :class:`Rung` has them, in the ladder's order.
    """
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    contexts = sorted({row["context_length"] for row in rows})
    products = [name for name in PRODUCTS if any(row["products"] == name for row in rows)]
    html = _html("ladder.html.j2", sizes=sizes, contexts=contexts, products=products,
                 start="bf16" if "bf16" in products else products[-1])  # FP8 is another arithmetic
    return Piece("ladder-picker", html, rows, "ladder.js")


def json_in_html(data: Any) -> Markup:
    """JSON as a script element can hold it: no "<", which JSON can have as a number."""
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def _html(template: str, **values: Any) -> Markup:
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)
    return Markup(environment.get_template(template).render(values))
