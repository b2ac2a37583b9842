"""Numbers, tables, pictures, and a whole report."""

import json
import math
import os
import re
import shutil
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pandas as pd
import pytest

import reports
from conftest import put, record_of
from stepscope.config import configure
from stepscope.report import render as rendering
from stepscope.report import style
from stepscope.report.claims import FAILS, HOLDS, NO_DATA, TagResult
from stepscope.report.left_out import differing, left_out
from stepscope.report.load import RunsError, load, read
from stepscope.report.render import OutputError, Report, render
from stepscope.report.schemas import TIMES
from stepscope.report.tables import (
    Shown,
    brief,
    counted,
    escape,
    headed,
    markdown,
    number,
    quartiles,
    table,
    wall_cell,
)
from stepscope.runs.store import Store


@pytest.mark.parametrize(
    ("value", "unit", "printed"),
    [
        (1092.3, "ms", "1,092 ms"),
        (94.23, "ms", "94.2 ms"),
        (5.456, "ms", "5.46 ms"),
        (9.996, "ms", "10.0 ms"),
        (0.001234, "ms", "0.00123 ms"),
        (0, "ms", "0 ms"),
        (21743, "ms", "21,700 ms"),
        (-5.456, "ms", "-5.46 ms"),
        (21743, "tokens/s", "21,700 tokens/s"),
        (0.742, "%", "74%"),
        (0.996, "%", "99.6%"),
        (1, "%", "100%"),
        (0.0456, "%", "4.6%"),
        (8.2e-9, "%", "under 0.001%"),
        (0, "%", "0%"),
        (11.63, "x", "11.6x"),
        (3.31, "x", "3.3x"),
        (1.021, "x", "1.02x"),
        (156.2, "x", "156x"),
        (0.564, "x", "0.56x"),
        (3406809600, "n", "3,406,809,600"),
        (3406809600, "billion", "3.41 billion"),
        (128625408, "billion", "129 million"),
        (65.61, "GiB", "65.6 GiB"),
        (1680.4, "MHz", "1,680 MHz"),
        (0.99949, "x", "1.00x"),
        (1.994, "x", "1.99x"),
        (1.996, "x", "2.0x"),
        (99.94, "x", "99.9x"),
        (99.96, "x", "100x"),
        (0.0123, "x", "0.012x"),
        (-1.5, "x", "-1.50x"),
        (0.98996, "%", "99%"),
        (0.99, "%", "99.0%"),
        (0.9996, "%", "100%"),
        (1e-5, "%", "0.0010%"),
        (-0.25, "%", "-25%"),
        (9999.4, "ms", "9,999 ms"),
        (10004, "ms", "10,000 ms"),
        (999_500_000, "billion", "1.00 billion"),
        (999_400_000, "billion", "999 million"),
        (812_345, "billion", "812,000"),
        (3.61, "us", "3.61 µs"),
        (1234.5, "W", "1,234 W"),
        (2.5e3, "B", "2,500 B"),
        (4.8123, "TB/s", "4.81 TB/s"),
        (None, "ms", "–"),
        (math.nan, "x", "–"),
        (math.inf, "J", "–"),
        (pd.NA, "W", "–"),
    ],
)
def test_numbers_have_the_digits_that_their_unit_needs(value, unit, printed):
    assert number(value, unit) == printed


def test_a_value_without_its_unit_is_an_error():
    assert f"{Shown(778)}, {Shown(94.23):ms}, {Shown('2.7B')}" == "778, 94.2 ms, 2.7B"
    for value, unit in ((94.23, ""), ("2.7B", "ms"), (None, "ms"), (1.0, "furlongs")):
        with pytest.raises(ValueError, match=r"unit|number"):
            format(Shown(value), unit)


