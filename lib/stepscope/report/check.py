"""Is a report what its records say? Text is compared by the byte, figures by what they show."""
import re
import tempfile
from pathlib import Path

from matplotlib.testing.compare import compare_images
from matplotlib.testing.exceptions import ImageComparisonFailure

from stepscope import StepscopeError
from stepscope.report.load import Data, load_data
from stepscope.report.readme import STORY_BEGIN
from stepscope.report.render import Report, compose, draw_figures, page_of, texts
from stepscope.runs.record import check_notebook
from stepscope.runs.store import Store

PIXEL_TOLERANCE = 8  # root mean square over 255: other font rasterisers pass, other data do not
DRAWN_TOLERANCE = 0.05  # points, of a drawing's coordinates


class StaleReport(StepscopeError, RuntimeError):
    """The committed report is not what the records say; the text names the first difference."""


def check(store: Store, folder: Path) -> None:
    """Compare the report in ``folder`` with what the records say now.

    Raises:
        StaleReport: the writeup or its page is not there or differs by a byte, or a figure shows something
        else.
        RecordError: a record cannot be used, or a table differs from the one its record was written with.
    """
    for path in (folder / "writeup.md", folder / "writeup.html"):
        if not path.exists():
            out = "" if folder.resolve() == store.root.resolve() else f" --out {folder}"
            command = f"stepscope render --runs {store.root}{out}"
            raise StaleReport(f"{path}: not there; render it first ({command})")
    data = load_data(store)
    _usable(store, data)  # before the pictures are drawn
    with tempfile.TemporaryDirectory() as temporary:
        report = compose(data, draw_figures(data, Path(temporary)))
        compare(store, folder, report, Path(temporary))


def compare(store: Store, folder: Path, report: Report, drawn: Path) -> None:
    """Compare the report in ``folder`` with one that was composed of the records now.

    Args:
        drawn: the folder of its pictures.

    Raises:
        As :func:`check`.
    """
    _usable(store, report.data)
    for picture in sorted(drawn.glob("*.png")):
        _same_picture(folder / "figures" / picture.name, picture)
        drawing = picture.with_suffix(".svg")
        _same_drawing(folder / "figures" / drawing.name, drawing)
    expected = texts(store, report, folder)
    readme = folder / "README.md"
    if readme in expected and STORY_BEGIN not in expected[readme]:
        raise StaleReport(f"{readme}: has no line {STORY_BEGIN.strip()!r}, expected the table of times behind"
                          " it")
    for path, text in expected.items():
        _same_text(path, text)
    _same_text(folder / "writeup.html", page_of(store, report, folder, folder))


def _usable(store: Store, data: Data) -> None:
    if data.errors:
        raise data.errors[0]
    for record in data.records:
        if record.done:
            check_notebook(store.root, record)


def _same_picture(committed: Path, drawn: Path) -> None:
    if not committed.exists():
        raise StaleReport(f"{committed}: missing; `make reference` draws it")
    try:
        difference = compare_images(str(committed), str(drawn), PIXEL_TOLERANCE)
    except ImageComparisonFailure as sizes:  # pictures of different sizes
        difference = str(sizes)
    if difference:
        what = " ".join(str(difference).split())
        raise StaleReport(f"{committed}: shows something else than the records say ({what})")


def _same_drawing(committed: Path, drawn: Path) -> None:
    """An SVG is the same where all but its numbers is, and they are nearly (another machine's last digit)."""
    if not committed.exists():
        raise StaleReport(f"{committed}: missing; `make reference` draws it")
    texts = (path.read_text(encoding="utf-8") for path in (committed, drawn))
    if not _nearly(*(re.sub(r"\b[a-z][0-9a-f]{10}\b", "", text) for text in texts)):  # without its parts' ids
        raise StaleReport(f"{committed}: shows something else than the records say")


def _nearly(old: str, new: str) -> bool:
    """Whether all words of two drawings are the same, and the numbers within their tags nearly."""
    pieces = [re.split(r"(<[^>]*>)", text) for text in (old, new)]
    if len(pieces[0]) != len(pieces[1]) or pieces[0][::2] != pieces[1][::2]:
        return False
    parts = [re.split(r"(-?\d+(?:\.\d+)?)", "".join(tags[1::2])) for tags in pieces]
    return parts[0][::2] == parts[1][::2] and all(
        abs(float(a) - float(b)) <= DRAWN_TOLERANCE for a, b in zip(parts[0][1::2], parts[1][1::2]))


def _same_text(path: Path, expected: str) -> None:
    found = path.read_text(encoding="utf-8") if path.exists() else ""
    if found == expected:
        return
    lines = zip([*found.splitlines(), "(end)"], [*expected.splitlines(), "(end)"])
    number, (old, new) = next((n, pair) for n, pair in enumerate(lines, start=1) if pair[0] != pair[1])
    raise StaleReport(f"{path}, line {number}: is {old[:120]!r}, but the records say {new[:120]!r}")
