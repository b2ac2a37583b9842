"""Test that untrusted records, sweep files and folders are read safely or rejected with one printable line."""

import json
import os

import pytest

from conftest import TINY, put
from stepscope.model.accounting import peak
from stepscope.runs.record import RecordError, read_record
from stepscope.runs.sweep_file import SweepError, find_sweeps, load_sweeps, sweep_description
from stepscope.yaml_files import YamlFileError, load_yaml

TAG = "<a href=//x style=position:fixed;inset:0 onclick=alert(1)>\x1b[31mx</a>\n"


DIGEST = {"sha256": "0" * 64}
TABLE = {"file": "times.parquet", "rows": 1} | DIGEST


def alter(place, field, value):
    """Set a record's field to a value; ``config.size`` denotes the field ``size`` in ``config``."""
    path = place / "record.json"
    content = json.loads(path.read_text())
    *outer, name = field.split(".")
    parent = content
    for key in outer:
        parent = parent[key]
    parent[name] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beside", [TAG]),
        ("status", TAG),
        ("run_id", "../../etc"),
        ("run_id", "x/y"),
        ("run_id", "x\n"),
        ("run_id", "another"),
        ("config.size", TAG),
        ("config.study", "memory"),
        ("config.device", "auto"),
        ("config.seed", 1),  # from a different run
        ("study", "memory"),
        ("config", {}),
        ("config", [1]),
        ("tables", {"../x": {"file": "x"} | DIGEST}),
        ("tables.times.file", "/etc/passwd"),
        ("tables.times.file", "../../../secret"),
        ("tables.times.file", "x\0"),
        ("tables.times.rows", -1),
        ("tables.times.rows", 2**63),
        ("tables.times.sha256", "0" * 63),
        ("tables.times.beside", 1),
        ("results", {"x": [1]}),
        ("software", {"cuda": 2**63}),
        ("duration_s", 1e300),
        ("duration_s", -1),
        ("measuring_s", -1),
        ("notebook_sha256", "g" * 64),
        ("machine.ram_gib", float("inf")),
        ("machine.cpu_cores", -1),
        ("started_at", "9999-12-31T23:59:59-12:00"),
        ("started_at", "1999-12-31T00:00:00Z"),
        ("started_at", "2200-01-01T00:00:00Z"),
        ("started_at", "2025-01-01T00:00:00"),  # without a time zone
        ("schema_version", 99),
        ("schema_version", 2),
    ],
)
def test_error_names_the_record_with_an_invalid_field_on_one_line(store, tiny, field, value):
    machine = {"ram_gib": 1.0, "cpu_cores": 2}
    place = put(store, tiny(), tables={"times": TABLE}, machine=machine)
    assert len(store.records()[0]) == 1
    alter(place, field, value)
    records, (error,) = store.records()
    assert not records and str(error).isprintable() and len(str(error)) < 1000
    if field == "schema_version":
        assert f"schema_version: got {value}, but input should be 3" in str(error)
    with pytest.raises(RecordError):
        read_record(place)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[" * 10**5, b'{"a": ' * 10**4, b"9" * 10**6, b" " * (2**24 + 1)]
)
def test_file_that_is_not_a_record_is_rejected(store, tiny, content):
    place = put(store, tiny())
    (place / "record.json").write_bytes(content)
    assert len(store.records()[1]) == 1


def test_errors_print_hostile_folder_names_on_one_line(store):
    names = ["<b onclick=alert(1)>", "a\nb", "\x1b[2J", "é" * 100]
    for name in names:
        (store.root / "benchmark" / name).mkdir(parents=True)
    (store.root / "x\ny" / "z").mkdir(parents=True)
    errors = store.records()[1]
    assert len(errors) == len(names) + 1 and all(str(error).isprintable() for error in errors)


def test_record_texts_are_not_escaped_when_read(store, tiny):
    """Reading a record leaves its texts unchanged, because reports escape texts when they print them."""
    put(store, tiny(), cause=TAG, status="failed", results={"finding": TAG, "beyond int64": 2**70})
    record = store.find(tiny())
    assert record.cause == TAG and record.results == {"finding": TAG, "beyond int64": float(2**70)}


# -- sweep files --------------------------------------------------------------------------------------------

