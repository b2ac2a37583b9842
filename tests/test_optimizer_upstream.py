"""Apply PyTorch's optimizer tests to MasterAdamW.

``torch.testing._internal.common_optimizers`` contains the inputs of PyTorch's test class TestOptimRenewed. No
package contains the class itself, so this file repeats its checks with the same inputs. PyTorch's models expect
fp32 weights, but MasterAdamW converts weights to bf16, so the models in this file cast them back to fp32.
"""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from stepscope.optimizations import MasterAdamW

pytest.importorskip("expecttest")  # torch.testing imports it
from torch.testing._internal import common_optimizers

ADAMW = next(info for info in common_optimizers.optim_db if info.optim_cls is torch.optim.AdamW)

# Checks of TestOptimRenewed that don't apply, with the reasons:
# * test_forloop_goes_right_direction_multigpu: all weights are on one device
# * test_param_group_with_lrscheduler_goes_right_direction: adds a group, which is rejected
# * test_can_load_older_state_dict: older versions of this optimizer are not supported
# * test_complex, test_complex_2d: complex parameters are rejected
# * test_foreach_*, test_fused_*, test_set_default_dtype_works_with_foreach: there is one implementation
# * test_capturable_*: tests/test_fast_step_gpu.py captures it
# * test_mixed_device_dtype: weights of two dimensions become bf16, others fp32, on one device
# * test_cpu_load_state_dict, test_rosenbrock_sparse: for other optimizers
# * test_peak_memory_foreach, test_fused_cpu_matches_cuda: there is one implementation
# * test_grad_scaling_autocast_fused_optimizers: only for fused=True; Trainer and Lightning scale outside

# Inputs and errors that don't apply, keyed by a part of their description, with the reasons.
OTHER_INPUTS = {
    "maximize": "rejected",
    "amsgrad": "rejected",
    "foreach": "there is no such argument",
    "betas must be either both floats or both Tensors": "both are read as numbers",
}


def applies(each):
    return not any(text in each.desc for text in OTHER_INPUTS)


def error_inputs():
    inputs = ADAMW.optim_error_inputs_func(device="cpu", dtype=torch.float32)
    return [each for each in inputs if applies(each.optimizer_error_input)]


INPUTS = [each for each in ADAMW.optim_inputs_func(device="cpu") if applies(each)]
OPTIONS = pytest.mark.parametrize(
    "options", [each.kwargs for each in INPUTS], ids=[each.desc for each in INPUTS]
)


def weight_and_bias(contiguous=True):
    torch.manual_seed(0)
    if contiguous:
        return nn.Parameter(torch.randn(10, 5)), nn.Parameter(torch.randn(10))
    return nn.Parameter(torch.randn(10, 5, 2)[..., 0]), nn.Parameter(torch.randn(10, 2)[..., 0])


def closure_of(optimizer, weight, bias):
    x = torch.linspace(-1, 1, 5)

    def closure():
        optimizer.zero_grad()
        loss = (weight.float().mv(x) + bias).square().sum()
        loss.backward()
        return loss

    return closure


def test_most_upstream_inputs_apply():
    assert len(INPUTS) >= 3 and len(error_inputs()) >= 6


@pytest.mark.parametrize("wrong", error_inputs(), ids=lambda wrong: wrong.optimizer_error_input.desc)
def test_upstream_error_inputs_are_rejected(wrong):
    given = wrong.optimizer_error_input
    parameters = weight_and_bias() if given.params is None else given.params
    if issubclass(wrong.error_type, Warning):
        with pytest.warns(wrong.error_type, match=wrong.error_regex):
            MasterAdamW(parameters, **given.kwargs)
        return
    with pytest.raises(wrong.error_type, match=wrong.error_regex):
        MasterAdamW(parameters, **given.kwargs)


@OPTIONS
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
def test_upstream_steps_reduce_the_loss_with_every_scheduler(options, contiguous):
    for make_schedulers in [[], *([make] for make in ADAMW.scheduler_inputs[0]), *ADAMW.scheduler_inputs]:
        weight, bias = weight_and_bias(contiguous)
        optimizer = MasterAdamW([weight, bias], **options)
        schedulers = [make(optimizer) for make in make_schedulers]
        closure = closure_of(optimizer, weight, bias)
        first = closure().item()
        for _ in range(20):
            loss = optimizer.step(closure)
            for scheduler in schedulers:
                scheduler.step(*[loss] if isinstance(scheduler, ReduceLROnPlateau) else [])
        assert closure().item() < first


def test_upstream_tensor_learning_rates_match_numbers():
    ends = []
    for rate in (1e-3, torch.tensor(1e-3, dtype=torch.float64)):
        weight, bias = weight_and_bias()
        optimizer = MasterAdamW([weight, bias], rate)
        for _ in range(5):
            optimizer.step(closure_of(optimizer, weight, bias))
        ends.append(optimizer.master)
    assert torch.equal(*ends)


@OPTIONS
@pytest.mark.parametrize("named", [(False, False), (True, False), (False, True), (True, True)])
def test_upstream_state_dict_is_deterministic_and_not_modified(options, named):
    def make(is_named):
        weight, bias = weight_and_bias()
        parameters = [("weight", weight), ("bias", bias)] if is_named else [weight, bias]
        optimizer = MasterAdamW(parameters, **options)
        return optimizer, closure_of(optimizer, weight, bias)

    optimizer, closure = make(named[0])
    for _ in range(3):
        optimizer.step(closure)
    saved = copy.deepcopy(optimizer.state_dict())
    given = copy.deepcopy(saved)
    other, other_closure = make(named[1])
    other.load_state_dict(given)
    assert str(given) == str(saved)
    for _ in range(5):
        optimizer.step(closure)
        other.step(other_closure)
        assert torch.equal(optimizer.master, other.master)
    assert ("param_names" in other.state_dict()["param_groups"][0]) == named[1]


def test_upstream_state_dict_loads_with_weights_only_and_numeric_steps(tmp_path):
    weight, bias = weight_and_bias()
    optimizer = MasterAdamW([weight, bias])
    closure = closure_of(optimizer, weight, bias)
    optimizer.step(closure)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert str(loaded) == str(optimizer.state_dict())
    for state in loaded["state"].values():
        state["step"] = state["step"].item()
    optimizer.load_state_dict(loaded)
    optimizer.step(closure)
    assert optimizer.count.tolist() == [2, 2]


def test_upstream_hooks_are_called_in_order():
    weight, bias = weight_and_bias()
    optimizer, called = MasterAdamW([weight, bias]), []
    kinds = "step_pre", "step_post", "state_dict_pre", "state_dict_post"
    kinds += "load_state_dict_pre", "load_state_dict_post"
    for kind in kinds:
        getattr(optimizer, f"register_{kind}_hook")(lambda *_, kind=kind: called.append(kind))
    optimizer.step(closure_of(optimizer, weight, bias))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == list(kinds)


def test_compiled_step_trains():
    weight, bias = weight_and_bias()
    optimizer = MasterAdamW([weight, bias], 1e-2)
    closure = closure_of(optimizer, weight, bias)
    step = torch.compile(optimizer.step, backend="eager")
    first = closure().item()
    for _ in range(5):
        closure()
        step()
    assert closure().item() < first and optimizer.count.tolist() == [5, 5]
