"""The report's HTML page: complete in one file, and faithful to the markdown as GitHub reads it."""

import base64
import hashlib
import re
from contextlib import ExitStack, nullcontext
from html import escape
from urllib.parse import unquote

import matplotlib.pyplot as plt
import pytest
from bs4 import BeautifulSoup

from browser import DESKTOP, PHONE, browser, shown, too_wide, violations
from reference import PNG, STORE, records, tables
from stepscope.report.check import StaleReport, _same_drawing
from stepscope.report.interactive import pieces
from stepscope.report.page import LONG_TABLE, MOST_CONTENTS, github_slug, render_page
from stepscope.say import style
from stepscope.studies.ladder.names import NAMES

MOST_PRINTED = 25  # pages of A4

RUN = "20250611T142233Z-large-ctx512-bf16"
REPORT = f"""# The step, timed
See [memory](#2-memory-peak--share), [the table](#all-runs) and [one run](runs/h200/{RUN}/notebook.ipynb).

## 1. Forward & backward: `torch.compile`

### Results

![Figure 1. Time per phase & "share".](figures/phases.png)

<img src="figures/phases.png" width="300" height="200" alt="Small">

## 2. Memory (peak × share)

### Results

<a id="all-runs"></a>

All runs:
| model | step ms | run |
|:---|---:|---|
| `a\\|b` | 12.5 | [`{RUN}`](runs/h200/{RUN}/) |

<details>
<summary>More runs</summary>

#### Inside

| size | peak GiB |
|---|---:|
| **xl** | 70.1 |

</details>

> Findings:
> - one
> - two
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "phases.png").write_bytes(PNG)
    return tmp_path


@pytest.fixture
def page(folder):
    return BeautifulSoup(render_page(REPORT, folder), "html.parser")


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


def body_of(markdown_text, folder, **options):
    return BeautifulSoup(render_page(markdown_text, folder, **options), "html.parser").main


def test_nothing_is_loaded_from_outside(page):
    text = str(page)
    loaders = page.find_all(["iframe", "object", "embed", "video", "audio", "source"])
    assert not loaders and not page.find_all("script", src=True)
    assert [tag["href"] for tag in page.find_all("link")] == ["data:,"]
    assert all(tag["src"].startswith("data:image/") for tag in page.find_all(src=True))
    assert not re.search(r"@import|url\(|srcset", text)
    policy = page.find("meta", attrs={"http-equiv": "Content-Security-Policy"})["content"]
    assert "default-src 'none'" in policy and "http" not in policy


def test_the_pages_own_script_is_the_only_one_that_runs(page):
    [script] = page.find_all("script")
    digest = base64.b64encode(hashlib.sha256(script.string.encode()).digest()).decode()
    policy = page.find("meta", attrs={"http-equiv": "Content-Security-Policy"})["content"]
    assert re.findall(r"script-src ([^;]*)", policy) == [f"'sha256-{digest}'"]
    assert not re.search(r"https?:|fetch|import|XMLHttp", script.string)


def test_pictures_are_inside_with_their_attributes(page):
    first, second = page.main.find_all("img")
    assert base64.b64decode(first["src"].removeprefix("data:image/png;base64,")) == PNG
    assert first["alt"] == 'Figure 1. Time per phase & "share".'
    assert (second["width"], second["height"], second["alt"]) == ("300", "200", "Small")


def test_a_picture_alone_in_its_paragraph_is_a_captioned_figure(folder):
    main = body_of("![Cap](figures/phases.png)\n\nAn ![icon](figures/phases.png) in text.", folder)
    assert main.figure.figcaption.get_text() == "Cap"
    assert len(main.find_all("figure")) == 1
    assert main.p.img is not None
    assert main.p.get_text() == "An  in text."


def test_a_figure_that_comes_twice_is_shown_once_and_linked(folder):
    main = body_of("![First](figures/phases.png)\n\n![Second](figures/phases.png)", folder)
    [figure] = main.find_all("figure")
    assert figure.figcaption.get_text() == "First" and str(main).count("data:image/") == 1
    [link] = main.select("p.again a")
    assert link["href"] == f"#{figure['id']}" and "Second" in link.get_text()


def test_a_picture_is_the_drawing_of_its_name_where_there_is_one(folder):
    words = 'a "b" & <c>% 10#1'
    drawing = f"""<svg xmlns="http://www.w3.org/2000/svg" width="96pt" height="9pt"><text>{escape(words)}</text></svg>"""
    (folder / "figures" / "phases.svg").write_text(drawing)
    source = body_of("![First](figures/phases.png)", folder).img["src"]
    shown_ = unquote(source.removeprefix("data:image/svg+xml;charset=utf-8,"))
    assert BeautifulSoup(shown_, "html.parser").find("text").get_text() == words
    (folder / "figures" / "phases.svg").write_text(drawing + "<!-- -->" * 50_000)  # thousands of marks: larger than the PNG
    assert body_of("![First](figures/phases.png)", folder).img["src"].startswith("data:image/png")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("figures/absent.png", ["figures/absent.png", "not found", "{folder}/figures/absent.png"]),
        ("figures", ["'figures'", "allowed type"]),
        ("figures/notes.txt", ["figures/notes.txt", "allowed type", ".png"]),
        ("https://example.org/a.png", ["https://example.org/a.png", "{folder}"]),
        ("//example.org/a.png", ["//example.org/a.png", "{folder}"]),
    ],
)
def test_a_picture_that_cannot_be_inside_is_named(folder, source, said):
    (folder / "figures" / "notes.txt").write_text("no picture")
    with pytest.raises(ValueError) as error:
        render_page(f"# T\n\n![x]({source})", folder)
    for words in said:
        assert words.format(folder=folder) in str(error.value)


@pytest.mark.parametrize(
    "markup",
    [
        '<script src="https://example.org/a.js"></script>',
        '<iframe src="other.html"></iframe>',
        '<link rel="stylesheet" href="https://example.org/a.css">',
        '<img src="figures/phases.png" srcset="https://example.org/a.png 2x" alt="x">',
        '<div style="background: url(https://example.org/a.png)">x</div>',
    ],
)
def test_markup_that_loads_something_is_refused(folder, markup):
    with pytest.raises(ValueError, match="self-contained"):
        render_page(f"# T\n\n{markup}\n", folder)


def test_both_contents_lists_hold_every_heading_of_a_short_report_in_order(page):
    headings = [(h["id"], h.get_text().removesuffix("#")) for h in page.main.find_all(re.compile("^h[1-6]$"))]
    assert len(headings) == 6
    for contents in (page.find("nav"), page.find("details", class_="top")):
        assert [(a["href"][1:], a.get_text()) for a in contents.find_all("a")] == headings


def test_the_contents_of_a_long_report_stop_at_its_chapters(folder):
    text = "# T\n" + "".join(f"\n## Chapter {n}\n" + "".join(f"\n### Part {n}.{m}\n" for m in range(3)) for n in range(9))
    page = BeautifulSoup(render_page(text, folder), "html.parser")
    listed = [link.get_text() for link in page.nav.find_all("a")]
    assert listed == ["T", *(f"Chapter {n}" for n in range(9))] and len(listed) <= MOST_CONTENTS


def test_a_heading_links_to_itself_by_its_own_name_where_it_has_one(folder):
    main = body_of('# T\n\n<a id="how-long"></a>\n\n## How long?\n\n## How long?\n\n<div id="t-1"></div>\n\n## T\n', folder)
    links = [heading.find("a", class_="here") for heading in main.find_all(["h1", "h2"])]
    assert [link["href"] for link in links] == ["#t", "#how-long", "#how-long-2", "#t-2"]
    assert links[1]["aria-label"] == "Link to “How long?”"


def test_every_link_within_the_page_has_its_place(page):
    ids = [tag["id"] for tag in page.find_all(id=True)]
    assert len(ids) == len(set(ids))
    targets = {a["href"][1:] for a in page.find_all("a", href=re.compile("^#"))}
    assert {"2-memory-peak--share", "all-runs", "results-1"} <= targets | set(ids)
    assert targets <= set(ids)


@pytest.mark.parametrize(
    ("heading", "slug"),
    [
        ("1. Forward & backward: torch.compile", "1-forward--backward-torchcompile"),
        ("  What it costs?  ", "what-it-costs"),
        ("snake_case and kebab-case", "snake_case-and-kebab-case"),
        ("Größe × n² — ½", "größe--n--"),
        ("FlashAttention-2 (Triton)", "flashattention-2-triton"),
    ],
)
def test_slugs_are_those_of_github(heading, slug):
    assert github_slug(heading) == slug


def test_repeated_headings_are_numbered_as_on_github(folder):
    main = body_of("## A\n\n## A-1\n\n## A\n\n## A", folder)
    assert [h["id"] for h in main.find_all("h2")] == ["a", "a-1", "a-2", "a-3"]


def test_tables_are_boxed_and_aligned(page):
    tables = page.main.find_all("table")
    assert len(tables) == 2
    for table in tables:
        assert "table" in table.parent["class"] and table.parent["tabindex"] == "0"
    assert "--columns: 3" in tables[0].parent["style"]
    left, right, plain = tables[0].tbody.find_all("td")
    assert "left" in left["style"] and "right" in right["style"] and not plain.get("style")
    assert left.get_text() == "a|b"  # the escape is GitHub's way to keep "|" inside a cell


def test_a_table_of_many_columns_is_marked_wide(folder):
    wide = "|" + " a |" * 14 + "\n|" + "---|" * 14 + "\n|" + " 1 |" * 14
    box = body_of(wide, folder).find("table").parent
    assert "wide" in box["class"] and "--columns: 14" in box["style"]


def test_a_figure_is_a_picture_and_a_drawing_of_the_same(tmp_path):
    figure, axes = plt.subplots()
    axes.plot([1, 1000], [1, 2])
    axes.set(xscale="log", title="A $5 & <6> title")
    style.save(figure, tmp_path / "made" / "one.png")
    drawing = (tmp_path / "made" / "one.svg").read_text()
    texts = [text.get_text() for text in BeautifulSoup(drawing, "html.parser").find_all("text")]
    assert "A $5 & <6> title" in texts  # which is text, and no formula,
    assert {"100", "103"} <= {*texts} and "mathdefault" not in drawing  # and a power of ten is one
    assert (tmp_path / "made" / "one.png").read_bytes().startswith(b"\x89PNG")


def test_room_before_a_label_is_room_in_a_browser(chromium, tmp_path):
    figure = plt.figure()
    figure.text(0.5, 0.5, "     label", ha="left")
    figure.text(0.5, 0.2, "label", ha="left")
    style.save(figure, tmp_path / "one.png")
    with shown(chromium, tmp_path / "one.svg") as (page, _):
        far, near = page.locator("text").evaluate_all("all => all.map(one => one.getComputedTextLength())")
        assert far > near + 10


@pytest.mark.parametrize(("old", "new", "same"), [
    ("12.50", "12.52", True), ("12.50", "13.50", False), ("#p0123456789", "#pabcdef0123", True),
    ("1.25x", "1.26x", False), ("</g>", "</g><g></g>", False)])
def test_a_drawing_is_the_same_where_its_words_are_and_its_numbers_nearly(old, new, same, tmp_path):
    drawing = '<svg width="10pt"><g clip-path="url(#p0123456789)" x="12.50"><text y="3">1.25x</text></g></svg>'
    for name, text in (("a", drawing), ("b", drawing.replace(old, new))):
        (tmp_path / f"{name}.svg").write_text(text)
    with nullcontext() if same else pytest.raises(StaleReport, match="shows something else"):
        _same_drawing(tmp_path / "a.svg", tmp_path / "b.svg")


def rows_of(number):
    lines = "".join(f"| {n % 7} ± 0.5 | {n:,} | size {n} |\n" for n in range(995, 995 + number))
    return f"| rest | count | name |\n|---|---:|---|\n{lines}"


def test_a_long_table_is_folded_under_its_caption(folder):
    main = body_of(f"# T\n\n*All of it.*\n\n{rows_of(LONG_TABLE)}\n\n{rows_of(LONG_TABLE - 1)}", folder)
    [details] = main.find_all("details")
    assert details.summary.get_text() == f"All of it ({LONG_TABLE} rows)" and main.em is None
    names = [box["aria-label"] for box in main.select("div.table")]
    assert len({*names}) == 2 and names[0] == "Table: All of it."
    main = body_of(f"<details><summary>All</summary>\n\n{rows_of(30)}\n\n</details>", folder)
    assert [summary.get_text() for summary in main.find_all("summary")] == ["All (30 rows)"]  # not folded twice
    study = f"<details class='study'><summary>One study</summary>\n\nWords.\n\n{rows_of(30)}\n\n</details>"
    summaries = [summary.get_text() for summary in body_of(study, folder).find_all("summary")]
    assert summaries == ["One study", "Table (30 rows)"]  # which has more than its table


def test_a_page_beside_the_pictures_is_shown_in_a_frame_where_it_is_linked_to(folder):
    inner = "<meta http-equiv='Content-Security-Policy' content=\"script-src 'sha256-abc='\"><p>\"in\" & 'side'"
    (folder / "figures" / "inner.html").write_text(inner)
    text = "Do [see it](figures/inner.html).\n\nOr [here](figures/inner.html) too.\n\n[Web](https://x.org/figures/inner.html)"
    page = BeautifulSoup(render_page(text, folder), "html.parser")
    [frame] = page.find_all("iframe")
    assert frame["srcdoc"] == inner and frame["sandbox"] == ["allow-scripts"] and frame["title"] == "see it"
    assert frame.find_parent("details").summary.get_text() == "see it"
    assert frame.find_parent("details").find_previous_sibling("p").get_text() == "Do see it."
    policy = page.find("meta", attrs={"http-equiv": "Content-Security-Policy"})["content"]
    assert "'sha256-abc='" in policy and policy.count("sha256-") == 2
    assert len(page.main.find_all("a")) == 3


def test_a_table_inside_details_is_a_table(page):
    details = page.main.details
    assert details.summary.get_text() == "More runs"
    assert details.find("td").strong.get_text() == "xl"
    assert "|" not in details.get_text() and not details.has_attr("markdown")


def test_lists_of_evidence_are_not_printed_and_other_blocks_are(folder):
    blocks = ("<details><summary>Evidence: 2 runs</summary>\n\n[a](a)\n\n</details>\n\n"
              "<details><summary>All</summary>\n\nb\n\n</details>")
    page = BeautifulSoup(render_page(blocks, folder), "html.parser")
    assert [block.get("class") for block in page.main.find_all("details")] == [["evidence"], None]
    printed = page.style.get_text().split("@media print")[1]
    assert re.search(r"details\.evidence[^}]* \{ display: none; \}", printed)


def test_lists_read_as_on_github(folder):
    text = "Findings:\n- one\n  - nested\n    - deeper\n- two\n\nIn\n2024. was a year\n\n> So:\n> - q\n"
    main = body_of(text, folder)
    assert [li.find(string=True).strip() for li in main.ul.find_all("li")] == [
        "one",
        "nested",
        "deeper",
        "two",
    ]
    assert len(main.ul.find_all("li", recursive=False)) == 2
    assert len(main.ul.ul.find_all("li", recursive=False)) == 1
    assert main.find("ol") is None
    assert main.blockquote.li.get_text() == "q"


def test_code_is_left_as_written(folder):
    code = "text\n- a\n| b |\n> - c\n<details>\n<img src='x.png'>"
    main = body_of(f"Before:\n\n```text\n{code}\n```\n\n1. Run:\n   ```bash\n   a\n     b\n   ```\n2. Then",
                   folder)
    assert [pre.get_text().strip("\n") for pre in main.find_all("pre")] == [code, "a\n  b"]
    assert len(main.ol.find_all("li", recursive=False)) == 2


def test_links_take_the_base_only_where_they_are_relative(folder):
    text = "[a](runs/r/n.ipynb) [b](#t) [c](https://x.org/y) [d](mailto:a@b.c) [e](/abs)\n\n# T"
    plain = [a["href"] for a in body_of(text, folder).select("a:not(.here)")]
    assert plain == ["runs/r/n.ipynb", "#t", "https://x.org/y", "mailto:a@b.c", "/abs"]
    based = body_of(text, folder, link_base="https://h.org/blob/main/").select("a:not(.here)")
    assert [a["href"] for a in based] == ["https://h.org/blob/main/runs/r/n.ipynb", *plain[1:]]


def test_title_is_the_first_heading_unless_given(folder):
    assert "<title>A &amp; B</title>" in render_page("# A & B", folder)
    assert "<title>&lt;Mine&gt;</title>" in render_page("# A & B", folder, title="<Mine>")
    assert "<title>Report</title>" in render_page("text", folder)


def test_comments_do_not_reach_the_reader(folder):
    assert "secret" not in render_page("# T\n\n<!-- secret -->\n\ntext <!-- secret --> text", folder)


def test_same_text_same_bytes(folder):
    assert render_page(REPORT, folder).encode() == render_page(REPORT, folder).encode()


@pytest.fixture
def opened(chromium, folder):
    """Open a report in a window of some size: the page, and what its console says."""
    with ExitStack() as stack:
        def open_(text, size=DESKTOP, change=lambda html: html, **options):
            (folder / "page.html").write_text(change(render_page(text, folder)), encoding="utf-8")
            return stack.enter_context(shown(chromium, folder / "page.html", size, **options))
        yield open_


def test_a_browser_runs_the_pages_script_and_refuses_nothing_of_it(opened):
    page, said = opened(REPORT)
    marked = page.locator(".side a[aria-current]")  # by the script: where the reader is
    assert marked.get_attribute("href") == "#the-step-timed" and said == []


def test_a_browser_refuses_any_other_script(opened):
    other = "<script>document.title = 'run'</script></body>"
    page, said = opened(REPORT, change=lambda html: html.replace("</body>", other))
    assert page.title() != "run" and any("Content Security Policy" in line for line in said)


def test_a_long_table_sorts_and_filters(opened):
    page, said = opened(f"# T\n\n*All.*\n\n{rows_of(30)}")
    page.locator("details summary").last.click()

    def column(number):
        return page.locator(f"tbody tr:visible td:nth-child({number})").all_inner_texts()
    assert column(2) == [f"{n:,}" for n in range(995, 1025)]
    page.get_by_role("button", name="count").click()
    page.get_by_role("button", name="count").click()
    assert column(2) == [f"{n:,}" for n in range(1024, 994, -1)]  # by value: 1,000 is more than 999
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("count")
    page.get_by_role("button", name="rest").click()
    assert [text[0] for text in column(1)] == sorted(text[0] for text in column(1))
    page.get_by_label("Rows with").fill("size 1000")
    assert column(3) == ["size 1000"] and page.locator("output").inner_text() == "1 of 30 rows"
    page.get_by_label("Rows with").fill("")
    assert len(column(3)) == 30 and said == []


def test_a_link_to_what_is_folded_unfolds_it(opened):
    page, _ = opened(REPORT)
    assert not page.get_by_role("heading", name="Inside").is_visible()
    page.evaluate("location.hash = '#inside'")
    page.get_by_role("heading", name="Inside").wait_for(state="visible")


def test_a_link_to_a_fold_opens_it(opened):
    page, _ = opened("# T\n\n[Go](#one)\n\n<details id='one'><summary>One</summary>\n\nInside it.\n\n</details>")
    assert not page.get_by_text("Inside it.").is_visible()
    page.get_by_role("link", name="Go").click()
    page.get_by_text("Inside it.").wait_for(state="visible")


def printed(page):
    """How many pages the page is as PDF, and their size in points."""
    pdf = page.pdf(prefer_css_page_size=True)
    return len(re.findall(rb"/Type ?/Page\b", pdf)), re.search(rb"/MediaBox ?\[0 0 ([\d.]+) ([\d.]+)\]", pdf).groups()


def test_print_is_a4_opens_what_is_folded_and_cuts_no_number(opened):
    items = "".join(f"{n}. item\n" for n in range(1, 121))
    page, _ = opened(f"# T\n\n*All.*\n\n{rows_of(400)}\n\n{items}")
    folded, (width, height) = printed(page)
    assert (round(float(width)), round(float(height))) == (595, 842)
    page.evaluate("document.querySelectorAll('details').forEach(one => one.remove())")
    assert folded > printed(page)[0] + 4  # 400 rows are pages
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 690, "height": 1000})  # about what A4 leaves between its margins
    assert page.evaluate("""() => {
      const list = document.querySelector('main ol'), pen = document.createElement('canvas').getContext('2d');
      pen.font = getComputedStyle(list).font;
      return list.firstElementChild.getBoundingClientRect().left - pen.measureText('120. ').width;
    }""") >= 0


@pytest.fixture(scope="module")
def report(chromium, tmp_path_factory):
    """The committed report's main text, as this code makes a page of it, with what is worked with."""
    root = STORE.root.parent.parent
    path = tmp_path_factory.mktemp("report") / "writeup.html"
    tools = pieces(records(), {"ladder.rungs": tables("ladder")["rungs"]}, NAMES)
    path.write_text(render_page((root / "writeup.md").read_text(encoding="utf-8"), root, pieces=tools), encoding="utf-8")
    return path


