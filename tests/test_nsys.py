"""Test that the nsys study profiles with nsys or torch.profiler and attributes operations to model regions."""

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
# three full steps of `small` at context length 512, with a range for every region
EXPORT = DATA / "step.sqlite"
STEPS, LAYERS = 3, 12
OUTCOME = {
    "status": "ok",
    "reason": "",
    "unprofiled_ms": [60.0, 61.0],
    "enqueue_ms": [9.0, 8.0],
    "clock": {},
    "profiled_ms": [70.0, 71.0, 72.0],
}

# A fake nsys that writes the same files as nsys and exports a real capture.
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
    """Write the reports that ``nsys stats`` creates from an export.

    The GPU projection of a range covers only operations that the range's own thread launched.
    """
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
    """Stand in for the notebook's step, which never runs because the fake nsys provides the profile."""


@pytest.fixture(scope="module")
def capture(tmp_path_factory, reports):
    """Return a function that profiles with a fake nsys; ``replaced`` patches names in the profiling module."""

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


def test_csv_reports_split_by_ranges_match_the_operations(profile):
    """The reports cover the backward phase's operations, although the range's GPU projection is empty."""
    events, operations = profile.events, profile.operations
    assert len(events) == operations["count"].sum() and "nvtx_gpu_proj_trace" in profile.reports
    time_ns = events.groupby("phase")["duration_ns"].sum()
    assert time_ns.to_dict() == operations.groupby("phase")["total_ns"].sum().to_dict()
    assert profile.results["nsys_ns"] == profile.results["operations_ns"]
    regions = ["attention.softmax", "attention.scores", "attention.value"]
    ours, theirs = (rows[rows["phase"] == "forward"].groupby("region") for rows in (operations, events))
    assert ours["total_ns"].sum()[regions].tolist() == theirs["duration_ns"].sum()[regions].tolist()


def test_report_events_cover_the_first_step_of_each_mode(capture):
    profile, totals = capture(("step", "forward", "forward")), activity_totals(EXPORT)
    check = profile.report_check
    assert check["mode"].tolist() == ["forward", "step"] and (check["differs by, ns"] == 0).all()
    assert profile.results["operations"] == totals["operations"].sum()
    assert profile.results["operations_ns"] == totals["duration_ns"].sum()
    assert "inconsistent" not in profile.results and profile.results["learning_rate"] == 0


def test_report_check_raises_when_reports_and_operations_differ(profile):
    events = profile.events.assign(duration_ns=profile.events["duration_ns"] + 1)
    changed = nsys_profile.Profile(profile.config, profile.tool, profile.modes)
    vars(changed).update(operations=profile.operations, events=events, named_step=profile.named_step)
    with pytest.raises(ConservationError, match="the CSV reports differ from the table of operations"):
        changed.report_check  # noqa: B018


def test_operations_of_a_real_capture_are_counted_once_with_phase_and_region(tables):
    loaded, totals = load_trace(EXPORT)[0], activity_totals(EXPORT)
    check_conservation(loaded, totals)
    operations = tables["operations"]
    assert operations["count"].sum() == totals["operations"].sum() / STEPS
    assert operations["total_ns"].sum() == loaded.loc[loaded["step"] == 0, "duration_ns"].sum()
    assert set(operations["phase"]) == {"forward", "loss", "backward", "optimizer"}
    assert not operations["region"].isin(["unattributed", "outside"]).any()


def test_step_metrics_ignore_one_disturbed_step():
    rows = [
        {
            "mode": "step",
            "phase": "total",
            "step": number,
            "profiled": profiled,
            "wall_ms": wall if not profiled else float("nan"),
            "enqueue_ms": wall / 2,
            "host_ns": 1e6 * wall,
            "projected_ns": 2e6 * wall,
            "busy_ns": 3e6 * wall,
            "operations": 100 * wall,
        }
        for profiled in (True, False)
        for number, wall in enumerate((5.0, 4.0, 90.0))
    ]
    metrics = study.step_metrics(pd.DataFrame(rows)).iloc[0]
    columns = ["plain_ms", "enqueue_ms", "host_ms", "projected_ms", "gpu_ms", "operations"]
    assert metrics[columns].tolist() == [5, 2.5, 5, 10, 15, 500]