def test_a_table_is_printed_with_units_and_the_best_in_bold():
    frame = pd.DataFrame(
        {
            "size": ["small", "a|b"],
            "wall_ms": [8.813, math.nan],
            "busy, %": [0.264, 0.996],
            "operations": [1778, 6],
            "same": [True, False],
        }
    )
    text = markdown(table(headed(frame), bold=("max", "column", "busy, %"), note="A note."))
    assert text.splitlines() == [
        "| size | wall, ms | busy | operations | same |",
        "| :-- | --: | --: | --: | :-- |",
        "| small | 8.81 | 26% | 1,778 | yes |",
        "| a\\|b | – | **99.6%** | 6 | no |",
        "",
        "A note.",
    ]
    pivot = pd.DataFrame(
        {"small": [2.0, 3.0], "2.7B": [2.0, 1.0]}, index=pd.Index(["a", "b"], name="optimization")
    )
    assert markdown(table(pivot, unit="ms", bold=("min", "row"))).splitlines()[2:] == [
        "| a | 2.00 | 2.00 |",
        "| b | 3.00 | **1.00** |",
    ]


@pytest.mark.parametrize(
    ("row", "cell"),
    [
        ({"wall_q1_ms": 58.3, "wall_q3_ms": 58.61, "wall_min_ms": 40.0, "busy": 0.99}, "58.5 (58.3 to 58.6)"),
        (
            {
                "wall_q1_ms": 51.0,
                "wall_q3_ms": 60.0,
                "wall_min_ms": 43.6,
                "busy": 0.5,
                "enqueue_ms": 9.0,
                "gpu_ms": 5.0,
            },
            "58.5 (51.0 to 60.0), at best 43.6",
        ),
        (
            {
                "wall_q1_ms": 51.0,
                "wall_q3_ms": 60.0,
                "wall_min_ms": 43.6,
                "busy": 0.5,
                "enqueue_ms": 5.0,
                "gpu_ms": 9.0,
            },
            "58.5 (51.0 to 60.0)",
        ),
        ({"wall_ms": math.nan, "wall_q1_ms": 1.0, "wall_q3_ms": 2.0}, "–"),
    ],
)
def test_a_wall_time_has_its_spread_and_of_what_waits_the_fastest_step(row, cell):
    assert wall_cell({"wall_ms": 58.5} | row) == cell


def test_quartiles_and_counts_are_ranges_where_they_are_known():
    rows = pd.DataFrame({"wall_q1_ms": [1.5, None], "wall_q3_ms": [20.25, 3.0]}, [7, 3])
    assert quartiles(rows).to_dict() == {7: "1.50 to 20.2", 3: None}
    assert [
        counted(pd.Series(counts, dtype=float)) for counts in ([100, None, 10, 30], [10, 10], [None])
    ] == ["10 to 100", "10", "some"]


def test_only_what_is_the_least_or_most_of_its_own_row_or_column_is_bold():
    """As it is printed: 1.001 and 1.002 are one number; a text, a number that is not known and a column left out are none."""
    frame = pd.DataFrame(
        {
            "a, ms": [1.001, 5.0, math.nan],
            "b, ms": [1.002, 2.0, 3.0],
            "c, ms": [9.0, 0.5, 4.0],
            "text": ["0", "1", "2"],
        }
    )

    def bold(*how):
        lines = markdown(table(frame, bold=how)).splitlines()[2:]
        return [
            [place for place, cell in enumerate(line.strip("| ").split(" | ")) if "**" in cell]
            for line in lines
        ]

    assert bold("min", "row") == [[0, 1], [2], [1]] and bold("max", "row") == [[2], [0], [2]]
    assert bold("min", "column") == [[0, 1], [2], []] and bold("max", "column") == [[2], [0], [1]]
    assert bold("min", "row", "b, ms", "c, ms") == [[1], [2], [1]] and bold("max", "column", "b, ms") == [
        [],
        [],
        [1],
    ]


