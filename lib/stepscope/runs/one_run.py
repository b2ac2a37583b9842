"""One run: papermill executes the study's notebook in a kernel of its own, and its end becomes a record."""
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import papermill
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError

from stepscope import PACKAGE, PROJECT, StepscopeError
from stepscope.config import Dimensions, RunConfig, free_fields
from stepscope.runs.jupyter_kernel import Watch, start_kernel
from stepscope.runs.record import LOG, OUTCOME, SAID, Record, Status
from stepscope.runs.store import Store

NOTEBOOKS = PACKAGE / "notebooks"  # a link to the checkout's; a wheel holds them there
logging.getLogger("papermill").setLevel(logging.CRITICAL)  # what goes wrong in a notebook is its run's cause


class NotebooksMissing(StepscopeError, RuntimeError):
    """Studies that are to be run have no notebook here."""


def require_notebooks(configs: list[RunConfig]) -> None:
    """Raises :class:`NotebooksMissing` where a study of these runs has no notebook to execute."""
    asked = sorted({config.study for config in configs})
    missing = [study for study in asked if not (NOTEBOOKS / f"{study}.ipynb").is_file()]
    if missing:
        raise NotebooksMissing(f"{NOTEBOOKS}: has no notebook of {', '.join(missing)}, so nothing can be run;"
                               " stepscope was installed without its notebooks")


def never() -> bool:
    """Nobody is gone who asked for a run of this process's own sweep."""
    return False


def make_run(config: RunConfig, store: Store, timeout_s: float | None = None,
             notebook: Callable[..., tuple[Status, str | None]] | None = None, where: str = "",
             abandoned: Callable[[], bool] = never) -> tuple[Path, Record]:
    """Run one configuration in a folder of ``.partial/``; that folder, and the record that belongs to it.

    Whatever the run's end, it has a record: ok, oom (a result) or failed (with its cause). What is raised is
    the store's trouble: no space, no right to write.

    Args:
        timeout_s: the run's processes are ended after so long, and it has failed.
        notebook: stands in for :func:`run_notebook`, in a simulated sweep.
        where: the worker's name, for whoever looks at what is going on.
        abandoned: whether whoever asked for the run is gone; it is then ended.

    Raises:
        OSError: a file cannot be written. AlreadyBegun: this run was begun before in this sweep.
    """
    folder = store.begin(config, where).absolute()  # papermill changes this process's folder meanwhile
    started_at, started = datetime.now(UTC), time.perf_counter()
    status, cause = (notebook or run_notebook)(config, folder, timeout_s, abandoned)
    outcome = json.loads((folder / OUTCOME).read_text()) if (folder / OUTCOME).exists() else {}
    if status == "ok" and not outcome.get("finished"):
        status, cause = "failed", f"{config.study}.ipynb ran to its end without Run.finish(...)"
    for leftover in (OUTCOME, f".{OUTCOME}.tmp", SAID):
        (folder / leftover).unlink(missing_ok=True)
    _strip_machine(folder / "notebook.ipynb")
    _keep_log(folder / LOG, status)
    fields = json.loads(config.model_dump_json())
    record = Record(run_id=config.run_id, study=config.study, status=status, cause=cause, config=fields,
                    started_at=started_at, duration_s=round(time.perf_counter() - started, 3),
                    **{key: value for key, value in outcome.items() if key != "finished"})
    return folder, record


def run_notebook(config: RunConfig, folder: Path, timeout_s: float | None = None,
                 abandoned: Callable[[], bool] = never) -> tuple[Status, str | None]:
    """Execute the study's notebook in ``folder``; its status and, where that is not ok, the cause."""
    fields = config.model_dump_json(include=set(free_fields(config.study)))
    parameters = json.loads(fields) | {"run_folder": "."}
    if parameters.get("size", "custom") != "custom":  # the size says these
        for field in Dimensions._fields:
            parameters.pop(field, None)
    kernel = start_kernel(folder)
    watch = Watch(kernel, timeout_s, abandoned)
    try:
        with watch, (folder / SAID).open("w", encoding="utf-8") as said:
            papermill.execute_notebook(NOTEBOOKS / f"{config.study}.ipynb", folder / "notebook.ipynb",
                                       parameters, kernel_name="python3", cwd=folder, progress_bar=False,
                                       stdout_file=said, km=kernel.manager, record_timing=False)
    except PapermillExecutionError as error:
        cause = watch.cause or f"{error.ename}: {error.evalue}"
        return ("oom" if error.ename == "OutOfMemoryError" else "failed"), _without_machine(cause)
    except DeadKernelError:
        return "failed", watch.cause or "the notebook's kernel died (killed, or crashed below Python)"
    except RuntimeError as error:
        return "failed", watch.cause or _without_machine(f"the notebook's kernel did not start: {error}")
    finally:
        kernel.close()
    return "ok", None


def _keep_log(log: Path, status: str) -> None:
    """What the kernel's process wrote beside the notebook is kept if the run failed and there is any."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    log.unlink(missing_ok=True)
    if status == "failed" and text.strip():
        log.write_text(_without_machine(text), encoding="utf-8")


def _strip_machine(notebook: Path) -> None:
    """Take paths of this machine out of an executed notebook: it is read, and committed, elsewhere."""
    if not notebook.exists():
        return
    content = json.loads(notebook.read_text(encoding="utf-8"))
    for key in ("input_path", "output_path"):
        content["metadata"].get("papermill", {}).pop(key, None)
    notebook.write_text(json.dumps(_cleaned(content), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _cleaned(value: Any) -> Any:
    """JSON with its texts cleaned, except kinds of cells, and pictures, in whose base64 a short path may
    stand by chance."""
    if isinstance(value, dict):
        kept = ("cell_type", "output_type", "image/png")
        return {key: item if key in kept else _cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return _without_machine(value) if isinstance(value, str) else value


def _without_machine(text: str) -> str:
    places = {sys.prefix: "<python>", sys.base_prefix: "<python>", str(Path.home()): "~",
              tempfile.gettempdir(): "<tmp>", os.uname().nodename: "<host>"}
    if PROJECT:
        places[str(PROJECT)] = "."
    home = f"{Path.home()}/"  # tracebacks write it as a tilde
    places |= {f"~/{place.removeprefix(home)}": name
               for place, name in places.items() if place.startswith(home)}
    for place, name in sorted(places.items(), key=lambda item: -len(item[0])):
        if len(place) > 3:
            text = text.replace(place, name)
    return re.sub(r"<tmp>/ipykernel_\d+/\d+\.py", "<cell>", text)
