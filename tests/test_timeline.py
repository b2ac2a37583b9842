"""The interactive memory timeline: text stays text, and a browser draws it, by mouse, finger and key."""
import json
import re
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from bs4 import BeautifulSoup

from browser import DESKTOP, PHONE, browser, shown, too_wide, violations
from stepscope.studies.memory.timeline_page import _sha256, timeline_page

HOSTILE = ["</script><script>document.title = 'taken'</script>", "<!--<script>",
           "</title><img src=x onerror=alert(1)>",
           "\u2028'); document.title = 'taken'; //", "</SCRIPT ><form action=//x.test>", "${document.title}",
           "\\u003c", "]]>"]


@pytest.fixture(scope="module")
def small() -> pd.DataFrame:
    """Two steps of the small model at context 128, fp32, as recorded on an H200."""
    return pd.read_parquet(Path(__file__).parent / "data/memory/small-ctx128-step-fp32.parquet")


def data_of(page):
    return json.loads(BeautifulSoup(page, "html.parser").find("script", id="data").string)


def test_what_records_name_stays_text(small):
    for text in HOSTILE:
        evil = small.head(600).assign(line=text, region=text, function=text)
        page = timeline_page(text, {text: evil})
        assert len(re.findall(r"</script", page, re.IGNORECASE)) == 2
        assert len(re.findall(r"<script", page, re.IGNORECASE)) == 2
        assert not re.search(r"<(img|form|!--)|\u2028'", page[page.index("<script"):], re.IGNORECASE)
        data = data_of(page)
        assert data["runs"][0]["title"] == text and all(text in place for place in data["places"])
        title = re.search(r"<title>(.*?)</title>", page, re.DOTALL)[1]
        assert "<" not in title


def test_it_is_whole_and_loads_nothing(small):
    page = timeline_page("A title", {"one": small, "two": small.head(600)})
    assert not re.search(r"src\s*=|href\s*=(?!\"data:,)|https?:|@import|url\(", page)
    assert all(f"{what} 'none'" in page for what in ("default-src", "base-uri", "form-action"))
    script = BeautifulSoup(page, "html.parser").find_all("script")[1].string
    assert re.findall(r"script-src ([^;]*)", page) == [f"'{_sha256(script)}'"]
    run = data_of(page)["runs"][0]
    assert [r["title"] for r in data_of(page)["runs"]] == ["one", "two"]
    assert sum(run["size"]) == small["size"].sum()
    assert pd.Series(run["at"]).cumsum().tolist() == small["allocated_at"].tolist()
    at = small.index[(small["region"] == "attention.softmax") & (small["layer"] == 3)][0]
    place = data_of(page)["places"][run["place"][at]]
    assert place == "forward, layer 3, attention.softmax, softmax"  # no line: it is that of the code measured


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def file(small, tmp_path_factory):
    path = tmp_path_factory.mktemp("timeline") / "timeline.html"
    path.write_text(timeline_page("A title", {"one": small, "two": small.head(600)}), encoding="utf-8")
    return path


PAINTED = """() => {
  const {width, height} = canvas, pixels = pen.getImageData(0, 0, width, height).data, colors = new Set();
  for (let i = 0; i < pixels.length; i += 4 * 97) colors.add(pixels.slice(i, i + 4).join());
  return colors.size;
}"""


def said_of(page):
    return page.locator("#what").inner_text()