def test_a_heading_has_its_columns_unit_and_an_index_with_a_name_is_a_column():
    frame = pd.DataFrame(
        {
            "params, billion": [3.4e9, 129e6],
            "gain, x": [1.5, 20.0],
            "kernels, n": [1200.0, 6.0],
            "a, b": [1.5, 2.5],
            "took, us": [3.0, 40.0],
            "none": [None, None],
            "whole": [1, 20000],
        },
        pd.Index(["small", "xl"], name="size"),
    )
    assert markdown(table(frame, unit="ms")).splitlines() == [
        "| size | params | gain | kernels | a, b | took, µs | none | whole |",
        "| :-- | --: | --: | --: | --: | --: | --: | --: |",
        "| small | 3.40 billion | 1.50x | 1,200 | 1.50 | 3.00 | – | 1 |",
        "| xl | 129 million | 20.0x | 6 | 2.50 | 40.0 | – | 20,000 |",
    ]
    assert len(markdown(pd.DataFrame({"n": range(16)})).splitlines()) == 19 and "more" not in markdown(
        pd.DataFrame({"n": range(15)})
    )


def test_a_long_table_says_how_much_it_leaves_out():
    text = markdown(pd.DataFrame({"n": range(40)}))
    assert len([line for line in text.splitlines() if line.startswith("|")]) == 17
    assert "25 more rows" in text
    assert "more rows" not in markdown(table(pd.DataFrame({"n": range(40)}), rows=40))


def test_a_notebooks_table_has_plain_text():
    frame = brief(
        pd.DataFrame(
            {
                "run_id": ["a_b"],
                "peak_gib": [65.61],
                "sm_clock_mhz": [1980.0],
                "gpu_ms": [2.313],
                "tokens_per_s": [21743.0],
            }
        )
    )
    assert list(frame) == ["run id", "peak, GiB", "SM clock, MHz", "GPU time, ms", "tokens/s"]
    assert frame.iloc[0].to_list() == ["a_b", "65.6", "1,980", "2.31", "21,700"]
    frame = brief(pd.DataFrame({"busy": [0.995], "operations": [48231.0], "mib": [2.0], "passes": [None]}))
    assert list(frame) == ["busy", "operations", "MiB", "passes"]
    assert frame.iloc[0].to_list() == ["99.5%", "48,231", "2.00", "–"]
    mfus = [name for name in TIMES if name.startswith("mfu")]
    assert len(mfus) > 1 and brief(pd.DataFrame([[0.45] * len(mfus)], columns=mfus)).iloc[0].to_list() == [
        "45%"
    ] * len(mfus)


def test_escaped_text_is_one_line_and_stays_as_it_was():
    assert escape("a\nb\tc\x00") == "a b c\ufffd"
    assert escape("2.7B, bf16 (step)") == "2.7B, bf16 (step)"
    assert len(escape("x" * 10_000)) < 300


@style.look()
def _picture(message: str = "The larger, the faster") -> style.Picture:
    picture, axes = style.figure(message)
    axes.plot([1, 2, 4], [1, 2, 3], color=style.BLUE)
    axes.set_xlim(1, 4)
    style.label_ends(axes, {"small": (4, 3), "2.7B": (4, 3.001)}, style.SIZE_COLORS)
    return picture


def test_a_picture_is_one_drawing_for_light_and_dark():
    drawn = style.svg(_picture())
    ElementTree.fromstring(drawn)
    assert f"var(--c{style.BLUE[1:]},{style.BLUE})" in drawn and "prefers-color-scheme:dark" in drawn
    unturned = set(re.findall(r"(?<![,:])(?<=: )#[0-9a-f]{6}", drawn))
    assert not unturned, "colours that the dark scheme does not have"
    assert style.svg(_picture()) == drawn, "drawn again it differs"
    assert "<metadata" not in drawn and "<!--" not in drawn


def test_text_in_a_picture_is_nine_pixels_on_a_phone():
    drawn = style.svg(_picture("A message that is long enough to be wrapped into a second line of its title"))
    width = float(re.search(r'width="([\d.]+)pt"', drawn)[1])
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:bold )?([\d.]+)px", drawn)]
    assert sizes and min(sizes) * (390 - 2 * 16) / width >= 9


