"""The ladder: its optimizer and loss against plain formulas, its changes against fp32, its bounds, its run."""
import math
import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional

from stepscope.config import ConfigError, StepConfig, configure
from stepscope.measure import fresh_compiler_cache
from stepscope.model.flops import parameter_count
from stepscope.optimizations import fp8
from stepscope.optimizations.cross_entropy import CHUNK, chunked_cross_entropy
from stepscope.optimizations.optimizer import MasterAdamW, hashed, stochastic_round
from stepscope.optimizations.trainer import Trainer, Unsupported
from stepscope.studies.ladder import bounds, checks, measure
from stepscope.studies.ladder.config import CHANGES, FILLED, PEERS, optimizations_of, precision_of
from stepscope.studies.ladder.measure import Ladder, gradients_of, measure_ladder, relative_errors, sampled
from stepscope.studies.ladder.training import SEEDS, train
from stepscope.traces.attribution import TraceError
from stepscope.traces.captured import CAPTURED

EAGER = ["fp32", "bf16", "sdpa", "fused"]  # what compiles nothing
BF16 = frozenset({"bf16", "sdpa", "fused", "bf16_weights"})
LOW = BF16 | {"bf16_moments"}


@pytest.fixture
def config():
    def make(**fields):
        shape = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 300}
        return configure(
            "ladder", **{"device": "cpu", "context_length": 16, "batch_size": 2, "changes": EAGER} | shape | fields)

    return make


# -- the optimizer --------------------------------------------------------------------------------------------


def test_the_optimizer_is_torchs_adamw_over_200_steps():
    own, drawn = checks.stepped("cpu", 200, torch.float32)
    theirs = checks.tried()
    torchs = torch.optim.AdamW(theirs.parameters(), checks.RATE, checks.BETAS, checks.EPS, checks.WEIGHT_DECAY)
    for step in range(200):
        for name, parameter in theirs.named_parameters():
            parameter.grad = drawn[name][step].float()
        torchs.step()
    for name, weight in theirs.named_parameters():
        assert (own.masters()[name] - weight).abs().max() < 1e-6 * weight.abs().max()


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_the_optimizer_is_numpys_formula_bit_by_bit(moments):
    compared, unequal = checks.against_formula("cpu", moments)
    assert compared == 2 * 130 * 70 + 130 and unequal == 0


def test_a_wrong_formula_would_be_seen(monkeypatch):
    monkeypatch.setattr(checks, "WEIGHT_DECAY", 0.011)
    _, unequal = checks.against_formula("cpu", torch.float32)
    assert unequal > 5000


def test_masters_begin_where_the_model_is_and_keep_what_is_too_little_for_its_copies():
    model, before = checks.tried(), checks.tried()
    own = MasterAdamW(model, 1e-2, torch.bfloat16)
    masters = own.masters()
    assert torch.equal(masters["matrix"], before["matrix"])
    assert model["matrix"].dtype == torch.bfloat16 and model["vector"].dtype == torch.float32
    assert model["vector"].data_ptr() == masters["vector"].data_ptr(), "a vector is its own master"
    for parameter in model.values():
        parameter.grad = torch.ones_like(parameter)
    own.step()
    assert (masters["matrix"] < before["matrix"]).all() and (model["vector"] < before["vector"]).all()
    assert torch.equal(model["matrix"], masters["matrix"].bfloat16())
    low = model["matrix"].detach().clone()
    masters["matrix"].add_(2e-5)
    own.reset()
    assert (model["matrix"] == low).float().mean() > 0.9 and not torch.equal(masters["matrix"], low.float())
    own.zero_grad()
    assert model["matrix"].grad is None


def test_what_is_stored_of_the_moments_is_what_was_asked_for():
    sizes = {}
    for moments in (torch.float32, torch.bfloat16):
        own = MasterAdamW(checks.tried(), 1e-2, moments)
        flats = (own.master, own.m, own.v, own.low)
        assert len({flat.numel() for flat in flats}) == 1
        sizes[moments] = sum(flat.element_size() for flat in flats)
    assert sizes == {torch.float32: 14, torch.bfloat16: 10}
    # a step reads and writes all that, but the low copy only once, and reads a bf16 gradient
    moved = {name: 2 * size for name, size in zip(("fp32", "bf16"), sizes.values())}
    assert moved == bounds.MOVED_BYTES


