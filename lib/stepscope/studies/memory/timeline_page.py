"""The memory timeline as one HTML file that loads nothing else: zoom, and point at an allocation to see where
it was made."""
import base64
import hashlib
import json
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from stepscope.say.formats import MODE_WORDS
from stepscope.studies.memory.facts import is_model, reference
from stepscope.studies.memory.figures import COLORS, bounds, steps_of

SHOWN = (("step", "fp32"), ("forward", "fp32"), ("forward", "bf16"))


def reference_page(runs: pd.DataFrame, allocations: pd.DataFrame, where: str) -> str | None:
    """The page of the runs that sentences speak of: full step, and forward alone in both precisions; None
    without any."""
    tables = {}
    for mode, precision in SHOWN:
        if (run := reference(runs, mode, precision)) is not None:
            name = f"{MODE_WORDS[mode]}, {precision}, {run['size']}, context {run['context_length']}"
            tables[name] = allocations[allocations["run_id"] == run["run_id"]]
    return timeline_page(f"Live memory by category, {where}", tables) if tables else None


def timeline_page(title: str, tables: dict[str, pd.DataFrame]) -> str:
    """The page of one or more runs' allocations (see ``measure.classified``), by the name that each is shown
    under.

    Title, names, and what the tables hold are text: the page shows them as they are, and its policy lets a
    browser run its own script only.
    """
    places: dict[str, int] = {}
    runs = [_run(name, table, places) for name, table in tables.items()]
    data = {"runs": runs, "places": list(places), "categories": list(COLORS), "colors": list(COLORS.values())}
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True,
                              undefined=StrictUndefined, trim_blocks=True)
    script = (Path(__file__).parent / "timeline.js").read_text(encoding="utf-8")
    # "<" may not stand in a script, whose text is not escaped otherwise; JSON can have it as a number.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return environment.get_template("timeline.html.j2").render(
        title=title, data=Markup(text), script=Markup(script), script_hash=_sha256(script))


def _sha256(script: str) -> str:
    """A script's name in a Content-Security-Policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode('ascii')}"


def _run(name: str, table: pd.DataFrame, places: dict[str, int]) -> dict:
    """One run as the page's script takes it; ``places`` numbers the places that any run's allocations were
    made at."""
    freed = table["freed_at"].astype("float64")
    life = (freed - table["allocated_at"]).fillna(0).astype(int)
    index = {category: number for number, category in enumerate(COLORS)}
    columns = ["step", "phase", "layer", "region", "line", "function"]
    labels = [_place(row) for row in table[columns].itertuples(index=False)]
    marks = [(first, f"{phase}, step {step}" if place == 0 else phase) for step in steps_of(table)
             for place, (phase, (first, _)) in enumerate(bounds(table, step).items()) if phase != "loss"]
    begun_at = table["allocated_at"].iloc[0]
    return {"title": name, "at": table["allocated_at"].diff().fillna(begun_at).astype(int).tolist(),
            "life": life.tolist(), "size": table["size"].astype(int).tolist(),
            "category": table["category"].map(index).tolist(),
            "place": [places.setdefault(label, len(places)) for label in labels], "marks": marks}


def _place(row) -> str:
    """Where an allocation was made: phase, layer, region and function, as far as known; of an installed
    package the line."""
    layer = None if pd.isna(row.layer) else f"layer {row.layer}"
    line = f"{row.line} in {row.function}" if row.line and not is_model(row.line) else row.function or None
    return ", ".join(part for part in (row.phase, layer, row.region or None, line) if part)
