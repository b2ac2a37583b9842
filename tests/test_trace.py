"""Attribution and accounting of GPU operations: on a real capture against nsys's own reports, and on made-up
ones.
"""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bench.traces import AUTOGRAD, MAIN, PROCESS_KEY, write_export
from stepscope.config import PHASE_NAMES
from stepscope.traces.attribution import PROCESS, ConservationError, TraceError, attribute, enclosing
from stepscope.traces.conservation import check_conservation, phase_clocks
from stepscope.traces.export import activity_totals, load_trace, read_export, waiting_calls
from stepscope.traces.torch_trace import records_of_own_trace, self_times

DATA = Path(__file__).parent / "data" / "nsys"
SAMPLE = DATA / "sample.sqlite"


@pytest.fixture(scope="module")
def sample():
    return load_trace(SAMPLE)


def report(name: str) -> pd.DataFrame:
    table = pd.read_csv(DATA / f"sample_{name}.csv", keep_default_na=False)
    column = next((column for column in ("Range", "NVTX Range", "Name") if column in table), "Operation")
    return table.assign(key=table[column].str.removeprefix(":")).rename(
        columns={
            "Total Time (ns)": "total_ns",
            "Instances": "count",
            "Count": "count",
            "Kern Inst": "count",
            "Total GPU Ops": "count",
            "NumGPUOps": "count",
            "Orig Start (ns)": "start",
            "Lvl": "level",
            "Orig Duration (ns)": "host_ns",
            "Projected Duration (ns)": "projected_ns",
        }
    )


