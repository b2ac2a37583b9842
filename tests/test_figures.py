"""What figures draw: each number at its place, by its name and in its unit."""

from types import SimpleNamespace

import pandas as pd
import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_hex

from stepscope.report import style
from stepscope.studies.attention import figures as attention
from stepscope.studies.benchmark import figures as benchmark
from stepscope.studies.ladder import figures as ladder
from stepscope.studies.memory import figures as memory
from stepscope.studies.mixed_precision import figures as mixed_precision
from stepscope.studies.nsys import figures as nsys
from stepscope.traces.families import MATMUL


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


def test_phases_are_shares_of_their_sum_with_their_milliseconds(monkeypatch):
    times = pd.DataFrame(
        {
            "optimizer": [10.0, 60.0],
            "forward": [20.0, 120.0],
            "loss": [10.0, 20.0],
            "backward": [60.0, 200.0],
        },
        ["small", "xl"],
    )
    monkeypatch.setattr(benchmark, "phase_times", lambda _: times)
    monkeypatch.setattr(benchmark, "context", lambda _: 1024)
    drawn = benchmark.phases({})
    assert bars(drawn.axes[0]) == [
        (0, 0.2),
        (0, 0.3),
        (0.2, 0.1),
        (0.3, 0.05),
        (0.3, 0.6),
        (0.35, 0.5),
        (0.9, 0.1),
        (0.85, 0.15),
    ]
    assert texts(drawn.axes[0]) == ["20.0 ms", "120 ms", "10.0 ms", "60.0 ms", "200 ms", "10.0 ms", "60.0 ms"]
    assert "80%" in drawn.message and "10% to 15%" in drawn.message and "1,024" in drawn.axes[0].get_xlabel()


def test_what_is_no_matmul_stands_eager_above_compiled(monkeypatch):
    rows = pd.DataFrame(
        {
            "gpu_ms": [5.0, 30.0],
            "gpu_ms_eager": [10.0, 20.0],
            "count": [50, 3000],
            "count_eager": [400, 2000],
        },
        ["small", "xl"],
    )
    monkeypatch.setattr(benchmark, "other_than_matmuls", lambda _: rows)
    monkeypatch.setattr(benchmark, "compiled_with_eager", lambda *_: pd.DataFrame({"precision": ["bf16"]}))
    monkeypatch.setattr(benchmark, "context", lambda _: 512)
    drawn = benchmark.compile_kernels({})
    axes = drawn.axes[0]
    assert (
        bars(axes) == [(0, 10), (0, 5), (0, 20), (0, 30)]
        and "xl" in drawn.message
        and "20.0 ms to 30.0 ms" in drawn.message
    )
    assert ticks(axes.yaxis) == ["small, eager", "small, compiled", "xl, eager", "xl, compiled"]
    assert texts(axes) == [
        "10.0 ms, 400 kernels",
        "5.00 ms, 50 kernels",
        "20.0 ms, 2,000 kernels",
        "30.0 ms, 3,000 kernels",
    ]


def test_steps_that_do_not_wait_are_hollow(monkeypatch):
    rows = pd.DataFrame(
        [("small", 128, 0.2), ("small", 1024, 0.97), ("xl", 128, 0.9), ("xl", 1024, None), ("xl", 512, 0.99)],
        columns=["size", "context_length", "busy"],
    ).assign(enqueue_ms=9.0, gpu_ms=5.0)
    monkeypatch.setattr(benchmark, "low_steps", lambda _: rows)
    monkeypatch.setattr(benchmark, "low_precision", lambda _: "bf16")
    monkeypatch.setattr(
        benchmark,
        "waiting",
        lambda _: pd.DataFrame({128: [True, True], 1024: [True, False]}, ["small", "xl"]),
    )
    drawn = benchmark.busy({})
    axes = drawn.axes[0]
    assert [*map(tuple, axes.collections[0].get_offsets().tolist())] == [(1024, 0.97), (512, 0.99)]
    assert drawn_lines(axes) == {
        style.SIZE_COLORS["small"]: [(128, 0.2), (1024, 0.97)],
        style.SIZE_COLORS["xl"]: [(128, 0.9), (512, 0.99)],
    }
    assert (
        "2 of 2 sizes" in drawn.message
        and "128, and 1 at 1,024" in drawn.message
        and ticks(axes.xaxis) == ["128", "512", "1,024"]
    )


