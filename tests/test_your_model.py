"""Test the ladder on a user's model: bad input, isolation, kept optimizations, modules, and complete runs."""

import functools
import json
import math
import operator
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cells import run_cells
from conftest import ended, record_of
from stepscope import PROJECT
from stepscope.config import ConfigError, configure
from stepscope.ladder import loop as ladder_loop
from stepscope.ladder import numerics
from stepscope.optimizations import any_model
from stepscope.report import machine
from stepscope.report.load import load, read
from stepscope.runs.notebook import _write
from stepscope.studies.your_model import loop, source
from stepscope.studies.your_model.config import OPTIMIZATIONS, Config
from stepscope.studies.your_model.isolation import ProcessFailed, call_isolated, libraries_in
from stepscope.studies.your_model.loop import Ladder, why_dropped, why_dropped_launch_bound
from stepscope.studies.your_model.modules import ELSEWHERE, folded_paths
from stepscope.studies.your_model.rows import Job, Outcome, RowLoop, measure_modules
from stepscope.studies.your_model.source import ModelError, find
from stepscope.studies.your_model.subject import (
    FLOPS,
    examine,
    make_subject,
    varying_line,
    without_dropout,
)
from stepscope.studies.your_model.tables import SCHEMAS
from stepscope.views import Views

MODELS = Path(__file__).parent / "models"
EAGER = ["fp32", "channels_last", "bf16", "fused_adamw"]
HEAD = "import torch\nfrom torch import nn\n"


@pytest.fixture(autouse=True)
def imports(monkeypatch):
    """After each test, remove the model modules that the test imported, so that later tests import them again."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("mine", *[path.stem for path in MODELS.glob("*.py")]):
        sys.modules.pop(name, None)


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a model's source to a file and finds the file's function ``build``."""

    def make(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(text if "import" in text else HEAD + text)
        return find(f"{path}:build", tmp_path)

    return make


def configuration(place, **fields):
    return configure(
        "your_model", **{"device": "cpu", "timed_steps": 2, "warmup_steps": 0} | place.fields | fields
    )


@pytest.fixture
def ladder(tmp_path):
    """Return a function that makes a ladder for one of the tiny models."""

    def make(name, **fields):
        place = find(f"{MODELS / name}.py:build", tmp_path)
        return Ladder(place, configuration(place, **fields), tmp_path)

    return make


# -- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, words",
    [
        ("mine.py", "model: got 'mine.py', but expected FILE.py:FUNCTION or package.module:FUNCTION"),
        ("mine.py:", "expected FILE.py:FUNCTION"),
        ("mine.py:a b", "expected FILE.py:FUNCTION"),
        ("nowhere.py:build", "model: there is no file nowhere.py for 'nowhere.py'"),
        ("no.such.module:build", "model: there is no file module.py for 'no.such.module'"),
        ("stepscope.config:build", "config.py has no function build"),
    ],
)
def test_missing_model_is_reported_in_one_sentence(tmp_path, monkeypatch, model, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as error:
        find(model, tmp_path)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("def build():\n    raise KeyError('gone')", "mine.py:4: build raised KeyError: 'gone'"),
        ("raise OSError('early')\ndef build(): pass", "mine.py:3: build raised OSError: early"),
        ("def build():\n    return nn.Linear(2, 2)", "expected build to return (model, batch)"),
        ("def build():\n    return nn.Linear(2, 2), [1]", "but it returned 'Linear, list'"),
        ("def build(:\n", "invalid syntax (mine.py, line 3)"),
        ("def build():\n    return nn.ReLU(), {}", "the model has no trainable parameters"),
        (
            "def build():\n    return nn.Linear(2, 2), {'x': torch.zeros(2, device='meta')}",
            "'x': got a tensor on meta, but expected cpu",
        ),
        ("def build():\n    return nn.Linear(2, 2).half(), {}", "'weight': got torch.float16, but expected"),
        (
            "def build():\n    return nn.LazyLinear(2), {}",
            "weight has no shape yet; run the model on the batch",
        ),
        ("def build():\n    return torch.compile(nn.Linear(2, 2)), {}", "expected one without torch.compile"),
        ("'build'", "mine.py has no function build"),
        (
            "def build(size):\n    pass",
            "build raised TypeError: build() missing 1 required positional argument: 'size'",
        ),
    ],
)
def test_function_that_builds_no_model_is_reported_in_one_sentence(write, text, words):
    with pytest.raises(ModelError) as error:
        source.build(write(text), {}, "cpu", 0)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_error_names_the_unknown_argument(write):
    with pytest.raises(ModelError, match=r"build\(\) got an unexpected keyword argument 'size'"):
        source.build(write("def build(batch=1):\n    pass"), {"size": 3}, "cpu", 0)


