"""The memory study's claims, tables and figures, of tables as an H200 leaves them: its peaks by the formulas that are held
to be true elsewhere, times made up."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from reports import beside, said, shuffled, told
from stepscope.config import StepConfig
from stepscope.model import accounting
from stepscope.model.accounting import GIB, KINDS, MIB
from stepscope.report.tables import markdown, number
from stepscope.studies.memory import claims, figures
from stepscope.studies.memory.policies import POLICIES, block_runs, saved_bytes
from stepscope.studies.memory.tables import CONFIG, LIVE, PRINTED, SCHEMAS, column, typed

H200_GIB = 139.8


def config_of(size, context, precision="fp32", attention="naive", optimizer="foreach"):
    return StepConfig(
        size=size,
        context_length=context,
        precision=precision,
        attention=attention,
        optimizer=optimizer,
        device="cpu",
    ).model_copy(update={"device": "cuda"})


def columns_of(config, expandable=False):
    fields = {name: getattr(config, name) for name in CONFIG if name != "expandable_segments"} | {
        "expandable_segments": expandable
    }
    return fields | {"run_id": "-".join(map(str, fields.values()))}


def peak_rows(config, mode, idle=1.1):
    """Rows of ``peaks``: of each phase the instant that needs most, by formula."""
    top = accounting.peak(config, mode)
    said = {
        "mode": mode,
        "predicted_gib": top.allocated / GIB,
        "predicted_requested_gib": top.requested / GIB,
    }
    if top.allocated > H200_GIB * GIB:
        return [said | {"phase": "whole", "status": "oom", "reason": "CUDA out of memory"}]
    best = {}
    for instant in accounting.instants(config, mode):
        kinds = accounting.everything(instant, config, mode)
        if instant.phase not in best or sum(kinds.values()) > best[instant.phase]["peak_gib"] * GIB:
            best[instant.phase] = {column(kind): size / GIB for kind, size in kinds.items()} | {
                "peak_gib": sum(kinds.values()) / GIB,
                "requested_gib": (sum(kinds.values()) - kinds["rounding"]) / GIB,
                "reserved_gib": idle * sum(kinds.values()) / GIB,
                "peak_in": instant.phase,
                "layer": instant.layer,
                "region": instant.operation.partition(":")[0],
                "status": "ok",
            }
    rows = [row | {"mode": mode, "phase": phase} for phase, row in best.items()]
    return [*rows, max(rows, key=lambda row: row["peak_gib"]) | said | {"phase": "whole"}]


def lines():
    """``allocations`` of the 2.7B model at context 512."""
    squares, wide = 128.0, 80.0
    made = [("attention.scores", squares, 64), ("attention.softmax", squares, 96), ("ffn", wide, 160)]
    saved = [
        ("ffn", wide, 5),
        ("attention.softmax", squares, 1),
        ("attention.value", squares, 1),
        ("norm", 20.0, 4),
        ("attention.value", 20.0, 2),
        ("attention.qkv", 20.0, 3),
        ("residual", 20.0, 1),
    ]
    gradients = [("", 100.0, 3), ("", 25.0, 4), ("", 2560 * 4 / MIB, 2)]
    for what, rows in (
        ("allocated in forward", made),
        ("saved by a block", saved),
        ("gradients of a block", gradients),
    ):
        for rank, (region, mib, count) in enumerate(rows, 1):
            yield {
                "what": what,
                "rank": rank,
                "region": region,
                "mib": mib,
                "count": count,
                "source": "q @ k",
                "line": f"stepscope/model/transformer.py:{70 + rank}",
            }


def checkpoint_rows():
    for size, context, settings in (
        ("2.7B", 1024, (1, 2, 4, 6, 8, 16, 32, 0)),
        ("2.7B", 2048, (1, 2, 3, 4, 0)),
        ("10B", 512, (1, 0)),
        ("10B", 2048, (1, 0)),
        ("10B", 4096, (1, 0)),
    ):
        config = config_of(size, context, "bf16")
        for per in settings:
            gib = accounting.peak(config, "forward_backward", per).allocated / GIB
            read = {"status": "ok", "peak_gib": gib, "gpu_ms": 500.0 if per else 400.0}
            yield (
                columns_of(config)
                | {
                    "mode": "forward_backward",
                    "checkpoint_policy": f"every {per}" if per else "none",
                    "blocks": config.num_layers,
                    "blocks_per_checkpoint": per,
                    "predicted_gib": gib,
                }
                | (read if gib < H200_GIB else {"status": "oom"})
            )
    for context in (512, 4096):
        yield columns_of(config_of("10B", context, "bf16")) | {
            "mode": "forward",
            "checkpoint_policy": "none",
            "blocks": 50,
            "blocks_per_checkpoint": 0,
            "status": "ok",
            "peak_gib": 90.0,
        }
    for blocks in (4, 8, 16, 32):
        config = config_of("2.7B", 512, "tf32")
        stream, saved = (
            accounting.value(formula, config) for formula in ("4X", accounting.FORMULAS["fp32"].saved)
        )
        for name, arrange in POLICIES.items():
            runs, keeps = block_runs(arrange(blocks)), saved_bytes(arrange(blocks), stream, saved) / GIB
            yield columns_of(config) | {
                "mode": "forward_backward",
                "checkpoint_policy": name,
                "blocks": blocks,
                "status": "ok",
                "peak_gib": blocks + keeps + 0.2,
                "state_gib": float(blocks),
                "expected_saved_gib": keeps,
                "block_runs": runs,
                "expected_runs": runs,
                "gpu_ms": 3.0 * runs,
            }


def made(name, rows):
    """A table over all runs; what a run's file has of it passes its schema."""
    rows = pd.DataFrame(list(rows))
    found = pd.concat([rows[[*CONFIG, "run_id"]], typed(name, rows)], axis=1)
    SCHEMAS[name].validate(typed(name, rows).head(7))
    assert not found.duplicated([*CONFIG, *SCHEMAS[name].unique]).any()
    return found


