"""Read files safely from a runs folder, and write files durably and atomically.

A runs folder may come from an untrusted source, and may contain symlinks to other places, pipes without a writer,
or device files. Therefore, every file in a run is read with :func:`open_within`.
"""

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path


def open_within(root: Path, name: str) -> BufferedReader:
    """Open a regular file below ``root`` for reading, without blocking and without leaving ``root``.

    Args:
        name: the file's path relative to ``root``.

    Raises:
        OSError: If the file is missing, isn't a regular file, or is outside ``root`` (for example,
            because a symlink leads there).
    """
    path = Path(os.path.realpath(root / name))
    if not path.is_relative_to(os.path.realpath(root)):
        raise OSError(errno.EINVAL, "it is outside the folder")
    if path.exists() and not path.is_file():  # opening a pipe would block until another process opens it, too
        raise OSError(errno.EINVAL, "it is not a regular file")
    return path.open("rb")


def read_within(root: Path, name: str, max_bytes: int) -> bytes:
    """Return the content of a file below ``root``.

    Args:
        name: the file's path relative to ``root``.

    Raises:
        OSError: As in :func:`open_within`, or if the file contains more than ``max_bytes`` bytes.
    """
    with open_within(root, name) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes:,} bytes")
    return content


def write_text_durably(path: Path, text: str) -> None:
    """Replace a file atomically: the disk always contains either the old text or the complete new text."""
    write_texts_durably({path: text})


def write_texts_durably(texts: Mapping[Path, str]) -> None:
    """Write a set of files that belong together, and replace any old versions.

    All new files are on disk, under temporary names, before the first new file replaces its old version.
    Therefore, if the disk is full, the old files stay unchanged and no temporary files are left.

    Raises:
        OSError: If a file can't be written.
    """
    temporaries = {path: path.with_name(f".{path.name}.tmp") for path in texts}
    try:
        for path, temporary in temporaries.items():
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, f"{path.name} is a folder")
            temporary.unlink(missing_ok=True)  # may be left by a killed process; open would follow a link
            with temporary.open("w", encoding="utf-8") as file:
                file.write(texts[path])
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in temporaries.items():
            temporary.replace(path)
    finally:
        for temporary in temporaries.values():
            with suppress(OSError):  # usually, the file is missing, because it has been renamed
                temporary.unlink()
    for folder in {path.parent for path in texts}:
        sync(folder)


def sync(path: Path) -> None:
    """Flush a file's content, or the renames in a folder, to disk, so that they survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def one_line(text: object, max_chars: int) -> str:
    """Convert untrusted text to one printable line.

    Unprintable characters and runs of whitespace become single spaces. A line of more than ``max_chars``
    characters is truncated and ends with an ellipsis.
    """
    prefix = str(text)[: 4 * max_chars]
    printable = "".join(char if char.isprintable() else " " for char in prefix)
    line = " ".join(printable.split())
    if len(line) <= max_chars:
        return line
    return f"{line[: max_chars - 1]}…"
