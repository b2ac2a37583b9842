"""List a folder's runs, with each run's finding and a link to its notebook, and the runs that no table shows."""

import os
from pathlib import Path
from urllib.parse import quote

from stepscope.config import configure
from stepscope.report.load import Read
from stepscope.report.tables import NONE, escape
from stepscope.runs.record import NOTEBOOK, Record
from stepscope.studies import STUDIES

MAX_FINDING_CHARS = 400
MAX_RUNS_OPEN = 15  # longer lists are folded, one fold per study
OUTCOMES = {"oom": "out of memory", "failed": "failed"}


def runs_page(found: Read, runs: Path, folder: Path) -> str:
    lines = [f"* {escape(line)}" for line in left_out(found)]
    end = ["## Omitted or inconsistent", "\n".join(lines)] if lines else []
    return "\n\n".join(["# Runs", runs_found(found, runs, folder), *end]) + "\n"


def runs_found(found: Read, runs: Path, folder: Path) -> str:
    """Return the runs' findings as markdown, with one list per study; long lists are folded.

    Args:
        runs: the runs folder, which contains the targets of the links.
        folder: the folder that contains the page with the links.
    """
    place = quote(os.path.relpath(runs, folder).replace(os.sep, "/"))
    lists = []
    for study in STUDIES:
        lines = [_run(record, place) for record in found.records if record.study == study]
        title = f"{study.replace('_', ' ')}: {len(lines)} {'run' if len(lines) == 1 else 'runs'}"
        if len(found.records) > MAX_RUNS_OPEN and lines:
            lines = [f"<details><summary>{title}</summary>\n", *lines, "\n</details>"]
        elif lines:
            lines = [f"**{title}**\n", *lines]
        lists.append("\n".join(lines))
    return "\n\n".join(filter(None, lists))


def left_out(found: Read) -> list[str]:
    """Return one line for each run, or part of a run, that no table shows or that is inconsistent."""
    replaced = [f"{record.study}/{record.run_id}: replaced by a newer run" for record in found.replaced]
    return [*found.errors, *found.notes, *replaced]


def _run(record: Record, place: str) -> str:
    label = configure(**record.config).label.removeprefix(f"{record.study} ")
    path = f"{place}/{record.study}/{record.run_id}/{NOTEBOOK}"
    name = f"[{escape(label)}]({path})" if record.notebook_sha256 else escape(label)
    finding = escape(str(record.results.get("finding") or NONE).replace("**", ""), MAX_FINDING_CHARS)
    return f"* {name}: {finding if record.status == 'ok' else _outcome(record)}"


def _outcome(record: Record) -> str:
    return f"**{OUTCOMES[record.status]}**" + (f" ({escape(record.cause)})" if record.cause else "")
