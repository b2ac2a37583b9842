"""The nsys study: its accounting on a real H200 capture of the annotated step (scrubbed) and on captures made
here, what it does with nsys as a program, and what its tables say.
"""

import json
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from cells import covered_ms, executed, run_cells
from stepscope import PROJECT, measure
from stepscope.config import PHASES, configure
from stepscope.measure import nsys as nsys_program
from stepscope.measure import profiled_process
from stepscope.model import ranges as step_ranges
from stepscope.model.training_step import build_step
from stepscope.report.tables import number
from stepscope.studies.nsys import figures
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
    "plain_ms": [60.0, 61.0],
    "enqueue_ms": [9.0, 8.0],
    "clock": {},
    "captured_ms": [70.0, 71.0, 72.0],
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


@pytest.fixture(scope="module")
def capture(tmp_path_factory, reports):
    """Run the notebook's cells where nsys has left the real capture of these steps; the names that they leave."""

    def make(inside=("step",) * STEPS, folder=reports, until=None, **replaced):
        program = tmp_path_factory.mktemp("nsys") / "nsys"
        outcome = {
            "inside": inside,
            "modes": dict.fromkeys(inside, OUTCOME),
            "waited_s": 0.0,
            "exclusive_s": 1.0,
        }
        program.write_text(FAKE.format(export=EXPORT, reports=folder, outcome=json.dumps(outcome)))
        program.chmod(0o755)
        return run_cells(
            "nsys",
            until,
            {"profiler_here": lambda device: ("nsys 1", program), **replaced},
            device="cpu",
            context_length=16,
        )

    return make


@pytest.fixture(scope="module")
def cells(capture):
    return capture()


@pytest.fixture(scope="module")
def tables(cells):
    return tables_of(cells)


def tables_of(cells):
    return {"operations": cells["of_step"], "clocks": cells["clocks"], "timeline": cells["timeline"]}


def test_the_csv_reports_cut_by_ranges_are_the_account_to_the_nanosecond(cells):
    """Backward, too, of which its range's projection has none."""
    rows, account = cells["rows"], cells["of_step"]
    assert len(rows) == account["count"].sum() and "nvtx_gpu_proj_trace" in cells["reports"]
    time = rows.groupby("phase")["duration_ns"].sum()
    assert time.to_dict() == account.groupby("phase")["total_ns"].sum().to_dict()
    assert cells["results"]["nsys_ns"] == cells["results"]["operations_ns"]
    forward = account[(account["phase"] == "forward")].groupby("region")["total_ns"].sum()
    cut = rows[rows["phase"] == "forward"].groupby("region")["duration_ns"].sum()
    for region in ("attention.softmax", "attention.scores", "attention.value"):
        assert cut[region] == forward[region]


def test_each_modes_cut_is_of_its_own_first_step(capture):
    """The cell that cuts holds it against the account."""
    names, totals = capture(("step", "forward", "forward")), activity_totals(EXPORT)
    assert (
        names["held"]["mode"].tolist() == ["forward", "step"] and (names["held"]["differs by, ns"] == 0).all()
    )
    assert (
        names["results"]["operations"] == totals["operations"].sum()
        and names["results"]["operations_ns"] == totals["duration_ns"].sum()
    )
    assert "unsteady" not in names["results"]


def test_kernels_within_ranges_are_held_against_those_of_the_steps_alone():
    operations = pd.DataFrame({"kind": ["kernel", "kernel", "memcpy", "kernel"], "step": [0, 1, 1, -1]})
    by_range = pd.DataFrame(
        {"nvtx_range": [":step", "a:step", ":substep", ":step:forward"], "kern_inst": [3, 4, 100, 1000]}
    )
    names = executed("nsys", "by_range =", {"reports": {"nvtx_kern_sum": by_range}, "operations": operations})
    assert (names["in_steps"], names["kernels"]) == (7, 2)


