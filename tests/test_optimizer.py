"""MasterAdamW as one of torch's optimizers: groups, schedules, clipping, and a resume that is no interruption."""

import copy
import gc
import importlib.util
import io
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from stepscope.optimizations import MasterAdamW, fp8
from stepscope.studies.ladder import checks

DOCS = Path(__file__).parents[1] / "docs"
MOMENTS = pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SCHEDULERS = {
    "lambda": lambda own: lr_scheduler.LambdaLR(own, lambda t: (t + 1) / 20),
    "cosine": lambda own: lr_scheduler.CosineAnnealingLR(own, 20),
    "cycle": lambda own: lr_scheduler.OneCycleLR(own, 3e-3, total_steps=20),
    "plateau": lambda own: lr_scheduler.ReduceLROnPlateau(own, patience=1),
    "sequence": lambda own: lr_scheduler.SequentialLR(
        own, [lr_scheduler.LinearLR(own, 0.1, total_iters=5), lr_scheduler.ExponentialLR(own, 0.9)], [5]
    ),
}


def draw_gradients(parameters, generator):
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def groups_of(model):
    return [
        {"params": [model["matrix"]], "weight_decay": 0.1},
        {"params": [model["vector"]], "lr": 2e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_groups_schedules_and_clipping_are_torchs(schedule):
    """The same gradients, clipped, give torch's AdamW's weights, and every scheduler of torch sets its rates: in
    the tensors that a graph reads."""
    mine, theirs = checks.make_parameters(), checks.make_parameters()
    pair = [MasterAdamW(groups_of(mine), 1e-3), torch.optim.AdamW(groups_of(theirs), 1e-3)]
    schedulers = [SCHEDULERS[schedule](own) for own in pair]
    rates = [group["lr"] for group in pair[0].param_groups]
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(19):
        draw_gradients(mine.values(), generator)
        for own, other in zip(mine.values(), theirs.values()):
            other.grad = own.grad.float().clone()
        for model, own, scheduler in zip((mine, theirs), pair, schedulers):
            norm = nn.utils.clip_grad_norm_([model["vector"]], 1.0)
            assert norm > 1
            own.step()
            scheduler.step(*[1.0] if schedule == "plateau" else [])
        for rate, own, other in zip(rates, pair[0].param_groups, pair[1].param_groups):
            assert own["lr"] is rate and rate.item() == pytest.approx(float(other["lr"]), rel=1e-6)
            assert own["betas"] == pytest.approx(other["betas"])
        seen.add(rates[0].item())
    assert len(seen) > 5
    for own, other in zip(pair[0].masters().values(), theirs.values()):
        assert (own - other).abs().max() < 1e-5 * other.abs().max()


def test_parameters_come_as_a_model_a_list_or_with_names():
    model = checks.make_parameters()
    model["frozen"] = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    assert list(MasterAdamW(model).masters()) == ["matrix", "vector"]
    assert model["frozen"].dtype == torch.float32
    model = checks.make_parameters()
    assert list(MasterAdamW(model.values()).masters()) == ["0", "1"]
    assert model["matrix"].dtype == torch.bfloat16
    assert list(MasterAdamW(checks.make_parameters().named_parameters()).masters()) == ["matrix", "vector"]
    groups = [{"params": [each]} for each in checks.make_parameters().named_parameters()]
    assert list(MasterAdamW(groups).masters()) == ["matrix", "vector"]


def test_a_closure_gives_its_loss_and_gradients():
    model = checks.make_parameters()
    own = MasterAdamW(model, 1e-2)

    def closure():
        own.zero_grad()
        loss = sum(parameter.float().square().sum() for parameter in model.values())
        loss.backward()
        return loss

    assert own.step(closure) > own.step(closure) > 0


def test_what_it_cannot_do_it_says():
    model = checks.make_parameters()
    with pytest.raises(ValueError, match="float16"):
        MasterAdamW(model, moments=torch.float16)
    with pytest.raises(ValueError, match="same name"):
        MasterAdamW([{"params": [("a", model["matrix"])]}, {"params": [("a", model["vector"])]}])
    own = MasterAdamW(model)
    with pytest.raises(RuntimeError, match="all groups when it is made"):
        own.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    model = checks.make_parameters()
    with pytest.raises(ValueError, match="a tensor on meta"):
        MasterAdamW(model, torch.tensor(1e-3, device="meta"))
    assert model["matrix"].dtype == torch.float32, "a model whose optimizer is refused stays as it is"


# -- what a GPU's kernels look up ----------------------------------------------------------------------------


@pytest.fixture
def tabled():
    """An optimizer of two groups with the kernels' tables: of FP8 matrices, others, a cube and vectors, in no order."""
    model = nn.Sequential(
        nn.Linear(128, 64, bias=False),
        nn.Linear(70, 9),
        nn.LayerNorm(1000),
        nn.Linear(64, 192, bias=False),
        nn.Conv1d(3, 5, 2, bias=False),
    )
    fp8.use_fp8(nn.ModuleList([model[0], model[3]]))
    own = MasterAdamW([{"params": model[:2].parameters()}, {"params": model[2:].parameters()}])
    own._make_tables()
    return own


def test_gradients_are_told_by_where_they_lie_and_refused_where_the_kernel_cannot_read_them(
    tabled,
):
    for capturing in (False, False, True):
        draw_gradients(tabled.parameters, torch.Generator().manual_seed(0))
        eager, addresses = (
            tabled.table.clone(),
            [parameter.grad.data_ptr() for parameter in tabled.parameters],
        )
        assert tabled._table(tabled._gradients(), capturing).tolist() == addresses != eager.tolist()
    assert torch.equal(tabled.table, eager), "a graph has a table of its own"
    weight = tabled.parameters[1]
    for wrong in (torch.zeros(70, 9).bfloat16().t(), torch.zeros(70 * 9 + 8).bfloat16()[4:-4].view(9, 70)):
        weight.grad = wrong
        with pytest.raises(RuntimeError, match="1: the gradient is not contiguous"):
            tabled._table(tabled._gradients(), False)


def test_fp8_weights_whose_tiles_a_kernel_cannot_fill_are_refused(tabled):
    for shape in ((96, 128), (128, 96)):
        tabled.shapes[0] = torch.Size(shape)
        with pytest.raises(ValueError, match="multiples of 64"):
            tabled._tiles(0)


# -- state dicts ----------------------------------------------------------------------------------------------


def trained(moments, seed, saved=None, eight_bits=False):
    """A model in training: its optimizer, its scheduler, and a function that takes so many clipped steps over
    data that the step's number gives."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24, bias=not eight_bits))
    if eight_bits:
        fp8.use_fp8(model[1:])
    own = MasterAdamW(model, 1e-2, moments, betas=(0.9, 0.95))
    scheduler = lr_scheduler.CosineAnnealingLR(own, 40)
    if saved:
        scheduler.load_state_dict(saved["scheduler"])
        own.load_state_dict(saved["optimizer"])

    def train(first, last):
        for number in range(first, last):
            x = torch.randn(16, 24, generator=torch.Generator().manual_seed(number))
            own.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(x) - x.flip(1)).float().square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            own.step()
            scheduler.step()
        return [loss.item(), *(parameter.detach().clone() for parameter in model.parameters())]

    return own, scheduler, train


@pytest.mark.parametrize("eight_bits", [False, True], ids=["bf16", "fp8"])
@MOMENTS
def test_a_resume_equals_no_interruption_to_the_bit(moments, eight_bits):
    own, scheduler, train = trained(moments, 0, eight_bits=eight_bits)
    train(0, 15)
    file = io.BytesIO()
    torch.save({"optimizer": own.state_dict(), "scheduler": scheduler.state_dict()}, file)
    first = train(15, 30)
    file.seek(0)
    resumed, _, train = trained(moments, 1, torch.load(file), eight_bits)
    again = train(15, 30)
    assert again[0] == first[0]
    for one, other in zip(first[1:], again[1:]):
        assert torch.equal(one, other)
    for name in ("master", "m", "v", "count", "rates", "scales"):
        assert torch.equal(getattr(own, name), getattr(resumed, name)), name


def test_a_resume_has_the_scales_of_the_step_before():
    own, _, train = trained(torch.bfloat16, 0, eight_bits=True)
    own.masters()["2.weight"].mul_(100)  # weights that have grown have that scale only in the next step
    train(0, 1)
    resumed, _, _ = trained(torch.bfloat16, 1, eight_bits=True)
    resumed.load_state_dict(own.state_dict())
    assert resumed.named["2.weight"].fp8_scale == own.named["2.weight"].fp8_scale
    for one, other in zip(own.parameters, resumed.parameters):
        assert torch.equal(one, other)


@pytest.mark.parametrize("eight_bits", [False, True], ids=["bf16", "fp8"])
def test_weights_that_are_loaded_into_its_model_are_not_undone(eight_bits):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40, bias=False), nn.LayerNorm(40))
    if eight_bits:
        fp8.use_fp8(model)
    wanted = {name: torch.randn_like(weight) for name, weight in model.state_dict().items()}
    own = MasterAdamW(model, 0.0)
    model.load_state_dict(wanted)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    own.step()
    for name, weight in own.masters().items():
        dtype = own.named[name].dtype
        assert torch.equal(weight.to(dtype), wanted[name].to(dtype)), name
    weight = model[0].weight.detach()
    found = fp8.layouts(weight)[0].float() * model[0].weight_scale if eight_bits else weight.float()
    assert (found - wanted["0.weight"]).abs().max() < wanted["0.weight"].abs().max() / 16
    alive = weakref.ref(own)
    del own
    gc.collect()
    assert alive() is None, "the model does not keep it"
    model.load_state_dict(wanted)


@pytest.mark.parametrize("before", [[], [0], [1], [0, 1]])
def test_where_a_state_dict_lacks_a_scale_the_masters_give_it(before):
    """Weights have grown a hundredfold, so that a scale of before would not hold them."""
    pair = []
    for eight_bits in (before, [0, 1]):
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(2)))
        fp8.use_fp8(nn.ModuleList(model[index] for index in eight_bits))
        pair.append(MasterAdamW(model))
    own, other = pair
    own.master.mul_(100)
    own.reset()
    other.load_state_dict(own.state_dict())
    for name, master in own.masters().items():
        weight = other.named[name]
        restored = fp8.layouts(weight.detach())[0].float() * weight.fp8_scale
        assert (restored - master).abs().max() < master.abs().max() / 16, name


@MOMENTS
def test_a_state_dict_holds_fp32_masters_and_moments_as_they_are(moments):
    own, _, train = trained(moments, 0)
    train(0, 3)
    state = own.state_dict()["state"]
    for one, parameter in zip(state.values(), own.parameters):
        assert (
            one["master"].dtype == torch.float32
            and one["exp_avg"].dtype == one["exp_avg_sq"].dtype == moments
        )
        assert torch.equal(one["master"].to(parameter.dtype), parameter)
        assert one["step"] == 3 and one["step"].shape == ()
    assert not torch.equal(state[0]["master"], own.parameters[0].float()), (
        "more digits than the bf16 copy has"
    )


def test_it_is_loaded_in_place_or_not_at_all():
    own, _, train = trained(torch.float32, 0)
    train(0, 3)
    saved = copy.deepcopy(own.state_dict())
    train(3, 6)
    places = [own.master, own.low, own.m, own.v, own.count, *(group["lr"] for group in own.param_groups)]
    addresses = [place.data_ptr() for place in places]
    moved = own.master.clone()
    torchs = torch.optim.AdamW(nn.Linear(24, 40).parameters()).state_dict()
    (group,) = saved["param_groups"]
    others = {
        "groups": {**saved, "param_groups": 2 * [group]},
        "fewer": {**saved, "param_groups": [{**group, "params": [0, 1, 2]}]},
        "split": {
            **saved,
            "param_groups": [
                {**group, "params": some} for some in (group["params"][:1], group["params"][1:])
            ],
        },
        "turned": {
            **saved,
            "state": saved["state"] | {0: {key: one.t() for key, one in saved["state"][0].items()}},
        },
        "step": {
            **saved,
            "state": {
                n: {key: one[key] for key in one if key != "step"} for n, one in saved["state"].items()
            },
        },
        "state": {**saved, "state": {0: saved["state"][0]}},
        "shape": {**saved, "state": saved["state"] | {3: saved["state"][0]}},
        "torch's": torchs,
    }
    for name, other in others.items():
        with pytest.raises(ValueError, match="state dict"):
            own.load_state_dict(other)
        assert torch.equal(own.master, moved), name
    saved["param_groups"][0] |= {"betas": [0.7, 0.8], "eps": 1e-3, "weight_decay": 0.3}
    own.load_state_dict(saved)
    saved["param_groups"][0]["betas"][0] = 0.1
    assert own.param_groups[0]["betas"] == [0.7, 0.8], "a copy"
    assert own.betas.tolist() == [4 * [0.7], 4 * [0.8]] and own.decays.tolist() == 4 * [0.3], (
        "also where a captured graph reads them"
    )
    assert own.scalars[0, 3:].tolist() == pytest.approx([0.7, 0.3, 0.8, 0.2, 1e-3])
    assert [place.data_ptr() for place in places] == addresses
    assert (own.count == 3).all() and not torch.equal(own.master, moved)
    assert torch.equal(own.low, own.master.bfloat16()), "the model's weights are the masters'"


def test_fp32_moments_can_be_taken_on_in_bf16():
    own, _, train = trained(torch.float32, 0)
    train(0, 3)
    other, _, _ = trained(torch.bfloat16, 1)
    other.load_state_dict(own.state_dict())
    assert torch.equal(other.master, own.master) and torch.equal(other.v, own.v.bfloat16())


# -- torch's AdamW, copies and hooks ---------------------------------------------------------------------------


def small(bias=False):
    """Two matrices and a norm, trained without autocast unless they have biases."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12, bias=bias), nn.Tanh(), nn.Linear(12, 8, bias=bias), nn.RMSNorm(8))


def step_once(model, optimizer, seed=0):
    optimizer.zero_grad()
    draw_gradients(list(model.parameters()), torch.Generator().manual_seed(seed))
    optimizer.step()


def test_torchs_state_dict_continues_from_the_models_weights():
    model = small()
    theirs = torch.optim.AdamW(model.parameters(), 1e-2, betas=(0.8, 0.9), weight_decay=0.2)
    for seed in range(3):
        step_once(model, theirs, seed)
    mine = copy.deepcopy(model)
    optimizer = MasterAdamW(mine)
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert optimizer.count.tolist() == [3, 3, 3] and optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    for seed in range(3, 6):
        draw_gradients(list(mine.parameters()), torch.Generator().manual_seed(seed))
        for one, other in zip(model.parameters(), mine.parameters()):
            one.grad = other.grad.float()
        theirs.step()
        optimizer.step()
    for one, master in zip(model.parameters(), optimizer.masters().values()):
        torch.testing.assert_close(master, one.detach(), rtol=1e-5, atol=1e-6)
    theirs.load_state_dict(optimizer.state_dict())  # and back
    step_once(model, theirs)


def test_torchs_state_dict_may_lack_parameters_that_had_no_gradient():
    model = small()
    theirs = torch.optim.AdamW(model.parameters())
    draw_gradients([model[0].weight], torch.Generator().manual_seed(0))
    theirs.step()
    optimizer = MasterAdamW(small())
    optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.count.tolist() == [1, 0, 0]
    amsgrad = torch.optim.AdamW(model.parameters(), amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad"):
        optimizer.load_state_dict(amsgrad.state_dict())
    assert optimizer.count.tolist() == [1, 0, 0]


@pytest.mark.parametrize("way", ["deepcopy", "deepcopy with the model", "pickle"])
@MOMENTS
def test_a_copy_trains_like_its_original_and_leaves_it_alone(way, moments):
    model = small()
    optimizer = MasterAdamW(model, 1e-2, moments, betas=(0.8, 0.9))
    step_once(model, optimizer)
    if way == "deepcopy":
        copied = copy.deepcopy(optimizer)
    elif way == "pickle":
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
    for one, other in zip(copied.parameters, optimizer.parameters):
        assert torch.equal(one, other) and one is not other


def test_an_optimizer_of_fp8_weights_refuses_to_be_copied():
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    fp8.use_fp8(model)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(MasterAdamW(model))


def test_a_pickled_model_has_its_weights_and_no_optimizer():
    model = small()
    MasterAdamW(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for one, other in zip(model.parameters(), loaded.parameters()):
        assert torch.equal(one, other)
    loaded.load_state_dict(model.state_dict())


def test_a_saved_model_takes_its_weights_bytes_alone():
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.LayerNorm(256))
    optimizer = MasterAdamW(model)
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in model.parameters())
    flats = optimizer.low, optimizer.master, optimizer.master
    for index, (parameter, flat) in enumerate(zip(model.parameters(), flats)):
        assert parameter.data_ptr() == optimizer.view(flat, index).data_ptr(), "the buffer's memory"
    file = io.BytesIO()
    torch.save(model[1].state_dict(), file)
    assert len(file.getvalue()) < 8192


def test_load_hooks_are_called_and_state_dict_hooks_see_masters():
    model = small()
    optimizer = MasterAdamW(model, 1e-2)
    called = []
    optimizer.register_load_state_dict_pre_hook(
        lambda _, saved: {**saved, "param_groups": [{**saved["param_groups"][0], "eps": 1e-3}]}
    )
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["eps"] == 1e-3 and called == ["loaded"]
    handle = optimizer.register_state_dict_post_hook(
        lambda _, saved: called.append("master" in saved["state"][0]) or {"only": 1}
    )
    assert optimizer.state_dict() == {"only": 1} and called[-1] is True
    handle.remove()


# -- weights that other code writes ---------------------------------------------------------------------------

SEVEN = 7.0


def load_submodule(model, _):
    model[0].load_state_dict({"weight": torch.full_like(model[0].weight, SEVEN)})


def load_through_compiled(model, _):
    torch.compile(model, backend="eager")._orig_mod.load_state_dict(
        {name: torch.full_like(weight, SEVEN) for name, weight in model.state_dict().items()}
    )


@torch.no_grad()
def fill_in_place(model, _):
    model[0].weight.clamp_(SEVEN, SEVEN)


def initialize(model, _):
    nn.init.constant_(model[0].weight, SEVEN)


def swap_average(model, _):
    average = torch.optim.swa_utils.AveragedModel(model)
    fill_in_place(average.module, _)
    with torch.no_grad():
        for one, other in zip(model.parameters(), average.module.parameters()):
            one.copy_(other)


@pytest.mark.parametrize(
    "write", [load_submodule, load_through_compiled, fill_in_place, initialize, swap_average]
)
@pytest.mark.parametrize("given", ["model", "parameters"])
def test_weights_written_by_other_code_survive_a_step(write, given):
    model = small()
    optimizer = MasterAdamW(model if given == "model" else list(model.parameters()), 0.0)
    step_once(model, optimizer)
    write(model, optimizer)
    step_once(model, optimizer)
    assert (model[0].weight == SEVEN).all() and (optimizer.view(optimizer.master, 0) == SEVEN).all()


def test_weights_written_before_a_state_dict_are_in_it():
    model = small()
    optimizer = MasterAdamW(list(model.parameters()))
    fill_in_place(model, optimizer)
    assert (optimizer.state_dict()["state"][0]["master"] == SEVEN).all()


def test_a_load_into_the_model_reaches_the_masters_before_a_graph_is_replayed():
    """No step is taken in between: a replayed graph calls no code of the optimizer."""
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


def load_one_vector(model, optimizer):
    model.load_state_dict({"3.weight": model[3].weight.detach().clone()}, strict=False)


def load_optimizer_then_model(model, optimizer):
    saved = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    step_once(model, optimizer, 7)
    optimizer.load_state_dict(saved[0])
    model.load_state_dict(saved[1])


@pytest.mark.parametrize("load", [load_into_copy, load_one_vector, load_optimizer_then_model])
@pytest.mark.parametrize("eight_bits", [False, True], ids=["bf16", "fp8"])
def test_masters_keep_their_digits_when_their_own_rounding_is_loaded(load, eight_bits):
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
    [nn.Module.float, nn.Module.half, nn.Module.double, lambda model: model.to(torch.float32)],
    ids=["float", "half", "double", "to"],
)
def test_a_model_that_is_cast_later_is_refused(move):
    model = small()
    optimizer = MasterAdamW(model)
    move(model)
    draw_gradients(list(model.parameters()), torch.Generator())
    with pytest.raises(RuntimeError, match=r"0\.weight was moved or cast after MasterAdamW was made"):
        optimizer.step()
    assert not optimizer.count.any()


def test_convolutions_become_bf16_and_another_memory_format_is_refused():
    model = nn.Conv2d(4, 8, 3, bias=False)
    optimizer = MasterAdamW(model)
    assert model.weight.dtype == torch.bfloat16
    model(torch.randn(2, 4, 6, 6).bfloat16()).float().sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)
    model.to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="moved or cast"):
        optimizer.step()


