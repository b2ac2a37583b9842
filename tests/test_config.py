"""Configurations, the sweep files that spell many, and the notebooks' parameters cells that spell one."""

import ast
import json
from typing import Literal, get_args, get_origin

import pytest
import torch

from conftest import TINY
from stepscope.config import (
    EDITION_SIZES,
    EDITIONS,
    SIZES,
    ConfigError,
    configure,
    free_fields,
    from_notebook,
    require_device,
    size_label,
    size_of,
    studies,
)
from stepscope.runs import estimate
from stepscope.runs.one_run import NOTEBOOKS, PROJECT
from stepscope.runs.sweep_file import SHIPPED, SweepError, find_sweeps, load_sweep, sweep_name, tour

STUDIES = studies()
CUSTOM = {"size": None, "d_model": 48, "d_ff": 96, "num_layers": 2, "num_heads": 4}


@pytest.mark.parametrize(
    "fields, told",
    [
        # field and value, then what is allowed
        ({"size": "huge"}, ["size: got 'huge'", *SIZES, "d_model, d_ff, num_layers and num_heads"]),
        ({"size": 10}, ["size: got 10", "small"]),
        ({"size": ["small"]}, ["size: got ['small']", "medium"]),
        ({"d_model": 64}, ["d_model: got 64", "'nano' has 32"]),
        (CUSTOM | {"num_heads": 5}, ["num_heads: got 5", "divide d_model = 48"]),
        (CUSTOM | {"num_heads": 16}, ["num_heads: got 16", "= 3 must be even"]),
        (CUSTOM | {"num_heads": 0}, ["num_heads: got 0", "greater than or equal to 1"]),
        (CUSTOM | {"d_model": 1, "num_heads": 1}, ["d_model: got 1", "greater than or equal to 2"]),
        (CUSTOM | {"d_ff": -1}, ["d_ff: got -1", "greater than or equal to 1"]),
        (CUSTOM | {"num_layers": 0}, ["num_layers: got 0", "greater than or equal to 1"]),
        (CUSTOM | {"num_layers": None}, ["num_layers: not given"]),
        ({"context_length": None}, ["context_length: not given"]),
        ({"context_length": 0}, ["context_length: got 0", "greater than or equal to 1"]),
        ({"context_length": "128"}, ["context_length: got '128'", "integer"]),
        ({"context_length": 128.5}, ["context_length: got 128.5", "integer"]),
        ({"batch_size": 0}, ["batch_size: got 0", "greater than or equal to 1"]),
        ({"batch_size": True}, ["batch_size: got True", "integer"]),
        ({"vocab_size": 1}, ["vocab_size: got 1", "greater than or equal to 2"]),
        ({"timed_steps": 0}, ["timed_steps: got 0", "greater than or equal to 1"]),
        ({"warmup_steps": -1}, ["warmup_steps: got -1", "greater than or equal to 0"]),
        ({"seed": -1}, ["seed: got -1", "greater than or equal to 0"]),
        ({"mode": "train"}, ["mode: got 'train'", "'forward', 'forward_backward' or 'step'"]),
        ({"precision": "fp8"}, ["precision: got 'fp8'", "'fp32', 'tf32', 'bf16' or 'fp16'"]),
        ({"attention": "flash"}, ["attention: got 'flash'", "'eager' or 'sdpa'"]),
        ({"optimizer": "sgd"}, ["optimizer: got 'sgd'", "'foreach', 'fused' or 'forloop'"]),
        ({"compile": "yes"}, ["compile: got 'yes'", "boolean"]),
        ({"device": "tpu"}, ["device: got 'tpu'", "'cuda' or 'cpu'"]),
        ({"context": 128}, ["context: no such field", "context_length"]),
        ({"study": "benchmarks"}, ["study: got 'benchmarks'", *STUDIES]),
    ],
)
def test_a_bad_value_is_one_sentence_with_field_value_and_what_is_allowed(fields, told):
    with pytest.raises(ConfigError) as caught:
        configure(**{"study": "benchmark"} | TINY | fields)
    text = str(caught.value)
    assert all(part in text for part in told), text
    assert "\n" not in text and text.count(": got ") + text.count(": no") == 1  # one complaint, on one line


