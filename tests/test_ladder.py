"""The ladder: its optimizer and loss against plain formulas, its rungs against fp32, its facts and words
against data."""

import functools
import math
import os
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional

from conftest import TINY
from stepscope import PACKAGE
from stepscope.config import ConfigError, configure, from_notebook
from stepscope.report.load import load
from stepscope.say.chapter import answer
from stepscope.step.ceilings import measure_ceilings
from stepscope.step.flops import parameter_count
from stepscope.step.rates import data_sheet
from stepscope.studies.ladder import chapter, facts, figures, floor, fp8, measure, printed
from stepscope.studies.ladder.checks import check_optimizer
from stepscope.studies.ladder.config import RUNGS
from stepscope.studies.ladder.cross_entropy import CHUNK, chunked_cross_entropy
from stepscope.studies.ladder.measure import Ladder, compiler_cache, difference, measure_ladder, sampled
from stepscope.studies.ladder.names import name_of, snippet
from stepscope.studies.ladder.optimizer import MasterAdamW, adamw_, master_weights
from stepscope.studies.ladder.rungs import (
    BRANCHES,
    CHANGES,
    FINISHED,
    Rung,
    Unsupported,
    before,
    changes_of,
    empty_out,
)
from stepscope.studies.ladder.tables import Process, over_processes, redrawn_medians
from stepscope.studies.ladder.training import text_batches
from test_cli import command  # noqa: F401

NOTEBOOKS = PACKAGE / "notebooks"
TINY_SHAPE = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}
EAGER = ["fp32", "bf16", "sdpa", "fused"]


@pytest.fixture
def config(tiny):
    def make(**fields):
        return tiny(
            **{
                "study": "ladder",
                "context_length": 16,
                "batch_size": 2,
                "rungs": EAGER,
                "beside": [],
                "rounds": 2,
            }
            | fields
        )

    return make


class Small(nn.Module):
    """A matrix and a vector, as a model has."""

    def __init__(self, low):
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(5, 7, dtype=torch.bfloat16 if low else torch.float32))
        self.vector = nn.Parameter(torch.randn(3))


def flat_optimizer(model, rate):
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    made = MasterAdamW(dict(model.named_parameters()), empty_out(model), rate)
    for name, master in made.masters().items():
        master.copy_(weights[name])
    made.reset()
    return made


def test_the_optimizer_is_torchs_adamw_over_200_steps():
    ours, theirs = Small(low=False), Small(low=False)
    own = flat_optimizer(ours, 1e-2)
    torchs = torch.optim.AdamW(theirs.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        for mine, other in zip(ours.parameters(), theirs.parameters()):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        own.step()
        torchs.step()
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_a_models_own_weights_are_kept_as_masters_from_where_they_are():
    model, before = Small(low=False), Small(low=False)
    made = master_weights(model, 1e-2)
    for _ in range(2):
        assert model.matrix.dtype == torch.bfloat16 and model.vector.dtype == torch.float32
        assert torch.equal(model.matrix, made.masters()["matrix"].bfloat16())
        assert torch.equal(model.vector, made.masters()["vector"])
        if torch.equal(model.vector, before.vector):
            assert torch.equal(made.masters()["matrix"], before.matrix)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            made.step()
    assert (model.vector < before.vector).all()


def plain_adamw(weights, gradients, rate):
    """Two moments and a weight as numbers of Python, each operation rounded to fp32."""

    def f(value):
        return torch.tensor(value, dtype=torch.float32).item()

    m = v = 0.0
    weight = weights
    for t, gradient in enumerate(gradients, start=1):
        m = f(f(m * f(0.9)) + f(gradient * f(1 - 0.9)))
        v = f(f(v * f(0.999)) + f(f(gradient * gradient) * f(1 - 0.999)))
        correction, step = f(1 / math.sqrt(1 - 0.999**t)), f(rate / (1 - 0.9**t))
        change = f(m / f(f(f(math.sqrt(v)) * correction) + f(1e-8)))
        weight = f(f(weight * f(1 - rate * 0.01)) - f(step * change))
    return weight


def test_the_optimizer_is_the_formula_bit_by_bit_and_writes_the_low_copy():
    model = Small(low=True)
    own = flat_optimizer(model, 3e-3)
    before = own.masters()["matrix"].clone()
    gradients = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(2)).bfloat16()
    for gradient in gradients:
        model.matrix.grad, model.vector.grad = gradient.clone(), torch.ones(3)
        own.step()
    after = own.masters()["matrix"]
    for row, column in ((0, 0), (1, 3), (4, 6)):
        expected = plain_adamw(before[row, column].item(), gradients[:, row, column].tolist(), 3e-3)
        assert after[row, column].item() == expected
    assert torch.equal(model.matrix, after.bfloat16()) and model.matrix.dtype == torch.bfloat16
    assert (
        model.vector.data_ptr() == own.masters()["vector"].data_ptr() and model.vector.dtype == torch.float32
    )
    before_low = model.matrix.detach().clone()
    own.masters()["matrix"].add_(2e-5)  # too little for bf16: only a master weight keeps it
    own.reset()
    assert (model.matrix == before_low).float().mean() > 0.9 and not torch.equal(
        own.masters()["matrix"], before_low.float()
    )


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


def test_fp8_products_are_near_and_are_not_the_same():
    torch.manual_seed(0)
    layer = nn.Linear(32, 48, bias=False)
    x = torch.randn(2, 16, 32, requires_grad=True)
    plain = layer(x)
    plain.square().sum().backward()
    expected, x.grad = x.grad, None
    fp8.use_fp8(layer)
    low = layer(x)
    low.square().sum().backward()
    for mine, theirs in ((low, plain), (x.grad, expected)):
        off = ((mine - theirs).norm() / theirs.norm()).item()
        assert 1e-4 < off < 0.08
    assert changes_of("fp8") - FINISHED == {"fp8"}


def test_fp8_is_as_much_coarser_in_a_model_as_its_mantissa_is_shorter(config, monkeypatch):
    """Four bits against eight: what the gradient is off is several times bf16's, and less than 16 times."""
    from stepscope.studies.ladder import rungs

    monkeypatch.setattr(rungs.fp8, "has_fp8", lambda device: True)
    off = {}
    for name, changes in (("fp32", ()), ("bf16", ("bf16", "no_casts")), ("fp8", ("bf16", "no_casts", "fp8"))):
        monkeypatch.setattr(rungs, "changes_of", lambda _, own=frozenset(changes): own)
        rung = Rung(config(), "fp32", {})
        loss = rung.gradients().item()
        if name == "fp32":
            reference = loss, {of: sampled(gradient) for of, gradient in rung.plain_gradients()}
        off[name] = difference(rung, loss, reference)["gradient_off"]
    assert off["fp32"] == 0 and 4 < off["fp8"] / off["bf16"] < 16


