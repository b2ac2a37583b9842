"""Files of a runs folder: read without leaving it, written so that they are complete.

A folder may come from anywhere, and so may what is in it: links to other places, pipes that nobody writes
into, devices. :func:`open_within` is how every file of a run is read.
"""

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path


def open_within(root: Path, name: str) -> BufferedReader:
    """Open a file of a runs folder for reading.

    Args:
        name: its path in the folder.

    Raises:
        OSError: it is not there, is no regular file, or is outside of the folder, by its path or by a link.
    """
    path = Path(os.path.realpath(root / name))
    if not path.is_relative_to(os.path.realpath(root)):
        raise OSError(errno.EINVAL, "it is outside of the folder")
    if path.exists() and not path.is_file():  # opening a pipe would wait for its other end
        raise OSError(errno.EINVAL, "it is no regular file")
    return path.open("rb")


def read_within(root: Path, name: str, most_bytes: int) -> bytes:
    """All of a file of a runs folder.

    Raises:
        OSError: as of :func:`open_within`, or it is larger than that.
    """
    with open_within(root, name) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes")
    return content


def write_text_durably(path: Path, text: str) -> None:
    """Write a file so that at every instant there is either the old one or the whole new one, on disk."""
    write_texts_durably({path: text})


def write_texts_durably(texts: Mapping[Path, str]) -> None:
    """Write files that belong together: all are on disk beside their places before any takes its place, so
    that a full disk leaves the old ones, and nothing beside them.

    Raises:
        OSError: one of them cannot be written.
    """
    temporaries = {path: path.with_name(f".{path.name}.tmp") for path in texts}
    try:
        for path, temporary in temporaries.items():
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, f"{path.name} is a folder")
            temporary.unlink(missing_ok=True)  # a link would be written through
            with temporary.open("w", encoding="utf-8") as file:
                file.write(texts[path])
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in temporaries.items():
            temporary.replace(path)
    finally:
        for temporary in temporaries.values():
            with suppress(OSError):  # what could not be written may not be removable either
                temporary.unlink()
    for folder in {path.parent for path in texts}:
        sync(folder)


def sync(path: Path) -> None:
    """Make what is in a file, or the renames in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def one_line(text: object, most: int) -> str:
    """Text that somebody else wrote, on one line: what is not printable is a space, and what is longer is cut
    with an ellipsis."""
    line = "".join(char if char.isprintable() else " " for char in str(text)[: 4 * most])
    line = " ".join(line.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
