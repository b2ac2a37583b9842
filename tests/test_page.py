"""The page, in a browser where there is one, and by its markup everywhere."""

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

PAPER = (673, 985)  # A4 less its margins, in CSS pixels


class Elements(HTMLParser):
    """All elements of a page with their attributes, and what is not closed."""

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


def test_markdown_becomes_a_page_of_its_own():
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
    contents = ["#part-one", "#within-it", "#evidence", "#evidence-nsys"]
    assert links == [
        *contents,
        "#evidence-nsys",
        "#evidence-nsys-first-part",
        "https://a.b",
        "#part-one",
        "#within-it",
        "#evidence-nsys-first-part",
        "#top",
        "https://c.d",
    ]
    anchors = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert anchors == [
        "top",
        "part-one",
        "within-it",
        "evidence",
        "evidence-nsys",
        "evidence-nsys-first-part",
    ]
    assert [
        attributes["aria-label"] for _, attributes in elements.found if attributes.get("class") == "here"
    ] == ["Link to: Part one", "Link to: Within it", "Link to: First part"]
    images = [attributes for tag, attributes in elements.found if tag == "img"]
    assert (
        len(images) == 1
        and images[0]["src"].startswith("data:image/svg+xml,")
        and images[0]["alt"] == "A message"
    )
    assert images[0]["width"] == "576"
    assert not [attributes for _, attributes in elements.found if "style" in attributes]


def test_a_chapters_fold_is_one_of_the_page_and_no_other_text_can_be():
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


def test_links_lead_within_the_page_or_to_https():
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
def test_the_page_is_sound_in_a_browser(chromium, report, size, scheme):
    with shown(chromium, report, size, color_scheme=scheme) as (opened, said):
        for summary in opened.query_selector_all("summary"):
            summary.click()
        assert opened.evaluate("document.documentElement.scrollWidth") <= size[0], "it scrolls sideways"
        assert (
            opened.evaluate("[...document.images].filter(one => !one.complete || !one.naturalWidth).length")
            == 0
        )
        assert (
            opened.evaluate(
                "[...document.images].filter(one => one.getBoundingClientRect().right > innerWidth).length"
            )
            == 0
        )
        background = opened.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 24, 29)")
        assert not said, said
        assert not violations(opened)


def test_tables_fit_a_desktop(chromium, report):
    with shown(chromium, report) as (opened, _):
        wide = opened.evaluate(
            "[...document.querySelectorAll('main .scroll')].filter("
            "one => one.scrollWidth > one.clientWidth + 1).map(one => one.innerText.slice(0, 80))"
        )
        assert not wide


@pytest.fixture
def wide(report, tmp_path):
    """The report with a table and a line of code that no screen holds."""
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


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_last_column_can_be_reached_and_its_row_keeps_its_name(chromium, wide, size):
    with shown(chromium, wide, size) as (opened, _):
        first, last = opened.evaluate("""() => {
            const box = document.querySelector('.scroll'); box.scrollLeft = 1e6;
            return [...box.querySelectorAll('td:first-child, td:last-child')].map(one => one.getBoundingClientRect().toJSON())}""")
        assert last["right"] <= size[0] + 1 and last["left"] > first["right"]
        assert (first["left"] >= 0) == (size == PHONE)


def test_a_phone_shows_code_to_its_end(chromium, wide):
    with shown(chromium, wide, PHONE) as (opened, _):
        assert opened.evaluate(
            "[...document.querySelectorAll('pre')].every(one => one.scrollWidth <= one.clientWidth)"
        )


def test_text_has_one_measure_and_wide_tables_its_middle(chromium, report, wide):
    middle = "const middle = one => {const at = one.getBoundingClientRect(); return Math.round(at.left + at.width / 2)};"
    with shown(chromium, report) as (opened, _):
        widths = opened.evaluate(
            "[...document.querySelectorAll('main > p, main > h2, header > h1, footer > p')].map("
            "one => one.getBoundingClientRect().width)"
        )
        assert len({*widths}) == 1
        assert (
            opened.evaluate(
                f"(() => {{{middle} return new Set([...document.querySelectorAll("
                "'main > p, main > .scroll, main > pre, main > figure')].map(middle)).size})()"
            )
            == 1
        )
    with shown(chromium, wide) as (opened, _):
        assert (
            opened.evaluate("document.querySelector('.scroll').getBoundingClientRect().width")
            > 1.4 * widths[0]
        )


