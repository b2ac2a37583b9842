"""The nsys study: its accounting on a real H200 capture of the annotated step (scrubbed) and on captures made
here, what it does with nsys as a program, and what its tables say.
"""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from cells import covered_ms, run_cells
from stepscope import PACKAGE, PROJECT
from stepscope.config import PHASES, configure
from stepscope.measure import nsys as nsys_program
from stepscope.measure import profiled_process
from stepscope.measure.nsys import ProfiledModes
from stepscope.measure.subject import NEGLIGIBLE_RATE
from stepscope.model import ranges as step_ranges
from stepscope.model.training_step import build_step
from stepscope.report.tables import number
from stepscope.studies.nsys import figures
from stepscope.studies.nsys import profile as nsys_profile
from stepscope.studies.nsys import tables as study
from stepscope.traces import nsys_tool
from stepscope.traces.attribution import ConservationError
from stepscope.traces.conservation import check_conservation
from stepscope.traces.export import activity_totals, load_trace
from stepscope.traces.nsys_tool import NsysError

DATA = Path(__file__).parent / "data" / "nsys"
EXPORT = DATA / "step.sqlite"  # small, context 512, three full steps, every region named
STEPS, LAYERS = 3, 12
OUTCOME = {
    "status": "ok",
    "reason": "",
    "unprofiled_ms": [60.0, 61.0],
    "enqueue_ms": [9.0, 8.0],
    "clock": {},
    "profiled_ms": [70.0, 71.0, 72.0],
}

# What stands in for nsys does with files what nsys does: its export is a real capture's.
FAKE = """#!/bin/sh
case "$1" in
profile) while [ "$1" != --output ]; do shift; done; touch "$2.nsys-rep"; shift 2; shift; shift; shift; shift
    echo '{outcome}' > "$1/outcome.json" ;;
export) cp {export} "$5" ;;
stats) for name in $(echo $6 | tr , ' '); do
    cp {reports}/$name.csv $4_$name.csv || echo "SKIPPED: it does not contain $name" > $4_$name.csv; done ;;
esac
"""


def reports_of(export, folder):
    """What nsys stats would write of an export: its sums, its trace, and each range's projection on the GPU, which
    has what its own thread launched."""
    (operations, ranges), totals = load_trace(export), activity_totals(export)["duration_ns"]
    for name, kinds in {
        "cuda_gpu_kern_sum": ["kernel"],
        "cuda_gpu_mem_time_sum": ["memcpy", "memset"],
    }.items():
        others = {"Instances": 1, "Name": "k"} if kinds == ["kernel"] else {"Count": 1, "Operation": "c"}
        report = pd.DataFrame([{"Total Time (ns)": totals[kinds].sum()} | others])
        report.to_csv(folder / f"{name}.csv", index=False)
    pd.DataFrame(
        {
            "Start (ns)": operations["start_ns"],
            "Duration (ns)": operations["duration_ns"],
            "CorrId": operations["correlation_id"],
            "Device": "GPU (0)",
            "Strm": operations["stream"],
            "Name": operations["name"],
        }
    ).to_csv(folder / "cuda_gpu_trace.csv", index=False)
    launch, end, rows = operations["launch_start_ns"], operations["start_ns"] + operations["duration_ns"], []
    for one in ranges.itertuples():
        own = (operations["thread"] == one.thread) & launch.between(one.start_ns, one.end_ns)
        if own.any():
            start = operations.loc[own, "start_ns"].min()
            rows.append((f"stepscope:{one.name}", start, end[own].max() - start, own.sum()))
    pd.DataFrame(
        rows, columns=["Name", "Projected Start (ns)", "Projected Duration (ns)", "NumGPUOps"]
    ).to_csv(folder / "nvtx_gpu_proj_trace.csv", index=False)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    reports_of(EXPORT, folder)
    return folder


SMALL = {"size": "nano", "context_length": 8, "vocab_size": 100, "device": "cpu"}


def never_run(step, annotation, synchronize):
    """Take the place of the notebook's step where nsys has left a capture."""