def test_logarithmic_axes_have_plain_numbers():
    picture, axes = style.figure("A message")
    axes.loglog([1e-3, 1e4], [1, 10])
    drawn = style.svg(picture)
    assert re.findall(r"<text[^>]*>([^<]*)</text>", drawn)[:4] == ["0.01", "1", "100", "10,000"]


def test_labels_at_lines_ends_do_not_overlap():
    picture = _picture()
    picture.canvas.draw()
    low, high = sorted((text.get_window_extent() for text in picture.axes[0].texts), key=lambda box: box.y0)
    assert low.y1 <= high.y0 + 4


@pytest.mark.parametrize("colors", [style.SIZE_COLORS, style.PRECISION_COLORS, style.PHASE_COLORS])
def test_colours_stand_off_from_paper(colors):
    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for color in colors.values():
        for one, paper in ((color, style.PAPER), (style.DARK[color], style.DARK[style.PAPER])):
            low, high = sorted((luminance(one), luminance(paper)))
            assert (high + 0.05) / (low + 0.05) >= 3, color


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A report of some runs, and where it is."""
    folder = tmp_path_factory.mktemp("report")
    runs = reports.few(folder / "runs")
    return render(runs, folder / "out"), folder


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """What a whole report is not needed for."""
    return reports.few(tmp_path_factory.mktemp("two") / "runs", 1, ("benchmark", "ladder"))


def test_a_report_has_its_pages_and_only_what_was_measured(done):
    rendered, folder = done
    out = folder / "out"
    assert not rendered.errors
    assert rendered.paths[:2] == [out / "writeup.md", out / "writeup.html"]
    text = (out / "writeup.md").read_text()
    assert text.startswith("# ") and "{%" not in text and "\x00" not in text and "\x01" not in text
    for image in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (out / image).is_file()
    for link in re.findall(r"(?<!!)\[[^\]]*\]\((?!https://)([^)#]+)\)", text):
        assert (out / link).is_file()
    runs = (out / "evidence" / "runs.md").read_text()
    for link in re.findall(r"\]\(([^)]+)\)", runs):
        assert (out / "evidence" / link).is_file()
    for nothing in re.findall(r"^#{2,} .*\n+(?=#{1,2} )", text, re.MULTILINE):
        pytest.fail(f"a heading with nothing below it: {nothing}")


@pytest.fixture
def small(monkeypatch) -> Report:
    """A report of few words, in place of any that would be made."""
    texts = dict.fromkeys(("writeup.md", "writeup.html", "evidence/runs.md", "figures/busy.svg"), "new")
    monkeypatch.setattr(rendering, "compose", lambda *_: Report(texts=texts))
    return Report(texts=texts)


def test_nothing_is_left_beside_it_and_what_it_no_longer_has_goes(small, tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "reference.svg").write_text("of a report without a GPU")
    (tmp_path / "figures" / "mine.svg").write_text("not of the report")
    rendered = render(tmp_path / "runs", tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in rendered.paths} == {*small.texts}
    there = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert there - set(rendered.paths) == {tmp_path / "figures" / "mine.svg"}


def _everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("full_after", [0, 1, 3])
def test_a_disk_that_fills_leaves_the_report_that_was_there(small, tmp_path, monkeypatch, full_after):
    real, left = os.fsync, iter([True] * full_after)

    def fsync(descriptor: int) -> None:
        if not next(left, False):
            raise OSError(28, "No space left on device")
        real(descriptor)

    (tmp_path / "evidence").mkdir()
    for name in ("writeup.md", "writeup.html", "evidence/runs.md"):
        (tmp_path / name).write_text("before")
    before = _everything(tmp_path)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OutputError, match="No space left"):
        render(tmp_path / "runs", tmp_path)
    assert _everything(tmp_path) == before and not (tmp_path / "figures").exists()
    monkeypatch.setattr(os, "fsync", real)
    render(tmp_path / "runs", tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in _everything(tmp_path)} == {*small.texts}
    assert {*_everything(tmp_path).values()} == {b"new"}


def test_a_folder_in_a_files_place_leaves_the_report_that_was_there(small, tmp_path):
    (tmp_path / "writeup.html").mkdir()
    (tmp_path / "writeup.md").write_text("before")
    with pytest.raises(OutputError, match=r"writeup\.html is a folder"):
        render(tmp_path / "runs", tmp_path)
    assert _everything(tmp_path) == {tmp_path / "writeup.md": b"before"}


def test_a_write_that_fails_leaves_the_report_that_was_there(two_runs, tmp_path, monkeypatch):
    (tmp_path / "writeup.md").write_text("before")
    monkeypatch.setattr(rendering, "page", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        render(two_runs, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["writeup.md"]
    assert (tmp_path / "writeup.md").read_text() == "before"


@pytest.mark.parametrize("folder", ["evidence", "figures"])
def test_folders_that_lead_elsewhere_are_refused(done, tmp_path, folder):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "ladder.md").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / folder).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match="is a link"):
        render(done[1] / "runs", tmp_path / "out")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["ladder.md"]


def test_the_readme_has_the_first_screen_between_its_marks(two_runs, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- story -->\nold\n<!-- /story -->\nafter\n")
    render(two_runs, tmp_path)
    text = readme.read_text()
    assert text.startswith("before\n<!-- story -->\n") and text.endswith("<!-- /story -->\nafter\n")
    assert "\nold\n" not in text
    first = (tmp_path / "writeup.md").read_text().partition("\n## ")[0].partition("\n")[2].strip()
    assert (
        first
        and text.removeprefix("before\n<!-- story -->\n").removesuffix("<!-- /story -->\nafter\n").strip()
        == first
    )


@pytest.mark.parametrize(
    "content",
    [
        b"<!-- story -->\nall that follows",
        b"<!-- /story -->\n<!-- story -->\n",
        b"<!-- story -->\n<!-- story -->\n<!-- /story -->",
        b"\xff<!-- story -->\n",
    ],
)
def test_a_readme_with_half_its_marks_is_refused_and_untouched(done, tmp_path, content):
    (tmp_path / "README.md").write_bytes(content)
    with pytest.raises(OutputError, match=r"README\.md"):
        render(done[1] / "runs", tmp_path)
    assert (tmp_path / "README.md").read_bytes() == content and len(list(tmp_path.iterdir())) == 1


def test_a_readme_that_is_a_pipe_or_a_link_is_refused_at_once(done, tmp_path):
    os.mkfifo(tmp_path / "README.md")
    with pytest.raises(OutputError, match="no regular file"):
        render(done[1] / "runs", tmp_path)
    (tmp_path / "README.md").unlink()
    (tmp_path / "mine.md").write_text("<!-- story -->\n<!-- /story -->\n")
    (tmp_path / "README.md").symlink_to("mine.md")
    with pytest.raises(OutputError, match="is a link"):
        render(done[1] / "runs", tmp_path)


def test_a_shape_without_a_name_is_named_by_its_dimensions(tmp_path):
    runs = reports.few(tmp_path, 1, ("benchmark",))
    dimensions = {"d_model": 8, "d_ff": 16, "num_layers": 3, "num_heads": 2}

    def change(record: dict) -> None:
        config = configure(**record["config"] | {"size": "custom"} | dimensions)
        record |= {"config": config.model_dump(mode="json"), "run_id": config.run_id}

    (place,) = runs.glob("benchmark/*")
    reports.change_record(place / "record.json", change)
    place.rename(place.with_name(json.loads((place / "record.json").read_text())["run_id"]))
    assert set(read(Store(runs)).tables["benchmark.times"]["size"]) == {"d8 f16 l3 h2"}


def test_a_folder_without_runs_says_so(tmp_path):
    with pytest.raises(RunsError, match="no such runs folder"):
        render(tmp_path / "nowhere", tmp_path)
    with pytest.raises(OutputError, match="holds no run"):
        render(tmp_path, tmp_path)
    with pytest.raises(RunsError, match="holds no run"):
        load(tmp_path)


def test_a_second_run_of_a_configuration_replaces_the_first(tmp_path):
    """Of the same key: another seed has another run id, and the tables have no column for it."""
    runs = reports.few(tmp_path / "runs", 1)
    run = next((runs / "benchmark").iterdir())
    before = read(Store(runs)).tables["benchmark.times"]

    fields = json.loads((run / "record.json").read_text())["config"] | {"seed": 1}
    again = run.with_name(configure(**fields).run_id)
    shutil.copytree(run, again)

    def newer(record: dict) -> None:
        record |= {"run_id": again.name, "config": fields, "started_at": "2199-01-01T00:00:00Z"}

    reports.change_record(again / "record.json", newer)
    reports.change_table(again, "times", lambda times: times.assign(wall_ms=times["wall_ms"] * 2))
    after = read(Store(runs))
    assert not after.errors and set(after.tables["benchmark.times"]["run_id"]) == {again.name}
    assert after.tables["benchmark.times"]["wall_ms"].sum() == pytest.approx(2 * before["wall_ms"].sum())
    assert len(after.tables["runs"].query("study == 'benchmark'")) == 1
    assert after.tables["benchmark.results"]["run_id"].tolist() == [again.name]
    page = rendering._runs_page(after, "runs")
    assert (
        f"[{again.name}]" in page
        and re.search(rf"\[{run.name}\].*replaced", page)
        and page.count("replaced") == 1
    )


def test_what_a_failed_run_found_is_in_no_number(tmp_path):
    runs = reports.few(tmp_path, 2, ("benchmark",))
    failed, done = sorted(runs.glob("benchmark/*"))
    reports.change_record(
        failed / "record.json", lambda record: record.update(status="failed", cause="late", tables={})
    )
    found = read(Store(runs))
    assert {record.run_id for record in found.records} == {failed.name, done.name} and not found.errors
    assert found.tables["benchmark.results"]["run_id"].tolist() == [done.name]


def test_the_foot_has_the_first_and_the_last_day_whatever_the_runs_order(tiny):
    days = [datetime(2026, month, day, tzinfo=UTC) for month, day in ((3, 9), (11, 2), (1, 30), (3, 10))]
    foot = rendering._foot([record_of(tiny(seed=seed), started_at=day) for seed, day in enumerate(days)])
    assert re.findall(r"\d{4}-\d\d-\d\d", foot) == ["2026-01-30", "2026-11-02"]


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """A report of runs of another batch, vocabulary and dimension than the reference's, and what ``render`` said."""
    folder = tmp_path_factory.mktemp("others")
    for place in reports.few(folder / "runs", 1).glob("*/*/record.json"):
        config = json.loads(place.read_text())["config"]
        config |= {"batch_size": 3} | (
            {"d_model": 48} if config["study"] == "attention" else {"vocab_size": 777}
        )
        again = configure(**config).run_id
        reports.change_record(place, lambda record: record.update(run_id=again, config=config))
        if config["study"] == "ladder":  # whose tables say the batch of each of their rows
            for table in ("steps", "kernels"):
                reports.change_table(place.parent, table, lambda rows: rows.assign(batch_size=3))
        place.parent.rename(place.parent.with_name(again))
    return render(folder / "runs", folder / "out"), folder / "out"


