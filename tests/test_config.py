"""Configurations: what is allowed, how it is named, and what an error says."""

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
def test_every_study_can_be_configured_and_comes_back_from_json(study):
    fields = {"device": "cpu", "size": "nano", "context_length": 16}
    if study == "attention":
        fields = {"device": "cpu", "d_model": 16}
    config = configure(study, **fields)
    again = configure(**json.loads(config.model_dump_json()))
    assert again == config and again.run_id == config.run_id
    assert config.run_id.endswith(config.digest()) and f"ctx{config.context_length}" in config.run_id
    assert all(c.isalnum() or c in "-._" for c in config.run_id)


def test_a_run_id_names_the_configuration_whatever_spelled_it(tiny):
    nano = SIZES["nano"]
    spelled = tiny(size=None, **nano._asdict())
    assert spelled == tiny() and spelled.size == "nano"
    assert tiny(warmup_steps=0).run_id == tiny().run_id  # TINY's own value
    assert tiny(size=None, **nano._asdict() | {"num_heads": 4}).size == "custom", (
        "other heads are another size"
    )
    changed = [
        tiny(**{field: value})
        for field, value in {
            "seed": 1,
            "batch_size": 2,
            "context_length": 9,
            "precision": "bf16",
            "vocab_size": 51,
            "device": "cuda",
            "optimizer": "fused",
            "timed_steps": 3,
            "compile": "blocks",
        }.items()
    ]
    assert len({config.run_id for config in (tiny(), *changed)}) == len(changed) + 1


def test_runs_that_differ_have_labels_that_differ(tiny):
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
    assert configs[0].shape == "nano" and configs[6].label.startswith("benchmark d8-f3-l1-h2 ctx8 ")
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
def test_a_size_has_one_name_a_year(name, edition, size):
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
def test_a_size_that_is_none_is_refused(name, edition, words):
    with pytest.raises(ConfigError, match=words):
        resolve_size(name, edition)


def test_an_edition_holds_the_handouts_shapes():  # 2025's: test_model.HANDOUT
    assert SIZES[EDITIONS[2026]["xl"]] == (2560, 10240, 32, 32)
    assert SIZES[EDITIONS[2026]["10B"]] == (4608, 12288, 50, 36)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"size": "small", "d_model": 8}, "d_model: got 8, but size 'small' has 768"),
        ({"context_length": "8"}, "context_length: got '8'"),
        ({"context_length": 0}, "context_length: got 0"),
        ({"timed_steps": 0}, "timed_steps: got 0"),
        ({"warmup_steps": -1}, "warmup_steps: got -1"),
        ({"vocab_size": 1}, "vocab_size: got 1"),
        ({"seed": -1}, "seed: got -1"),
        ({"batch_size": True}, "batch_size: got True"),
        ({"precision": "fp8"}, "precision: got 'fp8'"),
        ({"device": "tpu"}, "device: got 'tpu'"),
        ({"nonsense": 1}, "nonsense: no such field"),
        ({"size": None, "d_model": 6, "d_ff": 1, "num_layers": 1, "num_heads": 4}, "must divide d_model = 6"),
        ({"size": None, "d_model": 6, "d_ff": 1, "num_layers": 1, "num_heads": 2}, "must be even"),
        ({"size": None}, "d_model: not given"),
        (
            {"size": None, "edition": 2026, "d_model": 8},
            "edition: got 2026, but it only applies to a named size",
        ),
        ({"context_length": 10**5000}, "context_length: got a huge int"),
        ({"context_length": None}, "context_length: not given"),
    ],
)
def test_an_error_says_the_field_what_it_was_and_what_is_allowed(tiny, fields, words):
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
def test_a_number_has_its_bounds(tiny, field, least, most):
    own = {"size": None, "d_model": 2, "d_ff": 3, "num_layers": 1, "num_heads": 1}
    assert [getattr(tiny(**own | {field: number}), field) for number in (least, most)] == [least, most]
    for number in (least - 1, most + 1 + (field == "d_model")):  # an odd width is refused for its odd heads
        with pytest.raises(ConfigError, match=f"{field}: got {number}"):
            tiny(**own | {field: number})
    if field in own:
        with pytest.raises(ConfigError, match=f"{field}: not given"):
            tiny(**own | {field: None})
    with pytest.raises(ValidationError, match="frozen"):
        setattr(tiny(), field, least)