@pytest.fixture(scope="module")
def capture(tmp_path_factory, reports):
    """Profile where nsys has left the real capture of these steps; ``replaced`` names of the module."""

    def make(inside=("step",) * STEPS, folder=reports, **replaced):
        program = tmp_path_factory.mktemp("nsys") / "nsys"
        outcome = {"step_modes": inside, "modes": dict.fromkeys(inside, OUTCOME), "learning_rate": 0.0}
        program.write_text(FAKE.format(export=EXPORT, reports=folder, outcome=json.dumps(outcome)))
        program.chmod(0o755)
        with pytest.MonkeyPatch.context() as patch:
            replaced = {"profiler_here": lambda device: ("nsys 1", program)} | replaced
            for name, value in replaced.items():
                patch.setattr(nsys_profile, name, value)
            return nsys_profile.profile_with_nsys(never_run, configure("nsys", **SMALL))

    return make


@pytest.fixture(scope="module")
def profile(capture):
    return capture()


def tables_of(profile):
    return {"operations": profile.operations, "times": profile.clocks, "timeline": profile.timeline}


@pytest.fixture(scope="module")
def tables(profile):
    return tables_of(profile)


def test_the_csv_reports_cut_by_ranges_are_the_table_to_the_nanosecond(profile):
    """Backward, too, of which its range's projection has none."""
    events, operations = profile.events, profile.operations
    assert len(events) == operations["count"].sum() and "nvtx_gpu_proj_trace" in profile.reports
    time_ns = events.groupby("phase")["duration_ns"].sum()
    assert time_ns.to_dict() == operations.groupby("phase")["total_ns"].sum().to_dict()
    assert profile.results["nsys_ns"] == profile.results["operations_ns"]
    forward = operations[operations["phase"] == "forward"].groupby("region")["total_ns"].sum()
    cut = events[events["phase"] == "forward"].groupby("region")["duration_ns"].sum()
    for region in ("attention.softmax", "attention.scores", "attention.value"):
        assert cut[region] == forward[region]


def test_each_modes_events_are_those_of_its_first_step(capture):
    profile, totals = capture(("step", "forward", "forward")), activity_totals(EXPORT)
    check = profile.report_check
    assert check["mode"].tolist() == ["forward", "step"] and (check["differs by, ns"] == 0).all()
    assert profile.results["operations"] == totals["operations"].sum()
    assert profile.results["operations_ns"] == totals["duration_ns"].sum()
    assert "inconsistent" not in profile.results and profile.results["learning_rate"] == 0


def test_reports_that_differ_from_the_table_are_refused(profile):
    events = profile.events.assign(duration_ns=profile.events["duration_ns"] + 1)
    changed = nsys_profile.Profile(profile.config, profile.tool, profile.modes)
    vars(changed).update(operations=profile.operations, events=events, named_step=profile.named_step)
    with pytest.raises(ConservationError, match="the CSV reports and the table of operations differ"):
        changed.report_check  # noqa: B018


def test_every_operation_of_a_real_capture_is_in_one_phase_and_one_region(tables):
    loaded, totals = load_trace(EXPORT)[0], activity_totals(EXPORT)
    check_conservation(loaded, totals)
    operations, first = tables["operations"], loaded[loaded["step"] == 0]
    assert operations["count"].sum() == len(first) == totals["operations"].sum() / STEPS
    assert operations["total_ns"].sum() == first["duration_ns"].sum()
    assert set(operations["phase"]) == {"forward", "loss", "backward", "optimizer"}
    assert not operations["region"].isin(["unattributed", "outside"]).any()
    assert tables["times"].query("phase == 'total' and profiled")["operations"].tolist() == [len(first)] * 2


def test_a_disturbed_step_moves_no_clock():
    """By hand: of three captured steps, and of three plain ones, one is disturbed."""
    rows = [
        {
            "mode": "step",
            "phase": phase,
            "step": number,
            "profiled": captured,
            "wall_ms": wall if not captured else float("nan"),
            "enqueue_ms": wall / 2,
            "host_ns": 1e6 * wall,
            "projected_ns": 2e6 * wall,
            "busy_ns": 3e6 * wall,
            "operations": 100 * wall,
        }
        for phase in ("forward", "total")
        for captured in (True, False)
        for number, wall in enumerate((5.0, 4.0, 90.0))
    ]
    found = study.step_metrics(pd.DataFrame(rows)).set_index("phase")
    for phase in ("forward", "total"):
        assert found.loc[
            phase, ["plain_ms", "enqueue_ms", "host_ms", "projected_ms", "gpu_ms", "operations"]
        ].tolist() == [5, 2.5, 5, 10, 15, 500]


