"""Build the report as one HTML file: markdown-it renders the markdown into a template, and escapes raw HTML.

Images are embedded, pages of evidence are folded, and the content security policy blocks scripts and external
resources.
"""

import base64
import hashlib
import html
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path
from string import Template
from urllib.parse import quote

from markdown_it import MarkdownIt
from markdown_it.token import Token

TEMPLATE = Path(__file__).with_name("page.html")
STYLE = Path(__file__).with_name("page.css")
# Cells that CSS wraps differently: numbers, such as "19.8 ± 0.161", texts with a long word, and short texts.
KINDS = {
    "number": re.compile(r"[-–]?[\d.,]+\S?( (±|to) [\d.,]+)?"),
    "long": re.compile(r".*\S{25}.*"),
    "short": re.compile(r".{,26}"),
}
SAFE = "/ :;=,'()&?!@*+$-._~"  # characters in an image's text that don't need escaping in a URL
# The markers that begin and end a fold; each is a separate paragraph. Text from records can't contain a marker,
# because escape() escapes "<".
FOLD, FOLD_END = re.compile(r"<details><summary>(.+)</summary>"), "</details>"


@dataclass(frozen=True)
class Section:
    """A separate page that is folded into the report, with its path in the report's folder and its markdown."""

    path: str
    text: str

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", self.path.removesuffix(".md"))


def page(writeup: str, sections: list[Section], figures: dict[str, str], foot: str = "") -> str:
    """Return the report as one HTML page.

    Args:
        writeup: the main text, in markdown.
        sections: the pages that are folded below the main text.
        figures: SVG texts by name, for images "figures/<name>.svg".
        foot: the page's footer, in markdown.
    """
    anchors = {section.path: section.anchor for section in sections} | {"writeup.md": "top"}
    writer = _Writer(figures, anchors)
    written = writer.html(writeup)
    heading, body = _parted(written)
    style = STYLE.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    folded, evidence = [], []
    contents = _contents(written)
    for section in sections:
        first, _, rest = section.text.partition("\n")
        summary = html.escape(first.lstrip("# "))
        place = evidence if "/" in section.path else contents
        place.append(f'<li><a href="#{section.anchor}">{summary}</a></li>')
        # Browsers open a fold for a link to an element inside it, but not for a link to the fold itself.
        folded.append(
            f'<details><summary>{summary}</summary>\n<div id="{section.anchor}">\n'
            f"{_linked(writer.html(rest, section))}</div></details>"
        )
    if evidence:
        contents.append(f'<li><a href="#evidence">Evidence</a><ul>{"".join(evidence)}</ul></li>')
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=_plain(heading) or "Report",
        style=style,
        digest=digest,
        heading=heading,
        contents="\n".join(contents),
        body=_linked(body),
        folded="\n".join(folded),
        foot=writer.html(foot),
    )


def _parted(written: str) -> tuple[str, str]:
    """Split the page into its heading ("" if it has none) and the rest."""
    parts = re.match(r"<h1[^>]*>.*?</h1>", written)
    return (parts[0], written[parts.end() :]) if parts else ("", written)


def _contents(written: str) -> list[str]:
    """Return an HTML list item for each chapter, with the chapter's parts nested inside."""
    chapters: list[tuple[str, list[str]]] = []
    for level, anchor, words in re.findall(r'<h([23]) id="([^"]+)">(.*?)</h[23]>', written):
        link = f'<a href="#{anchor}">{_plain(words)}</a>'
        if level == "2":
            chapters.append((link, []))
        elif chapters:
            chapters[-1][1].append(f"<li>{link}</li>")
    return [
        f"<li>{link}<ul>{''.join(parts)}</ul></li>" if parts else f"<li>{link}</li>"
        for link, parts in chapters
    ]


def _linked(written: str) -> str:
    """Append to each heading of a chapter or part a link to the heading itself."""
    return re.sub(
        r'(<h([23]) id="([^"]+)">)(.*?)</h\2>',
        lambda found: (
            f'{found[1]}{found[4]} <a class="here" href="#{found[3]}" aria-label="Link to: {_plain(found[4])}">'
            f"#</a></h{found[2]}>"
        ),
        written,
    )


