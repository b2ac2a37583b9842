"""Execute one run: papermill executes the study's notebook in a new kernel, and the outcome becomes a record.

An error in a cell tagged ``show`` doesn't fail the run, because such cells only display results.

Each run is a process (``python -m stepscope.runs.run NOTEBOOK PARAMETERS FOLDER``) in its own session, which it
shares with all processes that it starts, such as the kernel, nsys and compile workers. An environment variable of
these processes holds the run's folder, so that we can find and kill them together. Their temporary folder is
inside the run's folder, so that no files remain elsewhere.
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from stepscope import PACKAGE, PROJECT, StepscopeError
from stepscope.config import Dimensions, RunConfig, format_errors
from stepscope.runs.record import LOG, NOTEBOOK, OUTCOME, Record, append_outcome, read_outcome
from stepscope.runs.source import code_cells, notebook_source

# Environment variables: MARK contains the run's folder and marks the run's processes; CORES lists the run's CPU
# cores; NOTEBOOKS is a folder that replaces the package's notebooks; IMAGES is "no" if executed notebooks are
# saved without images.
MARK, CORES, NOTEBOOKS = "STEPSCOPE_RUN", "STEPSCOPE_CORES", "STEPSCOPE_NOTEBOOKS"
IMAGES = "STEPSCOPE_IMAGES"
PATIENCE_S = 600  # generous, because a kernel may answer slowly on a busy machine
TEMPORARY = "tmp"  # a subfolder of the run's folder; the subfolder is deleted when the run ends
PRINTED = f"{TEMPORARY}/printed.txt"  # what the notebook has printed so far
# Variables set for every run. Without VEC_ISA_OK, Inductor compiles a test program for each vector instruction set
# of the processor. This takes 5 to 15 s in each process that compiles for a CPU.
ENVIRONMENT = {"TORCHINDUCTOR_VEC_ISA_OK": "1", "JUPYTER_PREFER_ENV_PATH": "1"}
# Dask's nanny sets these variables for its workers, so runs must not inherit them.
DASKS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_")


def notebook_of(config: RunConfig, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the notebook that a run executes.

    An environment variable can name a folder that replaces the package's folder ``notebooks``. In a checkout, the
    package's folder is a link. In a wheel, it is a real folder.
    """
    return Path(environment.get(NOTEBOOKS) or PACKAGE / "notebooks") / f"{config.notebook}.ipynb"


class Abandoned(StepscopeError, RuntimeError):
    """Raised after a run was killed because the sweep that requested it no longer exists."""


def make_run(
    config: RunConfig,
    folder: Path,
    environment: dict[str, str],
    timeout_s: float | None = None,
    abandoned: Callable[[], bool] = lambda: False,
) -> Record:
    """Run one configuration in the empty ``folder``, wait for it to end, and return its record.

    The record's status is ok, oom (a result) or failed (with a cause).

    Args:
        environment: the run's environment variables, which override this process's environment variables.
        timeout_s: the time limit in seconds; a run that exceeds it is killed and recorded as failed.
        abandoned: a function that returns True once the sweep that requested the run no longer exists. The run is
            then killed.

    Raises:
        OSError: If a file can't be written.
        Abandoned: If the run was killed because ``abandoned`` returned True.
    """
    started_at, started = datetime.now(UTC), time.monotonic()
    temporary = folder / TEMPORARY
    temporary.mkdir()
    environment = (
        {name: value for name, value in os.environ.items() if name not in DASKS}
        | ENVIRONMENT
        | {
            MARK: str(folder),
            "TMPDIR": str(temporary),
            "IPYTHONDIR": str(temporary),
            # separate compiler caches, so that each run compiles from scratch
            "TRITON_CACHE_DIR": str(temporary / "triton"),
            "CUDA_CACHE_PATH": str(temporary / "cuda"),
            "JUPYTER_RUNTIME_DIR": str(temporary),
        }
        | environment
    )
    command = [
        sys.executable,
        "-P",
        "-m",
        "stepscope.runs.run",
        str(notebook_of(config, environment)),
        json.dumps(parameters_of(config)),
        str(folder),
    ]
    with (folder / LOG).open("wb") as log:
        # The run's stdin is a pipe from this process, so the run sees EOF and ends when this process exits.
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            reason = _wait(process, timeout_s, abandoned)
        finally:
            kill_run_processes(folder)
            process.wait()
    lasted = {"started_at": started_at, "duration_s": round(time.monotonic() - started, 3)}
    outcome = read_outcome(folder)
    if reason is None and "status" not in outcome:
        code = process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        reason = f"the run's process {how}; see {LOG}"
    if reason:
        outcome |= {"status": "failed", "cause": reason}
    _tidy(folder, outcome["status"], keep_images=environment.get(IMAGES) != "no")
    if (folder / NOTEBOOK).is_file():
        source = {"notebook_source": notebook_source(folder / NOTEBOOK)}
        outcome["software"] = outcome.get("software", {}) | source
    try:
        cause = outcome["cause"] and without_machine(outcome["cause"], folder)
        return Record.of(config, **outcome | {"cause": cause} | lasted)
    except ValidationError as error:
        reason_invalid = f"the notebook's outcome is not a valid record: {format_errors(error, Record)}"
        return Record.of(config, status="failed", cause=reason_invalid, **lasted)


