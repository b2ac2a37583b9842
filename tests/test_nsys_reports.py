"""Reports of `nsys stats`: a real set of files, the headers of other releases, and files that must be
refused.
"""

import os
from pathlib import Path

import pandas as pd
import pytest

from stepscope.traces.nsys_reports import REPORTS, ReportError, check_fresh, load_report, load_reports

DATA = Path(__file__).parent / "data" / "nsys"
KERNELS = "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name\n"
ROWS = '75.0,3000,2,1500.0,1500.0,1000,2000,707.1,"void f<int, 4>(int, float)"\n25.0,1000,1,1000.0,1000.0,1000,1000,0.0,g\n'
SKIPPED = "SKIPPED: sample.sqlite does not contain CUDA kernel data."


def written(folder: Path, text: str, report: str = "cuda_gpu_kern_sum") -> Path:
    path = folder / f"run_{report}.csv"
    path.write_bytes(text.encode())
    return path


def test_sample_reports_have_every_column_in_its_type():
    frames, errors = load_reports(DATA, "sample")
    assert errors == []
    assert {report: len(frame) for report, frame in frames.items()} == {
        "cuda_gpu_kern_sum": 39, "cuda_api_sum": 10, "cuda_gpu_mem_time_sum": 2, "nvtx_pushpop_sum": 12,
        "nvtx_gpu_proj_sum": 12, "nvtx_kern_sum": 124, "nvtx_gpu_proj_trace": 161}
    for report, frame in frames.items():
        assert {name: str(kind) for name,
                kind in frame.dtypes.items()} == {n: kind for n, (_, kind) in REPORTS[report].items()}
        assert frame.drop(columns=["style", "parent_id"], errors="ignore").notna().all(axis=None)
    assert frames["nvtx_kern_sum"]["kernel_name"].isin(frames["cuda_gpu_kern_sum"]["name"]).all()


def test_sample_values():
    kernels = load_report(DATA / "sample_cuda_gpu_kern_sum.csv")
    first = kernels.iloc[0]
    assert (first["total_time_ns"], first["instances"], first["avg_ns"],
            first["stddev_ns"]) == (2866689, 60, 47778.2, 452.4)
    assert kernels["instances"].sum() == 1330
    assert (kernels["avg_ns"] * kernels["instances"] - kernels["total_time_ns"]).abs().max() < 160 * 0.05 + 1
    commas = kernels["name"].str.contains("splitKreduce_kernel")
    assert kernels.loc[commas, "name"].item().endswith("const T6 *, const T6 *)")
    # ":forward" in the file
    projected = load_report(DATA / "sample_nvtx_gpu_proj_sum.csv").set_index("range")
    assert projected.loc["forward", "total_gpu_ops"] == 515
    assert projected.loc["backward", "total_gpu_ops"] == 5
    within = load_report(DATA / "sample_nvtx_kern_sum.csv")
    assert within.loc[within["range"] == "", ["style", "thread", "kernel_instances"]].agg(
        {"style": "count", "thread": "max", "kernel_instances": "sum"}).tolist() == [0, 593, 825]
    assert load_report(DATA / "sample_nvtx_gpu_proj_trace.csv")["parent_id"].isna().sum() == 1


@pytest.mark.parametrize(("report", "header", "row", "expected"), [
    # 2025: as the sample. 2022 quoted its fields and had no median in places.
    ("cuda_gpu_kern_sum",
     '"Time (%)","Total Time (ns)","Instances","Avg (ns)","Min (ns)","Max (ns)","StdDev (ns)","Name"',
     '"100.0","3000","2","1500.0","1000","2000","707.1","void f(int, int)"',
     {"total_time_ns": 3000, "instances": 2, "med_ns": None, "max_ns": 2000, "name": "void f(int, int)"}),
    # Before: no blank before the %, whole words, and the unit at the total only.
    ("cuda_gpu_kern_sum", "Time(%),Total Time (us),Instances,Average,Minimum,Maximum,StdDev,Name",
     "100.0,3.5,2,1.75,1,2.5,0.7,f",
     {"time_percent": 100, "total_time_ns": 3500, "avg_ns": 1750, "min_ns": 1000, "stddev_ns": 700}),
    ("cuda_api_sum", "Time (%),Total Time (ns),Num Calls,Average (ns),Minimum (ns),Maximum (ns),Name",
     "100.0,64,4,16,5,20,cudaFree",
     {"num_calls": 4, "avg_ns": 16}),
    ("cuda_api_sum", "Time(%),Total Time (ns),Calls,Average,Minimum,Maximum,Name",
     "100.0,64,4,16,5,20,cudaFree", {"num_calls": 4}),
    ("cuda_gpu_mem_time_sum", "Time(%),Total Time (ns),Operations,Average,Minimum,Maximum,Operation",
     "100.0,64,4,16,5,20,[CUDA memset]",
     {"count": 4, "operation": "[CUDA memset]"}),
    ("nvtx_pushpop_sum",
     "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Range",
     "100.0,64,1,64,64,64,64,0.0,forward", {"range": "forward"}),
    ("nvtx_pushpop_sum",
     "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Range",
     '"100.0","1,397,875,298",1,64,64,64,64,,stepscope:a:b',
     {"total_time_ns": 1397875298, "range": "stepscope:a:b", "stddev_ns": None}),
    # A column that a later release might add, and another order.
    ("cuda_gpu_kern_sum", "Name,Device,Instances,Total Time (ns)", "f,0,1,64",
     {"name": "f", "total_time_ns": 64, "time_percent": None}),
])  # fmt: skip
def test_headers_of_other_releases(tmp_path, report, header, row, expected):
    frame = load_report(written(tmp_path, f"{header}\n{row}\n", report))
    assert list(frame) == list(REPORTS[report])
    found = frame.iloc[0]
    assert {name: None if pd.isna(found[name]) else found[name] for name in expected} == expected


