"""What only a GPU can say of MasterAdamW's kernel, of its steps in CUDA graphs, and of the two scripts in docs/:

    python -m pytest tests/test_fast_step_gpu.py

No time is asserted. What is compared to the bit runs with deterministic algorithms.
"""

import copy
import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matmuls; read when CUDA begins

import pytest
import torch
from torch import nn

from stepscope.optimizations import MasterAdamW, fp8
from stepscope.studies.ladder import checks
from test_fast_step import check_statistics_and_copies

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DOCS = Path(__file__).parents[1] / "docs"
MOMENTS = pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
OURS = pytest.mark.parametrize("ours", [False, True], ids=["torch", "masters"])
RATE, STEPS = 1e-3, 20


@pytest.fixture(scope="module")
def scripts():
    before = torch.get_float32_matmul_precision()
    sys.path.insert(0, str(DOCS))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in ("fast_step", "master_adamw")})
    sys.path.remove(str(DOCS))
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_same(one, other, what):
    """Equal to the bit, or how far from it."""
    if not torch.equal(one, other):
        off = (one.double() - other.double()).abs()
        raise AssertionError(
            f"{what}: {int((off != 0).sum()):,} of {off.numel():,} numbers differ, "
            f"by {off.max().item():.3g} at most (largest number {other.abs().max().item():.3g})"
        )


def assert_same_state(one, other, what):
    for name in ("count", "rates", "scalars", "master", "m", "v"):
        assert_same(getattr(one, name).cpu(), getattr(other, name).cpu(), f"{what}: {name}")


# -- the kernel -----------------------------------------------------------------------------------------------


def groups_of(model):
    return [
        {"params": [model["matrix"]], "weight_decay": 0.1},
        {"params": [model["vector"]], "lr": 2 * RATE, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0},
    ]


@MOMENTS
def test_the_kernel_is_numpys_formula_bit_by_bit(moments):
    compared, unequal = checks.against_formula("cuda", moments)
    assert compared > 36_000 and not unequal, f"{unequal:,} of {compared:,} numbers are not numpy's"


@pytest.mark.skipif(torch.cuda.is_available() and not fp8.has_fp8("cuda"), reason="needs FP8")
@MOMENTS
def test_the_fp8_kernel_writes_what_the_formula_writes(moments):
    """Matrices of several tiles, of which neither side is a power of two, beside parameters that are not FP8."""
    models, owns = [], []
    for device in ("cuda", "cpu"):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(320, 192, bias=False), nn.Linear(192, 64, bias=False), nn.Linear(64, 70)
        )
        fp8.use_fp8(model.to(device)[:2])
        models.append(model)
        owns.append(MasterAdamW(model, RATE, moments))
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for mine, other in zip(*(own.parameters for own in owns)):
            other.grad = torch.randn(other.shape, generator=generator).to(other.dtype)
            mine.grad = other.grad.cuda()
        for own in owns:
            own.step()
    for mine, other in zip(*(own.parameters for own in owns)):
        state = owns[0].state[mine]
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same(state[name].cpu(), owns[1].state[other][name], name)
    torch.testing.assert_close(owns[0].master.cpu(), owns[1].master, rtol=1e-6, atol=1e-8)
    assert_same(owns[0].scales.cpu(), owns[1].scales, "scales")
    for index in (0, 1):
        rows, columns = fp8.layouts(owns[0].parameters[index].detach())
        written = (owns[0].view(owns[0].master, index) / owns[0].scales[index]).to(fp8.FP8).float()
        assert_same(rows.float(), written, "the weight as it lies")
        assert_same(columns.float(), written.t(), "the weight transposed")
    x = torch.randn(128, 320).bfloat16()
    made = [model[:2](x.to(device)).float().cpu() for model, device in zip(models, ("cuda", "cpu"))]
    assert (made[0] - made[1]).norm() < 0.02 * made[1].norm(), "the tensor cores' sums are the formula's"


@MOMENTS
def test_the_kernel_reads_each_groups_own_numbers(moments):
    """Two groups with rates, betas, eps and decays of their own: what the CPU's formula makes of them."""
    models = [checks.make_parameters().to(device) for device in ("cuda", "cpu")]
    owns = [MasterAdamW(groups_of(model), RATE, moments) for model in models]
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        for name, parameter in models[1].items():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            models[0][name].grad = parameter.grad.cuda()
        for own in owns:
            own.step()
    for name in ("count", "rates", "scalars", "m", "v"):
        assert_same(getattr(owns[0], name).cpu(), getattr(owns[1], name), f"GPU against CPU: {name}")
    apart = 0 if moments == torch.float32 else 1e-8  # with bf16 moments divisions are approximate
    torch.testing.assert_close(owns[0].master.cpu(), owns[1].master, rtol=100 * apart, atol=apart)
    for parameter, master in zip(owns[0].parameters, owns[0].masters().values()):
        assert_same(parameter.detach(), master.to(parameter.dtype), "the model's")


