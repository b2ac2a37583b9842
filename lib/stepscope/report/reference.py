"""Make chapters/reference.json of the reference's records, before a release: a wheel has no records."""

import json
from pathlib import Path

from stepscope.files import write_text_durably
from stepscope.report.claims import TAG, collect
from stepscope.report.load import read, steady
from stepscope.report.schemas import Tables
from stepscope.report.shipped import FILE
from stepscope.report.tables_across import key_numbers
from stepscope.runs.record import plain
from stepscope.runs.store import Store


def reference_text(tables: Tables) -> str:
    """The file's text: what the chapters ask of the reference, where it holds, and its key numbers."""
    device, claims, found = str(tables["runs"]["device"].iloc[0]), collect("claim"), {}
    chapters = "".join(path.read_text(encoding="utf-8") for path in FILE.parent.rglob("*.md"))
    for name in sorted({tag["name"] for tag in TAG.finditer(chapters) if tag["kind"] == "reference"}):
        if (numbers := claims[name](tables)) is not None:
            found[name] = numbers | {"on": device.removeprefix("NVIDIA ")}
    rows = key_numbers(tables).to_dict("records")
    return (
        json.dumps(
            plain({"device": device, "claims": found, "key_numbers": rows}), indent=1, ensure_ascii=False
        )
        + "\n"
    )


def write_reference(runs: Path | str) -> None:
    """Write what the records of a folder say into the package's chapters."""
    write_text_durably(FILE, reference_text(steady(read(Store(Path(runs))).tables)))