def test_edit_that_keeps_the_files_size_and_time_is_measured(write, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    text = "def build(): return nn.Linear(2, {}), {{}}"
    for width in (3, 4):
        place = write(text.format(width))
        os.utime(place.path, (10**9, 10**9))
        model, _, _ = source.build(place, {}, "cpu", 0)
        assert model.out_features == width
        del sys.modules["mine"]


def test_file_edited_while_it_is_measured_is_rejected(write):
    place = write("def build(): return nn.Linear(2, 3), {}")
    place.path.write_text(place.path.read_text().replace("3", "4"))
    with pytest.raises(ModelError, match=r"mine\.py was edited while it was measured; run the command again"):
        source.build(place, {}, "cpu", 0)


@pytest.mark.parametrize(
    "forward, words",
    [
        ("self.linear(x)", "loss: got a tensor of shape (3, 2), but expected a scalar tensor"),
        ("self.linear(x).sum().detach()", "no parameter gets a gradient from the loss"),
        ("(x * x).sum().requires_grad_()", "no parameter gets a gradient from the loss"),
        (
            "(1, 2)",
            "loss: got tuple, but expected a scalar tensor, or an output with a scalar tensor as its loss; if",
        ),
        ("{'logits': x}", "loss: got dict"),
        ("{'loss': 1.0}", "loss: got float"),
        ("self.linear(x).sum() / 0", "loss: got "),
        (
            "nn.functional.embedding(x.int(), self.linear.weight, sparse=True).sum()",
            "linear.weight: got a sparse gradient",
        ),
        ("self.linear(x.flatten())", "mine.py:8: the model raised RuntimeError"),
    ],
)
def test_untrainable_model_is_rejected_with_a_reason(write, forward, words):
    text = f"""class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
    def forward(self, x):
        return {forward}
def build():
    return Model(), {{"x": torch.ones(3, 2)}}
"""
    subject = make_subject(write(text), {}, "cpu", 0)
    subject.load(0)
    with pytest.raises(ModelError) as error:
        examine(subject)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "async def make(): pass\nbuild: object = lambda: (nn.Linear(2, 2), {})",
        "\ufefffrom torch import nn\ndef build(): return nn.Linear(2, 2), {}",
        "if True:\n    def build(): return nn.Linear(2, 2), {}",
        "from collections import UserDict\nimport torch\nfrom torch import nn\n"
        "def build(): return nn.Linear(2, 2), UserDict()",
    ],
    ids=["annotated", "byte order mark", "indented", "mapping"],
)
def test_definition_can_have_any_form_and_the_batch_can_be_any_mapping(write, text):
    _, batch, _ = source.build(write(text), {}, "cpu", 0)
    assert batch == {}


def test_step_that_fails_in_fp32_ends_the_ladder(write, tmp_path):
    place = write("""calls = []
def loss(output, batch):
    calls.append(batch.pop("labels"))
    if len(calls) == 4:
        raise OSError("full")
    return output.sum()
def build():
    return nn.Linear(2, 2), {"input": torch.ones(1, 2), "labels": 0}, loss
""")
    with pytest.raises(ModelError, match="the step in fp32 failed: mine.py:7: OSError: full"):
        Ladder(place, configuration(place), tmp_path).measure()


def test_ladder_ends_with_a_traceback_when_building_the_model_fails(write, tmp_path, capsys):
    place = write("def build():\n    raise KeyError('gone')")
    with pytest.raises(ModelError, match="mine.py:4: build raised KeyError"):
        Ladder(place, configuration(place), tmp_path).measure()
    printed = capsys.readouterr().out
    assert "Traceback" in printed and "KeyError: 'gone'" in printed and str(tmp_path) not in printed


# -- the configuration ----------------------------------------------------------------------------------------


def test_run_id_depends_on_file_content_and_arguments_but_not_on_the_path(write, tmp_path):
    place = write("def build(): pass")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.py").write_bytes(place.path.read_bytes())
    same = find(f"{tmp_path}/elsewhere/mine.py:build", tmp_path)
    edited = write("def build(): pass  # edited")
    ids = [configuration(one).run_id for one in (place, same, edited)]
    ids.append(configuration(place, arguments="batch=2").run_id)
    assert ids[0] == ids[1] and len({*ids}) == 3 and all("mine-build" in one for one in ids)
    assert str(tmp_path) not in configuration(place).model_dump_json()


@pytest.mark.parametrize(
    "arguments", ["batch", "batch=", "batch=1 ", "b=/etc", "b=<b>", "b=__x__", "b=a\nc=d"]
)
def test_arguments_that_could_be_markup_or_paths_are_rejected(write, arguments):
    with pytest.raises(ConfigError, match="arguments"):
        configuration(write("def build(): pass"), arguments=arguments)


def test_arguments_become_python_values(write):
    config = configuration(
        write("def build(): pass"), arguments="a=1 b=2.5 c=true d=swin_t e=1e-3 f=-4 g=nan"
    )
    assert config.keywords == {"a": 1, "b": 2.5, "c": True, "d": "swin_t", "e": 1e-3, "f": -4, "g": "nan"}


def test_unusual_file_and_function_names_are_simplified_in_the_record(tmp_path):
    path = tmp_path / "__my-*model*__.py"
    path.write_text("def __build__(): pass")
    place = find(f"{path}:__build__", tmp_path)
    assert place.name == "my_model:build" and isinstance(configuration(place), Config)


# -- facts and transforms -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "preloaded"),
    [("import torch", []), ("from transformers import BertModel", ["transformers.modeling_utils"])],
)
def test_libraries_of_a_model_are_preloaded(text, preloaded):
    assert libraries_in(text) == preloaded


def test_examine_finds_the_synchronizing_line_and_counts_flops(tmp_path):
    subject = make_subject(find(f"{MODELS}/router.py:build", tmp_path), {}, "cpu", 0)
    subject.load(0)
    facts = examine(subject)
    assert facts["synchronizing"] == "router.py:15"
    forward = 2 * 4 * (8 * 8 + 8)  # FLOPs of one expert and of the gate, on four rows
    assert facts["flops"] == 2 * forward  # x doesn't need a gradient, so only the weights get one
    assert facts["parameters"] == 2 * (8 * 8 + 8) + 9


VARYING = """
import random

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.dropout = nn.Dropout(0.5)
        self.draws = iter(random.sample(range(1, 9), 8))

    def forward(self, x):
        length = %s
        return self.dropout(self.linear(x[:length])).sum()

def build():
    return Model(), {"x": torch.ones(9, 2)}
"""


