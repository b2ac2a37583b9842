"""Open pages with Playwright in a browser that is installed on this machine, and clean up afterwards."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
DESKTOP, PHONE = (1440, 900), (390, 844)  # CSS pixels


def program() -> str:
    """Return the path of an installed browser.

    If no browser is installed, skip the test, or fail the test if STEPSCOPE_BROWSER is set.
    """
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        missing = pytest.fail if os.environ.get("STEPSCOPE_BROWSER") else pytest.skip
        missing(f"no browser here: none of {', '.join(NAMES)}")
    return str(found)


@contextmanager
def browser() -> Iterator:
    executable = program()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as home:
        places = {**os.environ, "HOME": home, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home}
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        with sync_playwright() as playwright:
            launched = playwright.chromium.launch(executable_path=executable, args=options, env=places)
            try:
                yield launched
            finally:
                launched.close()


@contextmanager
def shown(on, file: Path, size: tuple[int, int] = DESKTOP, **options) -> Iterator[tuple]:
    """Open a local file with the network disabled; yield the page and the list of its console messages."""
    context = on.new_context(viewport={"width": size[0], "height": size[1]}, offline=True, **options)
    try:
        page, messages = context.new_page(), []
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(file.as_uri())
        yield page, messages
    finally:
        context.close()


@cache
def axe() -> str:
    return files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")


def violations(page) -> list[str]:
    """Return the accessibility rules that a page violates, each with the first offending element."""
    page.evaluate(axe())
    found = page.evaluate("axe.run({iframes: false, resultTypes: ['violations']})")["violations"]
    return [
        f"{violation['id']} ({len(violation['nodes'])}): {violation['nodes'][0]['html'][:200]}"
        for violation in found
    ]
