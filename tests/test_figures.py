"""What figures draw: each number at its place, by its name and in its unit."""

import re
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.colors import to_hex

from stepscope import PROJECT
from stepscope.config import PHASES
from stepscope.figures import all_figures, memory
from stepscope.report import machine, style, tables
from stepscope.studies.memory.tables import LIVE, column
from stepscope.studies.nsys import figures as nsys


def drawn_lines(axes) -> dict[str, list[tuple[float, float]]]:
    """The points of lines with markers, by colour."""
    return {
        line.get_color(): [*zip(map(float, line.get_xdata()), map(float, line.get_ydata()))]
        for line in axes.lines
        if line.get_marker() == "o"
    }


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def ticks(axis) -> list[str]:
    return [tick.get_text() for tick in axis.get_ticklabels()]


def bars(axes) -> list[tuple[float, float]]:
    return [(round(bar.get_x(), 6), round(bar.get_width(), 6)) for bar in axes.patches]


def test_a_line_goes_from_left_to_right_and_ends_at_its_last_place():
    rows = pd.DataFrame(
        [
            (4, 1.0, "xl"),
            (1, 5.0, "small"),
            (2, 3.0, "xl"),
            (1, 2.0, "xl"),
            (2, 9.0, "small"),
            (1, 7.0, "mine"),
        ],
        columns=["x", "y", "size"],
    )
    _, axes = style.figure("A message")
    assert style.lines(axes, rows, "x", "y", "size", style.SIZE_COLORS) == {
        "xl": (4, 1.0),
        "small": (2, 9.0),
        "mine": (1, 7.0),
    }
    assert drawn_lines(axes) == {
        style.SIZE_COLORS["xl"]: [(1, 2), (2, 3), (4, 1)],
        style.SIZE_COLORS["small"]: [(1, 5), (2, 9)],
        style.INK: [(1, 7)],
    }


def test_stacked_parts_stand_beside_each_other_and_only_what_is_seen_is_named():
    """The first row is on top; columns without a colour are one other; what is narrow has no text."""
    parts = pd.DataFrame(
        {
            "forward": [0.3, 0.5],
            "loss": [0.002, 0.001],
            "mine": [0.05, 0.2],
            "yours": [0.05, 0.1],
            "backward": [0.6, 0.2],
        },
        ["a", "b"],
    )
    _, axes = style.figure("A message")
    style.stacked_bars(axes, parts, style.PHASE_COLORS, lambda name, place: f"{name} {place}")
    assert bars(axes) == [
        (0, 0.3),
        (0, 0.5),
        (0.3, 0.002),
        (0.5, 0.001),
        (0.302, 0.05),
        (0.501, 0.2),
        (0.352, 0.05),
        (0.701, 0.1),
        (0.402, 0.6),
        (0.801, 0.2),
    ]
    assert axes.get_legend_handles_labels()[1] == ["forward", "other", "backward"]
    assert texts(axes) == ["forward 0", "forward 1", "mine 1", "yours 1", "backward 0", "backward 1"]
    assert [round(text.get_position()[0], 6) for text in axes.texts] == [
        0.15,
        0.25,
        0.601,
        0.751,
        0.702,
        0.901,
    ]
    assert [to_hex(bar.get_facecolor()) for bar in axes.patches[::2]] == [
        style.BLUE,
        style.INK,
        style.FILL,
        style.FILL,
        style.ORANGE,
    ]
    assert ticks(axes.yaxis) == ["a", "b"] and axes.yaxis_inverted()


def test_bars_have_their_numbers_at_their_ends_and_room_for_them():
    _, axes = style.figure("A message")
    style.bars(axes, ["a", "b", "c"], [2.0, 5.0, 1.0], ["two", "five", "one"])
    assert bars(axes) == [(0, 2), (0, 5), (0, 1)] and [
        (*text.xy, text.get_text()) for text in axes.texts
    ] == [(2, 0, "two"), (5, 1, "five"), (1, 2, "one")]
    assert (
        ticks(axes.yaxis) == ["a", "b", "c"]
        and axes.yaxis_inverted()
        and axes.get_xlim()[0] == 0
        and axes.get_xlim()[1] > 5.5
    )


def spans(axes) -> dict[int, list[tuple[str, float, float]]]:
    """What lies in each lane: colour, begin and end."""
    found = {}
    for made in axes.collections:
        for path in made.get_paths():
            (left, low), (right, high) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            found.setdefault(round((low + high) / 2), []).append(
                (to_hex(made.get_facecolor()[0]), round(left, 6), round(right, 6))
            )
    return {lane: sorted(own, key=lambda one: one[1]) for lane, own in found.items()}


