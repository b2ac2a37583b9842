"""Test the markup of the HTML page; if a browser is installed, also test the page's layout."""

import html
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from browser import DESKTOP, PHONE, browser, shown, violations
from stepscope import PROJECT, __version__
from stepscope.report import machine
from stepscope.report.load import read
from stepscope.report.output import write
from stepscope.report.page import Section, page
from stepscope.report.style import BLUE, figure, svg
from stepscope.report.tables import escape
from stepscope.runs.store import Store
from stepscope.yaml_files import load_yaml

PAPER = (673, 985)  # an A4 page excluding margins, in CSS pixels


class Elements(HTMLParser):
    """An HTML parser that collects elements with their attributes, and tags that are closed incorrectly."""

    VOID = ("meta", "img", "hr", "br")

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID and (not self.open or self.open.pop() != tag):
            self.wrong.append(tag)


def drawn() -> str:
    picture, axes = figure("A message")
    axes.plot([1, 2], [1, 2], color=BLUE)
    return svg(picture)


TEXT = """# Title <b>x</b>

Text with `code`, [evidence](evidence/nsys.md), [a part](evidence/nsys.md#first-part), [far](https://a.b) and <script>alert(1)</script>.

![A message](figures/busy.svg)

## Part one

| size | ms |
| :-- | --: |
| small | 1 |

```python
a < b
```

### Within `it`
"""


def test_markdown_renders_as_a_self_contained_page():
    text = page(
        TEXT,
        [Section("evidence/nsys.md", "# Profiles\n\n## First part\n\n[back](../writeup.md)\n")],
        {"busy": drawn()},
        "*By* [us](https://c.d)",
    )
    elements = Elements(text)
    assert not elements.wrong and not elements.open
    tags = [tag for tag, _ in elements.found]
    assert "script" not in tags and "b" not in tags and tags.count("h1") == 1
    links = [attributes["href"] for tag, attributes in elements.found if tag == "a"]
    parts = ["#part-one", "#within-it"]
    contents = [*parts, "#evidence", "#evidence-nsys"]
    part = "#evidence-nsys-first-part"
    written = ["#evidence-nsys", part, "https://a.b"]
    assert links == [*contents, *written, *parts, part, "#top", "https://c.d"]
    anchors = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert anchors == ["top", *(link[1:] for link in contents), part[1:]]
    (image,) = [attributes for tag, attributes in elements.found if tag == "img"]
    assert image["src"].startswith("data:image/svg+xml,")
    assert image["alt"] == "A message" and image["width"] == "576"
    assert not [attributes for _, attributes in elements.found if "style" in attributes]


def test_only_chapter_folds_are_rendered_as_folds():
    fold = "<details><summary>Why so</summary>\n\nBecause **of** it.\n\n| a |\n| --: |\n| 1 |\n\n</details>\n\nAfter.\n"
    text = page(f"# T\n\n{fold}", [], {})
    elements = Elements(text)
    assert not elements.wrong and not elements.open
    assert "<details><summary>Why so</summary>\n<div>\n<p>Because <strong>of</strong> it.</p>" in text
    assert re.search(r"</table></div>\s*</div></details>\s*<p>After", text)
    for other in (
        "A <details><summary>Why</summary>",
        "<details open><summary>Why</summary>",
        "> </details>",
        "* </details>",
        escape("</details>"),
        escape("<details><summary>Why</summary>"),
    ):
        assert "details>" not in re.sub(
            r"<style>.*?</style>", "", page(f"# T\n\n{other}\n", [], {}), flags=re.DOTALL
        ), other


def test_links_point_within_the_page_or_to_https():
    text = page(
        "# T\n\n[a](javascript:alert(1)) [b](data:text/html,x) [c](//host/x) [d](file:///etc/passwd) "
        "[e](http://host) ![f](https://host/x.png)\n",
        [],
        {},
    )
    for tag, attributes in Elements(text).found:
        if tag == "a":
            assert attributes["href"].startswith(("#", "https://"))
        if tag == "img":
            assert attributes["src"] == "data:image/svg+xml,"


@pytest.fixture(scope="module")
def report(campaign, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "writeup.html"
    path.write_text(campaign.report.texts["writeup.html"])
    return path


@pytest.fixture(scope="module")
def chromium():
    with browser() as on:
        yield on


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_has_no_errors_or_accessibility_violations(chromium, report, size, scheme):
    with shown(chromium, report, size, color_scheme=scheme) as (opened, said):
        for summary in opened.query_selector_all("summary"):
            summary.click()
        background = opened.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 24, 29)")
        assert not said, said
        assert not violations(opened)