BLOCK = {"study": "benchmark", "fixed": TINY}
# These few lines would expand to 10^20 numbers.
LAUGHS = (
    "study: benchmark\nfixed:\n  size: nano\n  context_length: 8\n  device: &a0 cpu\n  seed:\n"
    + "".join(f"  - &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(20))
)


@pytest.mark.parametrize(
    "content, words",
    [
        ("[]", "no configurations"),
        ("[1]", "block 1: all: got 1, but input should be a valid dictionary"),
        ("{study: warmup}", "known studies are"),
        (
            "{study: benchmark, fixd: {}}",
            "fixd: no such field; did you mean fixed\\? The known names are study, fixed, axes",
        ),
        (
            "{study: benchmark, fixed: {size: nano, contxt_length: 8}}",
            "contxt_length: no such field; did you mean context_length\\? The known names are study",
        ),
        (
            "{study: ladder, axes: {optimization: [fp32]}}",
            "optimization: no such field; did you mean optimizations",
        ),
        ("{study: memory, fixed: {zzz: 1}}", "zzz: no such field; the known names are"),
        ("{study: benchmark, fixed: {study: nsys}}", "'study': given more than once"),
        ("{study: benchmark, fixed: {1: 2}}", "fixed.1.*should be a valid string"),
        ("{study: benchmark, axes: {seed: 1}}", r"axes\.seed: got 1, but input should be a valid list"),
        ("{study: benchmark, fixed: {seed: 1}, axes: {seed: [1]}}", "'seed': given more than once"),
        ("{study: benchmark, skip_too_large: 1}", "skip_too_large: got 1"),
        ("{study: benchmark, fixed: {size: nano}}", "context_length: not given"),
        # YAML 1.1 would read this as the number 90
        ("{study: benchmark, fixed: {size: nano, context_length: 1:30}}", "context_length: got '1:30'"),
        ("{study: benchmark, fixed: {size: nano, context_length: 8, device: yes}}", "device: got 'yes'"),
        (
            "{study: benchmark, fixed: {size: nano, context_length: 2025-01-01}}",
            "context_length: got datetime",
        ),
        ("a: 1\na: 2", "duplicate key"),
        (LAUGHS, "seed: got"),
        ("[" * 10**5 + "]" * 10**5, "recursion"),
        ("a: " + "9" * 5000, "digits"),
        ("{study: " + "x" * 20_000 + "}", "known studies are"),
        ("a: !!python/object:os.system {}", "could not determine a constructor"),
        ("{a: [", "line 1"),
        ("--- 1\n--- 2", "another document"),
        (
            "study: benchmark\naxes:" + "".join(f"\n  f{n}: {list(range(10))}" for n in range(6)),
            "at most 100,000 runs",
        ),
    ],
)
def test_invalid_sweep_file_raises_a_one_line_error(write_sweep, content, words):
    path = write_sweep(content)
    with pytest.raises((SweepError, YamlFileError), match=words) as error:
        load_sweeps([path], "cpu")
    assert str(error.value).startswith(str(path)) and len(str(error.value)) < 1000


def test_special_files_are_rejected_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"a: \xff")
    (tmp_path / "large").write_bytes(b"# " + b"x" * 2**20)
    for name in ("pipe", "none", "bytes", "large", "a" * 300, "a\0b", ""):
        with pytest.raises(YamlFileError) as error:
            load_yaml(tmp_path / name)
        assert len(str(error.value)) < 600
    for name in (str(tmp_path / "pipe"), str(tmp_path), "a" * 5000, "a\0b", ""):
        with pytest.raises(SweepError, match="expected a sweep file or the name of a built-in sweep"):
            find_sweeps(name)


def test_load_yaml_uses_yaml_1_2(write_sweep):
    assert load_yaml(write_sweep("{a: 1:30, b: yes, c: 0o17, d: 1e3, e: 2.7B}")) == {
        "a": "1:30",
        "b": "yes",
        "c": 15,
        "d": 1000.0,
        "e": "2.7B",
    }


def test_block_expands_to_the_product_of_its_axes_without_duplicates(write_sweep):
    axes = {"context_length": [8, 16], "seed": [1, 2]}
    fixed = {name: value for name, value in TINY.items() if name != "context_length"}
    path = write_sweep(
        [{"study": "benchmark", "fixed": fixed, "axes": axes}, BLOCK | {"axes": {"seed": [2, 3]}}]
    )
    asked = load_sweeps([path, path], "cpu")
    assert [(c.context_length, c.seed) for c in asked.configs] == [(8, 1), (8, 2), (16, 1), (16, 2), (8, 3)]
    assert not asked.too_large


