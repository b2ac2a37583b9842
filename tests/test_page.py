"""The report's HTML page: complete in one file, and faithful to the markdown as GitHub reads it."""

import base64
import hashlib
import re

import pytest
from bs4 import BeautifulSoup

from browser import opened
from reference import PNG
from stepscope.report.page import github_slug, render_page

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


def test_a_figure_that_comes_twice_has_its_data_once(folder):
    main = body_of("![First](figures/phases.png)\n\n![Second](figures/phases.png)", folder)
    first, second = main.find_all("figure")
    width, height = (int.from_bytes(PNG[at:at + 4]) for at in (16, 20))
    assert first.svg["viewbox"] == second.svg["viewbox"] == f"0 0 {width} {height}"
    assert base64.b64decode(first.svg.image["href"].removeprefix("data:image/png;base64,")) == PNG
    assert second.svg.use["href"] == f"#{first.svg.image['id']}" and str(main).count("data:image/png") == 1
    words = ["First", "Second"]
    assert [figure.svg["aria-label"] for figure in (first, second)] == words
    assert [figure.figcaption.get_text() for figure in (first, second)] == words


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


def test_both_contents_lists_hold_every_heading_in_order(page):
    headings = [(h["id"], h.get_text()) for h in page.main.find_all(re.compile("^h[1-6]$"))]
    assert len(headings) == 6
    for contents in (page.find("nav"), page.find("details", class_="top")):
        assert [(a["href"][1:], a.get_text()) for a in contents.find_all("a")] == headings


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
    assert re.search(r"details\.evidence \{ display: none; \}", printed)


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
    plain = [a["href"] for a in body_of(text, folder).find_all("a")]
    assert plain == ["runs/r/n.ipynb", "#t", "https://x.org/y", "mailto:a@b.c", "/abs"]
    based = body_of(text, folder, link_base="https://h.org/blob/main/").find_all("a")
    assert [a["href"] for a in based] == ["https://h.org/blob/main/runs/r/n.ipynb", *plain[1:]]


def test_title_is_the_first_heading_unless_given(folder):
    assert "<title>A &amp; B</title>" in render_page("# A & B", folder)
    assert "<title>&lt;Mine&gt;</title>" in render_page("# A & B", folder, title="<Mine>")
    assert "<title>Report</title>" in render_page("text", folder)


def test_comments_do_not_reach_the_reader(folder):
    assert "secret" not in render_page("# T\n\n<!-- secret -->\n\ntext <!-- secret --> text", folder)


def test_same_text_same_bytes(folder):
    assert render_page(REPORT, folder).encode() == render_page(REPORT, folder).encode()


def test_a_browser_runs_the_pages_script_and_refuses_nothing_of_it(folder):
    (folder / "page.html").write_text(render_page(REPORT, folder))
    elements, console = opened(folder / "page.html")
    shown = BeautifulSoup(elements, "html.parser")
    [marked] = shown.select(".side a[aria-current]")  # by the script: where the reader is
    assert marked["href"] == "#the-step-timed" and console == []


def test_a_browser_refuses_any_other_script(folder):
    other = "<script>document.title = 'run'</script></body>"
    (folder / "page.html").write_text(render_page(REPORT, folder).replace("</body>", other))
    elements, console = opened(folder / "page.html")
    assert "<title>run</title>" not in elements and any("Content Security Policy" in line for line in console)