def test_a_precisions_gain_is_drawn_over_the_context_beside_none(monkeypatch):
    rows = pd.DataFrame(
        [("xl", 1024, 0.5), ("xl", 128, 3.0), ("small", 128, 1.5), ("small", 256, None)],
        columns=["size", "context_length", "gain"],
    )
    monkeypatch.setattr(
        mixed_precision,
        "with_fp32",
        lambda tables, **wanted: rows if wanted == {"precision": "bf16", "mode": "step"} else None,
    )
    monkeypatch.setattr(
        mixed_precision, "gains", lambda tables, precision: pd.Series({"small": 1.5, "xl": 3.0})
    )
    monkeypatch.setattr(mixed_precision, "context", lambda _: 128)
    drawn = mixed_precision.precision_gain({})
    axes = drawn.axes[0]
    assert drawn_lines(axes) == {
        style.SIZE_COLORS["xl"]: [(128, 3.0), (1024, 0.5)],
        style.SIZE_COLORS["small"]: [(128, 1.5)],
    }
    assert (
        "1.50x (small) to 3.0x (xl)" in drawn.message
        and axes.get_xscale() == "log"
        and axes.get_ylim()[0] == 0
    )
    assert ticks(axes.xaxis) == ["128", "1,024"] and {*texts(axes)} == {"small", "xl"}


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ({1e-3: 0.9, 0.1: 0.8, 1.0: 0.0, 100.0: 0.7, 1e4: 1.0}, ("0.1 and less", "100 and more")),
        ({1e-3: 0.0, 0.1: 0.0, 1.0: 0.0, 100.0: 0.0, 1e4: 0.0}, ("nowhere",)),
    ],
)
def test_a_norm_breaks_between_the_nearest_deviations_that_lose_it(monkeypatch, lost, words):
    error = pd.DataFrame({at: [1.0, 2e-3 * at, 1e-3 * at] for at in lost}, ["fp32", "bf16", "fp16"]).stack()
    share = pd.DataFrame(
        {at: [0.0, 0.0, value] for at, value in lost.items()}, ["fp32", "bf16", "fp16"]
    ).stack()
    monkeypatch.setattr(
        mixed_precision,
        "pivoted",
        lambda _, name: pd.DataFrame({"output": {"norm error": error, "norm lost": share}[name]}),
    )
    drawn = mixed_precision.norms({})
    assert all(word in drawn.message for word in words) and (
        drawn.axes[0].get_xscale(),
        drawn.axes[0].get_yscale(),
    ) == ("log", "log")
    assert drawn_lines(drawn.axes[0]) == {
        style.PRECISION_COLORS[name]: [(at, scale * at) for at in sorted(lost)]
        for name, scale in (("fp16", 1e-3), ("bf16", 2e-3))
    }