def test_the_contents_stay_beside_the_text_and_stand_above_it_on_a_phone(chromium, report):
    places = "['nav', 'h1', 'main'].map(one => document.querySelector(one).getBoundingClientRect().toJSON())"
    with shown(chromium, report) as (opened, _):
        opened.evaluate("document.documentElement.style.scrollBehavior = 'auto'; scrollTo(0, 5000)")
        nav, heading, main = opened.evaluate(places)
        assert (
            nav["top"] >= 0
            and nav["bottom"] <= DESKTOP[1]
            and nav["right"] <= main["left"]
            and heading["bottom"] < 0
        )
    with shown(chromium, report, PHONE) as (opened, _):
        nav, heading, main = opened.evaluate(places)
        assert heading["bottom"] <= nav["top"] and nav["bottom"] <= main["top"] and nav["bottom"] < PHONE[1]


def test_a_link_to_folded_evidence_opens_it(chromium, report):
    with shown(chromium, report) as (opened, _):
        opened.click("nav a[href='#evidence-nsys']")
        opened.wait_for_function("document.querySelector('details:has(#evidence-nsys)').open")
        assert opened.evaluate("document.querySelectorAll('details[open]').length") == 1


def test_the_foot_says_what_it_is_and_how_it_is_cited(campaign, report):
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


def test_nothing_runs_and_nothing_loads(chromium, report, tmp_path):
    """Even what would have got into the page: its policy refuses it."""
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


def test_printed_it_is_light_and_all_of_it(chromium, report):
    with shown(chromium, report, color_scheme="dark") as (opened, _):
        opened.emulate_media(media="print")
        assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert opened.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
        heights = opened.evaluate(
            "[...document.querySelectorAll('details')].map(one => one.getBoundingClientRect().height)"
        )
        assert heights and min(heights) > 40, "evidence stays folded"
    with shown(chromium, report, PAPER) as (opened, _):
        opened.emulate_media(media="print")
        cut = opened.evaluate(
            "[...document.querySelectorAll('table, pre, img')].filter("
            "one => one.getBoundingClientRect().right > innerWidth + 1).map(one => one.innerText.slice(0, 80))"
        )
        assert not cut


def missing_files(page_text: str, folder: Path) -> list[str]:
    """Return a page's links to files that are not there, seen from the page's folder."""
    links = {attributes["href"] for tag, attributes in Elements(page_text).found if tag == "a"}
    files = {link.partition("#")[0] for link in links if not link.startswith(("#", "https://"))}
    assert [link for link in files if link.endswith(".ipynb")]
    return [link for link in files if not (folder / unquote(link)).is_file()]


def test_every_link_of_the_writeup_leads_to_a_file(campaign):
    assert not missing_files(campaign.report.texts["writeup.html"], Path(str(PROJECT)))


def test_every_link_leads_to_a_file_when_runs_and_report_are_elsewhere(tmp_path):
    runs, out = tmp_path / "my runs", tmp_path / "elsewhere" / "report"
    for path in sorted(Path(str(PROJECT), "runs", "h200", "benchmark").iterdir())[:2]:
        shutil.copytree(path, runs / "benchmark" / path.name)
    made = machine.compose(read(Store(runs)), runs, out)
    write(made, out)
    assert not missing_files((out / "report.html").read_text(), out)


def test_every_anchor_leads_somewhere(report):
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
        ("Is a &lt; b?", "Is a &lt; b?"),  # as GitHub needs it
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
    ],
)
def test_fold_has_any_title_escaped(title, shown):
    made = page(
        f"# Title\n\n<details><summary>{title}</summary>\n\n| a |\n| - |\n| 1 |\n\n</details>\n", [], {}
    )
    assert f"<details><summary>{shown}</summary>\n<div>" in made
    assert "<script" not in made and not Elements(made).wrong
