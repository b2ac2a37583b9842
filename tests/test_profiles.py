"""The nsys study's accounting: on a real H200 capture of the annotated step (scrubbed), and on real captures
made here.
"""
import json
import shutil
import sqlite3
import warnings
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest
import torch

from stepscope.config import PHASES, configure
from stepscope.runs.store import Store
from stepscope.step import annotate
from stepscope.studies.nsys import measure as profiles
from stepscope.studies.nsys.tables import load
from stepscope.traces import nsys_program as nsys
from stepscope.traces import watched
from stepscope.traces.attention_kernels import sdpa_taken
from stepscope.traces.cut import cut
from stepscope.traces.export import ACTIVITIES, ConservationError, TraceError, activity_totals, load_trace
from stepscope.traces.families import families
from stepscope.traces.named_steps import UNMATCHED, carry_regions
from stepscope.traces.nsys_program import NsysError, capture
from stepscope.traces.profiled import profiled
from stepscope.traces.torch_profiler import convert, write_export

EXPORT = Path(__file__).parent / "data" / "nsys" / "step.sqlite"  # small, context 512, three full steps
STEPS, LAYERS = 3, 12


@pytest.fixture(scope="module")
def tables():
    return profiles.analyse(EXPORT)


def test_every_operation_of_a_real_capture_is_in_one_phase_and_one_region(tables):
    operations, totals = tables["operations"], activity_totals(EXPORT)
    assert operations["count"].sum() == totals["operations"].sum() == 5418
    assert operations["total_ns"].sum() == totals["duration_ns"].sum()
    assert set(operations["phase"]) == {"forward", "loss", "backward", "optimizer"}
    assert not operations["region"].isin(["unattributed", "outside"]).any()


def test_backwards_kernels_bear_the_regions_that_made_them(tables):
    operations = tables["operations"]
    regions = {phase: set(own["region"]) for phase, own in operations.groupby("phase")}
    # A sum's gradient is the sum's itself: nothing runs for the residual additions in backward.
    assert regions["backward"] == regions["forward"] - {"residual"} | {"cross_entropy",
                                                                       "gradient accumulation"}
    products = (
        operations[operations["family"] == "matrix multiply"].groupby(["phase", "region"])["count"].sum()
        / STEPS
    )
    for region, matrices in {"attention.qkv": 3, "attention.output": 1, "ffn": 3, "attention.scores": 1,
                             "attention.value": 1}.items():
        assert products["forward", region] == matrices * LAYERS
    time = operations.groupby(["phase", "region"])["total_ns"].sum()
    assert 1.5 < time["backward", "ffn"] / time["forward", "ffn"] < 2.5  # twice the FLOPs


def test_launches_are_the_same_in_every_step(tables):
    assert (tables["operations"]["count"] % STEPS == 0).all()


def test_clocks_and_timeline_agree_with_the_operations(tables):
    clocks, operations, timeline = tables["clocks"], tables["operations"], tables["timeline"]
    assert clocks["operations_ns"].sum() == operations["total_ns"].sum()
    assert (clocks["busy_ns"] <= clocks["projected_ns"]).all() and len(clocks) == STEPS * 4
    first = clocks[clocks["step"] == 0].set_index("phase")["operations_ns"]
    assert timeline.groupby("phase")["duration_ns"].sum().to_dict() == first.to_dict()
    assert (timeline["launch_ns"] <= timeline["start_ns"]).all()


@pytest.mark.parametrize("report, kind", [("cuda_gpu_kern_sum", "kernel"), ("cuda_gpu_mem_time_sum", "memset")])
def test_a_total_that_differs_from_nsys_own_raises(report, kind):
    totals = pd.DataFrame({"duration_ns": 0}, index=list(ACTIVITIES))
    totals.loc[kind] = 1000
    theirs = pd.DataFrame({"total_time_ns": [400, 600]})
    profiles._same_total(totals, {report: theirs}, "step.sqlite")
    totals.loc[kind] = 1001
    with pytest.raises(ConservationError,
                       match=f"step.sqlite: operations sum to 1001 ns, and nsys's own {report} to 1000 ns"):
        profiles._same_total(totals, {report: theirs}, "step.sqlite")