def test_attention_is_drawn_a_line_an_implementation_with_what_ran_out_named_too():
    """Rows of another width or precision, and without a time, come first; the gain is at the longest that naive did."""
    cases = [
        ("naive", 256, 4.0),
        ("flash", 1024, 6.0),
        ("naive", 1024, None),
        ("flash", 256, 1.0),
        ("compiled", 256, 2.0),
        ("naive", 128, 1.0),
    ]
    rows = pd.DataFrame(
        [
            (*case, d, precision)
            for d, precision in ((32, "bf16"), (64, "fp32"), (64, "bf16"))
            for case in cases
        ],
        columns=["implementation", "sequence", "gpu_ms", "d_model", "precision"],
    ).assign(batch_size=8)
    usual = rows.eval("d_model == 64 and precision == 'bf16'")
    drawn = attention.attention_time(
        {"attention.passes": rows.assign(gpu_ms=rows["gpu_ms"].where(usual, 50 * rows["gpu_ms"]))}
    )
    axes = drawn.axes[0]
    assert drawn_lines(axes) == {
        attention.COLORS["naive"]: [(128, 1), (256, 4)],
        attention.COLORS["flash"]: [(256, 1), (1024, 6)],
        attention.COLORS["compiled"]: [(256, 2)],
    }
    assert (axes.get_xscale(), axes.get_yscale(), axes.get_ylabel()) == ("log", "log", "GPU time, ms") and {
        *texts(axes)
    } == {"naive", "flash", "compiled"}
    assert (
        all(words in drawn.message for words in ("256 positions", "flash", "4.0x"))
        and "batch 8, d 64, bf16" in axes.get_xlabel()
    )
    assert [tick.replace(",", "") for tick in ticks(axes.xaxis)] == ["1024", "256"]
    heights = {text.get_text(): text.xy[1] for text in axes.texts}
    assert heights["compiled"] < heights["naive"] < heights["flash"], "in the order of their last points"
    squares = rows.assign(gpu_ms=rows["gpu_ms"].mask(rows["implementation"] == "flash", 70.0))
    assert "T x T is as fast" in attention.attention_time({"attention.passes": squares}).message


def test_the_ladder_has_each_step_and_the_fastest_baseline_beside_its_bound(monkeypatch):
    rows = pd.DataFrame({"wall_ms": [40.0, 50.0, 20.0]}, ["fp32", "tf32", ladder.RUNGS[-1]])
    peers = pd.DataFrame({"wall_ms": [30.0, 25.0]}, [ladder.AS_IT_COMES[0], ladder.FAIR[0]])
    monkeypatch.setattr(ladder, "largest_ladder", lambda _: (SimpleNamespace(size="xl"), rows))
    monkeypatch.setattr(ladder, "timed", lambda rows, names=None: peers if names else rows)
    monkeypatch.setattr(
        ladder, "bounds", lambda _, own: own.assign(bound_ms=[1.0, 2.0, 12.0], reference_ms=[3.0, 4.0, 15.0])
    )
    drawn = ladder.ladder({})
    axes = drawn.axes[0]
    (dots,) = (made for made in axes.collections if isinstance(made, PathCollection))
    assert dots.get_offsets().tolist() == [[40, 0], [50, 1], [20, 2], [25, 3]]
    assert [to_hex(color) for color in dots.get_facecolors()] == [style.BLUE] * 3 + [style.ORANGE]
    assert (
        ticks(axes.yaxis)[:4] == [ladder.NAMES[name] for name in (*rows.index, ladder.FAIR[0])]
        and axes.get_xscale() == "log"
    )
    assert [text.split("alone ")[-1].split("rate ")[-1] for text in texts(axes)] == [
        "40.0 ms",
        "50.0 ms",
        "20.0 ms",
        "25.0 ms",
        "12.0 ms",
        "15.0 ms",
    ]
    assert "40.0 ms become 20.0 ms, 2.0x" in drawn.message and axes.yaxis_inverted()
    assert axes.get_xlim()[0] < 12 and axes.get_xlim()[1] > 50