def test_launches_are_drawn_of_a_step_whose_regions_are_not_named(capture):
    """Naming them costs the host time, so that launches would come later than they do."""
    drawn = capture(("forward",) * STEPS).timeline
    loaded = load_trace(EXPORT)[0]
    shown, of_step = (
        {number: [*zip(own["duration_ns"], own["launch_duration_ns"])] for number, own in frame.groupby(by)}
        for frame, by in ((drawn, "mode"), (loaded, "step"))
    )
    assert len(shown["forward"]) > 10 and {*shown["forward"]} <= {*of_step[STEPS - 1]}
    assert not {*shown["forward"]} <= {*of_step[0]}


def test_backwards_kernels_bear_the_regions_that_made_them(tables):
    operations = tables["operations"]
    regions = {phase: set(own["region"]) for phase, own in operations.groupby("phase")}
    # A sum's gradient is the sum's itself: nothing runs for the residual additions in backward.
    assert regions["backward"] == regions["forward"] - {"residual"} | {
        "cross_entropy",
        "gradient accumulation",
    }
    products = (
        operations[operations["kernel_category"] == "matrix multiply"]
        .groupby(["phase", "region"])["count"]
        .sum()
    )
    for region, matrices in {
        "attention.qkv": 3,
        "attention.output": 1,
        "ffn": 3,
        "attention.scores": 1,
        "attention.value": 1,
    }.items():
        assert products["forward", region] == matrices * LAYERS
    time = operations.groupby(["phase", "region"])["total_ns"].sum()
    assert 1.5 < time["backward", "ffn"] / time["forward", "ffn"] < 2.5  # twice the FLOPs


def test_clocks_have_every_step_but_the_named_one_and_the_plain_ones(tables):
    clocks, loaded = tables["times"], load_trace(EXPORT)[0]
    captured = clocks[clocks["profiled"] & (clocks["phase"] != "total")]
    assert captured["operations_ns"].sum() == loaded.loc[loaded["step"] > 0, "duration_ns"].sum()
    assert (captured["busy_ns"] <= captured["projected_ns"]).all() and len(captured) == 2 * 4
    whole = clocks[clocks["phase"] == "total"]
    assert whole.loc[whole["profiled"], ["step", "wall_ms"]].values.tolist() == [[0, 71.0], [1, 72.0]]
    assert whole.loc[~whole["profiled"], ["wall_ms", "enqueue_ms"]].values.tolist() == [
        [60.0, 9.0],
        [61.0, 8.0],
    ]
    assert captured["wall_ms"].isna().all()


@pytest.mark.parametrize(
    ("starts_us", "first_us", "last_us"),
    [
        (
            [0, 1000, 2000, 2500, 2600, 2700, 2800, 2900],
            0,
            1900,
        ),  # its middle is less than a window before its end
        ([0, 100, 200, 300], 0, 300),
        ([*range(0, 10_000, 300)], 0, 1800),
    ],
)
def test_the_timelines_window_is_full_where_the_step_is_so_long(starts_us, first_us, last_us):
    starts = pd.Series(starts_us) * 1_000
    drawn = nsys_profile.cut_window(
        pd.DataFrame(
            {
                "mode": "forward",
                "kernel_category": "other",
                "step": 1,
                "start_ns": starts,
                "duration_ns": 100_000,
                "launch_start_ns": starts,
                "launch_duration_ns": 1_000,
            }
        )
    )
    assert (drawn["start_ns"].min(), drawn["start_ns"].max()) == (first_us * 1_000, last_us * 1_000)


def test_a_launch_within_the_window_is_drawn_however_late_its_operation_is():
    drawn = nsys_profile.cut_window(
        pd.DataFrame(
            {
                "mode": "forward",
                "kernel_category": ["first", "second", "late"],
                "step": 1,
                "start_ns": [0, 100_000, 2_500_000],
                "duration_ns": [1_000, 2_300_000, 100_000],
                "launch_start_ns": [0, 0, 1_900_000],
                "launch_duration_ns": 9,
            }
        )
    )
    assert (
        drawn["kernel_category"].tolist() == ["second", "late"]
        and (drawn["launch_ns"] == [-100_000, 1_800_000]).all()
    )