# What stands in for nsys does with files what nsys does: its export is a real capture's, its reports are real.
FAKE = """#!/bin/sh
case "$1" in
export) for last; do :; done; cp {export} "$5" ;;
stats) name=$6; case $name in
    nvtx_kern_sum) head -c 4000 {folder}/sample_$name.csv > $4_$name.csv ;;
    cuda_gpu_*) exit 1 ;;
    *) echo "x does not contain $name" > $4_$name.csv ;; esac; test -e "$7" ;;
esac
"""


def test_reports_that_cannot_be_used_are_left_out_and_named(tmp_path):
    """Everything of the capture but these is kept, and the statuses say so."""
    fake, report, kept = tmp_path / "nsys", tmp_path / "capture.1.nsys-rep", tmp_path / "kept"
    fake.write_text(FAKE.format(export=EXPORT, folder=EXPORT.parent))
    fake.chmod(0o755)
    report.touch()
    rows = [["captured", i, i, "step", 1.0, 0.5, None] for i in range(STEPS)]
    outcome = {"status": "captured", "walls": rows}
    item = nsys.Capture(report, {"forward": outcome}, ["forward"] * STEPS, {})
    export = profiles._exports(item, fake)["forward"]
    tables, reports = profiles._tables("forward", outcome, export, fake)
    assert not list(tmp_path.glob("forward-*.sqlite")) and export == tmp_path / "forward.sqlite"
    files = {file.name for file in profiles._keep(export, kept, reports, keep_export=True)}
    assert files == {f"forward_{name}.csv" for name in ("cuda_api_sum", "nvtx_pushpop_sum", "nvtx_gpu_proj_sum")} | {
        "forward.sqlite"}
    left_out = tables["statuses"]["left_out"].item()
    assert "forward_nvtx_kern_sum.csv: line " in left_out and "forward_cuda_gpu_kern_sum.csv: no such" in left_out
    assert tables["statuses"]["unmatched"].item() == 0 and len(tables["walls"]) == STEPS


def test_an_export_that_nsys_does_not_make_is_an_error_that_quotes_it(tmp_path):
    fake, report = tmp_path / "nsys", tmp_path / "capture.1.nsys-rep"
    fake.write_text("#!/bin/sh\necho importer failed; exit 1\n")
    fake.chmod(0o755)
    report.touch()
    with pytest.raises(NsysError, match="nsys export made nothing of capture.1.nsys-rep; it said: importer failed"):
        nsys.export_capture(fake, report, tmp_path / "whole.sqlite")


# Regions of steps that bear none

def unnamed(path, steps):
    """The real capture without the regions' ranges of these steps."""
    shutil.copy(EXPORT, path)
    ranges = load_trace(EXPORT)[1]
    gone = ranges[(ranges["role"] == "region") & ranges["step"].isin(steps)]
    with closing(sqlite3.connect(path)) as connection:
        connection.executemany("DELETE FROM NVTX_EVENTS WHERE start = ? AND end = ? AND globalTid & 16777215 = ?",
                               gone[["start_ns", "end_ns", "thread"]].astype(int).values.tolist())
        connection.commit()
    return path


def test_steps_without_names_have_their_regions_from_the_named_one(tmp_path):
    """Of a real capture whose every step is named: of two steps the names are taken away, and come back."""
    whole, ranges = load_trace(EXPORT)
    carried, named = carry_regions(*load_trace(unnamed(tmp_path / "t.sqlite", [1, 2])))
    assert named == [0] and carried["region"].tolist() == whole["region"].astype(str).tolist()
    assert carry_regions(whole, ranges)[1] == []  # all are named: none is there for the others


def test_the_named_step_is_in_no_table_but_the_regions(tmp_path, tables):
    found = profiles.analyse(unnamed(tmp_path / "t.sqlite", [1, 2]))
    per_step = found["operations"].merge(tables["operations"], on=["phase", "region", "family", "name"], how="outer")
    assert (per_step["count_x"] * STEPS == per_step["count_y"] * (STEPS - 1)).all()
    assert sorted(found["clocks"]["step"].unique()) == [0, 1]
    second = tables["clocks"][tables["clocks"]["step"] == 1]
    assert found["clocks"][found["clocks"]["step"] == 0]["operations_ns"].tolist() == second["operations_ns"].tolist()
    assert found["timeline"]["duration_ns"].sum() == second["operations_ns"].sum()
    one, all_of_them = (t["regions"].set_index(["phase", "region"]) for t in (found, tables))
    assert set(one["steps"]) == {1} and set(all_of_them["steps"]) == {STEPS}
    assert (one["ranges"] * STEPS == all_of_them["ranges"]).all()


