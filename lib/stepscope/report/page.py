"""Turn a report written in GitHub markdown into one self-contained HTML page."""

import base64
import hashlib
import re
import struct
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from bs4 import BeautifulSoup, Comment
from bs4.element import Tag
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from stepscope.report.interactive import Piece, json_in_html
from stepscope.say.style import DPI

PICTURE_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".svg": "image/svg+xml",
    ".webp": "image/webp",
}
WIDE_COLUMNS = 8  # a table with more columns than this is set smaller
LONG_CELL = 48  # a cell with more characters than this is kept from becoming a thin strip
LONG_TABLE = 20  # a table of so many rows is folded, and can be sorted and filtered
MOST_CONTENTS = 15  # entries of the contents
LARGEST_SVG = 150_000  # bytes: a picture of thousands of marks is smaller as PNG

TEMPLATES = Path(__file__).parent / "templates"

# Markup that would make a browser fetch something, or run something, besides an <img src>.
_LOADERS = (
    "script, style, link, base, meta, iframe, object, embed, video, audio, source, image,"
    ' [srcset], [background], [style*="url("]'
)


def render_page(markdown_text: str, base_folder: Path, title: str | None = None, link_base: str = "",
                pieces: Sequence[Piece] = ()) -> str:
    """Return `markdown_text` as the text of one HTML file that loads nothing else.

    A picture is shown once, as the SVG of its name where there is one beside it; where it comes again there
    is a link to it. An HTML file beside the pictures stands, folded, where it is first linked to. A table of
    LONG_TABLE rows or more is folded.

    Arguments:
        markdown_text: the report, in GitHub's markdown.
        base_folder: the folder that the report's picture paths are relative to.
        title: the page's title; without it, the first heading's text.
        link_base: put before every relative link (pictures and in-page links excepted),
            with one slash between; without it, such links stay as written.
        pieces: the interactive parts; each takes the place of the report's element of its id, and is left
            out where the report has none.

    Raises:
        ValueError: a picture is missing, remote or of a type not in PICTURE_TYPES, or the
            report holds markup that loads something else (a script, a frame, a video).
    """
    html = MarkdownIt("commonmark").enable("table").render(markdown_text)
    soup = BeautifulSoup(html, "html.parser")
    for comment in soup.find_all(string=lambda text: isinstance(text, Comment)):
        comment.extract()  # notes to the report's writers are not for its readers
    if loader := soup.select_one(_LOADERS):
        raise ValueError(f"a self-contained page cannot hold {str(loader)[:120]!r}")
    contents = _name_headings(soup)
    _embed_pictures(soup, Path(base_folder))
    _box_tables(soup)
    _mark_evidence(soup)
    allowed = _embed_pages(soup, Path(base_folder))
    _prefix_links(soup, link_base)
    placed = [piece for piece in pieces if _put(soup, piece)]
    scripts = [(TEMPLATES / name).read_text(encoding="utf-8")
               for name in ("page.js", *(piece.script for piece in placed))]
    # Strict, so that a misspelt name in the template fails instead of printing nothing.
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        scripts=[Markup(script) for script in scripts],
        hashes=[*map(script_hash, scripts), *allowed],
        title=title or (contents[0]["text"] if contents else "Report"),
        contents=_listed(contents),
        body=Markup(str(soup)),
        data=[(f"{piece.place}-data", json_in_html(piece.data)) for piece in placed],
    )


def script_hash(script: str) -> str:
    """A script's name in a Content-Security-Policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode('ascii')}"


def github_slug(heading: str) -> str:
    """Return GitHub's anchor for a heading: lower case, no punctuation, dashes for spaces."""
    # By Unicode category, not \w: GitHub drops superscripts and fractions, which \w keeps.
    kept = ("L", "M", "Nd", "Pc")
    text = heading.strip().lower()
    chars = (char for char in text if char in "- " or unicodedata.category(char).startswith(kept))
    return "".join(chars).replace(" ", "-")


def _name_headings(soup: BeautifulSoup) -> list[dict]:
    """Give every heading its GitHub anchor and a link to itself; return level, anchor and text of each, in
    order.

    Where a name of its own (``<a id>``) stands before a heading, that is what it links to: questions are
    reworded, their names stay.
    """
    contents, taken = [], {tag["id"] for tag in soup.find_all(id=True)}
    for heading in soup.find_all(re.compile("^h[1-6]$")):
        text = " ".join(heading.get_text().split())
        slug = anchor = github_slug(text)
        repeat = 0
        while anchor in taken:
            repeat += 1
            anchor = f"{slug}-{repeat}"
        taken.add(anchor)
        heading["id"] = anchor
        contents.append({"level": int(heading.name[1]), "anchor": anchor, "text": text})
        before = heading.find_previous_sibling()
        place = before and before.name == "p" and not before.get_text(strip=True)
        named = before.find("a", id=True) if place else None
        link = soup.new_tag("a", attrs={"class": "here", "href": f"#{named['id'] if named else anchor}",
                                        "aria-label": f"Link to “{text}”"})
        link.string = "#"
        heading.append(link)
    return contents