@pytest.mark.parametrize("nsys", ["/a/nsys", None])
def test_the_profiled_process_gets_the_runs_step(tmp_path, nsys):
    fields = {
        "context_length": 16,
        "vocab_size": 100,
        "batch_size": 3,
        "precision": "bf16",
        "attention": "sdpa",
        "optimizer": "fused",
        "seed": 5,
    }
    names, asked, locked = (
        run_cells(
            "nsys",
            until="OWN_SUMS =",
            replaced={"profiler_here": lambda device: ("", nsys)},
            device="cpu",
            **fields,
        ),
        [],
        [],
    )
    outcome = SimpleNamespace(seconds={"exclusive_s": 7.0, "waited_s": 3.0})
    names |= {
        "captured_modes": lambda *given: asked.append(given) or outcome,
        "add_locked_s": locked.append,
        "subprocess": SimpleNamespace(
            PIPE=1,
            STDOUT=2,
            run=lambda command, **how: (
                asked.append((command, how)) or SimpleNamespace(stdout="what both said")
            ),
        ),
    }
    assert names["profiled"](tmp_path) is outcome and locked == [7.0]
    (command, how), found = asked
    assert command[:1] == [nsys or sys.executable] and command[-3:-1] == [
        "nsys" if nsys else "torch",
        str(tmp_path),
    ]
    assert (how["stdout"], how["stderr"]) == (1, 2) and found == (
        tmp_path,
        nsys is not None,
        "what both said",
    )
    shape = {name: getattr(names["config"], name) for name in ("d_model", "d_ff", "num_layers", "num_heads")}
    assert json.loads(command[-1]).items() >= (fields | shape | {"device": "cpu"}).items()


def test_every_operation_of_a_real_capture_is_in_one_phase_and_one_region(tables):
    loaded, totals = load_trace(EXPORT)[0], activity_totals(EXPORT)
    check_conservation(loaded, totals)
    operations, first = tables["operations"], loaded[loaded["step"] == 0]
    assert operations["count"].sum() == len(first) == totals["operations"].sum() / STEPS
    assert operations["total_ns"].sum() == first["duration_ns"].sum()
    assert set(operations["phase"]) == {"forward", "loss", "backward", "optimizer"}
    assert not operations["region"].isin(["unattributed", "outside"]).any()
    assert tables["clocks"].query("phase == 'whole' and captured")["operations"].tolist() == [len(first)] * 2


def test_a_disturbed_step_moves_no_clock():
    """By hand: of three captured steps, and of three plain ones, one is disturbed."""
    rows = [
        {
            "mode": "step",
            "phase": phase,
            "step": number,
            "captured": captured,
            "wall_ms": wall if not captured else float("nan"),
            "enqueue_ms": wall / 2,
            "host_ns": 1e6 * wall,
            "projected_ns": 2e6 * wall,
            "busy_ns": 3e6 * wall,
            "operations": 100 * wall,
        }
        for phase in ("forward", "whole")
        for captured in (True, False)
        for number, wall in enumerate((5.0, 4.0, 90.0))
    ]
    found = study.three_clocks(pd.DataFrame(rows)).set_index("phase")
    for phase in ("forward", "whole"):
        assert found.loc[
            phase, ["plain_ms", "enqueue_ms", "host_ms", "projected_ms", "gpu_ms", "operations"]
        ].tolist() == [5, 2.5, 5, 10, 15, 500]