def test_a_gradient_that_the_kernel_would_misread_is_refused():
    model = checks.make_parameters().cuda()
    own = MasterAdamW(model)
    for parameter in model.values():
        parameter.grad = torch.zeros(parameter.numel() + 1, device="cuda", dtype=parameter.dtype)[1:].view(
            parameter.shape
        )
    with pytest.raises(
        RuntimeError, match="matrix: the gradient is not contiguous from a multiple of 16 bytes"
    ):
        own.step()


def test_parameters_without_a_gradient_stay_as_they_are():
    """Which of them have one changes from step to step: what the CPU makes of them, and no other bit moves."""
    shapes = (64, 128), (130,), (3, 5, 7), (), (9, 70)
    for moments in (torch.float32, torch.bfloat16):
        owns = []
        for device in ("cuda", "cpu"):
            generator = torch.Generator().manual_seed(0)
            drawn = [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
            owns.append(MasterAdamW(drawn, RATE, moments))
        for number in range(STEPS):
            before = [flat.clone() for flat in (owns[0].master, owns[0].m, owns[0].v, owns[0].low)]
            missing = [index for index in range(len(shapes)) if (index + number) % 3 == 0]
            for index, (mine, other) in enumerate(zip(*(own.parameters for own in owns))):
                gradient = torch.randn(other.shape, generator=generator).to(other.dtype)
                mine.grad, other.grad = (None, None) if index in missing else (gradient.cuda(), gradient)
            for own in owns:
                own.step()
            for index in missing:
                for flat, old in zip((owns[0].master, owns[0].m, owns[0].v, owns[0].low), before):
                    assert_same(owns[0].view(flat, index), owns[0].view(old, index), f"parameter {index}")
        for name in ("count", "scalars", "m", "v"):
            assert_same(getattr(owns[0], name).cpu(), getattr(owns[1], name), name)
        torch.testing.assert_close(owns[0].master.cpu(), owns[1].master, rtol=1e-6, atol=1e-8)


@pytest.mark.skipif(torch.cuda.is_available() and not fp8.has_fp8("cuda"), reason="needs FP8")
def test_an_fp8_weight_without_a_gradient_stays_as_it_is():
    model = nn.Sequential(*(nn.Linear(64, 128, bias=False) for _ in range(2))).cuda()
    fp8.use_fp8(model)
    own = MasterAdamW(model, RATE, torch.bfloat16)
    before = own.masters()["0.weight"].clone()
    for _ in range(3):
        model[1].weight.grad = torch.randn_like(model[1].weight)
        own.step()
    assert_same(own.masters()["0.weight"], before, "the master")
    rows, _ = fp8.layouts(model[0].weight.detach())
    assert_same(rows.float(), (before / own.scales[0]).to(fp8.FP8).float(), "the weight as it lies")


def test_an_eager_step_does_not_wait_for_the_gpu():
    own, step, _ = stepping(torch.bfloat16)
    step()
    gradients = [parameter.grad for parameter in own.parameters]
    assert all(gradient is not None for gradient in gradients)
    own.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        own.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- the parameters' memory, and who writes it -----------------------------------------------------------------


def test_each_parameter_has_a_storage_of_its_size_at_its_place_in_the_buffer(tmp_path):
    shapes = (64, 128), (1, 7), (7, 1), (130,), (3, 5, 7), (), (9, 70)
    drawn = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    before = [parameter.detach().clone() for parameter in drawn]
    own = MasterAdamW(drawn)
    for index, (parameter, old) in enumerate(zip(drawn, before)):
        flat = own.low if parameter.dim() > 1 else own.master
        assert parameter.data_ptr() == own.view(flat, index).data_ptr() and parameter.data_ptr() % 16 == 0
        assert parameter.untyped_storage().nbytes() == parameter.nbytes and parameter.storage_offset() == 0
        assert parameter.is_cuda and parameter.stride() == old.stride()
        assert_same(parameter.detach(), old.to(parameter.dtype), "the weights")
    assert len({parameter.untyped_storage().data_ptr() for parameter in drawn}) == len(drawn)
    torch.save(drawn[3].detach(), tmp_path / "vector.pt")
    assert (tmp_path / "vector.pt").stat().st_size < 4096
    address = own.low.data_ptr()
    del own
    torch.cuda.empty_cache()
    assert drawn[0].data_ptr() == address, "the parameters keep the buffer"
    assert_same(drawn[0].detach(), before[0].bfloat16(), "the weights without their optimizer")


@pytest.mark.parametrize("write", ["load_state_dict", "fill_ and take_weights"])
def test_weights_that_are_written_between_replays_are_kept(scripts, write):
    model = checks.make_parameters().cuda()
    own = MasterAdamW(model, 0.0)

    def step():
        own.zero_grad(set_to_none=True)
        loss = sum(parameter.float().sum() for parameter in model.values())
        loss.backward()
        own.step()
        return loss.detach()

    replay = scripts.master_adamw.captured(step, own)
    replay()
    if write == "load_state_dict":
        model.load_state_dict({name: torch.full_like(each, 7) for name, each in model.items()})
    else:
        with torch.no_grad():
            model["matrix"].fill_(7)
        own.take_weights()
    replay()
    assert (model["matrix"] == 7).all() and (own.masters()["matrix"] == 7).all()


# -- in a CUDA graph ------------------------------------------------------------------------------------------


def test_a_graph_is_refused_where_a_parameter_has_no_gradient():
    own, step, _ = stepping(torch.float32)
    step()
    graph = torch.cuda.CUDAGraph()
    own.parameters[1].grad = None
    with pytest.raises(RuntimeError, match="1: no gradient, but a captured graph"), torch.cuda.graph(graph):
        own.step()


def test_a_rate_that_is_assigned_reaches_eager_steps_and_is_refused_in_a_graph(scripts):
    own, step, _ = stepping(torch.float32)
    replay = scripts.master_adamw.captured(step, own)
    rates = [group["lr"] for group in own.param_groups]
    for group in own.param_groups:
        group["lr"] = 0.0
    before = own.master.clone()
    step()
    assert_same(own.master, before, "the masters after a step at rate 0")
    assert all(group["lr"] is rate for group, rate in zip(own.param_groups, rates))
    replay()
    assert_same(own.master, before, "the masters after a replay at rate 0")
    own.param_groups[0]["lr"] = 1.0
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(TypeError, match=r'\["lr"\]\.fill_'), torch.cuda.graph(graph):
        own.step()


def stepping(moments, rate=RATE):
    """An optimizer of two groups, its step, which clips, and a function that gives the next step its gradients:
    they are these numbers themselves, so that no other kernel's rounding is compared."""
    model = checks.make_parameters().cuda()
    own = MasterAdamW(groups_of(model), rate, moments)
    numbers = {name: torch.zeros_like(parameter) for name, parameter in model.items()}

    def feed(number):
        generator = torch.Generator("cuda").manual_seed(number)
        for given in numbers.values():
            given.copy_(torch.randn(given.shape, generator=generator, device="cuda"))

    def step():
        own.zero_grad(set_to_none=True)
        sum((parameter * numbers[name]).float().sum() for name, parameter in model.items()).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        own.step()
        return norm

    feed(0)
    return own, step, feed


def scheduled(own, feed, *launches):
    """Steps under a schedule, by these ways of launching one in turn; the gradients' norms before clipping."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(own, lambda t: 1 - t / 2 / STEPS)
    norms = []
    for number in range(STEPS):  # nothing waits for the GPU, which falls behind
        feed(number)
        norms.append(launches[number % len(launches)]().clone())
        scheduler.step()
    return torch.stack(norms).tolist()


@MOMENTS
def test_a_graph_with_clipping_and_a_schedule_equals_eager_steps_to_the_bit(scripts, moments):
    eager, step, feed = stepping(moments)
    eager_norms = scheduled(eager, feed, step)
    graphed, step, feed = stepping(moments)
    before = graphed.master.clone()
    replay = scripts.master_adamw.captured(step, graphed)
    assert_same(graphed.master, before, "the masters after warm-up and capture, which are undone")
    assert not (graphed.count.any() or graphed.m.any() or graphed.v.any()), "moments are not undone"
    norms = scheduled(graphed, feed, replay)
    assert min(norms) > 1, "nothing was clipped, so clipping is not tried"
    assert norms == eager_norms, "the gradients' norms differ: what comes before the optimizer does"
    assert_same_state(graphed, eager, "graph against eager")
    assert_same(graphed.low, eager.low, "graph against eager: the bf16 copies")


@MOMENTS
def test_eager_steps_and_two_graphs_may_take_turns(scripts, moments):
    """Each graph finds its own gradients, whatever other steps found before it."""
    eager, step, feed = stepping(moments)
    scheduled(eager, feed, step)
    mixed, step, feed = stepping(moments)
    first, second = scripts.master_adamw.captured(step, mixed), scripts.master_adamw.captured(step, mixed)
    scheduled(mixed, feed, first, step, second, step)
    assert_same_state(mixed, eager, "eager steps and two graphs in turn against eager steps alone")


@pytest.mark.parametrize("callers", [False, True], ids=["its own rate", "the caller's tensor"])
def test_a_graph_follows_the_rate(scripts, callers):
    given = torch.tensor(RATE, device="cuda")
    own, step, _ = stepping(torch.float32, given if callers else RATE)
    replay = scripts.master_adamw.captured(step, own)
    rates = [given, own.param_groups[1]["lr"]] if callers else [group["lr"] for group in own.param_groups]
    for wanted in (0.0, RATE, 0.0):
        for rate in rates:
            rate.fill_(wanted)
        before = {name: master.clone() for name, master in own.masters().items()}
        replay()
        for name, master in own.masters().items():
            assert torch.equal(master, before[name]) == (wanted == 0), (
                f"{name} at rate {wanted}: moved by {(master - before[name]).abs().max().item():.3g} at most"
            )


@MOMENTS
def test_a_captured_graph_goes_on_from_a_loaded_state_to_the_bit(scripts, moments):
    own, step, feed = stepping(moments)
    replay = scripts.master_adamw.captured(step, own)
    scheduled(own, feed, replay)
    saved = copy.deepcopy(own.state_dict())
    scheduled(own, feed, replay)
    other, step, feed = stepping(moments)
    for master in other.masters().values():
        master.fill_(5)
    replay = scripts.master_adamw.captured(step, other)
    replay()
    other.load_state_dict(saved)
    scheduled(other, feed, replay)
    assert_same_state(other, own, "resumed against not interrupted")
    assert_same(other.low, own.low, "resumed against not interrupted: the bf16 copies")


@MOMENTS
def test_the_second_script_trains_and_resumes_to_the_bit(scripts, deterministic, capsys, moments):
    same = scripts.master_adamw.main([f"--moments={str(moments).removeprefix('torch.')}"])
    said = capsys.readouterr().out
    assert "steps on cuda" in said and same, said
    first, last = map(float, said.split("loss ")[1].split(" in ")[0].split(" to "))
    assert last < 0.9 * first, f"it does not train: {said}"


# -- docs/fast_step.py ----------------------------------------------------------------------------------------


@pytest.fixture
def make(scripts, monkeypatch):
    """A model, its rate, the graph's step, its optimizer, and weights and batch as they were before."""

    def made(ours=False, clip=None):
        torch._dynamo.reset()
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = scripts.fast_step.Model(128, 512, 2, 4, 256, 64)
            batch, rate = torch.randint(256, (2, 4, 64)), torch.tensor(RATE)
        before = copy.deepcopy(model)
        with monkeypatch.context() as patch:
            if ours:
                patch.setattr(
                    torch.optim,
                    "AdamW",
                    lambda parameters, lr, **options: MasterAdamW(parameters, lr, torch.bfloat16),
                )
            step, optimizer = scripts.fast_step.make_step(model, *batch, rate, clip)
        return SimpleNamespace(
            model=model, rate=rate, step=step, optimizer=optimizer, before=before, batch=batch
        )

    return made


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@OURS
def test_making_the_fast_step_changes_nothing(make, ours):
    made = make(ours)
    assert made.rate.item() == pytest.approx(RATE), "the rate is not restored"
    for name, parameter in weights(made.model).items():
        assert_same(
            parameter, weights(made.before)[name].to(parameter.dtype), f"{name} after warm-up and capture"
        )
    for state in made.optimizer.state.values():
        for name, tensor in state.items():
            assert not tensor.any(), f"{name} is not as before the first step"


def test_its_first_step_is_that_of_an_uncaptured_program(make):
    """The same model, neither compiled nor captured, and a new AdamW. Kernels round in other orders, and AdamW's first
    step moves a weight by the rate whichever way its gradient points: so a few may go the other way."""
    made = make()
    loss = made.step().item()
    optimizer = torch.optim.AdamW(made.before.parameters(), lr=RATE, fused=True)
    start = weights(made.before)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        eager = nn.functional.cross_entropy(made.before(made.batch[0]).flatten(0, 1), made.batch[1].flatten())
    eager.backward()
    optimizer.step()
    assert loss == pytest.approx(eager.item(), rel=5e-3), "the first replay's loss is not the eager step's"
    moved = (weights(made.model)["head.weight"] - start["head.weight"]).abs().median().item()
    assert moved == pytest.approx(RATE, rel=0.05), (
        f"a first step of AdamW moves a weight by the rate, {RATE}; the graph's moved the median one by {moved:.3g}"
    )
    for name, own in weights(made.model).items():
        off = ((own - weights(made.before)[name]).abs() > 0.1 * RATE).float().mean().item()
        assert off < 0.25, f"{name}: {off:.1%} of the weights moved otherwise than in an eager step"


@OURS
def test_the_fast_step_trains_and_follows_its_rate(make, ours):
    made = make(ours)
    before = weights(made.model)
    made.rate.zero_()
    first = made.step().item()
    for name, parameter in weights(made.model).items():
        assert_same(parameter, before[name], f"{name} after a step at rate 0")
    made.rate.fill_(RATE)
    scheduler = torch.optim.lr_scheduler.LinearLR(made.optimizer, 1.0, 0.5, total_iters=50)
    losses = []
    for _ in range(50):
        losses.append(made.step().clone())
        scheduler.step()
    losses = torch.stack(losses).tolist()
    assert losses[-1] < 0.9 * first, (
        f"the loss goes from {first:.4f} to {losses[-1]:.4f} in 50 steps on one batch"
    )
    for name, parameter in weights(made.model).items():
        assert not torch.equal(parameter, before[name]), f"{name} has not moved"


def test_two_hundred_steps_train_alike_with_torchs_adamw_and_with_masters(make):
    """On batches that change: the mean loss of the last twenty steps."""
    ends = []
    for ours in (False, True):
        made = make(ours)
        generator = torch.Generator("cuda").manual_seed(0)
        losses = []
        for _ in range(200):
            first = torch.randint(256, (4, 1), generator=generator, device="cuda")
            tokens = (first + 3 * torch.arange(65, device="cuda")) % 256  # learnable: each token is 3 more
            losses.append(made.step(tokens[:, :-1], tokens[:, 1:]).clone())
        losses = torch.stack(losses)
        assert losses[-20:].mean() < 0.2 * losses[0]
        ends.append(losses[-20:].mean().item())
        print(f"masters={ours}: loss {losses[0]:.4f}, after 200 steps {ends[-1]:.4f}")
    assert ends[1] == pytest.approx(ends[0], rel=0.25, abs=0.02)


def test_the_fast_step_leaves_statistics_and_random_state_and_copies_have_their_heads(scripts):
    torch._dynamo.reset()
    check_statistics_and_copies(scripts.fast_step, "cuda")


def test_the_fast_step_clips(make):
    for clip in (None, 0.01):
        made = make(clip=clip)
        made.step()
        norm = nn.utils.get_total_norm([parameter.grad for parameter in made.model.parameters()]).item()
        assert norm > 0.1 if clip is None else norm == pytest.approx(clip, rel=1e-3), (
            f"norm {norm} with clip={clip}"
        )


def test_the_fast_step_resumes_to_the_bit(scripts, deterministic, make):
    made = make(clip=1.0)
    for _ in range(4):
        made.step()
    saved, kept = copy.deepcopy(made.optimizer.state_dict()), weights(made.model)
    losses = torch.stack([made.step().clone() for _ in range(4)]).tolist()
    ends = weights(made.model)
    made.rate.zero_()
    for name, parameter in made.model.named_parameters():
        parameter.detach().copy_(kept[name])
    scripts.fast_step.resume(made.optimizer, saved)
    assert made.rate.item() == pytest.approx(RATE), "the rate is not resumed"
    again = torch.stack([made.step().clone() for _ in range(4)]).tolist()
    assert again == losses, f"losses differ: {again} after resuming, {losses} without"
    for name, parameter in weights(made.model).items():
        assert_same(parameter, ends[name], f"{name}, resumed against not interrupted")
