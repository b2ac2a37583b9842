"""One HTML file of the report: the markdown through markdown-it, its HTML off, into one template.

Pictures are inside, evidence is folded, and its policy lets nothing run or load.
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
SAFE = "/ :;=,'()&?!@*+$-._~"  # of a picture's text what stands in its address as it is
# A chapter's fold begins and ends in paragraphs of their own. In no other text these are: escape() marks "<".
FOLD, FOLD_END = re.compile(r"<details><summary>(.+)</summary>"), "</details>"


@dataclass(frozen=True)
class Section:
    """A page beside the writeup, folded here: its path in the report's folder, and its markdown."""

    path: str
    text: str

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", self.path.removesuffix(".md"))


def page(writeup: str, sections: list[Section], figures: dict[str, str], foot: str = "") -> str:
    """The whole report as HTML.

    Args:
        writeup: the main text, markdown.
        sections: what stands folded behind it.
        figures: SVG by name, for images "figures/<name>.svg".
        foot: what stands below all of it, markdown.
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
        # A browser opens a fold for a link to what is within it, not for one to the fold itself.
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
    """The page's heading, if it begins with one, and the rest."""
    found = re.match(r"<h1[^>]*>.*?</h1>", written)
    return (found[0], written[found.end() :]) if found else ("", written)


def _contents(written: str) -> list[str]:
    """A list's item for each chapter, with its parts listed within."""
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
    """Chapters and their parts with a link to themselves behind the heading."""
    return re.sub(
        r'(<h([23]) id="([^"]+)">)(.*?)</h\2>',
        lambda found: (
            f'{found[1]}{found[4]} <a class="here" href="#{found[3]}" aria-label="Link to: {_plain(found[4])}">'
            f"#</a></h{found[2]}>"
        ),
        written,
    )


def _fold(paragraph: list[Token]) -> None:
    """Make a paragraph that begins or ends a fold do so."""
    opened, inline, closed = paragraph
    if begin := FOLD.fullmatch(inline.content):
        title = html.escape(html.unescape(begin[1]))  # GitHub's summary is HTML, which writes "&lt;" for "<"
        html_block = f"<details><summary>{title}</summary>\n<div>"
    elif inline.content == FOLD_END:
        html_block = "</div></details>\n"
    else:
        return
    opened.type, opened.content = "html_block", html_block
    inline.children, closed.hidden = [], True


def anchor_of(heading: str) -> str:
    """Return a heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-")


def _plain(written: str) -> str:
    return re.sub(r"<[^>]+>", "", written)


class _Writer:
    """Markdown as HTML. Raw HTML is text, links lead within the page or to https, images are the figures."""

    def __init__(self, figures: dict[str, str], anchors: dict[str, str]) -> None:
        self.figures, self.anchors = figures, anchors
        self.markdown = MarkdownIt("commonmark", {"html": False, "typographer": False}).enable("table")

    def html(self, text: str, section: Section | None = None) -> str:
        """The writeup, or the text of a section, whose headings' anchors begin with its own."""
        prefix = f"{section.anchor}-" if section else ""
        folder = posixpath.dirname(section.path) if section else ""
        tokens = self.markdown.parse(text)
        for place, token in enumerate(tokens):
            if token.type == "paragraph_open" and not token.level:
                _fold(tokens[place : place + 3])
            if token.type == "heading_open":
                words = anchor_of(tokens[place + 1].content)
                token.attrSet("id", f"{prefix}{words}" if token.tag != "h1" or prefix else "top")
            if align := token.attrGet("style"):  # the policy allows no style on an element
                token.attrs = {"class": "right" if "right" in str(align) else "left"}
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
            name = re.fullmatch(r"(?:\.\./)?figures/(\w+)\.svg", str(token.attrGet("src")))
            drawn = self.figures.get(name[1], "") if name else ""
            points = [re.search(rf'<svg[^>]* {side}="([\d.]+)pt"', drawn) for side in ("width", "height")]
            width, height = (round(float(found[1]) * 4 / 3) if found else 0 for found in points)
            token.attrs = {
                "src": f"data:image/svg+xml,{quote(drawn.strip(), safe=SAFE)}",
                "alt": "",
                "width": width,
                "height": height,
            }
        return token

    def _href(self, link: str, folder: str) -> str:
        """A link of a text in this folder as one of the page, which lies above it."""
        if link.startswith(("https://", "#")):
            return link
        path, _, anchor = link.partition("#")
        if not re.fullmatch(r"(?!/)[\w./+%-]+", path):
            return "#"
        path = posixpath.normpath(posixpath.join(folder, path))
        if place := self.anchors.get(path):
            return f"#{place if not anchor else anchor if place == 'top' else f'{place}-{anchor}'}"
        return f"{path}#{anchor}" if re.fullmatch(r"[\w-]+", anchor) else path
