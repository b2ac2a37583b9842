"""The nsys study: its accounting on a real H200 capture of the annotated step (scrubbed) and on captures made
here, what it does with nsys as a program, and what its tables say.
"""
import json
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from stepscope.config import PHASES, configure
from stepscope.report.tables import markdown
from stepscope.step import ranges as step_ranges
from stepscope.step.training_step import build_step
from stepscope.studies.nsys import claims, figures, measure
from stepscope.studies.nsys import tables as study
from stepscope.traces import nsys_program, watched
from stepscope.traces.attribution import ConservationError
from stepscope.traces.conservation import check_conservation
from stepscope.traces.export import activity_totals, load_trace
from stepscope.traces.nsys_program import Capture, NsysError

DATA = Path(__file__).parent / "data" / "nsys"
EXPORT = DATA / "step.sqlite"  # small, context 512, three full steps, every region named
STEPS, LAYERS = 3, 12
OUTCOME = {"status": "ok", "reason": "", "plain_ms": [60.0, 61.0], "captured_ms": [70.0, 71.0, 72.0]}
TAKEN = Capture(EXPORT, {"step": OUTCOME}, ["step"] * STEPS, {})


@pytest.fixture(scope="module")
def tables():
    return measure.analyse(TAKEN, *load_trace(EXPORT))


def test_every_operation_of_a_real_capture_is_in_one_phase_and_one_region(tables):
    loaded, totals = load_trace(EXPORT)[0], activity_totals(EXPORT)
    check_conservation(loaded, totals)
    operations, first = tables["operations"], loaded[loaded["step"] == 0]
    assert operations["count"].sum() == len(first) == totals["operations"].sum() / STEPS
    assert operations["total_ns"].sum() == first["duration_ns"].sum()
    assert set(operations["phase"]) == {"forward", "loss", "backward", "optimizer"}
    assert not operations["region"].isin(["unattributed", "outside"]).any()
    assert tables["clocks"].query("phase == 'whole' and captured")["operations"].tolist() == [len(first)] * 2


def test_backwards_kernels_bear_the_regions_that_made_them(tables):
    operations = tables["operations"]
    regions = {phase: set(own["region"]) for phase, own in operations.groupby("phase")}
    # A sum's gradient is the sum's itself: nothing runs for the residual additions in backward.
    assert regions["backward"] == regions["forward"] - {"residual"} | {"cross_entropy",
        "gradient accumulation"}
    products = operations[operations["family"] == "matrix multiply"].groupby(["phase",
        "region"])["count"].sum()
    for region, matrices in {"attention.qkv": 3, "attention.output": 1, "ffn": 3, "attention.scores": 1,
                             "attention.value": 1}.items():
        assert products["forward", region] == matrices * LAYERS
    time = operations.groupby(["phase", "region"])["total_ns"].sum()
    assert 1.5 < time["backward", "ffn"] / time["forward", "ffn"] < 2.5  # twice the FLOPs


def test_clocks_have_every_step_but_the_named_one_and_the_plain_ones(tables):
    clocks, loaded = tables["clocks"], load_trace(EXPORT)[0]
    captured = clocks[clocks["captured"] & (clocks["phase"] != "whole")]
    assert captured["operations_ns"].sum() == loaded.loc[loaded["step"] > 0, "duration_ns"].sum()
    assert (captured["busy_ns"] <= captured["projected_ns"]).all() and len(captured) == 2 * 4
    whole = clocks[clocks["phase"] == "whole"]
    assert whole.loc[whole["captured"], ["step", "wall_ms"]].values.tolist() == [[0, 71.0], [1, 72.0]]
    assert whole.loc[~whole["captured"], "wall_ms"].tolist() == [60.0, 61.0]
    assert captured["wall_ms"].isna().all()