@pytest.fixture(scope="module")
def measured():
    plain = [
        config_of("2.7B", context, precision)
        for context in (128, 256, 512, 1024, 2048)
        for precision in ("fp32", "bf16")
    ]
    fused = [config_of("2.7B", 512, precision, "sdpa", "fused") for precision in ("fp32", "bf16")]
    runs = [(config, False, 1.15) for config in [*plain, *fused, config_of("small", 512)]] + [
        (plain[5], True, 1.02)
    ]
    peaks = [
        columns_of(config, expandable) | row
        for config, expandable, idle in runs
        for mode in ("forward", "step")
        for row in peak_rows(config, mode, idle)
    ]
    here = columns_of(plain[4])
    times = [
        here
        | {"mode": mode, "event": event, "phase": row["phase"]}
        | {column(kind): row[column(kind)] for kind in LIVE}
        for mode in ("forward", "step")
        for event, row in enumerate(peak_rows(plain[4], mode)[:-1])
    ]
    rows = {
        "peaks": peaks,
        "timeline": times,
        "allocations": [here | row for row in lines()],
        "checkpoints": checkpoint_rows(),
    }
    tables = {f"memory.{name}": made(name, own) for name, own in rows.items()}
    ids = sorted(set().union(*(table["run_id"] for table in tables.values())))
    runs = pd.DataFrame({"run_id": ids}).assign(
        study="memory",
        status="ok",
        size="small",
        context_length=512,
        timed_steps=2,
        machine_gpu_memory_gib=H200_GIB,
        keep_snapshot=[True] + [False] * (len(ids) - 1),
    )
    steps = pd.DataFrame(
        [("fused", 56.4, 61.0), ("blocks", 51.4, 58.0), ("cuda_graph", 51.5, 79.9)],
        columns=["optimization", "peak_gib", "reserved_gib"],
    )
    steps = steps.assign(size="2.7B", context_length=512, batch_size=4, vocab_size=10_000, status="ok")
    return tables | {"runs": runs, "ladder.steps": steps}


