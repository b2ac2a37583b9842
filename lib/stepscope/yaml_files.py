"""YAML files that people write or are sent: read as plain data (YAML 1.2), or refused in one sentence."""

import errno
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from stepscope import StepscopeError

LARGEST = 2**20  # bytes
# What is raised by opening and decoding; by constructors, of numbers, dates and tagged values that are none;
# and of what is nested too deeply.
UNREADABLE = (
    OSError,
    YAMLError,
    ValueError,
    ArithmeticError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)


class YamlFileError(StepscopeError, ValueError):
    """A file that is no YAML of the kind that is read here; the text names the file, the place and what is
    wrong.
    """


def load_yaml(path: Path | str) -> Any:
    """The one document of a YAML file, as dicts, lists, texts, numbers, dates and None. What an alias stands
    for is there once, however often it is named.

    Raises:
        YamlFileError: there is no such file, it is no regular file or cannot be read, has more than
            :data:`LARGEST` bytes, is not UTF-8 or not YAML, or repeats a key.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for who writes into it
            raise OSError(errno.EINVAL, "it is no regular file")
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise OSError(errno.EFBIG, f"it has more than {LARGEST:,} bytes")
        return YAML(typ="safe", pure=True).load(content.decode("utf-8-sig"))
    except UNREADABLE as error:
        raise YamlFileError(f"{path}: {_problem(error)}, expected plain YAML") from None


def _problem(error: Exception) -> str:
    """An error's place and words, in one line."""
    mark = getattr(error, "problem_mark", None)
    words = getattr(error, "problem", None) or getattr(error, "strerror", None) or error
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{place}{' '.join(str(words).split()):.300}"