def test_the_report_is_one_file_of_a_bearable_size(report):
    assert report.stat().st_size < 3_000_000
    page = BeautifulSoup(report.read_text(encoding="utf-8"), "html.parser")
    chapters = page.main.find_all("h2")
    listed = [link["href"][1:] for link in page.nav.find_all("a")]
    assert {heading["id"] for heading in chapters} <= {*listed} and len(listed) <= MOST_CONTENTS
    for table in page.main.find_all("table"):
        assert len(table.select("tbody tr")) < LONG_TABLE or table.find_parent("details")


def test_sentences_in_a_table_are_read_on_a_phone_without_moving_it(opened):
    words = "a symptom that takes a whole sentence to say, and more than a phone has room for beside others"
    text = f"# T\n\n| symptom | change | gain |\n|:--|:--|--:|\n| {words} | `{'long_name_' * 8}()` | 2.10x (small) |\n"
    page, _ = opened(text, size=PHONE)
    box = page.locator(".table")
    assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
    tops = [page.locator("td").nth(n).bounding_box()["y"] for n in range(3)]
    assert tops == sorted(tops) and len({*tops}) == 3
    names = page.locator("td").evaluate_all("cells => cells.map(one => getComputedStyle(one, '::before').content)")
    assert ["symptom" in names[0], "change" in names[1], "gain" in names[2]] == [True] * 3
    alone = f"# T\n\n| measured on | |\n|:--|:--|\n| device | {words} |\n"
    page, _ = opened(alone, size=PHONE)
    assert page.locator("td[data-name]").count() == 0 and page.locator(".sentences").count() == 1
    page, _ = opened(text)
    assert len({page.locator("td").nth(n).bounding_box()["y"] for n in range(3)}) == 1


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")])
def test_the_report_fits_its_window_and_is_clean(chromium, report, size, scheme):
    with shown(chromium, report, size, color_scheme=scheme) as (page, said):
        assert said == [] and too_wide(page) == []
        assert violations(page) == []
        page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        assert too_wide(page) == []