def test_the_timeline_has_the_replay_without_what_prepared_it():
    """A graph's operations have one launch; the step that warmed up before it was launched in many."""
    operations, ranges = load_trace(EXPORT)
    replayed = operations.tail(50).assign(step=-1, region="replay")
    replayed["launch_start_ns"] = [*range(20), *[1_000] * 30]
    replayed["start_ns"] = operations["start_ns"].max() + pd.RangeIndex(0, 500_000, 10_000)
    timeline = measure.analyse(TAKEN, pd.concat([operations, replayed]), ranges)["timeline"]
    assert set(timeline["mode"]) == {"replayed"} and 15 <= len(timeline) <= 30
    assert (timeline["start_ns"].diff().dropna() == 10_000).all() and timeline["launch_ns"].nunique() == 1
    study.SCHEMAS["timeline"].validate(timeline)
    refused = replayed.assign(launch_start_ns=range(50))  # the step that warmed up alone was run
    assert measure.analyse(TAKEN, pd.concat([operations, refused]), ranges)["timeline"].empty


def test_a_capture_of_other_steps_than_were_run_is_refused():
    with pytest.raises(ConservationError, match="the capture holds 3 steps, expected the 2 that were run"):
        measure.analyse(Capture(EXPORT, {"step": OUTCOME}, ["step"] * 2, {}), *load_trace(EXPORT))


@pytest.fixture(scope="module")
def run_here():
    config = configure("nsys", size="nano", context_length=16, vocab_size=100, device="cpu")
    return measure.profile_run(config)


def test_on_a_cpu_operators_stand_for_kernels_and_everything_adds_up(run_here):
    tables, results = run_here
    assert results["tool"] == "torch.profiler, CPU operators"
    assert [results[f"{mode}_status"] for mode in PHASES] == ["ok"] * 3 and "nsys_ns" not in results
    assert len(figures.lanes(tables["timeline"]).axes[0].get_yticks()) == 2
    for name, schema in study.SCHEMAS.items():
        schema.validate(tables[name])
    operations = tables["operations"]
    assert set(operations["mode"]) == set(PHASES)
    assert {mode: set(own["phase"]) for mode, own in operations.groupby("mode")} == {
        mode: {*phases} for mode, phases in PHASES.items()}
    step = operations[operations["mode"] == "step"]
    assert "unattributed" not in set(step["region"])
    products = step[(step["phase"] == "forward") & (step["family"] == "matrix multiply")].groupby("region")["count"].sum()
    assert products.to_dict() == {"attention.qkv": 6, "attention.scores": 2, "attention.value": 2,
                                  "attention.output": 2, "ffn": 6, "head": 1}
    named = operations.groupby("mode")["count"].sum()
    whole = tables["clocks"].query("phase == 'whole' and captured").groupby("mode")["operations"]
    assert whole.min().to_dict() == whole.max().to_dict() == named.to_dict()
    plain = tables["clocks"].query("not captured").groupby("mode").size()
    assert plain.to_dict() == dict.fromkeys(PHASES, 10)
    finding = measure.finding(tables, "cpu")
    assert finding.startswith("Forward: ") and "bound" not in finding


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
    return build_step(configure("benchmark", size="nano", context_length=8, vocab_size=100, device="cpu"))


def test_a_plain_step_opens_no_range_and_a_captured_one_those_of_its_phases(monkeypatch, step):
    recorder = Recorder()
    monkeypatch.setattr(step_ranges, "_domain", recorder)
    step_ranges._attributes.cache_clear()
    mode = watched.Mode(step)
    try:
        assert mode.plain() > 0 and recorder.opened == []
        mode.captured(named=False)
        phases = [(0, "step"), *((1, phase) for phase in PHASES["step"])]
        assert recorder.opened == phases and not recorder.depth
        recorder.opened = []
        mode.captured(named=True)
    finally:
        step_ranges._attributes.cache_clear()
    assert [one for one in recorder.opened if one in phases] == phases and not recorder.depth
    assert {"attention.softmax", "block", "cross_entropy", "ffn"} <= {name for depth, name in recorder.opened
                                                                      if depth > 1}
    mode.plain()
    assert "forward" not in vars(step.model.blocks[0].ffn)  # the plain method is back