def test_a_report_of_another_batch_has_no_number_of_the_references(others):
    rendered, out = others
    assert not rendered.errors
    wrong = {}
    for page in [*out.glob("*.md"), *out.glob("evidence/*.md")]:
        text = re.sub(
            r"^\| .*|`[^`]*`", "", page.read_text(), flags=re.MULTILINE
        )  # a run's own words are in tables
        wrong[page.name] = re.findall(r"[^.|\n]*(?:[Bb]atch [48]\b|10,000|\bd (?:64|128)\b)[^.|\n]*", text)
    assert {name: found for name, found in wrong.items() if found} == {}


def test_every_run_stands_in_a_table_with_the_fields_that_differ(done):
    _, folder = done
    text = (folder / "out" / "evidence" / "runs.md").read_text()
    for place in (folder / "runs").glob("benchmark/*/record.json"):
        record = json.loads(place.read_text())
        row = next(line for line in text.splitlines() if line.startswith(f"| [{record['run_id']}]"))
        cells = dict(
            zip(
                _cells_of(
                    next(
                        line
                        for line in text[: text.index(row)].splitlines()[::-1]
                        if line.startswith("| run |")
                    )
                ),
                _cells_of(row),
            )
        )
        others = [json.loads(other.read_text())["config"] for other in place.parents[1].glob("*/record.json")]
        names = {name for name in others[0] if len({str(config[name]) for config in others}) > 1}
        names -= {"d_model", "d_ff", "num_layers", "num_heads"}
        assert names and all(cells[name.replace("_", " ")] == str(record["config"][name]) for name in names)
        assert re.search(r"\d ms", cells["what it found"])


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        (("small", "xl"), ["size"]),
        (("small", "custom"), ["size", "d_model"]),
        (("custom", "custom"), ["d_model"]),
    ],
)
def test_only_where_all_sizes_have_names_these_stand_for_dimensions(sizes, named):
    assert differing([{"size": size, "d_model": d, "seed": 0} for size, d in zip(sizes, (8, 16))]) == named


