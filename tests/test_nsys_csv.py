"""Test reading CSV reports from several nsys versions and rejecting invalid reports."""

from pathlib import Path

import pytest

from stepscope.traces.attribution import TraceError
from stepscope.traces.nsys_csv import REPORTS, read_nsys_csv

DATA = Path(__file__).parent / "data" / "nsys"
FILES = sorted(DATA.glob("*.csv"))
HEADER = "Time (%),Total Time (ns),Instances,Avg (ns),Name\n"
ROWS = '75.0,3000,2,1500.0,"void f<int, 4>(int, float)"\n25.0,1000,1,1000.5,g\n'
OLD_TRACE = (
    "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Bytes (MB),"
    "Throughput (MBps),SrcMemKd,DstMemKd,Device,Ctx,Strm,Name\n"  # 2023.x: no column GreenCtx, other unit name
    '9000,4000,102,160,1,1,256,1,1,32,0.000,0.000,,,,,NVIDIA A10G (0),1,7,"burn(float *, int, int)"\n'
)


def written(tmp_path: Path, text: str, name: str = "a.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_report_is_recognized_with_integer_times(path):
    table = read_nsys_csv(path)
    assert path.stem.endswith(table.attrs["report"]) and len(table)
    assert set(REPORTS[table.attrs["report"]]) <= set(table)
    whole = [
        name for name in table if name.endswith("_ns") and not {"avg", "med", "std"} & set(name.split("_"))
    ]
    assert whole and (table[whole].dtypes == "int64").all()


def test_read_nsys_csv_matches_the_values_in_the_file():
    kernels = read_nsys_csv(DATA / "sample_cuda_gpu_kern_sum.csv")
    assert kernels["total_time_ns"].sum() == 18_266_582 and kernels["instances"].sum() == 1330
    assert kernels["avg_ns"].iloc[0] == 47778.2 and kernels["time_percent"].iloc[0] == 15.7
    trace = read_nsys_csv(DATA / "nsys_2026_3_cuda_gpu_trace.csv")
    columns = ["start_ns", "bytes_mb", "throughput_mb_per_s"]
    assert trace[columns].iloc[0].tolist() == [1_134_711_990, 4.194, 6337.593]
    assert trace["grd_x"].isna().tolist()[:3] == [True, True, False]
    assert trace["name"].iloc[2].endswith("float *, unsigned long)") and trace["src_mem_kd"].iloc[2] == ""


def test_trace_report_of_an_older_version_has_the_same_columns(tmp_path):
    old = read_nsys_csv(written(tmp_path, OLD_TRACE))
    new = read_nsys_csv(DATA / "nsys_2026_3_cuda_gpu_trace.csv")
    assert old.attrs == new.attrs and set(new) - set(old) == {"green_ctx"} and not set(old) - set(new)


@pytest.mark.parametrize(
    "text",
    [
        HEADER + ROWS,
        "\ufeff" + HEADER + ROWS + "\nmore words\n",
        (HEADER + ROWS).replace("\n", "\r\n"),
        "Processing [a.sqlite] with [cuda_gpu_kern_sum.py]...\n\n" + HEADER + ROWS,
        "\nNOTICE: Existing SQLite export found: x.sqlite\n        It is assumed file was previously exported from: x.nsys-rep\n\n"
        + HEADER
        + ROWS,
    ],
)
def test_text_surrounding_a_table_is_ignored(tmp_path, text):
    table = read_nsys_csv(written(tmp_path, text))
    assert (
        table["total_time_ns"].tolist() == [3000, 1000]
        and table["name"].iloc[0] == "void f<int, 4>(int, float)"
    )


@pytest.mark.parametrize(
    "unit, factor",
    [("us", 1e3), ("µs", 1e3), ("usec", 1e3), ("ms", 1e6), ("msec", 1e6), ("s", 1e9), ("sec", 1e9)],
)
def test_times_are_converted_to_nanoseconds(tmp_path, unit, factor):
    table = read_nsys_csv(written(tmp_path, (HEADER + ROWS).replace("(ns)", f"({unit})")))
    assert table["total_time_ns"].tolist() == [3000 * factor, 1000 * factor]
    assert table["avg_ns"].tolist() == pytest.approx([1500.0 * factor, 1000.5 * factor])


def test_converted_times_are_rounded(tmp_path):
    table = read_nsys_csv(written(tmp_path, (HEADER + ROWS).replace("(ns)", "(ms)").replace("3000", "1.001")))
    assert 1.001 * 1e6 < 1_001_000 == table["total_time_ns"].iloc[0]


@pytest.mark.parametrize("text", ["SKIPPED: sample.sqlite does not contain CUDA kernel data.", HEADER])
def test_report_without_rows_yields_an_empty_table(tmp_path, text):
    path = written(tmp_path, text, "x_cuda_gpu_kern_sum.csv")
    table = read_nsys_csv(path)
    assert table.empty and table["total_time_ns"].dtype == "int64" and table["total_time_ns"].sum() == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got ''; expected a report of nsys stats"),
        ("a,b\n1,2\n", "got 'a,b"),
        (HEADER.replace("Avg (ns)", "Color") + ROWS, "got 'Time"),
        (None, "cannot be read"),
        ((HEADER + ROWS).replace(",", ";"), "separated by ';'"),
        (HEADER + ROWS[:30], "EOF inside string"),
        (HEADER + ROWS + "25.0,10", "the line '25.0,10' is truncated"),
        (HEADER + ROWS + "1,2,3,4,5,6\n", "Expected 5 fields"),
        (
            HEADER + ROWS.replace("3000", "3e9x"),
            "'3e9x' in its column 'Total Time .ns.'; expected whole numbers",
        ),
        (
            HEADER + ROWS.replace("3000", '"3,000"'),
            "'3,000' in its column 'Total Time .ns.'; expected whole numbers without thousands separators",
        ),
        (HEADER + ROWS.replace("3000", "3.5"), "has '3.5' in its column 'Total Time"),
        (HEADER + ROWS.replace("3000", ""), "has 'nan' in its column 'Total Time"),
        (
            HEADER + ROWS.replace("1500.0", '"1500,0"'),
            "'1500,0' in its column 'Avg .ns.'; expected numbers .*decimal point",
        ),
        (HEADER + ROWS.replace(",2,", ',"2 000",'), "'2 000' in its column 'Instances'"),
        (HEADER + ROWS.replace("3000", "9" * 30), "in its column 'Total Time"),
        (
            HEADER + ROWS + "\n" + HEADER + ROWS,
            "contains 2 reports .cuda_gpu_kern_sum, cuda_gpu_kern_sum.; expected one",
        ),
        (
            " Time (%)  Total Time (ns)  Instances  Name\n ---\n 75.0  3,000  2  f\n",
            "is a report in text format; expected a report of nsys stats --format csv",
        ),
        (
            "SKIPPED: a.sqlite does not contain NV Tools Extension (NVTX) data.\n\n"
            " ** CUDA GPU Kernel Summary (cuda_gpu_kern_sum):\n\n Time (%)  Name\n --------  ----\n 16.0  f\n",
            "is a report in text format",
        ),
        ("The log does not contain a table.", "got 'The log does not contain"),
    ],
)
def test_invalid_report_raises_a_one_line_error(tmp_path, text, message):
    path = tmp_path / "absent.csv" if text is None else written(tmp_path, text)
    with pytest.raises(TraceError, match=message) as error:
        read_nsys_csv(path)
    message_text = str(error.value)
    assert message_text.startswith(str(path)) and "expected" in message_text
    assert "\n" not in message_text and len(message_text) < 500