def test_what_was_not_opened_and_so_not_drawn_is_not_printed_blank(opened, folder):
    (folder / "figures" / "inner.html").write_text("<p>drawn when seen</p>")
    page, _ = opened("# T\n\nDo [see it](figures/inner.html).")
    page.emulate_media(media="print")
    block = page.locator(".embedded")
    assert not block.is_visible()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert not block.is_visible() and page.get_by_text("Do see it.").is_visible()
    block.evaluate("block => { block.open = true; }")
    assert page.locator("iframe").is_visible()


def test_the_advice_is_seen_whole_on_a_screen(chromium, report):
    with shown(chromium, report) as (page, _):
        boxes = page.locator("main .sentences").evaluate_all("all => all.map(box => box.scrollWidth - box.clientWidth)")
        assert boxes and max(boxes) <= 0


def test_the_main_text_is_printed_on_few_pages_and_its_evidence_begins_on_one_of_its_own(chromium, report):
    with shown(chromium, report) as (page, _):
        main, (width, height) = printed(page)
        assert 8 < main <= MOST_PRINTED and (round(float(width)), round(float(height))) == (595, 842)
        page.evaluate("""() => {
          const study = document.createElement('details');
          study.className = 'study';
          study.innerHTML = '<summary>One study</summary><p>One line.</p>';
          document.querySelector('main').append(study);
        }""")
        assert printed(page)[0] == main + 1


def test_what_is_worked_with_is_on_the_report(chromium, report):
    with shown(chromium, report) as (page, _):
        rungs = tables("ladder")["rungs"]
        assert page.locator("#ladder-size option").all_inner_texts() == [*rungs["size"].astype(str).unique()]
        assert "faster" in page.locator("#ladder-said").inner_text()
        assert "fit" in page.locator("#fits-verdict").inner_text()
        name = page.locator("nav a").nth(3).get_attribute("href")
        page.goto(report.as_uri() + name)  # an anchor that was shared
        assert abs(page.locator(name).bounding_box()["y"]) < 100
