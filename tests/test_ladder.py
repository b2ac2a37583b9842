"""The ladder: its optimizer and loss against plain formulas, its rungs against fp32, its facts and words
against data."""

import math

import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional

from conftest import TINY
from stepscope.config import ConfigError, configure
from stepscope.say.chapter import answer
from stepscope.step.ceilings import measure_ceilings
from stepscope.step.flops import parameter_count
from stepscope.studies.ladder import chapter, facts, floor, fp8, printed
from stepscope.studies.ladder.config import RUNGS
from stepscope.studies.ladder.cross_entropy import CHUNK, chunked_cross_entropy
from stepscope.studies.ladder.measure import Ladder, measure_ladder
from stepscope.studies.ladder.names import snippet
from stepscope.studies.ladder.optimizer import MasterAdamW, adamw_
from stepscope.studies.ladder.rungs import CHANGES, FINISHED, Rung, Unsupported, changes_of, empty_out
from stepscope.studies.ladder.tables import rung_times
from stepscope.studies.ladder.training import text_batches

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


def plain_adamw(weights, gradients, rate):
    """Two moments and a weight as numbers of Python, each operation rounded to fp32."""

    def f(value):
        return torch.tensor(value, dtype=torch.float32).item()

    m = v = 0.0
    weight = weights
    for t, gradient in enumerate(gradients, start=1):
        m = f(f(m * f(0.9)) + f(gradient * f(1 - 0.9)))
        v = f(f(v * f(0.999)) + f(f(gradient * gradient) * f(1 - 0.999)))
        first, second = f(1 - 0.9**t), f(math.sqrt(1 - 0.999**t))
        change = f(m / f(f(f(math.sqrt(v)) / second) + f(1e-8)))
        decay = f(1 - f(f(rate) * f(0.01)))
        weight = f(f(weight * decay) - f(f(f(rate) / first) * change))
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


def test_rungs_are_one_change_apart():
    for before, after in zip(RUNGS, CHANGES):
        assert changes_of(after) - changes_of(before) == {after}
        assert snippet(after), "what a user writes is shown"
    assert changes_of("without_wide") == FINISHED - {"wide"}
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
        floor.data_sheet("NVIDIA H200")["tb_s"] == 4.8 and floor.data_sheet("NVIDIA H100 PCIe")["bf16"] == 756
    )
    assert floor.data_sheet("a CPU") == {}


def made_up(sizes=("small", "2.7B"), ms=None, device="NVIDIA H200", beside=30.0, **fields):
    """Times of every rung as a GPU might give them: ``ms`` by rung; Hugging Face's in ``beside``."""
    ms = ms or {
        rung: 100.0 * 0.8**index for index, rung in enumerate([rung for rung in RUNGS if rung != "fill"])
    }
    frames, curves = [], []
    ceilings = pd.DataFrame(
        {
            "ceiling": [f"matmul_{p}" for p in ("fp32", "tf32", "bf16", "fp8")] + ["copy"],
            "value": [50.0, 350, 700, 1200, 4.2],
        }
    )
    for size in sizes:
        config = configure("ladder", size=size, context_length=512, device="cuda", **fields)
        all_ms = ms | {
            "hugging_face": beside,
            "without_wide": 1.1 * ms["chunked"],
            "without_graph": 1.5 * ms["chunked"],
            "fill": 40.0,
        }
        rows = pd.DataFrame(
            [
                {
                    "rung": rung,
                    "status": "ok",
                    "reason": "",
                    "batch": 4 if rung != "fill" else 32,
                    "compile_s": 1.0,
                    "peak_mib": 2048.0,
                    "loss_off": 1e-5,
                    "gradient_off": 1e-3,
                    "gradient_worst": 2e-3,
                }
                for rung in all_ms
            ]
        )
        samples = pd.DataFrame(
            [
                {"rung": rung, "turn": 0, "step": step, "time_ms": time * (1 + step / 1e4)}
                for rung, time in all_ms.items()
                for step in range(6)
            ]
        )
        bursts = pd.DataFrame(
            [
                {
                    "rung": rung,
                    "turn": 0,
                    "steps": 6,
                    "wall_ms": time,
                    "sm_clock_mhz": 1900.0,
                    "power_w": 600.0,
                    "throttle": "",
                    "energy_j": 3.0,
                }
                for rung, time in all_ms.items()
            ]
        )
        own = rung_times(
            {"rungs": rows, "samples": samples, "bursts": bursts, "ceilings": ceilings}, config, device
        )
        frames.append(
            own.assign(
                size=size,
                context_length=512,
                vocab_size=config.vocab_size,
                study="ladder",
                run_id=config.run_id,
            )
        )
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
    return {"times": pd.concat(frames, ignore_index=True), "curves": pd.DataFrame(curves), "kernels": kernels}


def said(key, tables):
    given = {f"ladder.{name}": table for name, table in tables.items()}
    return answer(chapter.CHAPTER, next(one for one in chapter.CHAPTER.questions if one.key == key), given)