# -- rounding by chance ---------------------------------------------------------------------------------------


def test_rounding_by_chance_is_right_in_the_mean_and_only_to_neighbours():
    generator = torch.Generator().manual_seed(0)
    for value in (1.0, 1.001, 0.3333, 1e-12, 7.77e5):
        x = torch.full((200_000,), value)
        rounded = stochastic_round(x, torch.randint(2**16, x.shape, generator=generator)).double()
        low, high = rounded.min().item(), rounded.max().item()
        assert low <= x[0].item() <= high and high <= low * (1 + 2**-7)
        assert rounded.mean().item() == pytest.approx(x[0].item(), rel=1e-4)
    assert len(rounded.unique()) == 2


def test_the_hash_is_numpys_and_its_bits_are_even():
    index = torch.arange(100_000) + 2**31 - 50_000  # across where 32-bit integers would turn negative
    bits = hashed(index, torch.tensor(7))
    assert bits.min() >= 0 and bits.max() < 2**16
    assert bits.double().mean().item() == pytest.approx(2**15, rel=0.01)
    for place in range(16):
        assert (bits >> place & 1).double().mean().item() == pytest.approx(0.5, abs=0.01)
    other = hashed(index, torch.tensor(8))
    assert abs(np.corrcoef(bits, other)[0, 1]) < 0.02 and abs(np.corrcoef(bits[1:], bits[:-1])[0, 1]) < 0.02
    v = torch.rand(100_000) + 0.5
    mine = stochastic_round(v, bits).float().numpy()
    assert np.array_equal(mine, checks.stochastic_bf16(v.numpy(), index.numpy(), 7))


def test_rounded_to_nearest_a_second_moment_cannot_fall():
    found = checks.falling_moment()
    assert found["v_nearest"] > 0.99 and found["v_fp32"] == pytest.approx(0.351, abs=0.005)
    assert found["v_by_chance"] == pytest.approx(found["v_fp32"], rel=0.01)


# -- loss and FP8 ---------------------------------------------------------------------------------------------


def test_chunked_cross_entropy_is_cross_entropy():
    torch.manual_seed(0)
    tokens = CHUNK + 9  # the last chunk is another length
    hidden = torch.randn(1, tokens, 8, requires_grad=True)
    weight = torch.randn(21, 8, requires_grad=True)
    targets = torch.randint(21, (1, tokens))
    (2 * chunked_cross_entropy(hidden, weight, targets, torch.float32)).backward()
    got = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    (2 * functional.cross_entropy((hidden @ weight.t()).flatten(0, 1), targets.flatten())).backward()
    for mine, theirs in zip(got, (hidden.grad, weight.grad)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)


def test_what_fp8_is_off_by_is_its_mantissa(config, monkeypatch):
    """Rounded to 4 significant bits with any range matmuls are off as much, to 3 bits, as e5m2 has, more."""

    def rounded(bits):
        def rounds(x):
            fraction, exponent = torch.frexp(x.float())
            return torch.ldexp(torch.round(fraction * 2**bits) / 2**bits, exponent)

        return lambda a, b, fast=True: (rounds(a) @ rounds(b).t()).to(a.dtype)

    monkeypatch.setattr(fp8, "has_fp8", lambda device: True)
    mine, found = config(d_model=64, d_ff=128, num_layers=4, num_heads=2), {}
    plain = Trainer(mine, ())
    reference = plain.gradients().item(), gradients_of(plain)
    for name, matmul in {"fp8": fp8.matmul, "4 bits": rounded(4), "3 bits": rounded(3)}.items():
        monkeypatch.setattr(fp8, "matmul", matmul)
        made = Trainer(mine, {"fp8"})
        found[name] = relative_errors(made, made.gradients().item(), reference)["gradient_off"]
    assert 0.7 < found["fp8"] / found["4 bits"] < 1.4 < found["3 bits"] / found["4 bits"]


# -- changes --------------------------------------------------------------------------------------------------


