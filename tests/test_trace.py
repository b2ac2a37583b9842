"""Test how GPU operations in real and synthetic captures are attributed to steps, phases and regions."""

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bench.traces import AUTOGRAD, MAIN, PROCESS_KEY, write_export
from capture_events import event, write_trace
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
            "NumGPUOps": "count",
            "Orig Start (ns)": "start",
            "Orig Duration (ns)": "host_ns",
            "Projected Duration (ns)": "projected_ns",
        }
    )


def sums(operations: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Return the total time in ns and the number of operations for each combination of values in these columns."""
    return operations.groupby(list(by), observed=True)["duration_ns"].agg(["sum", "size"])


# The real capture


def test_backward_operations_are_launched_by_the_autograd_thread(sample):
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
    assert operations.groupby("step").size().to_dict() == dict.fromkeys(range(5), 276)


def test_operation_sums_match_the_totals_of_the_capture(sample):
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
        (lambda o: o.drop(index=700), "phases contain 1329 operations of kind kernel"),
        (lambda o: pd.concat([o, o.iloc[[700]]]), "1 operations are counted twice"),
        (
            lambda o: o.assign(duration_ns=o["duration_ns"] + (o.index == 700)),
            "phases contain 1330 operations of kind kernel with a total of 18266583 ns; expected 1330 operations with 18266582 ns",
        ),
        (lambda o: o.assign(phase=o["phase"].where(o.index != 700)), "phases contain 1329"),
        (lambda o: o.assign(region=o["region"].where(o.index != 700)), "regions contain 1329"),
        (lambda o: o.assign(step=o["step"].where(o.index != 700)), "steps contain 1329"),
        (lambda o: o[o["kind"] != "memset"], "phases contain 0 operations of kind memset"),
    ],
)
def test_check_conservation_raises_when_operations_are_lost_duplicated_or_changed(sample, change, message):
    with pytest.raises(ConservationError, match=message):
        check_conservation(change(sample[0]), activity_totals(SAMPLE))


def test_totals_by_kernel_and_copy_match_nsys(sample):
    operations, _ = sample
    for kinds, name in (["kernel"], "cuda_gpu_kern_sum"), (["memcpy", "memset"], "cuda_gpu_mem_time_sum"):
        theirs = report(name).set_index("key")
        ours = sums(operations[operations["kind"].isin(kinds)], "name").loc[theirs.index]
        assert ours["sum"].tolist() == theirs["total_ns"].tolist()
        assert ours["size"].tolist() == theirs["count"].tolist()


def test_range_host_times_match_nsys(sample):
    _, ranges = sample
    ours = (ranges["end_ns"] - ranges["start_ns"]).groupby(ranges["name"].astype(str)).agg(["sum", "size"])
    theirs = report("nvtx_pushpop_sum").set_index("key")[["total_ns", "count"]]
    assert ours.to_numpy().tolist() == theirs.loc[ours.index].to_numpy().tolist()


def test_kernels_by_range_match_nsys(sample):
    operations, _ = sample
    kernels = operations[operations["kind"] == "kernel"]
    theirs = report("nvtx_kern_sum").set_index("Kernel Name")
    for name in ("softmax", "ffn", "scores", "value", "out_proj", "qkv_proj", "forward"):
        ours = sums(kernels[kernels["phase" if name == "forward" else "region"] == name], "name")
        expected = theirs.loc[theirs["key"] == name, ["total_ns", "count"]]
        assert ours.to_numpy().tolist() == expected.loc[ours.index].to_numpy().tolist()


def test_phase_times_match_nsys(sample):
    """The backward phase isn't compared, because nsys attributes only one kernel to its range."""
    operations, ranges = sample
    times = phase_clocks(operations, ranges).set_index(["step", "phase"])
    assert len(times) == 20
    theirs = report("nvtx_gpu_proj_trace").sort_values("start")
    for phase in ("forward", "optimizer"):
        ours = times.xs(phase, level="phase")[["host_ns", "projected_ns", "operations"]]
        expected = theirs.loc[theirs["key"] == phase, ["host_ns", "projected_ns", "count"]]
        assert ours.to_numpy().tolist() == expected.to_numpy().tolist()
    host_ns = times.xs("total", level="phase")["host_ns"].tolist()
    assert host_ns == theirs.loc[theirs["key"] == "step", "host_ns"].tolist()
    assert (times["busy_ns"] == times["operations_ns"]).all()  # operations on a single stream don't overlap


# Synthetic captures

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
    """Return a row of NVTX_EVENTS, where ``name`` is a string or a registered string's id."""
    text, text_id = (name, None) if isinstance(name, str) else (None, name)
    return start, end, 59, text, thread, text_id, domain


def made(path: Path, launches: list[tuple], ranges: list[tuple], kernels: list[tuple] | None = None) -> Path:
    """Write an export that contains these launches, ranges and kernels.

    A launch is a pair of a time and a thread, a range is a tuple of arguments for ``nvtx``, and a kernel is a row
    of CUPTI_ACTIVITY_KIND_KERNEL. By default, each launch has a 40 ns kernel.
    """
    if kernels is None:  # one 40 ns kernel per launch, 1000 ns later
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
        connection.executescript(";".join(statements))
    return path


STEP = [
    (0, 100, 10, MAIN),
    (10, 40, "forward", MAIN),
    (15, 30, "attention", MAIN),
    (20, 25, "attention.softmax", MAIN),
    (50, 90, 12, MAIN),
    (55, 80, 13, AUTOGRAD),
]


def test_phases_are_matched_by_time_and_regions_by_thread(tmp_path):
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


def test_load_trace_lists_outer_range_first_when_ranges_start_together(tmp_path):
    ranges = [(10, 20, "ffn", MAIN), (10, 40, "forward", MAIN), (10, 100, "step", MAIN)]
    _, loaded = load_trace(made(tmp_path / "a.sqlite", [(12, MAIN)], ranges))
    assert loaded["name"].tolist() == ["step", "forward", "ffn"]


def test_phases_apply_only_within_their_process(tmp_path):
    other = MAIN + (1 << 24)
    ranges = [*STEP, (200, 300, "step", MAIN), (400, 500, "step", other), (410, 490, "forward", other)]
    launches = [(20, MAIN), (21, other), (420, other), (421, MAIN)]
    operations, ranges = load_trace(made(tmp_path / "a.sqlite", launches, ranges))
    assert operations["phase"].tolist() == ["forward", "outside", "forward", "outside"]
    assert operations["step"].tolist() == [0, -1, 0, -1]
    assert operations["process"].tolist() == [7, 8, 8, 7]
    with pytest.raises(ConservationError, match="several processes or devices"):
        phase_clocks(operations, ranges)
    times = phase_clocks(operations[operations["process"] == 8], ranges).set_index("phase")
    assert times.loc["forward", ["host_ns", "operations"]].tolist() == [80, 1]


def test_library_domain_ranges_are_not_regions(tmp_path):
    # in the other process, domain 1 doesn't belong to a library
    ranges = [
        (0, 100, "step", MAIN, 2),
        (10, 40, 11, MAIN, 2),
        (20, 30, "ffn", MAIN, 2),
        (22, 28, 16, MAIN, 1),
        (32, 38, "norm", MAIN, 0),
        (40, 50, "head", MAIN + (1 << 24), 1),
    ]
    path = execute(
        made(tmp_path / "a.sqlite", [(24, MAIN), (34, MAIN), (44, MAIN + (1 << 24))], ranges),
        f"INSERT INTO NVTX_EVENTS VALUES (-5, NULL, 75, 'cuBLAS', {MAIN}, NULL, 1)",
        f"INSERT INTO NVTX_EVENTS VALUES (-4, NULL, 75, NULL, {AUTOGRAD}, 14, 2)",
    )
    assert load_trace(path)[0]["region"].tolist() == ["ffn", "norm", "head"]
    operations, ranges = attribute(read_export(path, domains=None))
    assert operations["region"].tolist() == ["cublasSgemm", "norm", "head"] and len(ranges) == 6


def test_unclosed_ranges_end_with_the_capture(tmp_path):
    path = made(
        tmp_path / "a.sqlite",
        [(20, MAIN), (60, MAIN)],
        [(0, None, "step", MAIN), (50, None, "forward", MAIN), (55, None, "ffn", MAIN)],
    )
    operations, ranges = load_trace(path)
    assert operations["region"].tolist() == ["unattributed", "ffn"]
    assert operations["phase"].tolist() == ["outside", "forward"]
    assert ranges["end_ns"].tolist() == [66, 66, 66]  # the last call on the host ends at 65


def test_kernels_without_a_launch_record_are_outside_all_phases(tmp_path):
    kernels = [
        (20, 30, 0, 7, 0, PROCESS_KEY, 1),
        (40, 60, 0, 7, 99, PROCESS_KEY, 2),
        (70, 75, 0, 8, None, PROCESS_KEY, 2),
        # this kernel is from another process, but has the same correlation id as the first process's launch
        (80, 81, 0, 7, 0, PROCESS_KEY + (1 << 24), 1),
    ]
    path = made(tmp_path / "a.sqlite", [(20, MAIN)], STEP, kernels)
    operations, _ = load_trace(path)
    assert operations["phase"].tolist() == ["forward", "outside", "outside", "outside"]
    assert operations["thread"].tolist() == [7, -1, -1, -1]
    assert operations["step"].tolist() == [0, -1, -1, -1]
    assert operations["launch_start_ns"].isna().tolist() == [False, True, True, True]
    check_conservation(operations, activity_totals(path))


def test_outer_call_is_the_launch_when_two_calls_share_a_correlation_id(tmp_path):
    path = execute(
        made(tmp_path / "a.sqlite", [(22, MAIN)], STEP),
        f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (21, 30, {MAIN}, 0)",
    )
    assert load_trace(path)[0]["launch_start_ns"].tolist() == [21]


def test_waiting_calls_lists_slow_launches_and_synchronizations(tmp_path):
    path = execute(
        made(tmp_path / "a.sqlite", [], []),
        f"ALTER TABLE {RUNTIME} ADD COLUMN nameId INTEGER",
        "INSERT INTO StringIds VALUES (50, 'cudaLaunchKernel_v7000'), (51, 'cudaStreamSynchronize_v3020')",
        f"INSERT INTO {RUNTIME} VALUES (7, 100006, {MAIN}, 1, 50), (7, 100007, {MAIN}, 2, 50)",
        f"INSERT INTO {RUNTIME} VALUES (7, 5006, {MAIN}, 3, 51), (7, 5007, {MAIN}, 4, 51)",
    )
    calls = waiting_calls(path)[["name", "start_ns", "end_ns"]].to_numpy().tolist()
    assert calls == [["cudaLaunchKernel", 7, 100_007], ["cudaStreamSynchronize", 7, 5_007]]


def test_phase_clocks_handles_overlapping_streams_gaps_and_outside_operations(tmp_path):
    # The GPU runs the forward phase's operations from 100 to 130 and from 140 to 160. Two of the step's operations
    # are outside the forward phase, and one operation runs after the step.
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
    times = phase_clocks(operations, ranges).set_index(["step", "phase"])
    columns = ["host_ns", "projected_ns", "operations_ns", "busy_ns", "operations"]
    assert times.loc[(0, "forward"), columns].tolist() == [30, 60, 63, 50, 4]
    assert times.loc[(0, "backward"), columns].tolist() == [40, 0, 0, 0, 0]
    assert times.loc[(0, "outside"), columns[1:]].tolist() == [20, 25, 20, 2]
    assert times.xs("outside", level=1)["host_ns"].isna().all()
    assert times.loc[(0, "total"), columns].tolist() == [100, 90, 88, 70, 6]
    assert times.loc[-1, "operations"].to_dict() == {"outside": 1, "total": 1}
    with pytest.raises(ConservationError, match="several processes or devices"):
        phase_clocks(operations.assign(device=operations.index), ranges)


def test_repeated_phase_sums_host_time_and_spans_the_gpu_once(tmp_path):
    ranges = [
        (0, 100, "step", MAIN),
        (0, 10, "forward", MAIN),
        (50, 80, "forward", MAIN),
        (1, 9, "ffn", MAIN),
    ]
    kernels = [(5, 85, 0, 7, 0, PROCESS_KEY, 1), (90, 95, 0, 7, 1, PROCESS_KEY, 1)]
    path = made(tmp_path / "a.sqlite", [(3, MAIN), (60, MAIN)], ranges, kernels)
    times = phase_clocks(*load_trace(path)).set_index("phase").loc["forward"]
    columns = ["host_ns", "projected_ns", "operations_ns", "busy_ns", "operations"]
    assert times[columns].tolist() == [40, 90, 85, 85, 2]


@pytest.mark.parametrize("missing", ["NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME"])
def test_operations_are_outside_all_phases_when_a_table_is_missing(tmp_path, missing):
    path = execute(made(tmp_path / "a.sqlite", [(12, MAIN), (22, MAIN)], STEP), f"DROP TABLE {missing}")
    operations, ranges = load_trace(path)
    assert operations["phase"].tolist() == ["outside", "outside"]
    assert operations["region"].tolist() == ["unattributed", "unattributed"]
    assert len(ranges) == (0 if missing == "NVTX_EVENTS" else len(STEP))
    check_conservation(operations, activity_totals(path))


def test_load_trace_includes_copies(tmp_path):
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


# Invalid captures


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            (20, 25, "loss", MAIN),
            "phase 'loss' begins at 20 ns within phase 'forward', which lasts from 10 to 40 ns",
        ),
        (
            (30, 45, "backward", AUTOGRAD),
            "phase 'backward' begins at 30 ns within phase 'forward', which lasts from 10 to 40 ns",
        ),
        (
            (95, 120, "step", AUTOGRAD),
            "step 'step' begins at 95 ns within step 'step', which lasts from 0 to 100 ns",
        ),
    ],
)
def test_overlapping_phases_or_steps_are_rejected(tmp_path, extra, message):
    with pytest.raises(ConservationError, match=message):
        load_trace(made(tmp_path / "a.sqlite", [(12, MAIN)], [*STEP, extra]))