def _listed(contents: list[dict]) -> list[dict]:
    """Of the headings those that the contents list: down to the deepest level at which there are at most
    MOST_CONTENTS, and the second level in any case."""
    levels = [[one for one in contents if one["level"] <= level] for level in (6, 5, 4, 3, 2)]
    return next((some for some in levels if len(some) <= MOST_CONTENTS), levels[-1][:MOST_CONTENTS])


def _embed_pictures(soup: BeautifulSoup, base_folder: Path) -> None:
    """Put each picture into the page as a data: URI; make one alone in its paragraph a figure, and a link
    where the same figure stands further up."""
    places: dict[str, str] = {}
    for img in soup.find_all("img"):
        source, words = img.get("src", ""), img.get("alt", "")
        paragraph = img.find_parent("p")
        alone = paragraph and not paragraph.get_text(strip=True) and len(paragraph.find_all("img")) == 1
        if alone and source in places:
            paragraph["class"] = "again"
            link = soup.new_tag("a", attrs={"href": f"#{places[source]}"})
            link.string = f"The picture further up: {words}" if words else "The picture further up."
            img.replace_with(link)
            continue
        img["src"] = _data_uri(source, base_folder)
        if not alone:
            continue
        places[source] = f"figure-{github_slug(Path(source[:200]).stem) or len(places)}"
        paragraph.name, paragraph["id"] = "figure", places[source]
        if width := _natural_width(img["src"]):
            img["style"] = f"--width: {width}px"
        box = {"class": "picture", "tabindex": "0", "role": "group", "aria-label": "Picture"}
        img.wrap(soup.new_tag("div", attrs=box))
        if words:
            caption = soup.new_tag("figcaption")
            caption.string = words
            paragraph.append(caption)


def _natural_width(uri: str) -> int | None:
    """How wide a picture would be on paper, in CSS pixels: an SVG's own width, or a PNG's at our DPI."""
    if uri.startswith("data:image/png"):
        start = base64.b64decode(uri.split(",")[1][:32])  # of a PNG, which has its size
        return round(struct.unpack(">I", start[16:20])[0] * 96 / DPI)
    found = re.search(r"width='([\d.]+)pt'", unquote(uri[:1000]))
    return round(float(found[1]) * 96 / 72) if found else None


def _data_uri(source: str, base_folder: Path) -> str:
    """Return the picture at `source`, a path relative to `base_folder`, as a data: URI.

    Raises:
        ValueError: `source` is a web address, of a type not in PICTURE_TYPES, or no file.
    """
    if source.startswith("data:image/"):
        return source
    address = urlsplit(source)
    if address.scheme or address.netloc:
        raise ValueError(f"picture {source!r} is not a file under {base_folder}")
    path = base_folder / unquote(address.path)
    kind = PICTURE_TYPES.get(path.suffix.lower())
    if kind is None:
        allowed = ", ".join(PICTURE_TYPES)
        raise ValueError(f"picture {source!r} ({path}) is not of an allowed type: {allowed}")
    if not path.is_file():
        raise ValueError(f"picture {source!r} not found: looked for {path}")
    drawing = path.with_suffix(".svg")
    if kind == "image/png" and drawing.is_file() and drawing.stat().st_size <= LARGEST_SVG:
        return _svg_uri(drawing.read_text(encoding="utf-8"))
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


def _svg_uri(text: str) -> str:
    """A drawing as a data: URI that is not much longer than it is."""
    tags = re.sub(r"<[^>']*>", lambda tag: tag[0].replace('"', "'"), text)  # they would be &quot; in the page
    return "data:image/svg+xml;charset=utf-8," + quote(tags.strip(), safe=" '/:;,.=()-_!*@$+?[]{}|~^`")


def _box_tables(soup: BeautifulSoup) -> None:
    """Wrap each table in a box that scrolls by itself, reachable by keyboard and named by its caption or
    section; fold the long ones."""
    names: dict[str, int] = {}
    for number, table in enumerate(soup.find_all("table"), 1):
        columns = max((len(row.find_all(["th", "td"])) for row in table.find_all("tr")), default=1)
        caption, heading = _caption(table), table.find_previous(re.compile("^h[1-6]$"))
        section = heading.find(string=True) if heading else ""
        name = f"Table: {caption.get_text() if caption else section or ''}".strip(" :")
        names[name] = names.get(name, 0) + 1
        kind = "table wide" if columns > WIDE_COLUMNS else "table"
        box = soup.new_tag("div", attrs={"class": kind, "style": f"--columns: {columns}"})
        box.attrs |= {"tabindex": "0", "role": "region",
                      "aria-label": name if names[name] == 1 else f"{name} ({names[name]})"}
        table.wrap(box)
        for cell in table.find_all("td"):
            if len(cell.get_text()) > LONG_CELL:
                cell["class"] = "long"
        for head in table.find_all("th"):
            if not head.get_text(strip=True):
                head.name = "td"  # of a column that needs no name
        rows = len(table.select("tbody tr"))
        if rows >= LONG_TABLE:
            _fold(soup, box, table, f"table-{number}", caption, rows)
        elif columns <= WIDE_COLUMNS and table.select("td.long"):
            _of_sentences(box, table)