# -- options, and parameters without a gradient ---------------------------------------------------------------


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_masters_are_fp32_whatever_torchs_default_is(default):
    torch.set_default_dtype(default)
    try:
        model = nn.ParameterDict({"matrix": torch.ones(4, 4, dtype=torch.float32)})
        optimizer = MasterAdamW(model, 3e-4, weight_decay=0.0)
        for _ in range(200):
            model["matrix"].grad = torch.ones_like(model["matrix"])
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    for name in ("master", "scalars", "scales", "largest"):
        assert getattr(optimizer, name).dtype == torch.float32
    torch.testing.assert_close(optimizer.masters()["matrix"], torch.full((4, 4), 0.94), rtol=1e-4, atol=0)


@pytest.mark.parametrize("option", ["maximize", "amsgrad", "differentiable"])
def test_options_of_torchs_adamw_that_it_lacks_are_refused_in_groups(option):
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
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
        ({"lr": torch.tensor([1e-3, 1e-3])}, "Tensor lr must be 1-element"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        ({"eps": -1.0}, "Invalid epsilon value: -1.0"),
        ({"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
        ({"betas": (0.999, 0.999), "moments": torch.bfloat16}, "at most 1 - 2"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MasterAdamW(small(), **options)


def test_the_largest_beta1_that_bf16_moments_take_lets_them_fall():
    model = nn.ParameterDict({"matrix": torch.zeros(64, 64)})
    optimizer = MasterAdamW(model, 0.0, torch.bfloat16, betas=(1 - 2**-8, 0.999))
    for gradient in (1.0, *300 * [0.0]):
        model["matrix"].grad = torch.full_like(model["matrix"], gradient)
        optimizer.step()
    first = 2**-8
    assert (optimizer.m < 0.9 * first).all(), "a moment that rounds to itself does not fall"


def test_a_rate_of_one_element_and_a_rate_that_is_assigned_are_read():
    model = small()
    optimizer = MasterAdamW(model, torch.tensor([0.0]))
    before = optimizer.master.clone()
    step_once(model, optimizer)
    assert torch.equal(optimizer.master, before)
    optimizer = MasterAdamW(model, 1e-3)
    before, rate = optimizer.master.clone(), optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.0
    step_once(model, optimizer)
    assert torch.equal(optimizer.master, before)
    assert optimizer.param_groups[0]["lr"] is rate and rate == 0, "a graph reads this tensor"
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] is rate and rate == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex64], ids=str)
def test_parameters_of_other_dtypes_are_refused(dtype):
    with pytest.raises(
        ValueError, match=f"weight: got {dtype}, but expected torch.float32 or torch.bfloat16"
    ):
        MasterAdamW(nn.ParameterDict({"weight": torch.ones(2, 2, dtype=dtype)}))


def test_parameters_on_two_devices_and_none_at_all_are_refused():
    two = [("a", nn.Parameter(torch.ones(2))), ("b", nn.Parameter(torch.ones(2, device="meta")))]
    with pytest.raises(ValueError, match="b: got a parameter on meta, but expected cpu, where a is"):
        MasterAdamW(two)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        MasterAdamW([nn.Parameter(torch.ones(2), requires_grad=False)])


def test_sparse_gradients_are_refused():
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = MasterAdamW(model)
    model(torch.tensor([1])).float().sum().backward()
    with pytest.raises(RuntimeError, match="weight: got a gradient that is torch.sparse_coo"):
        optimizer.step()
    assert not optimizer.count.any()


@MOMENTS
def test_parameters_without_a_gradient_are_left_out_as_in_torch(moments):
    """Two branches in turn, and a head that is never used: each parameter counts its own steps."""
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
    for one, other in zip(*pair):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
    assert torch.equal(pair[0][2].detach(), torch.linspace(-1, 1, 40))


def test_an_fp8_weight_without_a_gradient_stays_as_it_is():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    fp8.use_fp8(model)
    optimizer = MasterAdamW(model, 1e-2)
    before = optimizer.masters()["0.weight"].clone()
    for seed in range(3):
        draw_gradients([model[1].weight], torch.Generator().manual_seed(seed))
        optimizer.step()
    assert torch.equal(optimizer.masters()["0.weight"], before)
    restored = fp8.layouts(model[0].weight.detach())[0].float() * model[0].weight_scale
    assert (restored - before).abs().max() < before.abs().max() / 16


def test_parameters_that_are_unfrozen_or_lose_their_group_or_state_are_refused():
    model = small()
    model[0].requires_grad_(False)
    optimizer = MasterAdamW(list(model.parameters()))
    assert model[0].weight.dtype == torch.float32 and list(optimizer.masters()) == ["0", "1"]
    step_once(model[2:], optimizer)
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="make a new MasterAdamW"):
        step_once(model[2:], optimizer)
    model[0].requires_grad_(False)
    state = dict(optimizer.state)
    optimizer.state.clear()
    with pytest.raises(RuntimeError, match="reset"):
        step_once(model[2:], optimizer)
    optimizer.state.update(state)
    del optimizer.param_groups[0]["params"][0]
    with pytest.raises(RuntimeError, match="other parameters"):
        step_once(model[2:], optimizer)


# -- the script -----------------------------------------------------------------------------------------------


@MOMENTS
def test_the_script_resumes_to_the_bit(moments, monkeypatch, capsys):
    monkeypatch.syspath_prepend(DOCS)
    spec = importlib.util.spec_from_file_location("master_adamw", DOCS / "master_adamw.py")
    script = importlib.util.module_from_spec(spec)
    before = torch.get_float32_matmul_precision()
    try:
        spec.loader.exec_module(script)
        same = script.main(
            [
                "--width=32",
                "--hidden=64",
                "--layers=1",
                "--heads=2",
                "--vocabulary=50",
                "--context=16",
                "--steps=40",
                f"--moments={str(moments).removeprefix('torch.')}",
            ]
        )
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(before)
    said = capsys.readouterr().out
    first, last = map(float, said.split("loss ")[1].split(" in ")[0].split(" to "))
    assert same and "the same to the bit" in said
    assert last < 0.9 * first