def test_every_bad_field_is_told_at_once(tiny):
    with pytest.raises(
        ConfigError, match="context_length: got 0, .*; mode: got 'x', .*; steps: no such field"
    ):
        tiny(context_length=0, mode="x", steps=3)


def test_a_configuration_cannot_be_changed_behind_its_run_id(tiny):
    with pytest.raises(ValueError, match="frozen"):
        tiny().seed = 3


@pytest.mark.parametrize(
    "fields",
    [
        {"size": None, **SIZES["nano"]._asdict()},
        {"size": "custom", **SIZES["nano"]._asdict()},
        {"size": "nano", **SIZES["nano"]._asdict()},
        {"size": "nano", "d_ff": SIZES["nano"].d_ff},
        {
            "mode": "step",
            "precision": "fp32",
            "attention": "eager",
            "compile": False,
            "optimizer": "foreach",
            "seed": 0,
        },
        {"mode": None, "seed": None},
    ],
)
def test_one_configuration_has_one_run_id_however_it_is_spelled(tiny, fields):
    assert tiny(**fields) == tiny()
    assert tiny(**fields).run_id == tiny().run_id


def test_device_auto_is_the_device_that_is_here(tiny, monkeypatch):
    for present, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda present=present: present)
        for unsaid in ("auto", None):
            assert tiny(device=unsaid) == tiny(device=device)
            assert tiny(device=unsaid).run_id == tiny(device=device).run_id


def others(field):
    """Valid values of a field that are not its default."""
    if get_origin(field.annotation) is Literal:
        return [value for value in get_args(field.annotation) if value != field.default]
    if isinstance(field.default, list):
        item = get_args(field.annotation)[0]
        return [field.default[:-1] or [get_args(item)[-1] if get_origin(item) is Literal else 1]]
    return [not field.default if isinstance(field.default, bool) else field.default + 1]


def test_another_value_of_any_field_of_attention_alone_is_another_run_id():
    """Its shape is a head dimension and sequences; a model's dimensions are not its to choose."""
    fields = STUDIES["attention"].model_fields
    left = fields.keys() - {"study", "size", "d_model", "context_length", "device"}
    given = {"device": "cpu", "d_model": 16}
    variants = [
        configure("attention", **given | more)
        for more in (
            {},
            {"d_model": 32},
            {"device": "cuda"},
            *({field: value} for field in left for value in others(fields[field])),
        )
    ]
    assert len({config.run_id for config in variants}) == len(variants)
    assert all(config.context_length == max(config.sequences) for config in variants)
    with pytest.raises(ConfigError, match="num_heads"):
        configure("attention", **given, num_heads=2)


@pytest.mark.parametrize("study", sorted(STUDIES.keys() - {"attention", "processes"}))
def test_another_value_of_any_field_is_another_run_id(study, tiny):
    shape = {"size": None, "d_model": 48, "d_ff": 96, "num_layers": 3, "num_heads": 4}
    given = {
        "vocab_size": 51,
        "context_length": 9,
        "batch_size": 2,
        "device": "cuda",
        "warmup_steps": 2,
        "timed_steps": 3,
    }
    variants = [
        tiny(study=study),
        tiny(study=study, size="micro"),
        tiny(study=study, **shape),
        *(
            tiny(study=study, **shape | {field: value})
            for field, value in {"d_model": 96, "d_ff": 97, "num_layers": 4, "num_heads": 2}.items()
        ),
        *(tiny(study=study, **{field: value}) for field, value in given.items()),
    ]
    left = STUDIES[study].model_fields.keys() - shape.keys() - given.keys() - {"study"}
    assert left >= {"mode", "precision", "attention", "compile", "optimizer", "seed"}
    variants += [
        tiny(study=study, **{field: value})
        for field in left
        for value in others(STUDIES[study].model_fields[field])
    ]
    assert len({config.run_id for config in variants}) == len(variants)


