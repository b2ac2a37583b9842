"""Turn a report written in GitHub markdown into one self-contained HTML page."""

import base64
import hashlib
import re
import struct
import unicodedata
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup, Comment
from bs4.element import Tag
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

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

# Markup that would make a browser fetch something, or run something, besides an <img src>.
_LOADERS = (
    "script, style, link, base, meta, iframe, object, embed, video, audio, source, image,"
    ' [srcset], [background], [style*="url("]'
)


def render_page(markdown_text: str, base_folder: Path, title: str | None = None, link_base: str = "") -> str:
    """Return `markdown_text` as the text of one HTML file that loads nothing else.

    Arguments:
        markdown_text: the report, in GitHub's markdown.
        base_folder: the folder that the report's picture paths are relative to.
        title: the page's title; without it, the first heading's text.
        link_base: put before every relative link (pictures and in-page links excepted),
            with one slash between; without it, such links stay as written.

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
    _prefix_links(soup, link_base)
    # Strict, so that a misspelt name in the template fails instead of printing nothing.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (Path(__file__).parent / "templates" / "page.js").read_text(encoding="utf-8")
    return environment.get_template("page.html.j2").render(
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
        title=title or (contents[0]["text"] if contents else "Report"),
        contents=contents,
        body=Markup(str(soup)),
    )


def github_slug(heading: str) -> str:
    """Return GitHub's anchor for a heading: lower case, no punctuation, dashes for spaces."""
    # By Unicode category, not \w: GitHub drops superscripts and fractions, which \w keeps.
    kept = ("L", "M", "Nd", "Pc")
    text = heading.strip().lower()
    chars = (char for char in text if char in "- " or unicodedata.category(char).startswith(kept))
    return "".join(chars).replace(" ", "-")


def _name_headings(soup: BeautifulSoup) -> list[dict]:
    """Give every heading its GitHub anchor; return level, anchor and text of each, in order."""
    contents, taken = [], set()
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
    return contents


def _embed_pictures(soup: BeautifulSoup, base_folder: Path) -> None:
    """Put each picture into the page as a data: URI, once; make one alone in its paragraph a figure."""
    pictures = soup.find_all("img")
    figures = [img for img in pictures if (p := img.find_parent("p")) and not p.get_text(strip=True)
               and len(p.find_all("img")) == 1]
    times = Counter(img.get("src", "") for img in figures)
    places: dict[str, str] = {}
    for img in pictures:
        source = img.get("src", "")
        img["src"] = uri = _data_uri(source, base_folder)
        if any(img is figure for figure in figures):
            figure, words = img.find_parent("p"), img.get("alt", "")
            figure.name = "figure"
            if words:
                caption = soup.new_tag("figcaption")
                caption.string = words
                figure.append(caption)
            if times[source] > 1 and uri.startswith("data:image/png"):
                img.replace_with(_shared_picture(soup, uri, words, places))


def _shared_picture(soup: BeautifulSoup, uri: str, words: str, places: dict[str, str]) -> Tag:
    """A PNG that stands in the page more than once: its data where it comes first, a reference to them
    afterwards.

    Args:
        places: the ids of those that are there already, by their data.
    """
    first_chunk = base64.b64decode(uri.split(",")[1][:32])  # of a PNG, which has its size
    width, height = struct.unpack(">II", first_chunk[16:24])
    svg = soup.new_tag("svg", attrs={"viewBox": f"0 0 {width} {height}", "role": "img", "aria-label": words})
    if uri in places:
        svg.append(soup.new_tag("use", attrs={"href": f"#{places[uri]}"}))
    else:
        places[uri] = f"picture-{len(places) + 1}"
        svg.append(soup.new_tag("image", attrs={"id": places[uri], "width": width, "height": height,
                                                "href": uri}))
    return svg


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
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


def _box_tables(soup: BeautifulSoup) -> None:
    """Wrap each table in a box that scrolls by itself, reachable by keyboard."""
    for table in soup.find_all("table"):
        columns = max((len(row.find_all(["th", "td"])) for row in table.find_all("tr")), default=1)
        kind = "table wide" if columns > WIDE_COLUMNS else "table"
        box = soup.new_tag("div", attrs={"class": kind, "style": f"--columns: {columns}"})
        box.attrs |= {"tabindex": "0", "role": "region", "aria-label": "Table"}
        table.wrap(box)
        for cell in table.find_all("td"):
            if len(cell.get_text()) > LONG_CELL:
                cell["class"] = "long"


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
