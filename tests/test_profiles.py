"""The nsys study's accounting: on a real H200 capture of the annotated step (scrubbed), and on real captures
made here.
"""
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from stepscope.config import configure
from stepscope.studies.nsys import measure as profiles
from stepscope.traces import nsys_program as nsys
from stepscope.traces.export import ConservationError, TraceError, activity_totals
from stepscope.traces.nsys_program import NsysError, capture
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
    products = operations[operations["family"] == "matrix multiply"].groupby(["phase",
                                                                              "region"])["count"].sum() / STEPS
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


@pytest.mark.parametrize("report, family",
                         [("cuda_gpu_kern_sum", "matrix multiply"), ("cuda_gpu_mem_time_sum", "memory")])
def test_a_total_that_differs_from_nsys_own_raises(report, family):
    operations = pd.DataFrame({"family": [family], "total_ns": [1000]})
    theirs = pd.DataFrame({"total_time_ns": [400, 600]})
    profiles._same_total(operations, {report: theirs}, "step.sqlite")
    with pytest.raises(ConservationError,
                       match=f"step.sqlite: operations sum to 1001 ns, and nsys's own {report} to 1000 ns"):
        profiles._same_total(operations.assign(total_ns=1001), {report: theirs}, "step.sqlite")


def test_a_report_that_cannot_be_used_is_left_out_and_named(tmp_path, monkeypatch):
    """Everything of the capture but that report is kept, and the statuses say so. nsys stands in by a real capture of its."""
    def make_reports(_, report, folder, mode):
        for name in nsys.REPORTS:
            text = (EXPORT.parent / f"sample_{name}.csv").read_text() if name == "nvtx_kern_sum" else f"x does not contain {name}\n"
            (folder / f"{mode}_{name}.csv").write_text(text[:-200] if name == "nvtx_kern_sum" else text)
        return Path(shutil.copy(EXPORT, folder / "made.sqlite"))
    outcome = {"status": "captured", "before_ms": [1.0], "within_ms": [1.0] * STEPS}
    config = configure("nsys", size="small", context_length=512, device="cpu")
    monkeypatch.setattr(profiles, "make_reports", make_reports)
    monkeypatch.setattr(profiles, "profiler_here", lambda device: ("nsys 2025.3", Path("nsys")))
    monkeypatch.setattr(profiles, "capture", lambda configs, folder,
                        _: [nsys.Capture(configs[0], folder / "r", outcome)])
    # the other reports say that there is nothing
    monkeypatch.setattr(profiles, "_same_total", lambda *_: None)
    tables, files, _ = profiles.profile_run(config, tmp_path)
    kept = {file.name for file in files}
    assert "forward_nvtx_kern_sum.csv" not in kept and len(kept) == len(nsys.REPORTS) - 1
    left_out = tables["statuses"]["left_out"].item()
    assert left_out.startswith("forward_nvtx_kern_sum.csv: line ") and "expected" in left_out


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


@pytest.fixture(scope="module")
def run_here():
    config = configure("nsys", size="nano", context_length=16, vocab_size=100, device="cpu", warmup_steps=1,
                       timed_steps=2)
    return profiles.profile_run(config, None)


def test_on_a_cpu_operators_stand_for_kernels_and_everything_adds_up(run_here):
    tables, files, results = run_here
    assert results == {"tool": "torch.profiler, CPU operators", "captured_profiles": 3, "oom_profiles": 0,
                       "crashed_profiles": 0}
    operations = tables["operations"]
    assert set(operations["mode"]) == {"forward", "forward_backward", "step"} and not files
    step = operations[operations["mode"] == "step"]
    assert set(step["phase"]) == {"forward", "loss", "backward",
                                  "optimizer"} and "unattributed" not in set(step["region"])
    products = step[(step["phase"] == "forward") & (step["family"] == "matrix multiply")].groupby("region")["count"].sum() / 2
    assert products.to_dict() == {"attention.qkv": 6, "attention.scores": 2, "attention.value": 2,
                                  "attention.output": 2, "ffn": 6, "head": 1}
    assert len(tables["walls"]) == 3 * (1 + 2)


def test_running_out_of_memory_and_a_crash_cost_one_profile_each(tmp_path, monkeypatch):
    """The process runs out of memory in its first profile and is killed in its third; another process makes the fourth."""
    real = nsys.subprocess.run

    def run(command, **kwargs):
        code = ("import os, sys, stepscope.traces.watched as p; real = p.profile\n"
                "p.profile = lambda c, *rest: os._exit(9) if c.mode == 'step' else real(c, *rest)\n"
                "p.main(sys.argv[1], p.Path(sys.argv[2]))")
        return real([command[0], "-c", code, *command[-2:]], **kwargs)
    monkeypatch.setattr(nsys.subprocess, "run", run)
    small = {"size": "nano", "vocab_size": 100, "device": "cpu", "warmup_steps": 0, "timed_steps": 1}
    captures = capture([configure("benchmark", **small, context_length=length, mode=mode) for length, mode in (
        (4_000_000, "forward"), (8, "forward_backward"), (8, "step"), (8, "forward"))], tmp_path, None)
    assert [item.outcome["status"] for item in captures] == ["oom", "captured", "crashed", "captured"]
    assert "while building the model" in captures[0].outcome["cause"]
    assert [bool(item.file and item.file.exists()) for item in captures] == [False, True, False, True]


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
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value) and len(str(caught.value)) < 500


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