def _of_sentences(box: Tag, table: Tag) -> None:
    """Mark a table that holds sentences: where the window is narrow, its cells stand below each other, each
    behind its column's name."""
    box["class"] = "table sentences"
    names = [head.get_text(" ", strip=True) for head in table.select("thead :is(th, td)")]
    if sum(map(bool, names)) < 2:
        names = []  # the head of one column alone is the table's, not a name of its cells
    for row in table.select("tbody tr"):
        for name, cell in zip(names, row.find_all(["th", "td"])):
            if name:
                cell["data-name"] = name


def _caption(table: Tag) -> Tag | None:
    """The paragraph before a table, where all of it is emphasised."""
    before = table.find_previous_sibling()
    whole = before and before.name == "p" and [child for child in before.children if str(child).strip()]
    return before if whole and len(whole) == 1 and whole[0].name == "em" else None


def _fold(soup: BeautifulSoup, box: Tag, table: Tag, name: str, caption: Tag | None, rows: int) -> None:
    """Fold a long table under its caption and number of rows, with what filters and sorts it."""
    table["id"], table["class"] = name, "long-table"
    outer = box.find_parent("details")
    study = outer and "study" in (outer.get("class") or [])  # which has more than its one table
    if outer and outer.summary and not study and len(outer.find_all("table")) == 1:
        details = outer
        if not re.search(r"\d rows", details.summary.get_text()):
            details.summary.append(f" ({rows} rows)")
    else:
        details = soup.new_tag("details")
        box.insert_before(details)
        summary = soup.new_tag("summary")
        words = caption.get_text().rstrip(".") if caption else "Table"
        summary.append(f"{words} ({rows} rows)")
        details.append(summary)
        details.append(box.extract())
        if caption:
            caption.decompose()
    line = soup.new_tag("p", attrs={"class": "filter"})
    label = soup.new_tag("label", attrs={"for": f"{name}-filter"})
    label.string = "Rows with"
    field = soup.new_tag("input", attrs={"id": f"{name}-filter", "type": "search", "autocomplete": "off"})
    count = soup.new_tag("output", attrs={"id": f"{name}-count", "for": f"{name}-filter"})
    count.string = f"{rows} rows"
    line.extend([label, field, count])
    box.insert_before(line)
    for head in table.select("thead th"):
        button = soup.new_tag("button", attrs={"type": "button"})
        button.extend([child.extract() for child in list(head.children)])
        head.append(button)


def _embed_pages(soup: BeautifulSoup, base_folder: Path) -> list[str]:
    """Put each page in ``figures/`` into a frame, folded, behind the paragraph that first links to it; the
    scripts that the pages allow, by their names in a Content-Security-Policy.

    A frame made from text is under its own page's policy and this one's.
    """
    allowed: list[str] = []
    pages: set[Path] = set()
    for link in soup.select("p a[href]"):
        address = urlsplit(link["href"])
        path = base_folder / unquote(address.path)
        if (address.scheme or address.netloc or path in pages or path.suffix != ".html"
                or path.parent.name != "figures" or not path.is_file()):
            continue
        pages.add(path)
        text = path.read_text(encoding="utf-8")
        policy = BeautifulSoup(text, "html.parser").select_one('meta[http-equiv="Content-Security-Policy"]')
        allowed += re.findall(r"'(sha256-[^']+)'", policy["content"] if policy else "")
        details, summary = soup.new_tag("details", attrs={"class": "embedded"}), soup.new_tag("summary")
        summary.string = link.get_text()
        frame = soup.new_tag("iframe", attrs={"title": link.get_text(), "sandbox": "allow-scripts",
                                              "srcdoc": text})
        details.extend([summary, frame])
        link.find_parent("p").insert_after(details)
    return allowed


def _put(soup: BeautifulSoup, piece: Piece) -> bool:
    """Put an interactive part in its place; whether the report has one."""
    place = soup.find(id=piece.place)
    if place:
        place.replace_with(BeautifulSoup(piece.html, "html.parser"))
    return place is not None


def _mark_evidence(soup: BeautifulSoup) -> None:
    """Mark the lists of runs that answers rest on, which are not printed."""
    for details in soup.find_all("details"):
        if details.summary and details.summary.get_text().startswith("Evidence"):
            details["class"] = "evidence"


def _prefix_links(soup: BeautifulSoup, link_base: str) -> None:
    """Put `link_base` before every link that is relative to the report's folder."""
    for link in soup.find_all("a", href=True) if link_base else []:
        address = urlsplit(link["href"])
        if address.path and not (address.scheme or address.netloc or address.path.startswith("/")):
            link["href"] = f"{link_base.rstrip('/')}/{link['href']}"