def test_what_differs_is_named_in_the_configurations_order_and_sequences_stand_for_a_context():
    one = {"seed": 0, "context_length": 512, "batch_size": 4, "device": "cuda"}
    other = one | {"batch_size": 8, "context_length": 256, "seed": 1}
    assert (
        differing([one, one, other]) == ["seed", "context_length", "batch_size"]
        and differing([one]) == differing([]) == []
    )
    assert differing([one | {"sequences": [512]}, other | {"sequences": [256]}]) == [
        "seed",
        "batch_size",
        "sequences",
    ]
    assert differing([one | {"sequences": [256]}, other | {"sequences": [256]}]) == [
        "seed",
        "context_length",
        "batch_size",
    ]


@pytest.mark.parametrize(("count", "rest"), [(6, []), (7, ["and 1 more"]), (9, ["and 3 more"])])
def test_of_pages_with_what_could_not_be_made_six_are_named(count, rest):
    results = [
        TagResult("claim", "one", why)
        for why in (HOLDS, FAILS, NO_DATA, "KeyError: it", "has no number for ms")
    ]
    pages = {f"page {number}": results for number in range(count)}
    last = left_out({"whole": results[:3]} | pages, [])[-1]
    assert last.partition(": ")[2].split("; ") == [*(f"2 of page {number}" for number in range(6)), *rest]