def test_what_fp8_is_off_by_is_its_mantissa(config, monkeypatch):
    """Rounded to 4 significant bits with any range products are off as much, to 3 bits, as e5m2 has, more."""
    from stepscope.studies.ladder import rungs

    def rounded(bits):
        def rounds(x):
            fraction, exponent = torch.frexp(x.float())
            return torch.ldexp(torch.round(fraction * 2**bits) / 2**bits, exponent)

        return lambda a, b, fast=True: (rounds(a) @ rounds(b).t()).to(a.dtype)

    monkeypatch.setattr(rungs.fp8, "has_fp8", lambda device: True)
    mine, off = config(d_model=64, d_ff=128, num_layers=4, num_heads=2, size="custom"), {}
    kinds = {"fp32": None, "fp8": fp8.product, "4 bits": rounded(4), "3 bits": rounded(3)}
    for name, product in kinds.items():
        changes = frozenset({"fp8"} if product else ())
        monkeypatch.setattr(rungs, "changes_of", lambda _, own=changes: own)
        monkeypatch.setattr(fp8, "product", product or fp8.product)
        rung = Rung(mine, "fp32", {})
        loss = rung.gradients().item()
        if not product:
            reference = loss, {of: sampled(gradient) for of, gradient in rung.plain_gradients()}
        off[name] = difference(rung, loss, reference)["gradient_off"]
    assert 0.7 < off["fp8"] / off["4 bits"] < 1.4 < off["3 bits"] / off["4 bits"]


def test_rungs_are_one_change_apart():
    for rung in CHANGES:
        assert changes_of(rung) - changes_of(before(rung, RUNGS)) == {rung}
        assert snippet(rung), "what a user writes is shown"
        assert not changes_of(rung) & (BRANCHES - {rung})
    assert before("fp32", RUNGS) is None and before("wide", {"fp32", "graph"}) == "fp32"
    assert changes_of("without_chunked") == FINISHED - {"chunked"} and not FINISHED & BRANCHES
    assert not changes_of("without_bf16") & {"bf16", "no_casts"}


@pytest.mark.parametrize(
    "changes",
    [
        {"wide"},
        {"chunked"},
        {"sdpa", "fused", "wide", "chunked"},
        {"bf16", "no_casts"},
        {"bf16", "sdpa", "no_casts", "wide", "chunked"},
    ],
    ids=lambda changes: "-".join(sorted(changes)),
)
def test_every_change_gives_fp32s_loss_and_gradients(config, changes, monkeypatch):
    from stepscope.studies.ladder import rungs

    plain_rung = Rung(config(), "fp32", {})
    expected_loss = plain_rung.gradients().item()
    expected = {name: gradient.clone() for name, gradient in plain_rung.plain_gradients()}
    monkeypatch.setattr(rungs, "changes_of", lambda name: frozenset(changes))
    rung = Rung(config(), "fp32", {})
    tolerance = 0.03 if "bf16" in changes else 1e-5
    assert rung.gradients().item() == pytest.approx(expected_loss, rel=tolerance / 10)
    got = dict(rung.plain_gradients())
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        assert ((gradient.float() - expected[name]).norm() / expected[name].norm()).item() < tolerance, name
    first, later = rung.plain_step().item(), [rung.plain_step().item() for _ in range(3)][-1]
    assert later < first


def test_a_reset_rung_trains_as_a_fresh_one(config, monkeypatch):
    from stepscope.studies.ladder import rungs

    monkeypatch.setattr(rungs, "changes_of", lambda name: frozenset({"bf16", "no_casts"}))
    programs = {}
    rung = Rung(config(), "fp32", programs)
    first = [rung.step().item() for _ in range(3)]
    rung.reset(0)
    assert [rung.step().item() for _ in range(3)] == first
    rung.unload()
    assert all(parameter.numel() == 0 for parameter in rung.program.model.parameters())
    again = Rung(config(), "fp32", programs)
    assert len(programs) == 1 and [again.step().item() for _ in range(3)] == first


def test_an_update_within_backward_is_the_update_after_it(config):
    """On the same gradients it is the same, bit by bit; and outside of its context backward updates nothing.
    With graphs that are captured and differentiated, and not turned into C++, which takes most of a minute."""
    set_backend = getattr(torch.compiler, "set_default_backend", lambda backend: None)
    set_backend("aot_eager")
    after, within = (Rung(config(), name, {}) for name in ("chunked", "overlap"))
    set_backend(None)
    assert after.in_backward is None and within.in_backward is not None
    before_it = within.optimizer.master.clone()
    within.gradients()
    assert torch.equal(within.optimizer.master, before_it)
    for _ in range(3):
        assert after.step().item() == within.step().item()
    for flat in ("master", "m", "v", "low"):
        assert torch.equal(getattr(after.optimizer, flat), getattr(within.optimizer, flat)), flat
    parameters = list(within.named.values())
    within.unload()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in parameters)


