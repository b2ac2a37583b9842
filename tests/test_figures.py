"""Test figures: timelines, memory plots and their use in templates."""

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


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def spans(axes) -> dict[int, list[tuple[str, float, float]]]:
    """Return the color, start and end of each span, keyed by lane."""
    lanes = {}
    for collection in axes.collections:
        color = to_hex(collection.get_facecolor()[0])
        for path in collection.get_paths():
            (left, low), (right, high) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            span = (color, round(left, 6), round(right, 6))
            lanes.setdefault(round((low + high) / 2), []).append(span)
    return {lane: sorted(own, key=lambda span: span[1]) for lane, own in lanes.items()}


TIMELINE = ["kernel_category", "launch_ns", "launch_duration_ns", "start_ns", "duration_ns"]


@pytest.mark.parametrize(("launch_ns", "waits"), [(170_000, False), (200_000, True)])
def test_lanes_show_operations_within_the_window(launch_ns, waits):
    """The window is the first millisecond; the GPU is busy for 250 µs of it, and some kernels overlap."""
    rows = [
        ("unknown", 300_000, launch_ns, 900_000, 300_000),
        ("matrix multiply", -20_000, 30_000, -50_000, 150_000),
        ("elementwise", 200_000, 5_000, 50_000, 100_000),
        ("elementwise", 700_000, 6_000, 1_000_000, 7_000),
        ("optimizer", -500_000, 500_000, -300_000, 300_000),
        ("optimizer", 1_000_000, 9_000, 2_000_000, 9_000),
    ]
    forward = pd.DataFrame(rows, columns=TIMELINE).assign(mode="forward")
    host = [
        (style.MUTED, -20, 10),
        (style.MUTED, 200, 205),
        (style.MUTED, 300, 300 + launch_ns / 1e3),
        (style.MUTED, 700, 706),
    ]
    kernels = [(style.BLUE, -50, 100), (style.AMBER, 50, 150), (style.FILL, 900, 1200)]
    drawn = nsys.lanes(forward, "Mine")
    (axes,) = drawn.axes
    assert spans(axes) == {0: host, 1: kernels}
    assert drawn.message.startswith("Mine: the GPU is busy for 25%") and ("waits" in drawn.message) == waits
    assert axes.get_xlim() == (0, 1000) and axes.yaxis_inverted()
    legend = {text.get_text() for text in drawn.legends[0].texts}
    assert legend == {"matrix multiply", "elementwise", "all else"}
    cpu = nsys.lanes(forward, on_cpu=True)
    assert "operators run for 25%" in cpu.message and "waits" not in cpu.message


def memory_rows(mode: str, totals: list[float]) -> pd.DataFrame:
    """Return a memory timeline with these total sizes in GiB, divided between weights and other tensors."""
    rows = pd.DataFrame({column(kind): 0.0 for kind in LIVE}, range(len(totals)))
    return rows.assign(
        mode=mode,
        phase="forward",
        weights_gib=[total / 4 for total in totals],
        other_gib=[3 * total / 4 for total in totals],
    )


def test_memory_timeline_keeps_each_intervals_highest_point():
    totals = [(97 * place) % 401 + 1.0 for place in range(401)]
    drawn = memory._highest(memory_rows("step", totals))
    assert drawn[["weights_gib", "other_gib"]].sum(axis=1).tolist() == [
        max(totals[at : at + 3]) for at in range(0, 401, 3)
    ]


@pytest.mark.parametrize("modes", [["forward_backward"], ["step", "forward"], ["step"], [*PHASES]])
def test_memory_timeline_draws_recorded_modes_with_their_peaks(modes):
    rows = pd.concat([memory_rows(mode, [1.0, len(mode), 2.0]) for mode in modes], ignore_index=True)
    peaks = pd.DataFrame({"mode": modes, "peak_gib": [len(mode) + 0.25 for mode in modes]})
    drawn = memory.memory_timeline("A title", rows, peaks)
    in_order = [mode for mode in PHASES if mode in modes]
    assert [texts(axes)[-1] for axes in drawn.axes] == [
        tables.number(len(mode) + 0.25, "") for mode in in_order
    ]
    assert drawn.axes[0].get_ylim()[1] > max(map(len, modes))


def test_every_figure_is_used_in_a_template():
    templates = [*Path(str(PROJECT), "writeup").rglob("*.j2"), *machine.FOLDER.glob("*.j2")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in templates)
    assert set(re.findall(r'figure\(\s*"(\w+)"', text)) == set(all_figures())