def test_each_change_is_one_more_than_the_last():
    assert len(CHANGES) == 9 and optimizations_of("fp32") == frozenset()
    for before, after in pairwise(CHANGES):
        assert optimizations_of(after) - optimizations_of(before) == {after}
    last = optimizations_of(CHANGES[-1])
    assert optimizations_of("fp8") - last == {"fp8"} and optimizations_of(FILLED) - last == {"chunked"}
    assert [precision_of(name) for name in ("fp32", "tf32", "blocks", "fp8", *PEERS)] == [
        "fp32", "tf32", "bf16", "fp8", "bf16", "bf16"]


@pytest.mark.parametrize("changes",
                         [{"sdpa"}, {"chunked"}, {"sdpa", "fused", "chunked"}, BF16, LOW | {"chunked"}],
                         ids=lambda changes: "-".join(sorted(changes)))
def test_every_change_gives_fp32s_loss_and_gradients(config, changes):
    plain = Trainer(config(), ())
    expected_loss = plain.gradients().item()
    expected = {name: parameter.grad.clone() for name, parameter in plain.named.items()}
    made = Trainer(config(), changes)
    tolerance = 0.03 if "bf16" in changes else 1e-5
    assert made.gradients().item() == pytest.approx(expected_loss, rel=tolerance / 10)
    assert made.named.keys() == expected.keys()
    for name, parameter in made.named.items():
        there = expected[name]
        assert ((parameter.grad.float() - there).norm() / there.norm()).item() < tolerance, name
    first, later = made.plain_step().item(), [made.plain_step().item() for _ in range(3)][-1]
    assert later < first


@pytest.mark.parametrize("changes", [frozenset(), BF16, LOW], ids=["fp32", "bf16_weights", "bf16_moments"])
def test_a_reset_trains_as_a_fresh_one(config, changes):
    programs = {}
    made = Trainer(config(), changes, programs)
    first = [made.step().item() for _ in range(3)]
    made.reset(0)
    assert [made.step().item() for _ in range(3)] == first
    made.reset(1)
    assert [made.step().item() for _ in range(3)] != first
    made.unload()
    assert all(parameter.numel() == 0 for parameter in made.program.model.parameters())
    again = Trainer(config(), changes, programs)
    assert len(programs) == 1 and [again.step().item() for _ in range(3)] == first


def test_what_a_cpu_lacks_is_said(config):
    for name in ("tf32", "cuda_graph", "fp8", "hugging_face_graphs"):
        with pytest.raises(Unsupported, match="CPU|GPU"):
            Trainer(config(), {name}, required=name)


