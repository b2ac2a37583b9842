"""What kind of capture a file is, and one that can be read: itself, or made from it."""
import gzip
import os
import select
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepscope.traces.attribution import TraceError
from stepscope.traces.nsys_csv import report_of
from stepscope.traces.nsys_tool import export_capture, find_nsys
from stepscope.traces.torch_trace import opened

EXPECTED = ("expected nsys's .sqlite or .nsys-rep, torch.profiler's .json, or a .csv of nsys stats, also"
            " gzipped")
FIRST_S, NEXT_S = 10, 60  # a pipe is waited for so long
HEAD = 8192  # bytes: a report of nsys stats has its headings within them


@contextmanager
def readable(path: Path) -> Iterator[tuple[str, Path]]:
    """What a file is by its first bytes ("json", "sqlite", "csv"), and one that can be read: itself, or made
    from it.

    Raises:
        TraceError: it is none of these, or a pipe into which nothing is written.
    """
    with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
        file = _regular(path, Path(folder, f"piped{path.suffix}"))
        try:
            yield _recognized(path, file, Path(folder, "capture.sqlite"))
        except TraceError as error:  # what is wrong with the one that was made
            if str(file) == str(path) and folder not in str(error):
                raise
            text = str(error).replace(str(Path(folder, "capture.sqlite")), str(path))
            raise TraceError(text.replace(str(file), str(path))) from None


def _recognized(path: Path, file: Path, made: Path) -> tuple[str, Path]:
    with opened(file) as stream:
        head, zipped = stream.read(HEAD), isinstance(stream, gzip.GzipFile)
    is_export = head.startswith(b"SQLite format 3\0")
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        return "json", file
    if is_export and not zipped:
        return "sqlite", file
    if is_export:
        with opened(file) as stream, made.open("wb") as out:
            shutil.copyfileobj(stream, out)
        return "sqlite", made
    if path.suffix == ".nsys-rep":
        _export(file, made)
        return "sqlite", made
    text = head.decode("utf-8-sig", "replace")
    if any(map(report_of, text.splitlines())) or "does not contain" in text:
        return "csv", file
    what = f"no capture: it begins with {head[:16]!r}" if head else "empty"
    raise TraceError(f"{path}: is {what}, {EXPECTED}")


def _regular(path: Path, copy: Path) -> Path:
    """The file, or of a pipe ("<(zcat FILE)", a FIFO) a copy of what it gives."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}), expected a whole capture") from None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # to open a folder says what it is
        return path
    if not stat.S_ISFIFO(mode):
        raise TraceError(f"{path}: is neither a file nor a pipe, {EXPECTED}")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without waiting for who writes
    try:
        with copy.open("wb") as out:
            while chunk := _next(path, descriptor, FIRST_S if out.tell() == 0 else NEXT_S):
                out.write(chunk)
    finally:
        os.close(descriptor)
    return copy


def _next(path: Path, descriptor: int, seconds: float) -> bytes:
    """What a pipe gives next; nothing at its end."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(seconds * 1000):
        raise TraceError(f"{path}: is a pipe that gave nothing for {seconds} s, expected a capture")
    return os.read(descriptor, 1 << 20)


def _export(path: Path, made: Path) -> None:
    nsys = find_nsys()
    if nsys is None:
        raise TraceError(f"{path}: is nsys's own report, and nsys is not installed here; expected its export:"
                         f" run 'nsys export --type sqlite {path.name}' where nsys is")
    try:
        export_capture(nsys, path, made)
    except (OSError, RuntimeError) as error:
        raise TraceError(f"{path}: {' '.join(str(error).split())}, expected a report that nsys can"
                         " export") from None
