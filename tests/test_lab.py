"""Check in a real browser that JupyterLab runs each notebook with default parameters on a CPU (a slow test)."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from browser import browser
from cells import NOTEBOOKS
from stepscope import PROJECT

TOKEN = "trial"
RUN_LIMIT_S = 300  # time limit per notebook, long enough for a busy machine

# JavaScript that returns the outputs rendered on the page.
SEEN = """() => ({
    errors: [...document.querySelectorAll('[data-mime-type="application/vnd.jupyter.error"]')].map(e => e.innerText),
    pictures: document.querySelectorAll('.jp-OutputArea img, .jp-OutputArea svg').length,
    tables: document.querySelectorAll('.jp-OutputArea table').length,
    folded: document.querySelectorAll('.jp-OutputArea details, .jp-MarkdownOutput details').length,
})"""


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """Copy the checkout into a folder in which notebooks can be written and run."""
    folder = tmp_path_factory.mktemp("trial") / "project"
    assert PROJECT is not None
    shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "lab"))
    subprocess.run(["make", "--silent", "lab-copies"], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def lab(project, tmp_path_factory):
    """Start JupyterLab as ``make lab`` does, but with an empty home folder; yield the server's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = tmp_path_factory.mktemp("home")
    places = {
        "HOME": str(home),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "IPYTHONDIR": str(home / "ipython"),
        "PYTHONPATH": str(project / "lib"),
    }
    # Render all cells rather than only the visible ones, so that they can be inspected.
    settings = home / "config" / "lab" / "user-settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    log = home / "said.txt"
    command = [
        sys.executable,
        "-m",
        "jupyter",
        "lab",
        "--no-browser",
        "--allow-root",
        "--ServerApp.root_dir=.",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--IdentityProvider.token={TOKEN}",
    ]
    with log.open("w") as stream:
        server = subprocess.Popen(command, cwd=project, env=os.environ | places, stdout=stream, stderr=stream)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            with suppress(OSError):
                urllib.request.urlopen(f"{address}/api?token={TOKEN}").close()
                break
            time.sleep(0.2)
        yield address
    finally:
        server.terminate()  # the server ends its kernels before it exits
        server.wait(30)


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.stem for path in NOTEBOOKS])
def test_notebook_runs_in_jupyterlab(project, lab, name):
    with browser() as session:
        page = session.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"{lab}/lab/tree/lab/{name}.ipynb?token={TOKEN}&reset")
        # JupyterLab adds cells one by one, and "Run All Cells" runs only the cells already added.
        cells = len(json.loads((project / "lab" / f"{name}.ipynb").read_text())["cells"])
        page.wait_for_function(
            "cells => document.querySelectorAll('.jp-Notebook .jp-Cell').length >= cells",
            arg=cells,
            timeout=60_000,
        )
        wait_for_kernel(lab, name)
        idle = page.locator('.jp-NotebookPanel-toolbar [data-status="idle"]')
        idle.wait_for(timeout=60_000)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        # Executed cells show a number, and pending cells show a star. The run is over once all show a number.
        page.wait_for_function(
            """() => {
            const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(e => e.innerText.trim())
            const failed = document.querySelector('[data-mime-type="application/vnd.jupyter.error"]')
            return failed || prompts.every(text => /\\[\\d+\\]/.test(text)) }""",
            timeout=RUN_LIMIT_S * 1e3,
        )
        idle.wait_for(timeout=60_000)
        page.wait_for_timeout(1_000)  # the last figure may not be drawn yet
        seen = page.evaluate(SEEN)
        page.close()
    assert not seen["errors"], seen["errors"]
    assert seen["pictures"] and seen["tables"] and seen["folded"]


def wait_for_kernel(lab: str, name: str) -> None:
    """Wait for the notebook's kernel, because JupyterLab would otherwise ask the user to select a kernel."""
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(f"{lab}/api/sessions?token={TOKEN}") as answer:
            kernels = {session["name"]: session["kernel"]["execution_state"] for session in json.load(answer)}
        if kernels.get(f"{name}.ipynb") == "idle":
            return
        assert time.monotonic() < deadline, kernels
        time.sleep(0.2)