# What is said where another sentence does not hold, and what formulas do not have.
OTHERWISE = {
    "answer_timeline_apart": "answer_timeline",
    "checkpoint_least": "checkpoint_best",
    "answer_largest_other": "answer_largest",
}
CLAIMS = [
    name
    for name, value in vars(claims).items()
    if getattr(value, "__module__", "") == claims.__name__ and name[0] != "_"
]


@pytest.mark.parametrize("name", [name for name in CLAIMS if name not in (*OTHERWISE, "peaks_rounding")])
def test_a_claim_holds_on_an_h200(name, measured):
    found = getattr(claims, name)(measured)
    assert found is not None and all(value is not None and value == value for value in found.values())
    assert said(name, found)


@pytest.mark.parametrize("name", PRINTED)
def test_a_table_is_printed(name, measured):
    assert markdown(PRINTED[name](measured)).count("\n") >= 2


SAYS = [*(getattr(claims, name) for name in CLAIMS), *PRINTED.values()]
OF_ALL = (
    "memory_formula",
    "peak_reserved",
    "stage_peaks",
    "formula_peaks",
)  # which have every program's peaks


def test_runs_of_other_programs_and_of_another_order_change_nothing(measured):
    plain = "precision == 'fp32' and optimizer == 'foreach' and not expandable_segments"
    peaks = {
        name: rows
        for name, rows in measured.items()
        if name.startswith("memory.") and name != "memory.checkpoints"
    }
    others = beside(
        peaks, plain, batch_size=2, vocab_size=50_000, attention="flash", optimizer="sgd", precision="fp16"
    )
    others |= beside(
        {"ladder.steps": measured["ladder.steps"]},
        "optimization == 'blocks'",
        batch_size=2,
        vocab_size=50_000,
    )
    says = [one for one in SAYS if one.__name__ not in OF_ALL]
    assert told(says, shuffled(measured | others)) == told(says, measured)
    found = [one for one in SAYS if "largest" in one.__name__]
    assert told(found, measured | {"memory.allocations": measured["memory.allocations"][::-1]}) == told(
        found, measured
    )


def test_each_cell_is_what_its_heading_names(measured):
    """Of rows in which no two measures are the same."""
    off, tables = np.random.default_rng(0), {}
    for name in ("memory.checkpoints", "memory.peaks"):
        rows = measured[name]
        tables[name] = rows.assign(
            **{
                one: off.uniform(1, 2, len(rows))
                for one in (
                    "peak_gib",
                    "reserved_gib",
                    "predicted_gib",
                    "gpu_ms",
                    "wall_ms",
                    "wall_std_ms",
                    "rounding_gib",
                )
            }
        )
    peaks, settings = tables["memory.peaks"], tables["memory.checkpoints"]
    headings = {"peak, GiB": "peak_gib", "predicted, GiB": "predicted_gib", "reserved, GiB": "reserved_gib"}
    timed = headings | {"GPU time, ms": "gpu_ms"}
    plain = peaks.query(
        "size == '2.7B' and attention == 'naive' and not expandable_segments and mode == 'step' and status == 'ok'"
    )
    for name, rows, named in [
        ("reach_10b", settings.query("size == '10B'"), timed),
        ("formula_peaks", peaks.query("phase == 'whole' and status == 'ok'"), headings),
        (
            "checkpoint_settings",
            settings.query("size == '2.7B' and blocks_per_checkpoint == blocks_per_checkpoint"),
            timed | {"wall, ms": "wall_ms", "std, ms": "wall_std_ms"},
        ),
        (
            "stage_peaks",
            plain.query("phase == 'whole'"),
            {"rounding, GiB": "rounding_gib", "reserved, GiB": "reserved_gib"},
        ),
    ]:
        printed = PRINTED[name](measured | tables)[[*named]]
        assert sorted(map(tuple, printed.values)) == sorted(map(tuple, rows[[*named.values()]].values)), name
    stages = PRINTED["stage_peaks"](measured | tables)
    for phase in ("forward", "loss", "backward", "optimizer"):
        assert {*stages[f"{phase}, GiB"]} == {*plain.loc[plain["phase"] == phase, "peak_gib"]}
    reach = PRINTED["reach_10b"](measured | tables)["context"]
    assert reach.is_monotonic_increasing


