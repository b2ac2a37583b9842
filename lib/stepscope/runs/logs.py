"""What a run says: while it goes on, in the end, and for whoever asks why it failed."""
import json
import re
from collections.abc import Iterator

from stepscope.config import RunConfig
from stepscope.files import read_within
from stepscope.runs.record import LOG, NOTEBOOK, SAID, Record, RecordError, read_record
from stepscope.runs.store import Store

# What a terminal would obey: colours, and other control characters than ends of lines and tabs.
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
MOST_BYTES = 2**28  # of a notebook or a log that is read


def find_run(store: Store, name: str) -> Record:
    """The record of one run: by its id, the beginning of it, or study/id.

    Raises:
        RecordError: there is none, or there are several, or it cannot be used.
    """
    if not re.fullmatch(r"(?:[a-z_]+/)?[\w.+-]+", name):
        raise RecordError(f"{name!r} is no run's name; expected its id, the beginning of it, or study/id")
    study, _, run_id = name.rpartition("/")
    places = [path.parent for path in store.root.glob(f"{study or '[!.]*'}/{run_id}*/record.json")]
    found = sorted(place for place in places if place.parent.name != "set-aside")
    found = [place for place in found if place.name == run_id] or found
    if len(found) != 1:
        first = ", ".join(f"{place.parent.name}/{place.name}" for place in found[:4])
        words = f"{len(found)} runs ({first}{', ...' if len(found) > 4 else ''})" if found else "no run"
        raise RecordError(f"{store.root}: {name!r} names {words}; `stepscope list` lists them")
    return read_record(found[0])


def run_log(store: Store, name: str) -> str:
    """Status and cause, every text that the notebook's cells put out, its traceback, its process's words.

    Raises:
        RecordError: there is no such run, or its record, its notebook or its log cannot be read.
    """
    record = find_run(store, name)
    run = f"{record.study}/{record.run_id}"
    started = f"{record.started_at:%Y-%m-%d %H:%M:%S} UTC"
    parts = [f"{run}: {record.status}, {record.duration_s:.1f} s from {started}"]
    if record.cause:
        parts.append(f"cause: {record.cause}")
    if record.beside:
        parts.append(f"beside: {', '.join(record.beside)}")
    if (content := _read(store, f"{run}/{NOTEBOOK}")) is not None:
        try:
            parts += list(_outputs(json.loads(content)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise RecordError(f"{run}/{NOTEBOOK}: is not a notebook") from None
    if (log := _read(store, f"{run}/{LOG}")) is not None:
        parts.append(f"--- the kernel's process\n{log.decode(errors='replace').rstrip()}")
    return CONTROLS.sub("", "\n".join(parts)) + "\n"


def said_last(store: Store, config: RunConfig) -> str:
    """The last line that the notebook of a run in the making has printed; empty where there is none yet."""
    for path in store.partial.glob(f"{config.study}-{config.run_id}-*/{SAID}"):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:  # the run has just ended
            continue
        return CONTROLS.sub("", next((line for line in reversed(lines) if line.strip()), ""))
    return ""


def reading(store: Store, record: Record) -> str:
    """What a run found, in the words with which its notebook ends, as plain text; empty where it has none."""
    try:
        content = json.loads(_read(store, f"{record.study}/{record.run_id}/{NOTEBOOK}") or b"{}")
        texts = ["".join(output["data"]["text/markdown"]) for cell in content.get("cells", [])
                 for output in cell.get("outputs", []) if "text/markdown" in output.get("data", {})]
    except (RecordError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""
    # The first one is the run's name, and code that a notebook shows is not its end.
    words = texts[-1] if len(texts) > 1 and "```" not in texts[-1] else ""
    return CONTROLS.sub("", " ".join(words.replace("**", "").replace("`", "").split()))


def _read(store: Store, name: str) -> bytes | None:
    try:
        return read_within(store.root, name, MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"{name}: cannot be read ({error.strerror})") from None


def _outputs(notebook: dict) -> Iterator[str]:
    """The texts of a notebook in nbformat 4; of anything else an error that :func:`run_log` expects."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                yield f"--- {output['name']}\n{''.join(output['text']).rstrip()}"
            elif output["output_type"] == "error":
                yield "--- traceback\n" + "\n".join(output["traceback"])