@pytest.mark.parametrize("statement", [
    "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET demangledName = (SELECT max(demangledName) + 1 FROM"
    " CUPTI_ACTIVITY_KIND_KERNEL) WHERE rowid = {row}",
    "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE rowid = {row}",
])
def test_a_phase_whose_operations_are_others_has_no_regions(tmp_path, statement):
    path = unnamed(tmp_path / "t.sqlite", [1, 2])
    operations = load_trace(path)[0]
    row = operations[(operations["step"] == 2) & (operations["phase"] == "backward")
                     & (operations["kind"] == "kernel")].iloc[-1]["row"]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute(statement.format(row=row)).rowcount == 1
        connection.commit()
    carried = carry_regions(*load_trace(path))[0]
    unmatched = carried[carried["region"] == UNMATCHED]
    assert set(zip(unmatched["step"], unmatched["phase"])) == {(2, "backward")}
    assert len(unmatched) == ((carried["step"] == 2) & (carried["phase"] == "backward")).sum()
    assert set(profiles.analyse(path)["operations"]["region"]) > {UNMATCHED, "gradient accumulation"}


@pytest.mark.parametrize("names, expected", [
    (["void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t>>(x)",
      "void at::native::vectorized_elementwise_kernel<4>(int)"], "FlashAttention-2"),
    (["fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)",
      "fmha_cutlassB_f32_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<float>::Params)"],
     "memory-efficient"),
    (["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
      "cudnn::fusion::compute_dot_do_o"], "cuDNN"),
    (["aten::_scaled_dot_product_flash_attention_for_cpu"], "flash on a CPU"),
    (["cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_32",
      "void pytorch_flash::flash_fwd_kernel<x>(y)"], "cuDNN and FlashAttention-2"),
    (["void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(T1::Params)", "aten::bmm"], "math"),
])
def test_which_implementation_of_attention_ran(names, expected):
    table = pd.DataFrame({"name": names, "family": families(names).astype(str)})
    assert sdpa_taken(table) == expected


def test_tables_over_phases_and_families(tables):
    operations = tables["operations"].assign(mode="step")
    shares = profiles.by_family(operations)
    assert shares.groupby(["mode", "phase"])["share"].sum().round(9).eq(1).all()
    assert shares.set_index(["phase", "family"])["share"]["optimizer", "optimizer"] == 1
    top = profiles.top_kernels(operations, STEPS, "step", "forward", 3)
    assert top["ms_per_step"].is_monotonic_decreasing and top["launches"].iloc[0] == 61
    assert profiles.unknown_kernels(operations).empty
    unknown = profiles.unknown_kernels(operations.assign(family="other"))
    assert unknown["share"].sum() == pytest.approx(1)


def profile_here(**fields):
    config = configure("nsys", size="nano", context_length=16, vocab_size=100, device="cpu", **fields)
    return profiles.profile_run(config, None)


@pytest.fixture(scope="module")
def run_here():
    return profile_here(warmup_steps=1, timed_steps=2)


def test_on_a_cpu_operators_stand_for_kernels_and_everything_adds_up(run_here):
    tables, files, results = run_here
    assert {key: results[key] for key in results if not key.endswith("_s")} == {
        "tool": "torch.profiler, CPU operators", "captured_profiles": 3, "oom_profiles": 0, "crashed_profiles": 0,
        "attention_implementation": "written out"}
    operations = tables["operations"]
    assert set(operations["mode"]) == {"forward", "forward_backward", "step"} and not files
    step = operations[operations["mode"] == "step"]
    assert set(step["phase"]) == {"forward", "loss", "backward",
                                  "optimizer"} and "unattributed" not in set(step["region"])
    products = (
        step[(step["phase"] == "forward") & (step["family"] == "matrix multiply")]
        .groupby("region")["count"]
        .sum()
        / profiles.captured_steps(tables["clocks"], "step")
    )
    assert products.to_dict() == {"attention.qkv": 6, "attention.scores": 2, "attention.value": 2,
                                  "attention.output": 2, "ffn": 6, "head": 1}
    assert not tables["statuses"]["unmatched"].any() and UNMATCHED not in set(operations["region"])