def test_nested_checkpoints_that_ran_out_of_memory_or_are_of_forward_alone_are_in_no_number(measured):
    rows = measured["memory.checkpoints"]
    like, says = (
        rows[rows["state_gib"].notna()].assign(blocks=64, peak_gib=64.1),
        (claims.nested_least, claims.nested_start, PRINTED["nested_checkpoints"]),
    )
    for other in (like.assign(status="oom"), like.assign(mode="forward")):
        assert told(says, measured | {"memory.checkpoints": pd.concat([rows, other])}) == told(says, measured)


def test_of_contexts_that_do_not_fit_the_shortest_is_told(measured):
    peaks = measured["memory.peaks"].copy()
    step = (peaks["mode"] == "step") & (peaks["phase"] == "whole") & (peaks["context_length"] >= 1024)
    small = peaks.query("size == 'small' and phase == 'whole' and context_length == 512").assign(status="oom")
    peaks.loc[step, "status"] = "oom"
    for rows in (peaks, pd.concat([small, peaks]), peaks[::-1]):
        found = claims.peaks_out(measured | {"memory.peaks": rows})
        assert (found["size"], found["context"]) == ("2.7B", 1024)


def test_where_groups_of_blocks_need_least_that_is_told_of_the_longest_context(measured):
    at = "checkpoint_policy == 'every 4' and context_length"
    short = changed(measured, "checkpoints", f"{at} == 1024", peak_gib=1.0)
    found = claims.checkpoint_least(changed(short, "checkpoints", f"{at} == 2048", peak_gib=2.0))
    assert (found["policy"], found["context"], found["least"]) == (
        "every 4",
        2048,
        2.0,
    ) and claims.checkpoint_least(short) is None


def test_the_timelines_picture_shows_each_kinds_bytes_at_every_event(measured):
    drawn = figures.memory_timeline(measured)
    peaks = measured["memory.peaks"].query(
        "size == '2.7B' and context_length == 512 and precision == 'fp32'"
        " and attention == 'naive' and phase == 'whole' and not expandable_segments"
    )
    for axis, mode in zip(drawn.axes, ("forward", "step"), strict=True):
        rows = measured["memory.timeline"].query("mode == @mode").sort_values("event")
        stacked = np.zeros(len(rows))
        kinds = [kind for kind in figures.COLORS if rows[column(kind)].max() > 0]
        for kind, area in zip(kinds, axis.collections, strict=True):
            below, stacked = stacked, stacked + rows[column(kind)].to_numpy()
            corners = area.get_paths()[0].vertices
            for event in range(len(rows)):
                there = corners[corners[:, 0] == event][:, 1]
                assert there.min() <= below[event] + 1e-6 and there.max() >= stacked[event] - 1e-6
            assert corners[:, 1].max() == pytest.approx(stacked.max()) and area.get_facecolor()[0][
                :3
            ] == pytest.approx(to_rgb(figures.COLORS[kind]))
        labels = [text.get_text() for text in axis.texts]
        assert number(peaks.set_index("mode").loc[mode, "peak_gib"], "") in labels
        mark = next(line for line in axis.lines if line.get_marker() == "v")
        assert mark.get_xydata().tolist() == [[int(stacked.argmax()), pytest.approx(stacked.max())]]


def test_the_peaks_picture_shows_each_kinds_predicted_bytes(measured):
    axis = figures.memory_peak(measured).axes[0]
    rows = [label.get_text() for label in axis.get_yticklabels()]
    assert rows[0] == "small, 512" and rows[-3:] == ["2.7B, 512", "2.7B, 1,024", "2.7B, 2,048"]
    for row, label in enumerate(rows):
        size, context = label.split(", ")
        top = accounting.peak(config_of(size, int(context.replace(",", ""))))
        left = 0.0
        for kind, bars in zip(figures.COLORS, axis.containers):
            assert bars[row].get_width() == pytest.approx(top.kinds[kind] / GIB) and bars[
                row
            ].get_x() == pytest.approx(left)
            left += bars[row].get_width()
        # Rounding to the allocator's units is in the number, and in no bar.
        assert left + top.kinds["rounding"] / GIB == pytest.approx(top.allocated / GIB)
        assert axis.texts[row].get_text().removesuffix(" runs out") == number(top.allocated / GIB, "")