@pytest.mark.parametrize(("length", "line"), [("next(self.draws)", "mine.py:15"), ("4", "")])
def test_line_whose_shapes_change_between_steps_is_found(write, length, line):
    subject = make_subject(write(HEAD + VARYING % length), {}, "cpu", 0)
    subject.load(0)
    assert varying_line(subject) == line


def test_examine_accepts_a_gradient_penalty(write):
    place = write("""class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
    def forward(self, x):
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.a(x).tanh().sum(), x, create_graph=True)
        return gradient.square().mean()
def build():
    return Model(), {"x": torch.ones(2, 4)}
""")
    subject = make_subject(place, {}, "cpu", 0)
    subject.load(0)
    matmul = 2 * 2 * 4 * 4
    assert examine(subject)["flops"] >= 4 * matmul  # forward, its backward, and the backward of both


def test_gradient_errors_include_imaginary_parts_and_ignore_empty_parameters(write):
    place = write("""class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.ones(3, dtype=torch.cfloat))
        self.empty = nn.Parameter(torch.empty(0, 4))
    def forward(self, x):
        return (x * self.filter).abs().sum() + self.empty.sum()
def build():
    return Model(), {"x": torch.ones(3)}
""")
    subject = make_subject(place, {}, "cpu", 0)
    subject.find_parameters()
    subject.load(0)
    loss = subject.gradients().item()
    gradients = numerics.gradients_of(subject)
    subject.parameters["filter"].grad = gradients["filter"] + 0.5j
    errors = numerics.relative_errors(subject, loss, loss, gradients)
    assert errors == {"loss_error": 0, "gradient_error": pytest.approx(0.5)}


@pytest.mark.parametrize("options", [{}, {"proj_size": 4}, {"bias": False}])
def test_lstm_flops_equal_the_flops_of_its_matmuls(options):
    model = nn.LSTM(8, 16, num_layers=2, bidirectional=True, batch_first=True, **options)
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    forward = 2 * 3 * 5 * matrices
    counter = FlopCounterMode(display=False, custom_mapping=FLOPS)
    x = torch.randn(3, 5, 8, requires_grad=True)
    if not options.get("proj_size"):  # oneDNN doesn't support proj_size
        with counter:
            model(x)[0].sum().backward()
        assert counter.get_total_flops() == 3 * forward
    # cuDNN isn't available on a CPU, but on the meta device PyTorch computes the shapes of its results.
    x, weights = x.to("meta"), model.to("meta")._flat_weights
    with counter, torch.no_grad():
        state, hidden = torch.zeros(4, 3, 16, device="meta"), torch.zeros(4, 3, 4, device="meta")
        first = x, weights, len(weights) // 4, None, hidden if options.get("proj_size") else state, state
        torch.ops.aten._cudnn_rnn(
            *first, 2, 16, options.get("proj_size", 0), 2, True, 0.0, True, True, [], None
        )
    assert counter.get_total_flops() == forward
    backward = counter.flop_registry[torch.ops.aten._cudnn_rnn_backward]
    assert backward(*first, out_val=None) == 2 * forward


def test_without_dropout_disables_dropout_only_within_the_block():
    class DropPath(nn.Module):
        drop_prob = None

    model = nn.Sequential(nn.Dropout(0.5), nn.MultiheadAttention(4, 2, dropout=0.3), DropPath())
    model[2].drop_prob, model[2].p = 0.1, 0.2
    with without_dropout(model):
        rates = [model[0].p, model[1].dropout, model[2].drop_prob, model[2].p]
        assert rates == [0.0] * 4
    assert [model[0].p, model[1].dropout, model[2].drop_prob, model[2].p] == [0.5, 0.3, 0.1, 0.2]


def block(width=2):
    return nn.Sequential(nn.Linear(width, 2), nn.ReLU())


def test_find_blocks_returns_lists_of_modules_of_one_type_that_have_parts():
    model = nn.ModuleDict(
        {"a": nn.ModuleList([block(), block(), block()]), "b": nn.Sequential(*[nn.ReLU()] * 9)}
    )
    assert any_model.find_blocks(model) == [*model["a"]]
    assert any_model.find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []


def test_find_blocks_returns_encoder_and_decoder_layers():
    model = nn.Transformer(8, 2, num_encoder_layers=2, num_decoder_layers=3, batch_first=True)
    assert any_model.find_blocks(model) == [*model.encoder.layers, *model.decoder.layers]


class Routed(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = nn.ModuleList(block() for _ in range(experts))

    def forward(self, x):
        return self.experts[0](x)


def test_find_blocks_chooses_equal_layers_over_the_experts_inside():
    layers = nn.ModuleList([Routed(8), Routed(8), Routed(8)])
    assert any_model.find_blocks(layers) == [*layers]


def test_find_blocks_chooses_the_longest_list_if_stages_differ():
    stages = nn.ModuleList(nn.Sequential(block(n), block(n), block(n)) for n in (1, 2))
    assert any_model.find_blocks(stages) == [*stages[0], *stages[1]]


def test_find_blocks_looks_into_lists_of_lists():
    stages = nn.ModuleList([nn.ModuleList([block(), block()]), nn.ModuleList([block(), block()])])
    assert any_model.find_blocks(stages) == [*stages[0], *stages[1]]


def test_varying_shapes_share_compiled_code(monkeypatch):
    compiled = []

    def compiler(graph, inputs):
        compiled.append(inputs)
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=compiler))
    for varies, expected in ((False, 5), (True, 2)):
        torch._dynamo.reset()
        compiled.clear()
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        any_model.compile_module(model, varies)
        for length in range(4, 9):
            model(torch.ones(length, 2))
        assert len(compiled) == expected


