"""Test MasterAdamW on a GPU: its kernels, and steps that docs/master_adamw.py captures as CUDA graphs.

The tests don't check any times.
"""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from stepscope.optimizations import MasterAdamW, fp8
from stepscope.studies.ladder import checks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DOCS = Path(__file__).parents[1] / "docs"
MOMENTS = pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
RATE, STEPS = 1e-3, 20


@pytest.fixture(scope="module")
def script():
    before = torch.get_float32_matmul_precision()
    sys.path.insert(0, str(DOCS))
    yield importlib.import_module("master_adamw")
    sys.path.remove(str(DOCS))
    torch.set_float32_matmul_precision(before)


def assert_same(tensor, expected, description):
    torch.testing.assert_close(
        tensor, expected, rtol=0, atol=0, msg=lambda message: f"{description}: {message}"
    )


def assert_same_state(optimizer, expected):
    for name in ("count", "rates", "scalars", "master", "low", "m", "v"):
        assert_same(getattr(optimizer, name).cpu(), getattr(expected, name).cpu(), name)


def step_on_both_devices(pair, missing=lambda number: ()):
    """Run the same optimizer steps on a GPU and a CPU.

    In each step, the parameters whose indices are in ``missing(step)`` don't get a gradient.
    """
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        for index, (on_gpu, on_cpu) in enumerate(zip(*(optimizer.parameters for optimizer in pair))):
            gradient = torch.randn(on_cpu.shape, generator=generator).to(on_cpu.dtype)
            on_cpu.grad = None if index in missing(number) else gradient
            on_gpu.grad = None if index in missing(number) else gradient.cuda()
        for optimizer in pair:
            optimizer.step()


# -- the kernel -----------------------------------------------------------------------------------------------


def groups_of(model):
    return [
        {"params": [model["matrix"]], "weight_decay": 0.1},
        {"params": [model["vector"]], "lr": 2 * RATE, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0},
    ]


@MOMENTS
def test_kernel_matches_numpy_formula_bit_for_bit(moments):
    compared, unequal = checks.against_formula("cuda", moments)
    assert compared > 36_000 and not unequal, f"{unequal:,} of {compared:,} numbers differ"


@pytest.mark.skipif(torch.cuda.is_available() and not fp8.has_fp8("cuda"), reason="needs FP8")
@MOMENTS
def test_fp8_kernel_matches_the_formula(moments):
    """The model has non-FP8 parameters; matrices span several tiles, with dimensions that aren't powers of 2."""
    models, pair = [], []
    for device in ("cuda", "cpu"):
        torch.manual_seed(0)
        linear = (nn.Linear(320, 192, bias=False), nn.Linear(192, 64, bias=False), nn.Linear(64, 70))
        model = nn.Sequential(*linear).to(device)
        fp8.use_fp8(model[:2])
        models.append(model)
        pair.append(MasterAdamW(model, RATE, moments))
    step_on_both_devices(pair, lambda number: () if number % 3 else (0,))
    on_gpu, on_cpu = pair
    torch.testing.assert_close(on_gpu.master.cpu(), on_cpu.master, rtol=1e-6, atol=1e-8)
    for index, (parameter, expected) in enumerate(zip(on_gpu.parameters, on_cpu.parameters)):
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same(on_gpu.state[parameter][name].cpu(), on_cpu.state[expected][name], name)
        if index in on_gpu.in_fp8:
            rows, columns = fp8.layouts(parameter.detach())
            rounded = (on_gpu.view(on_gpu.master, index) / on_gpu.scales[index]).to(fp8.FP8).float()
            assert_same(rows.float(), rounded, "the weight")
            assert_same(columns.float(), rounded.t(), "the transposed weight")
    assert_same(on_gpu.scales.cpu(), on_cpu.scales, "scales")
    x = torch.randn(128, 320).bfloat16()
    output, expected = (
        model[:2](x.to(device)).float().cpu() for model, device in zip(models, ("cuda", "cpu"))
    )
    assert (output - expected).norm() < 0.02 * expected.norm()