KERNEL, RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
MORE = f"INSERT INTO {KERNEL} SELECT start, end, deviceId, streamId, correlationId, globalPid, demangledName FROM {KERNEL}"


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        (
            "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL",
            "CUPTI_ACTIVITY_KIND_KERNEL has no kernels; expected a capture",
        ),
        (
            "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL",
            "CUPTI_ACTIVITY_KIND_KERNEL has no kernels; expected a capture",
        ),
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN globalPid", "has no column globalPid"),
        (
            "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE AS SELECT 1 AS start, 5 AS end",
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE has 1 CUDA graphs traced as a whole; .*--cuda-graph-trace=node",
        ),
        (
            f"INSERT INTO NVTX_EVENTS VALUES (22, 28, 59, 'crossing', {MAIN}, NULL, 0)",
            "range 'crossing' ends after the range in which it began",
        ),
        (
            "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon'",
            "CUPTI_ACTIVITY_KIND_KERNEL has string values in its column start; expected integers",
        ),
        (
            "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 9223372036854775808",
            "double values in its column end; expected integers",
        ),
        (
            "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET streamId = x'00'",
            "CUPTI_ACTIVITY_KIND_KERNEL has (large_)?(string|binary) values in its column streamId",
        ),
        (
            f"{MORE};" * 17 + "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 'late' WHERE rowid = 100000",
            "CUPTI_ACTIVITY_KIND_KERNEL has values of several types in one column",
        ),
        (
            "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 9223372036854775807",
            "CUPTI_ACTIVITY_KIND_KERNEL has 9223372036854775807 in its column end",
        ),
        (
            "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = -9223372036854775807",
            "CUPTI_ACTIVITY_KIND_KERNEL has -9223372036854775807 in its column start",
        ),
        (
            "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = start - 7",
            "CUPTI_ACTIVITY_KIND_KERNEL has a row that ends at 1005 ns and starts at 1012 ns",
        ),
        (
            "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = NULL",
            "CUPTI_ACTIVITY_KIND_KERNEL has no value in column end in 1 rows",
        ),
        (
            "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET correlationId = 4294967296",
            "CUPTI_ACTIVITY_KIND_KERNEL has 4294967296 in its column correlationId",
        ),
        (
            "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET start = 'soon'",
            "CUPTI_ACTIVITY_KIND_RUNTIME has string values in its column start",
        ),
        (
            "UPDATE NVTX_EVENTS SET end = start - 1 WHERE start = 15",
            "NVTX_EVENTS has a row that ends at 14 ns and starts at 15",
        ),
        (
            "UPDATE NVTX_EVENTS SET text = CAST(x'ff' AS TEXT) WHERE text = 'forward'",
            "codec can't decode byte",
        ),
        (
            "UPDATE NVTX_EVENTS SET start = -end * 40000000000000000, end = end * 40000000000000000 WHERE textId = 10",
            r"3 threads have times from -4000000000000000000 to 4000000000000000000 ns",
        ),
        (
            "DROP TABLE StringIds; "
            "CREATE VIEW StringIds AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1"
            " FROM n) SELECT id, id AS value FROM n",
            "StringIds is a view; expected a table",
        ),
    ],
)
def test_invalid_export_raises_a_one_line_error(tmp_path, sql, message):
    path = execute(made(tmp_path / "a.sqlite", [(12, MAIN)], STEP), sql)
    with pytest.raises(TraceError, match=message) as error:
        load_trace(path)
    text = str(error.value)
    assert text.startswith(str(path)) and "\n" not in text and "expected" in text