@pytest.mark.parametrize(("unit", "scale"),
                         [("ns", 1), ("nsec", 1), ("us", 1e3), ("µs", 1e3), ("μs", 1e3), ("usec", 1e3),
                                             ("ms", 1e6), ("msec", 1e6), ("s", 1e9), ("sec", 1e9)])
def test_units_of_the_header(tmp_path, unit, scale):
    text = f"Time (%),Total Time ({unit}),Instances,Avg ({unit}),Name\n100.0,{2_500_000_000 / scale},2,{1_250_000_000 / scale},f\n"
    frame = load_report(written(tmp_path, text))
    assert frame["total_time_ns"].tolist() == [2_500_000_000]
    assert frame["avg_ns"].tolist() == pytest.approx([1_250_000_000])


def test_what_nsys_prints_around_a_table_is_passed_over(tmp_path):
    plain = load_report(written(tmp_path, KERNELS + ROWS))
    before = "Generating SQLite file run.sqlite from run.nsys-rep\nProcessing [run.sqlite] with [cuda_gpu_kern_sum.py]...\n\n"
    pd.testing.assert_frame_equal(load_report(written(tmp_path, before + KERNELS + ROWS
                                                      + "\nProcessing [run.sqlite] next\n")), plain)
    pd.testing.assert_frame_equal(load_report(written(tmp_path, "\ufeff"
                                                      + (KERNELS + ROWS).replace("\n", "\r\n"))), plain)
    assert plain["name"].tolist() == ["void f<int, 4>(int, float)", "g"]


@pytest.mark.parametrize("text", [SKIPPED + "\n", SKIPPED, "Processing [sample.sqlite]...\n" + SKIPPED + "\n",
                                  KERNELS])
def test_nothing_recorded_is_an_empty_table(tmp_path, text):
    frame = load_report(written(tmp_path, text))
    assert len(frame) == 0
    pd.testing.assert_series_equal(frame.dtypes, load_report(written(tmp_path, KERNELS + ROWS)).dtypes)


BAD = {
    "": "no line is the header of cuda_gpu_kern_sum, expected its columns, found 'nothing'",
    "ERROR: run.sqlite is older than run.nsys-rep\n": "found 'ERROR: run.sqlite is older",
    KERNELS.replace("Instances",
                    "Num Calls") + ROWS: "line 1 has no column for instances, expected the header of cuda_gpu_kern_sum",
    KERNELS.replace("Name", "Kernel") + ROWS: "line 1 has no column for name",
    KERNELS.replace("Total Time (ns)",
                    "Total Time (h)") + ROWS: r"column 'Total Time \(h\)' has no known unit of time, expected one of ns",
    KERNELS.replace("Total Time (ns)", "Total Time") + ROWS: "column 'Total Time' has no known unit",
    KERNELS + ROWS[:-1]: "line 3 is cut off",
    KERNELS + ROWS[:-3]: "line 3 is cut off",
    KERNELS + ROWS[:30] + "\n": r"line 2 has 6 fields, expected 9",
    KERNELS + ROWS + "1,2,3\n": "line 4 has 3 fields, expected 9",
    KERNELS + ROWS[:60] + "\n": r"line 2 is not CSV \(unexpected end of data\), expected 9 fields",
    KERNELS
    + ROWS.splitlines(keepends=True)[0]: r"the percentages of its 1 rows sum to 75.0, expected 100: the last are missing",
    KERNELS
    + ROWS.replace("3000",
                   "3.000.000"): r"line 2, column 'Total Time \(ns\)': found '3.000.000', expected a number",
    KERNELS
    + ROWS.replace("3000", '"30,00"'): r"column 'Total Time \(ns\)': found '30,00', expected a number",
    KERNELS + ROWS.replace(",3000,", ",,"): r"column 'Total Time \(ns\)': found '', expected a number",
    KERNELS
    + ROWS.replace(",2,", ",2.5,"): r"line 2, column 'Instances': found '2.5', expected a whole number",
    KERNELS + ROWS.replace("707.1", "nan?"): r"column 'StdDev \(ns\)': found 'nan\?', expected a number",
    KERNELS + ROWS.replace("3000", "12345678901234567890123"):
        r"line 2, column 'Total Time \(ns\)': found '12345678901234567890123', expected a number that fits into 64 bits",
    KERNELS + ROWS.replace("3000", "9" * 5000): "column 'Total Time .*, expected a number",
    KERNELS.replace("(ns)", "(us)") + ROWS.replace("3000",
                                                   "1e400"): "found '1e400', expected a number that fits into 64 bits",
    KERNELS + ROWS.replace("707.1", "1e400"): "found '1e400', expected a number that fits into 64 bits",
    KERNELS + ROWS.replace("3000", "-3000"): "found '-3000', expected no negative number",
    KERNELS + ROWS.replace("707.1", "-707.1"): "found '-707.1', expected no negative number",
    KERNELS + ROWS.replace("g\n", "g" * 200_000 + "\n"): r"line 3 is not CSV \(field larger than field limit",
    KERNELS.replace("(ns)", " " * 20_000 + "(ns" + " " * 20_000 + ")") + ROWS: "no known unit of time",
    "x" * 200_000 + "\n" + SKIPPED[:5] + "\n": "no line is the header of cuda_gpu_kern_sum",
    "Name," * 200_000 + "\n": "no line is the header of cuda_gpu_kern_sum",
}


