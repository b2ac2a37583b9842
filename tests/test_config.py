"""Test configurations: bounds, run ids, labels and error messages."""

import json

import pytest
from pydantic import ValidationError

from conftest import TINY
from stepscope.config import (
    EDITIONS,
    PRECISIONS,
    SIZES,
    ConfigError,
    StepConfig,
    assigned_constants,
    configure,
    from_notebook,
    require_device,
    require_parameters,
    resolve_device,
    resolve_size,
    studies,
    truncated_repr,
)


@pytest.mark.parametrize("study", studies())
def test_config_round_trips_through_json(study):
    fields = {"device": "cpu", "size": "nano", "context_length": 16}
    if study == "attention":
        fields = {"device": "cpu", "d_model": 16}
    if study == "your_model":
        fields = {"device": "cpu", "model": "mine:build", "source": "0123456789ab"}
    config = configure(study, **fields)
    again = configure(**json.loads(config.model_dump_json()))
    assert again == config and again.run_id == config.run_id
    assert config.run_id.endswith(config.digest()) and config.shape in config.run_id
    assert all(c.isalnum() or c in "-._" for c in config.run_id)


def test_run_id_is_independent_of_how_the_size_is_given(tiny):
    nano = SIZES["nano"]._asdict()
    assert tiny(size=None, **nano) == tiny() and tiny(size=None, **nano).size == "nano"
    assert tiny(size=None, **nano | {"num_heads": 4}).size == "custom"
    changes = {
        "seed": 1,
        "batch_size": 2,
        "context_length": 9,
        "precision": "bf16",
        "vocab_size": 51,
        "device": "cuda",
        "optimizer": "fused",
        "timed_steps": 3,
        "compile": "blocks",
    }
    changed = [tiny(**{field: value}) for field, value in changes.items()]
    assert len({config.run_id for config in (tiny(), *changed)}) == len(changes) + 1


def test_different_runs_have_different_labels(tiny):
    configs = [
        tiny(),
        tiny(seed=1),
        tiny(optimizer="fused"),
        tiny(compile="blocks"),
        tiny(repeat=2),
        tiny(study="ladder", batch_sizes=[1, 2]),
        tiny(size=None, d_model=8, d_ff=3, num_layers=1, num_heads=2),
    ]
    assert len({config.label for config in configs}) == len(configs)
    assert "batch_sizes 1/2" in configs[5].label and "optimizer fused" in configs[2].label
    assert {*configs[6].run_id.split("-")} > {"d8", "f3", "l1", "h2", "ctx8", "fp32"}


@pytest.mark.parametrize(
    "name, edition, size",
    [
        ("xl", None, "xl"),
        ("xl", 2025, "xl"),
        ("xl", 2026, "2.7B"),
        ("10B", 2026, "10B"),
        ("nano", 2026, "nano"),
    ],
)
def test_size_name_depends_on_the_edition(name, edition, size):
    assert resolve_size(name, edition) == size
    assert configure("memory", **TINY | {"size": name}, edition=edition).size == size


@pytest.mark.parametrize(
    "name, edition, words",
    [
        ("2.7B", 2026, "calls 2.7B xl"),
        ("10B", 2025, "2025 edition has small"),
        ("small", 2024, "2025 and 2026"),
        ("huge", None, "known sizes are small"),
        (3, None, "known sizes"),
        ("xl", "2026", "editions are"),
        ("xl", 0, "editions are"),
        (["xl"], 2026, "2026 edition has"),
    ],
)
def test_unknown_size_is_rejected(name, edition, words):
    with pytest.raises(ConfigError, match=words):
        resolve_size(name, edition)


def test_edition_2026_sizes_match_the_handout():  # test_model.HANDOUT covers the 2025 edition
    assert SIZES[EDITIONS[2026]["xl"]] == (2560, 10240, 32, 32)
    assert SIZES[EDITIONS[2026]["10B"]] == (4608, 12288, 50, 36)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"size": "small", "d_model": 8}, "d_model: got 8, but size 'small' has 768"),
        ({"context_length": "8"}, "context_length: got '8'"),
        ({"batch_size": True}, "batch_size: got True"),
        ({"precision": "fp8"}, "precision: got 'fp8'"),
        ({"device": "tpu"}, "device: got 'tpu'"),
        ({"nonsense": 1}, "nonsense: no such field"),
        ({"size": None, "d_model": 6, "d_ff": 1, "num_layers": 1, "num_heads": 4}, "must divide d_model = 6"),
        ({"size": None, "d_model": 6, "d_ff": 1, "num_layers": 1, "num_heads": 2}, "must be even"),
        ({"size": None}, "d_model: not given"),
        (
            {"size": None, "edition": 2026, "d_model": 8},
            "edition: got 2026, but an edition only applies to a named size",
        ),
        ({"context_length": 10**5000}, "context_length: got a huge int"),
        ({"context_length": None}, "context_length: not given"),
    ],
)
def test_config_error_names_the_field_and_its_value(tiny, fields, words):
    with pytest.raises(ConfigError) as error:
        tiny(**fields)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "field, least, most",
    [
        ("context_length", 1, 2**24),
        ("batch_size", 1, 2**20),
        ("timed_steps", 1, 10**6),
        ("warmup_steps", 0, 10**6),
        ("vocab_size", 2, 2**24),
        ("seed", 0, 2**63 - 1),
        ("num_layers", 1, 10_000),
        ("d_ff", 1, 2**20),
        ("d_model", 2, 2**20),
    ],
)
def test_numeric_fields_accept_only_values_within_bounds(tiny, field, least, most):
    model = {"size": None, "d_model": 2, "d_ff": 3, "num_layers": 1, "num_heads": 1}
    assert [getattr(tiny(**model | {field: number}), field) for number in (least, most)] == [least, most]
    for number in (least - 1, most + 1 + (field == "d_model")):  # an odd width would raise a different error
        with pytest.raises(ConfigError, match=f"{field}: got {number}"):
            tiny(**model | {field: number})


