"""Test that MasterAdamW behaves like a torch optimizer: groups, schedules, clipping, state dicts, copies."""

import copy
import gc
import importlib.util
import io
import os
import pickle
import weakref
from pathlib import Path

# makes matmuls deterministic; cuBLAS reads this variable when CUDA starts
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from stepscope.optimizations import MasterAdamW, fp8
from stepscope.studies.ladder import checks

DOCS = Path(__file__).parents[1] / "docs"
ON_GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
)
MOMENTS = pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def draw_gradients(parameters, generator):
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def groups_of(model):
    return [
        {"params": [model["matrix"]], "weight_decay": 0.1},
        {"params": [model["vector"]], "lr": 2e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0},
    ]


def test_master_adamw_groups_schedules_and_clipping_match_torch():
    """Each learning rate must also stay in the same tensor, because a CUDA graph reads this tensor."""
    ours, theirs = checks.make_parameters(), checks.make_parameters()
    pair = MasterAdamW(groups_of(ours), 1e-3), torch.optim.AdamW(groups_of(theirs), 1e-3)
    schedulers = [lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=20) for optimizer in pair]
    rates = [group["lr"] for group in pair[0].param_groups]
    generator = torch.Generator().manual_seed(0)
    values = set()
    for _ in range(19):
        draw_gradients(ours.values(), generator)
        for name, parameter in theirs.items():
            parameter.grad = ours[name].grad.float().clone()
        for model, optimizer, scheduler in zip((ours, theirs), pair, schedulers):
            assert nn.utils.clip_grad_norm_([model["vector"]], 1.0) > 1
            optimizer.step()
            scheduler.step()
        for rate, group, expected in zip(rates, *(optimizer.param_groups for optimizer in pair)):
            assert group["lr"] is rate and rate.item() == pytest.approx(float(expected["lr"]), rel=1e-6)
            assert group["betas"] == pytest.approx(expected["betas"])
        values.add(rates[0].item())
    assert len(values) > 5
    for master, weight in zip(pair[0].masters().values(), theirs.values()):
        assert (master - weight).abs().max() < 1e-5 * weight.abs().max()


def invalid_parameters():
    model = checks.make_parameters()
    yield "same name", [{"params": [("a", weight)]} for weight in model.values()]
    yield "no parameter requires a gradient", [nn.Parameter(torch.ones(2), requires_grad=False)]
    other_device = nn.Parameter(torch.ones(2, device="meta"))
    message = "b: got a parameter on meta, but expected cpu, the device of a"
    yield message, [("a", nn.Parameter(torch.ones(2))), ("b", other_device)]
    for dtype in (torch.float64, torch.float16, torch.complex64):
        message = f"weight: got {dtype}, but expected torch.float32 or torch.bfloat16"
        yield message, nn.ParameterDict({"weight": torch.ones(2, 2, dtype=dtype)})


@pytest.mark.parametrize("message, parameters", invalid_parameters())
def test_invalid_parameters_are_rejected(message, parameters):
    with pytest.raises(ValueError, match=message):
        MasterAdamW(parameters)