def test_run_ids_stay_what_they_were():
    """Committed records are found by these names: whoever changes one renames every run there is."""
    assert (
        configure("benchmark", size="2.7B", context_length=512, device="cuda").run_id
        == "2.7B-ctx512-step-fp32-fa94b687"
    )
    assert (
        configure(
            "warmup",
            d_model=48,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            context_length=16,
            device="cpu",
            mode="forward",
            precision="bf16",
            warmup_steps=0,
        ).run_id
        == "custom-ctx16-forward-bf16-9bc48f81"
    )


def test_committed_records_are_found_by_their_configuration():
    folders = [
        path
        for runs in (PROJECT / "runs").glob("*/")
        if not runs.name.startswith("local-")
        for path in runs.glob("*/*/record.json")
    ]
    for path in folders:
        fields = json.loads(path.read_text(encoding="utf-8"))["config"]
        config = configure(**fields)
        assert config.study == path.parent.parent.name
        # What had something in a field that is gone cannot be asked for again; it keeps its name and is read.
        gone = fields.keys() - type(config).model_fields.keys() - config.retired.keys()
        assert any(fields[field] for field in gone) or config.run_id == path.parent.name


def test_the_sizes_of_the_handout():
    handout = {
        "small": (768, 3072, 12, 12),
        "medium": (1024, 4096, 24, 16),
        "large": (1280, 5120, 36, 20),
        "xl": (1600, 6400, 48, 25),
        "2.7B": (2560, 10240, 32, 32),
        "10B": (4608, 12288, 50, 36),
    }
    assert {name: tuple(SIZES[name]) for name in handout} == handout


def test_a_name_of_two_sizes_is_one_edition_s():
    assert size_of("xl", 2025) == "xl" and size_of("xl", 2026) == "2.7B"
    assert {size_of("small", year) for year in (None, *EDITIONS)} == {"small"}
    assert size_of("10B", 2026) == size_of("10B") == "10B" and size_of("2.7B", 2025) == size_of("2.7B") == "2.7B"
    assert all(size_of(name, year) in SIZES for year, names in EDITION_SIZES.items() for name in names)
    for name, year, end in (("10B", 2025, r"small, medium, large, xl, 2.7B \(10B is the 2026 edition's\)"),
                            ("2.7B", 2026, "small, medium, large, xl, 10B, and calls this size xl"),
                            ("nano", 2026, "10B .nano is of no edition: leave it out.")):
        with pytest.raises(ConfigError, match=f"size: got '{name}', but the {year} edition has .*{end}$"):
            size_of(name, year)
    with pytest.raises(ConfigError, match="1600/6400/48/25 in the 2025 edition and 2560/10240/32/32 in the 2026"):
        size_of("xl")
    with pytest.raises(ConfigError, match="edition: got 1999.* 2025 and 2026"):
        size_of("small", 1999)
    labels = {name: size_label(name) for name in SIZES}
    assert labels["2.7B"] == "2.7B (2026's xl)" and labels["xl"] == "xl (2025's)" and labels["small"] == "small"


def test_an_edition_in_a_configuration_names_its_size_and_no_run_anew():
    def of(**fields):
        return configure("benchmark", context_length=512, device="cpu", **fields)
    assert of(size="xl", edition=2026) == of(size="2.7B") and of(size="xl", edition=2025) == of(size="xl")
    assert of(size="xl").d_model == 1600  # as records have it
    for wrong in ({"size": "xl", "edition": "2026"}, {"size": "xl", "edition": [2026]}, {"size": ["xl"]},
                  {**SIZES["nano"]._asdict(), "edition": 2026}):
        with pytest.raises(ConfigError, match="^(edition|size): got"):
            of(**wrong)