def test_hugging_faces_llama_has_our_shape(config, monkeypatch):
    """Uncompiled: as many parameters, and a loss near the logarithm of the vocabulary."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    made = Trainer(config(), {"hugging_face"})
    assert made.baseline == "hugging_face" and made.optimizations == {"hugging_face"}
    assert sum(parameter.numel() for parameter in made.named.values()) == parameter_count(config())
    first = made.plain_step().item()
    assert first == pytest.approx(math.log(300), abs=0.5)
    assert [made.plain_step().item() for _ in range(5)][-1] < first


# -- clocks, memory, bounds -----------------------------------------------------------------------------------


def test_steps_are_timed_one_after_another():
    done = []
    times = measure.back_to_back(lambda: done.append(1), "cpu", 7)
    assert len(times) == len(done) == 7 and min(times) >= 0
    assert measure.steps_in(0.4, 100) == 4 and measure.steps_in(0.4, 1e-3) == measure.MOST_STEPS
    assert measure.measure_power(done.clear, "cpu", 1.0) == {} and done


def test_a_sample_stands_for_a_large_tensor(monkeypatch):
    monkeypatch.setattr(measure, "COMPARED", 10)
    assert len(sampled(torch.arange(95.0))) == 10 and sampled(torch.arange(95.0))[1] == 10
    assert len(sampled(torch.arange(9.0))) == 9
    own = {"large": 2 * torch.ones(100), "small": 10 * torch.ones(5)}
    made = SimpleNamespace(named={name: SimpleNamespace(grad=grad) for name, grad in own.items()},
                           program=SimpleNamespace(shapes={name: grad.shape for name, grad in own.items()}))
    found = relative_errors(made, 3.0, (2.0, {"large": torch.ones(10), "small": own["small"]}))
    assert found == pytest.approx({"loss_off": 0.5, "gradient_off": math.sqrt(100 / 600)})


def test_the_batch_that_fills_is_the_largest_that_the_formula_lets(config):
    shape = config(size="small", d_model=None, d_ff=None, num_layers=None, num_heads=None, context_length=512)
    memory = 140 * 2**30
    batch = measure.filling_batch(shape, memory)
    needed, more = (measure.last_step_bytes(shape.step(batch_size=size, device="cuda")) for size in (batch, batch + 4))
    assert batch % 4 == 0 and needed <= measure.FILL * memory < more


def test_the_bounds_formulas():
    shape = StepConfig(size="2.7B", context_length=512, device="cpu")
    flops = bounds.needed_flops(shape)
    plain = 6 * (parameter_count(shape) - 10_000 * 2560 - 65 * 2560) * 2048  # all matrices but the embedding
    pairs = 12 * 32 * 2048 * 2560 * 513 / 2
    assert flops == pytest.approx(plain + pairs, rel=1e-9)
    found = {moments: bounds.lower_bound(shape, moments, {"matmul_bf16": 780.0, "copy": 4.2})
             for moments in ("fp32", "bf16")}
    for moments, row in found.items():
        assert row["matmul_ms"] == pytest.approx(flops / 780e9)
        assert row["moved_ms"] == pytest.approx({"fp32": 28, "bf16": 20}[moments] * 3.41e9 / 4.2e9, rel=0.002)
        assert row["bound_ms"] == row["matmul_ms"] + row["moved_ms"]


def test_the_compilers_cache_is_empty_and_gone_afterwards(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with fresh_compiler_cache():
        place = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert place.is_dir() and not list(place.iterdir())
        assert Path(os.environ["TRITON_CACHE_DIR"]).parent == place
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine" and "TRITON_CACHE_DIR" not in os.environ
    assert not place.exists()


# -- whole runs -----------------------------------------------------------------------------------------------


def test_a_ladder_without_compiling_on_a_cpu(config):
    tables, results = measure_ladder(config(timed_steps=3, warmup_steps=1, training_steps=2))
    steps = tables["steps"].set_index("change")
    assert list(steps.index) == EAGER and (steps["status"] == "ok").all()
    assert (steps["wall_ms"] > 0).all() and (steps["gpu_ms"] > 0).all() and (steps["busy"] > 0).all()
    assert steps.loc["fp32", "gradient_off"] == 0 and 0 < steps.loc["bf16", "gradient_off"] < 0.1
    assert (steps["tokens_per_s"] * steps["wall_ms"]).round().eq(32_000).all()
    kernels = tables["kernels"]
    assert set(kernels["change"]) == set(EAGER) and {"matrix multiply"} <= set(kernels["family"])
    curves = tables["curves"]
    assert curves.groupby("change")["seed"].nunique().to_dict() == dict.fromkeys(EAGER, 1) | {"fp32": SEEDS}
    losses = curves.pivot(index="step", columns=["change", "seed"], values="loss")
    off = losses.sub(losses["fp32", 0], axis=0).abs().max()
    assert len(losses) == 2 and 0 < off["fused", 0] < off["fp32", 1] / 10, "from the same weights over the same text"
    assert results["matmul_bf16"] > 0 and "power_limit_w" not in results and results["parameters"] > 0
    assert "fp32" in measure.finding(tables["steps"])


def test_each_batch_is_measured_at_its_own(config):
    tables, _ = measure_ladder(config(changes=["fp32", "sdpa"], batches=[1, 3], timed_steps=2, training_steps=2))
    steps = tables["steps"]
    assert list(zip(steps["change"], steps["batch_size"])) == [("fp32", 1), ("sdpa", 1), ("fp32", 3), ("sdpa", 3)]
    assert config(batches=[1]).gpu_gib and config(fill=True).gpu_gib and config().gpu_gib is None
    assert set(tables["curves"]["change"]) == {"fp32", "sdpa"}, "trained once, at the largest batch"
    assert set(tables["curves"]["batch_size"]) == {3}
    assert steps["gradient_off"].isna().all(), "fp32's gradients are of its own batch, which is none of these"


def test_rates_and_bounds_are_of_the_own_precision_and_moments_and_the_graph_replays_blocks(config, monkeypatch):
    monkeypatch.setattr(measure, "sheet_tflops", lambda precision, device: {"fp32": 50.0, "bf16": 1000.0}[precision])
    monkeypatch.setattr(measure, "highest_clock_mhz", lambda: 2000.0)
    ladder = Ladder(config(changes=["fp32", "blocks", "cuda_graph", "bf16_moments"]))
    for case, wall_ms in zip(ladder.cases, (8.0, 4.0, 2.0, 1.0)):
        case.row |= {"wall_ms": wall_ms, "sm_clock_mhz": 1000.0, "step_j": 6.0}
    steps = ladder.steps({"matmul_fp32": 40.0, "matmul_bf16": 800.0, "copy": 4.0}, 600.0).set_index("change")
    assert (steps["mfu_at_clock"] == 2 * steps["mfu"]).all() and (steps["energy_ms"] == 10).all()
    assert (steps["mfu_measured"] / steps["mfu"]).tolist() == pytest.approx([1.25] * 4)
    assert steps["moved_ms"].div(steps["moved_ms"]["fp32"]).tolist() == pytest.approx([1, 1, 1, 20 / 28])
    assert steps["replayed_ms"]["blocks"] == 2
    rows = pd.DataFrame([("fp32", 2, 8.0), ("blocks", 2, 4.0), (PEERS[0], 2, 5.0), ("fp32", 4, 9.0)],
                        columns=["change", "batch_size", "wall_ms"])
    assert measure.finding(rows) == "batch 2: fp32 8 ms, blocks 4 ms a step"


def test_of_captured_steps_the_quickest_is_read(config):
    rows = [("step", number, "whole", "gemm", "matmul", 0, lasted * 1_000_000)
            for number, lasted in ((0, 9), (1, 4), (2, 5))]
    captured = SimpleNamespace(reason="", operations=pd.DataFrame(rows, columns=CAPTURED))
    ladder = Ladder(config(changes=["fp32"]))
    ladder.cases[0].row["wall_ms"] = 5.0
    ladder.read(ladder.cases[0], captured)
    assert [ladder.cases[0].row[name] for name in ("gpu_ms", "operations", "busy")] == [4, 1, 0.8]
    assert ladder.kernels[0][["count", "gpu_ms"]].values.tolist() == [[1, 4]]


def test_one_that_fails_says_so_and_the_others_go_on(config, monkeypatch):
    def refuse(self, case, made, time=Ladder.time):
        if case.name == "bf16":
            raise RuntimeError("no kernel at /home/somebody/file.cu for it")
        if case.name == "sdpa":
            raise torch.OutOfMemoryError("short of memory. Including much more")
        time(self, case, made)

    def refuse_capture(self, case, made, captured=Ladder.captured):
        if case.name == "fused":
            raise RuntimeError("CUPTI is taken")
        captured(self, case, made)

    monkeypatch.setattr(Ladder, "time", refuse)
    def unreadable(profiler):
        raise TraceError("trace.json: has no traceEvents")

    monkeypatch.setattr(Ladder, "captured", refuse_capture)
    monkeypatch.setattr("stepscope.measure.profiler.read", unreadable)
    tables, _ = measure_ladder(config(changes=["fp32", "tf32", *EAGER[1:]], timed_steps=2))
    steps = tables["steps"].set_index("change")
    assert steps["status"].to_dict() == {
        "fp32": "ok", "tf32": "unsupported", "bf16": "failed", "sdpa": "oom", "fused": "ok"}
    assert steps.loc["bf16", "reason"] == "no kernel at file.cu for it"
    assert steps.loc["sdpa", "reason"] == "while measuring sdpa: short of memory."
    fused = steps.loc["fused"]
    assert fused["reason"] == "not captured: CUPTI is taken" and fused["wall_ms"] > 0 and math.isnan(fused["gpu_ms"])
    assert steps.loc["fp32", "reason"] == "not captured: trace.json: has no traceEvents" and "kernels" not in tables


def test_training_needs_room_for_bytes(config):
    small = config(vocab_size=100, training_steps=2)
    with pytest.raises(ConfigError, match="256"):
        train(small, Trainer(small, ()), "fp32")