def test_the_waterfall_goes_from_the_step_to_its_bound_the_largest_part_first(monkeypatch):
    parts = pd.DataFrame(
        {"ms": [5.0, 30.0, 9.0], "bound_ms": [0.0, 20.0, 8.0], "over": [5.0, 10.0, 1.0]},
        [ladder.GAPS, "matmuls", "AdamW"],
    )
    monkeypatch.setattr(ladder, "last_step", lambda _: (SimpleNamespace(size="xl"), parts, None))
    drawn = ladder.last_step_parts({})
    axes = drawn.axes[0]
    assert bars(axes) == [(34, 10), (29, 5), (28, 1)] and ticks(axes.yaxis) == [
        "matmuls",
        ladder.GAPS,
        "AdamW",
    ]
    assert texts(axes) == [
        "10.0 over 20.0 ms",
        "5.00 ms",
        "1.00 over 8.00 ms",
        "the step 44.0 ms",
        "FLOPs and bytes alone 28.0 ms",
    ]
    assert [to_hex(bar.get_facecolor()) for bar in axes.patches] == [
        style.BLUE,
        style.FILL,
        style.BLUE,
    ] and "16.0 ms of the last step's 44.0 ms" in drawn.message
    assert [text.xy[0] for text in axes.texts[3:]] == [44, 28]
    assert [(text.xy[0], text.get_ha()) for text in axes.texts[:3]] == [
        (34, "right"),
        (34, "left"),
        (29, "left"),
    ], "where there is room"


def test_the_roofline_has_each_steps_parts_under_the_rates_of_their_unit(monkeypatch):
    points = pd.DataFrame(
        [
            ("fp32", ladder.MATMULS, 300.0, 40.0),
            (ladder.LAST, ladder.MATMULS, 600.0, 500.0),
            ("fp32", "norms", 2.0, 4.0),
        ],
        columns=["step", "part", "intensity", "tflops"],
    )
    monkeypatch.setattr(ladder, "roofline", lambda _: (SimpleNamespace(size="xl"), points))
    monkeypatch.setattr(ladder, "roofs", lambda _: {"matmul_bf16": 800.0, "matmul_fp32": 50.0, "copy": 4.0})
    monkeypatch.setattr(ladder, "launch_wall", lambda _: ("small", None, None, 7.0))
    drawn = ladder.ladder_roofline({})
    axes = drawn.axes[0]
    dots = {
        to_hex(made.get_facecolor()[0]): made.get_offsets().tolist()
        for made in axes.collections
        if isinstance(made, PathCollection)
    }
    assert dots == {style.ORANGE: [[300, 40], [2, 4]], style.BLUE: [[600, 500]]} and (
        axes.get_xscale(),
        axes.get_yscale(),
    ) == ("log", "log")
    assert axes.lines[0].get_xydata().tolist() == [[0.5, 2.0], [200, 800]], "a copy's rate up to the matmuls'"
    levels = [
        made.get_segments()[0].tolist() for made in axes.collections if isinstance(made, LineCollection)
    ]
    assert levels == [[[200, 800], [3600, 800]], [[12.5, 50], [3600, 50]], [[0.5, 7], [3600, 7]]]
    assert {
        "bf16 800 TFLOP/s",
        "fp32 50.0 TFLOP/s",
        "copy 4.00 TB/s",
        "small, a launch at a time\n7.00 TFLOP/s",
    } <= {*texts(axes)}
    assert "40.0 TFLOP/s in the fp32 step, 500 TFLOP/s in the last" in drawn.message


def test_fp8s_gain_is_drawn_over_the_tokens_where_there_are_several(monkeypatch):
    rows = pd.DataFrame(
        [("xl", 4096, 1.2), ("xl", 1024, 0.9), ("small", 2048, 0.8)], columns=["size", "tokens", "gain"]
    ).assign(clear=[True, False, False])
    monkeypatch.setattr(ladder, "by_batch", lambda tables: tables)
    drawn = ladder.fp8(rows)
    axes = drawn.axes[0]
    assert drawn_lines(axes) == {
        style.SIZE_COLORS["xl"]: [(1024, 0.9), (4096, 1.2)],
        style.SIZE_COLORS["small"]: [(2048, 0.8)],
    }
    assert (
        ticks(axes.xaxis) == ["1,024", "2,048", "4,096"]
        and axes.get_ylim()[0] < 0.8
        and axes.get_ylim()[1] > 1.2
    )
    assert "no size" in drawn.message and ladder.fp8(rows.head(1)) is None
    assert "xl" in ladder.fp8(rows.assign(clear=[True, True, False])).message


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
    columns = ["family", "launch_ns", "launch_duration_ns", "start_ns", "duration_ns"]
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