def test_the_timeline_has_the_replay_without_what_prepared_it(capture):
    """A graph's operations have one launch; the step that warmed up before it was launched in many."""
    operations, ranges = load_trace(EXPORT)
    replayed = operations.tail(50).assign(step=-1, region="replay")
    replayed["launch_start_ns"] = [*range(20), *[1_000] * 30]
    replayed["start_ns"] = operations["start_ns"].max() + pd.RangeIndex(0, 500_000, 10_000)

    def drawn(rows):
        loaded = pd.concat([operations, rows]), ranges
        return capture(load_trace=lambda path: loaded, check_conservation=lambda *_: None).timeline

    timeline = drawn(replayed)
    assert set(timeline["mode"]) == {"replayed"} and 15 <= len(timeline) <= 30
    assert (timeline["start_ns"].diff().dropna() == 10_000).all() and timeline["launch_ns"].nunique() == 1
    study.SCHEMAS["timeline"].validate(timeline)
    refused = replayed.assign(launch_start_ns=range(50))  # the step that warmed up alone was run
    assert drawn(refused).empty


def test_a_capture_of_other_steps_than_were_run_is_refused(capture):
    with pytest.raises(
        ConservationError, match="the capture holds 3 steps, but expected the 2 that were run"
    ):
        capture(("step",) * 2)


@pytest.fixture(scope="module")
def here():
    return run_cells("nsys", context_length=16, vocab_size=100, device="cpu")


@pytest.fixture(scope="module")
def run_here(here):
    profile = here["profile"]
    return tables_of(profile), profile.results, here["run"].outcome["results"]["finding"]


def test_on_a_cpu_operators_stand_for_kernels_and_everything_adds_up(run_here):
    tables, results, finding = run_here
    assert results["tool"] == "torch.profiler, CPU operators"
    assert [results[f"{mode}_status"] for mode in PHASES] == ["ok"] * 3 and "nsys_ns" not in results
    assert len(figures.lanes(tables["timeline"], on_cpu=True).axes[0].get_yticks()) == 2
    for name, schema in study.SCHEMAS.items():
        schema.validate(tables[name])
    operations = tables["operations"]
    assert set(operations["mode"]) == set(PHASES)
    assert {mode: set(own["phase"]) for mode, own in operations.groupby("mode")} == {
        mode: {*phases} for mode, phases in PHASES.items()
    }
    step = operations[operations["mode"] == "step"]
    assert "unattributed" not in set(step["region"])
    products = (
        step[(step["phase"] == "forward") & step["name"].isin(["aten::mm", "aten::bmm"])]
        .groupby("region")["count"]
        .sum()
    )
    assert products.to_dict() == {
        "attention.qkv": 6,
        "attention.scores": 2,
        "attention.value": 2,
        "attention.output": 2,
        "ffn": 6,
        "head": 1,
    }
    named = operations.groupby("mode")["count"].sum()
    whole = tables["times"].query("phase == 'total' and profiled").groupby("mode")["operations"]
    assert whole.min().to_dict() == whole.max().to_dict() == named.to_dict()
    plain = tables["times"].query("not profiled").groupby("mode").size()
    assert plain.to_dict() == dict.fromkeys(PHASES, 10)
    assert finding.startswith("Forward: ") and not {"bound", "GPU", "launches"} & {
        *finding.replace(".", " ").split()
    }


