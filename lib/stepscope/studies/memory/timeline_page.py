"""The memory timeline as one HTML file that loads nothing else: zoom, and point at an allocation to see where it was made."""
import json
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from stepscope.studies.memory.figures import COLORS, bounds, steps_of


def timeline_page(title: str, tables: dict[str, pd.DataFrame]) -> str:
    """The page of one or more runs' allocations (see ``memory.classified``), by the name that each is shown under."""
    places: dict[str, int] = {}
    runs = [_run(name, table, places) for name, table in tables.items()]
    data = {"runs": runs, "places": list(places), "categories": list(COLORS), "colors": list(COLORS.values())}
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined)
    # "<" may not stand in a script, whose text is not escaped otherwise; in JSON it can be written as a number.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return environment.get_template("timeline.html.j2").render(title=title, data=Markup(text))


def _run(name: str, table: pd.DataFrame, places: dict[str, int]) -> dict:
    freed = table["freed_at"].astype("float64")
    life = (freed - table["allocated_at"]).fillna(0).astype(int)
    index = {category: number for number, category in enumerate(COLORS)}
    labels = [_place(row) for row in table[["step", "phase", "layer", "region", "line", "function"]].itertuples(index=False)]
    marks = [(first, f"{phase}, step {step}" if place == 0 else phase)
             for step in steps_of(table) for place, (phase, (first, _)) in enumerate(bounds(table, step).items()) if phase != "loss"]
    return {"title": name, "at": table["allocated_at"].diff().fillna(table["allocated_at"].iloc[0]).astype(int).tolist(),
            "life": life.tolist(), "size": table["size"].astype(int).tolist(), "category": table["category"].map(index).tolist(),
            "place": [places.setdefault(label, len(places)) for label in labels], "marks": marks}


def _place(row) -> str:
    parts = [row.phase, None if pd.isna(row.layer) else f"layer {row.layer}", row.region or None, f"{row.line} in {row.function}" if row.line else None]
    return ", ".join(part for part in parts if part)