def test_launches_are_of_the_least_size_at_the_shortest_context_in_bf16_where_it_waits():
    rows = pd.DataFrame(
        [
            ("xl", 128, "bf16", 0.3),
            ("small", 512, "bf16", 0.4),
            ("small", 128, "bf16", 0.2),
            ("small", 128, "fp32", 0.5),
        ],
        columns=["size", "context_length", "precision", "busy"],
    )
    rows = rows.assign(
        mode="forward",
        family="elementwise",
        launch_ns=-1000,
        launch_duration_ns=2_000_000,
        start_ns=1000,
        duration_ns=rows["busy"] * 1e6,
        batch_size=4,
        vocab_size=10_000,
        attention="naive",
        optimizer="foreach",
    )
    steps = rows.assign(mode="step", duration_ns=999_000)
    both = pd.concat([steps, rows])
    for of, said in (
        (both, ("small", "bf16", "context 128", "20%")),
        (both.query("precision == 'fp32'"), ("small", "fp32", "50%")),
    ):
        message = nsys.launches_timeline({"nsys.timeline": of}).message
        assert all(words in message for words in said)
    full = rows.assign(duration_ns=rows["duration_ns"].mask(rows.index == 2, 990_000))
    assert nsys.launches_timeline({"nsys.timeline": pd.concat([steps, full])}) is None, "which does not wait"


def widths(axes) -> dict[tuple[str, str], float]:
    """Of each row's label and colour how wide its part is."""
    names = dict(zip(axes.get_yticks(), ticks(axes.yaxis)))
    return {
        (names[round(bar.get_y() + bar.get_height() / 2)], to_hex(bar.get_facecolor())): round(
            bar.get_width(), 6
        )
        for bar in axes.patches
        if bar.get_width()
    }


def test_families_are_shares_of_each_ends_step_by_phase():
    ns = {
        ("xl", "forward", MATMUL): 300,
        ("xl", "forward", "elementwise"): 100,
        ("xl", "loss", "elementwise"): 100,
        ("xl", "backward", MATMUL): 1000,
        ("xl", "backward", "elementwise"): 300,
        ("xl", "optimizer", "optimizer"): 200,
        ("medium", "forward", MATMUL): 77,
        ("xl", "", "elementwise"): 5000,
        ("small", "optimizer", "optimizer"): 50,
        ("small", "forward", "elementwise"): 10,
        ("small", "loss", "elementwise"): 5,
        ("small", "forward", MATMUL): 10,
        ("small", "backward", MATMUL): 20,
        ("small", "backward", "elementwise"): 5,
    }
    rows = pd.DataFrame(
        [(*key, 1e6 * value) for key, value in ns.items()], columns=["size", "phase", "family", "total_ns"]
    ).assign(
        context_length=512,
        precision="fp32",
        mode="step",
        batch_size=4,
        vocab_size=10_000,
        attention="naive",
        optimizer="foreach",
        region="",
        name="k",
    )
    others = [
        rows.assign(total_ns=rows["total_ns"].mask(rows["family"] == MATMUL, 9e9), **{name: value})
        for name, value in (
            ("context_length", 1024),
            ("precision", "bf16"),
            ("mode", "forward"),
            ("attention", "sdpa"),
        )
    ]
    drawn = nsys.kernel_families({"nsys.operations": pd.concat([*others, rows])})
    found = widths(drawn.axes[0])
    assert found == {
        ("small: forward", style.BLUE): 0.1,
        ("small: forward", style.AMBER): 0.1,
        ("small: backward", style.BLUE): 0.2,
        ("small: backward", style.AMBER): 0.05,
        ("small: AdamW", style.GREEN): 0.5,
        ("xl: forward", style.BLUE): 0.15,
        ("xl: forward", style.AMBER): 0.05,
        ("xl: backward", style.BLUE): 0.5,
        ("xl: backward", style.AMBER): 0.15,
        ("xl: AdamW", style.GREEN): 0.1,
    }
    assert "65% of xl's step and 30% of small's step" in drawn.message and "512" in drawn.axes[0].get_xlabel()
    assert ticks(drawn.axes[0].yaxis) == [
        "small: forward",
        "small: backward",
        "small: AdamW",
        "xl: forward",
        "xl: backward",
        "xl: AdamW",
    ]
    own = rows.query("size == 'xl'")
    one = nsys.families_of(pd.concat([own, own.assign(mode="forward", family="optimizer")]), "Mine")
    assert widths(one.axes[0]) == {
        ("forward", style.BLUE): 0.75,
        ("forward", style.AMBER): 0.25,
        ("loss", style.AMBER): 1,
        ("optimizer", style.GREEN): 1,
        ("backward", style.BLUE): round(10 / 13, 6),
        ("backward", style.AMBER): round(3 / 13, 6),
    }
    assert "65%" in one.message and nsys.families_of(own.assign(mode="forward"), "") is None


