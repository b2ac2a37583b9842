"""YAML files that people write or are sent: read as plain data (YAML 1.2), or refused in one sentence."""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from stepscope import StepscopeError

MAX_BYTES = 2**20
# ruamel's constructors raise these, too: for a date that is none, a tag that is unknown, deep nesting
UNREADABLE = (OSError, YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


class YamlFileError(StepscopeError, ValueError):
    """A file that is not plain YAML; the text names the file, the place and what is wrong."""


def load_yaml(path: Path) -> Any:
    """Read the one document of a YAML file as dicts, lists, texts, numbers, dates and None.

    Raises:
        YamlFileError: the file cannot be read, has more than :data:`MAX_BYTES`, is not UTF-8 or not YAML, or
            repeats a key.
    """
    try:
        if path.is_fifo():  # reading it would wait for who writes into it
            raise ValueError("it is no regular file")
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        return YAML(typ="safe", pure=True).load(path.read_text("utf-8-sig"))
    except UNREADABLE as error:
        problem = getattr(error, "strerror", None) or error
        raise YamlFileError(f"{path}: {' '.join(str(problem).split()):.300}, expected plain YAML") from None