def test_the_table_and_the_clocks_follow_from_the_profiled_and_the_unprofiled_steps(here):
    """Of each mode's four profiled steps the first, whose regions are named, is in the table, and the others
    are in the clocks."""
    profile = here["profile"]
    ends_ns = profile.trace["start_ns"] + profile.trace["duration_ns"]
    operations = profile.trace.assign(end_ns=ends_ns).astype({"name": str, "phase": str})
    clocks = profile.clocks.set_index(["mode", "phase", "step"])
    table = profile.operations.groupby(["mode", "phase", "name"])[["count", "total_ns"]].sum()
    for first, (mode, outcome) in zip((0, 4, 8), profile.modes.modes.items(), strict=True):
        by_name = operations[operations["step"] == first].groupby(["phase", "name"])["duration_ns"]
        assert table.loc[mode].to_dict("index") == by_name.agg(count="size", total_ns="sum").to_dict("index")
        plain, captured = (rows.loc[mode] for _, rows in clocks.groupby("profiled"))
        assert plain["wall_ms"].tolist() == outcome["unprofiled_ms"]
        assert plain["enqueue_ms"].tolist() == outcome["enqueue_ms"]
        assert captured.loc["total", "wall_ms"].tolist() == outcome["profiled_ms"][1:]
        for (phase, step), row in captured.iterrows():
            in_phase = (operations["phase"] == phase) | (phase == "total")
            rows = operations[(operations["step"] == first + 1 + step) & in_phase]
            assert row["operations"] == len(rows) and row["operations_ns"] == rows["duration_ns"].sum()
            assert row["busy_ns"] == round(1e6 * covered_ms(rows))
            assert row["projected_ns"] == rows["end_ns"].max() - rows["start_ns"].min()


def test_fused_attention_takes_the_place_of_softmax_and_both_matmuls():
    names = run_cells("nsys", "by_range =", context_length=16, vocab_size=100, device="cpu", attention="sdpa")
    assert "softmax" not in names["profile"].operations.query("mode == 'forward'")["kernel_category"].tolist()
    regions = {*names["time_ms"].index}
    assert "attention.fused" in regions
    assert not regions & {"attention.scores", "attention.softmax", "attention.value"}


def test_operations_without_a_region_are_named_after_their_phase():
    phases = ["forward", "backward", "optimizer", "outside"]
    rows = pd.DataFrame({"step": 0, "phase": phases * 2, "region": ["unattributed"] * 4 + ["ffn"] * 4})
    modes = ProfiledModes(Path("a capture"), {"step": {"status": "ok"}}, ["step"])
    named = nsys_profile.Profile(configure("nsys", **SMALL), "", modes, trace=rows).named_operations
    expected = ["unattributed", "gradient accumulation", "optimizer", "outside"]
    assert named["region"].tolist() == expected + ["ffn"] * 4


def test_shares_and_times_in_the_cells_are_those_of_the_table(here):
    of_step = here["profile"].operations
    for mode, own in of_step.groupby("mode"):
        shares = own.groupby("kernel_category")["total_ns"].sum() / own["total_ns"].sum()
        assert here["shares"][mode][shares.index].to_dict() == pytest.approx(shares.to_dict())
        assert here["share"][mode] == number(shares["matrix multiply"], "%")
    forward = of_step[of_step["mode"] == "forward"]
    inside = forward[forward["region"].str.startswith("attention.")].groupby("region")["total_ns"].sum() / 1e6
    assert here["time_ms"].to_dict() == inside.to_dict()


class Recorder:
    """Takes the ranges' place: the names of those that were opened, with how many were open around each."""

    def __init__(self):
        self.opened, self.depth = [], 0

    def get_event_attributes(self, message):
        return message

    def push_range(self, name):
        self.opened.append((self.depth, name))
        self.depth += 1

    def pop_range(self):
        self.depth -= 1


@pytest.fixture
def step():
    return build_step(configure("benchmark", **SMALL))