@pytest.mark.parametrize("own", [True, False])
def test_compile_module_compiles_both_pytorch_and_custom_module_types(monkeypatch, own):
    """PyTorch's own module types are tested, too, because ``nn.Sequential(...).compile()`` has no effect."""

    class Own(nn.Sequential):
        def forward(self, x):
            return super().forward(x)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = (Own if own else nn.Sequential)(nn.Linear(2, 2), nn.ReLU())
    any_model.compile_module(model)
    assert model(torch.ones(1, 2)).shape == (1, 2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_layers_of_one_type_share_a_name():
    def block():
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    names = folded_paths(
        nn.ModuleDict({"layers": nn.ModuleList([block(), block()]), "head": nn.Linear(2, 2)})
    )
    assert [*dict.fromkeys(names.values())] == [
        "(model)",
        "layers",
        "layers.*",
        "layers.*.0",
        "layers.*.1",
        "head",
    ]


def test_transformed_convolutional_network_has_a_loss_close_to_fp32(tmp_path):
    losses = {}
    for name in ("fp32", "channels_last", "bf16", "bf16_weights"):
        subject = make_subject(find(f"{MODELS}/convolutional.py:build", tmp_path), {}, "cpu", 0)
        if name == "bf16_weights":
            assert "need bf16 autocast" in any_model.bf16_weights(subject)
            any_model.bf16(subject)
        if name != "fp32":
            assert getattr(any_model, name)(subject) is None
        subject.load(0)
        with subject.without_randomness():
            losses[name] = subject.gradients().item()
        subject.optimizer.step()
    images = subject.batch[0]["images"]
    assert images.is_contiguous()
    assert losses == pytest.approx(dict.fromkeys(losses, losses["fp32"]), rel=2e-2)


def test_bf16_weights_keep_the_channels_last_format(tmp_path):
    subject = make_subject(find(f"{MODELS}/convolutional.py:build", tmp_path), {}, "cpu", 0)
    for transform in (any_model.channels_last, any_model.bf16, any_model.bf16_weights):
        assert transform(subject) is None
    subject.load(0)
    subject.eager_step()
    weight = subject.model.stem.weight
    assert weight.dtype == torch.bfloat16
    for x in (subject.batch[0]["images"], weight, weight.grad):
        assert x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def test_inapplicable_transforms_return_a_reason():
    subject = make_subject(find(f"{MODELS}/router.py:build", Path()), {}, "cpu", 0)
    reasons = {
        name: getattr(any_model, name)(subject)
        for name in ("tf32", "channels_last", "cuda_graph", "bf16_moments")
    }
    assert all(reasons.values()) and "2-D convolution" in reasons["channels_last"]
    assert "blocks of one type" in any_model.compiled_blocks(subject)


# -- a row ----------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(write, tmp_path):
    """Return a function that measures a model in this process, in fp32 and then with optimizations.

    The function returns the loop that measured the optimizations, and the outcome of the loop.
    """

    def measure(forward, *stack):
        place = write(f"""import random
import numpy as np
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)
    def forward(self, x):
        return ({forward}).square().mean()
def build():
    return Model(), {{"x": torch.ones(4, 4)}}
""")
        for name, optimizations in (("fp32", ()), (stack[-1], stack)):
            row = RowLoop(Job(place, configuration(place), tmp_path, name, optimizations))
            outcome = row.measure()
            assert outcome.row["status"] == "ok" and "wall_ms" in outcome.row, outcome.row["reason"]
        return row, outcome

    return measure


def test_master_adamw_gets_only_parameters_with_a_gradient(measured):
    row, _ = measured("self.a(x)", "bf16", "bf16_weights")
    subject = row.cases[0].subject
    subject.load(0)
    assert [*subject.optimizer.named] == ["a.weight", "a.bias"]
    assert subject.model.a.weight.dtype == torch.bfloat16 and subject.model.b.weight.dtype == torch.float32


def test_numerics_check_without_dropout_leaves_nothing_to_compile_in_timed_steps(measured, monkeypatch):
    """The check without dropout makes Dynamo compile separate code, but timed steps must not compile anything."""
    graphs = torch._dynamo.utils.counters["stats"]
    compiled = []

    def counted(function):
        def call(*arguments):
            before = graphs["unique_graphs"]
            result = function(*arguments)
            compiled.append((function.__name__, graphs["unique_graphs"] - before))
            return result

        return call

    for name in ("time_first_call", "compare", "time_steps"):
        monkeypatch.setattr(RowLoop, name, counted(getattr(RowLoop, name)))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    graphs.clear()
    _, outcome = measured("self.drop(self.b(self.a(x)))", "compiled_model")
    assert compiled[-3:] == [("time_first_call", 1), ("compare", 0), ("time_steps", 0)]
    assert graphs["unique_graphs"] == 2
    assert outcome.row["compile_s"] > 0


def test_inconsistent_profile_is_discarded_but_the_time_is_kept(measured, monkeypatch):
    monkeypatch.setattr(
        RowLoop, "repeat_impossible", lambda loop: loop.cases[0].row.update(inconsistent="10 ms")
    )
    _, outcome = measured("self.a(x)", "bf16")
    assert outcome.row["status"] == "ok" and outcome.row["wall_ms"] > 0
    assert outcome.row["reason"] == "not profiled: 10 ms" and outcome.row["inconsistent"] == ""
    assert "gpu_ms" not in outcome.row and outcome.kernels is None


@pytest.mark.parametrize(
    "draw", ["[random.random() for _ in range({})]", "np.random.rand({})", "torch.rand({})"]
)
def test_first_losses_agree_when_the_model_draws_random_numbers(measured, draw):
    """The model draws more random numbers under autocast, so random states are equal only in the first steps."""
    drawn = draw.format('1 + torch.is_autocast_enabled("cpu")')
    _, outcome = measured(f"self.a(x) * {drawn}[0]", "bf16")
    assert outcome.row["loss_error"] < 0.02


def test_gradient_error_includes_parameters_that_only_one_of_two_steps_uses(measured):
    _, outcome = measured('(self.b if torch.is_autocast_enabled("cpu") else self.a)(x)', "bf16")
    assert outcome.row["gradient_error"] > 1


@pytest.mark.parametrize("forward", ["self.a(x.add_(0.5))", "self.a(x) * 0"], ids=["state", "zero"])
def test_gradient_errors_of_models_with_a_state_or_without_a_gradient_are_small(measured, forward):
    """The step that changes the batch must be compared with an fp32 step that has changed it as often."""
    _, outcome = measured(forward, "bf16")
    assert outcome.row["gradient_error"] < 0.02 and outcome.row["loss_error"] < 0.02


def test_step_that_is_compiled_again_each_time_fails_and_names_the_cause(write, tmp_path, monkeypatch):
    place = write("""class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(2, 2), 0
    def forward(self, x):
        self.calls += 1
        return self.linear(x).sum() * self.calls
def build():
    return Model(), {"x": torch.ones(1, 2)}
""")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    outcome = RowLoop(
        Job(place, configuration(place), tmp_path, "compiled_model", ("compiled_model",))
    ).measure()
    assert outcome.row["status"] == "failed" and "wall_ms" not in outcome.row
    reason = outcome.row["reason"]
    assert re.fullmatch(r"mine.py:\d+: compiled again in each step, because .* self\.calls == \d+", reason), (
        reason
    )


def test_steps_that_do_different_work_are_timed_and_profiled_in_the_same_sequence(
    write, tmp_path, monkeypatch
):
    place = write("""import random
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x[: random.randint(1, 100)]).square().mean()
def build():
    return Model(), {"x": torch.ones(100, 4)}
""")
    sizes, timed = [], []
    randint, time_back_to_back = random.randint, ladder_loop.time_back_to_back

    def draw(low, high):
        sizes.append(randint(low, high))
        return sizes[-1]

    def time(step, device, steps):
        timing = time_back_to_back(step, device, steps)
        timed.extend(sizes[-steps:])
        return timing

    monkeypatch.setattr(random, "randint", draw)
    monkeypatch.setattr(ladder_loop, "time_back_to_back", time)
    config = configuration(place, timed_steps=5, warmup_steps=1)
    outcome = RowLoop(Job(place, config, tmp_path, "fp32", ())).measure()
    assert outcome.varies and timed == sizes[-5:]


# -- isolation ------------------------------------------------------------------------------------------------


def test_isolated_calls_return_results_and_failures_do_not_affect_the_next_call(tmp_path):
    """Call standard-library functions, because importing this file in a new process would take seconds."""
    with pytest.raises(ProcessFailed, match="was killed by SIGKILL"):
        call_isolated(signal.raise_signal, 60, signal.SIGKILL)
    hang = ["sh", "-c", f"echo $PPID $$ > '{tmp_path}/pids'; exec sleep 1000"]
    with pytest.raises(ProcessFailed, match="took longer than 3 s"):
        call_isolated(subprocess.run, 3, hang)
    with pytest.raises(ProcessFailed, match="exited with status 3"):
        call_isolated(os._exit, 60, 3)
    with pytest.raises(ProcessFailed, match="its process raised KeyError: 'gone'"):
        call_isolated({}.__getitem__, 60, "gone")
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2 and all(ended(int(pid)) for pid in pids), "the process or its child is alive"
    assert call_isolated(operator.mul, 60, 6, 7) == 42


FAULTY = """class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            FAULT
        return self.linear(x).square().mean()
def build():
    return Model(), {"x": torch.ones(4, 4)}
"""


@pytest.mark.parametrize(
    "fault, limit_s, reason",
    [
        ("import os; os.kill(os.getpid(), 9)", 300, "its process was killed by SIGKILL"),
        ("import time; time.sleep(1000)", 3, "it took longer than 3 s, so its process was killed"),
        ("raise ValueError('<b>no</b> bf16')", 300, "mine.py:9: ValueError: <b>no</b> bf16"),
    ],
)
def test_failed_optimization_is_recorded_and_the_next_one_is_measured(
    write, tmp_path, monkeypatch, fault, limit_s, reason
):
    place = write(HEAD + FAULTY.replace("FAULT", fault))
    config = configuration(place, optimizations=["fp32", "bf16", "fused_adamw"])
    faulty = Ladder(place, config, tmp_path)

    def call(function, name, stack):
        faulty.config = config.model_copy(update={"limit_s": limit_s if name == "bf16" else 300})
        return Ladder.call(faulty, function, name, stack)

    monkeypatch.setattr(faulty, "call", call)
    faulty.measure()
    steps = faulty.steps.set_index("optimization")
    assert steps["status"].to_dict() == {"fp32": "ok", "bf16": "failed", "fused_adamw": "ok"}
    assert steps.loc["bf16", "reason"] == reason
    SCHEMAS["steps"].validate(faulty.steps)


# -- which optimizations are kept -----------------------------------------------------------------------------


def outcome(name, wall_ms=None, signature=None, **row):
    times = {} if wall_ms is None else {"wall_ms": wall_ms}
    about = {"optimization": name, "status": "ok", "reason": "", "sheet_tflops": 1.0}
    return Outcome(about | times | row, None, signature)


@pytest.fixture
def simulated(ladder, monkeypatch):
    """Return a function that measures a ladder in which each optimization has the given outcome."""

    def measure(outcomes):
        jobs = []

        def call(function, limit_s, job, preload):
            jobs.append(job)
            if function is measure_modules:
                return pd.DataFrame()
            result = outcomes[job.name]
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(loop, "call_isolated", call)
        made = ladder("language_model", optimizations=[*outcomes])
        made.measure()
        return made, {job.name: job.stack for job in jobs}

    return measure


def test_optimizations_are_measured_on_top_of_kept_optimizations(simulated):
    made, stacks = simulated(
        {
            "fp32": outcome("fp32", 100.0),
            "tf32": outcome("tf32", 99.5),
            "bf16": outcome("bf16", 60.0),
            "fused_adamw": ProcessFailed("its process was killed by SIGSEGV"),
            "compiled_blocks": outcome("compiled_blocks", 50.0),
            "compiled_model": outcome("compiled_model", 40.0),
            "cuda_graph": outcome("cuda_graph", status="unsupported", reason="no GPU"),
            "bf16_weights": outcome("bf16_weights", 41.0),
            "bf16_moments": outcome("bf16_moments", 30.0),
        }
    )
    assert stacks["fused_adamw"] == ("bf16", "fused_adamw")
    assert stacks["compiled_model"] == ("bf16", "compiled_model")
    assert stacks["modules"] == ("bf16",)
    assert stacks["bf16_moments"] == ("bf16", "compiled_model", "bf16_weights", "bf16_moments")
    steps = made.steps.set_index("optimization")
    kept = steps.index[steps["kept"] == "yes"]
    assert [*kept] == ["fp32", "bf16", "compiled_model", "bf16_moments"]
    reasons = steps["reason"]
    assert reasons["compiled_blocks"] == "it helps, but its alternative helps more"
    assert reasons["fused_adamw"] == "its process was killed by SIGSEGV"
    assert "no faster: 1.01x" in reasons["tf32"] and not reasons["bf16"]
    assert steps.loc["bf16_moments", "speedup"] == pytest.approx(100 / 30)


def test_bf16_weights_are_measured_with_bf16_even_if_bf16_does_not_help(simulated):
    outcomes = {
        "fp32": outcome("fp32", 100.0),
        "bf16": outcome("bf16", 120.0),
        "bf16_weights": outcome("bf16_weights", 90.0),
        "bf16_moments": outcome("bf16_moments", 80.0),
    }
    made, stacks = simulated(outcomes)
    assert stacks["bf16_weights"] == ("bf16", "bf16_weights")
    assert made.kept == ("bf16", "bf16_weights", "bf16_moments")
    made, stacks = simulated(outcomes | {"bf16": outcome("bf16", status="failed", reason="a dtype")})
    assert stacks["bf16_weights"] == ("bf16_weights",)


def test_optimization_that_does_nothing_or_breaks_the_loss_is_not_kept():
    before = outcome("fp32", 100.0, signature=(1.0, {"gemm": 2}))
    same = outcome("bf16", 100.2, signature=(1.0, {"gemm": 2}))
    broken = outcome("bf16", 10.0, loss_error=math.nan)
    assert "it changes nothing" in why_dropped(same, before)
    assert why_dropped(broken, before) == "its loss isn't finite"
    # if fp32 doesn't fit, any step that fits is an improvement
    assert not why_dropped(same, outcome("fp32", status="oom"))


def test_alternative_with_less_gpu_time_is_kept_in_launch_bound_steps(simulated):
    bound = {"busy": 0.4, "enqueue_ms": 12.0}
    outcomes = {
        "fp32": outcome("fp32", 12.0, wall_min_ms=11.0, gpu_ms=8.5, **bound),
        "compiled_blocks": outcome("compiled_blocks", 11.0, wall_min_ms=10.2, gpu_ms=7.5, **bound),
        "compiled_model": outcome("compiled_model", 12.5, wall_min_ms=11.0, gpu_ms=5.6, **bound),
        "cuda_graph": outcome("cuda_graph", 5.7, gpu_ms=5.6),
    }
    made, stacks = simulated(outcomes)
    assert stacks["cuda_graph"] == ("compiled_model", "cuda_graph")
    assert made.outcomes["compiled_blocks"].row["kept"] == "no"


@pytest.mark.parametrize(("graph_ms", "differs"), [(10.2, True), (7.7, False), (math.nan, False)])
def test_graph_whose_kernels_take_longer_gets_a_remark(simulated, graph_ms, differs):
    outcomes = {
        "fp32": outcome("fp32", 12.7, gpu_ms=7.5),
        "cuda_graph": outcome("cuda_graph", 10.3, gpu_ms=graph_ms),
    }
    made, _ = simulated(outcomes)
    reason = made.outcomes["cuda_graph"].row["reason"]
    assert ("10.2 ms" in reason and "7.50 ms" in reason) == differs


def test_launch_bound_configurations_are_compared_by_their_fastest_step():
    before = outcome("fp32", 20.0, wall_min_ms=12.0)
    bound = {"busy": 0.4, "enqueue_ms": 9.0, "gpu_ms": 4.0, "wall_min_ms": 8.0}
    assert loop.speedup(before, outcome("bf16", 10.0, **bound)) == 12 / 8
    assert loop.speedup(before, outcome("bf16", 10.0, **bound | {"enqueue_ms": 3.0})) == 20 / 10


def test_report_computes_speedups_like_the_ladder():
    """Records store the speedups of the version that measured them, so the report computes them again."""
    tables = load(PROJECT / "runs" / "public")
    varying = tables["your_model.results"].set_index("run_id")["varying"] != ""
    steps = Views(tables)["model_steps"].assign(run_id=tables["your_model.steps"]["run_id"])
    assert steps["launch_bound"].any() and varying.any()
    for run_id, run in steps.groupby("run_id"):
        rows = run.to_dict("records")
        fp32, *others = (Outcome(row, varies=varying[run_id]) for row in rows)
        found = [row["speedup"] for row in rows[1:]]
        assert found == pytest.approx([loop.speedup(fp32, other) for other in others], nan_ok=True)


def test_cuda_graph_failure_names_the_line_that_synchronizes(simulated, monkeypatch):
    first = outcome("fp32", 100.0)
    first.facts = {"synchronizing": "router.py:15", "flops": 10**9}
    graph = outcome("cuda_graph", status="failed", reason="operation not permitted")
    made, _ = simulated({"fp32": first, "cuda_graph": graph})
    reason = made.steps.set_index("optimization").loc["cuda_graph", "reason"]
    assert reason == "uncompiled, router.py:15 reads a number from the device; operation not permitted"


def test_cuda_graph_is_not_tried_if_steps_do_different_work(simulated):
    first = outcome("fp32", 100.0)
    first.facts = {"varying": "crop.py:12"}
    made, stacks = simulated({"fp32": first, "cuda_graph": outcome("cuda_graph", 10.0)})
    row = made.steps.set_index("optimization").loc["cuda_graph"]
    assert "cuda_graph" not in stacks
    assert row["status"] == "unsupported" and row["reason"].startswith("crop.py:12 does different work")


def test_steps_that_do_different_work_are_compared_by_their_medians(simulated):
    bound = {"busy": 0.4, "enqueue_ms": 90.0}
    fp32 = outcome("fp32", 100.0, wall_min_ms=80.0, gpu_ms=40.0, **bound)
    fp32.facts, fp32.varies = {"varying": "crop.py:12", "flops": 10**9}, True
    others = {
        "tf32": outcome("tf32", 70.0, wall_min_ms=69.0, gpu_ms=28.0, **bound),
        "bf16": outcome("bf16", 71.0, wall_min_ms=20.0, gpu_ms=10.0, **bound),
    }
    for other in others.values():
        other.varies = True
    steps = simulated({"fp32": fp32, **others})[0].steps.set_index("optimization")
    assert steps["kept"].to_dict() == {"fp32": "yes", "tf32": "yes", "bf16": "no"}
    assert steps.loc["tf32", "speedup"] == pytest.approx(100 / 70)
    assert steps["mfu"].isna().all(), "the FLOPs of one step say nothing about the others"


def test_step_that_only_saves_gpu_time_says_so(simulated):
    bound = {"busy": 0.4, "enqueue_ms": 90.0}
    fp32 = outcome("fp32", 100.0, wall_min_ms=80.0, gpu_ms=40.0, **bound)
    bf16 = outcome("bf16", 100.0, wall_min_ms=82.0, gpu_ms=20.0, **bound)
    row = simulated({"fp32": fp32, "bf16": bf16})[0].steps.set_index("optimization").loc["bf16"]
    assert row["kept"] == "yes" and "from 40.0 ms to 20.0 ms" in row["reason"]


# -- time by module -------------------------------------------------------------------------------------------


def test_phase_times_of_each_module_add_up_to_its_total(tmp_path):
    place = find(f"{MODELS}/convolutional.py:build", tmp_path)
    config = configuration(place)
    modules = call_isolated(measure_modules, 300, Job(place, config, tmp_path, "modules", ("fused_adamw",)))
    SCHEMAS["modules"].validate(modules)
    rows = modules.set_index("module")
    phases = ["forward_ms", "backward_ms", "optimizer_ms"]
    assert rows.loc["blocks.*.conv", "modules"] == 3 and rows.loc["blocks.*.conv", "type"] == "Conv2d"
    for name in ("stem", "blocks.*.conv", "blocks.*.norm", "head"):
        assert rows.loc[name, "forward_ms"] > 0 and rows.loc[name, "backward_ms"] > 0
    assert rows["optimizer_ms"].gt(0).tolist() == [name == ELSEWHERE for name in rows.index]
    assert rows["total_ms"].tolist() == pytest.approx(rows[phases].sum(axis="columns").tolist())
    loss_ms = rows.loc[ELSEWHERE, ["forward_ms", "backward_ms"]].sum()
    assert 0 < loss_ms < rows["total_ms"].sum() / 3, "most of the time must belong to a module"


# -- the report -----------------------------------------------------------------------------------------------


def test_text_from_user_code_is_not_rendered_as_markup(store, ladder):
    evil = "<img src=x onerror=alert(1)> **bold** [link](http://a.example) `code`"
    made = ladder("router")
    failed = outcome("bf16", status="failed", reason=evil)
    for name, one in (("fp32", outcome("fp32", 10.0)), ("bf16", failed)):
        made.keep(one, name, (), one, one.row["reason"])
    times = dict.fromkeys(("forward_ms", "backward_ms", "optimizer_ms", "total_ms"), 1.0)
    made.modules = pd.DataFrame([{"module": evil, "type": evil, "modules": 1, **times}])
    with store.writing():
        folder = store.new_staging_folder()
        tables = _write(made.tables, [], folder)
        store.commit(folder, record_of(made.config, tables=tables))
    report = machine.compose(read(store), store.root, store.root)
    assert not report.errors and report.texts["report.md"].count("onerror") == 3
    assert not re.search(r"(?<!\\)(<img|\*\*bold|\[link|`code)", report.texts["report.md"])
    page = report.texts["report.html"]
    assert "&lt;img src=x" in page and "<img src=x" not in page
    assert "<strong>bold" not in page and "<code>code" not in page and 'href="http://a.example' not in page


# -- complete runs --------------------------------------------------------------------------------------------


def test_every_optimization_is_measured_on_top_of_the_others(ladder, monkeypatch):
    """Keep every measured optimization, compile with the backend ``eager``, and don't start a new process."""
    monkeypatch.setattr(loop, "call_isolated", lambda function, limit_s, job, preload: function(job))
    monkeypatch.setattr(loop, "why_dropped", lambda outcome, before: "")
    monkeypatch.setattr(loop, "speedup", lambda before, outcome: 1.0)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    made = ladder("language_model")
    made.measure()
    for name, table in made.tables.items():
        SCHEMAS[name].validate(table)
    steps = made.steps.set_index("optimization")
    assert [*steps.index] == [*OPTIMIZATIONS]
    needs_more = {"tf32", "channels_last", "cuda_graph"}  # these need a GPU or images
    assert {*steps.index[steps["status"] != "ok"]} == needs_more
    assert made.kept == ("bf16", "fused_adamw", "compiled_model", "bf16_weights", "bf16_moments")
    assert (steps.loc[["compiled_blocks", "compiled_model"], "compile_s"] > 0).all()
    errors = steps["gradient_error"].dropna()
    assert errors["fp32"] == 0 and errors.drop("fp32").between(0, 0.1, inclusive="neither").all()


def test_compiled_code_computes_the_gradients_of_the_eager_step(write, tmp_path):
    """The model is minimal, because each kernel takes seconds to compile."""
    place = write("""class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
    def forward(self, x):
        return self.linear(x).square().mean()
def build():
    return Model(), {"x": torch.ones(4, 4)}
""")
    made = Ladder(place, configuration(place, optimizations=["fp32", "compiled_model"]), tmp_path)
    made.measure()
    row = made.steps.set_index("optimization").loc["compiled_model"]
    assert row["status"] == "ok" and row["compile_s"] > 0, row["reason"]
    assert row["gradient_error"] < 1e-4


def command(name, store, **environment):
    """Run ``stepscope ladder`` on one of the tiny models in a separate process; return the table of steps."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "stepscope.cli",
            "ladder",
            f"{MODELS}/{name}.py:build",
            "--runs",
            str(store.root),
        ],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = read(store)
    assert not found.errors and not found.notes
    (record,) = found.records
    text = json.dumps(record.model_dump(mode="json"))
    assert str(MODELS) not in text and str(MODELS.parent) not in text
    assert f"{name}:build" in (store.root / "report.md").read_text().replace("\\", "")
    steps = found.tables["your_model.steps"].set_index("optimization")
    assert [*steps.index] == [*OPTIMIZATIONS]
    assert ((steps["status"] == "ok") == steps["wall_ms"].notna()).all()
    assert steps["reason"].where(steps["kept"] == "no", "-").all()
    errors = steps["gradient_error"].dropna()
    assert errors["fp32"] == 0 and 0 < errors["bf16"] < 0.1 and (errors < 0.1).all()
    return steps


def test_command_measures_a_synchronizing_network_and_reports_the_line(store):
    """Disable compilation, because it takes half a minute in a new folder and another test covers it."""
    steps = command("router", store, TORCHDYNAMO_DISABLE="1")
    where = "uncompiled, router.py:15 reads a number from the device"
    reason = steps.loc["cuda_graph", "reason"]
    assert reason.startswith(where) and "CUDA graphs are not available on a CPU" in reason


@pytest.mark.slow
def test_command_compiles_a_language_model_with_every_optimization(store):
    steps = command("language_model", store)
    assert (steps.loc[["compiled_blocks", "compiled_model"], "compile_s"] > 0).all()


def test_notebook_measures_a_convolutional_network_and_an_edited_file_is_a_new_run(store, tmp_path):
    text = (MODELS / "convolutional.py").read_text()
    path = tmp_path / "mine.py"
    fields = {"device": "cpu", "timed_steps": 2, "warmup_steps": 0}
    for width, optimizations in ((8, EAGER), (4, ["fp32"])):
        path.write_text(text.replace("width=8", f"width={width}"))
        parameters = {"model": f"{path}:build", "runs": str(store.root), "optimizations": optimizations}
        run_cells("your_model", **fields, **parameters)
    tables = load(store.root)
    assert sorted(tables["your_model.steps"].groupby("run_id").size()) == [1, 4]
    assert tables["your_model.results"]["parameters"].nunique() == 2
    assert len(tables["your_model.modules"])


def test_notebook_describes_a_model_that_does_not_fit_into_memory(store, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"""{HEAD}
class Model(nn.Linear):
    def forward(self, x):
        return super().forward(x.repeat(10**15, 1)).mean()
def build():
    return Model(4, 4), {{"x": torch.ones(1, 4)}}
""")
    parameters = {"model": f"{path}:build", "runs": str(store.root), "optimizations": ["fp32", "fused_adamw"]}
    run_cells("your_model", device="cpu", timed_steps=2, warmup_steps=0, **parameters)
    tables = load(store.root)
    assert [*tables["your_model.steps"]["status"]] == ["oom", "oom"]
    assert tables["your_model.results"]["finding"].item() == "no step could be timed"


@pytest.mark.parametrize(
    ("gpu_ms", "wall_min_ms", "busy", "is_kept"),
    [
        (20, 42, 0.5, True),  # the GPU time is halved, so a later CUDA graph will be faster
        (38, 35, 0.5, False),  # the difference is within the noise of launch-bound steps
        (38, 35, 0.99, True),  # this step isn't launch-bound, so its time is reproducible
        (40, 30, 0.5, True),
        (20, 60, 0.5, False),
    ],
)
def test_launch_bound_step_is_kept_if_it_saves_gpu_time_or_is_clearly_faster(
    gpu_ms, wall_min_ms, busy, is_kept
):
    before = outcome("fp32", 40.5, wall_min_ms=40.0, gpu_ms=38.0)
    times = {"wall_min_ms": wall_min_ms, "gpu_ms": gpu_ms, "busy": busy, "enqueue_ms": 50.0}
    after = outcome("tf32", wall_min_ms + 1, **times)
    assert (why_dropped_launch_bound(after, before) == "") == is_kept
