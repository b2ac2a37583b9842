"""Read untrusted YAML 1.2 files as plain data, or reject them with a one-line error."""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from stepscope import StepscopeError

MAX_BYTES = 2**20
# Besides YAMLError, ruamel raises these errors for invalid dates, unknown tags and deep nesting.
UNREADABLE = (OSError, YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


class YamlFileError(StepscopeError, ValueError):
    """Raised if a file isn't plain YAML. The message names the file, the problem and its position."""


def load_yaml(path: Path) -> Any:
    """Read a YAML file that contains one document.

    Returns:
        The document as plain data: dicts, lists, strings, numbers, booleans, dates and None.

    Raises:
        YamlFileError: If the file can't be read, is larger than :data:`MAX_BYTES`, isn't UTF-8 or YAML, or repeats
            a key.
    """
    try:
        if path.is_fifo():  # reading a FIFO would block until a writer opens it
            raise ValueError("it is not a regular file")
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES:,} bytes")
        return YAML(typ="safe", pure=True).load(path.read_text("utf-8-sig"))
    except UNREADABLE as error:
        problem = getattr(error, "strerror", None) or error
        raise YamlFileError(f"{path}: {' '.join(str(problem).split()):.300}; expected plain YAML") from None