@pytest.mark.parametrize(
    ("devices", "sweep"), [(("cpu", "cpu"), "cpu"), (("cpu", "cuda"), "memory"), (("cuda",), "memory")]
)
def test_the_cpus_sweep_is_named_where_all_runs_are_of_a_cpu(devices, sweep):
    records = [
        SimpleNamespace(study="benchmark", config={"device": device, "size": "nano"}) for device in devices
    ]
    first, *_ = left_out({"Memory": [TagResult("table", "handout_peaks", NO_DATA)]}, records)
    assert first.endswith(f": stepscope sweep {sweep}")


def _cells_of(row: str) -> list[str]:
    return row.strip("| ").split(" | ")


def test_what_is_left_out_is_said_in_a_few_lines(done, others):
    for rendered in (done[0], others[0]):
        assert 0 < len(rendered.left_out) <= 3 < len(rendered.omitted)
        assert not [
            one.name
            for one in rendered.omitted
            for line in rendered.left_out
            if "_" in one.name and one.name in line
        ]


def test_what_is_absent_is_named_with_the_sweep_that_would_fill_it(tmp_path):
    runs = reports.few(tmp_path / "runs", 1)
    for study in ("memory", "ladder"):  # the memory chapter has sentences of either
        shutil.rmtree(runs / study)
    first, *_ = render(runs, tmp_path / "a report").left_out
    text = (tmp_path / "a report" / "writeup.md").read_text()
    assert "## Memory" not in text
    command = re.search(r"^Not measured here: .*Memory.*`stepscope sweep (.*)`", text, re.MULTILINE)[
        1
    ].split()
    assert "memory" in command and (tmp_path / "a report" / command[-1]).samefile(runs)
    assert {"memory", "ladder"} <= {*first.partition(": stepscope sweep ")[2].split()}


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([(3, "H200", "abc")], "1 run, on H200, 2025-01-03, measured by source abc;"),
        (
            [(5, "H200", "abc"), (3, None, None), (4, "H200", "")],
            "3 runs, on H200, 2025-01-03 to 2025-01-05, measured by source abc;",
        ),
        ([(3, name, name) for name in "cbaa"], "4 runs, on a, b, c, 2025-01-03, measured by source a, b, c;"),
        (
            [(3, name, name) for name in "edcba"],
            "5 runs, on a, b, c, and 2 more, 2025-01-03, measured by source a, b, c, and 2 more;",
        ),
        ([(3, None, None)], "1 run, on –, 2025-01-03, measured by source –;"),
    ],
)
def test_the_foot_says_once_what_the_runs_are_of(runs, said):
    records = [
        SimpleNamespace(
            started_at=datetime(2025, 1, day, tzinfo=UTC),
            machine={"device_name": device},
            software={"stepscope_source": source},
        )
        for day, device, source in runs
    ]
    assert said in rendering._foot(records)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (["small", "xl"], "> A tour of 2 of the handout's 5 sizes, small and xl. It leaves out"),
        (["xl"], "> One of the handout's 5 sizes, xl. It leaves out"),
        (["small", "medium", "large", "xl", "2.7B"], "> It leaves out"),
        (["nano"], "> It leaves out"),
    ],
)
def test_a_report_of_a_part_says_of_which_sizes_it_is(sizes, said):
    records = [
        record_of(configure("benchmark", size=size, context_length=16, device="cuda")) for size in sizes
    ]
    told = rendering._of_what(["a topic", "another"], records, "../a b")
    assert told.startswith(said) and "leaves out a topic; another." in told and "--runs '../a b'`" in told