def test_config_is_frozen(tiny):
    with pytest.raises(ValidationError, match="frozen"):
        tiny().seed = 1


def test_unknown_study_is_rejected():
    for study in ("warmup", 3, None):
        with pytest.raises(ConfigError, match="known studies are benchmark"):
            configure(study)


def test_step_config_keeps_the_runs_fields_and_applies_changes(tiny):
    step = tiny(study="ladder", seed=3).step(attention="sdpa", device="cuda")
    assert type(step) is StepConfig and step.attention == "sdpa" and step.device == "cuda"
    assert step.seed == 3 and step.size == "nano" and step.vocab_size == TINY["vocab_size"]
    assert step.step() == step
    with pytest.raises(ValidationError):
        tiny().step(attention="none")


def test_notebook_parameters_set_the_studys_fields():
    names = {
        "size": "nano",
        "context_length": 8,
        "seed": 4,
        "mode": "of something else",
        "config": object(),
        "device": "cpu",
        "run_folder": "",
        "batch_size": None,
    }
    config = from_notebook("ladder", names)  # the ladder always measures full steps
    assert (config.size, config.seed, config.mode, config.batch_size) == ("nano", 4, "step", 4)
    config = from_notebook("benchmark", names | {"warmup_steps": 0, "optimizer": "fused"})
    assert (config.warmup_steps, config.optimizer) == (0, "fused")


def test_unknown_notebook_parameter_is_rejected():
    cell = "import os\nsize = 'nano'\nleft = right = 1\nseed: int = 4\nrun_folder: str = ''"
    given = "# Parameters\nsize = 'tiny'\nright = 2\nsteps = 3\nrun_folder = 'here'\n"
    require_parameters({"In": ["", cell, given, "# Parameters of mine\nsise = 1", "sise = 1"]}, ["steps"])
    require_parameters({}), require_parameters({"In": [given]})
    wrong = {
        "sise = 'tiny'": "sise: no such parameter; did you mean size",
        "os = 1": "os: no such",
        "steps = 3": "steps: no such",
    }
    for line, words in wrong.items():
        with pytest.raises(ConfigError, match=words):
            require_parameters({"In": ["", cell, f"# Parameters\n{line}\n"]})


def test_assigned_constants_ignores_cells_with_other_code():
    assert assigned_constants("from os import path\na = b = [1]\nc: int = -2") == ["a", "b", "c"]
    for cell in ("a = 1\nprint(a)", "a = 1\nb = a", "a = (", "a = 1\nfor b in (1, 2): pass", "a: int"):
        assert assigned_constants(cell) == [], cell


@pytest.mark.parametrize(
    ("capability", "device", "supported", "error"),
    [
        (None, "cpu", ["fp32", "bf16", "fp16"], "support TF32"),
        (None, "cuda", [], "finds no CUDA GPU"),
        ((7, 5), "cuda", ["fp32", "fp16"], r"T4 has compute capability 7\.5"),
        ((8, 0), "cuda", ["fp32", "tf32", "bf16", "fp16"], ""),
    ],
)
def test_unsupported_precision_is_rejected_before_anything_starts(
    tiny, monkeypatch, capability, device, supported, error
):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "T4")
    assert resolve_device("auto") == ("cuda" if capability else "cpu") and resolve_device("tpu") == "tpu"
    for precision in PRECISIONS:
        config = tiny(device=device, precision=precision)
        if precision in supported:
            require_device(config)
        else:
            with pytest.raises(ConfigError, match=error):
                require_device(config)


def test_truncated_repr_is_short_and_on_one_line():
    assert len(truncated_repr("x" * 10**6)) < 120 and "\n" not in truncated_repr("a\nb")
    nested = ["x" * 100] * 10
    for _ in range(10**5):  # the complete repr wouldn't fit in memory
        nested = [nested] * 10
    assert len(truncated_repr(nested)) < 200