def test_timeline_shows_a_step_without_region_ranges(capture):
    """Region ranges slow down the host, so a step with region ranges launches its operations too late."""
    timeline = capture(("forward",) * STEPS).timeline
    loaded = load_trace(EXPORT)[0]
    columns = ["duration_ns", "launch_duration_ns"]
    first, last = (
        {*loaded.loc[loaded["step"] == step, columns].itertuples(index=False, name=None)}
        for step in (0, STEPS - 1)
    )
    drawn = {*timeline[columns].itertuples(index=False, name=None)}
    assert len(drawn) > 10 and drawn <= last and not drawn <= first


def test_backward_kernels_get_the_regions_of_the_forward_pass(tables):
    operations = tables["operations"]
    regions = {phase: set(rows["region"]) for phase, rows in operations.groupby("phase")}
    # A sum passes its gradient unchanged to its terms, so the residual additions launch nothing in the
    # backward pass.
    expected = regions["forward"] - {"residual"} | {"cross_entropy", "gradient accumulation"}
    assert regions["backward"] == expected
    matmuls = operations[operations["kernel_category"] == "matrix multiply"]
    count = matmuls.groupby(["phase", "region"])["count"].sum()["forward"]
    assert count[["attention.qkv", "ffn", "attention.scores"]].tolist() == [3 * LAYERS, 3 * LAYERS, LAYERS]
    time = operations.groupby(["phase", "region"])["total_ns"].sum()
    # the backward pass needs twice the FLOPs of the forward pass
    assert 1.5 < time["backward", "ffn"] / time["forward", "ffn"] < 2.5


def timeline_rows(start_us: list[int], **columns: object) -> pd.DataFrame:
    starts = pd.Series(start_us) * 1_000
    row = {"mode": "forward", "kernel_category": "other", "step": 1, "duration_ns": 100_000}
    row |= {"launch_start_ns": starts, "launch_duration_ns": 1_000}
    return nsys_profile.cut_window(pd.DataFrame(row | {"start_ns": starts} | columns))


@pytest.mark.parametrize(
    ("start_us", "first_us", "last_us"),
    [
        # a window that begins after the middle of the step would end after the step, so this one begins earlier
        (
            [0, 1000, 2000, 2500, 2600, 2700, 2800, 2900],
            0,
            1900,
        ),
        ([0, 100, 200, 300], 0, 300),
        ([*range(0, 10_000, 300)], 0, 1800),
    ],
)
def test_timeline_window_is_filled_when_the_step_is_long_enough(start_us, first_us, last_us):
    start_ns = timeline_rows(start_us)["start_ns"]
    assert (start_ns.min(), start_ns.max()) == (first_us * 1_000, last_us * 1_000)


def test_timeline_includes_a_late_operation_launched_within_the_window():
    durations = [1_000, 2_300_000, 100_000]
    rows = timeline_rows([0, 100, 2_500], duration_ns=durations, launch_start_ns=[0, 0, 1_900_000])
    assert rows["duration_ns"].tolist() == durations[1:]
    assert rows["launch_ns"].tolist() == [-100_000, 1_800_000]


def test_timeline_shows_the_graph_replay_without_the_warmup_step(capture):
    """All operations of a graph share one launch, but each operation of the warm-up step has its own launch."""
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
    only_warm_up = replayed.assign(launch_start_ns=range(50))
    assert drawn(only_warm_up).empty


def test_capture_with_an_unexpected_number_of_steps_is_rejected(capture):
    with pytest.raises(ConservationError, match="the capture contains 3 steps, but 2 steps were run"):
        capture(("step",) * 2)


@pytest.fixture(scope="module")
def here():
    return run_cells("nsys", context_length=16, vocab_size=100, device="cpu")


@pytest.fixture(scope="module")
def run_here(here):
    profile = here["profile"]
    return tables_of(profile), profile.results, here["run"].outcome["results"]["finding"]