def test_launches_are_drawn_of_a_step_whose_regions_are_not_named(capture):
    """Naming them costs the host time, so that launches would come later than they do."""
    drawn = capture(("forward",) * STEPS, until="run.keep(")["timeline"]
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
        operations[operations["family"] == "matrix multiply"].groupby(["phase", "region"])["count"].sum()
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
    clocks, loaded = tables["clocks"], load_trace(EXPORT)[0]
    captured = clocks[clocks["captured"] & (clocks["phase"] != "whole")]
    assert captured["operations_ns"].sum() == loaded.loc[loaded["step"] > 0, "duration_ns"].sum()
    assert (captured["busy_ns"] <= captured["projected_ns"]).all() and len(captured) == 2 * 4
    whole = clocks[clocks["phase"] == "whole"]
    assert whole.loc[whole["captured"], ["step", "wall_ms"]].values.tolist() == [[0, 71.0], [1, 72.0]]
    assert whole.loc[~whole["captured"], ["wall_ms", "enqueue_ms"]].values.tolist() == [
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
    window = executed("nsys", "def window(", {"pd": pd, "captured": SimpleNamespace(file=None)})["window"]
    starts = pd.Series(starts_us) * 1_000
    drawn = window(
        pd.DataFrame(
            {
                "mode": "forward",
                "family": "other",
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
    window = executed("nsys", "def window(", {"pd": pd, "captured": SimpleNamespace(file=None)})["window"]
    drawn = window(
        pd.DataFrame(
            {
                "mode": "forward",
                "family": ["first", "second", "late"],
                "step": 1,
                "start_ns": [0, 100_000, 2_500_000],
                "duration_ns": [1_000, 2_300_000, 100_000],
                "launch_start_ns": [0, 0, 1_900_000],
                "launch_duration_ns": 9,
            }
        )
    )
    assert (
        drawn["family"].tolist() == ["second", "late"] and (drawn["launch_ns"] == [-100_000, 1_800_000]).all()
    )


def test_the_timeline_has_the_replay_without_what_prepared_it(capture):
    """A graph's operations have one launch; the step that warmed up before it was launched in many."""
    operations, ranges = load_trace(EXPORT)
    replayed = operations.tail(50).assign(step=-1, region="replay")
    replayed["launch_start_ns"] = [*range(20), *[1_000] * 30]
    replayed["start_ns"] = operations["start_ns"].max() + pd.RangeIndex(0, 500_000, 10_000)

    def drawn(rows):
        loaded = pd.concat([operations, rows]), ranges
        return capture(until="run.keep(", load_trace=lambda path: loaded, check_conservation=lambda *_: None)[
            "timeline"
        ]

    timeline = drawn(replayed)
    assert set(timeline["mode"]) == {"replayed"} and 15 <= len(timeline) <= 30
    assert (timeline["start_ns"].diff().dropna() == 10_000).all() and timeline["launch_ns"].nunique() == 1
    study.SCHEMAS["timeline"].validate(timeline)
    refused = replayed.assign(launch_start_ns=range(50))  # the step that warmed up alone was run
    assert drawn(refused).empty


def test_a_capture_of_other_steps_than_were_run_is_refused(capture):
    with pytest.raises(ConservationError, match="the capture holds 3 steps, expected the 2 that were run"):
        capture(("step",) * 2)


@pytest.fixture(scope="module")
def here():
    return run_cells("nsys", context_length=16, vocab_size=100, device="cpu")


@pytest.fixture(scope="module")
def run_here(here):
    return tables_of(here), here["results"], here["run"].outcome["results"]["finding"]


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
    whole = tables["clocks"].query("phase == 'whole' and captured").groupby("mode")["operations"]
    assert whole.min().to_dict() == whole.max().to_dict() == named.to_dict()
    plain = tables["clocks"].query("not captured").groupby("mode").size()
    assert plain.to_dict() == dict.fromkeys(PHASES, 10)
    assert finding.startswith("Forward: ") and not {"bound", "GPU", "launches"} & {
        *finding.replace(".", " ").split()
    }


def test_the_account_and_the_clocks_follow_from_the_captured_steps_and_the_plain_ones(here):
    """Of each mode's four captured steps the first, whose regions are named, is the account, the others are the clocks."""
    operations = (
        here["operations"]
        .assign(end_ns=lambda rows: rows["start_ns"] + rows["duration_ns"])
        .astype({"name": str, "phase": str})
    )
    clocks, account = (
        here["clocks"].set_index(["mode", "phase", "step"]),
        here["of_step"].groupby(["mode", "phase", "name"])[["count", "total_ns"]].sum(),
    )
    for first, (mode, outcome) in zip((0, 4, 8), here["captured"].modes.items(), strict=True):
        named = (
            operations[operations["step"] == first]
            .groupby(["phase", "name"])["duration_ns"]
            .agg(count="size", total_ns="sum")
        )
        assert account.loc[mode].to_dict("index") == named.to_dict("index")
        plain, captured = (own.loc[mode] for _, own in clocks.groupby("captured"))
        assert plain[["wall_ms", "enqueue_ms"]].T.values.tolist() == [
            outcome["plain_ms"],
            outcome["enqueue_ms"],
        ]
        assert captured.loc["whole", "wall_ms"].tolist() == outcome["captured_ms"][1:]
        for (phase, step), row in captured.iterrows():
            own = operations[
                (operations["step"] == first + 1 + step)
                & ((operations["phase"] == phase) | (phase == "whole"))
            ]
            assert (row["operations"], row["operations_ns"], row["busy_ns"], row["projected_ns"]) == (
                len(own),
                own["duration_ns"].sum(),
                round(1e6 * covered_ms(own)),
                own["end_ns"].max() - own["start_ns"].min(),
            )


def test_what_has_no_region_is_named_after_its_phase_where_that_says_what_it_is(here):
    phases = ["forward", "backward", "optimizer", "outside"]
    rows = pd.DataFrame(
        {"step": 0, "phase": phases * 2, "region": ["unattributed"] * 4 + ["ffn"] * 4, "duration_ns": 1}
    )
    captured = SimpleNamespace(file="a capture", inside=["step"], modes={"step": {"status": "ok"}})
    named = executed(
        "nsys",
        "UNNAMED =",
        here | {"operations": rows, "ranges": pd.DataFrame({"role": ["step"]}), "captured": captured},
    )["named"]
    assert (
        named["region"].tolist()
        == ["unattributed", "gradient accumulation", "optimizer", "outside"] + ["ffn"] * 4
    )


def test_what_the_cells_show_and_say_is_of_forwards_account(here):
    of_step, said, shown = here["of_step"], SimpleNamespace(say=print), []
    for mode, own in of_step.groupby("mode"):
        shares = own.groupby("family")["total_ns"].sum() / own["total_ns"].sum()
        assert here["shares"][mode][shares.index].to_dict() == pytest.approx(shares.to_dict())
        assert here["share"][mode] == number(shares["matrix multiply"], "%")
    forward, without = (
        of_step[of_step["mode"] == "forward"],
        of_step.query("mode == 'step' and phase != 'optimizer'"),
    )
    executed("nsys", "most = own.groupby", here | {"display": shown.append, "brief": lambda frame: frame})
    for frame, own in zip(shown, (forward, without), strict=True):
        ms = own.groupby("name")["total_ns"].sum().nlargest(3) / 1e6
        assert frame["time, ms"].tolist() == ms.tolist() and frame["share, %"].tolist() == pytest.approx(
            (ms / own["total_ns"].sum() * 1e6).tolist()
        )
    inside = forward[forward["region"].str.startswith("attention.")].groupby("region")["total_ns"].sum() / 1e6
    assert here["inside_ms"].to_dict() == inside.to_dict()
    plain, captured = (
        own for _, own in here["clocks"].query("phase == 'whole' and mode == 'forward'").groupby("captured")
    )
    wall, gpu = plain["wall_ms"].median(), captured["busy_ns"].median() / 1e6
    top = forward.groupby("name")[["count", "total_ns"]].sum().sort_values("total_ns").iloc[-1]
    takes = f"takes {number(top['total_ns'] / forward['total_ns'].sum(), '%')} of it in {top['count']:.0f} "
    for device, words in (
        ("cpu", f"{number(gpu, 'ms')} of operators"),
        ("cuda", f"{number(wall, 'ms')} of wall time: {number(gpu / wall, '%')} busy"),
    ):
        told = executed(
            "nsys", "def finding():", here | {"config": SimpleNamespace(device=device), "run": said}
        )["finding"]()
        assert words in told and takes in told
    for gpu_ms, enqueue_ms, bound in (
        (40.0, 90.0, "launch"),
        (99.0, 99.5, "GPU"),
        (93.0, 60.0, "GPU"),
        (60.0, 99.0, "launch"),
    ):
        row = {
            "mode": "forward",
            "phase": "whole",
            "plain_ms": 100.0,
            "gpu_ms": gpu_ms,
            "enqueue_ms": enqueue_ms,
        }
        own = here | {
            "config": SimpleNamespace(device="cuda"),
            "run": said,
            "study": SimpleNamespace(three_clocks=lambda _, row=row: pd.DataFrame([row])),
        }
        assert (
            f"{number(gpu_ms / 100, '%')} busy, {bound}-bound."
            in executed("nsys", "def finding():", own)["finding"]()
        )


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


SMALL = {"size": "nano", "context_length": 8, "vocab_size": 100, "device": "cpu"}


@pytest.fixture
def step():
    return build_step(configure("benchmark", **SMALL))


@pytest.fixture
def ranged():
    return run_cells("nsys", until="profiler_here(", device="cpu")["ranged"]


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
        assert (mode.plain(2, until_enough=False)["wall_ms"] > 0).tolist() == [
            True
        ] * 2 and recorder.opened == []
        mode.captured(named=False)
        phases = [(0, "step"), *((1, phase) for phase in PHASES["step"])]
        assert recorder.opened == phases and not recorder.depth
        recorder.opened = []
        mode.captured(named=True)
    finally:
        step_ranges._attributes.cache_clear()
    assert [one for one in recorder.opened if one in phases] == phases and not recorder.depth
    assert {"attention.softmax", "block", "cross_entropy", "ffn"} <= {
        name for depth, name in recorder.opened if depth > 1
    }
    mode.plain(1, until_enough=False)
    assert cleared == [True] * 5
    assert "forward" not in vars(step.model.blocks[0].ffn)  # the plain method is back


def test_a_mode_that_runs_out_of_memory_costs_the_others_nothing(monkeypatch, step, ranged):
    whole = profiled_process.ProfiledMode.captured

    def captured(self, named):
        if self.step.mode == "step":
            raise torch.OutOfMemoryError("CUDA out of memory. Including non-PyTorch memory, more words")
        return whole(self, named)

    monkeypatch.setattr(profiled_process.ProfiledMode, "captured", captured)
    outcome = profiled_process.profile(step, ranged, lambda: None)
    statuses = {name: one["status"] for name, one in outcome["modes"].items()}
    assert statuses == {"forward": "ok", "forward_backward": "ok", "step": "oom"}
    assert outcome["modes"]["step"]["reason"] == "while running step: CUDA out of memory."
    assert (
        outcome["inside"] == ["forward"] * 4 + ["forward_backward"] * 4 + ["step"]
        and not step.optimizer.state
    )
    assert all(weight.grad is None for weight in step.model.parameters())


@pytest.mark.parametrize(
    ("mode", "lasts_ms", "warmups", "steps"),
    [
        ("step", [1000, 100], 4, 10),
        ("step", [900, 400], 2, 3),
        ("forward", [900, 400], 2, 10),
        ("forward_backward", [5, 1], 10, 10),
        ("step", [1001], 1, 1),
        ("forward", [1001], 1, 10),
    ],
)
def test_warm_ups_and_plain_steps_are_as_many_as_their_time_asks_for(
    monkeypatch, mode, lasts_ms, warmups, steps
):
    """The first of a mode is not like the others."""
    asked, lasting = [], iter([*lasts_ms, *[lasts_ms[-1]] * 99])

    def plain(least, until_enough):
        asked.append((least, until_enough))
        return pd.DataFrame({"wall_ms": [float(next(lasting)) for _ in range(least)], "enqueue_ms": 0.5})

    monkeypatch.setattr(profiled_process, "sm_clock_mhz", lambda: 1700.0)
    monkeypatch.setattr(profiled_process, "highest_clock_mhz", lambda: 1980.0)
    profiled_process.time_plain(one := SimpleNamespace(step=SimpleNamespace(mode=mode), plain=plain))
    assert asked == [(1, False)] * warmups + [(steps, True)] and one.clock == {
        "sm_clock_mhz": 1700,
        "highest_clock_mhz": 1980,
    }
    assert one.plain_ms == [lasts_ms[-1]] * steps and one.enqueue_ms == [0.5] * steps


def test_every_mode_is_plain_before_any_is_captured_and_long_steps_are_fewer(monkeypatch, step, ranged):
    order, freed = [], []

    def plain(self, least, until_enough):
        order.append(("plain", self.step.mode))
        if self.step.mode == "forward_backward":
            raise torch.OutOfMemoryError("no room. Including much")
        return pd.DataFrame(
            {"wall_ms": [{"step": 500.0, "forward": 499.0}[self.step.mode]], "enqueue_ms": 0.5}
        )

    monkeypatch.setattr(profiled_process.ProfiledMode, "plain", plain)
    monkeypatch.setattr(
        profiled_process.ProfiledMode,
        "captured",
        lambda self, named: order.append((named, self.step.mode)) or 7.0,
    )
    monkeypatch.setattr(
        profiled_process, "replay", lambda step, *_, **__: order.append((step.mode, "replayed"))
    )
    monkeypatch.setattr(profiled_process, "release", lambda device, after_error: freed.append(after_error))
    outcome = profiled_process.profile(step, ranged, lambda: order.append("capture"))
    captured = [
        (named, mode) for mode, others in (("forward", 3), ("step", 2)) for named in (True, *[False] * others)
    ]
    assert [*dict.fromkeys(order[: order.index("capture")])] == [("plain", mode) for mode in reversed(PHASES)]
    assert order[order.index("capture") :] == ["capture", *captured, ("forward", "replayed")] and freed == [
        False,
        True,
        *[False] * 3,
    ]
    assert [one["plain_ms"] for one in outcome["modes"].values()] == [[499.0], [], [500.0]] and outcome[
        "inside"
    ] == [mode for _, mode in captured]
    assert [len(one["captured_ms"]) for one in outcome["modes"].values()] == [4, 0, 3]
    assert outcome["modes"]["forward_backward"]["reason"] == "while running forward_backward: no room."


@pytest.mark.parametrize("tool, fits", [("torch", True), ("nsys", False)])
def test_the_profiled_process_says_how_long_it_waited_and_had_the_gpu(
    monkeypatch, tmp_path, step, tool, fits
):
    order, times, ranges_before = [], iter([10.0, 13.0, 20.0]), step_ranges._domain

    def build(config):
        order.append("built")
        if not fits:
            raise torch.OutOfMemoryError("no room. Including much")

    @contextmanager
    def exclusive():
        order.append("locked")
        yield
        order.append("free")

    for name, answer in {
        "default_timer": lambda: order.append("time") or next(times),
        "wait_until_idle": order.append,
        "build_step": build,
        "profile": lambda *_: {"inside": ["step"], "modes": {}},
        "exclusive": exclusive,
        "use_ranges": lambda ranges: order.append(type(ranges)),
    }.items():
        monkeypatch.setattr(profiled_process, name, answer)
    (tmp_path / "ranged.py").write_text("def ranged(): pass")
    profiled_process.main(tool, tmp_path, step.config)
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert (outcome["waited_s"], outcome["exclusive_s"]) == (3, 7) and step_ranges._domain is ranges_before
    assert order == [
        *[step_ranges.ProfilerRanges] * (tool == "torch"),
        "time",
        "locked",
        "cpu",
        "time",
        "built",
        "time",
        "free",
    ]
    assert outcome["inside"] == ["step"] * fits and {
        (one["status"], one["reason"]) for one in outcome["modes"].values()
    } == (set() if fits else {("oom", "no room.")})


def test_nsys_capture_ends_where_the_steps_end_however_they_do(monkeypatch, tmp_path):
    order = []
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: order.append(name))
    with pytest.raises(ZeroDivisionError), profiled_process.CAPTURES["nsys"](tmp_path):
        1 / len(order[1:])
    assert order == ["start", "stop"]


def test_what_cannot_be_is_profiled_again_and_the_named_step_is_no_part_of_it():
    """At the power cap GPU time may exceed wall time a little more."""
    at_cap, ms = (
        {"sm_clock_mhz": 1700.0, "highest_clock_mhz": 1980.0},
        [90, 10, 10.1, 10.05, 90, 30.9, 30.9, 90, 40, 40, 44],
    )
    modes = {
        "forward": {"plain_ms": [10.0, 11.0, 99.0], "clock": {}},
        "forward_backward": {"plain_ms": [30.0, 30.1, 29.0], "clock": at_cap},
        "step": {"plain_ms": [45.0], "clock": {}},
    }
    captured = SimpleNamespace(
        file="a file", modes=modes, inside=["forward"] * 4 + ["forward_backward"] * 3 + ["step"] * 4
    )
    steps, folders = (
        pd.DataFrame({"step": range(11), "phase": "whole", "busy_ns": [1e6 * one for one in ms]}),
        [],
    )
    names = {
        "profiled": lambda folder: folders.append(folder) or captured,
        "read": lambda *_: (pd.DataFrame({"step": [-1, 0]}), None, None, {}),
        "phase_clocks": lambda operations, ranges: steps if operations["step"].tolist() == [0] else None,
        "tool": "nsys",
    }
    names |= {
        "measure": measure,
        "pd": pd,
        "tempfile": tempfile,
        "Path": Path,
        "config": SimpleNamespace(device="cuda"),
    }
    assert (
        executed("nsys", "def odd_modes", names)["odd"] == {"step": "captured steps of 40 to 44 ms"}
        and len({*folders}) == 3
    )
    modes["forward_backward"]["clock"] = {}
    steps.loc[10, "busy_ns"] = 40e6
    assert [*executed("nsys", "def odd_modes", names)["odd"]] == ["forward_backward"]
    steps.loc[[5, 6], "busy_ns"] = 30e6
    assert executed("nsys", "def odd_modes", names)["odd"] == {} and len({*folders}) == 7


def test_a_mode_that_ran_short_is_in_no_account_and_keeps_its_plain_steps():
    def captured_modes(*given):
        captured = nsys_program.captured_modes(*given)
        captured.modes["forward_backward"] |= {"status": "oom", "reason": "no room"}
        return captured

    names = run_cells(
        "nsys", replaced={"captured_modes": captured_modes}, context_length=16, vocab_size=100, device="cpu"
    )
    assert {*names["of_step"]["mode"]} == {*names["clocks"].query("captured")["mode"]} == {"forward", "step"}
    assert {*names["clocks"].query("not captured")["mode"]} == {*PHASES} and names["results"][
        "forward_backward_reason"
    ] == "no room"
    assert names["clocks"].query("captured and mode == 'step' and phase == 'whole'")["step"].tolist() == [
        0,
        1,
        2,
    ]


# nsys as a program


def test_a_capture_is_held_against_nsys_own_sum(capture, reports, tmp_path):
    kernels = int(activity_totals(EXPORT).loc["kernel", "duration_ns"])
    own = Path(shutil.copytree(reports, tmp_path / "own"))
    (own / "cuda_gpu_mem_time_sum.csv").unlink()
    # of memory nsys "does not contain" any, which is a sum of nothing, and the capture has some
    with pytest.raises(
        ConservationError, match=r"operations sum to \d+ ns, and nsys's own cuda_gpu_mem_time_sum to 0 ns"
    ):
        capture(folder=own)
    (own / "cuda_gpu_kern_sum.csv").write_text(f"Total Time (ns),Instances,Name\n{kernels + 1},1,k\n")
    with pytest.raises(
        ConservationError, match=f"sum to {kernels} ns, and nsys's own cuda_gpu_kern_sum to {kernels + 1}"
    ):
        capture(folder=own)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo importer failed; exit 1",
            "the profiled process ended before its steps did; it said: importer failed",
        ),
        (f"exec {sys.executable} -c 'print(\"quadd crashed\")'", "it said: quadd crashed"),
    ],
)
def test_a_profiler_that_fails_is_quoted(tmp_path, script, message):
    program = tmp_path / "nsys"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    with pytest.raises(NsysError, match=message):
        run_cells(
            "nsys",
            replaced={"profiler_here": lambda device: ("nsys 1", program)},
            context_length=16,
            device="cpu",
        )
    with pytest.raises(NsysError, match=r"nsys export made nothing of a.nsys-rep; it said"):
        nsys_tool.export_capture(program, tmp_path / "a.nsys-rep", tmp_path / "a.sqlite")
    with pytest.raises(NsysError, match=r"nsys stats made nothing of step.sqlite"):
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
        nsys_tool, "PLACES", [f"{tmp_path}/{place}/*/bin/nsys" for place in ("none", "systems", "compute")]
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


def test_the_command_that_is_printed_is_the_one_that_runs(cells):
    chapter = Path(str(PROJECT), "writeup", "22-nsys.md.j2").read_text(encoding="utf-8")
    command = next(block for block in chapter.split("```") if "nsys profile" in block).split()
    asked = {word for word in command[: command.index("export")] if word.startswith("--") and "=" in word}
    flags = {
        word
        for word in cells["profiled"].__code__.co_consts
        for word in (word if isinstance(word, tuple) else [word])
        if isinstance(word, str) and word.startswith("--") and "=" in word
    }
    assert len(flags) > 4 and flags == asked and all(sum in " ".join(command) for sum in cells["OWN_SUMS"])