@MOMENTS
def test_kernel_handles_groups_and_missing_gradients_like_the_formula(moments):
    shapes = (64, 128), (130,), (3, 5, 7), (), (9, 70)
    options = {"lr": 2 * RATE, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0}
    pair = []
    for device in ("cuda", "cpu"):
        generator = torch.Generator().manual_seed(0)
        drawn = [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
        groups = [{"params": drawn[:2], "weight_decay": 0.1}, {"params": drawn[2:], **options}]
        pair.append(MasterAdamW(groups, RATE, moments))
    step_on_both_devices(pair, lambda number: [index for index in range(5) if (index + number) % 3 == 0])
    on_gpu, on_cpu = pair
    for name in ("count", "rates", "scalars", "m", "v"):
        assert_same(getattr(on_gpu, name).cpu(), getattr(on_cpu, name), name)
    tolerance = 0 if moments == torch.float32 else 1e-8  # with bf16 moments, divisions are approximate
    torch.testing.assert_close(on_gpu.master.cpu(), on_cpu.master, rtol=100 * tolerance, atol=tolerance)
    for parameter, master in zip(on_gpu.parameters, on_gpu.masters().values()):
        assert_same(parameter.detach(), master.to(parameter.dtype), "the model's weights")


def test_eager_step_does_not_synchronize():
    optimizer, step, _ = stepping(torch.bfloat16)
    step()
    gradients = [parameter.grad for parameter in optimizer.parameters]
    assert all(gradient is not None for gradient in gradients)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- in a CUDA graph ------------------------------------------------------------------------------------------


def test_graph_capture_requires_a_gradient_for_every_parameter():
    optimizer, step, _ = stepping(torch.float32)
    step()
    graph = torch.cuda.CUDAGraph()
    optimizer.parameters[1].grad = None
    with pytest.raises(RuntimeError, match="1: no gradient, but a captured graph"), torch.cuda.graph(graph):
        optimizer.step()


def test_assigned_learning_rate_applies_to_replays_and_is_rejected_during_capture(script):
    optimizer, step, _ = stepping(torch.float32)
    replay = script.captured(step, optimizer)
    before = optimizer.master.clone()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step()
    replay()
    assert_same(optimizer.master, before, "masters after two steps at rate 0")
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(TypeError, match=r'\["lr"\]\.fill_'), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def stepping(moments, rate=RATE):
    """Return an optimizer, a step function that clips gradients, and a function that draws gradients.

    The optimizer has two groups. The gradients don't depend on the weights, so only the optimizer can cause a
    difference.
    """
    model = checks.make_parameters().cuda()
    optimizer = MasterAdamW(groups_of(model), rate, moments)
    numbers = {name: torch.zeros_like(parameter) for name, parameter in model.items()}

    def feed(number):
        generator = torch.Generator("cuda").manual_seed(number)
        for gradient in numbers.values():
            gradient.copy_(torch.randn(gradient.shape, generator=generator, device="cuda"))

    def step():
        optimizer.zero_grad(set_to_none=True)
        sum((parameter * numbers[name]).float().sum() for name, parameter in model.items()).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return norm

    feed(0)
    return optimizer, step, feed


def scheduled(optimizer, feed, *launches):
    """Alternate between step functions under a learning-rate schedule; return gradient norms before clipping."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / 2 / STEPS)
    norms = []
    for number in range(STEPS):  # norms stay tensors, because reading their values would synchronize
        feed(number)
        norms.append(launches[number % len(launches)]().clone())
        scheduler.step()
    return torch.stack(norms).tolist()


@MOMENTS
def test_graph_with_clipping_and_a_schedule_matches_eager_steps(script, moments):
    eager, step, feed = stepping(moments)
    eager_norms = scheduled(eager, feed, step)
    graphed, step, feed = stepping(moments)
    before = graphed.master.clone()
    replay = script.captured(step, graphed)
    assert_same(graphed.master, before, "masters after warm-up and capture, which are undone")
    assert not (graphed.count.any() or graphed.m.any() or graphed.v.any())
    norms = scheduled(graphed, feed, replay)
    assert min(norms) > 1, "nothing was clipped"
    assert norms == eager_norms
    assert_same_state(graphed, eager)


@MOMENTS
def test_eager_steps_and_two_graphs_can_alternate(script, moments):
    eager, step, feed = stepping(moments)
    scheduled(eager, feed, step)
    mixed, step, feed = stepping(moments)
    first, second = script.captured(step, mixed), script.captured(step, mixed)
    scheduled(mixed, feed, first, step, second, step)
    assert_same_state(mixed, eager)


def test_graph_reads_the_learning_rate_tensor_of_the_caller(script):
    rate = torch.tensor(RATE, device="cuda")
    optimizer, step, _ = stepping(torch.float32, rate)
    replay = script.captured(step, optimizer)
    for wanted in (0.0, RATE, 0.0):
        rate.fill_(wanted)
        before = optimizer.masters()["0"].clone()
        replay()
        assert torch.equal(optimizer.masters()["0"], before) == (wanted == 0), wanted
