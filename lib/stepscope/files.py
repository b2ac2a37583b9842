"""Safe reading from a runs folder, and durable, atomic writing.

A folder may come from anywhere, and may contain symlinks to other places, pipes without a writer, or devices.
Every file of a run is read with :func:`open_within`.
"""

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path, PurePosixPath


def open_within(root: Path, name: str) -> BufferedReader:
    """Open a regular file below ``root`` for reading, without blocking and without following symlinks.

    Args:
        name: the file's path relative to ``root``.

    Raises:
        OSError: the file is missing, is not a regular file, or lies outside ``root``.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        raise OSError(errno.EINVAL, "it is not within the folder")
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        # O_NONBLOCK: opening a pipe would otherwise wait for a writer
        descriptor = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symlink, and symlinks are not followed") from None
        raise
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_within(root: Path, name: str, max_bytes: int) -> bytes:
    """Read a whole file below ``root``.

    Raises:
        OSError: as :func:`open_within`, or the file has more than ``max_bytes``.
    """
    with open_within(root, name) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes")
    return content


def write_text_durably(path: Path, text: str) -> None:
    """Replace a file atomically: at every instant, the disk holds either the old or the complete new text."""
    write_texts_durably({path: text})


def write_texts_durably(texts: Mapping[Path, str]) -> None:
    """Write files that belong together.

    All new files are on disk, under temporary names, before the first one replaces its old version. A full
    disk therefore leaves the old files, and no temporary ones.

    Raises:
        OSError: a file cannot be written.
    """
    temporaries = {path: path.with_name(f".{path.name}.tmp") for path in texts}
    try:
        for path, temporary in temporaries.items():
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, f"{path.name} is a folder")
            if os.path.lexists(temporary):  # left by a killed process, or a planted symlink
                temporary.unlink()
            with temporary.open("x", encoding="utf-8") as file:
                file.write(texts[path])
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in temporaries.items():
            temporary.replace(path)
    finally:
        for temporary in temporaries.values():
            with suppress(OSError):  # it has been renamed
                temporary.unlink()
    for folder in {path.parent for path in texts}:
        sync(folder)


def sync(path: Path) -> None:
    """Make a file's content, or the renames in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def one_line(text: object, max_chars: int) -> str:
    """Return untrusted text on one line.

    Unprintable characters become spaces, and longer text than ``max_chars`` is cut with an ellipsis.
    """
    prefix = str(text)[: 4 * max_chars]
    printable = "".join(char if char.isprintable() else " " for char in prefix)
    line = " ".join(printable.split())
    if len(line) <= max_chars:
        return line
    return f"{line[: max_chars - 1]}…"
