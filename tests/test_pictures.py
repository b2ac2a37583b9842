"""Pictures say what they find: their titles follow the data, and what is in them has its words beside it."""

from itertools import combinations

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from reference import tables
from stepscope.report.story import attention as story_attention
from stepscope.report.story import step_time, waiting
from stepscope.say import style
from stepscope.studies.attention.cells import head, launching_as_long, timed
from stepscope.studies.benchmark import figures as of_benchmark
from stepscope.studies.ladder import facts, figures, printed
from stepscope.studies.memory import figures as of_memory
from stepscope.studies.mixed_precision import figures as of_precision
from stepscope.studies.nsys.figures import FAMILY_COLORS


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def own():
    return facts.reference(tables("ladder")["rungs"])


def texts_of(figure):
    return " ".join(text.get_text() for axis in figure.axes for text in axis.texts)


def title_of(figure):
    return figure.get_suptitle() or figure.axes[0].get_title("left")


def test_rungs_near_the_fastest_have_a_scale_of_their_own(own):
    rows = facts.climbed(own)
    near = figures.last_rungs(rows)
    assert 1 < len(near) < len(rows) and (near["median_ms"] < figures.NEAR * rows["median_ms"].min()).all()
    assert rows["median_ms"].iloc[-len(near) - 1] >= figures.NEAR * rows["median_ms"].min()
    drawn = figures.hero(own, "here")
    top, last = drawn.axes
    assert len(top.patches) + len(last.patches) == len(rows)
    floor = facts.ladder(own)["floor_ms"]
    assert {bar.get_x() for bar in last.patches} == {floor} and {bar.get_x() for bar in top.patches} == {0.0}
    ends = [bar.get_x() + bar.get_width() for bar in (*top.patches, *last.patches)]
    assert ends == pytest.approx(rows["median_ms"].tolist())
    assert texts_of(drawn).count("tok/s") == len(rows) and "Hugging Face" in texts_of(drawn)


def test_a_ladder_that_gains_nothing_says_so(own):
    rising = own[own["kind"] == "rung"].assign(median_ms=lambda rows: [100.0 + n for n in range(len(rows))])
    figure = figures.hero(rising, "here")
    assert "No change" in title_of(figure) and len(figure.axes) == 1
    assert "No change" not in title_of(figures.hero(own, "here"))


def test_a_run_is_read_in_at_most_three_sentences():
    rungs = tables("ladder")["rungs"]
    for one in facts.by_shape(rungs):
        said = printed.reading(one)
        assert said.count(". ") <= 2 and said.count("**") == 4
    assert printed.reading(rungs.iloc[:0]) == "Nothing fits."


def test_each_colour_of_the_phases_has_its_name():
    times, compiled = tables("benchmark")["times"], tables("compile")["times"]
    assert "loss" in texts_of(step_time.step_phases(times, compiled, "here"))
    unseen = times.assign(median_ms=times["median_ms"].where(times["phase"] != "loss", 0.0))
    assert "loss" not in texts_of(step_time.step_phases(unseen, pd.DataFrame(), "here"))


def test_precisions_are_named_over_the_waits():
    given = tables("benchmark")["times"], tables("nsys")["phases"], tables("mixed_precision")["times"]
    panel = waiting.waiting_map(*given, "here").axes[0]
    named = {text.get_text() for text in panel.texts}
    assert {"fp32", "bf16"} <= named and all(label.get_text().isdigit() for label in panel.get_xticklabels())


TIMES = ["median_ms", "ci_low_ms", "ci_high_ms"]


@pytest.mark.parametrize(("draw", "given", "columns", "where"), [
    (of_benchmark.optimizer, ("benchmark.times",), TIMES, ("optimizer", "foreach")),
    (of_benchmark.utilisation, ("benchmark.times", "nsys.phases"), ["utilisation"], ("size", "small")),
    (of_precision.running, ("mixed_precision.running",), ["error"], ("way", "bf16 into bf16")),
    (of_precision.memory, ("mixed_precision.times",), ["peak_allocated_mib"], ("precision", "bf16")),
    (of_precision.health, ("mixed_precision.health",), ["zero"], ("precision", "fp16")),
], ids=lambda value: getattr(value, "__name__", None))
def test_a_title_follows_its_numbers(draw, given, columns, where):
    own, *others = (tables(study)[name] for study, name in (one.split(".") for one in given))
    changed = own.assign(**{name: own[name].where(own[where[0]] != where[1], own[name] * 3) for name in columns})
    assert title_of(draw(own, *others, "here")) != title_of(draw(changed, *others, "here"))


def boxes(figure, texts):
    figure.canvas.draw()
    return [text.get_window_extent() for text in texts if text.get_text()]


def test_heads_of_many_shapes_do_not_touch():
    figure = figures.gains(tables("ladder")["rungs"], "here")
    [axis] = figure.axes
    sizes = [text for text in axis.texts if text.get_text()[0].isalpha()]
    heads = boxes(figure, [*axis.get_xticklabels(), *sizes])
    assert len(heads) == len(axis.get_xticks()) + len(sizes) > 10
    assert not any(one.overlaps(other) for one, other in combinations(heads, 2))
    assert len({text.get_text() for text in sizes}) == len(sizes)  # each size once


def test_points_that_wait_for_launches_are_hollow():
    cells = tables("attention")["cells"]
    for held in (cells, cells.assign(enqueue_ms=0.0)):
        figure = story_attention.draw_time(held, pd.DataFrame(), "here")
        for axis in figure.axes:
            rows = timed(held, precision=axis.get_title("left"), d_model=head(timed(held)))
            rows = rows[rows["implementation"].isin(story_attention.DRAWN)]
            hollow = sum(len(line.get_xdata()) for line in axis.lines if line.get_markerfacecolor() == "white")
            assert hollow == launching_as_long(rows).sum()
            assert (hollow > 0) == any("hollow" in text.get_text() for text in axis.texts)


def test_no_rung_is_lost_among_the_curves():
    curves = tables("ladder")["curves"]
    found, figure = facts.trained(curves), figures.curves(curves, "here")
    words = texts_of(figure)
    assert len(figure.axes[0].lines) == found["compared"] and str(found["inside"]) in words
    assert all(one["name"] in words for one in found["out"])


def test_what_checkpoints_save_is_the_title():
    given = [tables("memory")[name] for name in ("checkpoints", "runs", "samples")]
    before = title_of(of_memory.checkpoints(*given, "here"))
    assert "%" in before
    samples = given[2].assign(time_ms=given[2]["time_ms"].where(~given[2]["run_id"].isin(given[0]["run_id"]), 1.0))
    assert "1 block" in before and before != title_of(of_memory.checkpoints(*given[:2], samples, "here"))


@pytest.mark.parametrize("color", [*style.PALETTE, *FAMILY_COLORS.values(), "0.65", "white"])
def test_ink_is_read_on_every_colour(color):
    def contrast(one, other):
        light, dark = sorted((style.luminance(one), style.luminance(other)), reverse=True)
        return (light + 0.05) / (dark + 0.05)
    assert contrast(style.ink_on(color), color) >= style.READABLE
    assert contrast(style.as_text(color), "white") >= style.READABLE