def _fold(paragraph: list[Token]) -> None:
    """Convert a paragraph that consists of a fold marker to HTML; leave other paragraphs unchanged."""
    opened, inline, closed = paragraph
    if begin := FOLD.fullmatch(inline.content):
        title = html.escape(html.unescape(begin[1]))  # GitHub reads the title as HTML, with "<" as "&lt;"
        html_block = f"<details><summary>{title}</summary>\n<div>"
    elif inline.content == FOLD_END:
        html_block = "</div></details>\n"
    else:
        return
    opened.type, opened.content = "html_block", html_block
    inline.children, closed.hidden = [], True


def anchor_of(heading: str) -> str:
    """Return a heading's anchor, formed like GitHub's."""
    return re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-")


def _plain(written: str) -> str:
    return re.sub(r"<[^>]+>", "", written)


class _Writer:
    """A renderer that converts markdown to HTML.

    Raw HTML becomes text, links lead to anchors in the page or to https addresses, and images are our figures.
    """

    def __init__(self, figures: dict[str, str], anchors: dict[str, str]) -> None:
        self.figures, self.anchors = figures, anchors
        self.markdown = MarkdownIt("commonmark", {"html": False, "typographer": False}).enable("table")

    def html(self, text: str, section: Section | None = None) -> str:
        """Return a text's HTML; if a section is given, prefix heading anchors with the section's anchor."""
        prefix = f"{section.anchor}-" if section else ""
        folder = posixpath.dirname(section.path) if section else ""
        tokens = self.markdown.parse(text)
        for place, token in enumerate(tokens):
            if token.type == "paragraph_open" and not token.level:
                _fold(tokens[place : place + 3])
            if token.type == "heading_open":
                words = anchor_of(tokens[place + 1].content)
                token.attrSet("id", f"{prefix}{words}" if token.tag != "h1" or prefix else "top")
            if align := token.attrGet("style"):  # the content security policy blocks inline styles
                cell = tokens[place + 1].content
                kind = next((f" {kind}" for kind, cells in KINDS.items() if cells.fullmatch(cell)), "")
                token.attrs = {"class": ("right" if "right" in str(align) else "left") + kind}
            if token.children:
                token.children = [self._inline(child, folder) for child in token.children]
        made = str(self.markdown.renderer.render(tokens, self.markdown.options, {}))
        made = re.sub(r"<p>(<img [^>]*>)</p>", r"<figure>\1</figure>", made)
        made = made.replace("<th ", '<th scope="col" ').replace("<th>", '<th scope="col">')
        made = made.replace("<pre>", '<pre tabindex="0">')
        table = '<div class="scroll" role="group" aria-label="table" tabindex="0"><table>'
        return made.replace("<table>", table).replace("</table>", "</table></div>")

    def _inline(self, token: Token, folder: str) -> Token:
        if token.type == "link_open":
            token.attrs = {"href": self._href(str(token.attrGet("href") or ""), folder)}
        elif token.type == "image":
            name = re.fullmatch(r"(?:\.\./)?figures/([\w-]+)\.svg", str(token.attrGet("src")))
            drawn = self.figures.get(name[1], "") if name else ""
            points = [re.search(rf'<svg[^>]* {side}="([\d.]+)pt"', drawn) for side in ("width", "height")]
            width, height = (round(float(match[1]) * 4 / 3) if match else 0 for match in points)
            token.attrs = {
                "src": f"data:image/svg+xml,{quote(drawn.strip(), safe=SAFE)}",
                "alt": "",
                "width": width,
                "height": height,
            }
        return token

    def _href(self, link: str, folder: str) -> str:
        """Convert a link in the text of a page in ``folder`` to a link in the HTML page."""
        if link.startswith(("https://", "#")):
            return link
        path, _, anchor = link.partition("#")
        if not re.fullmatch(r"(?!/)[\w./+%-]+", path):
            return "#"
        path = posixpath.normpath(posixpath.join(folder, path))
        if place := self.anchors.get(path):
            return f"#{place if not anchor else anchor if place == 'top' else f'{place}-{anchor}'}"
        return f"{path}#{anchor}" if re.fullmatch(r"[\w-]+", anchor) else path
