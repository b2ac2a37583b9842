"""Is a committed report what its records say?"""

import re
import shutil

import pytest

import reports
from stepscope.report.check import alike, check
from stepscope.report.render import render


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    render(reports.few(folder / "runs", 2, ("benchmark",)), folder / "out")
    return folder


@pytest.fixture
def report(made, tmp_path):
    """Runs, and a copy of their report that a test may change; the runs are of the place that they were."""
    shutil.copytree(made / "out", made / tmp_path.name)
    return made / "runs", made / tmp_path.name


@pytest.mark.parametrize("page", ["writeup.md", "evidence/benchmark.md"])
def test_a_changed_number_is_named_with_its_line(report, page):
    path = report[1] / page
    text = path.read_text()
    digit = [found.start() for found in re.finditer(r"\d(?=[\d.]* )", text)][-1]
    path.write_text(f"{text[:digit]}{9 - int(text[digit])}{text[digit + 1 :]}")
    found = check(*report)
    assert len(found) == 1 and found[0].startswith(f"{page}, line {text[:digit].count(chr(10)) + 1}: is ")


def test_a_missing_page_and_one_that_is_no_text_are_named(report):
    (report[1] / "writeup.md").unlink()
    (report[1] / "writeup.html").write_bytes(b"\xff")
    assert [one.partition(":")[0] for one in check(*report)] == ["writeup.md", "writeup.html"]


def test_a_picture_is_compared_by_what_it_shows(report):
    picture = sorted((report[1] / "figures").glob("*.svg"))[0]
    text = picture.read_text()
    picture.write_text(text.replace("</text>", "?</text>", 1))
    assert check(*report) == [f"figures/{picture.name}: shows something else than the records say"]


def test_a_report_of_other_records_differs(report, tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(report[0], runs)
    run = next((runs / "benchmark").iterdir())
    reports.change_table(run, "times", lambda times: times.assign(wall_ms=times["wall_ms"] * 1.5))
    names = {one.partition(":")[0].partition(",")[0] for one in check(runs, report[1])}
    assert {"writeup.md", "evidence/benchmark.md"} <= names


def test_an_altered_file_of_a_run_is_named(report, tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(report[0], runs)
    table = next((runs / "benchmark").iterdir()) / "times.parquet"
    table.write_bytes(table.read_bytes() + b" ")
    assert any("times.parquet: differs from the file" in one for one in check(runs, report[1]))


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ('<a x="1.00"/>b', '<a x="1.04"/>b', True),
        ('<a x="1.00"/>b', '<a x="1.06"/>b', False),
        ('<a x="1"/>b 2', '<a x="1"/>b 3', False),
        ("<a/>", "<a/><a/>", False),
        ('<a y="1"/>', '<a x="1"/>', False),
        ('<a id="m0123456789"/>', '<a id="m9876543210"/>', True),
    ],
)
def test_drawings_are_alike_but_for_a_last_digit(old, new, same):
    assert alike(old, new) is same