def test_cpu_profile_lists_operators_instead_of_kernels(run_here):
    tables, results, finding = run_here
    assert results["tool"] == "torch.profiler, CPU operators"
    assert [results[f"{mode}_status"] for mode in PHASES] == ["ok"] * 3 and "nsys_ns" not in results
    assert len(figures.lanes(tables["timeline"], on_cpu=True).axes[0].get_yticks()) == 2
    for name, schema in study.SCHEMAS.items():
        schema.validate(tables[name])
    operations = tables["operations"]
    phases = {mode: set(rows["phase"]) for mode, rows in operations.groupby("mode")}
    assert phases == {mode: {*names} for mode, names in PHASES.items()}
    step = operations[operations["mode"] == "step"]
    assert "unattributed" not in set(step["region"])
    matmuls = step[(step["phase"] == "forward") & step["name"].isin(["aten::mm", "aten::bmm"])]
    counts = {"qkv": 6, "scores": 2, "value": 2, "output": 2}
    expected = {f"attention.{name}": count for name, count in counts.items()} | {"ffn": 6, "head": 1}
    assert matmuls.groupby("region")["count"].sum().to_dict() == expected
    assert finding.startswith("Forward: ")
    assert not {"bound", "GPU", "launches"} & {*finding.replace(".", " ").split()}


def test_times_and_operations_match_the_profiled_steps(here):
    """Compare four profiled steps per mode with the tables.

    The table of operations describes the first step, which has region ranges. The table of times describes the
    other three steps.
    """
    profile = here["profile"]
    ends_ns = profile.trace["start_ns"] + profile.trace["duration_ns"]
    operations = profile.trace.assign(end_ns=ends_ns).astype({"name": str, "phase": str})
    times = profile.clocks.set_index(["mode", "phase", "step"])
    table = profile.operations.groupby(["mode", "phase", "name"])[["count", "total_ns"]].sum()
    for first, (mode, outcome) in zip((0, 4, 8), profile.modes.modes.items(), strict=True):
        by_name = operations[operations["step"] == first].groupby(["phase", "name"])["duration_ns"]
        assert table.loc[mode].to_dict("index") == by_name.agg(count="size", total_ns="sum").to_dict("index")
        unprofiled, profiled = (rows.loc[mode] for _, rows in times.groupby("profiled"))
        assert unprofiled["wall_ms"].tolist() == outcome["unprofiled_ms"] and len(unprofiled) == 10
        assert unprofiled["enqueue_ms"].tolist() == outcome["enqueue_ms"]
        assert profiled.loc["total", "wall_ms"].tolist() == outcome["profiled_ms"][1:]
        for (phase, step), row in profiled.iterrows():
            is_in_phase = (operations["phase"] == phase) | (phase == "total")
            rows = operations[(operations["step"] == first + 1 + step) & is_in_phase]
            assert row["operations"] == len(rows) and row["operations_ns"] == rows["duration_ns"].sum()
            assert row["busy_ns"] == round(1e6 * covered_ms(rows))
            assert row["projected_ns"] == rows["end_ns"].max() - rows["start_ns"].min()


def test_fused_attention_replaces_softmax_and_both_matmuls():
    names = run_cells("nsys", "by_range =", context_length=16, vocab_size=100, device="cpu", attention="sdpa")
    assert "softmax" not in names["profile"].operations.query("mode == 'forward'")["kernel_category"].tolist()
    regions = {*names["time_ms"].index}
    assert "attention.fused" in regions
    assert not regions & {"attention.scores", "attention.softmax", "attention.value"}


def test_operations_without_a_region_are_named_by_phase():
    phases = ["forward", "backward", "optimizer", "outside"]
    rows = pd.DataFrame({"step": 0, "phase": phases, "region": "unattributed"})
    rows.loc[4] = [0, "backward", "ffn"]
    modes = ProfiledModes(Path("a capture"), {"step": {"status": "ok"}}, ["step"])
    named = nsys_profile.Profile(configure("nsys", **SMALL), "", modes, trace=rows).named_operations
    expected = ["unattributed", "gradient accumulation", "optimizer", "outside", "ffn"]
    assert named["region"].tolist() == expected


