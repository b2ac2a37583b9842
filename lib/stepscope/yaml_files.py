"""YAML files that people write or are sent: read as plain data, or refused in one sentence.

Beyond YAML's own rules a file may not repeat a key (the last would silently win), use aliases (a few lines
can stand for gigabytes), nest deeply, or be large.
"""
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

try:
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # a PyYAML without libyaml: the same, slower
    from yaml import SafeLoader  # type: ignore[assignment]

from stepscope import StepscopeError

LARGEST = 2**20    # bytes
DEEPEST = 30       # mappings and lists within each other
LONGEST = 10_000   # characters of one text or number

# What PyYAML's constructors raise of numbers, dates and tagged values that are none, beside its own errors.
UNREADABLE = (yaml.YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError)


class YamlFileError(StepscopeError, ValueError):
    """A file that is no YAML of the kind that is read here; the text names the file, the place and what is
    wrong.
    """


class PlainLoader(SafeLoader):
    """Plain data only, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r:.80} is there twice",
                                           problem_mark=key_node.start_mark)
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, deep)


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
        return PlainLoader(text).get_single_data()
    except UNREADABLE as error:
        raise YamlFileError(f"{path}: {_problem(error)}, expected plain YAML") from None


def _text(path: Path, limit: int) -> str:
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for who writes into it
            raise YamlFileError(f"{path}: is no regular file, expected a YAML file")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise YamlFileError(f"{path}: cannot be read ({error.strerror}), expected a YAML file") from None
    if len(content) > limit:
        raise YamlFileError(f"{path}: is larger than {limit:,} bytes, expected a YAML file of at most so many")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise YamlFileError(f"{path}: byte {error.start} is not UTF-8, expected a YAML file in it") from None


def _require_plain(text: str) -> None:
    """Go through the file's events, which takes no recursion, before anything is built of them."""
    depth = 0
    for event in yaml.parse(text, PlainLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        problem = ""
        if isinstance(event, yaml.AliasEvent):
            problem = f"the alias *{event.anchor:.80} stands for something written elsewhere"
        elif depth > DEEPEST:
            problem = f"more than {DEEPEST} levels are within each other"
        elif isinstance(event, yaml.ScalarEvent) and len(event.value) > LONGEST:
            problem = f"one text or number has more than {LONGEST:,} characters"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def _problem(error: Exception) -> str:
    """An error's place and words, in one line."""
    mark = getattr(error, "problem_mark", None)
    words = " ".join(str(getattr(error, "problem", None) or error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {words:.300}" if mark else f"{words:.300}"