def test_in_the_peaks_picture_only_what_ran_out_of_memory_runs_out(measured):
    def named(tables):
        axis = figures.memory_peak(tables).axes[0]
        return [
            label.get_text()
            for label, text in zip(axis.get_yticklabels(), axis.texts)
            if "runs out" in text.get_text()
        ]

    out = "mode == 'step' and phase == 'whole' and context_length == 2048 and precision == 'fp32'"
    assert named(changed(measured, "peaks", out, status="oom")) == ["2.7B, 2,048"]
    assert named(changed(measured, "peaks", out, status="unsupported")) == []


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_without_data_is_no_data(name, measured):
    empty = {key: table.head(0) for key, table in measured.items()}
    with pytest.raises(LookupError):
        assert getattr(claims, name)(empty) is not None


def changed(measured, table, where, **values):
    frame = measured[f"memory.{table}"].copy()
    at = frame.eval(where) if where else pd.Series(True, index=frame.index)
    assert at.any()
    for name, value in values.items():
        frame.loc[at, name] = value(frame[at]) if callable(value) else value
    return measured | {f"memory.{table}": frame}


WRONG = [
    ("peak_of_optimizer", "peaks", "phase == 'whole'", {"peak_in": "optimizer"}),
    ("peak_of_optimizer", "peaks", "phase == 'whole' and context_length == 128", {"peak_in": "backward"}),
    ("peak_reserved", "peaks", "expandable_segments", {"reserved_gib": 1e4}),
    (
        "answer_timeline_forward",
        "peaks",
        "mode == 'forward' and phase == 'forward'",
        {"saved_for_backward_gib": 1.0},
    ),
    ("checkpoint_gain", "checkpoints", "checkpoint_policy == 'every 4'", {"peak_gib": 1.0}),
    ("mixed_memory_long", "peaks", "precision == 'bf16' and mode == 'step'", {"peak_gib": 200.0}),
    ("reach_10b_best", "checkpoints", "size == '10B' and checkpoint_policy == 'none'", {"status": "ok"}),
    ("peak_parts", "peaks", "phase == 'whole' and mode == 'step'", {"peak_in": "optimizer"}),
    ("peak_parts", "peaks", "phase == 'whole' and mode == 'step'", {"layer": 3}),
    ("peak_foreach", "peaks", "phase == 'optimizer'", {"temporaries_gib": 9.0}),
    ("checkpoint_gain", "checkpoints", "", {"peak_gib": 50.0}),
    ("checkpoint_gain", "checkpoints", "", {"gpu_ms": 50.0}),
    ("checkpoint_best", "checkpoints", "checkpoint_policy == 'every 2'", {"peak_gib": 1.0}),
    ("checkpoint_best", "checkpoints", "checkpoint_policy == 'every 4'", {"peak_gib": 1.0}),
    ("checkpoint_best", "checkpoints", "checkpoint_policy == 'every 1'", {"status": "oom"}),
    ("checkpoint_best", "checkpoints", "checkpoint_policy == 'none'", {"status": "ok"}),
    (
        "memory_formula",
        "peaks",
        "phase == 'whole' and context_length == 256 and mode == 'step'",
        {"requested_gib": 60.0},
    ),
    (
        "memory_formula",
        "peaks",
        "phase == 'whole' and size == 'small' and mode == 'step'",
        {"requested_gib": lambda rows: rows["requested_gib"] + 2048 / GIB},
    ),
    ("answer_timeline", "peaks", "phase == 'forward'", {"peak_gib": 20.0}),
    ("mixed_memory_why", "peaks", "precision == 'bf16' and mode == 'forward'", {"peak_gib": 1.0}),
    ("mixed_memory_why", "peaks", "precision == 'bf16' and mode == 'step'", {"peak_in": "backward"}),
    ("answer_largest", "allocations", "rank == 1", {"region": "ffn"}),
    ("answer_largest", "allocations", "what == 'allocated in forward'", {"mib": 80.0}),
    ("nested_start", "checkpoints", "checkpoint_policy == 'from the start'", {"block_runs": 40}),
    (
        "nested_start",
        "checkpoints",
        "checkpoint_policy == 'from the start' and blocks == 32",
        {"peak_gib": 90.0},
    ),
    ("peak_of_optimizer", "peaks", "phase == 'whole' and precision == 'bf16'", {"peak_in": "backward"}),
    ("peak_parts", "peaks", "phase == 'whole' and mode == 'step'", {"saved_for_backward_gib": 12.0}),
    ("answer_timeline_forward", "peaks", "mode == 'forward' and phase == 'forward'", {"weights_gib": 10.0}),
    (
        "mixed_memory_why",
        "peaks",
        "precision == 'bf16' and phase == 'backward'",
        {"autocast_weight_cache_gib": 0.0},
    ),
    (
        "mixed_memory_sum",
        "peaks",
        "precision == 'bf16' and phase == 'backward'",
        {"autocast_weight_cache_gib": 90.0},
    ),
    ("mixed_memory_sum", "peaks", "precision == 'bf16' and phase == 'backward'", {"peak_gib": 65.0}),
    ("mixed_memory_sum", "peaks", "precision == 'fp32' and phase == 'backward'", {"peak_gib": 60.0}),
    ("adamw_sum", "peaks", "phase == 'optimizer' and context_length == 256", {"gradients_gib": 12.2}),
    ("adamw_sum", "peaks", "phase == 'optimizer' and context_length == 256", {"temporaries_gib": 13.2}),
    ("adamw_sum", "peaks", "phase == 'optimizer' and context_length != 512", {"status": "oom"}),
    ("peak_without_gradients", "peaks", "phase == 'whole'", {"gradients_gib": 9.0}),
    ("peak_without_gradients", "peaks", "phase == 'whole'", {"peak_in": "optimizer"}),
]