STATISTICS = "Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns)"
SUMS = {
    "cuda_api_sum": (f"Num Calls,{STATISTICS},Name", "cudaLaunchKernel"),
    "osrt_sum": (f"Num Calls,{STATISTICS},Name", "poll"),
    "mpi_event_sum": (f"Instances,{STATISTICS},Source,Name", "MPI_P2P,MPI_Send"),
    "cuda_gpu_sum": (f"Instances,{STATISTICS},Category,Operation", "CUDA_KERNEL,gemm"),
    "cuda_gpu_mem_time_sum": (f"Count,{STATISTICS},Operation", "[CUDA memset]"),
    "cuda_gpu_kern_sum": (f"Instances,{STATISTICS},Name", "gemm"),
}


@pytest.mark.parametrize("report", SUMS)
def test_reports_are_recognized_by_all_their_headings(tmp_path, report):
    headings, name = SUMS[report]
    line = f"Time (%),Total Time (ns),{headings}\n70.0,7000000,10,1.0,1.0,1,1,0.0,{name}\n"
    assert read_nsys_csv(written(tmp_path, line)).attrs["report"] == report


def test_utf16_report_from_powershell_is_read(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(HEADER + ROWS, encoding="utf-16")
    assert len(read_nsys_csv(path)) == len(ROWS.splitlines())
