"""YAML files that people write or are sent: read as plain data (YAML 1.2), or refused in one sentence.

Beyond YAML's own rules a file may not use aliases (a few lines can stand for gigabytes), nest deeply, or be
large.
"""
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, ScalarEvent

from stepscope import StepscopeError

LARGEST = 2**20    # bytes
DEEPEST = 30       # mappings and lists within each other
LONGEST = 10_000   # characters of one text or number

# What constructors raise of numbers, dates and tagged values that are none, beside YAML's own errors.
UNREADABLE = (YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError)


class YamlFileError(StepscopeError, ValueError):
    """A file that is no YAML of the kind that is read here; the text names the file, the place and what is
    wrong.
    """


def load_yaml(path: Path | str, limit: int = LARGEST) -> Any:
    """The one document of a YAML file, as dicts, lists, texts, numbers, dates and None.

    Args:
        limit: bytes that the file may have.

    Raises:
        YamlFileError: there is no such file, it is no regular file or cannot be read, is too large, not UTF-8
            or not YAML, repeats a key, uses an alias, or nests more than :data:`DEEPEST` levels.
    """
    path = Path(path)
    text = _text(path, limit)
    try:
        _require_plain(text)
        return YAML(typ="safe", pure=True).load(text)
    except UNREADABLE as error:
        raise YamlFileError(f"{path}: {_problem(error)}, expected plain YAML") from None


def _text(path: Path, limit: int) -> str:
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for who writes into it
            raise YamlFileError(f"{path}: is no regular file, expected a YAML file")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = getattr(error, "strerror", None) or error
        raise YamlFileError(f"{path}: cannot be read ({reason}), expected a YAML file") from None
    if len(content) > limit:
        raise YamlFileError(f"{path}: is larger than {limit:,} bytes, expected at most so many")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise YamlFileError(f"{path}: byte {error.start} is not UTF-8, expected a YAML file in it") from None


def _require_plain(text: str) -> None:
    """Go through the file's events, which takes no recursion, before anything is built of them."""
    depth = 0
    for event in YAML(typ="safe", pure=True).parse(text):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        problem = ""
        if isinstance(event, AliasEvent):
            problem = f"the alias *{event.anchor:.80} stands for something written elsewhere"
        elif depth > DEEPEST:
            problem = f"more than {DEEPEST} levels are within each other"
        elif isinstance(event, ScalarEvent) and len(event.value) > LONGEST:
            problem = f"one text or number has more than {LONGEST:,} characters"
        if problem:
            raise MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def _problem(error: Exception) -> str:
    """An error's place and words, in one line."""
    mark = getattr(error, "problem_mark", None)
    words = " ".join(str(getattr(error, "problem", None) or error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {words:.300}" if mark else f"{words:.300}"