def test_notebook_shares_match_the_operations(here):
    for mode, rows in here["profile"].operations.groupby("mode"):
        shares = rows.groupby("kernel_category")["total_ns"].sum() / rows["total_ns"].sum()
        assert here["shares"][mode][shares.index].to_dict() == pytest.approx(shares.to_dict())
        assert here["share"][mode] == number(shares["matrix multiply"], "%")


class Recorder:
    """A stand-in for an NVTX domain that records the nesting depth and name of each opened range."""

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
def test_notebook_step_matches_library_step_bit_for_bit(mode, precision, ranged):
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


def test_nvtx_ranges_are_opened_only_in_profiled_steps(monkeypatch, step, ranged):
    recorder = Recorder()
    monkeypatch.setattr(step_ranges, "_domain", recorder)
    step_ranges._attributes.cache_clear()
    mode = profiled_process.ProfiledMode(step, ranged)
    cleared = []
    step.model.register_forward_pre_hook(
        lambda model, _: cleared.append(all(weight.grad is None for weight in model.parameters()))
    )
    try:
        assert (mode.time_unprofiled(2, until_enough=False)["wall_ms"] > 0).tolist() == [True] * 2
        assert recorder.opened == []
        mode.time_in_ranges(with_regions=False)
        phases = [(0, "step"), *((1, phase) for phase in PHASES["step"])]
        assert recorder.opened == phases and not recorder.depth
        recorder.opened = []
        mode.time_in_ranges(with_regions=True)
    finally:
        step_ranges._attributes.cache_clear()
    assert [opened for opened in recorder.opened if opened in phases] == phases and not recorder.depth
    inner = {name for depth, name in recorder.opened if depth > 1}
    assert {"attention.softmax", "block", "cross_entropy", "ffn"} <= inner
    assert cleared == [True] * 4
    assert "forward" not in vars(step.model.blocks[0].ffn)  # after profiling, the original method is restored


def test_remaining_modes_are_profiled_when_one_runs_out_of_memory(monkeypatch, step, ranged):
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


def test_profiling_does_not_change_the_weights(step, ranged):
    before = [weight.clone() for weight in step.model.parameters()]
    (rate,) = {group["lr"] for group in step.optimizer.param_groups}
    outcome = profiled_process.profile(step, ranged, lambda: None)
    assert outcome["learning_rate"] == NEGLIGIBLE_RATE and outcome["step_modes"].count("step") == 4
    assert all(map(torch.equal, before, step.model.parameters()))
    assert {group["lr"] for group in step.optimizer.param_groups} == {rate} != {0}


def test_all_modes_are_timed_before_any_mode_is_profiled(monkeypatch, step, ranged):
    """Launches are slower once a profiler has run."""
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


def test_profiled_process_reports_oom_when_the_model_does_not_fit(monkeypatch, tmp_path, step):
    def build(config):
        raise torch.OutOfMemoryError("no room. Including much")

    monkeypatch.setattr(profiled_process, "build_step", build)
    (tmp_path / "ranged.py").write_text("def ranged(): pass")
    profiled_process.main("nsys", tmp_path, step.config)
    modes = json.loads((tmp_path / "outcome.json").read_text())["modes"]
    assert {name: (mode["status"], mode["reason"]) for name, mode in modes.items()} == dict.fromkeys(
        PHASES, ("oom", "no room.")
    )


