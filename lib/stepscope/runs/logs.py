"""What a run said, for whoever asks why it failed."""
import json
import re

from stepscope.runs.jupyter_kernel import LOG
from stepscope.runs.store import Record, RecordError, Store, read_record

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def find_run(store: Store, name: str) -> Record:
    """The record of one run: by its id, the beginning of it, or study/id.

    Raises:
        RecordError: there is none, or there are several, or it cannot be used.
    """
    if not re.fullmatch(r"(?:[a-z_]+/)?[\w.-]+", name):
        raise RecordError(f"{name!r} is no run's name; expected its id, the beginning of it, or study/id")
    study, _, run_id = name.rpartition("/")
    found = sorted(path.parent for path in store.root.glob(f"{study or '[!.]*'}/{run_id}*/record.json") if path.parts[-3] != "set-aside")
    found = [path for path in found if path.name == run_id] or found
    if len(found) != 1:
        words = f"{len(found)} runs ({', '.join(f'{path.parent.name}/{path.name}' for path in found[:4])}{', ...' if len(found) > 4 else ''})"
        raise RecordError(f"{store.root}: {name!r} names {words if found else 'no run'}; `stepscope list` lists them")
    return read_record(found[0])


def run_log(store: Store, name: str) -> str:
    """Status and cause, every text that the notebook's cells put out, its traceback, and what its process wrote itself."""
    record = find_run(store, name)
    folder = store.root / record.study / record.run_id
    parts = [f"{record.study}/{record.run_id}: {record.status}, {record.duration_s:.1f} s from {record.started_at:%Y-%m-%d %H:%M:%S} UTC"]
    if record.cause:
        parts.append(f"cause: {record.cause}")
    if record.beside:
        parts.append(f"beside: {', '.join(record.beside)}")
    notebook = folder / "notebook.ipynb"
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if notebook.exists() else ():
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                parts.append(f"--- {output['name']}\n{''.join(output['text']).rstrip()}")
            elif output["output_type"] == "error":
                parts.append("--- traceback\n" + "\n".join(output["traceback"]))
    if (folder / LOG).exists():
        parts.append(f"--- the kernel's process\n{(folder / LOG).read_text(encoding='utf-8').rstrip()}")
    return COLOURS.sub("", "\n".join(parts)) + "\n"
