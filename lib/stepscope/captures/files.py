"""Recognize the kind of a capture file, and decompress or export the file if necessary."""

import gzip
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepscope.traces.attribution import TraceError
from stepscope.traces.nsys_csv import decode_text, is_report
from stepscope.traces.nsys_tool import export_capture, find_nsys
from stepscope.traces.torch_trace import open_capture

EXPECTED = (
    "expected a .sqlite or .nsys-rep from nsys, a .json from torch.profiler, or a .csv from nsys stats (each may"
    " be gzipped)"
)
HEAD_BYTES = 8192  # number of bytes to read from the start of a file to recognize its kind
MAX_PREAMBLE = 2**26  # number of bytes at the start of a file to search for a report's headings
# Reasons why files with these suffixes can't be read, and what to do instead.
UNREADABLE_SUFFIXES = {
    ".qdrep": "a report from nsys before 2021.4; export it with the same version: nsys export --type sqlite",
    ".qdstrm": "a capture that nsys has not finished; import it with the same version: QdstrmImporter -i",
}


@contextmanager
def readable_capture(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield a capture's kind ("json", "sqlite" or "csv") and the path of the file to read.

    The file to read is the capture itself, or a temporary export of the capture.

    Raises:
        TraceError: If the path isn't a file, or the file isn't a readable capture of one of these kinds.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):  # opening a pipe would block
        raise TraceError(f"{path}: not a regular file; {EXPECTED}")
    with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
        export = Path(folder, "capture.sqlite")
        try:
            yield _recognize(path, export)
        except TraceError as error:  # name the original file, not the temporary export
            raise TraceError(str(error).replace(str(export), str(path))) from None


def _recognize(path: Path, export: Path) -> tuple[str, Path]:
    with open_capture(path) as stream:
        head, zipped = stream.read(HEAD_BYTES), isinstance(stream, gzip.GzipFile)
    is_export = head.startswith(b"SQLite format 3\0")
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        return "json", path
    if is_export and not zipped:
        return "sqlite", path
    if is_export:
        with open_capture(path) as stream, export.open("wb") as out:
            shutil.copyfileobj(stream, out)
        return "sqlite", export
    if path.suffix == ".nsys-rep":
        _export(path, export)
        return "sqlite", export
    if path.suffix in UNREADABLE_SUFFIXES:
        raise TraceError(f"{path}: this is {UNREADABLE_SUFFIXES[path.suffix]} {path.name}")
    if _is_text(head):
        with open_capture(path) as stream:
            text = decode_text(stream.read(MAX_PREAMBLE), "replace")
        if is_report(text):
            return "csv", path
    problem = f"not a capture, because it begins with {head[:16]!r}" if head else "an empty file"
    raise TraceError(f"{path}: {problem}; {EXPECTED}")


def _is_text(head: bytes) -> bool:
    """Return whether a file's first bytes are text, even if they end in the middle of a character."""
    return bool(head) and "\0" not in decode_text(head, "ignore")


def _export(path: Path, export: Path) -> None:
    nsys = find_nsys()
    if nsys is None:
        raise TraceError(
            f"{path}: this is an nsys report, but nsys is not installed here; expected the report's export"
            f" (run 'nsys export --type sqlite {path.name}' where nsys is installed)"
        )
    try:
        export_capture(nsys, path, export)
    except (OSError, RuntimeError) as error:
        raise TraceError(
            f"{path}: {' '.join(str(error).split())}; expected a report that nsys can export"
        ) from None
