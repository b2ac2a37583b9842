"""Records, sweep files and folders from anywhere: refused in one line that can be shown, or believed safely."""

import json
import os

import pytest
from pydantic import ValidationError

from conftest import TINY, put, record_of
from stepscope.model.accounting import peak
from stepscope.runs.record import Record, RecordError, read_record
from stepscope.runs.sweep_file import SweepError, find_sweeps, load_sweeps, sweep_description
from stepscope.yaml_files import YamlFileError, load_yaml

TAG = "<a href=//x style=position:fixed;inset:0 onclick=alert(1)>\x1b[31mx</a>\n"


def altered(place, change):
    path = place / "record.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.update(beside=[TAG]),
        lambda r: r.update(status=TAG),
        lambda r: r.update(run_id="../../etc"),
        lambda r: r["config"].update(size=TAG),
        lambda r: r["config"].update(study="memory"),
        lambda r: r["config"].update(device="auto"),
        lambda r: r["config"].update(seed=1),  # another run's
        lambda r: r.update(study="memory"),
        lambda r: r.update(run_id="another"),
        lambda r: r["config"].clear(),
        lambda r: r.update(config=[1]),
        lambda r: r.update(tables={"../x": {"file": "x", "sha256": "0" * 64}}),
        lambda r: r.update(tables={"x": {"file": "/etc/passwd", "sha256": "0" * 64}}),
        lambda r: r.update(tables={"x": {"file": "../../../secret", "sha256": "0" * 64}}),
        lambda r: r.update(tables={"x": {"file": "x\0", "sha256": "0" * 64}}),
        lambda r: r.update(results={"x": [1]}),
        lambda r: r.update(duration_s=1e300),
        lambda r: r.update(started_at="9999-12-31T23:59:59-12:00"),
        lambda r: r.update(started_at="2025-01-01T00:00:00"),  # no zone
        lambda r: r.update(schema_version=99),
    ],
)
def test_a_record_that_is_not_believed_is_named_on_one_line(store, tiny, change):
    place = put(store, tiny())
    altered(place, change)
    records, errors = store.records()
    assert not records and len(errors) == 1
    assert str(errors[0]).isprintable() and len(str(errors[0])) < 1000
    with pytest.raises(RecordError):
        read_record(place)


def test_a_record_of_an_older_schema_is_refused_in_a_sentence_that_says_so(store, tiny):
    place = put(store, tiny())
    altered(place, lambda record: record.update(schema_version=2))
    records, errors = store.records()
    assert not records and len(errors) == 1
    assert place.name in str(errors[0]) and "schema_version: got 2, but input should be 3" in str(errors[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.update(run_id="x/y"),
        lambda r: r.update(run_id="x\n"),
        lambda r: r.update(software={"cuda": 2**63}),
        lambda r: r.update(duration_s=-1),
        lambda r: r.update(measuring_s=-1),
        lambda r: r.update(notebook_sha256="g" * 64),
        lambda r: r.update(started_at="1999-12-31T00:00:00Z"),
        lambda r: r.update(started_at="2200-01-01T00:00:00Z"),
        lambda r: r["machine"].update(ram_gib=float("inf")),
        lambda r: r["machine"].update(cpu_cores=-1),
        lambda r: r["tables"]["times"].update(rows=-1),
        lambda r: r["tables"]["times"].update(rows=2**63),
        lambda r: r["tables"]["times"].update(sha256="0" * 63),
        lambda r: r["tables"]["times"].update(beside=1),
    ],
)
def test_each_field_of_a_record_holds_what_a_path_or_a_table_can(tiny, change):
    table = {"file": "times.parquet", "rows": 1, "sha256": "0" * 64}
    content = record_of(tiny(), tables={"times": table}, machine={"ram_gib": 1.0, "cpu_cores": 2}).model_dump(
        mode="json"
    )
    Record.model_validate(content)
    change(content)
    with pytest.raises(ValidationError):
        Record.model_validate(content)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[" * 10**5, b'{"a": ' * 10**4, b"9" * 10**6, b" " * (2**24 + 1)]
)
def test_a_record_that_is_no_record_is_named(store, tiny, content):
    place = put(store, tiny())
    (place / "record.json").write_bytes(content)
    assert len(store.records()[1]) == 1


def test_folders_with_odd_names_are_named_on_one_line(store):
    names = ["<b onclick=alert(1)>", "a\nb", "\x1b[2J", "é" * 100]
    for name in names:
        (store.root / "benchmark" / name).mkdir(parents=True)
    (store.root / "x\ny" / "z").mkdir(parents=True)
    errors = store.records()[1]
    assert len(errors) == len(names) + 1 and all(str(error).isprintable() for error in errors)


def test_texts_of_a_record_are_kept_as_they_are(store, tiny):
    """Who prints them escapes them: a record is data."""
    put(store, tiny(), cause=TAG, status="failed", results={"finding": TAG, "beyond int64": 2**70})
    record = store.find(tiny())
    assert record.cause == TAG and record.results == {"finding": TAG, "beyond int64": float(2**70)}


# -- sweep files --------------------------------------------------------------------------------------------