def test_non_string_names_are_converted(tmp_path):
    path = execute(
        made(tmp_path / "a.sqlite", [(12, MAIN), (22, MAIN)], STEP),
        "UPDATE StringIds SET value = NULL WHERE id = 1",
        "UPDATE NVTX_EVENTS SET text = 4.5 WHERE text = 'attention.softmax'",
    )
    operations, _ = load_trace(path)
    assert operations["name"].tolist() == ["[CUDA kernel 1]"] * 2
    assert operations["region"].tolist() == ["unattributed", "4.5"]


def test_deeply_nested_ranges_are_read_quickly(tmp_path):
    ranges = [(i, 100_000 - i, f"range {i:06d}", MAIN) for i in range(20_000)]
    operations, _ = load_trace(made(tmp_path / "a.sqlite", [(12, MAIN), (50_000, MAIN)], ranges))
    assert operations["region"].tolist() == ["range 000012", "range 019999"]


# Vectorized attribution, compared with a plain loop


def nested(generator: np.random.Generator, start: int, end: int, depth: int = 0) -> list[tuple[int, int]]:
    """Return random nested intervals; some intervals are empty, touch each other or share an end."""
    found, at = [], start
    while at < end and depth < 5:
        inner = sorted(generator.integers(at, end, 2, endpoint=True).tolist())
        found += [tuple(inner), *nested(generator, inner[0], inner[1], depth + 1)]
        at = inner[1] + int(generator.integers(0, 3))
        if generator.random() < 0.3:
            break
    return found