@pytest.mark.parametrize(
    ("clock", "gpu_ms", "impossible", "runs"),
    [
        ({}, [10, 10.1, 10.05], {}, 1),
        ({}, [10, 10.9, 10.9], ["step"], 3),
        ({"sm_clock_mhz": 1700.0, "highest_clock_mhz": 1980.0}, [10, 10.3, 10.3], {}, 1),
        ({}, [10, 10.3, 10.3], ["step"], 3),
        ({}, [10, 10, 11], ["step"], 3),
    ],
    ids=["possible", "longer than wall time", "at the power limit", "below it", "different steps"],
)
def test_mode_with_impossible_times_is_profiled_up_to_three_times(
    monkeypatch, clock, gpu_ms, impossible, runs
):
    """The check ignores the first profiled step, which takes 90 ms because its regions have ranges."""
    modes = ProfiledModes(
        Path("a file"), {"step": {"unprofiled_ms": [10.0, 10.1], "clock": clock}}, ["step"] * 4
    )
    times = pd.DataFrame({"step": range(4), "phase": "total", "busy_ns": [9e7, *(1e6 * ms for ms in gpu_ms)]})
    folders = []

    def profile_once(ranged, config, folder):
        folders.append(folder)
        return nsys_profile.Profile(config, "nsys", modes, trace=pd.DataFrame({"step": [-1, 0]}))

    monkeypatch.setattr(nsys_profile, "profile_once", profile_once)
    monkeypatch.setattr(nsys_profile, "phase_clocks", lambda operations, ranges: times)
    monkeypatch.setattr(nsys_profile.Profile, "check", lambda profile: None)
    config = configure("nsys", **SMALL).model_copy(update={"device": "cuda"})
    assert [*nsys_profile.profile_with_nsys(never_run, config).impossible] == [*impossible]
    assert len({*folders}) == runs


def test_oom_mode_keeps_only_its_unprofiled_steps(here):
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


# The nsys program


def test_capture_is_rejected_when_it_differs_from_nsys_sums(capture, reports, tmp_path):
    kernels = int(activity_totals(EXPORT).loc["kernel", "duration_ns"])
    own = Path(shutil.copytree(reports, tmp_path / "own"))
    (own / "cuda_gpu_mem_time_sum.csv").unlink()
    with pytest.raises(
        ConservationError,
        match=r"operations take \d+ ns in total, but nsys's report cuda_gpu_mem_time_sum gives 0 ns",
    ):
        capture(folder=own)
    (own / "cuda_gpu_kern_sum.csv").write_text(f"Total Time (ns),Instances,Name\n{kernels + 1},1,k\n")
    with pytest.raises(
        ConservationError,
        match=f"take {kernels} ns in total, but nsys's report cuda_gpu_kern_sum gives {kernels + 1}",
    ):
        capture(folder=own)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo importer failed; exit 1",
            "the profiled process ended before it completed its steps; its output: importer failed",
        ),
        (f"exec {sys.executable} -c 'print(\"quadd crashed\")'", "its output: quadd crashed"),
    ],
)
def test_error_quotes_a_failed_profilers_output(monkeypatch, tmp_path, script, message):
    program = tmp_path / "nsys"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(nsys_profile, "profiler_here", lambda device: ("nsys 1", program))
    with pytest.raises(NsysError, match=message):
        nsys_profile.profile_with_nsys(never_run, configure("nsys", **SMALL))
    with pytest.raises(NsysError, match=r"nsys stats wrote no reports for step.sqlite"):
        nsys_tool.make_reports(program, Path(shutil.copy(EXPORT, tmp_path)), ("cuda_gpu_kern_sum",))


def test_find_nsys_prefers_path_then_the_newest_in_the_first_install_folder(tmp_path, monkeypatch):
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


def test_torch_profiler_is_used_when_nsys_libraries_are_missing(tmp_path, monkeypatch):
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

    # ldd's output for the importer in Nsight Compute's copy of nsys, a copy that lacks some of the libraries.
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


# The writeup


def test_printed_command_lists_the_options_in_use():
    chapter = Path(str(PROJECT), "writeup", "22-nsys.md.j2").read_text(encoding="utf-8")
    command = next(block for block in chapter.split("```") if "nsys profile" in block).split()
    printed = {word for word in command[: command.index("export")] if word.startswith("--") and "=" in word}
    assert printed == {*nsys_profile.NSYS_OPTIONS}
    assert all(name in " ".join(command) for name in nsys_profile.NSYS_SUMS)
    notebook = (PACKAGE / "notebooks" / "nsys.ipynb").read_text()
    assert all(option in notebook for option in nsys_profile.NSYS_OPTIONS)
