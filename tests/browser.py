"""A page in the browser of this machine, which writes nothing outside the folder it is given."""
import os
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def opened(page: Path, folder: Path) -> tuple[str, list[str]]:
    """The page's elements once its scripts have run, and what was said on its console. Skips without a browser.

    Args:
        folder: becomes the browser's home; what it keeps goes there.
    """
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(NAMES)}")
    home = folder / "browser"
    places = {"HOME": home, "TMPDIR": home / "tmp", "XDG_CONFIG_HOME": home / "config",
              "XDG_CACHE_HOME": home / "cache", "XDG_DATA_HOME": home / "data", "XDG_RUNTIME_DIR": home / "run"}
    for place in places.values():
        place.mkdir(parents=True, mode=0o700)
    ended = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-crash-reporter", f"--user-data-dir={home / 'profile'}", "--enable-logging=stderr", "--dump-dom",
         page.as_uri()],
        env=os.environ | {name: str(place) for name, place in places.items()}, capture_output=True, text=True,
        timeout=300, check=True)
    return ended.stdout, [line for line in ended.stderr.splitlines() if ":CONSOLE" in line]