@pytest.mark.parametrize("seed", range(40))
def test_enclosing_matches_a_plain_loop(seed):
    generator = np.random.default_rng(seed)
    keys = (generator.integers(0, 2**50, 3) << 4).tolist()
    # An empty interval counts as 1 ns long. Of several equal intervals, only one is kept, because the result may
    # be any of them.
    given = {
        (key, start, max(end, start + 1)): (key, start, end)
        for key in keys
        for start, end in nested(generator, -20, 60)
    }
    intervals = [list(given)[i] for i in generator.permutation(len(given))]
    points = [(int(generator.choice([*keys, 5])), int(generator.integers(-30, 70))) for _ in range(300)]
    innermost, parent, depth = enclosing(*np.array([given[i] for i in intervals]).T, *np.array(points).T)

    def holders(key, first, last):
        """Return the indices of the intervals that enclose [first, last), sorted from outermost to innermost."""
        around = [
            i for i, (k, start, end) in enumerate(intervals) if k == key and start <= first and last <= end
        ]
        return sorted(around, key=lambda i: (intervals[i][1], -intervals[i][2]))

    assert innermost.tolist() == [(holders(key, time, time + 1) or [-1])[-1] for key, time in points]
    assert parent.tolist() == [([-1, *holders(*interval)])[-2] for interval in intervals]
    assert depth.tolist() == [len(holders(*interval)) for interval in intervals]


def test_cpu_operators_count_only_self_time(tmp_path):
    """An operator's self time excludes the time of the operators that it calls."""
    spans = [
        ("aten::flash_backward", 0, 100, 1),
        ("aten::fill_", 10, 5, 1),
        ("aten::zero_", 20, 30, 1),
        ("aten::fill_", 25, 20, 1),
        ("aten::mul", 200, 7, 1),
        ("aten::mul", 40, 50, 2),
        ("aten::view", 90, 2, 1),
    ]
    events = [event("cpu_op", *span) for span in spans]
    operations = records_of_own_trace(write_trace(tmp_path / "trace.json", events)).operations
    expected = {"aten::flash_backward": 65, "aten::fill_": 25, "aten::zero_": 10, "aten::mul": 57}
    durations_ns = operations.groupby(operations["name"].astype(str))["duration_ns"].sum()
    assert (durations_ns / 1000).to_dict() == expected


def test_self_times_do_not_overlap_for_nested_operators():
    operators = pd.DataFrame({"key": 1, "start": [0, 10, 20, 60], "end": [100, 50, 30, 80]})
    rows = self_times(operators)
    assert rows[["start", "end"]].to_numpy().tolist() == [[0, 40], [40, 70], [70, 80], [80, 100]]