@pytest.fixture
def ranged():
    return run_cells("nsys", until="profile_with_nsys(ranged", device="cpu")["ranged"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("mode", [*PHASES])
def test_the_notebooks_step_is_the_librarys_to_the_bit(mode, precision, ranged):
    step, other = (build_step(configure("benchmark", **SMALL, precision=precision)) for _ in range(2))
    other.model.register_forward_hook(
        lambda model, given, logits: differentiable.append(logits.requires_grad)
    )
    differentiable, plain, annotated = [], step.of(mode=mode), other.of(mode=mode)
    for _ in range(3):
        plain()
        ranged(annotated, None, lambda: None)
    for own, its in zip(step.model.parameters(), other.model.parameters()):
        assert torch.equal(own, its) and (mode == "forward" or torch.equal(own.grad, its.grad))
    assert differentiable == [mode != "forward"] * 3


def test_a_plain_step_opens_no_range_and_a_captured_one_those_of_its_phases(monkeypatch, step, ranged):
    recorder = Recorder()
    monkeypatch.setattr(step_ranges, "_domain", recorder)
    step_ranges._attributes.cache_clear()
    mode = profiled_process.ProfiledMode(step, ranged)
    step.model.register_forward_pre_hook(
        lambda model, _: cleared.append(all(weight.grad is None for weight in model.parameters()))
    )
    cleared = []
    try:
        assert (mode.time_unprofiled(2, until_enough=False)["wall_ms"] > 0).tolist() == [
            True
        ] * 2 and recorder.opened == []
        mode.time_in_ranges(with_regions=False)
        phases = [(0, "step"), *((1, phase) for phase in PHASES["step"])]
        assert recorder.opened == phases and not recorder.depth
        recorder.opened = []
        mode.time_in_ranges(with_regions=True)
    finally:
        step_ranges._attributes.cache_clear()
    assert [one for one in recorder.opened if one in phases] == phases and not recorder.depth
    assert {"attention.softmax", "block", "cross_entropy", "ffn"} <= {
        name for depth, name in recorder.opened if depth > 1
    }
    mode.time_unprofiled(1, until_enough=False)
    assert cleared == [True] * 5
    assert "forward" not in vars(step.model.blocks[0].ffn)  # the plain method is back


def test_a_mode_that_runs_out_of_memory_costs_the_others_nothing(monkeypatch, step, ranged):
    original = profiled_process.ProfiledMode.time_in_ranges

    def time_in_ranges(self, with_regions):
        if self.step.mode == "step":
            raise torch.OutOfMemoryError("CUDA out of memory. Including non-PyTorch memory, more words")
        return original(self, with_regions)

    monkeypatch.setattr(profiled_process.ProfiledMode, "time_in_ranges", time_in_ranges)
    outcome = profiled_process.profile(step, ranged, lambda: None)
    statuses = {name: one["status"] for name, one in outcome["modes"].items()}
    assert statuses == {"forward": "ok", "forward_backward": "ok", "step": "oom"}
    assert outcome["modes"]["step"]["reason"] == "while running step: CUDA out of memory."
    assert (
        outcome["step_modes"] == ["forward"] * 4 + ["forward_backward"] * 4 + ["step"]
        and not step.optimizer.state
    )
    assert all(weight.grad is None for weight in step.model.parameters())


def test_profiled_steps_leave_the_weights_as_they_are(step, ranged):
    before = [weight.clone() for weight in step.model.parameters()]
    (rate,) = {group["lr"] for group in step.optimizer.param_groups}
    outcome = profiled_process.profile(step, ranged, lambda: None)
    assert outcome["learning_rate"] == NEGLIGIBLE_RATE and outcome["step_modes"].count("step") == 4
    assert all(map(torch.equal, before, step.model.parameters()))
    assert {group["lr"] for group in step.optimizer.param_groups} == {rate} != {0}


def test_every_mode_is_timed_before_any_is_profiled(monkeypatch, step, ranged):
    """Launches stay slower once a profiler has run."""
    order = []
    for name in ("time_unprofiled", "time_in_ranges"):
        method = getattr(profiled_process.ProfiledMode, name)

        def noted(*given, name=name, method=method, **options):
            order.append(name)
            return method(*given, **options)

        monkeypatch.setattr(profiled_process.ProfiledMode, name, noted)
    profiled_process.profile(step, ranged, lambda: None)
    profiled = order.index("time_in_ranges")
    assert order[:profiled].count("time_unprofiled") > 3 and "time_unprofiled" not in order[profiled:]


@pytest.mark.parametrize("tool, fits", [("torch", True), ("nsys", False)])
def test_profiled_process_reports_modes_that_do_not_fit(monkeypatch, tmp_path, step, tool, fits):
    ranges_before = step_ranges._domain

    def build(config):
        if not fits:
            raise torch.OutOfMemoryError("no room. Including much")

    monkeypatch.setattr(profiled_process, "build_step", build)
    outcome = {"step_modes": ["step"], "modes": {}, "learning_rate": 0.0}
    monkeypatch.setattr(profiled_process, "profile", lambda *_: outcome)
    monkeypatch.setattr(profiled_process, "use_ranges", lambda ranges: None)
    (tmp_path / "ranged.py").write_text("def ranged(): pass")
    profiled_process.main(tool, tmp_path, step.config)
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert step_ranges._domain is ranges_before
    reasons = {(mode["status"], mode["reason"]) for mode in outcome["modes"].values()}
    assert outcome["step_modes"] == ["step"] * fits
    assert reasons == (set() if fits else {("oom", "no room.")})


def test_impossible_modes_are_profiled_again_and_the_named_step_is_not_compared(monkeypatch):
    """At the power limit GPU time may exceed wall time a little more."""
    is_power_limited = {"sm_clock_mhz": 1700.0, "highest_clock_mhz": 1980.0}
    ms = [90, 10, 10.1, 10.05, 90, 30.9, 30.9, 90, 40, 40, 44]
    modes = {
        "forward": {"unprofiled_ms": [10.0, 11.0, 99.0], "clock": {}},
        "forward_backward": {"unprofiled_ms": [30.0, 30.1, 29.0], "clock": is_power_limited},
        "step": {"unprofiled_ms": [45.0], "clock": {}},
    }
    inside = ["forward"] * 4 + ["forward_backward"] * 3 + ["step"] * 4
    captured = ProfiledModes(Path("a file"), modes, inside)
    config = configure("nsys", **SMALL).model_copy(update={"device": "cuda"})
    steps = pd.DataFrame({"step": range(11), "phase": "total", "busy_ns": [1e6 * time for time in ms]})
    folders = []

    def profile_once(ranged, config, folder):
        folders.append(folder)
        return nsys_profile.Profile(config, "nsys", captured, trace=pd.DataFrame({"step": [-1, 0]}))

    monkeypatch.setattr(nsys_profile, "profile_once", profile_once)
    monkeypatch.setattr(nsys_profile, "phase_clocks", lambda operations, ranges: steps)
    monkeypatch.setattr(nsys_profile.Profile, "check", lambda profile: None)

    def impossible():
        return nsys_profile.profile_with_nsys(never_run, config).impossible

    assert impossible() == {"step": "profiled steps range from 40 to 44 ms"} and len({*folders}) == 3
    modes["forward_backward"]["clock"] = {}
    steps.loc[10, "busy_ns"] = 40e6
    assert [*impossible()] == ["forward_backward"]
    steps.loc[[5, 6], "busy_ns"] = 30e6
    assert impossible() == {} and len({*folders}) == 7


def test_a_mode_that_ran_out_of_memory_is_in_no_table_and_keeps_its_unprofiled_steps(here):
    modes = here["profile"].modes
    outcomes = modes.modes | {
        "forward_backward": modes.modes["forward_backward"] | {"status": "oom", "reason": "no room"}
    }
    short = dataclasses.replace(here["profile"], modes=ProfiledModes(modes.file, outcomes, modes.step_modes))
    short.check()
    captured, plain = short.clocks.query("profiled"), short.clocks.query("not profiled")
    assert {*short.operations["mode"]} == {*captured["mode"]} == {"forward", "step"}
    assert {*plain["mode"]} == {*PHASES} and short.results["forward_backward_reason"] == "no room"
    assert captured.query("mode == 'step' and phase == 'total'")["step"].tolist() == [0, 1, 2]


# nsys as a program


def test_a_capture_is_held_against_nsys_own_sum(capture, reports, tmp_path):
    kernels = int(activity_totals(EXPORT).loc["kernel", "duration_ns"])
    own = Path(shutil.copytree(reports, tmp_path / "own"))
    (own / "cuda_gpu_mem_time_sum.csv").unlink()
    # of memory nsys "does not contain" any, which is a sum of nothing, and the capture has some
    with pytest.raises(
        ConservationError,
        match=r"operations sum to \d+ ns, but nsys's own cuda_gpu_mem_time_sum sums to 0 ns",
    ):
        capture(folder=own)
    (own / "cuda_gpu_kern_sum.csv").write_text(f"Total Time (ns),Instances,Name\n{kernels + 1},1,k\n")
    with pytest.raises(
        ConservationError,
        match=f"sum to {kernels} ns, but nsys's own cuda_gpu_kern_sum sums to {kernels + 1}",
    ):
        capture(folder=own)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo importer failed; exit 1",
            "the profiled process ended before its steps did; its output: importer failed",
        ),
        (f"exec {sys.executable} -c 'print(\"quadd crashed\")'", "its output: quadd crashed"),
    ],
)
def test_a_profiler_that_fails_is_quoted(monkeypatch, tmp_path, script, message):
    program = tmp_path / "nsys"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(nsys_profile, "profiler_here", lambda device: ("nsys 1", program))
    with pytest.raises(NsysError, match=message):
        nsys_profile.profile_with_nsys(never_run, configure("nsys", **SMALL))
    with pytest.raises(NsysError, match=r"nsys export could not export a.nsys-rep; its output"):
        nsys_tool.export_capture(program, tmp_path / "a.nsys-rep", tmp_path / "a.sqlite")
    with pytest.raises(NsysError, match=r"nsys stats wrote no reports of step.sqlite"):
        nsys_tool.make_reports(program, Path(shutil.copy(EXPORT, tmp_path)), ("cuda_gpu_kern_sum",))