BLOCK = {"study": "benchmark", "fixed": TINY}
# A few lines that stand for ten to the twentieth numbers.
LAUGHS = (
    "study: benchmark\nfixed:\n  size: nano\n  context_length: 8\n  device: &a0 cpu\n  seed:\n"
    + "".join(f"  - &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(20))
)


@pytest.mark.parametrize(
    "content, words",
    [
        ("[]", "contains no configurations"),
        ("[1]", "block 1: all: got 1, but input should be a valid dictionary"),
        ("{study: warmup}", "known studies are"),
        (
            "{study: benchmark, fixd: {}}",
            "fixd: no such field; fixed may be meant; known are study, fixed, axes",
        ),
        (
            "{study: benchmark, fixed: {size: nano, contxt_length: 8}}",
            "contxt_length: no such field; context_length may be meant; known are study",
        ),
        (
            "{study: ladder, axes: {optimization: [fp32]}}",
            "optimization: no such field; optimizations may be meant",
        ),
        ("{study: memory, fixed: {zzz: 1}}", "zzz: no such field; known are"),
        ("{study: benchmark, fixed: {study: nsys}}", "'study': given more than once"),
        ("{study: benchmark, fixed: {1: 2}}", "fixed.1.*should be a valid string"),
        ("{study: benchmark, axes: {seed: 1}}", r"axes\.seed: got 1, but input should be a valid list"),
        ("{study: benchmark, fixed: {seed: 1}, axes: {seed: [1]}}", "'seed': given more than once"),
        ("{study: benchmark, skip_too_large: 1}", "skip_too_large: got 1"),
        ("{study: benchmark, fixed: {size: nano}}", "context_length: not given"),
        (
            "{study: benchmark, fixed: {size: nano, context_length: 1:30}}",
            "context_length: got '1:30'",
        ),  # not 90
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
def test_a_sweep_file_that_cannot_be_run_is_refused_in_one_sentence(write_sweep, content, words):
    path = write_sweep(content)
    with pytest.raises((SweepError, YamlFileError), match=words) as error:
        load_sweeps([path], "cpu")
    assert str(error.value).startswith(str(path)) and len(str(error.value)) < 1000


def test_files_that_are_none_are_refused_and_never_waited_for(tmp_path):
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


def test_yaml_is_of_version_1_2(write_sweep):
    assert load_yaml(write_sweep("{a: 1:30, b: yes, c: 0o17, d: 1e3, e: 2.7B}")) == {
        "a": "1:30",
        "b": "yes",
        "c": 15,
        "d": 1000.0,
        "e": "2.7B",
    }


def test_a_block_is_the_product_of_its_axes_in_order_each_run_once(write_sweep):
    axes = {"context_length": [8, 16], "seed": [1, 2]}
    fixed = {name: value for name, value in TINY.items() if name != "context_length"}
    path = write_sweep(
        [{"study": "benchmark", "fixed": fixed, "axes": axes}, BLOCK | {"axes": {"seed": [2, 3]}}]
    )
    asked = load_sweeps([path, path], "cpu")
    assert [(c.context_length, c.seed) for c in asked.configs] == [(8, 1), (8, 2), (16, 1), (16, 2), (8, 3)]
    assert not asked.too_large


def test_only_where_the_file_says_so_is_what_does_not_fit_left_out(write_sweep):
    fields = {"vocab_size": 10_000, "batch_size": 4, "context_length": 512}
    block = {"study": "ladder", "fixed": fields, "axes": {"size": ["small", "2.7B"]}}
    sizes = [
        [c.size for c in load_sweeps([write_sweep(b)], "cuda", 40.0).configs]
        for b in (block, block | {"skip_too_large": True})
    ]
    assert sizes == [["small", "2.7B"], ["small"]]
    asked = load_sweeps([write_sweep(block | {"skip_too_large": True})], "cuda", 40.0)
    assert [config.size for config in asked.too_large] == ["2.7B"]


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
def test_a_run_is_left_out_where_not_even_the_smallest_of_what_it_measures_fits(study, fields, smallest):
    """What a benchmark's full step needs is no reason not to time its forward."""
    mode, precision = smallest
    fixed = {"size": "2.7B", "context_length": 512} | fields
    block = {"study": study, "fixed": fixed, "skip_too_large": True}
    kept = load_sweeps([block | {"skip_too_large": False}], "cuda").configs[0]
    least = peak(kept.step(mode=mode, precision=precision, compile="none"), mode).allocated / 2**30
    assert peak(kept.step(mode="step", precision="fp32", compile="none")).allocated / 2**30 > 40
    assert load_sweeps([block], "cuda", least).configs == [kept]
    with pytest.raises(SweepError, match="contains no configurations"):
        load_sweeps([block], "cuda", least * 0.999)


def test_on_a_24_gib_gpu_every_cell_of_the_handout_whose_forward_fits_is_asked_for():
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
def test_the_largest_model_is_the_largest_that_is_predicted_to_fit(gib, size, context):
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
def test_what_ships_can_be_run(name, device):
    paths = find_sweeps(name)
    asked = load_sweeps(paths, device, 139.8)
    assert asked.configs and {config.device for config in asked.configs} == {device}
    assert all(sweep_description(path) for path in paths)


@pytest.mark.parametrize("name", ["reference", "tour"])
def test_no_ladder_that_ships_replaces_another(name):
    """A report drops a run of which a later one measures a change again, with all that it alone has."""
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