def test_the_ladder_follows_its_data():
    tables = made_up()
    found = facts.ladder(tables["times"])
    assert found["size"] == "2.7B" and found["best_name"] == "chunked cross-entropy", (
        "fp8 is another arithmetic"
    )
    assert found["faster"] == pytest.approx(0.8**-10, rel=1e-3)
    assert found["beside"]["over_best"] == pytest.approx(30 / (100 * 0.8**10), rel=1e-3)
    slower = made_up(ms={rung: 10.0 + index for index, rung in enumerate(RUNGS[:-1])})
    assert facts.ladder(slower["times"])["best_name"] == "fp32, eager"
    lacking = tables["times"].assign(
        status=tables["times"]["status"].where(tables["times"]["rung"] != "tf32", "oom")
    )
    assert [one["oom"] for one in facts.ladder(lacking)["missing"]] == [True]
    texts = {
        said("ladder", {**tables, "times": times}).text
        for times in (tables["times"], slower["times"], lacking)
    }
    assert len(texts) == 3 and all("{" not in text for text in texts)


def test_what_helps_nowhere_and_what_costs_is_told():
    ms = dict.fromkeys(RUNGS[:-1], 100.0) | {"tf32": 50.0, "bf16": 50.0, "sdpa": 60.0}
    found = facts.sizes(made_up(ms=ms)["times"])
    assert "TF32 products" not in found["useless"] and "bf16 autocast" in found["useless"]
    assert {one["rung"] for one in found["costly"]} >= {"sdpa", "fused"}
    assert "costs time" in said("ladder-sizes", made_up(ms=ms)).text
    assert "costs time" not in said("ladder-sizes", made_up()).text
    kinds = facts.advice(made_up(ms=ms)["times"])["kinds"]
    assert (
        kinds["products"]["most"]["gain"] == pytest.approx(2, rel=1e-3)
        and kinds["memory"]["most"]["gain"] < 1
    )


def test_a_gain_over_several_changes_is_none():
    """A run may leave rungs out: what it gains then is not one change's."""
    tables = made_up(sizes=("small",))["times"]
    few = made_up(sizes=("small",), ms={"fp32": 100.0, "wide": 20.0, "chunked": 10.0})["times"]
    assert list(few.loc[few["one_change"].eq(True), "rung"]) == ["chunked"]
    both = pd.concat([tables, few.assign(run_id="another")], ignore_index=True)
    gains = {one["rung"]: one["most"]["gain"] for one in facts.sizes(both)["rungs"]}
    assert gains["wide"] == pytest.approx(1.25, rel=1e-3) and gains["chunked"] == pytest.approx(
        1.625, rel=1e-3
    )


def test_goals_that_are_missed_are_said():
    reached, missed = (
        facts.goals(**{k: v for k, v in made_up(beside=1000.0).items() if k != "curves"}),
        facts.goals(**{k: v for k, v in made_up(beside=1.0).items() if k != "curves"}),
    )
    assert {one["goal"] for one in missed["missed"]} >= {"over_hugging_face", "slower"} and missed[
        "faster"
    ] == 0
    assert (
        not {one["goal"] for one in reached["missed"]} & {"over_hugging_face", "slower"}
        and reached["faster"] == 2
    )
    assert reached["left"]["whole_ms"] == 80 and printed.kernels(reached)["share"].tolist() == ["75%", "25%"]
    assert "Missed" in said("ladder-goals", made_up(beside=1.0)).text


def test_training_outside_the_band_is_told():
    tables = made_up()
    found = facts.training(tables["times"], tables["curves"])
    assert [one["name"] for one in found["out"]] == ["FP8 products"] and found["inside"] == 1
    assert found["out"][0]["beyond"] == pytest.approx(0.3)
    inside = tables["curves"].assign(
        loss=tables["curves"]["loss"].where(tables["curves"]["rung"] != "fp8", 4.0)
    )
    assert (
        said("ladder-training", tables).finding
        != said("ladder-training", {**tables, "curves": inside}).finding
    )
    without = said("ladder-training", {**tables, "curves": pd.DataFrame()})
    assert without.text and not without.finding


@pytest.mark.parametrize("key", [question.key for question in chapter.CHAPTER.questions])
def test_every_question_is_answered_from_a_gpus_data_and_from_none(key):
    full = said(key, made_up())
    assert full.text and full.tables and full.runs
    nothing = dict.fromkeys(("times", "curves", "kernels"), pd.DataFrame())
    assert "Not answered" in said(key, nothing).text
    left = ["rung", "kind", "batch", "size", "context_length", "vocab_size", "study", "run_id", "reason"]
    too_large = made_up()["times"][left].assign(status="oom")
    assert "Not answered" in said(key, {**nothing, "times": too_large}).text


def test_pictures_are_drawn_from_a_gpus_data_and_a_cpus(found):
    import matplotlib.pyplot as plt

    config, tables = found
    times = rung_times(tables, config, "a CPU").assign(
        size="nano", context_length=16, vocab_size=256, study="ladder", run_id="a"
    )
    mine = {"times": times, "curves": tables["curves"].assign(size="nano", context_length=16, vocab_size=256)}
    for given in (made_up(), mine):
        for picture in chapter.CHAPTER.pictures:
            figure = picture.draw(
                *[given[name.removeprefix("ladder.")] for name in picture.needs], where="here"
            )
            assert figure.axes
            plt.close(figure)
    assert chapter.CHAPTER.pictures[0].draw(made_up()["times"].assign(status="oom"), where="here") is None


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