def test_pointing_tells_where_an_allocation_was_made(chromium, file):
    with shown(chromium, file) as (page, said):
        assert page.evaluate(PAINTED) > 5
        box = page.locator("#canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 2)
        assert "build" in said_of(page) and "parameters" in said_of(page)  # at the bottom lies what was made first
        page.locator("#run").select_option("1")
        assert said_of(page).startswith("Peak") and "build" not in said_of(page)  # that was another run's
        assert said == []


def test_wheel_drag_and_buttons_zoom_and_move(chromium, file):
    with shown(chromium, file) as (page, _):
        def view():
            return page.evaluate("[from, to]")
        whole, box = view(), page.locator("#canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
        page.mouse.wheel(0, -300)
        closer = view()
        assert closer[0] > whole[0] and closer[1] < whole[1]
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 2 + 60, box["y"] + 100)
        page.mouse.up()
        moved = view()
        assert moved[0] < closer[0] and moved[1] - moved[0] == pytest.approx(closer[1] - closer[0])
        page.get_by_role("button", name="Zoom out").click()
        assert view()[1] - view()[0] > closer[1] - closer[0]
        page.get_by_role("button", name="All").click()
        assert view() == whole


def test_keys_go_along_and_from_one_allocation_to_the_next(chromium, file):
    with shown(chromium, file) as (page, _):
        page.locator("#canvas").focus()
        page.keyboard.press("ArrowRight")
        first = said_of(page)
        page.keyboard.press("ArrowRight")
        assert first.startswith("Event ") and said_of(page) != first
        page.keyboard.press("ArrowUp")
        bottom = said_of(page)
        page.keyboard.press("ArrowUp")
        assert "allocated at" in bottom and said_of(page) != bottom
        page.keyboard.press("ArrowDown")
        assert said_of(page) == bottom
        page.keyboard.press("+")
        assert page.evaluate("to - from") < page.evaluate("run.events - 1")
        page.keyboard.press("0")
        assert page.evaluate("to - from") == page.evaluate("run.events - 1")


def test_a_finger_tells_too(chromium, file):
    with shown(chromium, file, PHONE, has_touch=True, is_mobile=True) as (page, _):
        box = page.locator("#canvas").bounding_box()
        page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] - 2)
        assert "build" in said_of(page)


def test_ticks_are_round_at_any_zoom(chromium, file):
    with shown(chromium, file) as (page, _):
        for factor in (1, 0.31, 0.017, 3e-4, 2e-6):
            labels = page.evaluate("factor => { [low, high] = [run.top * 0.4, run.top * (0.4 + 0.6 * factor)]; return ticks(); }", factor)
            steps = {round(b[0] - a[0]) for a, b in pairwise(labels)}
            units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}
            assert 2 <= len(labels) <= 11 and max(steps) - min(steps) <= 1
            number, unit = labels[1][1].split()
            assert float(number) * units[unit] == pytest.approx(labels[1][0], rel=1e-3)
            step = (labels[1][0] - labels[0][0]) / units[unit]
            assert f"{step:e}"[:6] in ("1.0000", "2.0000", "5.0000")


def test_what_was_folded_is_drawn_when_it_is_shown(chromium, file, tmp_path):
    frame = tmp_path / "frame.html"
    frame.write_text(f"<details><summary>More</summary><iframe width=800 height=700 src='{file.as_uri()}'></iframe></details>")
    with shown(chromium, frame) as (page, said):
        page.locator("summary").click()
        inner = page.frames[-1]
        inner.wait_for_function(f"({PAINTED})() > 5")
        assert said == []


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "light"), (DESKTOP, "dark")])
def test_it_is_clean_and_fits_its_window(chromium, file, size, scheme):
    with shown(chromium, file, size, color_scheme=scheme) as (page, said):
        assert said == [] and too_wide(page) == [] and violations(page) == []


def test_dark_is_dark_and_black_is_seen_on_it(chromium, file):
    with shown(chromium, file, color_scheme="dark") as (page, _):
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(map(int, re.findall(r"\d+", ground))) < 60
        assert page.evaluate("DATA.colors.map((_, c) => paint(c)).includes('#000000')") is False


def test_no_other_script_runs(chromium, file, tmp_path):
    other = tmp_path / "other.html"
    text = file.read_text(encoding="utf-8").replace("</body>", "<script>document.title = 'taken'</script></body>")
    other.write_text(text, encoding="utf-8")
    with shown(chromium, other) as (page, said):
        assert page.title() == "A title" and len(said) == 1