@pytest.mark.parametrize("name, table, where, values", WRONG)
def test_a_claim_that_does_not_hold_is_not_said(name, table, where, values, measured):
    assert (
        getattr(claims, name)(measured) is not None
        and getattr(claims, name)(changed(measured, table, where, **values)) is None
    )


@pytest.mark.parametrize("other", OTHERWISE)
def test_what_does_not_hold_is_answered_otherwise(other, measured):
    usual = OTHERWISE[other]
    changes = [(table, where, values) for name, table, where, values in WRONG if name == usual]
    assert getattr(claims, other)(measured) is None and changes
    for change in changes:
        found = getattr(claims, other)(changed(measured, *change[:2], **change[2]))
        assert found and said(other, found)


def test_of_a_cpu_whose_peaks_are_none_no_best_setting_is_told(measured):
    without = changed(measured, "checkpoints", "peak_gib == peak_gib", peak_gib=np.nan)
    with pytest.raises(LookupError):
        claims.checkpoint_least(without)


def test_a_longer_context_that_needs_less_is_explained_by_rounding(measured):
    at = "phase == 'whole' and mode == 'step' and precision == 'fp32' and context_length == 128 and size == '2.7B'"
    rounded = changed(
        measured, "peaks", at, rounding_gib=9.0, peak_gib=lambda rows: rows["requested_gib"] + 9
    )
    found = claims.peaks_rounding(rounded)
    assert (found["short"], found["long"], found["short_rounding"]) == (128, 256, 9) and said(
        "peaks_rounding", found
    )
    assert claims.peaks_rounding(measured) is None
    needed = changed(rounded, "peaks", at, requested_gib=70.0)
    assert claims.peaks_rounding(needed) is None


def test_a_graph_that_keeps_no_more_is_not_told(measured):
    steps = measured["ladder.steps"]
    for reserved_gib in (
        steps["peak_gib"],
        2 * steps["peak_gib"].max(),
    ):  # no more than its peak, than the step without it
        assert (
            claims.graph_reserved(measured | {"ladder.steps": steps.assign(reserved_gib=reserved_gib)})
            is None
        )