def parameters_of(config: RunConfig) -> dict[str, Any]:
    """Return the run's papermill parameters. If the size has a name, the parameters omit the dimensions."""
    parameters = json.loads(config.model_dump_json(include=set(config.tunable_fields())))
    if parameters.get("size", "custom") != "custom":
        for field in Dimensions._fields:
            parameters.pop(field, None)
    return parameters


def _wait(process: subprocess.Popen, timeout_s: float | None, abandoned: Callable[[], bool]) -> str | None:
    """Wait for the run's process to end.

    Returns:
        The reason for killing the process if it exceeded the time limit, or None if it ended by itself.

    Raises:
        Abandoned: If ``abandoned`` returns True.
    """
    began = time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
            return None
        if abandoned():
            raise Abandoned("the sweep that requested this run no longer exists")
        if timeout_s is not None and time.monotonic() - began > timeout_s:
            return f"exceeded the time limit of {timeout_s:g} s, so its processes were killed"


def _tidy(folder: Path, status: str, keep_images: bool) -> None:
    """Clean up a run's folder.

    Remove temporary files, this machine's paths, images (unless ``keep_images``), and the log (unless the run
    failed).
    """
    (folder / OUTCOME).unlink(missing_ok=True)
    # rm also removes empty folders that their owner may not read
    subprocess.run(["rm", "-rf", str(folder / TEMPORARY)], check=False)
    if (notebook := folder / NOTEBOOK).is_file():
        content = json.loads(notebook.read_text(encoding="utf-8"))
        for key in ("input_path", "output_path"):
            content["metadata"].get("papermill", {}).pop(key, None)
        if not keep_images:
            for cell in content["cells"]:
                for output in cell.get("outputs", []):
                    output.get("data", {}).pop("image/png", None)
        clean = json.dumps(_cleaned(content, folder), indent=1, ensure_ascii=False)
        notebook.write_text(clean + "\n", encoding="utf-8")
    log = folder / LOG
    text = log.read_text(encoding="utf-8", errors="replace")
    if status == "failed" and text.strip():
        log.write_text(without_machine(text, folder), encoding="utf-8")
    else:
        log.unlink()


def _cleaned(value: Any, folder: Path) -> Any:
    """Replace this machine's paths and host name in all strings in a JSON value, recursively.

    Cell types, output types and images remain unchanged. Images are skipped because their base64 text may contain
    a path by chance.
    """
    if isinstance(value, dict):
        unchanged = ("cell_type", "output_type", "image/png")
        return {key: item if key in unchanged else _cleaned(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item, folder) for item in value]
    return without_machine(value, folder) if isinstance(value, str) else value


def without_machine(text: str, folder: Path) -> str:
    """Replace this machine's paths and host name in a text with placeholders.

    This is necessary because notebooks are shared and committed.
    """
    places = {
        str(folder / TEMPORARY): "<tmp>",
        str(folder): "<run>",
        sys.prefix: "<python>",
        sys.base_prefix: "<python>",
        str(Path.home()): "~",
        tempfile.gettempdir(): "<tmp>",
        os.uname().nodename: "<host>",
    }
    if PROJECT:
        places[str(PROJECT)] = "."
    home = f"{Path.home()}/"  # tracebacks abbreviate the home folder to a tilde
    places |= {
        f"~/{place.removeprefix(home)}": name for place, name in places.items() if place.startswith(home)
    }
    for place, name in sorted(places.items(), key=lambda item: -len(item[0])):
        if len(place) > 3:
            text = text.replace(place, name)
    return re.sub(r"<tmp>/ipykernel_\d+/\d+\.py", "<cell>", text)