def test_a_mode_that_runs_out_of_memory_costs_the_others_nothing(monkeypatch, step):
    whole = watched.Mode.captured

    def captured(self, named):
        if self.step.mode == "step":
            raise torch.OutOfMemoryError("CUDA out of memory. Including non-PyTorch memory, more words")
        return whole(self, named)
    monkeypatch.setattr(watched.Mode, "captured", captured)
    outcome = watched.profile(step, lambda: None)
    statuses = {name: one["status"] for name, one in outcome["modes"].items()}
    assert statuses == {"forward": "ok", "forward_backward": "ok", "step": "oom"}
    assert outcome["modes"]["step"]["reason"] == "while running step: CUDA out of memory."
    assert outcome["inside"] == ["forward"] * 4 + ["forward_backward"] * 4 + ["step"] and not step.optimizer.state


# nsys as a program

# What stands in for nsys does with files what nsys does: its export is a real capture's, its reports are
# real.
FAKE = """#!/bin/sh
case "$1" in
profile) while [ "$1" != --output ]; do shift; done; touch "$2.nsys-rep"; shift 2; shift; shift; shift; shift
    echo '{outcome}' > "$1/outcome.json" ;;
export) cp {export} "$5" ;;
stats) for name in $(echo $6 | tr , ' '); do case $name in
    cuda_gpu_kern_sum) echo 'Time (%),Total Time (ns),Instances,Name'; echo '100.0,{kernels},1,k' ;;
    *) echo "SKIPPED: it does not contain $name" ;; esac > $4_$name.csv; done ;;
esac
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Makes an nsys that leaves a real capture, and says a sum of kernels; what calls it sees no GPU."""
    def make(kernels: int) -> None:
        program = tmp_path / "nsys"
        outcome = {"inside": ["step"] * STEPS, "modes": {"step": OUTCOME}, "waited_s": 0.0, "turn_s": 1.0}
        program.write_text(FAKE.format(export=EXPORT, kernels=kernels, outcome=json.dumps(outcome)))
        program.chmod(0o755)
        monkeypatch.setattr(measure, "profiler_here", lambda device: ("nsys 1", program))
    return make


def test_a_capture_is_held_against_nsys_own_sum(fake):
    totals, config = activity_totals(EXPORT), configure("nsys", size="nano", context_length=16, device="cpu")
    kernels = int(totals.loc["kernel", "duration_ns"])
    fake(kernels)
    # of memory nsys "does not contain" any, which is a sum of nothing, and the capture has some
    with pytest.raises(ConservationError, match=r"operations sum to \d+ ns, and nsys's own cuda_gpu_mem_time_sum to 0 ns"):
        measure.profile_run(config)
    fake(kernels + 1)
    with pytest.raises(ConservationError, match=f"sum to {kernels} ns, and nsys's own cuda_gpu_kern_sum to {kernels + 1}"):
        measure.profile_run(config)


def test_nsys_own_sums_are_in_the_results():
    folder = {name: DATA / f"sample_{name}.csv" for name in measure.OWN_SUMS}
    totals = activity_totals(DATA / "sample.sqlite")
    assert measure.nsys_sums(folder, totals) == {"nsys_ns": int(totals["duration_ns"].sum())}