def test_cuda_without_a_gpu(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match="device: got 'cuda', but torch .* sees no CUDA GPU here; 'cpu' and 'auto' are"
    ):
        require_device(tiny(device="cuda"))
    require_device(tiny(device="cpu"))


def test_precisions_that_a_device_lacks(tiny, monkeypatch):
    with pytest.raises(
        ConfigError, match="precision: got 'tf32', but a CPU has no TF32; fp32, bf16 and fp16 are possible"
    ):
        require_device(tiny(precision="tf32"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    for precision in ("tf32", "bf16"):
        with pytest.raises(
            ConfigError, match=f"precision: got '{precision}', but Old GPU has compute capability 7.5"
        ):
            require_device(tiny(device="cuda", precision=precision))
    require_device(tiny(device="cuda", precision="fp16"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    require_device(tiny(device="cuda", precision="bf16"))


# Sweep files


def test_a_sweep_is_the_product_of_its_axes_the_last_varying_fastest(write_sweep):
    path = write_sweep("""
study: benchmark
fixed: {device: cpu, size: nano, warmup_steps: 2}
axes:
  context_length: [8, 16]
  mode: [step, forward]
""")
    configs = load_sweep(path)
    assert [(c.context_length, c.mode) for c in configs] == [
        (8, "step"),
        (8, "forward"),
        (16, "step"),
        (16, "forward"),
    ]
    assert {(c.study, c.size, c.device, c.warmup_steps) for c in configs} == {("benchmark", "nano", "cpu", 2)}


def test_what_two_blocks_both_ask_for_is_run_once_and_in_the_first_ones_place(write_sweep, tiny):
    nano = {field: value for field, value in TINY.items() if field != "size"}
    path = write_sweep(
        [
            {"study": "benchmark", "fixed": TINY | {}, "axes": {"seed": [1, 0, 1]}},
            {"study": "benchmark", "fixed": nano | SIZES["nano"]._asdict(), "axes": {"seed": [0, 2]}},
            {"study": "warmup", "fixed": TINY | {}},
        ]
    )
    assert load_sweep(path) == [tiny(seed=1), tiny(seed=0), tiny(seed=2), tiny(study="warmup")]


@pytest.mark.parametrize(
    "content, told",
    [
        ("", ["block 1", "expected a mapping with study"]),
        ("[]", ["asks for no run"]),
        ("just words", ["block 1", "expected a mapping with study"]),
        ("study: [benchmark]", ["block 1", "study"]),
        ("study: benchmark\nfixd: {size: nano}", ["block 1", "fixd: unknown key", "study, fixed, axes"]),
        (
            "- {study: benchmark, fixed: {size: nano, device: cpu, context_length: 8}}\n"
            "- {study: benchmark, grid: {}}",
            ["block 2", "grid: unknown key"],
        ),
        ("study: benchmark\nfixed: [size, nano]", ["fixed: got ['size', 'nano']", "mapping"]),
        ("study: benchmark\nfixed: nano", ["fixed: got 'nano'", "mapping"]),
        ("study: benchmark\naxes: [size]", ["axes: got ['size']", "mapping"]),
        ("study: benchmark\naxes: {size: nano}", ["axes.size: got 'nano'", "list of one or more"]),
        ("study: benchmark\naxes: {size: []}", ["axes.size: got []", "list of one or more"]),
        (
            "study: benchmark\nfixed: {size: nano}\naxes: {size: [nano]}",
            ["size: given both in fixed and in axes"],
        ),
        ("study: benchmark\nfixed: {size: nano, colour: red, context_length: 8}", ["colour: no such field"]),
        ("study: benchmark\nfixed: {size: nano}\naxes: {context_length: [8, 0]}", ["context_length: got 0"]),
        ("study: lunch\nfixed: {size: nano}", ["study: got 'lunch'", *STUDIES]),
        (
            "study: benchmark\nfixed: {study: warmup, size: nano, context_length: 8}",
            ["fixed: got 'study'", "names of fields"],
        ),
        ("study: benchmark\nfixed: {8: nano}", ["fixed: got 8", "names of fields"]),
        ("study: benchmark\naxes: {8: [nano]}", ["axes: got 8", "names of fields"]),
        ("study: {", ["line 2", "plain YAML"]),
        ("study: benchmark\n\tfixed: {}", ["line 2", "tab", "plain YAML"]),
        (b"study: benchmark\nfixed: {size: n\xe4no}", ["not UTF-8"]),
    ],
)
def test_a_bad_sweep_file_is_one_line_that_names_file_place_and_what_is_expected(tmp_path, content, told):
    path = tmp_path / "some.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SweepError) as caught:
        load_sweep(path)
    text = str(caught.value)
    assert text.startswith(str(path)) and "\n" not in text and all(part in text for part in told), text


def test_a_folder_that_has_a_studys_name_is_not_taken_for_a_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # as a runs folder is
    (tmp_path / "nsys").mkdir()
    assert find_sweeps("nsys") == [SHIPPED / "nsys" / "sweep.yaml"]


def test_a_sweep_file_that_is_not_there_names_those_that_are(tmp_path):
    with pytest.raises(
        SweepError, match="nowhere.yaml: cannot be read .*No such file.* ship with stepscope: .*benchmark"
    ):
        load_sweep(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*/sweep*.yaml")), ids=sweep_name)
def test_shipped_sweeps_are_valid_and_of_their_study(path):
    assert path.parent.name in {config.study for config in load_sweep(path)}


def test_sweeps_are_found_by_their_studys_name():
    assert [sweep_name(path) for name in ("benchmark", "cpu") for path in find_sweeps(name)][:2] == [
        "benchmark",
        "benchmark-cpu",
    ]
    names = {name: [sweep_name(path) for path in find_sweeps(name)] for name in ("cpu", "reference")}
    assert names["reference"] == list(STUDIES)
    assert sorted(names["cpu"]) == sorted(f"{study}-cpu" for study in STUDIES)


# The tour

H100_MIB, H200_MIB = 81_559, 143_771


def toured(memory_mib, tmp_path):
    path = tmp_path / "tour.yaml"
    path.write_text(tour(memory_mib), encoding="utf-8")
    return load_sweep(path, "cuda")


def test_the_tour_is_of_every_study_with_the_ladder_first_and_few_runs(tmp_path):
    configs = toured(H200_MIB, tmp_path)
    assert configs[0].study == "ladder"
    assert {config.study for config in configs} == STUDIES.keys()
    assert len(configs) <= 20
    assert all("graph" not in config.rungs for config in configs if config.study == "ladder")


@pytest.mark.parametrize(
    ("memory_mib", "largest"), [(H200_MIB, "2.7B"), (H100_MIB, "2.7B"), (40_000, "large"), (1, "small")]
)
def test_the_tours_largest_model_fits_the_gpu(memory_mib, largest, tmp_path):
    """2.7B's peak is 67,449 MiB as measured, and large's 28,490."""
    sizes = {c.size for c in toured(memory_mib, tmp_path) if hasattr(c, "size")}
    assert sizes == {"small", largest}


def test_what_is_known_of_the_tours_runs_fits_into_the_quarter_of_an_hour_that_is_promised(tmp_path):
    known = {(row["study"], row["run_id"]): float(row["seconds"]) for row in estimate.table()}
    took = [known.get((config.study, config.run_id), 0) for config in toured(H200_MIB, tmp_path)]
    assert 0 < sum(took) < 14 * 60  # a minute is for rendering


def test_the_tour_shares_its_runs_with_the_reference(tmp_path):
    """Who goes on to the whole matrix does not measure again what tells the same."""
    reference = {(c.study, c.run_id) for path in find_sweeps("reference") for c in load_sweep(path, "cuda")}
    shared = [c for c in toured(H200_MIB, tmp_path) if (c.study, c.run_id) in reference]
    assert {c.study for c in shared} >= {"benchmark", "nsys", "memory", "warmup"}


def test_what_2026_asks_is_a_sweep_with_the_profiles_of_the_nsys_sweep():
    asked = {(config.study, config.run_id) for path in find_sweeps("2026") for config in load_sweep(path)}
    profiles = {name for study, name in asked if study == "nsys"}
    assert len(profiles) == 6 and {study for study, _ in asked} == {"memory", "attention", "nsys"}
    assert profiles <= {config.run_id for config in load_sweep(find_sweeps("nsys")[0])}


def test_arrangements_are_measured_in_a_run_of_their_own(tiny):
    with pytest.raises(ConfigError, match="stacks"):
        tiny(study="memory", stacks=[2], checkpoints=[1])
    assert tiny(study="memory", contexts=[8, 4]).context_length == 8


def test_the_shipped_benchmark_sweep_holds_the_handouts_matrix():
    asked = [
        c
        for c in load_sweep(find_sweeps("benchmark")[0])
        if c.optimizer == "foreach" and c.precision == "fp32" and c.attention == "eager" and not c.compile
    ]
    assert {(c.size, c.context_length, c.mode) for c in asked} >= {
        (size, context, mode)
        for size in ("small", "medium", "large", "xl", "2.7B")
        for context in (128, 256, 512, 1024)
        for mode in ("forward", "forward_backward", "step")
    }
    assert {(c.batch_size, c.vocab_size, c.warmup_steps, c.timed_steps) for c in asked} == {
        (4, 10_000, 5, 10)
    }


def test_the_warmup_sweep_clocks_every_step_of_every_size_from_the_first_on():
    """What the first w of them are left out of is w warm-up steps: 0, 1, 2 and 5 are all in one run."""
    plain = [config for config in load_sweep(find_sweeps("warmup")[0])
             if not config.profile and not config.one_layer_first]
    assert {config.size for config in plain} == {"small", "medium", "large", "xl", "2.7B"}
    assert {(config.warmup_steps, config.timed_steps) for config in plain} == {(0, 10)}


# Notebooks

ALL_NOTEBOOKS = sorted(NOTEBOOKS.glob("*.ipynb"))


def parameters_of(path):
    """The names and values that a notebook's parameters cell sets."""
    cells = [
        cell
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if "parameters" in cell["metadata"].get("tags", [])
    ]
    assert len(cells) == 1 and cells[0]["cell_type"] == "code"
    statements = ast.parse("".join(cells[0]["source"])).body
    return {statement.targets[0].id: ast.literal_eval(statement.value) for statement in statements}


@pytest.mark.parametrize("study", STUDIES)
def test_a_notebooks_parameters_are_its_studys_fields(study):
    names = parameters_of(NOTEBOOKS / f"{study}.ipynb")
    derived = {"attention": {"context_length"},  # the longest of the sequences
               "processes": {"context_length", "d_model"}}  # of the largest shape
    assert names.keys() == set(free_fields(study)) - derived.get(study, set()) | {"run_folder"}
    assert names["run_folder"] == ""  # by hand, nothing is written
    config = from_notebook(study, names)
    assert {field: value for field, value in names.items() if value not in (None, "auto", "")} == {
        field: getattr(config, field) for field, value in names.items() if value not in (None, "auto", "")
    }


@pytest.mark.parametrize("path", ALL_NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_have_parameters_and_no_outputs(path):
    parameters_of(path)
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, cell["source"]


def test_a_notebooks_other_variables_are_passed_over(tiny):
    assert (
        from_notebook("benchmark", TINY | {"d_model": None, "run_folder": ".", "json": json, "_": 3})
        == tiny()
    )