@pytest.mark.parametrize(("launch_ns", "waits"), [(170_000, False), (200_000, True)])
def test_a_lane_has_what_runs_in_the_window_and_is_busy_for_their_union(launch_ns, waits):
    """What ends where the window begins, or begins where it ends, is not in it; the GPU works for 500 µs, kernels that overlap for 550."""
    columns = ["kernel_category", "launch_ns", "launch_duration_ns", "start_ns", "duration_ns"]
    forward = pd.DataFrame(
        [
            ("unheard of", 300_000, launch_ns, 900_000, 300_000),
            ("matrix multiply", -20_000, 30_000, -50_000, 150_000),
            ("elementwise", 200_000, 5_000, 50_000, 100_000),
            ("elementwise", 700_000, 6_000, 1_000_000, 7_000),
            ("optimizer", -500_000, 500_000, -300_000, 300_000),
            ("optimizer", 1_000_000, 9_000, 2_000_000, 9_000),
        ],
        columns=columns,
    )
    graph = pd.DataFrame(
        [
            ("matrix multiply", -900_000, 9_000, -10_000, 110_000),
            ("elementwise", -900_000, 9_000, 400_000, 300_000),
        ],
        columns=columns,
    )
    drawn = nsys.lanes(forward.assign(mode="forward"), "Mine")
    host = [
        (style.MUTED, -20, 10),
        (style.MUTED, 200, 205),
        (style.MUTED, 300, 300 + launch_ns / 1e3),
        (style.MUTED, 700, 706),
    ]
    ran = [(style.BLUE, -50, 100), (style.AMBER, 50, 150), (style.FILL, 900, 1200)]
    assert spans(drawn.axes[0]) == {0: host, 1: ran} and drawn.message.startswith("Mine: the GPU is busy 25%")
    assert (
        ("waits" in drawn.message) == waits
        and drawn.axes[0].get_xlim() == (0, 1000)
        and drawn.axes[0].yaxis_inverted()
    )
    assert {text.get_text() for text in drawn.legends[0].texts} == {
        "matrix multiply",
        "elementwise",
        "all else",
    }
    both = nsys.lanes(
        pd.concat(
            [graph.assign(mode="replayed"), forward.assign(mode="forward"), forward.assign(mode="step")]
        )
    )
    assert spans(both.axes[0]) == {0: host, 1: ran, 2: [(style.BLUE, -10, 100), (style.AMBER, 400, 700)]}
    assert "busy 25%" in both.message and "graph 40%" in both.message and "waits" not in both.message
    assert ticks(both.axes[0].yaxis) == ["CPU launches", "GPU runs", "as a CUDA graph"]
    cpu = nsys.lanes(forward.assign(mode="forward"), on_cpu=True)
    assert (
        "operators run 25%" in cpu.message
        and "waits" not in cpu.message
        and ticks(cpu.axes[0].yaxis) == ["host", "operators"]
    )


def memory_rows(mode: str, totals: list[float]) -> pd.DataFrame:
    """A timeline in which weights and other tensors take these GiB, all in the first phase."""
    rows = pd.DataFrame({column(kind): 0.0 for kind in LIVE}, range(len(totals)))
    return rows.assign(
        mode=mode,
        phase="forward",
        weights_gib=[total / 4 for total in totals],
        other_gib=[3 * total / 4 for total in totals],
    )


def test_memory_timeline_draws_the_highest_of_each_stretch():
    totals = [(97 * place) % 401 + 1.0 for place in range(401)]
    drawn = memory._highest(memory_rows("step", totals))
    assert drawn[["weights_gib", "other_gib"]].sum(axis=1).tolist() == [
        max(totals[at : at + 3]) for at in range(0, 401, 3)
    ]


@pytest.mark.parametrize("modes", [["forward_backward"], ["step", "forward"], ["step"], [*PHASES]])
def test_memory_timeline_draws_the_recorded_modes_with_their_peaks(modes):
    rows = pd.concat([memory_rows(mode, [1.0, len(mode), 2.0]) for mode in modes], ignore_index=True)
    peaks = pd.DataFrame({"mode": modes, "peak_gib": [len(mode) + 0.25 for mode in modes]})
    drawn = memory.memory_timeline("A title", rows, peaks)
    in_order = [mode for mode in PHASES if mode in modes]
    assert [texts(axes)[-1] for axes in drawn.axes] == [
        tables.number(len(mode) + 0.25, "") for mode in in_order
    ]
    assert drawn.axes[0].get_ylim()[1] > max(map(len, modes))


@pytest.mark.parametrize(
    "spans, busy",
    [
        ([(-300_000, -100_000), (-100_000, 200_000)], 0.2),
        ([(900_000, 1_500_000), (1_200_000, 1_300_000)], 0.1),
        ([(0, 500_000), (250_000, 750_000)], 0.75),
    ],
)
def test_busy_is_of_the_drawn_millisecond_alone(spans, busy):
    ran = pd.DataFrame([{"start_ns": start, "duration_ns": end - start} for start, end in spans])
    assert nsys.busy_share(ran) == pytest.approx(busy)


def test_every_figure_is_shown_by_a_template():
    templates = [*Path(str(PROJECT), "writeup").rglob("*.j2"), *machine.FOLDER.glob("*.j2")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in templates)
    assert set(re.findall(r'figure\(\s*"(\w+)"', text)) == set(all_figures())