def test_a_study_that_is_none_is_refused():
    for study in ("warmup", 3, None):
        with pytest.raises(ConfigError, match="known studies are benchmark"):
            configure(study)


def test_the_plain_step_of_a_run_has_its_own_fields_and_the_changes(tiny):
    step = tiny(study="ladder", seed=3).step(attention="sdpa", device="cuda")
    assert type(step) is StepConfig and step.attention == "sdpa" and step.device == "cuda"
    assert step.seed == 3 and step.size == "nano" and step.vocab_size == TINY["vocab_size"]
    own = StepConfig(
        device="cpu",
        size="micro",
        vocab_size=51,
        context_length=9,
        batch_size=2,
        precision="bf16",
        warmup_steps=1,
        timed_steps=3,
        seed=4,
        mode="forward",
        attention="sdpa",
        compile="blocks",
        optimizer="fused",
    )
    assert own.step() == own
    with pytest.raises(ValidationError):
        tiny().step(attention="none")


def test_a_notebooks_parameters_are_the_free_fields():
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
    config = from_notebook("ladder", names)  # whose mode is fixed
    assert (config.size, config.seed, config.mode, config.batch_size) == ("nano", 4, "step", 4)
    config = from_notebook("benchmark", names | {"warmup_steps": 0, "optimizer": "fused"})
    assert (config.warmup_steps, config.optimizer) == (0, "fused"), (
        "0 is given, and of two values each can be"
    )


def test_a_parameter_that_a_notebook_has_not_is_refused():
    own = "import os\nsize = 'nano'\nleft = right = 1\nseed: int = 4\nrun_folder: str = ''"
    given = "# Parameters\nsize = 'tiny'\nright = 2\nsteps = 3\nrun_folder = 'here'\n"
    require_parameters({"In": ["", own, given, "# Parameters of mine\nsise = 1", "sise = 1"]}, ["steps"])
    require_parameters({}), require_parameters({"In": [given]})
    for wrong, words in (
        ("sise = 'tiny'", "sise: no such parameter; size may be meant"),
        ("os = 1", "os: no such"),
    ):
        with pytest.raises(ConfigError, match=words):
            require_parameters({"In": ["", own, f"# Parameters\n{wrong}\n"]})
    with pytest.raises(ConfigError, match="steps: no such"):
        require_parameters({"In": ["", own, given]})


def test_only_a_cell_of_constants_sets_parameters():
    assert assigned_constants("from os import path\na = b = [1]\nc: int = -2") == ["a", "b", "c"]
    for cell in ("a = 1\nprint(a)", "a = 1\nb = a", "a = (", "a = 1\nfor b in (1, 2): pass", "a: int"):
        assert assigned_constants(cell) == [], cell


def test_what_a_device_lacks_is_said_before_anything_starts(tiny, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu" and resolve_device("tpu") == "tpu"
    with pytest.raises(ConfigError, match="no TF32"):
        require_device(tiny(precision="tf32"))
    with pytest.raises(ConfigError, match="sees no CUDA GPU"):
        require_device(tiny(device="cuda"))
    for precision in {*PRECISIONS} - {"tf32"}:
        require_device(tiny(precision=precision))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "T4")
    with pytest.raises(ConfigError, match=r"T4 has compute capability 7\.5"):
        require_device(tiny(device="cuda", precision="bf16"))
    require_device(tiny(device="cuda", precision="fp16"))
    with pytest.raises(ConfigError, match="tf32.* needs 8.0"):
        require_device(tiny(device="cuda", precision="tf32"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    for precision in PRECISIONS:
        require_device(tiny(device="cuda", precision=precision))


def test_a_value_is_shown_on_one_line_and_cut():
    assert len(truncated_repr("x" * 10**6)) < 120 and "\n" not in truncated_repr("a\nb")
    nested = ["x" * 100] * 10
    for _ in range(10**5):  # which whole would be longer than any memory
        nested = [nested] * 10
    assert len(truncated_repr(nested)) < 200