def test_the_compilers_cache_is_empty_for_the_first_process_and_shared_with_the_next(config, monkeypatch, tmp_path):
    monkeypatch.setattr("torch._inductor.runtime.cache_dir_utils.default_cache_dir", lambda: str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    places = []
    for number in (0, 1, 0):
        with compiler_cache(config(process=number)):
            place = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
            places.append((place, [path.name for path in place.iterdir()]))
            (place / f"made{len(places)}").touch()
    (first, was), (second, found_there), (third, at_last) = places
    assert first == second == third and tmp_path in first.parents
    assert not was and found_there == ["made1"] and not at_last
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"


def test_what_is_optional_is_skipped_when_the_budget_is_spent(config, capsys):
    ladder = Ladder(config(rungs=["fp32", "sdpa"], rounds=1, process=1, budget_s=1))
    ladder.climb()
    ladder.started -= 2
    ladder.leave_out()
    status = {name: row["status"] for name, row in ladder.rows.items()}
    assert status["fp32"] == status["sdpa"] == "ok" and set(status.values()) == {"ok", "skipped"}
    assert status["without_sdpa"] == "skipped"
    assert "budget" in ladder.rows["without_sdpa"]["reason"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[1] for line in lines] == ["fp32", "sdpa", "sdpa"], "a line of progress each"


def test_a_sample_of_the_gradient_stands_for_it(config, monkeypatch):
    torch.manual_seed(0)
    rung = Rung(config(), "fp32", {})
    loss = rung.gradients().item()
    whole = {name: gradient.clone() for name, gradient in rung.plain_gradients()}
    noise = {name: 0.01 * torch.randn_like(gradient) * gradient.std() for name, gradient in whole.items()}
    offs = []
    for most in (2**18, 1000):
        monkeypatch.setattr(measure, "COMPARED", most)
        there = {name: sampled(gradient + noise[name]) for name, gradient in whole.items()}
        assert max(map(len, there.values())) <= most
        offs.append(difference(rung, loss, (loss, there))["gradient_off"])
    assert offs[0] == pytest.approx(offs[1], rel=0.3) and offs[0] == pytest.approx(0.01, rel=0.1)


@pytest.fixture(scope="module")
def found():
    given = TINY | {
        "study": "ladder",
        "context_length": 16,
        "batch_size": 2,
        "vocab_size": 256,
        "beside": [],
        "rounds": 2,
        "rungs": ["fp32", "tf32", "bf16", "sdpa", "fused", "fp8", "fill"],
        "timed_steps": 3,
        "training_steps": 10,
    }
    config = configure(**given)
    return config, measure_ladder(config) | {"ceilings": measure_ceilings("cpu")}


def test_rungs_take_turns_and_what_a_cpu_lacks_is_a_row(found):
    _, tables = found
    status = tables["rungs"].set_index("rung")["status"]
    assert set(status[["tf32", "fp8", "fill"]]) == {"unsupported"} and set(status[EAGER]) == {"ok"}
    assert (tables["rungs"].set_index("rung")["reason"][["tf32", "fp8", "fill"]] != "").all()
    order = list(zip(tables["bursts"]["turn"], tables["bursts"]["rung"]))
    assert order == [(turn, rung) for turn in range(2) for rung in EAGER]
    assert (tables["samples"].groupby(["rung", "turn"]).size() == 3).all()
    off = tables["rungs"].set_index("rung")["gradient_off"]
    assert off["fp32"] == 0 and 0 < off["bf16"] < 0.05
    assert tables["rungs"].set_index("rung")["attention_kernel"]["sdpa"]
    curves = tables["curves"]
    assert curves[curves["rung"] == "fp32"]["seed"].nunique() == 3 and len(curves) == 10 * (3 + 3)


def test_a_rung_that_fails_costs_only_itself(config, monkeypatch):
    ladder = Ladder(config(rounds=2))
    turn = Ladder.turn
    asked = []

    def failing(self, name, *rest, **more):
        asked.append(name)
        if name == "bf16":
            raise torch.OutOfMemoryError("of this test")
        if name == "sdpa":
            raise RuntimeError("no kernel in /some/place/of/mine")
        turn(self, name, *rest, **more)

    monkeypatch.setattr(Ladder, "turn", failing)
    ladder.climb()
    rows = ladder.rows
    assert [rows[name]["status"] for name in EAGER] == ["ok", "oom", "failed", "ok"]
    assert "/some" not in rows["sdpa"]["reason"] and asked.count("bf16") == 1 and asked.count("fused") == 2


def test_what_is_not_there_is_said(config):
    with pytest.raises(Unsupported, match="TF32"):
        Rung(config(), "tf32", {})
    with pytest.raises(ConfigError, match="vocab_size: got 50"):
        text_batches(config(training_steps=1))


def test_the_floor_is_products_and_traffic(config):
    ceilings = pd.DataFrame({"ceiling": ["matmul_bf16", "copy"], "value": [2.0, 0.5]})
    one = floor.floor_ms(config(), ceilings)
    assert one["moving_ms"] == pytest.approx(28 * parameter_count(config()) / 0.5e12 * 1e3)
    assert one["floor_ms"] == one["products_ms"] + one["moving_ms"]
    faster = floor.floor_ms(config(), ceilings.assign(value=[4.0, 0.5]))
    assert faster["products_ms"] == pytest.approx(one["products_ms"] / 2)
    assert (
        data_sheet("NVIDIA H200")["tb_s"] == 4.8 and data_sheet("NVIDIA H100 PCIe")["bf16"] == 756
    )
    assert data_sheet("a CPU") == {}


def burst(rung, steps, time_ms, mhz=1900.0):
    return {"rung": rung, "turn": 0, "steps": steps, "wall_ms": time_ms, "sm_clock_mhz": mhz, "power_w": 600.0,
            "throttle": "power_cap", "throttled_share": 0.25, "step_energy_j": 3.0}


def process(size="small", number=0, ms=None, faster=1.0, device="NVIDIA H200", beside=30.0, kept_up=0.0,
            clocks=None, **fields):
    """One process's tables as a GPU might give them: ``ms`` and ``clocks`` by rung; Hugging Face's in
    ``beside``."""
    ms = ms or {rung: 100.0 * 0.8**index for index, rung in enumerate(RUNGS[:-1])}
    last = min(ms.values())
    all_ms = ms | {"hugging_face": beside, "without_chunked": 1.1 * last, "without_sdpa": 1.5 * last, "fill": 40.0}
    all_ms = {rung: time / faster for rung, time in all_ms.items()}
    config = configure("ladder", size=size, context_length=512, device="cuda", process=number, **fields)
    tables = {
        "rungs": pd.DataFrame([
            {"rung": rung, "status": "ok", "reason": "", "batch": 4 if rung != "fill" else 32, "compile_s": 1.0 + number,
             "peak_mib": 2048.0, "loss_off": 1e-5, "gradient_off": 1e-3, "gradient_worst": 2e-3}
            for rung in all_ms]),
        "samples": pd.DataFrame([
            {"rung": rung, "turn": 0, "step": step, "time_ms": time * (1 + step / 1e4)}
            for rung, time in all_ms.items() for step in range(6)]),
        "bursts": pd.DataFrame([burst(rung, 6, time, (clocks or {}).get(rung, 1900.0)) for rung, time in all_ms.items()]),
        "ceilings": pd.DataFrame({
            "ceiling": [f"matmul_{p}" for p in ("fp32", "tf32", "bf16", "fp8")] + ["copy"],
            "value": [50.0, 350, 700, 1200, 4.2]}),
    }
    if kept_up:
        row = {"ceiling": floor.KEPT_UP, "value": kept_up, "sm_clock_mhz": 1600.0, "power_w": 690.0}
        tables["ceilings"] = pd.concat([tables["ceilings"], pd.DataFrame([row])], ignore_index=True)
    return Process(config, device, f"ladder/{config.run_id}", tables)


def made_up(sizes=("small", "2.7B"), **given):
    """The study's tables from one process a size."""
    curves = []
    for rung, seed, shift in (("fp32", 0, 0.0), ("fp32", 1, 0.1), ("bf16", 0, 0.05), ("fp8", 0, 0.4)):
        curves += [
            {
                "size": "small",
                "context_length": 512,
                "vocab_size": 10_000,
                "rung": rung,
                "seed": seed,
                "step": step,
                "loss": 5 - step / 50 + shift,
            }
            for step in range(40)
        ]
    kernels = pd.DataFrame(
        [
            {
                "size": sizes[-1],
                "context_length": 512,
                "vocab_size": 10_000,
                "run_id": "a",
                "rung": "chunked",
                "name": name,
                "family": family,
                "count": 1.0,
                "time_ms": time,
            }
            for name, family, time in (("k", "matrix products", 60.0), ("o", "optimizer", 20.0))
        ]
    )
    rungs = over_processes([process(size, **given) for size in sizes]) if given else usual_rungs(sizes).copy()
    steps = steps_of([process(size, **given) for size in sizes])
    return {"rungs": rungs, "steps": steps, "climbs": pd.DataFrame(), "curves": pd.DataFrame(curves), "kernels": kernels,
            "checks": checked().assign(run_id="a")}


def steps_of(processes):
    """The table ``steps`` of some processes."""
    medians = [one.tables["samples"].groupby("rung", sort=False)["time_ms"].median().rename("step_ms").reset_index().assign(
        run_id=one.run, size=one.config.shape, context_length=one.config.context_length, vocab_size=one.config.vocab_size)
        for one in processes]
    return pd.concat(medians, ignore_index=True)


@functools.cache
def usual_rungs(sizes):
    return over_processes([process(size) for size in sizes])


@functools.cache
def checked():
    return check_optimizer("cpu")


def said(key, tables):
    given = {f"ladder.{name}": table for name, table in tables.items()}
    return answer(chapter.CHAPTER, next(one for one in chapter.CHAPTER.questions if one.key == key), given)


def test_the_ladder_follows_its_data():
    tables = made_up()
    found = facts.ladder(tables["rungs"])
    assert found["size"] == "2.7B" and found["best_name"] == name_of("overlap"), "fp8 is another arithmetic"
    assert found["faster"] == pytest.approx(0.8**-11, rel=1e-3)
    assert found["beside"]["over_best"] == pytest.approx(30 / (100 * 0.8**11), rel=1e-3)
    assert found["graph"]["rung"] == "graph" and found["idle"] == []
    slower = made_up(ms={rung: 10.0 + index for index, rung in enumerate(RUNGS[:-1])})
    assert facts.ladder(slower["rungs"])["best_name"] == "fp32, eager"
    lacking = tables["rungs"].assign(
        status=tables["rungs"]["status"].where(tables["rungs"]["rung"] != "tf32", "oom")
    )
    assert [one["oom"] for one in facts.ladder(lacking)["missing"]] == [True]
    texts = {
        said("ladder", {**tables, "rungs": rungs}).text
        for rungs in (tables["rungs"], slower["rungs"], lacking)
    }
    assert len(texts) == 3 and all("{" not in text for text in texts)
    assert len(printed.rungs(found)) <= 12


def test_ratios_are_of_times_within_a_process_and_intervals_over_processes():
    """Processes of which one is twice as fast: times are far apart, their ratios are not."""
    alike = over_processes([process(number=number) for number in range(3)]).set_index("rung").loc["wide"]
    apart = over_processes([process(number=number, faster=1 + number / 2) for number in range(3)])
    apart = apart.set_index("rung").loc["wide"]
    assert alike["processes"] == apart["processes"] == 3
    assert alike["ci_high_ms"] / alike["ci_low_ms"] < 1.01 and apart["ci_high_ms"] / apart["ci_low_ms"] > 1.3
    for row in (alike, apart):
        assert row["gain"] == pytest.approx(1.25, rel=1e-3)
        assert 1.24 < row["gain_low"] <= row["gain"] <= row["gain_high"] < 1.26
        assert row["compile_s"] == 1, "the first process compiled, the others found its cache"


def test_bootstrap_medians_are_those_of_bootstrap_samples():
    times = np.random.default_rng(1).normal(10, 1, 41)
    drawn = redrawn_medians(times, np.random.default_rng(2))
    plain = np.median(np.random.default_rng(3).choice(times, (4000, 41)), axis=1)
    assert set(drawn) <= set(times)
    for share in (0.025, 0.5, 0.975):
        assert np.quantile(drawn, share) == pytest.approx(np.quantile(plain, share), abs=0.1)


def test_what_helps_nowhere_and_what_costs_is_told():
    ms = dict.fromkeys(RUNGS[:-1], 100.0) | {"tf32": 50.0, "bf16": 50.0, "sdpa": 60.0}
    tables = made_up(ms=ms)
    found = facts.sizes(tables["rungs"])
    assert "TF32 products" not in found["useless"] and "bf16 autocast" in found["useless"]
    assert {one["rung"] for one in found["costly"]} >= {"sdpa", "fused"}
    assert "cost time" in said("ladder-sizes", tables).text
    assert "cost time" not in said("ladder-sizes", made_up()).text
    assert found["useful"] == ["TF32 products"] and not found["some"]
    unsure = tables["rungs"].assign(gain_low=0.5)
    assert facts.sizes(unsure)["useful"] == [] and facts.sizes(unsure)["rows"]["sure"].sum() < found["rows"]["sure"].sum()
    assert printed.gains(found).set_index("rung").loc["bf16 autocast"].eq("as fast ‡").all()
    other = pd.concat([tables["rungs"], tables["rungs"][tables["rungs"]["size"] == "small"].assign(vocab_size=50_257)])
    costly = {one["rung"]: one["at"] for one in facts.sizes(other)["costly"]}
    assert {"called": "small, vocabulary 50,257", "context_length": 512} in costly["sdpa"]
    assert list(printed.gains(facts.sizes(other)))[1:] == ["small", "small, vocabulary 50,257", "2.7B"]
    kinds = facts.advice(tables["rungs"], tables["steps"])["kinds"]
    assert (
        kinds["products"]["most"]["gain"] == pytest.approx(2, rel=1e-3)
        and kinds["memory"]["most"]["gain"] < 1
    )

def climbing(**ms):
    """Times of all rungs, 20% less each, but for those given."""
    return {rung: 100.0 * 0.8**index for index, rung in enumerate(RUNGS[:-1])} | ms


def test_rungs_at_unlike_clocks_are_marked_and_counted():
    tables = made_up()
    alike = facts.sizes(tables["rungs"])
    assert alike["unlike"]["unlike"] == 0 and not printed.gains(alike).map(lambda cell: "≠" in cell).any(axis=None)
    slow = made_up(clocks={"no_casts": 1700.0})["rungs"]
    found = facts.sizes(slow)
    # The rung itself, and the one after it, which is at the higher clock again.
    assert (found["unlike"]["unlike"], found["unlike"]["lower"], found["unlike"]["all_lower"]) == (4, 2, False)
    marked = printed.gains(found).set_index("rung")
    assert marked.loc[name_of("no_casts")].str.contains("≠").all()
    assert not marked.loc[name_of("tf32")].str.contains("≠").any()
    assert "unlike" not in said("ladder-sizes", tables).text and "1,700 MHz" in said(
        "ladder-sizes", {**tables, "rungs": slow}).text
    bounds = printed.bounds(facts.advice(slow, tables["steps"]))
    assert bounds["optimizer"].str.contains("≠").all() and not bounds["launches"].str.contains("≠").any()
    fast = made_up(clocks={"overlap": 1600.0})["rungs"]
    goals = facts.goals(fast, tables["kernels"])
    assert goals["unlike"]["unlike"] == 2 and goals["unlike"]["all_lower"]
    assert facts.goals(tables["rungs"], tables["kernels"])["unlike"]["unlike"] == 0
    left = facts.left_out(fast)
    assert left["rows"]["unlike"].all(), "each is compared with the finished step, which is the overlap"
    assert not facts.left_out(tables["rungs"])["rows"]["unlike"].any()
    assert "sm_clock_mhz" in fast and facts.sizes(fast.drop(columns="sm_clock_mhz"))["unlike"]["unlike"] == 0
    assert facts.left_out(fast.drop(columns="sm_clock_mhz"))["unlike"]["unlike"] == 0


def test_ratios_of_steps_in_which_processes_differ_are_marked():
    rungs = made_up()["rungs"].assign(fastest_ms=10.0, slowest_ms=10.4)
    near = facts.sizes(rungs)
    assert not near["rows"]["paced"].any() and not printed.gains(near).map(lambda cell: "*" in cell).any(axis=None)
    rungs["slowest_ms"] = rungs["slowest_ms"].where(~rungs["rung"].isin(["sdpa", "without_sdpa"]), 11.0)
    marked = printed.gains(facts.sizes(rungs)).set_index("rung")
    assert marked.loc[[name_of("sdpa"), name_of("fused")]].map(lambda cell: cell == "–" or "\\*" in cell).all(axis=None)
    assert not marked.loc[[name_of("bf16"), name_of("blocks")]].map(lambda cell: "*" in cell).any(axis=None)
    bounds = printed.bounds(facts.advice(rungs, made_up()["steps"]))
    assert bounds["memory"].str.contains("*", regex=False).all()
    assert not bounds["launches"].str.contains("*", regex=False).any()
    left = facts.left_out(rungs)["rows"].set_index("rung")["paced"]
    assert left["without_sdpa"].all() and not left.drop("without_sdpa").any()
    assert not facts.sizes(rungs.drop(columns=["fastest_ms", "slowest_ms"]))["rows"]["paced"].any()


def test_every_shape_and_what_is_beside_the_ladder_is_in_one_table():
    rungs = pd.concat([usual_rungs(("small", "2.7B")), over_processes(
        [process("large", ms=climbing(hugging_face_bf16=25.0))])], ignore_index=True)
    found = facts.ladder(rungs)
    table = printed.everything(found)
    assert set(table["size"]) == {"small", "large", "2.7B"} and (table["rung"] == name_of("fp8")).sum() == 3
    assert (table["rung"] == name_of("hugging_face_bf16")).sum() == 1 and len(table.columns) == 17
    assert not table["rung"].str.startswith("without").any()
    assert (found["bf16_weights"]["size"], found["bf16_weights"]["ms"]) == ("large", pytest.approx(25, rel=1e-3))
    assert facts.ladder(usual_rungs(("small", "2.7B")))["bf16_weights"] is None


def test_what_forward_keeps_with_the_chunked_loss_is_told_where_the_vocabulary_is_largest():
    rungs = made_up()["rungs"].assign(saved_bytes=900 * 2**20)
    rungs.loc[rungs["rung"] == "chunked", "saved_bytes"] = 800 * 2**20
    wide = rungs[rungs["size"] == "small"].assign(vocab_size=50_257)
    wide.loc[wide["rung"] == "chunked", "saved_bytes"] = 700 * 2**20
    one, both = (facts.sizes(table)["chunked"] for table in (rungs, pd.concat([rungs, wide])))
    assert [(told["vocabulary"], told["mib"], told["before_mib"]) for told in (one, both)] == [
        (10_000, 800.0, 900.0), (50_257, 700.0, 900.0)]
    assert facts.sizes(rungs.drop(columns="saved_bytes"))["chunked"] is None


def test_the_clock_beside_the_filled_batch_is_of_the_same_process():
    held = process(number=1, ms=climbing(), clocks={"fill": 1500.0, "overlap": 1700.0})
    [row] = facts.filled(over_processes([held]))["rows"].to_dict("records")
    assert (row["sm_clock_mhz"], row["small_mhz"], row["lower_clock"]) == (1500.0, 1700.0, True)
    near = process(ms=climbing(), clocks={"fill": 1695.0, "overlap": 1700.0})
    assert facts.filled(over_processes([near]))["lower_clock"] == 0
    one_apart = over_processes([process(number=2, ms=climbing(overlap=1.0)), held])
    assert facts.filled(one_apart)["rows"]["small_mhz"].tolist() == [1800.0], "of the processes that have both"


def test_how_processes_climbed_is_counted():
    runs = pd.DataFrame({"run_id": list("abcd"), "size": "small", "context_length": 512, "vocab_size": 10_000,
                         "beside": [0, 2, 0, 1], "climbed": [True, True, True, False], "turns": [1, 2, 1, 1],
                         "ram_gib": [100.0, 100.0, 200.0, 100.0], "steps": [3, 9, 4, 2], "warmup": [1, 1, 2, 0]})
    found = facts.how_climbed(runs)
    assert found["steps"].min() == 3 and found["warmup"] == 1  # of those that climbed
    assert (found["climbed"], found["turns"], found["all_turns"], found["no_turns"]) == (3, 1, False, False)
    assert found["hosts"] and (found["neighbours"]["beside"], found["neighbours"]["runs"]) == (2, 4)
    one = facts.how_climbed(runs.assign(ram_gib=100.0, turns=2, beside=0))
    assert not one["hosts"] and one["all_turns"] and one["neighbours"] is None
    assert facts.how_climbed(runs.assign(climbed=False)) is None and facts.how_climbed(pd.DataFrame()) is None
    texts = {said("ladder", {**made_up(), "climbs": table}).text for table in (pd.DataFrame(), runs)}
    assert len(texts) == 2


def test_a_profiled_step_is_told_beside_the_time_of_its_own_process():
    rungs, kernels = (made_up(("2.7B",))[name] for name in ("rungs", "kernels"))
    elsewhere = facts.parts(rungs, kernels).iloc[0]
    own = facts.parts(rungs, kernels.assign(step_ms=kernels["time_ms"].sum() + 7)).iloc[0]
    assert own["median_ms"] == 87 and own["idle"] == pytest.approx(7) and not own["at_once"]
    assert elsewhere["median_ms"] == rungs.set_index("rung").loc["chunked", "median_ms"] != own["median_ms"]


def test_a_rungs_time_is_of_processes_that_climbed_from_the_first():
    """Another that measured two rungs says how they compare, and nothing of how long either takes in a climb;
    of a branch, which no climb needs, all say how long it takes."""
    few = process(number=1, ms=climbing(), faster=0.5)
    few.tables["samples"] = few.tables["samples"][few.tables["samples"]["rung"].isin(["blocks", "graph"])]
    few.tables["rungs"] = few.tables["rungs"][few.tables["rungs"]["rung"].isin(["blocks", "graph"])]
    rungs = over_processes([process(ms=climbing()), few]).set_index("rung")
    alone = over_processes([process(ms=climbing())]).set_index("rung")
    assert rungs.loc["blocks", "median_ms"] == alone.loc["blocks", "median_ms"] and rungs.loc["blocks", "processes"] == 1
    assert rungs.loc["blocks", "slowest_ms"] == alone.loc["blocks", "slowest_ms"]
    assert rungs.loc["graph", "processes"] == 2 and rungs.loc["graph", "median_ms"] > alone.loc["graph", "median_ms"]
    assert rungs.loc["graph", "gain"] == pytest.approx(alone.loc["graph", "gain"], rel=1e-3)
    only = over_processes([few]).set_index("rung")
    assert only.loc["blocks", "processes"] == 1 and only.loc["blocks", "median_ms"] > 0


def test_what_rungs_gain_together_is_taken_within_a_process():
    """Medians of each rung over processes would tell of none that there was."""
    quick = climbing(fp32=100.0, tf32=50.0, bf16=40.0, wide=10.0, chunked=9.0)
    slow = climbing(fp32=100.0, tf32=99.0, bf16=20.0, wide=10.0, chunked=9.0)
    processes = [process(number=0, ms=quick), process(number=1, ms=slow), process(number=2, ms=slow)]
    rungs, steps = over_processes(processes), steps_of(processes)
    found = facts.advice(rungs, steps)
    def gain(ms):
        before = {"tf32": "fp32", "bf16": "tf32", "wide": "no_casts"}
        return np.prod([ms[other] / ms[rung] for rung, other in before.items()])
    own = found["shapes"]["products"].iloc[0]
    assert own == pytest.approx(gain(slow)) and found["processes"] == [3]
    low, high = (ends["products"].iloc[0] for ends in found["ends"])
    assert (low, high) == (pytest.approx(min(gain(slow), gain(quick))), pytest.approx(max(gain(slow), gain(quick))))
    assert facts.advice(rungs, steps[steps["rung"] == "fp32"]) is None


def test_the_one_graph_stands_beside_the_ladder():
    """It is compared as rungs are, and neither climbed nor part of what several gain together."""
    tables = made_up()
    found = facts.sizes(tables["rungs"])
    graph = found["rows"][found["rows"]["rung"] == "graph"]
    assert (graph["before"] == "blocks").all() and len(graph) == 2
    assert name_of("graph") in printed.gains(found)["rung"].tolist() and name_of("graph") in found["useful"]
    assert "graph" not in facts.climbed(tables["rungs"])["rung"].tolist()
    assert found["graph"]["own"].tolist() == found["graph"]["blocks"].tolist() == [1, 1]
    without = tables["rungs"][tables["rungs"]["rung"] != "graph"]
    assert facts.sizes(without)["graph"] is None and facts.advice(
        without, tables["steps"])["shapes"].equals(facts.advice(tables["rungs"], tables["steps"])["shapes"])


def test_what_a_process_says_beside_itself_is_compared_within_it():
    """Where it is left out, and at the batch that fills: of processes unlike in speed, neither is another's."""
    rungs = over_processes([process(), process(number=1, faster=1.5)])
    found = facts.left_out(rungs)
    sure = found["rows"].set_index("rung")["sure"]
    assert sure.all() and found["processes"] == 2
    wide = pd.concat([rungs, rungs.assign(vocab_size=50_257)], ignore_index=True)
    assert len(printed.left_out(facts.left_out(wide))) == 2 * len(printed.left_out(found)) == 2
    near = rungs.assign(over_finished_low=0.5, over_finished_high=2.0)
    assert not facts.left_out(near)["rows"]["sure"].any() and facts.left_out(near)["saving"] == []
    quicker = rungs.assign(over_finished=0.8, over_finished_low=0.75, over_finished_high=0.85)
    [one, *_] = facts.left_out(quicker)["saving"]
    assert one["speed"] == pytest.approx(1.25) and "Faster without it" in said("ladder-left-out", made_up() | {"rungs": quicker}).text
    assert facts.filled(rungs)["gains"].tolist() == pytest.approx([32 / 4 / (40 / (100 * 0.8**11))], rel=1e-3)


def test_the_batch_of_most_processes_stands_for_the_shape():
    """Of equally many the larger one: two batches are never one number."""
    def filled(*batches):
        made = [process(number=number) for number in range(len(batches))]
        for one, batch in zip(made, batches):
            one.tables["rungs"].loc[one.tables["rungs"]["rung"] == "fill", "batch"] = batch
        row = over_processes(made).set_index("rung").loc["fill"]
        return row["batch"], row["processes"]
    assert filled(32, 32, 36) == (32, 2) and filled(32, 36) == (36, 1) and filled(32) == (32, 1)


def test_fp8_is_compared_at_the_same_shape():
    tables = made_up()
    rungs = tables["rungs"].copy()
    fp8, small = rungs["rung"] == "fp8", rungs["size"] == "small"
    rungs.loc[fp8, "gradient_off"] = 6e-3
    rungs.loc[(rungs["rung"] == "overlap") & small, "gradient_off"] = 5e-4
    assert sorted(facts.training(rungs, tables["curves"])["other"]["coarser"]) == pytest.approx([6, 12])


def test_a_gain_over_several_changes_is_none():
    """A run may leave rungs out: what it gains then is not one change's."""
    few = made_up(sizes=("small",), ms={"fp32": 100.0, "wide": 20.0, "chunked": 10.0})["rungs"]
    gains = few.set_index("rung")["gain"]
    assert gains["chunked"] == pytest.approx(2, rel=1e-3) and math.isnan(gains["wide"])


def test_goals_that_are_missed_are_said():
    sizes = ("small", "large", "2.7B")
    asked = [made_up(sizes, beside=beside) for beside in (1000.0, 1.0)]
    reached, missed = (facts.goals(tables["rungs"], tables["kernels"]) for tables in asked)
    of_beside = {(one["size"], one["goal"]) for one in missed["missed"]} - {("2.7B", "floor_share")}
    assert of_beside >= {("small", "over_hugging_face"), ("2.7B", "over_hugging_face"), ("large", "slower")}
    assert not {one["goal"] for one in reached["missed"]} & {"over_hugging_face", "slower"}
    assert (missed["faster"], reached["faster"]) == (0, 3)
    won = {(one["size"], one["goal"]): one for one in reached["reached"]}
    assert {("small", "over_hugging_face"), ("2.7B", "over_hugging_face")} <= won.keys()
    assert all(one["got"] >= one["asked"] for one in won.values())
    assert not {one["goal"] for one in missed["reached"]} & {"over_hugging_face"}
    assert "Missed" in said("ladder-goals", asked[1]).text
    best = 100 * 0.8**11
    [one] = [one for one in missed["missed"] if (one["size"], one["goal"]) == ("2.7B", "over_hugging_face")]
    assert one["over_ms"] == pytest.approx(best - 1 / 1.2, rel=1e-3)
    [small] = [one for one in missed["missed"] if one["size"] == "small"]
    assert small["parts"] is None and not small["enough"], "of it no kernels were profiled"


def test_what_would_have_to_change_is_computed_from_the_kernels():
    """A step of 95 ms whose products take 8 ms more than the floor has for them, and whose rest takes 4."""
    rungs = made_up(("2.7B",), ms={"fp32": 1000.0, "chunked": 95.0, "overlap": 95.0}, beside=108.0)["rungs"]
    least = rungs.set_index("rung").loc["overlap"]
    spent = {"matrix multiply": least["products_ms"] + 8, "optimizer": least["moving_ms"], "copy and cast": 4.0}
    shape = {"size": "2.7B", "context_length": 512, "vocab_size": 10_000, "run_id": "a", "count": 1.0}
    kernels = pd.DataFrame(
        [shape | {"rung": rung, "name": name, "family": name, "time_ms": times * ms}
         for rung, times in (("chunked", 1), ("overlap", 2)) for name, ms in spent.items()])
    [one] = [one for one in facts.goals(rungs, kernels)["missed"] if one["goal"] == "over_hugging_face"]
    assert one["parts"]["rung"] == "chunked" and not one["parts"]["at_once"], "one after another, if it can be"
    assert one["parts"]["products"] - one["parts"]["products_least"] == pytest.approx(8)
    assert one["over_ms"] == pytest.approx(95 - 108 / 1.2, rel=1e-3) and one["enough"] == ["products and attention"]
    assert facts.left(facts.reference(rungs), kernels)["whole_ms"] == pytest.approx(sum(spent.values()))
    both = kernels.assign(time_ms=kernels["time_ms"].where(kernels["rung"] == "chunked", kernels["time_ms"] / 2))
    assert facts.left(facts.reference(rungs), both)["name"] == name_of("overlap"), "of two, the last"


def test_training_outside_the_band_is_told():
    tables = made_up()
    found = facts.training(tables["rungs"], tables["curves"])
    assert [one["name"] for one in found["out"]] == ["FP8 products"] and found["inside"] == 1
    assert found["out"][0]["beyond"] == pytest.approx(0.3) and found["out"][0]["of_range"] == pytest.approx(4)
    inside = tables["curves"].assign(
        loss=tables["curves"]["loss"].where(tables["curves"]["rung"] != "fp8", tables["curves"]["loss"] - 0.35)
    )
    assert (
        said("ladder-training", tables).text
        != said("ladder-training", {**tables, "curves": inside}).text
    )
    without = said("ladder-training", {**tables, "curves": pd.DataFrame()})
    assert without.text


class Uncorrected(torch.optim.Optimizer):
    """AdamW whose author forgot the moments' correction."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            m, v = self.state[parameter].setdefault("moments", [torch.zeros_like(parameter) for _ in range(2)])
            m.lerp_(parameter.grad, 0.1)
            v.lerp_(parameter.grad.square(), 0.001)
            parameter.mul_(1 - 3e-6).sub_(3e-4 * m / (v.sqrt() + 1e-8))


BROKEN = {
    "as it should be": lambda weights: torch.optim.AdamW(weights, lr=3e-4),
    "no correction": lambda weights: Uncorrected(weights, lr=3e-4),
    "twice the rate": lambda weights: torch.optim.AdamW(weights, lr=6e-4),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_rung_that_trains_otherwise_is_found(config, monkeypatch, how):
    """Real training: a broken optimizer is farther off than another seed, a right one and bf16 are not."""
    from stepscope.studies.ladder import training

    class Broken(Rung):
        def _load(self):
            super()._load()
            if self.name == "fused":
                self.optimizer = BROKEN[how](list(self.named.values()))

    monkeypatch.setattr(training, "Rung", Broken)
    mine = config(**TINY_SHAPE, size="custom", vocab_size=256, training_steps=40)
    curves = training.train(mine, EAGER, {}).assign(size="nano", context_length=16, vocab_size=256)
    found = facts.trained(curves)
    out = [one["name"] for one in found["out"]]
    assert out == ([] if how == "as it should be" else [name_of("fused")])
    assert found["apart"] == found["by_rung"]["apart"].max() and found["compared"] == 3


def test_a_missing_weight_decay_is_found_by_the_check_and_not_by_the_loss(monkeypatch):
    """What 200 steps change too little for a loss to show, the comparison with torch's AdamW shows."""
    right = check_optimizer("cpu").set_index("against")
    monkeypatch.setattr("stepscope.studies.ladder.optimizer.WEIGHT_DECAY", 0.0)
    wrong = check_optimizer("cpu").set_index("against")
    assert right.loc["formula", "unequal"] == 0 and right.loc["torch", "off"] < 1e-6
    assert wrong.loc["formula", "unequal"] > right.loc["formula", "numbers"] / 4
    assert wrong.loc["torch", "off"] > 1e-4
    assert facts.optimizer(right.reset_index().assign(run_id="a"))["exact"]
    assert not facts.optimizer(wrong.reset_index().assign(run_id="a"))["exact"]


def test_a_rung_at_the_bands_edge_is_judged_by_the_curve_it_should_follow():
    """The first seed's fp32 is the band's lowest: rounding leads out of the band, and is told apart."""
    tables = made_up()
    low = tables["curves"].assign(
        loss=tables["curves"]["loss"].where(tables["curves"]["rung"] != "bf16", tables["curves"]["loss"] - 0.06)
    )
    found = facts.training(tables["rungs"], low)
    assert found["strictly"] == 0 and found["inside"] == 1 and found["edge"] == 1
    assert found["by_rung"].loc["bf16", "of_range"] == pytest.approx(0.1)
    assert found["by_rung"].loc["bf16", "beyond"] == pytest.approx(0.01)


def test_three_processes_of_a_real_ladder_are_one_row_a_rung(config):
    """Later processes repeat times: gradients and attention's choice are the first one's."""
    ceilings = measure_ceilings("cpu")
    ladders = []
    for number in range(3):
        mine = config(process=number, rounds=1, vocab_size=256)
        ladders.append(Process(mine, "a CPU", f"ladder/{number}", measure_ladder(mine) | {"ceilings": ceilings}))
    first, later = ladders[0].tables["rungs"], ladders[1].tables["rungs"]
    assert "gradient_off" in first and "gradient_off" not in later
    rungs = over_processes(ladders)
    assert rungs["rung"].is_unique and (rungs["processes"] == 3).all()
    rows = rungs.set_index("rung")
    assert rows.loc["bf16", "gradient_off"] == first.set_index("rung").loc["bf16", "gradient_off"]
    assert rows.loc["sdpa", "attention_kernel"] == first.set_index("rung").loc["sdpa", "attention_kernel"] != ""
    medians = {
        process.run: process.tables["samples"].groupby("rung")["time_ms"].median() for process in ladders
    }
    expected = np.median([times["bf16"] / times["sdpa"] for times in medians.values()])
    assert rows.loc["sdpa", "gain"] == pytest.approx(expected)
    assert rows.loc["sdpa", "gain_low"] <= rows.loc["sdpa", "gain"] <= rows.loc["sdpa", "gain_high"]
    assert facts.ladder(rungs)["processes"] == 3
    assert "3 processes" in said("ladder", {"rungs": rungs, "climbs": pd.DataFrame()}).text


@pytest.mark.parametrize("key", [question.key for question in chapter.CHAPTER.questions])
def test_every_question_is_answered_from_a_gpus_data_and_from_none(key):
    full = said(key, made_up())
    assert full.text and full.tables and full.runs
    nothing = dict.fromkeys(("rungs", "climbs", "steps", "curves", "kernels", "checks"), pd.DataFrame())
    assert "Not answered" in said(key, nothing).text
    left = ["rung", "kind", "batch", "size", "context_length", "vocab_size", "runs", "processes", "reason"]
    too_large = made_up()["rungs"][left].assign(status="oom")
    assert "Not answered" in said(key, {**nothing, "rungs": too_large}).text


def test_pictures_are_drawn_from_a_gpus_data_and_a_cpus(found):
    import matplotlib.pyplot as plt

    config, tables = found
    mine = {
        "rungs": over_processes([Process(config, "a CPU", "ladder/a", tables)]),
        "curves": tables["curves"].assign(size="nano", context_length=16, vocab_size=256),
    }
    for given in (made_up(), mine):
        for picture in chapter.CHAPTER.pictures:
            figure = picture.draw(
                *[given[name.removeprefix("ladder.")] for name in picture.needs], where="here"
            )
            assert figure.axes
            plt.close(figure)
    assert chapter.CHAPTER.pictures[0].draw(made_up()["rungs"].assign(status="oom"), where="here") is None


def test_a_table_of_gains_is_titled_by_what_gains_most_where():
    import matplotlib.pyplot as plt

    steep = {"fp32": 1000.0, "tf32": 300.0, "bf16": 290.0}
    launched = {"fp32": 1000.0, "tf32": 990.0, "bf16": 200.0}
    rungs = over_processes([process("small", ms=launched), process("2.7B", ms=steep)])
    figure = figures.gains(rungs, where="here")
    assert "2.7B gains most by TF32, small by bf16 autocast\n" in figure.get_suptitle()
    plt.close(figure)


def test_the_floor_at_a_clock_is_that_of_products_kept_up(config):
    """Half the clock takes products twice as long, and what moves as long as before."""
    ceilings = pd.DataFrame({"ceiling": ["matmul_bf16", "copy", floor.KEPT_UP], "value": [2.0, 0.5, 1.5],
                             "sm_clock_mhz": [math.nan, math.nan, 1500.0]})
    plain = floor.floor_ms(config(), ceilings)
    at = {mhz: floor.floor_at_clock_ms(config(), ceilings, mhz) - plain["moving_ms"] for mhz in (1500, 750)}
    assert at[1500] == pytest.approx(plain["products_ms"] * 2 / 1.5) and at[750] == pytest.approx(2 * at[1500])
    assert math.isnan(floor.floor_at_clock_ms(config(), ceilings.head(2), 1500)), "older runs did not measure it"
    rungs = over_processes([process(kept_up=500.0)])
    told = rungs.set_index("rung").loc["wide"]
    assert told["clock_floor_ms"] > told["floor_ms"] and told["kept_up_of_sheet"] == pytest.approx(500 / 989.5)
    assert facts.clock(told, rungs)["kept_up_mhz"] == 1600 and not facts.clock(told, rungs)["below"]
    fast = over_processes([process(kept_up=900.0), process(number=1)])
    found = facts.clock(fast.set_index("rung").loc["wide"], fast)
    assert found["below"] and found["processes"] == 1, "of two processes one measured what products keep up"


def test_it_climbs_with_a_shape_of_ones_own_from_the_command_line(command, tmp_path):  # noqa: F811
    shape = ",".join(str(TINY_SHAPE[name]) for name in ("d_model", "d_ff", "num_layers", "num_heads"))
    asked = ("ladder", "--shape", shape, "--context", 8, "--batch", 1, "--vocabulary", 50, "--processes", 1)
    runs = tmp_path / "runs"
    status, out, error = command(*asked, "--rungs", "fp32, roof", "--runs", runs)
    assert status == 2 and "rungs" in error and not runs.exists()
    status, out, error = command(*asked, "--rungs", "fp32,tf32,bf16,sdpa", "--runs", runs)
    assert status == 0 and "1 done, 0 out of memory, 0 failed" in error
    rungs = load("ladder", runs=runs)["ladder.rungs"].set_index("rung")
    assert dict(rungs["status"]) == {"fp32": "ok", "tf32": "unsupported", "bf16": "ok", "sdpa": "ok"}
    assert set(rungs["context_length"]) == {8} and (rungs["median_ms"].notna() == (rungs["status"] == "ok")).all()
    pages = [Path(line) for line in out.splitlines() if line.endswith((".md", ".html"))]
    assert pages and all(page.is_file() for page in pages)


@pytest.mark.parametrize("gains", [(1.0, 0.9), (1.0, 2.0)])
def test_a_run_in_which_nothing_helps_says_so(gains):
    ms = {rung: 100.0 / gain for rung, gain in zip(("fp32", "tf32"), gains)}
    said = printed.reading(over_processes([process(ms=ms)]))
    assert ("2.00x faster" in said) == (gains[1] > 1) and ("Nothing is surely faster" in said) == (gains[1] < 1)
    assert ("Most gained" in said) == (gains[1] > 1) and said.count(". ") <= 2


@pytest.mark.parametrize("given", [{"size": "small"}, {"size": "2.7B"}, {"size": "custom", **TINY_SHAPE}],
                         ids=["small", "2.7B", "custom"])
def test_the_notebooks_parameters_give_way_to_a_sweeps(given):
    """A named size as a sweep gives it (without its dimensions), and dimensions of one's own."""
    notebook = nbformat.read(NOTEBOOKS / "ladder.ipynb", 4)
    names: dict = {}
    exec(next(cell.source for cell in notebook.cells if cell.cell_type == "code"), names)
    assert from_notebook("ladder", names).size == "nano"
    assert from_notebook("ladder", names | given).size == given["size"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel is a GPU's")
def test_the_kernel_is_the_formula_bit_by_bit_also_in_a_captured_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 130, bias=False), nn.RMSNorm(130)).cuda()
    model[0].weight.data = model[0].weight.data.bfloat16()
    own = flat_optimizer(model, 1e-2)
    expected = {
        name: [master.clone(), torch.zeros_like(master), torch.zeros_like(master)]
        for name, master in own.masters().items()
    }
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    own.step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        own.step()
    own.bind()
    for turn in range(4):
        if turn:
            graph.replay()
        for name, parameter in model.named_parameters():
            adamw_(*expected[name], parameter.grad, own.scalars)
    for name, (master, *_) in expected.items():
        assert torch.equal(own.masters()[name], master)
    assert torch.equal(model[0].weight, expected["0.weight"][0].bfloat16())
