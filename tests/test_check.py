"""Test ``stepscope check``, which compares the committed writeup with its records."""

from pathlib import Path

import pytest

from bench.public_ladder import page
from stepscope import PROJECT
from stepscope.report.check import alike, differences
from stepscope.report.output import Report, write

TEXTS = {
    "writeup.md": "# Title\n\nA step takes 58.9 ms.\n",
    "writeup.html": '<!doctype html>\n<p class="x">A step takes 58.9 ms.</p>',
    "evidence/benchmark.md": "# Benchmark\n\n| wall, ms |\n| --: |\n| 58.9 |\n",
    "figures/busy.svg": '<svg width="4.00"><text>58.9 ms</text></svg>',
}


@pytest.fixture
def out(tmp_path):
    write(Report(TEXTS), tmp_path)
    return tmp_path


def test_written_report_matches_its_records(out):
    assert differences(Report(TEXTS), out) == []


@pytest.mark.parametrize("page", ["writeup.md", "evidence/benchmark.md"])
def test_differences_include_the_line_of_a_changed_number(out, page):
    path = out / page
    path.write_text(path.read_text().replace("58.9", "59.9"))
    line = TEXTS[page][: TEXTS[page].index("58.9")].count("\n") + 1
    [found] = differences(Report(TEXTS), out)
    assert found.startswith(f"{page}, line {line}: got ") and "59.9" in found and "58.9" in found


def test_differences_include_missing_and_binary_pages(out):
    (out / "writeup.md").unlink()
    (out / "writeup.html").write_bytes(b"\xff")
    found = differences(Report(TEXTS), out)
    assert [line.partition(":")[0] for line in found] == ["writeup.md", "writeup.html"]


def test_figures_are_compared_by_visible_content(out):
    picture = out / "figures" / "busy.svg"
    picture.write_text(TEXTS["figures/busy.svg"].replace("4.00", "4.01"))
    assert differences(Report(TEXTS), out) == []
    picture.write_text(TEXTS["figures/busy.svg"].replace("58.9", "59.9"))
    assert differences(Report(TEXTS), out) == ["figures/busy.svg shows different data than the records"]


def test_differences_include_an_unused_figure(out):
    texts = {name: text for name, text in TEXTS.items() if name != "figures/busy.svg"}
    assert differences(Report(texts), out) == ["figures/busy.svg isn't used by any page"]


def test_differences_include_an_unusable_run(out):
    assert differences(Report(TEXTS, ["a/b: no record"]), out) == ["omitted: a/b: no record"]


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ('<a x="1.00"/>b', '<a x="1.04"/>b', True),
        ('<a x="1.00"/>b', '<a x="1.06"/>b', False),
        ('<a x="1"/>b 2', '<a x="1"/>b 3', False),
        ("<a/>", "<a/><a/>", False),
        ('<a y="1"/>', '<a x="1"/>', False),
        ('<a id="m0123456789"/>', '<a id="m9876543210"/>', True),
        ("<img src=%22url(%23p0123456789)%22>", "<img src=%22url(%23p98765432ff)%22>", True),
    ],
)
def test_alike_ignores_differences_in_the_last_digit(old, new, same):
    assert alike(old, new) is same


def test_committed_writeup_matches_the_records(campaign):
    assert differences(campaign.report, Path(str(PROJECT))) == []


@pytest.mark.skipif(PROJECT is None, reason="not in a checkout")
def test_page_about_public_models_shows_its_records():
    text = (PROJECT / "docs" / "public-models.md").read_text()
    assert text == page(PROJECT / "runs" / "public") + "\n"