def test_add_param_group_raises():
    optimizer = MasterAdamW(checks.make_parameters())
    with pytest.raises(RuntimeError, match="pass all groups when you create MasterAdamW"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


# -- the GPU kernels' tables --------------------------------------------------------------------------------


@pytest.fixture
def tabled():
    """Return an optimizer with tables for the GPU kernels; both groups contain FP8 and non-FP8 parameters."""
    model = nn.Sequential(
        nn.Linear(128, 64, bias=False),
        nn.Linear(70, 9),
        nn.LayerNorm(1000),
        nn.Linear(64, 192, bias=False),
        nn.Conv1d(3, 5, 2, bias=False),
    )
    fp8.use_fp8(nn.ModuleList([model[0], model[3]]))
    optimizer = MasterAdamW([{"params": model[:2].parameters()}, {"params": model[2:].parameters()}])
    optimizer._make_tables()
    return optimizer


def test_table_lists_gradient_addresses_and_rejects_unreadable_gradients(tabled):
    for capturing in (False, False, True):
        draw_gradients(tabled.parameters, torch.Generator().manual_seed(0))
        before = tabled.table.clone()
        addresses = [parameter.grad.data_ptr() for parameter in tabled.parameters]
        table = tabled._table(tabled._gradients(), capturing)
        assert table.tolist() == addresses != before.tolist()
    assert torch.equal(tabled.table, before), "a graph's capture must use a separate table"
    transposed = torch.zeros(70, 9).bfloat16().t()
    misaligned = torch.zeros(70 * 9 + 8).bfloat16()[4:-4].view(9, 70)
    for gradient in (transposed, misaligned):
        tabled.parameters[1].grad = gradient
        with pytest.raises(
            RuntimeError, match="1: the optimizer's kernel requires a gradient in the weight's"
        ):
            tabled._table(tabled._gradients(), False)


def test_weights_of_recurrent_layers_stay_fp32():
    model = nn.ModuleDict({"lstm": nn.LSTM(4, 4), "head": nn.Linear(4, 4)})
    MasterAdamW(model)
    assert {weight.dtype for weight in model["lstm"].parameters()} == {torch.float32}
    assert model["head"].weight.dtype == torch.bfloat16


def test_weights_keep_their_memory_format():
    weights = [torch.randn(4, 6, 3, 3), torch.randn(1, 6, 3, 3), torch.randn(4, 6, 1, 1), torch.randn(4, 6)]
    gradients = [torch.randn_like(weight).bfloat16() for weight in weights]
    trained = []
    for memory_format in (torch.contiguous_format, torch.channels_last):

        def formatted(x, memory_format=memory_format):
            return x.clone(memory_format=memory_format if x.dim() == 4 else torch.contiguous_format)

        parameters = [nn.Parameter(formatted(weight)) for weight in weights]
        optimizer = MasterAdamW(parameters, 1e-2)
        optimizer._make_tables()
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = formatted(gradient)
        # this call would raise if the kernel couldn't read the gradients
        optimizer._table(optimizer._gradients(), False)
        optimizer.step()
        trained.append([*optimizer.masters().values(), *parameters])
        for x in (*parameters[:3], *[*optimizer.masters().values()][:3]):
            assert x.is_contiguous(memory_format=memory_format)
    for expected, weight in zip(*trained):
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("shape", [(96, 128), (128, 96)])
def test_fp8_weights_reject_dimensions_that_are_not_multiples_of_64(tabled, shape):
    tabled.shapes[0] = torch.Size(shape)
    with pytest.raises(ValueError, match="multiples of 64"):
        tabled._tiles(0)


# -- state dicts ----------------------------------------------------------------------------------------------


def restored_fp8(weight):
    rows, _ = fp8.layouts(weight.detach())
    return rows.float() * weight.fp8_scale


def trained(moments, seed, saved=None, eight_bits=False):
    """Return an optimizer, its scheduler, and a function that trains with clipping.

    Each step's number is the seed of its data.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24, bias=not eight_bits))
    if eight_bits:
        fp8.use_fp8(model[1:])
    optimizer = MasterAdamW(model, 1e-2, moments, betas=(0.9, 0.95))
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 40)
    if saved:
        scheduler.load_state_dict(saved["scheduler"])
        optimizer.load_state_dict(saved["optimizer"])

    def train(first, last):
        for number in range(first, last):
            x = torch.randn(16, 24, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(x) - x.flip(1)).float().square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
        return [loss.item(), *(parameter.detach().clone() for parameter in model.parameters())]

    return optimizer, scheduler, train


@pytest.mark.parametrize("eight_bits", [False, True], ids=["bf16", "fp8"])
@MOMENTS
def test_resumed_training_is_bit_identical(moments, eight_bits):
    optimizer, scheduler, train = trained(moments, 0, eight_bits=eight_bits)
    train(0, 14)
    # an FP8 weight's scale follows the master weight one step later
    optimizer.masters()["2.weight"].mul_(100)
    train(14, 15)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, file)
    first = train(15, 30)
    file.seek(0)
    resumed, _, train = trained(moments, 1, torch.load(file), eight_bits)
    again = train(15, 30)
    assert again[0] == first[0]
    assert all(map(torch.equal, first[1:], again[1:]))
    for name in ("master", "m", "v", "count", "rates", "scales"):
        assert torch.equal(getattr(optimizer, name), getattr(resumed, name)), name


@pytest.mark.parametrize("before", [[], [0], [1], [0, 1]])
def test_load_state_dict_computes_missing_fp8_scales_from_masters(before):
    """The weights are multiplied by 100, so with their old scales they would saturate."""
    pair = []
    for eight_bits in (before, [0, 1]):
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(2)))
        fp8.use_fp8(nn.ModuleList(model[index] for index in eight_bits))
        pair.append(MasterAdamW(model))
    optimizer, other = pair
    optimizer.master.mul_(100)
    optimizer.reset()
    other.load_state_dict(optimizer.state_dict())
    for name, master in optimizer.masters().items():
        error = (restored_fp8(other.named[name]) - master).abs().max()
        assert error < master.abs().max() / 16, name


INVALID_GROUPS = ([[0, 1, 2, 3], [0, 1, 2, 3]], [[0, 1, 2]], [[0], [1, 2, 3]])


def invalid_state_dicts(saved):
    """Yield state dicts with different groups or shapes, or with missing steps, masters or states."""
    (group,), state = saved["param_groups"], saved["state"]
    for groups in INVALID_GROUPS:
        yield {**saved, "param_groups": [{**group, "params": indices} for indices in groups]}
    no_step = {key: value for key, value in state[0].items() if key != "step"}
    for changed in ({0: state[3]}, {0: no_step}, {3: {}}):
        yield {**saved, "state": state | changed}
    yield {**saved, "state": {0: state[0]}}


def test_load_state_dict_rejects_invalid_state_and_changes_nothing():
    optimizer, _, train = trained(torch.float32, 0)
    train(0, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    train(3, 6)
    before = optimizer.master.clone()
    for invalid in invalid_state_dicts(saved):
        with pytest.raises(ValueError, match="state dict"):
            optimizer.load_state_dict(invalid)
        assert torch.equal(optimizer.master, before)


def test_load_state_dict_updates_buffers_in_place():
    optimizer, _, train = trained(torch.float32, 0)
    train(0, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    expected = optimizer.master.clone()
    train(3, 6)
    (group,) = optimizer.param_groups
    names = ("master", "low", "m", "v", "count", "rates")
    addresses = [getattr(optimizer, name).data_ptr() for name in names]
    saved["param_groups"][0] |= {"betas": [0.7, 0.8], "eps": 1e-3, "weight_decay": 0.3}
    optimizer.load_state_dict(saved)
    saved["param_groups"][0]["betas"][0] = 0.1
    assert (group["betas"], group["eps"], group["weight_decay"]) == ([0.7, 0.8], 1e-3, 0.3)
    assert optimizer.scalars[0, 3:].tolist() == pytest.approx([0.7, 0.3, 0.8, 0.2, 1e-3])
    assert optimizer.betas[:, 0].tolist() == [0.7, 0.8] and optimizer.decays[0] == 0.3
    assert [getattr(optimizer, name).data_ptr() for name in names] == addresses
    assert group["lr"].data_ptr() == optimizer.rates.data_ptr() and (optimizer.count == 3).all()
    assert torch.equal(optimizer.master, expected) and torch.equal(optimizer.low, expected.bfloat16())


def test_load_state_dict_rounds_fp32_moments_to_bf16():
    optimizer, _, train = trained(torch.float32, 0)
    train(0, 3)
    other, _, _ = trained(torch.bfloat16, 1)
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(other.master, optimizer.master) and torch.equal(other.v, optimizer.v.bfloat16())


# -- torch's AdamW, copies and hooks ---------------------------------------------------------------------------


def small(bias=False):
    """Return a model with two linear layers and a norm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12, bias=bias), nn.Tanh(), nn.Linear(12, 8, bias=bias), nn.RMSNorm(8))