def test_every_step_is_on_the_clocks_and_plain_and_annotated_take_turns(run_here):
    walls = run_here[0]["walls"]
    for mode, own in walls[walls["phase"] == "step"].groupby("mode"):
        kinds = own.sort_values("place")["capture"].tolist()
        assert own["place"].tolist() == list(range(len(own)))
        inside = [at for at, kind in enumerate(kinds) if kind in ("named", "captured")]
        assert kinds.count("captured") == 2 and inside == list(range(inside[0], inside[-1] + 1))
        before = kinds[kinds.count("warm-up"):inside[0]]
        assert kinds[0] == "warm-up" and before == ["plain", "annotated"] * (len(before) // 2) != []
        assert inside[-1] == len(kinds) - 1  # nothing is timed beside the profiler's end of a capture
        phases = walls[(walls["mode"] == mode) & (walls["phase"] != "step")]
        assert (phases.groupby("place").size() == {"forward": 1, "forward_backward": 3, "step": 4}[mode]).all()
        # On a CPU a phase's time is the host's, and the phases make the step but for the way between them.
        whole = own.set_index("place")["time_ms"]
        assert (phases.groupby("place")["time_ms"].sum() <= whole).all()
    table = profiles.states(walls).set_index(["mode", "phase"])
    assert len(table) == 2 + 4 + 5 and (table["plain_steps"] == table["annotated_steps"]).all()
    forward = walls[(walls["mode"] == "forward") & (walls["phase"] == "step")].groupby("capture")["time_ms"].median()
    assert table.loc[("forward", "step"), "captured_over_plain"] == forward["captured"] / forward["plain"]


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


def test_a_plain_step_opens_no_range_and_an_annotated_one_those_of_its_phases(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(annotate, "_domain", recorder)
    annotate._attributes.cache_clear()
    config = configure("benchmark", size="nano", context_length=8, vocab_size=100, device="cpu", mode="step")
    steps, opened = watched.Steps(config), {}
    try:
        for kind, named in (("warm-up", False), ("plain", False), ("annotated", False), ("named", True)):
            recorder.opened = opened[kind] = []
            steps.run(kind, named)
    finally:
        annotate._attributes.cache_clear()
    phases = [(0, "step"), *((1, phase) for phase in ("forward", "loss", "backward", "optimizer"))]
    assert opened["warm-up"] == opened["plain"] == [] and opened["annotated"] == phases and not recorder.depth
    assert [one for one in opened["named"] if one in phases] == phases
    within = {name for depth, name in opened["named"] if depth > 1}
    assert {"attention.softmax", "block", "cross_entropy", "ffn"} <= within


@pytest.mark.parametrize("step_ms, captured, turns, named",
                         [(1, 10, 10, False), (60, 10, 6, False), (200, 5, 2, False), (2000, 3, 2, True)])
def test_short_steps_are_run_more_often(step_ms, captured, turns, named):
    assert watched.how_many(step_ms, 10) == (captured, turns, named)
    assert watched.how_many(step_ms, 2)[0] == 2


@pytest.mark.parametrize("step_ms, least, expected", [(1, 2, 20), (60, 2, 5), (60, 8, 8), (900, 2, 2), (1, 0, 0)])
def test_a_warm_up_is_long_enough_without_its_first_step(step_ms, least, expected):
    warm_ms = []
    while not watched.warm_enough(warm_ms, least):
        warm_ms.append(step_ms if warm_ms else 1000)
    assert len(warm_ms) == expected


@pytest.mark.parametrize("fields, fused", [
    ({"attention": "sdpa", "precision": "bf16"}, {"attention.fused"}),
    ({"attention": "sdpa", "precision": "bf16", "compile": True}, {"compiled"}),
])
def test_fused_and_compiled_steps_are_captured(fields, fused):
    """What was compiled is one region, backward included; the loss is not compiled and keeps its own."""
    tables, _, results = profile_here(warmup_steps=1, timed_steps=1, **fields)
    assert results["captured_profiles"] == 3 and results["attention_implementation"] == "flash on a CPU"
    operations = tables["operations"][tables["operations"]["mode"] == "step"]
    regions = {phase: set(own["region"]) for phase, own in operations.groupby("phase")}
    assert fused <= regions["forward"] and fused <= regions["backward"]
    assert regions["loss"] == {"cross_entropy"} and "cross_entropy" in regions["backward"]
    if fields.get("compile"):
        assert regions["forward"] == fused and regions["backward"] <= {"compiled", "cross_entropy",
                                                                       "gradient accumulation"}
    assert UNMATCHED not in set(operations["region"])


def test_walls_of_before_are_read_as_those_of_today(tmp_path):
    """A record of the first campaign, without its timeline and nsys's own reports."""
    shutil.copytree(EXPORT.parent / "before", tmp_path / "runs")
    store = Store(tmp_path / "runs")
    old = load(store, store.records()[0])
    walls = old["walls"][old["walls"]["mode"] == "forward"]
    assert walls["capture"].tolist() == ["warm-up", "annotated", *["captured"] * 3]
    assert walls["place"].tolist() == list(range(5)) and walls["step"].tolist() == [0, 0, 0, 1, 2]
    assert set(walls["phase"]) == {"step"}
    for name in ("operations", "clocks", "regions", "walls", "statuses"):
        assert (old[name]["steps"] == 3).all()
    assert old["operations_fused"].empty


# What the watched process runs instead of its own main, so that one of its steps goes wrong in earnest.
WRONG = """
import os, sys, torch
import stepscope.traces.watched as watched
from pathlib import Path
run, call, kinds = watched.Steps.run, watched.Step.__call__, [None]
def wrong_run(steps, kind, named=False):
    kinds[0] = kind
    return run(steps, kind, named)
def wrong_call(step, phase):
    if (step.config.mode, kinds[0]) == ("step", os.environ.get("DIES")):
        os._exit(9)
    if f"{step.config.mode} {kinds[0]}" in os.environ.get("FILLS", "").split(", "):
        with watched.out_of_memory_names("filling"):
            torch.empty(2**55)
    return call(step, phase)
watched.Steps.run, watched.Step.__call__ = wrong_run, wrong_call
watched.main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
"""
SMALL = {"size": "nano", "vocab_size": 100, "context_length": 8, "device": "cpu", "warmup_steps": 1,
         "timed_steps": 1}


def capture_wrongly(tmp_path, monkeypatch, modes, **environment):
    real = nsys.subprocess.Popen
    monkeypatch.setattr(nsys.subprocess, "Popen",
                        lambda command, **kwargs: real([command[0], "-c", WRONG, *command[-3:]], **kwargs))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return capture([configure("benchmark", **SMALL, mode=mode) for mode in modes], tmp_path, None)


def test_a_crash_costs_one_profile(tmp_path, monkeypatch):
    """The process is killed in the capture; the next ones have a mode each, and one is killed again."""
    captures = capture_wrongly(tmp_path, monkeypatch, ["forward_backward", "step"], DIES="captured")
    found = {mode: outcome["status"] for item in captures for mode, outcome in item.outcomes.items()}
    assert found == {"forward_backward": "captured", "step": "crashed"}
    assert [item.file is None for item in captures] == [False, True]
    assert set(profiles._exports(captures[0], None)) == {"forward_backward"}


def test_running_out_of_memory_costs_one_profile(tmp_path, monkeypatch):
    """Before the capture or in it: the next mode is captured."""
    [item] = capture_wrongly(tmp_path, monkeypatch, ["forward", "forward_backward", "step"],
                             FILLS="forward warm-up, forward_backward captured")
    assert {mode: outcome["status"] for mode, outcome in item.outcomes.items()} == {
        "forward": "oom", "forward_backward": "oom", "step": "captured"}
    assert all("while filling" in item.outcomes[mode]["cause"] for mode in ("forward", "forward_backward"))
    # A named step and a captured one; in the second the mode fails.
    assert item.inside == ["forward_backward"] * 2 + ["step"] * 2
    exports = profiles._exports(item, None)
    assert set(exports) == {"step"}
    assert set(profiles.analyse(exports["step"])["operations"]["phase"]) == {"forward", "loss", "backward", "optimizer"}


def test_weights_that_do_not_fit_leave_no_capture(tmp_path):
    huge = SMALL | {"context_length": 4_000_000}
    [item] = capture([configure("benchmark", **huge, mode=mode) for mode in PHASES], tmp_path, None)
    assert item.file is None and {outcome["status"] for outcome in item.outcomes.values()} == {"oom"}
    assert all("while building the model" in outcome["cause"] for outcome in item.outcomes.values())
    assert profiles._exports(item, None) == {}


def test_a_capture_is_cut_so_that_every_operation_is_one_modes(tmp_path):
    """The real capture's three steps, taken for two modes' : nothing is lost, and domains stay."""
    whole = Path(shutil.copy(EXPORT, tmp_path / "whole.sqlite"))
    parts = cut(whole, ["forward", "forward", "step"])
    operations = load_trace(EXPORT)[0]
    for mode, steps in (("forward", {0, 1}), ("step", {2})):
        own, ranges = load_trace(parts[mode])
        expected = operations[operations["step"].isin(steps)]
        assert own["start_ns"].tolist() == expected["start_ns"].tolist()
        assert own["region"].astype(str).tolist() == expected["region"].astype(str).tolist()
        assert (ranges["role"] == "step").sum() == len(steps)
    with pytest.raises(TraceError, match="holds 3 steps, expected the 2 that were run"):
        cut(whole, ["forward", "step"])


def test_nothing_profiled_is_an_error_that_quotes_the_profiler(tmp_path):
    config = configure("benchmark", size="nano", context_length=8, device="cpu")
    fake = tmp_path / "nsys"
    fake.write_text("#!/bin/sh\necho no capture for you; exit 1\n")
    fake.chmod(0o755)
    with pytest.raises(NsysError, match="no capture for you"):
        capture([config], tmp_path / "out", fake)


def test_nsys_is_found_and_judged(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nsys, "PLACES", (str(tmp_path / "nsight-compute/*/host/target-linux-x64/nsys"),))
    assert nsys.find_nsys() is None
    for version in ("2024.1", "2025.3"):
        bundled = tmp_path / f"nsight-compute/{version}/host/target-linux-x64/nsys"
        bundled.parent.mkdir(parents=True)
        bundled.write_bytes(bytes(5000))
    assert nsys.find_nsys() == bundled
    (tmp_path / "nsys").write_text("#!/bin/sh\necho NVIDIA Nsight Systems version 2025.3.1.0\n")
    (tmp_path / "nsys").chmod(0o755)
    assert nsys.find_nsys() == tmp_path / "nsys" and nsys.nsys_version(tmp_path / "nsys") == "2025.3.1.0"


def test_a_gpu_trace_of_torch_profiler_is_read_as_an_export(tmp_path):
    """Kernels are joined to launches by correlation, ranges by thread; torch's own ranges are left out."""
    def event(cat, name, ts, dur, tid, **args):
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}
    events = [event("user_annotation", "step", 0, 100, 1), event("user_annotation", "forward", 0, 50, 1),
              event("user_annotation", "ffn", 1, 20, 1), event("user_annotation", "backward", 50, 50, 1),
              event("user_annotation", "norm", 60, 10, 2),
              event("user_annotation", "Optimizer.step#AdamW.step", 0, 90, 1),
              event("cuda_runtime", "cudaLaunchKernel", 5, 1, 1, correlation=1),
              event("cuda_runtime", "cudaLaunchKernel", 62, 1, 2, correlation=2),
              event("kernel", "sgemm", 10, 30, 7, correlation=1, stream=7),
              event("kernel", "reduce_kernel", 70, 5.5, 7, correlation=2, stream=7)]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    convert(tmp_path / "t.json", tmp_path / "t.sqlite")
    found = profiles.analyse(tmp_path / "t.sqlite")["operations"]
    assert found[["phase", "region", "name", "total_ns"]].values.tolist() == [["backward", "norm",
                                                                               "reduce_kernel", 5500],
                                                                              ["forward", "ffn", "sgemm",
                                                                               30000]]


FORWARD = {"ph": "X", "cat": "user_annotation", "name": "forward", "ts": 0, "dur": 50, "tid": 1, "args": {}}


@pytest.mark.parametrize("text, message", [
    ("", "JSONDecodeError"),
    ("[" * 5_000, "RecursionError"),
    ("[]", "expected torch.profiler's trace: JSON with a list traceEvents"),
    ('{"traceEvents": [5]}', "expected torch.profiler's trace: JSON with a list traceEvents"),
    (FORWARD | {"ts": "soon"}, "the event 'forward' has ts 'soon', expected a time in microseconds"),
    (FORWARD | {"ts": None}, "the event 'forward' has ts None, expected a time in microseconds"),
    (FORWARD | {"dur": float("nan")}, "the event 'forward' has dur nan, expected a time in microseconds"),
    (FORWARD | {"dur": 10**400}, "the event 'forward' has dur 1000+, expected a time in microseconds"),
    (FORWARD | {"ts": 1e20}, "the event 'forward' has ts 1e[+]20, expected a time in microseconds"),
    (FORWARD | {"dur": -1.5}, "the event 'forward' lasts -1500 ns, expected no negative time"),
    (FORWARD | {"cat": "kernel", "args": {"correlation": "a"}},
     "has correlation 'a', expected a whole number from 0"),
    (FORWARD | {"cat": "kernel", "args": {"correlation": 2**40}},
     "has correlation 1099511627776, expected a whole"),
    (FORWARD | {"cat": "kernel", "args": {"correlation": 1, "stream": 1.5}},
     "has stream 1.5, expected a whole number"),
])
def test_a_trace_that_is_none_is_refused_in_one_sentence(tmp_path, text, message):
    path = tmp_path / "t.json"
    path.write_text(text if isinstance(text, str) else json.dumps({"traceEvents": [text]}))
    with pytest.raises(TraceError, match=message) as caught:
        convert(path, tmp_path / "t.sqlite")
    assert (
        str(caught.value).startswith(str(path))
        and "\n" not in str(caught.value)
        and len(str(caught.value)) < 500
    )


def test_host_times_are_of_the_phase_that_was_open(tmp_path):
    nvtx = [(0, 100, 59, "step", 1 << 24 | 1, None, 0), (0, 50, 59, "forward", 1 << 24 | 1, None, 0),
            (10, 30, 59, "ffn", 1 << 24 | 1, None, 0),
            (50, 90, 59, "backward", 1 << 24 | 1, None, 0), (60, 65, 59, "ffn", 1 << 24 | 2, None, 0),
            (95, 99, 59, "ffn", 1 << 24 | 1, None, 0)]
    write_export(tmp_path / "t.sqlite", StringIds=[(1, "sgemm")], NVTX_EVENTS=nvtx,
                 CUPTI_ACTIVITY_KIND_RUNTIME=[(12, 13, 1 << 24 | 1, 1)],
                 CUPTI_ACTIVITY_KIND_KERNEL=[(20, 40, 0, 7, 1, 1 << 24, 1)])
    host = profiles.analyse(tmp_path / "t.sqlite")["regions"].set_index(["phase", "region"])["host_ns"]
    assert host.to_dict() == {("forward", "ffn"): 20, ("backward", "ffn"): 5, ("outside", "ffn"): 4}


def test_the_profilers_advice_on_cycles_is_not_said_and_other_warnings_are(monkeypatch):
    def said(profile):
        monkeypatch.setattr(torch.profiler.profiler, "_WARNINGS_SHOWN", set())  # torch says it once a process
        twice = torch.profiler.schedule(wait=0, warmup=0, active=1, repeat=2)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=twice) as profiler:
                for _ in range(2):
                    torch.ones(2).sum()
                    profiler.step()
                warnings.warn("of the work", UserWarning, stacklevel=1)
        return [str(warning.message)[:25] for warning in told]
    assert said(torch.profiler.profile) == ["Warning: Profiler clears ", "of the work"]
    assert said(profiled) == ["of the work"]