@pytest.mark.parametrize(("script", "message"), [
    ("echo importer failed; exit 1", "the profiled process ended before its steps did; it said: importer failed"),
    (f"exec {sys.executable} -c 'print(\"quadd crashed\")'", "it said: quadd crashed"),
])
def test_a_profiler_that_fails_is_quoted(tmp_path, script, message):
    program = tmp_path / "nsys"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    config = configure("nsys", size="nano", context_length=16, device="cpu")
    with pytest.raises(NsysError, match=message):
        nsys_program.capture(config, tmp_path, program)
    with pytest.raises(NsysError, match=r"nsys export made nothing of a.nsys-rep; it said"):
        nsys_program.export_capture(program, tmp_path / "a.nsys-rep", tmp_path / "a.sqlite")
    with pytest.raises(NsysError, match=r"nsys stats made nothing of step.sqlite"):
        nsys_program.make_reports(program, Path(shutil.copy(EXPORT, tmp_path)), ("cuda_gpu_kern_sum",))


def test_libraries_that_the_importer_lacks_are_found(tmp_path):
    target, host = tmp_path / "target-linux-x64", tmp_path / "host-linux-x64"
    target.mkdir()
    host.mkdir()
    (target / "nsys").write_bytes(b"\x7fELF" + bytes(5000))
    (host / "QdstrmImporter").write_bytes(Path("/bin/sh").resolve().read_bytes())
    assert nsys_program.missing_libraries(target / "nsys") == []


HEADER = "Time (%),Total Time (ns),Instances,Avg (ns),Name\n"
ROWS = '75.0,3000,2,1500.0,"void f<int, 4>(int, float)"\n25.0,1000,1,1000.0,g\n'


@pytest.mark.parametrize(("text", "total"), [
    (HEADER + ROWS, 4000), ("Processing [a.sqlite] with [b.py]...\n\n" + HEADER + ROWS, 4000),
    ("\ufeff" + HEADER + ROWS + "\nmore words\n", 4000),
    ("SKIPPED: sample.sqlite does not contain CUDA kernel data.", 0), (HEADER, 0),
    ("", "found '', expected a report of nsys stats with a column Total Time"), ("a,b\n1,2\n", "found 'a,b"),
    (HEADER + ROWS[:30], "EOF inside string"), (HEADER + ROWS.replace("3000", "3e9x"), "expected a report .* whole numbers"),
    (None, "cannot be read")])