def step_once(model, optimizer, seed=0):
    optimizer.zero_grad()
    draw_gradients(list(model.parameters()), torch.Generator().manual_seed(seed))
    optimizer.step()


def test_training_continues_after_loading_a_torch_state_dict():
    model = small()
    theirs = torch.optim.AdamW(model.parameters(), 1e-2, betas=(0.8, 0.9), weight_decay=0.2)
    for seed in range(3):
        step_once(model, theirs, seed)
    mine = copy.deepcopy(model)
    optimizer = MasterAdamW(mine)
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert optimizer.count.tolist() == [3, 3, 3] and optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    for seed in range(3, 6):
        step_once(mine, optimizer, seed)
        for weight, copied in zip(model.parameters(), mine.parameters()):
            weight.grad = copied.grad.float()
        theirs.step()
    for weight, master in zip(model.parameters(), optimizer.masters().values()):
        torch.testing.assert_close(master, weight.detach(), rtol=1e-5, atol=1e-6)
    theirs.load_state_dict(optimizer.state_dict())  # torch's AdamW also loads our state dict
    step_once(model, theirs)


def test_torch_state_dict_may_omit_parameters_without_a_gradient():
    model = small()
    theirs = torch.optim.AdamW(model.parameters())
    draw_gradients([model[0].weight], torch.Generator().manual_seed(0))
    theirs.step()
    optimizer = MasterAdamW(small())
    optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.count.tolist() == [1, 0, 0]


