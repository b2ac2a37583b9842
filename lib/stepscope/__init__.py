"""Measure where every millisecond and megabyte of a Transformer training step goes."""

from pathlib import Path

__version__ = "0.3.0"

PACKAGE = Path(__file__).resolve().parent
# The checkout that this package lies in; None where it is installed without one.
PROJECT = (
    PACKAGE.parents[1]
    if PACKAGE.parent.name == "lib" and (PACKAGE.parents[1] / "pyproject.toml").is_file()
    else None
)


class StepscopeError(Exception):
    """Something outside this code is not as it has to be: input, a file, the machine. The text is one
    sentence for the user, or lines if ``has_lines``."""

    has_lines = False