def test_a_report_is_read_whatever_stands_around_it_or_refused_in_one_sentence(tmp_path, text, total):
    path = tmp_path / "a.csv"
    if text is not None:
        path.write_bytes(text.encode())
    if isinstance(total, int):
        assert nsys_program.report_total(path) == total
        return
    with pytest.raises(NsysError, match=total) as caught:
        nsys_program.report_total(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


# What the tables say

@pytest.fixture(scope="module")
def loaded(tables):
    """The real capture as if it were profiles of two sizes and contexts, of all modes, each slower by its
    size."""
    base = {"batch_size": 4, "vocab_size": 10_000, "attention": "naive", "optimizer": "foreach"}
    found: dict[str, list[pd.DataFrame]] = {"nsys.operations": [], "nsys.clocks": [], "benchmark.times": []}
    for factor, (size, context) in enumerate([("small", 128), ("small", 512), ("large", 128),
                                              ("large", 512)], start=1):
        config = base | {"size": size, "context_length": context, "precision": "fp32"}
        for mode, phases in PHASES.items():
            operations = tables["operations"][tables["operations"]["phase"].isin(phases)].assign(mode=mode)
            matmul = operations["family"] == "matrix multiply"
            slower = operations["total_ns"].where(~matmul, operations["total_ns"] * factor)
            found["nsys.operations"].append(operations.assign(total_ns=slower, **config))
            count, time_ns = int(operations["count"].sum()), float(slower.sum())
            captured = {"mode": mode, "phase": "whole", "step": 0, "captured": True, "wall_ms": time_ns / 1e6,
                        "host_ns": time_ns, "projected_ns": time_ns * (3 if factor == 1 else 1.01),
                        "operations_ns": time_ns, "busy_ns": time_ns, "operations": count}
            plain = captured | {"captured": False, "wall_ms": time_ns / 1e6 * (2 if factor == 1 else 1.02)}
            found["nsys.clocks"].append(pd.DataFrame([captured, plain]).assign(**config))
            found["benchmark.times"].append(pd.DataFrame([
                {"mode": mode, "phase": "whole", "gpu_ms": time_ns / 1e6 * 1.003, "compile": "none",
                 "repeat": 0}]).assign(**config))
    return {name: pd.concat(rows, ignore_index=True) for name, rows in found.items()}


def test_claims_say_what_the_tables_hold(loaded):
    said = {name: claim(loaded) for name, claim in list(vars(claims).items())
            if callable(claim) and getattr(claim, "__module__", "") == claims.__name__}
    assert said["every_kernel_counted"]["profiles"] == 12
    assert said["forward_matches_wall"]["most"] < 0.02 and said["forward_slower_under_nsys"]["context"] == 128
    assert said["forward_total"]["size"] == "large" and said["forward_total"]["wall"] == pytest.approx(
        1.02 / 1.01 * said["forward_total"]["gpu"])
    assert said["first_kernel_is_a_matmul"]["profiles"] == 4
    assert said["rest_of_forward"]["small_rest"] > said["rest_of_forward"]["large_rest"]
    assert said["nsys_agrees_in_process"]["most"] == pytest.approx(0.003, rel=0.02)
    assert said["softmax_beside_flops"]["flops"] == 5 / 256
    by_context = study.by_context(loaded)
    assert [*by_context.index.get_level_values("context")] == [128, 512] * 2
    assert (by_context["(c) all but matmuls, %"] + by_context["(d) matmuls of forward, %"]).to_numpy() == (
        pytest.approx(1))


def test_a_claim_that_does_not_hold_is_not_said(loaded):
    doubled = loaded | {"benchmark.times": loaded["benchmark.times"].assign(gpu_ms=1.0)}
    assert claims.nsys_agrees_in_process(doubled) is None
    lost = loaded | {"nsys.operations": loaded["nsys.operations"].iloc[1:]}
    assert claims.every_kernel_counted(lost) is None
    captured = loaded["nsys.clocks"][loaded["nsys.clocks"]["captured"]]
    more = captured.assign(step=1, operations=captured["operations"] + 1)
    assert claims.every_kernel_counted(loaded | {"nsys.clocks": pd.concat([captured, more])}) is None


def test_tables_are_printed_and_figures_drawn(loaded, tables):
    for name, printed in study.PRINTED.items():
        text = markdown(printed(loaded))
        assert 4 <= len(text.splitlines()) <= 17, name
    assert figures.kernel_families(loaded) is not None
    config = {"size": "small", "context_length": 128, "precision": "fp32", "attention": "naive",
              "optimizer": "foreach", "batch_size": 4, "vocab_size": 10_000}
    timeline = pd.DataFrame({"mode": "forward", "family": "matrix multiply", "launch_ns": [0, 500_000],
                             "launch_duration_ns": 9_000, "start_ns": [100_000, 600_000],
                             "duration_ns": 150_000, **config})
    drawn = figures.launches_timeline({"nsys.timeline": timeline})
    assert "busy 30% of this millisecond, and waits" in drawn.message
    graph = timeline.assign(mode="replayed", launch_ns=-1_000_000, start_ns=[-50_000, 400_000], duration_ns=450_000)
    drawn = figures.launches_timeline({"nsys.timeline": pd.concat([timeline, graph])})
    assert "busy 30%" in drawn.message and "as a CUDA graph 85%" in drawn.message
    assert len(drawn.axes[0].get_yticks()) == 3
    assert figures.lanes(tables["timeline"]) is None  # of full steps there is none
    shares = study.by_family(tables["operations"])
    assert shares.sum().sum() * 1e6 == pytest.approx(tables["operations"]["total_ns"].sum())
    top = study.top_kernels(tables["operations"], "step", 3)
    assert top["time_ms"].is_monotonic_decreasing and len(top) == 3