def test_10b_is_what_it_has(measured):
    found = claims.answer_10b(measured)
    assert (
        found["parameters"] == pytest.approx(12.8e9, rel=0.01)
        and found["state"] == 16 * found["parameters"] / GIB
    )
    assert (
        claims.answer_10b(measured | {"runs": measured["runs"].assign(machine_gpu_memory_gib=192.0)}) is None
    ), "where it fits"
    assert (
        claims.reach_10b_best(measured)["both"] == 2048 and claims.reach_10b_best(measured)["forward"] == 4096
    )


def test_what_the_claims_say(measured):
    parts = claims.peak_parts(measured)
    assert (parts["size"], parts["context"]) == ("2.7B", 512) and parts["state"] == 2 * parts["weights"]
    assert parts["peak"] == pytest.approx(65.8, abs=0.1)
    assert claims.answer_residual(measured) == {
        "size": "2.7B",
        "batch": 4,
        "context": 512,
        "d_model": 2560,
        "mib": 20.0,
    }
    assert claims.answer_largest(measured)["count"] == 160 and claims.answer_largest(measured)["mib"] == 128
    mixed = claims.answer_mixed_memory(measured)
    assert mixed["forward_bf16"] / mixed["forward_fp32"] == pytest.approx(1.455, abs=0.01)
    assert claims.checkpoint_gain(measured)["more"] == pytest.approx(0.25)
    assert claims.checkpoint_best(measured)["context"] == 2048
    gradients = claims.block_gradients(measured)
    assert gradients["parameters"] == 4 * 2560**2 + 3 * 2560 * 10240 + 2 * 2560
    assert claims.block_saves(measured)["five"] == pytest.approx((400 + 128 + 128 + 80 + 60) / 856)
    assert claims.nested_start(measured)["runs"] == 32 + 32 * 33 / 2
    assert claims.memory_formula(measured) == {
        "how": "to the byte, in all 26 recorded modes (14 of them forward alone)",
        "most": 0,
        "steps": 26,
        "exact": 26,
    }


def test_the_sentences_are_about_the_largest_size_and_the_usual_context(measured):
    peaks = measured["memory.peaks"]
    short = measured | {"memory.peaks": peaks[peaks["context_length"] < 500]}
    assert claims.answer_residual(short)["context"] == 256
    small = measured | {"memory.peaks": peaks[peaks["size"] == "small"]}
    assert claims.answer_residual(small)["size"] == "small"


def test_what_is_printed_of_the_peaks(measured):
    printed = PRINTED["handout_peaks"](measured)
    assert list(printed.columns) == ["forward, fp32", "forward, bf16", "full step, fp32", "full step, bf16"]
    assert (
        list(printed.index) == [128, 256, 512, 1024, 2048]
        and printed.loc[2048, "full step, fp32"] != printed.loc[2048, "full step, fp32"]
    )
    assert "out of memory" in markdown(printed)
    less = PRINTED["less_memory"](measured).set_index("change")
    assert len(less) == 6 and (less["after, GiB"] < less["before, GiB"]).all()
    off = changed(
        measured,
        "peaks",
        "phase == 'whole' and size == 'small' and mode == 'forward'",
        requested_gib=lambda rows: rows["requested_gib"] - 2048 / GIB,
    )
    assert PRINTED["formula_peaks"](off)["requested beyond formula, B"].iloc[0] == -2048
    kinds = PRINTED["peak_by_kind"](measured)
    assert set(kinds.index) <= {*KINDS, "all"} and kinds.loc["all", "backward"] == pytest.approx(
        65.8, abs=0.1
    )


def test_the_timelines_message_says_where_the_peak_is(measured):
    assert (
        figures.memory_timeline(measured).message
        == "2.7B at context 512 in fp32: the peak is where backward begins, 65.8 GiB"
    )
    other = changed(measured, "peaks", "phase == 'whole'", peak_in="optimizer")
    assert figures.memory_timeline(other).message.startswith(
        "2.7B at context 512 in fp32: the peak is in optimizer"
    )
    assert (
        figures.memory_timeline(measured | {"memory.timeline": measured["memory.timeline"].head(0)}) is None
    )