@pytest.mark.parametrize("way", ["deepcopy with the model", "pickle"])
@MOMENTS
def test_copied_optimizer_trains_identically_without_changing_the_original(way, moments):
    model = small()
    optimizer = MasterAdamW(model, 1e-2, moments, betas=(0.8, 0.9))
    step_once(model, optimizer)
    if way == "pickle":
        copied = pickle.loads(pickle.dumps(optimizer))
    else:
        other, copied = copy.deepcopy((model, optimizer))
        assert next(other.parameters()) is copied.parameters[0]
    before = optimizer.master.clone()
    draw_gradients(copied.parameters, torch.Generator().manual_seed(5))
    copied.step()
    assert torch.equal(optimizer.master, before)
    step_once(model, optimizer, 5)
    for name in ("master", "m", "v", "count", "scalars"):
        assert torch.equal(getattr(copied, name), getattr(optimizer, name)), name
    assert all(map(torch.equal, copied.parameters, optimizer.parameters))


def test_deepcopy_rejects_optimizer_with_fp8_weights():
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    fp8.use_fp8(model)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(MasterAdamW(model))


def test_pickled_model_contains_weights_without_the_optimizer():
    model = small()
    MasterAdamW(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert all(map(torch.equal, model.parameters(), loaded.parameters()))
    loaded.load_state_dict(model.state_dict())


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_weights_are_aligned_buffer_views_with_separate_storages(device):
    """Separate storages keep a saved model small, because torch saves a tensor's entire storage."""
    shapes = (64, 128), (1, 7), (7, 1), (130,), (3, 5, 7), (), (9, 70)
    weights = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    before = [weight.detach().clone() for weight in weights]
    optimizer = MasterAdamW(weights)
    for index, (weight, old) in enumerate(zip(weights, before)):
        buffer = optimizer.low if weight.dim() > 1 else optimizer.master
        assert weight.data_ptr() == optimizer.view(buffer, index).data_ptr() and weight.data_ptr() % 16 == 0
        assert weight.untyped_storage().nbytes() == weight.nbytes and weight.stride() == old.stride()
    del optimizer, buffer
    for weight, old in zip(weights, before):
        assert torch.equal(weight, old.to(weight.dtype))


def test_state_dict_hooks_can_change_state_dicts_with_masters():
    optimizer = MasterAdamW(small(), 1e-2)

    def set_eps(_, saved):
        return {**saved, "param_groups": [{**saved["param_groups"][0], "eps": 1e-3}]}

    optimizer.register_load_state_dict_pre_hook(set_eps)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["eps"] == 1e-3
    optimizer.register_state_dict_post_hook(lambda _, saved: {"masters": "master" in saved["state"][0]})
    assert optimizer.state_dict() == {"masters": True}


# -- weights written by user code ----------------------------------------------------------------------------

SEVEN = 7.0


def load_submodule(model, _):
    model[0].load_state_dict({"weight": torch.full_like(model[0].weight, SEVEN)})


@torch.no_grad()
def fill_in_place(model, _):
    model[0].weight.clamp_(SEVEN, SEVEN)


def swap_average(model, _):
    average = torch.optim.swa_utils.AveragedModel(model)
    fill_in_place(average.module, _)
    with torch.no_grad():
        for weight, averaged in zip(model.parameters(), average.module.parameters()):
            weight.copy_(averaged)


@pytest.mark.parametrize("write", [load_submodule, fill_in_place, swap_average])
@pytest.mark.parametrize("kind", ["model", "parameters", "fp8"])
def test_externally_written_weights_survive_a_step(write, kind):
    model = small()
    if kind == "fp8":
        fp8.use_fp8(model)
    optimizer = MasterAdamW(list(model.parameters()) if kind == "parameters" else model, 0.0)
    step_once(model, optimizer)
    write(model, optimizer)
    step_once(model, optimizer)
    assert (optimizer.view(optimizer.master, 0) == SEVEN).all()
    weight = restored_fp8(model[0].weight) if kind == "fp8" else model[0].weight
    assert (weight == SEVEN).all()


def test_model_does_not_reference_its_optimizer():
    model = small()
    alive = weakref.ref(MasterAdamW(model))
    gc.collect()
    assert alive() is None
    load_submodule(model, None)
    assert (model[0].weight == SEVEN).all()


def test_state_dict_contains_externally_written_weights():
    model = small()
    optimizer = MasterAdamW(list(model.parameters()))
    fill_in_place(model, optimizer)
    assert (optimizer.state_dict()["state"][0]["master"] == SEVEN).all()


def test_masters_follow_model_load_state_dict_without_a_step():
    """CUDA graphs rely on this behavior, because a replay doesn't run the optimizer's Python code."""
    model = small()
    optimizer = MasterAdamW(model)
    load_submodule(model, optimizer)
    assert (optimizer.masters()["0.weight"] == SEVEN).all()


@torch.no_grad()
def load_into_copy(model, optimizer):
    copied = copy.deepcopy(model)
    for weight in copied.parameters():
        weight.zero_()
    copied.load_state_dict(model.state_dict())


def load_optimizer_then_model(model, optimizer):
    saved = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    step_once(model, optimizer, 7)
    optimizer.load_state_dict(saved[0])
    model.load_state_dict(saved[1])


@pytest.mark.parametrize("load", [load_into_copy, load_optimizer_then_model])
@pytest.mark.parametrize("eight_bits", [False, True], ids=["bf16", "fp8"])
def test_masters_keep_their_precision_when_rounded_weights_are_loaded(load, eight_bits):
    model = small()
    if eight_bits:
        fp8.use_fp8(model)
    optimizer = MasterAdamW(model, 1e-3)
    step_once(model, optimizer)
    before = {name: master.clone() for name, master in optimizer.masters().items()}
    scales = optimizer.scales.clone()
    load(model, optimizer)
    optimizer.take_weights()
    for name, master in optimizer.masters().items():
        assert torch.equal(master, before[name]), name
    assert torch.equal(optimizer.scales[optimizer.in_fp8], scales[optimizer.in_fp8])


@pytest.mark.parametrize(
    "move",
    [nn.Module.float, lambda model: model.to(torch.float16)],
    ids=["float", "to"],
)
def test_step_rejects_model_cast_after_construction(move):
    model = small()
    optimizer = MasterAdamW(model)
    move(model)
    draw_gradients(list(model.parameters()), torch.Generator())
    with pytest.raises(RuntimeError, match=r"0\.weight was moved or cast after MasterAdamW was created"):
        optimizer.step()
    assert not optimizer.count.any()


# -- options, and parameters without a gradient ---------------------------------------------------------------


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_masters_are_fp32_for_any_default_dtype(default):
    model = nn.ParameterDict({"matrix": torch.ones(4, 4)})
    torch.set_default_dtype(default)
    try:
        optimizer = MasterAdamW(model, 3e-4, weight_decay=0.0)
        for _ in range(200):
            model["matrix"].grad = torch.ones_like(model["matrix"])
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(optimizer.masters()["matrix"], torch.full((4, 4), 0.94), rtol=1e-4, atol=0)


@pytest.mark.parametrize("option", ["maximize", "amsgrad", "differentiable"])
def test_unsupported_torch_adamw_options_are_rejected(option):
    model = small()
    with pytest.raises(ValueError, match=option):
        MasterAdamW([{"params": model.parameters(), option: True}])
    optimizer = MasterAdamW([{"params": model.parameters(), option: False}])
    saved = optimizer.state_dict()
    saved["param_groups"][0][option] = True
    with pytest.raises(ValueError, match=option):
        optimizer.load_state_dict(saved)
    optimizer.param_groups[0][option] = True
    with pytest.raises(ValueError, match=option):
        step_once(model, optimizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moments": torch.float16}, "float16"),
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
        ({"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        ({"eps": -1.0}, "Invalid epsilon value: -1.0"),
        ({"betas": (0.999, 0.999), "moments": torch.bfloat16}, "at most 1 - 2"),
    ],
)
def test_out_of_range_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        MasterAdamW(small(), **options)


def test_bf16_moments_decay_at_the_largest_allowed_beta1():
    model = nn.ParameterDict({"matrix": torch.zeros(64, 64)})
    optimizer = MasterAdamW(model, 0.0, torch.bfloat16, betas=(1 - 2**-8, 0.999))
    for gradient in (1.0, *300 * [0.0]):
        model["matrix"].grad = torch.full_like(model["matrix"], gradient)
        optimizer.step()
    first = 2**-8
    assert (optimizer.m < 0.9 * first).all(), "the moment must decay rather than round to its old value"


def test_assigned_learning_rate_is_copied_into_the_existing_tensor():
    model = small()
    optimizer = MasterAdamW(model, 1e-3)
    (group,) = optimizer.param_groups
    before, rate = optimizer.master.clone(), group["lr"]
    group["lr"] = 0.0
    step_once(model, optimizer)
    assert torch.equal(optimizer.master, before)
    assert group["lr"] is rate and rate == 0, "the tensor must stay the same, because a graph reads it"
    group["lr"] = 1.0
    optimizer.load_state_dict(optimizer.state_dict())
    assert group["lr"] is rate and rate == 1


def test_learning_rate_may_be_a_one_element_tensor():
    model = small()
    optimizer = MasterAdamW(model, torch.tensor([0.0]))
    before = optimizer.master.clone()
    step_once(model, optimizer)
    assert torch.equal(optimizer.master, before)


def test_learning_rate_on_a_different_device_is_rejected_without_changing_the_model():
    model = small()
    with pytest.raises(ValueError, match="a tensor on meta"):
        MasterAdamW(model, torch.tensor(1e-3, device="meta"))
    assert model[0].weight.dtype == torch.float32


def test_step_rejects_sparse_gradients():
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = MasterAdamW(model)
    model(torch.tensor([1])).float().sum().backward()
    with pytest.raises(RuntimeError, match="weight: got a gradient that is torch.sparse_coo"):
        optimizer.step()
    assert not optimizer.count.any()


@MOMENTS
def test_parameters_without_a_gradient_are_skipped_as_in_torch(moments):
    """Two parameters get a gradient in alternate steps, and a third parameter never gets one."""
    pair = [[nn.Parameter(torch.linspace(-1, 1, 40)) for _ in range(3)] for _ in range(2)]
    mine, theirs = MasterAdamW(pair[0], 1e-2, moments), torch.optim.AdamW(pair[1], 1e-2)
    generator = torch.Generator().manual_seed(0)
    for number in range(20):
        gradient = torch.randn(40, generator=generator)
        for parameters, optimizer in zip(pair, (mine, theirs)):
            optimizer.zero_grad()
            parameters[number % 7 == 0].grad = gradient.clone()
            optimizer.step()
    assert mine.count.tolist() == [17, 3, 0]
    tolerance = 1e-6 if moments == torch.float32 else 1e-3
    for weight, expected in zip(*pair):
        torch.testing.assert_close(weight, expected, rtol=0, atol=tolerance)
    assert torch.equal(pair[0][2].detach(), torch.linspace(-1, 1, 40))


def test_fp8_weight_without_a_gradient_stays_unchanged():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    fp8.use_fp8(model)
    optimizer = MasterAdamW(model, 1e-2)
    before = restored_fp8(model[0].weight)
    for seed in range(3):
        draw_gradients([model[1].weight], torch.Generator().manual_seed(seed))
        optimizer.step()
    torch.testing.assert_close(restored_fp8(model[0].weight), before)


def unfreeze(model, optimizer):
    model[0].requires_grad_(True)


def clear_state(model, optimizer):
    optimizer.state.clear()


def remove_parameter(model, optimizer):
    del optimizer.param_groups[0]["params"][0]


@pytest.mark.parametrize(
    "change, message",
    [
        (unfreeze, "create a new one"),
        (clear_state, "reset"),
        (remove_parameter, "no longer contain the parameters"),
    ],
)
def test_step_rejects_changed_parameters_and_states(change, message):
    model = small()
    model[0].requires_grad_(False)
    optimizer = MasterAdamW(list(model.parameters()))
    assert model[0].weight.dtype == torch.float32 and list(optimizer.masters()) == ["0", "1"]
    step_once(model[2:], optimizer)
    change(model, optimizer)
    with pytest.raises(RuntimeError, match=message):
        step_once(model[2:], optimizer)


# -- docs/master_adamw.py -------------------------------------------------------------------------------------


@MOMENTS
def test_master_adamw_script_trains_and_resumes_bit_identically(moments, monkeypatch, capsys):
    """On a GPU, the script loads the state dict after a CUDA graph of the step has been captured."""
    monkeypatch.syspath_prepend(DOCS)
    spec = importlib.util.spec_from_file_location("master_adamw", DOCS / "master_adamw.py")
    script = importlib.util.module_from_spec(spec)
    before = torch.get_float32_matmul_precision()
    arguments = [
        "--width=32",
        "--hidden=64",
        "--layers=1",
        "--heads=2",
        "--vocabulary=50",
        "--context=16",
        "--steps=40",
    ]
    try:
        spec.loader.exec_module(script)
        same = script.main([*arguments, f"--moments={str(moments).removeprefix('torch.')}"])
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(before)
    printed = capsys.readouterr().out
    first, last = map(float, printed.split("loss ")[1].split(" in ")[0].split(" to "))
    assert same and ": bit-identical" in printed and last < 0.9 * first
