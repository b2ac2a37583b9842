"""One run: papermill executes the study's notebook in a kernel of its own, and its end becomes a record."""
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import papermill
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError
from traitlets.config import Config as Traits

from stepscope.config import RunConfig
from stepscope.run import OUTCOME
from stepscope.store import Record, Store

PROJECT = Path(__file__).resolve().parents[2]
NOTEBOOKS = PROJECT / "notebooks"
# A kernel watches for its parent's end only from when it is up: one whose sweep was killed before then is to end here.
ORPHANED = "__import__('os').getppid() == int(__import__('os').environ['JPY_PARENT_PID']) or __import__('os')._exit(1)"
logging.getLogger("papermill").setLevel(logging.ERROR)


def execute(config: RunConfig, store: Store) -> Record:
    """Run one configuration and commit its record, whatever its end: ok, oom (a result) or failed (with its cause)."""
    folder = store.begin(config)
    started_at, started = datetime.now(timezone.utc), time.perf_counter()
    status, cause = _run_notebook(config, folder)
    outcome = json.loads((folder / OUTCOME).read_text()) if (folder / OUTCOME).exists() else {}
    if status == "ok" and not outcome.get("finished"):
        status, cause = "failed", f"{config.study}.ipynb ran to its end without Run.finish(...)"
    for leftover in (OUTCOME, f".{OUTCOME}.tmp"):
        (folder / leftover).unlink(missing_ok=True)
    _strip_machine(folder / "notebook.ipynb")
    fields = json.loads(config.model_dump_json())
    record = Record(run_id=config.run_id, study=config.study, status=status, cause=cause, config=fields,
                    started_at=started_at, duration_s=round(time.perf_counter() - started, 3),
                    **{key: value for key, value in outcome.items() if key != "finished"})
    store.commit(folder, record)
    return record


def _run_notebook(config: RunConfig, folder: Path) -> tuple[str, str | None]:
    """Execute the notebook in ``folder``; its status and, where that is not ok, the cause."""
    parameters = json.loads(config.model_dump_json(exclude={"study"})) | {"run_folder": "."}
    if config.size != "custom":  # the size says these
        for field in ("d_model", "d_ff", "num_layers", "num_heads"):
            del parameters[field]
    # IPC: nobody else on the machine can speak to a kernel, and no port can be taken. A socket's path is limited to
    # 107 bytes, hence a folder of its own in the system's temporary folder and not one beside the runs.
    sockets = tempfile.mkdtemp(prefix="stepscope-")
    traits = Traits({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"},
                     "ConnectionFileMixin": {"transport": "ipc", "ip": f"{sockets}/kernel"},
                     "NotebookClient": {"shutdown_kernel": "immediate",
                                        "extra_arguments": [f"--IPKernelApp.exec_lines={ORPHANED}"]}})
    try:
        papermill.execute_notebook(NOTEBOOKS / f"{config.study}.ipynb", folder / "notebook.ipynb", parameters,
                                   kernel_name="python3", cwd=folder, progress_bar=False, config=traits)
    except PapermillExecutionError as error:
        cause = f"{error.ename}: {error.evalue}"
        return ("oom" if error.ename == "OutOfMemoryError" else "failed"), _without_machine(cause)
    except DeadKernelError:
        return "failed", "the notebook's kernel died (killed, or crashed below Python)"
    except RuntimeError as error:
        return "failed", _without_machine(f"the notebook's kernel did not start: {error}")
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
    return "ok", None


def _strip_machine(notebook: Path) -> None:
    """Take paths of this machine out of an executed notebook: it is read, and committed, elsewhere."""
    if not notebook.exists():
        return
    content = json.loads(notebook.read_text(encoding="utf-8"))
    for key in ("input_path", "output_path"):
        content["metadata"].get("papermill", {}).pop(key, None)
    notebook.write_text(json.dumps(_cleaned(content), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _cleaned(value: Any) -> Any:
    """JSON with its texts cleaned, except kinds of cells, and pictures, in whose base64 a short path may stand by chance."""
    if isinstance(value, dict):
        kept = ("cell_type", "output_type", "image/png")
        return {key: item if key in kept else _cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return _without_machine(value) if isinstance(value, str) else value


def _without_machine(text: str) -> str:
    places = {str(PROJECT): ".", sys.prefix: "<python>", sys.base_prefix: "<python>", str(Path.home()): "~",
              tempfile.gettempdir(): "<tmp>", os.uname().nodename: "<host>"}
    home = f"{Path.home()}/"  # tracebacks write it as a tilde
    places |= {f"~/{place.removeprefix(home)}": name for place, name in places.items() if place.startswith(home)}
    for place, name in sorted(places.items(), key=lambda item: -len(item[0])):
        if len(place) > 3:
            text = text.replace(place, name)
    return re.sub(r"<tmp>/ipykernel_\d+/\d+\.py", "<cell>", text)