def test_of_several_nsys_the_newest_of_the_first_place_is_taken_and_the_paths_before_it(
    tmp_path, monkeypatch
):
    here = [
        tmp_path / place / "bin" / "nsys"
        for place in ("systems/2025.5.1", "systems/2026.1.1", "compute/2026.2.0")
    ]
    for program in here:
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setattr(
        nsys_tool,
        "INSTALL_PATTERNS",
        [f"{tmp_path}/{place}/*/bin/nsys" for place in ("none", "systems", "compute")],
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nsys_tool.find_nsys() == here[1]
    monkeypatch.setenv("PATH", str(here[0].parent))
    assert nsys_tool.find_nsys() == here[0]


def test_libraries_that_the_importer_lacks_are_found(tmp_path, monkeypatch):
    target, host = tmp_path / "target-linux-x64", tmp_path / "host-linux-x64"
    target.mkdir()
    host.mkdir()
    (target / "nsys").write_bytes(b"\x7fELF" + bytes(5000))
    (host / "QdstrmImporter").write_bytes(Path("/bin/sh").resolve().read_bytes())
    wrapper = tmp_path / "nsys"
    wrapper.write_text(f'#!/bin/sh\nexec "$(dirname "$0")"/nsys {target}/nsys "$@"\n')
    for program in (target / "nsys", wrapper):
        program.chmod(0o755)
        assert nsys_program.missing_libraries(program) == []
    monkeypatch.setattr(nsys_program, "find_nsys", lambda: wrapper)
    monkeypatch.setattr(nsys_program, "nsys_version", lambda nsys: "2099.1")
    assert nsys_program.profiler_here("cuda") == ("nsys 2099.1", wrapper)

    # As ldd tells of Nsight Compute's copy, if asked of the importer, which has some libraries beside it.
    ldd = tmp_path / "bin" / "ldd"
    ldd.parent.mkdir()
    ldd.write_text(f"""#!/bin/sh
[ "$1 $LD_LIBRARY_PATH" = "{host}/QdstrmImporter {host}" ] || exit 1
printf '\tlinux-vdso.so.1 (0x00007)\n\tlibelf.so.1 => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x00007)\n'
printf '\tlibdw.so.1 => not found\n'
""")
    ldd.chmod(0o755)
    monkeypatch.setenv("PATH", str(ldd.parent), prepend=":")
    for program in (target / "nsys", wrapper):
        assert nsys_program.missing_libraries(program) == ["libdw.so.1", "libelf.so.1"]
    assert nsys_program.profiler_here("cuda") == ("torch.profiler (CUPTI)", None)


# What the tables say


def test_printed_command_is_the_one_that_runs():
    chapter = Path(str(PROJECT), "writeup", "22-nsys.md.j2").read_text(encoding="utf-8")
    command = next(block for block in chapter.split("```") if "nsys profile" in block).split()
    printed = {word for word in command[: command.index("export")] if word.startswith("--") and "=" in word}
    assert printed == {*nsys_profile.NSYS_OPTIONS}
    assert all(name in " ".join(command) for name in nsys_profile.NSYS_SUMS)
    notebook = (PACKAGE / "notebooks" / "nsys.ipynb").read_text()
    assert all(option in notebook for option in nsys_profile.NSYS_OPTIONS)
