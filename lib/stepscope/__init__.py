"""Measure where every millisecond and megabyte of a Transformer training step goes."""

from pathlib import Path

__version__ = "0.4.0"

PACKAGE = Path(__file__).resolve().parent
# The root folder of this package's checkout; None if the package was installed without a checkout.
PROJECT = (
    PACKAGE.parents[1]
    if PACKAGE.parent.name == "lib" and (PACKAGE.parents[1] / "pyproject.toml").is_file()
    else None
)


class StepscopeError(Exception):
    """An error whose cause is the input, a file or the machine, rather than a bug in this package.

    The message is one sentence for the user, or several lines if ``has_lines`` is True.
    """

    has_lines = False