def test_the_loss_of_every_rung_is_drawn_and_beside_it_other_seeds(monkeypatch):
    last = {
        ("fp32", 0): 0.0,
        ("fp32", 1): 0.05,
        ("fp32", 2): -0.07,
        ("tf32", 0): 0.02,
        (ladder.LAST, 0): -0.03,
        ("fp8", 0): 0.5,
    }
    shifts = pd.DataFrame({key: [0.01, 0.1, at] for key, at in last.items()}, [9, 19, 29])
    distance = pd.Series({"fp8": 0.5, "tf32": 0.02, ladder.LAST: 0.03})
    monkeypatch.setattr(ladder, "trained", lambda tables: (None, shifts))
    monkeypatch.setattr(ladder, "loss_shift", lambda shifts: (distance, 0.04))
    drawn = ladder.ladder_training({})
    axes = drawn.axes[0]
    ends = [(line.get_color(), line.get_ydata()[-1]) for line in axes.lines if len(line.get_xdata()) == 3]
    assert sorted(ends) == sorted(
        [(style.FILL, 0.05), (style.FILL, -0.07), (style.BLUE, 0.02), (style.BLUE, -0.03)]
    )
    heights = {
        text.get_text(): axes.transData.inverted().transform(axes.transAxes.transform(text.xy))[1]
        for text in axes.texts
    }
    assert heights == pytest.approx({"other seeds": 0.05, "every change": -0.03})
    assert "less than another seed" in drawn.message
    monkeypatch.setattr(ladder, "loss_shift", lambda shifts: (distance, 0.025))
    assert "less" not in ladder.ladder_training({}).message


def test_of_a_long_timeline_the_highest_of_each_stretch_is_drawn():
    totals = [(97 * place) % 401 + 1.0 for place in range(401)]
    rows = pd.DataFrame({memory.column(kind): 0.0 for kind in memory.LIVE}, range(401)).assign(
        weights_gib=[total / 4 for total in totals], other_gib=[3 * total / 4 for total in totals]
    )
    assert memory._fewer(rows)[["weights_gib", "other_gib"]].sum(axis=1).tolist() == [
        max(totals[at : at + 3]) for at in range(0, 401, 3)
    ]


def test_what_is_predicted_has_its_peak_marked_and_named():
    axis, top = memory.predicted_timeline({}).axes[0], memory.peak(memory.predicted())
    mark = next(line for line in axis.lines if line.get_marker() == "v")
    assert mark.get_ydata().tolist() == [pytest.approx(top.requested / memory.GIB, rel=1e-3)]
    areas = [area.get_paths()[0].vertices[:, 1].max() for area in axis.collections]
    assert max(areas) == pytest.approx(mark.get_ydata()[0]) and memory.number(
        top.allocated / memory.GIB, ""
    ) in texts(axis)
    assert {text.strip() for text in texts(axis)} >= {"forward", "backward", "optimizer"}


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
    assert nsys._busy(ran) == pytest.approx(busy)