@pytest.mark.parametrize(("text", "message"), BAD.items())
def test_bad_files_get_one_clear_error(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ReportError, match=message) as caught:
        load_report(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_header_of_many_blanks_is_read(tmp_path):
    blanks = " " * 20_000
    path = written(tmp_path,
                   KERNELS.replace("Med (ns)", f"a{blanks}b").replace("(ns)", f"{blanks}(ns){blanks}") + ROWS)
    frame = load_report(path)
    assert frame["total_time_ns"].tolist() == [3000, 1000] and frame["med_ns"].isna().all()


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e"])
def test_only_nsys_own_ends_of_lines_end_a_line(tmp_path, end):
    frame = load_report(written(tmp_path, KERNELS + ROWS.replace("g\n", f"g{end}h\n")))
    assert frame["name"].tolist() == ["void f<int, 4>(int, float)", f"g{end}h"]


def test_whole_numbers_are_read_to_the_last_digit(tmp_path):
    path = written(tmp_path, KERNELS + ROWS.replace("3000", "9007199254740993"))
    assert load_report(path)["total_time_ns"].tolist() == [9007199254740993, 1000]


def test_a_file_without_lines_and_a_pipe_are_refused_at_once(tmp_path):
    path = written(tmp_path, KERNELS)
    os.truncate(path, 200_000_000)
    with pytest.raises(ReportError,
                       match="line 2 is longer than 1,048,576 bytes, expected the report cuda_gpu_kern_sum"):
        load_report(path)
    os.mkfifo(tmp_path / "run_cuda_api_sum.csv")
    with pytest.raises(ReportError, match="is no regular file"):
        load_report(tmp_path / "run_cuda_api_sum.csv")


def test_files_that_are_not_there_or_not_reports(tmp_path):
    with pytest.raises(ReportError,
                       match="run_cuda_api_sum.csv: no such file, expected the report cuda_api_sum"):
        load_report(tmp_path / "run_cuda_api_sum.csv")
    with pytest.raises(ReportError,
                       match=r"table.csv: the file's name tells no report, expected it to end in one of cuda_gpu"):
        load_report(tmp_path / "table.csv")
    path = tmp_path / "run_cuda_api_sum.csv"
    path.write_bytes(b"Time (%),Total \xff\n")
    with pytest.raises(ReportError, match="byte 15 is not UTF-8"):
        load_report(path)


def test_a_file_of_any_name_can_be_loaded_as_the_report_that_it_is(tmp_path):
    path = tmp_path / "kernels_base.csv"
    path.write_text(KERNELS + ROWS)
    assert len(load_report(path, "cuda_gpu_kern_sum")) == 2


def test_one_bad_report_leaves_the_others(tmp_path):
    written(tmp_path, KERNELS + ROWS, "gpukernsum")  # the file's name until 2022
    written(tmp_path, KERNELS + ROWS, "cuda_api_sum")
    frames, errors = load_reports(tmp_path, "run", ["cuda_gpu_kern_sum", "cuda_api_sum", "nvtx_kern_sum"])
    assert list(frames) == ["cuda_gpu_kern_sum"]
    assert [Path(str(error).split(":")[0]).name for error in errors] == ["run_cuda_api_sum.csv",
                                                                         "run_nvtx_kern_sum.csv"]


def test_an_export_older_than_its_capture_is_stale(tmp_path):
    export, capture = written(tmp_path, KERNELS + ROWS), tmp_path / "run.nsys-rep"
    with pytest.raises(ReportError, match=r"run.nsys-rep: no such file"):
        check_fresh(export, capture)
    capture.touch()
    os.utime(capture, (1000, 1000))
    os.utime(export, (1000, 1000))
    check_fresh(export, capture)
    os.utime(export, (955, 955))
    with pytest.raises(ReportError,
                       match=r"run_cuda_gpu_kern_sum.csv: is 45 s older than .*run.nsys-rep, .*--force-export=true"):
        check_fresh(export, capture)
