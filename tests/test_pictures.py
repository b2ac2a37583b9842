"""Pictures say what they find: their titles follow the data, and what is in them has its words beside it."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from reference import tables
from stepscope.report.story import step_time, waiting
from stepscope.studies.benchmark import figures as of_benchmark
from stepscope.studies.ladder import facts, figures, printed
from stepscope.studies.mixed_precision import figures as of_precision


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