def test_one_run_of_a_gpu_among_a_cpus_makes_it_a_gpus_report(tmp_path):
    store = Store(tmp_path / "runs")
    for size in ("nano", "tiny"):
        put(
            store,
            configure("benchmark", size=size, context_length=16, device="cpu"),
            status="failed",
            cause="stopped",
        )
    assert {*rendering.compose(store.root, tmp_path).pages} == titles(rendering.WITHOUT_GPU.glob("*.md"))
    put(
        store,
        configure("benchmark", size="small", context_length=16, device="cuda"),
        status="failed",
        cause="stopped",
    )
    assert {*rendering.compose(store.root, tmp_path).pages} == titles(
        rendering.CHAPTERS.glob("[0-9]*.md"), (rendering.CHAPTERS / "evidence").glob("*.md")
    )


def titles(*chapters):
    return {path.read_text().partition("\n")[0].partition("{%")[0].strip("# ") for path in chain(*chapters)}


def test_a_run_links_to_its_notebook_where_it_has_one_and_what_it_found_is_plain_text():
    with_one, without = (
        [
            record_of(
                configure("benchmark", size="nano", context_length=16, device="cpu"),
                notebook_sha256=digest,
                cause=cause,
                status="ok" if cause is None else "failed",
                results={"finding": "**58 ms** | <b>"},
            )
        ]
        for digest, cause in (("0" * 64, None), (None, "it died"))
    )
    (row,), (bare,) = (
        [rendering._run_row(record, ["size", "context_length"], "../runs") for record in own]
        for own in (with_one, without)
    )
    name = with_one[0].run_id
    assert row == [
        f"[{name}](../runs/{name}/notebook.ipynb)",
        "nano",
        "16",
        "58 ms \\| \\<b\\>",
        "1.00 s",
        "ok",
    ]
    assert bare == [name, *row[1:-1], "failed: it died"]