@pytest.mark.parametrize(("skips", "sizes"), [(False, ["small", "2.7B"]), (True, ["small"])])
def test_runs_that_do_not_fit_are_skipped_only_when_requested(write_sweep, skips, sizes):
    fields = {"vocab_size": 10_000, "batch_size": 4, "context_length": 512}
    block = {"study": "ladder", "fixed": fields, "axes": {"size": ["small", "2.7B"]}, "skip_too_large": skips}
    plan = load_sweeps([write_sweep(block)], "cuda", 40.0)
    assert [config.size for config in plan.configs] == sizes
    assert [config.size for config in plan.too_large] == ["2.7B"] * skips


@pytest.mark.parametrize(
    "study, fields, smallest",
    [
        ("benchmark", {}, ("forward", "fp32")),
        ("nsys", {"precision": "bf16"}, ("forward", "bf16")),
        ("benchmark", {"compile": "model"}, ("forward", "fp32")),
        ("mixed_precision", {}, ("forward", "fp32")),
        ("mixed_precision", {"context_length": 2048}, ("forward", "tf32")),
        ("memory", {}, ("forward", "fp32")),
        ("memory", {"modes": ["step", "forward_backward"]}, ("forward_backward", "fp32")),
        ("ladder", {}, ("step", "fp32")),
    ],
)
def test_run_is_skipped_only_when_its_smallest_measurement_does_not_fit(study, fields, smallest):
    """A benchmark whose full step needs too much memory still times the forward pass."""
    mode, precision = smallest
    fixed = {"size": "2.7B", "context_length": 512} | fields
    block = {"study": study, "fixed": fixed, "skip_too_large": True}
    kept = load_sweeps([block | {"skip_too_large": False}], "cuda").configs[0]
    least = peak(kept.step(mode=mode, precision=precision, compile="none"), mode).allocated / 2**30
    assert peak(kept.step(mode="step", precision="fp32", compile="none")).allocated / 2**30 > 40
    assert load_sweeps([block], "cuda", least).configs == [kept]
    with pytest.raises(SweepError, match="no configurations"):
        load_sweeps([block], "cuda", least * 0.999)


def test_sweep_for_a_24_gib_gpu_includes_every_case_whose_forward_fits():
    block = {
        "study": "benchmark",
        "skip_too_large": True,
        "axes": {"context_length": [128, 256, 512, 1024], "size": ["small", "medium", "large", "xl", "2.7B"]},
    }
    plan = load_sweeps([block], "cuda", 23.5)
    assert (len(plan.configs), plan.too_large) == (20, [])


@pytest.mark.parametrize(
    "gib, size, context",
    [
        (None, "small", 512),
        (10, "small", 512),
        (40, "large", 512),
        (79, "2.7B", 512),
        (140, "2.7B", 512),
        (10, "medium", 128),
        (79, "large", 1024),
    ],
)
def test_largest_size_is_the_largest_predicted_to_fit(gib, size, context):
    block = {"study": "benchmark", "fixed": {"size": "LARGEST", "context_length": context}}
    assert load_sweeps([block], "cuda", gib).configs[0].size == size


@pytest.mark.parametrize(
    "name, device",
    [
        ("reference", "cuda"),
        ("tour", "cuda"),
        ("2026", "cuda"),
        ("cpu", "cpu"),
        ("benchmark", "cuda"),
        ("nsys", "cuda"),
        ("mixed_precision", "cuda"),
        ("memory", "cuda"),
        ("attention", "cuda"),
        ("ladder", "cuda"),
    ],
)
def test_built_in_sweeps_load_on_every_device(name, device):
    paths = find_sweeps(name)
    asked = load_sweeps(paths, device, 139.8)
    assert asked.configs and {config.device for config in asked.configs} == {device}
    assert all(sweep_description(path) for path in paths)


@pytest.mark.parametrize("name", ["reference", "tour"])
def test_built_in_ladders_do_not_repeat_measurements(name):
    """If a later run repeats a measurement of an earlier run, a report omits the entire earlier run."""
    ladders = [
        config for config in load_sweeps(find_sweeps(name), "cuda", 139.8).configs if config.study == "ladder"
    ]
    measured = [
        (config.size, config.context_length, config.vocab_size, batch, change)
        for config in ladders
        for batch in config.batch_sizes or [config.batch_size]
        for change in [
            *config.optimizations,
            *(f"without {one}" for one in config.ablations),
            *config.baselines,
        ]
    ]
    assert ladders and len({*measured}) == len(measured)