def sums(operations: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Time and number of the operations, by these columns."""
    return operations.groupby(list(by), observed=True)["duration_ns"].agg(["sum", "size"])


# The real capture


def test_backwards_operations_are_found_on_autograds_thread(sample):
    operations, _ = sample
    table = operations.groupby(["phase", "thread", "kind"], observed=True).size()
    assert table.to_dict() == {
        ("forward", 568, "kernel"): 490,
        ("forward", 568, "memcpy"): 20,
        ("forward", 568, "memset"): 5,
        ("backward", 568, "kernel"): 5,
        ("backward", 593, "kernel"): 825,
        ("backward", 593, "memcpy"): 25,
        ("optimizer", 568, "kernel"): 10,
    }
    projected = report("nvtx_gpu_proj_sum").set_index("key")["count"]
    # nsys knows only ranges' own threads
    assert projected[["forward", "backward", "optimizer"]].tolist() == [515, 5, 10]
    assert operations.groupby("step").size().to_dict() == dict.fromkeys(range(5), 276)


def test_sample_conserves(sample):
    operations, _ = sample
    totals = activity_totals(SAMPLE)
    assert totals["operations"].to_dict() == {"kernel": 1330, "memcpy": 45, "memset": 5}
    assert totals["duration_ns"].to_dict() == {
        "kernel": report("cuda_gpu_kern_sum")["total_ns"].sum(),
        "memcpy": 153023,
        "memset": 3680,
    }
    check_conservation(operations, totals)
    for by in ("phase", "kernel_category", "region", "name"):
        assert sums(operations, by).sum().tolist() == [totals["duration_ns"].sum(), 1380]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: o.drop(index=700), "phases sum to 1329 operations of kind kernel"),
        (lambda o: pd.concat([o, o.iloc[[700]]]), "1 operations are counted twice"),
        (
            lambda o: o.assign(duration_ns=o["duration_ns"] + (o.index == 700)),
            "phases sum to 1330 operations of kind kernel and 18266583 ns, expected the capture's 1330 and 18266582 ns",
        ),
        (lambda o: o.assign(phase=o["phase"].where(o.index != 700)), "phases sum to 1329"),
        (lambda o: o.assign(region=o["region"].where(o.index != 700)), "regions sum to 1329"),
        (lambda o: o.assign(step=o["step"].where(o.index != 700)), "steps sum to 1329"),
        (lambda o: o[o["kind"] != "memset"], "phases sum to 0 operations of kind memset"),
    ],
)
def test_conservation_fails_when_an_operation_is_lost_doubled_or_changed(sample, change, message):
    with pytest.raises(ConservationError, match=message):
        check_conservation(change(sample[0]), activity_totals(SAMPLE))


def test_totals_per_kernel_and_copy_equal_nsys(sample):
    operations, _ = sample
    for kinds, name in (["kernel"], "cuda_gpu_kern_sum"), (["memcpy", "memset"], "cuda_gpu_mem_time_sum"):
        theirs = report(name).set_index("key")
        ours = sums(operations[operations["kind"].isin(kinds)], "name").loc[theirs.index]
        assert ours["sum"].tolist() == theirs["total_ns"].tolist()
        assert ours["size"].tolist() == theirs["count"].tolist()


def test_host_time_of_ranges_equals_nsys(sample):
    _, ranges = sample
    ours = (ranges["end_ns"] - ranges["start_ns"]).groupby(ranges["name"].astype(str)).agg(["sum", "size"])
    theirs = report("nvtx_pushpop_sum").set_index("key")
    assert ours["sum"].to_dict() == theirs["total_ns"].to_dict()
    assert ours["size"].to_dict() == theirs["count"].to_dict()
    nesting = report("nvtx_gpu_proj_trace").sort_values("start")
    assert ranges["name"].tolist() == nesting["key"].tolist()
    starts, ends = (ranges[column].to_numpy() for column in ("start_ns", "end_ns"))
    depth = enclosing(ranges["thread"].to_numpy(), starts, ends, starts[:0], starts[:0])[2]
    assert (depth - 1).tolist() == nesting["level"].tolist()


def test_kernels_within_a_range_equal_nsys(sample):
    operations, _ = sample
    kernels = operations[operations["kind"] == "kernel"]
    theirs = report("nvtx_kern_sum").query(
        "key in ['softmax', 'ffn', 'scores', 'value', 'out_proj', 'qkv_proj', 'forward']"
    )
    for name, rows in theirs.groupby("key"):
        within = kernels[kernels["phase" if name == "forward" else "region"] == name]
        ours, expected = sums(within, "name"), rows.set_index("Kernel Name")
        assert ours["sum"].to_dict() == expected["total_ns"].to_dict()
        assert ours["size"].to_dict() == expected["count"].to_dict()


def test_clocks_equal_nsys_where_it_sees_the_operations(sample):
    operations, ranges = sample
    clocks = phase_clocks(operations, ranges).set_index(["step", "phase"])
    assert len(clocks) == 20
    theirs = report("nvtx_gpu_proj_trace")
    for phase in ("forward", "optimizer"):  # of backward, nsys sees one kernel
        rows = theirs[theirs["key"] == phase].sort_values("start")
        ours = clocks.xs(phase, level="phase")
        assert ours["host_ns"].tolist() == rows["host_ns"].tolist()
        assert ours["projected_ns"].tolist() == rows["projected_ns"].tolist()
        assert ours["operations"].tolist() == rows["count"].tolist()
    whole = clocks.xs("total", level="phase")
    assert (
        whole["operations_ns"].tolist()
        == clocks.drop(index="total", level="phase")["operations_ns"].groupby("step").sum().tolist()
    )
    assert (
        whole["host_ns"].tolist()
        == theirs.loc[theirs["key"] == "step"].sort_values("start")["host_ns"].tolist()
    )
    assert (clocks["busy_ns"] == clocks["operations_ns"]).all()  # one stream: nothing overlaps


# Made-up captures

STRINGS = [
    (1, "void f<float>(float *)"),
    (2, "sm80_xmma_gemm_g"),
    (10, "step"),
    (11, "forward"),
    (12, "backward"),
    (13, "ffn"),
    (14, "stepscope"),
    (16, "cublasSgemm"),
]


def nvtx(start, end, name, thread, domain=0) -> tuple:
    """A row of NVTX_EVENTS; the name as text, or as the id of a registered string."""
    text, text_id = (name, None) if isinstance(name, str) else (None, name)
    return start, end, 59, text, thread, text_id, domain


def made(path: Path, launches: list[tuple], ranges: list[tuple], kernels: list[tuple] | None = None) -> Path:
    """An export of these launches (time, thread), ranges (nvtx's arguments) and kernels (rows of the
    table).
    """
    if kernels is None:  # one per launch, of 40 ns, 1000 ns later
        kernels = [
            (t + 1000, t + 1040, 0, 7, i, thread & PROCESS, 1) for i, (t, thread) in enumerate(launches)
        ]
    write_export(
        path,
        StringIds=STRINGS,
        NVTX_EVENTS=[nvtx(*r) for r in ranges],
        CUPTI_ACTIVITY_KIND_KERNEL=kernels,
        CUPTI_ACTIVITY_KIND_RUNTIME=[(t, t + 5, thread, i) for i, (t, thread) in enumerate(launches)],
    )
    return path


def execute(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return path


STEP = [
    (0, 100, 10, MAIN),
    (10, 40, "forward", MAIN),
    (15, 30, "attention", MAIN),
    (20, 25, "attention.softmax", MAIN),
    (50, 90, 12, MAIN),
    (55, 80, 13, AUTOGRAD),
]


def test_phase_by_time_and_region_by_thread(tmp_path):
    launches = [
        (5, MAIN),
        (10, MAIN),
        (22, MAIN),
        (28, MAIN),
        (40, MAIN),
        (60, AUTOGRAD),
        (60, MAIN),
        (85, AUTOGRAD),
        (100, MAIN),
    ]
    operations, _ = load_trace(made(tmp_path / "a.sqlite", launches, STEP))
    assert list(zip(operations["phase"], operations["region"], operations["step"], strict=True)) == [
        ("outside", "unattributed", 0),
        ("forward", "unattributed", 0),
        ("forward", "attention.softmax", 0),
        ("forward", "attention", 0),
        ("outside", "unattributed", 0),
        ("backward", "ffn", 0),
        ("backward", "unattributed", 0),
        ("backward", "unattributed", 0),
        ("outside", "unattributed", -1),
    ]


def test_of_ranges_that_open_together_the_outer_stands_first(tmp_path):
    ranges = [
        (10, 20, "ffn", MAIN),
        (10, 40, "forward", MAIN),
        (10, 100, "step", MAIN),
        (5, 60, "ffn", AUTOGRAD),
    ]
    _, found = load_trace(made(tmp_path / "a.sqlite", [(12, MAIN)], ranges))
    own = found[found["thread"] == MAIN & 0xFFFFFF]
    assert own["name"].tolist() == ["step", "forward", "ffn"] and own["end_ns"].tolist() == [100, 40, 20]


def test_phases_are_of_their_own_process(tmp_path):
    other = MAIN + (1 << 24)
    ranges = [*STEP, (200, 300, "step", MAIN), (400, 500, "step", other), (410, 490, "forward", other)]
    operations, ranges = load_trace(
        made(tmp_path / "a.sqlite", [(20, MAIN), (21, other), (420, other), (421, MAIN)], ranges)
    )
    assert operations["phase"].tolist() == ["forward", "outside", "forward", "outside"]
    assert operations["step"].tolist() == [0, -1, 0, -1]
    assert operations["process"].tolist() == [7, 8, 8, 7]
    with pytest.raises(ConservationError, match="several processes or devices"):
        phase_clocks(operations, ranges)
    clocks = phase_clocks(operations[operations["process"] == 8], ranges).set_index("phase")
    assert clocks.loc["forward", ["host_ns", "operations"]].tolist() == [80, 1]


def test_only_ranges_of_the_programs_domains_are_regions(tmp_path):
    ranges = [
        (0, 100, "step", MAIN, 2),
        (10, 40, 11, MAIN, 2),
        (20, 30, "ffn", MAIN, 2),
        (22, 28, 16, MAIN, 1),
        (32, 38, "norm", MAIN, 0),
        (40, 50, "head", MAIN + (1 << 24), 1),
    ]  # whose domain 1 is no library's
    path = execute(
        made(tmp_path / "a.sqlite", [(24, MAIN), (34, MAIN), (44, MAIN + (1 << 24))], ranges),
        f"INSERT INTO NVTX_EVENTS VALUES (-5, NULL, 75, 'cuBLAS', {MAIN}, NULL, 1)",
        f"INSERT INTO NVTX_EVENTS VALUES (-4, NULL, 75, NULL, {AUTOGRAD}, 14, 2)",
    )
    assert load_trace(path)[0]["region"].tolist() == ["ffn", "norm", "head"]
    operations, ranges = attribute(read_export(path, domains=None))
    assert operations["region"].tolist() == ["cublasSgemm", "norm", "head"] and len(ranges) == 6


def test_ranges_still_open_at_the_end_of_the_capture(tmp_path):
    path = made(
        tmp_path / "a.sqlite",
        [(20, MAIN), (60, MAIN)],
        [(0, None, "step", MAIN), (50, None, "forward", MAIN), (55, None, "ffn", MAIN)],
    )
    operations, ranges = load_trace(path)
    assert operations["region"].tolist() == ["unattributed", "ffn"]
    assert operations["phase"].tolist() == ["outside", "forward"]
    assert ranges["end_ns"].tolist() == [66, 66, 66]  # the last call on the host ends at 65


def test_kernels_without_a_launch_record_are_kept_and_outside(tmp_path):
    kernels = [
        (20, 30, 0, 7, 0, PROCESS_KEY, 1),
        (40, 60, 0, 7, 99, PROCESS_KEY, 2),
        (70, 75, 0, 8, None, PROCESS_KEY, 2),
        # of another process, with the id of this one's call
        (80, 81, 0, 7, 0, PROCESS_KEY + (1 << 24), 1),
    ]
    path = made(tmp_path / "a.sqlite", [(20, MAIN)], STEP, kernels)
    operations, _ = load_trace(path)
    assert operations["phase"].tolist() == ["forward", "outside", "outside", "outside"]
    assert operations["thread"].tolist() == [7, -1, -1, -1]
    assert operations["step"].tolist() == [0, -1, -1, -1]
    assert operations["launch_start_ns"].isna().tolist() == [False, True, True, True]
    assert operations["launch_duration_ns"][0] == 5
    assert operations["correlation_id"].tolist() == [0, 99, -1, 0]
    check_conservation(operations, activity_totals(path))


def test_of_two_calls_with_one_correlation_id_the_outer_launched(tmp_path):
    path = execute(
        made(tmp_path / "a.sqlite", [(22, MAIN)], STEP),
        f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (21, 30, {MAIN}, 0)",
    )
    assert load_trace(path)[0]["launch_start_ns"].tolist() == [21]


def test_of_the_hosts_calls_those_that_last_are_told_and_launches_that_load_a_kernel_or_wait_for_room(
    tmp_path,
):
    calls = {"cudaLaunchKernel_v7000": (99_999, 100_000), "cudaStreamSynchronize_v3020": (4_999, 5_000)}
    path = execute(
        made(tmp_path / "a.sqlite", [], []),
        f"ALTER TABLE {RUNTIME} ADD COLUMN nameId INTEGER",
        *(
            statement
            for number, (name, lasted) in enumerate(calls.items(), 50)
            for statement in (
                f"INSERT INTO StringIds VALUES ({number}, '{name}')",
                f"INSERT INTO {RUNTIME} VALUES "
                + ", ".join(f"(7, {7 + each}, {MAIN}, {each}, {number})" for each in lasted),
            )
        ),
    )
    found = waiting_calls(path)
    assert [*zip(found["name"], found["end_ns"] - found["start_ns"])] == [
        ("cudaLaunchKernel", 100_000),
        ("cudaStreamSynchronize", 5_000),
    ]


def test_clocks_of_overlapping_streams_gaps_and_what_is_outside(tmp_path):
    # forward: busy 100-130 and 140-160 on two streams, and a kernel within another; outside, in the step:
    # two; in none: one.
    lasted = [
        (100, 120, 7),
        (110, 130, 8),
        (112, 115, 9),
        (140, 160, 7),
        (170, 190, 7),
        (175, 180, 8),
        (300, 310, 7),
    ]
    kernels = [(start, end, 0, stream, i, PROCESS_KEY, 1) for i, (start, end, stream) in enumerate(lasted)]
    launches = [(t, MAIN) for t in (12, 16, 22, 28, 42, 44, 200)]
    operations, ranges = load_trace(made(tmp_path / "a.sqlite", launches, STEP, kernels))
    clocks = phase_clocks(operations, ranges).set_index(["step", "phase"])
    assert clocks.loc[(0, "forward")].to_dict() == {
        "host_ns": 30,
        "projected_ns": 60,
        "operations_ns": 63,
        "busy_ns": 50,
        "operations": 4,
    }
    assert clocks.loc[(0, "backward")].tolist() == [40, 0, 0, 0, 0]
    assert clocks.loc[
        (0, "outside"), ["projected_ns", "operations_ns", "busy_ns", "operations"]
    ].tolist() == [20, 25, 20, 2]
    assert clocks.xs("outside", level=1)["host_ns"].isna().all()
    assert clocks["operations"].to_dict() == {
        (-1, "outside"): 1,
        (-1, "total"): 1,
        (0, "forward"): 4,
        (0, "backward"): 0,
        (0, "outside"): 2,
        (0, "total"): 6,
    }
    assert clocks.loc[(0, "total")].tolist() == [100, 90, 88, 70, 6]
    with pytest.raises(ConservationError, match="several processes or devices"):
        phase_clocks(operations.assign(device=operations.index), ranges)


def test_a_phase_that_a_step_has_twice_takes_both_on_the_host_and_all_of_its_span_on_the_gpu():
    operations = pd.DataFrame(
        {
            "process": 1,
            "device": 0,
            "step": 0,
            "start_ns": [5, 60],
            "duration_ns": [80, 5],
            "phase": pd.Categorical(["forward", "forward"], [*PHASE_NAMES, "outside"]),
        }
    )
    ranges = pd.DataFrame(
        [
            ("step", "step", 0, 100),
            ("forward", "phase", 0, 10),
            ("forward", "phase", 50, 80),
            ("ffn", "region", 1, 9),
        ],
        columns=["name", "role", "start_ns", "end_ns"],
    ).assign(process=1, step=0)
    clocks = phase_clocks(operations, ranges).set_index("phase").loc["forward"]
    assert clocks[["host_ns", "projected_ns", "operations_ns", "busy_ns", "operations"]].tolist() == [
        40,
        80,
        85,
        80,
        2,
    ]


@pytest.mark.parametrize("lacking", ["NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME"])
def test_a_capture_that_lacks_a_table(tmp_path, lacking):
    path = execute(made(tmp_path / "a.sqlite", [(12, MAIN), (22, MAIN)], STEP), f"DROP TABLE {lacking}")
    operations, ranges = load_trace(path)
    assert operations["phase"].tolist() == ["outside", "outside"]
    assert operations["region"].tolist() == ["unattributed", "unattributed"]
    assert len(ranges) == (0 if lacking == "NVTX_EVENTS" else len(STEP))
    check_conservation(operations, activity_totals(path))


def test_copies_and_fills_are_operations(tmp_path):
    path = execute(
        made(
            tmp_path / "a.sqlite",
            [(12, MAIN), (22, MAIN), (60, AUTOGRAD)],
            STEP,
            [(100, 140, 0, 7, 0, PROCESS_KEY, 1)],
        ),
        "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start, end, deviceId, streamId, correlationId, globalPid, copyKind)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (50, 60, 0, 7, 1, {PROCESS_KEY}, 1), (150, 160, 0, 7, 2, {PROCESS_KEY}, 99)",
        "CREATE TABLE ENUM_CUDA_MEMCPY_OPER (id, name, label)",
        "INSERT INTO ENUM_CUDA_MEMCPY_OPER VALUES (1, 'HTOD', 'Host-to-Device')",
    )
    operations, _ = load_trace(path)
    assert operations["name"].tolist() == [
        "[CUDA memcpy Host-to-Device]",
        "void f<float>(float *)",
        "[CUDA memcpy 99]",
    ]
    assert operations["kernel_category"].tolist() == ["memory", "other", "memory"]
    assert operations["region"].tolist() == ["attention.softmax", "unattributed", "ffn"]
    check_conservation(operations, activity_totals(path))


# Captures that cannot be accounted for


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ((20, 25, "loss", MAIN), "phase 'loss' begins at 20 ns within phase 'forward' of 10 to 40 ns"),
        (
            (30, 45, "backward", AUTOGRAD),
            "phase 'backward' begins at 30 ns within phase 'forward' of 10 to 40 ns",
        ),
        ((95, 120, "step", AUTOGRAD), "step 'step' begins at 95 ns within step 'step' of 0 to 100 ns"),
    ],
)
def test_an_operation_cannot_be_in_two_phases_or_steps(tmp_path, extra, message):
    with pytest.raises(ConservationError, match=message):
        load_trace(made(tmp_path / "a.sqlite", [(12, MAIN)], [*STEP, extra]))


KERNEL, RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
MORE = f"INSERT INTO {KERNEL} SELECT start, end, deviceId, streamId, correlationId, globalPid, demangledName FROM {KERNEL}"


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        ([f"DROP TABLE {KERNEL}"], f"{KERNEL} has no kernels, expected a capture"),
        ([f"DELETE FROM {KERNEL}"], f"{KERNEL} has no kernels, expected a capture"),
        ([f"ALTER TABLE {KERNEL} DROP COLUMN globalPid"], "has no column globalPid"),
        (
            ["CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE AS SELECT 1 AS start, 5 AS end"],
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE has 1 CUDA graphs traced as a whole, .*--cuda-graph-trace=node",
        ),
        (
            [f"INSERT INTO NVTX_EVENTS VALUES (22, 28, 59, 'crossing', {MAIN}, NULL, 0)"],
            "range 'crossing' ends after the range it began in",
        ),
        (
            [f"UPDATE {KERNEL} SET start = 'soon'"],
            f"{KERNEL} has string values in its column start, expected integers",
        ),
        (
            [f"UPDATE {KERNEL} SET end = 9223372036854775808"],
            "double values in its column end, expected integers",
        ),
        (
            [f"UPDATE {KERNEL} SET streamId = x'00'"],
            f"{KERNEL} has (large_)?(string|binary) values in its column streamId",
        ),
        (
            [*[MORE] * 17, f"UPDATE {KERNEL} SET end = 'late' WHERE rowid = 100000"],
            f"{KERNEL} has values of several types in one column",
        ),
        (
            [f"UPDATE {KERNEL} SET end = 9223372036854775807"],
            f"{KERNEL} has 9223372036854775807 in its column end",
        ),
        (
            [f"UPDATE {KERNEL} SET start = -9223372036854775807"],
            f"{KERNEL} has -9223372036854775807 in its column start",
        ),
        (
            [f"UPDATE {KERNEL} SET end = start - 7"],
            f"{KERNEL} has a row that ends at 1005 ns and starts at 1012 ns",
        ),
        ([f"UPDATE {KERNEL} SET end = NULL"], f"{KERNEL} has no value in column end in 1 rows"),
        (
            [f"UPDATE {KERNEL} SET correlationId = 4294967296"],
            f"{KERNEL} has 4294967296 in its column correlationId",
        ),
        ([f"UPDATE {RUNTIME} SET start = 'soon'"], f"{RUNTIME} has string values in its column start"),
        (
            ["UPDATE NVTX_EVENTS SET end = start - 1 WHERE start = 15"],
            "NVTX_EVENTS has a row that ends at 14 ns and starts at 15",
        ),
        (
            ["UPDATE NVTX_EVENTS SET text = CAST(x'ff' AS TEXT) WHERE text = 'forward'"],
            "codec can't decode byte",
        ),
        (
            [
                "UPDATE NVTX_EVENTS SET start = -end * 40000000000000000, end = end * 40000000000000000 WHERE textId = 10"
            ],
            r"3 threads have times from -4000000000000000000 to 4000000000000000000 ns",
        ),
        (
            [
                "DROP TABLE StringIds",
                "CREATE VIEW StringIds AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1"
                " FROM n) SELECT id, id AS value FROM n",
            ],
            "StringIds is a view, expected a table",
        ),
    ],
)
def test_what_is_no_capture_is_refused_in_one_sentence(tmp_path, statements, message):
    path = execute(made(tmp_path / "a.sqlite", [(12, MAIN)], STEP), *statements)
    with pytest.raises(TraceError, match=message) as caught:
        load_trace(path)
    sentence = str(caught.value)
    assert sentence.startswith(str(path)) and "\n" not in sentence and "expected" in sentence


def test_names_that_are_no_text_are_shown_as_one(tmp_path):
    path = execute(
        made(tmp_path / "a.sqlite", [(12, MAIN), (22, MAIN)], STEP),
        "UPDATE StringIds SET value = NULL WHERE id = 1",
        "UPDATE NVTX_EVENTS SET text = 4.5 WHERE text = 'attention.softmax'",
    )
    operations, _ = load_trace(path)
    assert operations["name"].tolist() == ["[CUDA kernel 1]"] * 2
    assert operations["region"].tolist() == ["unattributed", "4.5"]


def test_ranges_that_nest_without_end_are_read_at_once(tmp_path):
    ranges = [(i, 100_000 - i, f"range {i:06d}", MAIN) for i in range(20_000)]
    operations, _ = load_trace(made(tmp_path / "a.sqlite", [(12, MAIN), (50_000, MAIN)], ranges))
    assert operations["region"].tolist() == ["range 000012", "range 019999"]


# The vectorised attribution against a plain loop


def nested(generator: np.random.Generator, start: int, end: int, depth: int = 0) -> list[tuple[int, int]]:
    """Random intervals that nest, some empty, some that touch or share their ends."""
    found, at = [], start
    while at < end and depth < 5:
        inner = sorted(generator.integers(at, end, 2, endpoint=True).tolist())
        found += [tuple(inner), *nested(generator, inner[0], inner[1], depth + 1)]
        at = inner[1] + int(generator.integers(0, 3))
        if generator.random() < 0.3:
            break
    return found


@pytest.mark.parametrize("seed", range(40))
def test_enclosing_equals_a_plain_loop(seed):
    generator = np.random.default_rng(seed)
    keys = (generator.integers(0, 2**50, 3) << 4).tolist()
    # An empty interval counts as one of 1 ns. Of equal ones, either is right: keep one.
    given = {
        (key, start, max(end, start + 1)): (key, start, end)
        for key in keys
        for start, end in nested(generator, -20, 60)
    }
    intervals = [list(given)[i] for i in generator.permutation(len(given))]
    points = [(int(generator.choice([*keys, 5])), int(generator.integers(-30, 70))) for _ in range(300)]
    innermost, parent, depth = enclosing(*np.array([given[i] for i in intervals]).T, *np.array(points).T)

    def holders(key, first, last):
        """Indices of the intervals around [first, last), the innermost last."""
        around = [
            i for i, (k, start, end) in enumerate(intervals) if k == key and start <= first and last <= end
        ]
        return sorted(around, key=lambda i: (intervals[i][1], -intervals[i][2]))

    assert innermost.tolist() == [(holders(key, time, time + 1) or [-1])[-1] for key, time in points]
    assert parent.tolist() == [([-1, *holders(*interval)])[-2] for interval in intervals]
    assert depth.tolist() == [len(holders(*interval)) for interval in intervals]


def test_the_last_moment_of_one_thread_is_not_the_first_of_the_next():
    inside, *_ = enclosing(*np.array([(1, 0, 5), (2, 0, 9)]).T, *np.array([(1, 9), (2, 0)]).T)
    assert inside.tolist() == [-1, 1]


def test_a_cpus_operators_last_as_long_as_they_do_something_themselves(tmp_path):
    """An operator within which others begin keeps what is left of its time; together they last as long as the whole."""
    spans = [
        ("aten::flash_backward", 0, 100, 1),
        ("aten::fill_", 10, 5, 1),
        ("aten::zero_", 20, 30, 1),
        ("aten::fill_", 25, 20, 1),
        ("aten::mul", 200, 7, 1),
        ("aten::mul", 40, 50, 2),
        ("aten::view", 90, 2, 1),
    ]
    trace = tmp_path / "trace.json"
    trace.write_text(
        json.dumps(
            {
                "traceEvents": [
                    {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "tid": tid, "pid": 1}
                    for name, ts, dur, tid in spans
                ]
            }
        )
    )
    found = records_of_own_trace(trace).operations
    lasted = found.groupby(found["name"].astype(str))["duration_ns"].sum().to_dict()
    assert lasted == {
        "aten::flash_backward": 65_000,
        "aten::fill_": 25_000,
        "aten::zero_": 10_000,
        "aten::mul": 57_000,
    }
    first = found[found["start_ns"] < 100_000].drop(index=found.index[found["duration_ns"] == 50_000])
    ends = first["start_ns"] + first["duration_ns"]
    assert ends.max() == 100_000 and (first["start_ns"].to_numpy()[1:] == ends.to_numpy()[:-1]).all()


def test_an_operator_after_one_with_children_begins_after_them():
    operators = pd.DataFrame({"key": 1, "start": [0, 10, 20, 60], "end": [100, 50, 30, 80]})
    laid = self_times(operators)
    assert laid[["start", "end"]].to_numpy().tolist() == [[0, 40], [40, 70], [70, 80], [80, 100]]
