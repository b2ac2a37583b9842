"""A page in the browser of this machine, which leaves nothing behind."""
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
PLACES = ("HOME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
           "--enable-logging=stderr", "--dump-dom")


def opened(page: Path) -> tuple[str, list[str]]:
    """The page's elements once its scripts have run, and what was said on its console.

    Without a browser the test is skipped.
    """
    found = [path for name in NAMES if (path := shutil.which(name))]
    if not found:
        pytest.skip(f"no browser here: none of {', '.join(NAMES)}")
    # Not in a test's folder: of a socket there the path would be longer than a socket's may be.
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as home:
        places = dict.fromkeys(PLACES, home)
        command = [found[0], *OPTIONS, f"--user-data-dir={home}/profile", page.as_uri()]
        ended = subprocess.run(command, env=os.environ | places, capture_output=True, text=True, timeout=300,
                               check=True)
    return ended.stdout, [line for line in ended.stderr.splitlines() if ":CONSOLE" in line]
