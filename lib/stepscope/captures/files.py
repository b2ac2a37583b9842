"""What kind of capture a file is, and one that can be read: itself, or made from it."""

import gzip
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepscope.traces.attribution import TraceError
from stepscope.traces.nsys_csv import decoded, is_report
from stepscope.traces.nsys_tool import export_capture, find_nsys
from stepscope.traces.torch_trace import opened

EXPECTED = (
    "expected nsys's .sqlite or .nsys-rep, torch.profiler's .json, or a .csv of nsys stats, also gzipped"
)
HEAD = 8192  # bytes, by which a file is recognized
MAX_PREAMBLE = 2**26  # bytes of other text before the headings of a report
# By a name's ending, why a file is no capture that can be read, and what to do.
ENDINGS = {
    ".qdrep": "a report of nsys before 2021.4; export it with that nsys: nsys export --type sqlite",
    ".qdstrm": "a capture that nsys has not finished; import it with that nsys: QdstrmImporter -i",
}


@contextmanager
def readable(path: Path) -> Iterator[tuple[str, Path]]:
    """What a file is by its first bytes ("json", "sqlite", "csv"), and one that can be read: itself, or made
    from it.

    Raises:
        TraceError: it is none of these, or no file.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):  # to open a pipe would wait for who writes
        raise TraceError(f"{path}: is no file, {EXPECTED}")
    with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
        made = Path(folder, "capture.sqlite")
        try:
            yield _recognized(path, made)
        except TraceError as error:  # what is wrong with the one that was made
            raise TraceError(str(error).replace(str(made), str(path))) from None


def _recognized(path: Path, made: Path) -> tuple[str, Path]:
    with opened(path) as stream:
        head, zipped = stream.read(HEAD), isinstance(stream, gzip.GzipFile)
    is_export = head.startswith(b"SQLite format 3\0")
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        return "json", path
    if is_export and not zipped:
        return "sqlite", path
    if is_export:
        with opened(path) as stream, made.open("wb") as out:
            shutil.copyfileobj(stream, out)
        return "sqlite", made
    if path.suffix == ".nsys-rep":
        _export(path, made)
        return "sqlite", made
    if path.suffix in ENDINGS:
        raise TraceError(f"{path}: is {ENDINGS[path.suffix]} {path.name}")
    if _is_text(head):
        with opened(path) as stream:
            text = decoded(stream.read(MAX_PREAMBLE), "replace")
        if is_report(text):
            return "csv", path
    what = f"no capture: it begins with {head[:16]!r}" if head else "empty"
    raise TraceError(f"{path}: is {what}, {EXPECTED}")


def _is_text(head: bytes) -> bool:
    """Whether a file's first bytes are text; a character may be cut at their end."""
    return bool(head) and "\0" not in decoded(head, "ignore")


def _export(path: Path, made: Path) -> None:
    nsys = find_nsys()
    if nsys is None:
        raise TraceError(
            f"{path}: is nsys's own report, and nsys is not installed here; expected its export:"
            f" run 'nsys export --type sqlite {path.name}' where nsys is"
        )
    try:
        export_capture(nsys, path, made)
    except (OSError, RuntimeError) as error:
        raise TraceError(
            f"{path}: {' '.join(str(error).split())}, expected a report that nsys can export"
        ) from None