def kill_run_processes(folder: Path) -> None:
    """Kill all processes of the run in this folder, or of the runs in its subfolders, except this process.

    Processes are found even if their session or parent has changed. The search repeats until two consecutive
    searches find no process, because a process that is just calling exec has no visible environment.
    """
    rounds = 2
    for _ in range(500):
        killed = False
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # the process belongs to another user, or has just ended
                mark = process.environ().get(MARK, "") if process.pid != os.getpid() else ""
                if mark == str(folder) or mark.startswith(f"{folder}/"):
                    process.kill()
                    killed = killed or process.status() != psutil.STATUS_ZOMBIE
        rounds = 2 if killed else rounds - 1
        if not rounds:
            return
        time.sleep(0.01)


# The functions below run in the run's process.


def main(notebook: str, parameters: str, place: str) -> None:
    folder = Path(place)
    threading.Thread(target=_end_with_worker, args=[folder], daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})  # because workers block them
    if CORES in os.environ:
        os.sched_setaffinity(0, {int(core) for core in os.environ[CORES].split(",")})
    status, cause = _execute(Path(notebook), json.loads(parameters), folder)
    outcome = read_outcome(folder)
    if status == "ok" and "tables" not in outcome:
        status, cause = "failed", "the notebook ended without calling Run.keep(...)"
    append_outcome(folder, status=status, cause=cause)


def _end_with_worker(folder: Path) -> None:
    sys.stdin.buffer.read()
    kill_run_processes(folder)
    os._exit(1)


def _execute(notebook: Path, parameters: dict[str, Any], folder: Path) -> tuple[str, str | None]:
    """Execute a notebook in ``folder``; return the run's status, and the cause if there was an error.

    If only a ``show`` cell fails, the status is still ok, and the cause describes the error.
    """
    # If JupyterLab has installed this module, jsonschema imports it to check URLs. This import takes a second per
    # run.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    import papermill
    from jupyter_client.manager import AsyncKernelManager
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError
    from traitlets import default

    class Kernel(AsyncKernelManager):
        """A kernel whose sockets are in the run's folder, so that only this user can connect to it.

        The path of the sockets is relative, because socket paths are limited to 107 bytes.
        """

        @default("transport")
        def _sockets(self) -> str:
            return "ipc"

        @default("ip")
        def _path(self) -> str:
            return f"{TEMPORARY}/kernel"

    # errors in the notebook are reported as the cause
    logging.getLogger("papermill").setLevel(logging.CRITICAL)
    try:
        with (folder / PRINTED).open("w", encoding="utf-8") as printed:
            papermill.execute_notebook(
                notebook,
                folder / NOTEBOOK,
                parameters | {"run_folder": "."},
                kernel_name="python3",
                cwd=".",
                progress_bar=False,
                record_timing=False,
                stdout_file=printed,
                kernel_manager_class=Kernel,
                start_timeout=PATIENCE_S,
                iopub_timeout=PATIENCE_S,
            )
    except PapermillExecutionError:
        return _errors(folder / NOTEBOOK)
    except DeadKernelError:
        return "failed", "the notebook's kernel died (it was killed, or crashed in native code)"
    except RuntimeError as error:
        return "failed", f"the notebook's kernel did not start: {error}"
    return "ok", None


def _errors(notebook: Path) -> tuple[str, str]:
    """Return the run's status and cause from the errors in its executed notebook."""
    cells = sorted((cell for cell in code_cells(notebook) if cell.errors), key=lambda cell: cell.shows)
    error = cells[0].errors[0]
    words = f"{error['ename']}: {error['evalue']}"
    if cells[0].shows:
        return "ok", f"a cell that only displays results failed: {words}"
    return ("oom" if error["ename"] == "OutOfMemoryError" else "failed"), words


if __name__ == "__main__":
    main(*sys.argv[1:])