@pytest.fixture
def wide(report, tmp_path):
    """Write a copy of the report with two additions wider than any screen: a table and a line of code."""
    cells = "".join(f"<td>{'column'}{number}</td>" for number in range(40))
    path = tmp_path / "wide.html"
    path.write_text(
        report.read_text().replace(
            "<main>",
            '<main><div class="scroll" tabindex="0"><table><tr>'
            + cells
            + f"</tr></table></div><pre><code>{'word ' * 60}# comment</code></pre>",
        )
    )
    return path


BOX = "const box = one => one.getBoundingClientRect(), all = q => [...document.querySelectorAll(q)];"
FIRST_AND_LAST = (
    "const it = all('.scroll')[0]; it.scrollLeft = 1e6;"
    "const [first, last] = all('td:first-child, td:last-child').map(box);"
)
PLACES = "const [nav, heading, main] = ['nav', 'h1', 'main'].map(q => box(all(q)[0]));"
SCROLLED = "document.documentElement.style.scrollBehavior = 'auto'; scrollTo(0, 5000);" + PLACES
NO_SIDEWAYS = "return document.documentElement.scrollWidth <= innerWidth"
PICTURES = "return all('img').every(one => one.complete && one.naturalWidth && box(one).right <= innerWidth)"
LAYOUTS = {  # name: page, size, media, and a JavaScript expression that must be true
    "nothing scrolls sideways": ("report", DESKTOP, "screen", NO_SIDEWAYS),
    "nothing scrolls sideways on a phone": ("report", PHONE, "screen", NO_SIDEWAYS),
    "pictures fit": ("report", DESKTOP, "screen", PICTURES),
    "pictures fit a phone": ("report", PHONE, "screen", PICTURES),
    "tables fit a desktop": (
        "report",
        DESKTOP,
        "screen",
        "return all('main .scroll').every(one => one.scrollWidth <= one.clientWidth + 1)",
    ),
    "the last column can be reached": (
        "wide",
        DESKTOP,
        "screen",
        FIRST_AND_LAST + "return last.right <= innerWidth + 1 && last.left > first.right && first.left < 0",
    ),
    "the last column can be reached on a phone, where its row keeps its name": (
        "wide",
        PHONE,
        "screen",
        FIRST_AND_LAST + "return last.right <= innerWidth + 1 && last.left > first.right && first.left >= 0",
    ),
    "a phone shows code to its end": (
        "wide",
        PHONE,
        "screen",
        "return all('pre').every(one => one.scrollWidth <= one.clientWidth)",
    ),
    "text has one measure": (
        "report",
        DESKTOP,
        "screen",
        "return new Set(all('main > p, main > h2, header > h1, footer > p').map(one => box(one).width)).size == 1",
    ),
    "tables have the text's middle": (
        "report",
        DESKTOP,
        "screen",
        "const middle = one => Math.round(box(one).left + box(one).width / 2);"
        "return new Set(all('main > p, main > .scroll, main > pre, main > figure').map(middle)).size == 1",
    ),
    "wide tables are wider than text": (
        "wide",
        DESKTOP,
        "screen",
        "return box(all('.scroll')[0]).width > 1.4 * box(all('main > p')[0]).width",
    ),
    "the contents stay beside the text": (
        "report",
        DESKTOP,
        "screen",
        SCROLLED
        + "return nav.top >= 0 && nav.bottom <= innerHeight && nav.right <= main.left && heading.bottom < 0",
    ),
    "the contents stand above the text on a phone": (
        "report",
        PHONE,
        "screen",
        PLACES + "return heading.bottom <= nav.top && nav.bottom <= main.top && nav.bottom < innerHeight",
    ),
    "printed it is light, without contents": (
        "report",
        DESKTOP,
        "print",
        "return getComputedStyle(document.body).backgroundColor == 'rgb(255, 255, 255)'"
        " && getComputedStyle(all('nav')[0]).display == 'none'",
    ),
    "printed, evidence is unfolded": (
        "report",
        DESKTOP,
        "print",
        "return all('details').length > 0 && all('details').every(one => box(one).height > 40)",
    ),
    "paper holds everything": (
        "report",
        PAPER,
        "print",
        "return all('table, pre, img').every(one => box(one).right <= innerWidth + 1)",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_layout_satisfies_condition(chromium, request, layout):
    page_name, size, media, condition = LAYOUTS[layout]
    with shown(chromium, request.getfixturevalue(page_name), size, color_scheme="dark") as (opened, _):
        opened.emulate_media(media=media)
        if media == "screen":  # all folds are open in print
            opened.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
        assert opened.evaluate(f"(() => {{{BOX} {condition}}})()")


def test_link_to_folded_evidence_opens_it(chromium, report):
    with shown(chromium, report) as (opened, _):
        opened.click("nav a[href='#evidence-nsys']")
        opened.wait_for_function("document.querySelector('details:has(#evidence-nsys)').open")
        assert opened.evaluate("document.querySelectorAll('details[open]').length") == 1


def test_footer_shows_version_gpu_and_citation(campaign, report):
    foot = report.read_text().partition("<footer>")[2]
    words = html.unescape(re.sub(r"<[^>]+>", "", foot))
    records = campaign.found.records
    assert f"stepscope {__version__}" in words and "NVIDIA H200" in words
    assert (
        records[0].started_at.date().isoformat() in words and records[0].software["stepscope_source"] in words
    )
    citation = load_yaml(Path(str(PROJECT), "CITATION.cff"))
    assert f"{citation['authors'][0]['name']}. {citation['title']}. Version {citation['version']}" in words
    assert "https://github.com/stanford-cs336/" in foot


def test_injected_scripts_and_styles_are_blocked(chromium, report, tmp_path):
    """The page's content security policy must block the injected script and style."""
    hostile = tmp_path / "hostile.html"
    hostile.write_text(
        report.read_text().replace(
            "<main>",
            "<main><script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"
            "<p id=styled style='position:fixed'>x</p>",
        )
    )
    with shown(chromium, hostile) as (opened, said):
        assert opened.title() != "ran"
        assert opened.evaluate("getComputedStyle(document.getElementById('styled')).position") == "static"
        assert said


def missing_files(page_text: str, folder: Path) -> list[str]:
    """Return a page's links to missing files, relative to the page's folder."""
    links = {attributes["href"] for tag, attributes in Elements(page_text).found if tag == "a"}
    files = {link.partition("#")[0] for link in links if not link.startswith(("#", "https://"))}
    assert [link for link in files if link.endswith(".ipynb")]
    return [link for link in files if not (folder / unquote(link)).is_file()]


def test_writeup_links_point_to_existing_files(campaign):
    assert not missing_files(campaign.report.texts["writeup.html"], Path(str(PROJECT)))


def test_links_point_to_existing_files_when_runs_and_report_are_elsewhere(tmp_path):
    runs, out = tmp_path / "my runs", tmp_path / "elsewhere" / "report"
    for path in sorted(Path(str(PROJECT), "runs", "h200", "benchmark").iterdir())[:2]:
        shutil.copytree(path, runs / "benchmark" / path.name)
    made = machine.compose(read(Store(runs)), runs, out)
    write(made, out)
    assert not missing_files((out / "report.html").read_text(), out)


def test_internal_links_point_to_anchors(report):
    elements = Elements(report.read_text())
    anchors = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(anchors) == len(set(anchors))
    links = {attributes["href"] for tag, attributes in elements.found if tag == "a"}
    assert {link[1:] for link in links if link.startswith("#")} <= set(anchors)
    assert not [link for link in links if re.match(r"(?!https://|#|[\w./+-]+$)", link)]


@pytest.mark.parametrize(
    ("title", "shown"),
    [
        ("Why is it 2.1x, and not 4x?", "Why is it 2.1x, and not 4x?"),
        ("Is a < b & c?", "Is a &lt; b &amp; c?"),
        ("Is a &lt; b?", "Is a &lt; b?"),  # GitHub requires this form
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
    ],
)
def test_fold_title_is_escaped(title, shown):
    made = page(
        f"# Title\n\n<details><summary>{title}</summary>\n\n| a |\n| - |\n| 1 |\n\n</details>\n", [], {}
    )
    assert f"<details><summary>{shown}</summary>\n<div>" in made
    assert "<script" not in made and not Elements(made).wrong


def test_table_cells_are_classified_by_how_they_wrap():
    cells = {"19.8 ± 0.161": "number", "58.3 to 58.6": "number", "93%": "number", "full step": "short"}
    cells |= {"void_kernel_with_a_very_long_name": "long"}
    made = page("\n".join(["| a |", "| :-- |", *(f"| {cell} |" for cell in cells)]), [], {})
    for cell, kind in cells.items():
        assert f'<td class="left {kind}">{cell}</td>' in made
