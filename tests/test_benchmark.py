"""The benchmarking study: a run's tables on a CPU, what does not fit, what cannot be captured, and its tables."""

import inspect
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from cells import edited, executed, run_cells
from conftest import TINY
from reports import beside, said, shuffled, told
from stepscope import PACKAGE, stats
from stepscope.config import PHASES, SIZES, WHOLE
from stepscope.measure import clocks
from stepscope.model.training_step import build_step
from stepscope.report.tables import markdown, number
from stepscope.runs.source import code_cells
from stepscope.studies.benchmark import claims, figures
from stepscope.studies.benchmark.config import Config
from stepscope.studies.benchmark.tables import CONFIG, PRINTED, SCHEMAS, warm_up

MODES = ("step", "forward_backward", "forward")
QUICK = TINY | {"warmup_steps": 1}


@pytest.fixture(scope="module")
def left():
    """The names that the notebook's cells leave, its tables checked against their schemas."""
    names = run_cells("benchmark", **QUICK | {"warmup_steps": 5, "timed_steps": 10})
    tables = names["results"].tables
    return names | {"checked": {name: SCHEMAS[name].validate(table) for name, table in tables.items()}}


@pytest.fixture(scope="module")
def run(left):
    return left["checked"], left["run"].outcome["results"], left["sentence"]


def test_a_run_has_every_phase_of_every_mode_by_both_clocks(run):
    times = run[0]["times"]
    assert list(times[["mode", "phase"]].itertuples(index=False, name=None)) == [
        (mode, phase) for mode in MODES for phase in [*PHASES[mode], WHOLE]
    ]
    assert (times["status"] == "ok").all() and (times["reason"] == "").all()
    assert (times[["wall_ms", "enqueue_ms", "gpu_ms", "operations"]] > 0).all(axis=None)


def test_the_wholes_operations_are_those_of_its_phases_and_of_its_names(run):
    times, operations = run[0]["times"], run[0]["operations"]
    phases = times[times["phase"] != WHOLE].groupby("mode")["operations"].sum()
    whole = times[times["phase"] == WHOLE].set_index("mode")
    assert (
        phases.to_dict()
        == whole["operations"].to_dict()
        == operations.groupby("mode")["count"].sum().to_dict()
    )
    forward = operations[operations["phase"] == "forward"].pivot(index="name", columns="mode", values="count")
    assert forward.notna().all(axis=None) and (forward["step"] == forward["forward_backward"]).all()
    assert "matrix multiply" in set(operations["family"])


def test_what_the_cells_show_and_say_follows_from_the_tables(left):
    samples = left["checked"]["samples"].query("phase == 'whole'")
    ms = left["checked"]["times"].query("mode == 'step'").set_index("phase")["wall_ms"]
    walls = samples.loc[samples["mode"] == "step", "wall_ms"].tolist()
    assert left["slowdown"] == number(walls[0] / np.median(walls), "x")
    assert "first step of this process" in left["message"]
    windows = [(skip, walls[skip : skip + 10]) for skip in (0, 1, 2, 5)]
    expected = [(skip, np.mean(window), np.std(window, ddof=1)) for skip, window in windows]
    assert left["rows"] == [pytest.approx(row) for row in expected]
    steps = left["results"].operations.query("mode == 'step'")
    assert left["longest"]["gpu_ms"].tolist() == steps["gpu_ms"].nlargest(10).tolist()
    timed = [rows["wall_ms"].tolist() for _, rows in samples[~samples["warmup"]].groupby("mode")]
    assert left["spread"] == pytest.approx(max(np.std(ms, ddof=1) / np.mean(ms) for ms in timed))
    ratio, share = number(ms["backward"] / ms["forward"], "x"), number(ms["optimizer"] / ms[WHOLE], "%")
    assert f"Backward took {ratio} as long as forward, and AdamW {share} of the step" in left["answer"]
    assert f"**{number(ms[WHOLE], 'ms')}**, {number(8 / ms[WHOLE] * 1e3, 'n')} tokens/s" in left["sentence"]


def test_moments_of_overlapping_kernels_count_once(left):
    spans_ns = {"start_ns": np.array([0, 2, 3, 9]) * 10**6, "end_ns": np.array([6, 4, 8, 10]) * 10**6}
    profiled = pd.DataFrame({"case": "step", "number": 0} | spans_ns)
    results = SimpleNamespace(profiled=profiled, operations=left["results"].operations)
    shown = []
    names = left | {"results": results, "display": lambda *_: None, "print": shown.append}
    executed("benchmark", "summed_ms =", names)
    assert shown == ["4 operations: 14.000 ms added up, 9.000 ms if each moment counts once"]


def test_reference_table_on_a_cpu_has_the_fp32_baseline_sorted_by_size():
    plain = {
        "mode": "step",
        "phase": WHOLE,
        "precision": "fp32",
        "context_length": 512,
        "repeat": 0,
        "compile": "none",
        "optimizer": "foreach",
        "batch_size": 4,
        "attention": "naive",
        "size": "xl",
    } | dict.fromkeys(["wall_ms", "gpu_ms", "busy", "replayed_ms"], 1.0)
    others = {
        "mode": "forward",
        "phase": "forward",
        "precision": "tf32",
        "context_length": 128,
        "repeat": 1,
        "compile": "model",
        "optimizer": "fused",
        "batch_size": 2,
        "attention": "sdpa",
    }
    wrong = [plain | {name: value, "size": "large"} for name, value in others.items()]
    rows = pd.DataFrame([*wrong, plain, plain | {"size": "small"}])
    found = executed(
        "benchmark",
        "gpu = load(quiet=True)",
        {
            "config": SimpleNamespace(device="cpu"),
            "PROJECT": "here",
            "run_folder": "",
            "SIZES": SIZES,
            "load": lambda quiet: {"benchmark.times": rows},
            "display": print,
            "brief": print,
        },
    )["gpu"]
    assert found["size"].tolist() == ["small", "xl"]


def test_results_on_a_cpu_have_no_data_sheet(run):
    results = run[1]
    assert results["sheet_tflops"] is None and results["matmul_tflops"] > 0 and results["parameters"] > 0
    assert "ms" in run[2] and "GPU" not in run[2] and "%" not in run[2]


def test_weights_that_do_not_fit_end_the_run():
    """A run that ends with this error has the status ``oom``."""

    def build(config):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        run_cells("benchmark", replaced={"TransformerLM": build}, **QUICK)


def test_nothing_that_fits_leaves_a_reason_in_the_sentence():
    def clock(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB.")

    names = run_cells("benchmark", replaced={"timed": clock, "display": lambda *_: None}, **QUICK)
    assert (names["times"]["status"] == "oom").all() and "samples" not in names["results"].tables
    assert "No mode could be measured: while timing step: CUDA out of memory." in names["sentence"]


def test_doubling_the_clock_in_the_notebook_doubles_the_recorded_step(tmp_path):
    """The phases have clocks of their own, so the step takes at least twice their sum."""
    clock = "wall_ms = (default_timer() - start) * 1e3"
    doubled = edited("benchmark", tmp_path, f"        {clock}", f"        {clock.replace('(', '2 * (', 1)}")
    times = run_cells(doubled, **QUICK)["results"].times
    for mode, rows in times.groupby("mode"):
        ms = rows.set_index("phase")["wall_min_ms"]
        assert ms[WHOLE] >= 2 * ms.drop(WHOLE).sum() > 0, mode


# The twins: the cells' step and clock, and the library's.


@pytest.mark.parametrize(
    "fields", [{}, {"precision": "bf16", "seed": 1}, {"precision": "fp16", "optimizer": "fused"}]
)
def test_the_cells_step_gives_the_weights_of_the_librarys(fields):
    names = run_cells("benchmark", until="def timed(", **QUICK | fields)
    assert torch.get_float32_matmul_precision() == "highest"
    theirs, differentiable, losses = build_step(Config(**QUICK | fields)), [], []
    before = [weight.clone() for weight in theirs.model.parameters()]
    names["model"].register_forward_hook(
        lambda model, given, logits: differentiable.append(logits.requires_grad)
    )
    for model in (names["model"], theirs.model):
        model.loss = lambda *given, loss=model.loss: losses.append(loss(*given)) or losses[-1]
    for _ in range(3):
        for mode in ("step", "forward_backward", "forward"):
            names["subject"].reset()
            assert all(weight.grad is None for weight in names["model"].parameters())
            names["step"](mode)
            theirs.clear_gradients()
            theirs.of(mode)()
    assert differentiable == [True, True, False] * 3
    assert {loss.dtype for loss in losses} == {torch.float32}
    weights = [*theirs.model.parameters()]
    assert all(map(torch.equal, names["model"].parameters(), weights))
    assert not any(map(torch.equal, before, weights))


class Ticking:
    """A host's clock that only a step moves, by a millisecond in each phase, and what is done between steps."""

    now_ms = 0.0

    def __call__(self):
        return self.now_ms / 1e3

    def step(self, *given):
        for at, name in enumerate(("forward", "loss")):
            with given[-1](name):
                self.now_ms += at + 1

    def rest(self):
        self.now_ms += 1000


def test_the_cells_clock_gives_the_rows_of_the_librarys(monkeypatch):
    names = run_cells("benchmark", until="measure.steps(", **QUICK)
    clock = Ticking()
    monkeypatch.setattr(clocks, "default_timer", clock)
    names |= {"default_timer": clock, "subject": SimpleNamespace(reset=clock.rest)}
    rows = names["timed"](clock.step, 1, 3, clock.rest)
    expected = clocks.time_steps(clock.step, 3, 1, "cpu", before=clock.rest, after=clock.rest)
    pd.testing.assert_frame_equal(rows, expected, check_exact=False)
    assert rows.loc[rows["phase"] == WHOLE, "wall_ms"].tolist() == pytest.approx([3] * 4)


def test_the_cells_clock_waits_for_the_device_before_it_is_read(monkeypatch):
    names, order = run_cells("benchmark", until="measure.steps(", **QUICK), []

    def noting(name):
        return lambda *given: (order.append(name), 0.0)[1]

    names |= {
        "default_timer": noting("clock"),
        "synchronize": noting("wait"),
        "subject": SimpleNamespace(reset=noting("reset")),
    }
    monkeypatch.setattr(names["measure"].Phases, "ms", lambda phases: [])
    names["timed"](noting("step"), 0, 1, noting("after"))
    assert order == ["reset", "wait", "clock", "step", "wait", "clock", "after"]


@pytest.mark.parametrize(
    ("busy", "enqueue_ms", "said"),
    [
        (0.4, 90.0, "40% of it: launch-bound"),
        (0.99, 99.5, "99.0% of it: GPU-bound"),
        (1.01, 50.0, "101% of it: GPU-bound"),
        (0.93, 60.0, "93% of it: GPU-bound"),
    ],
)
def test_a_sentence_says_what_binds_the_step_of_a_gpu(busy, enqueue_ms, said):
    row = {
        "phase": WHOLE,
        "wall_ms": 100.0,
        "gpu_ms": 100 * busy,
        "busy": busy,
        "enqueue_ms": enqueue_ms,
        "status": "ok",
        "operations": 5.0,
        "tokens_per_s": 5000.0,
        "reason": "",
    }
    last = code_cells(PACKAGE / "notebooks" / "benchmark.ipynb")[-1].source
    names = {
        "times": pd.DataFrame([row | {"mode": mode} for mode in MODES]),
        "cases": dict.fromkeys(MODES),
        "math": math,
        "number": number,
        "launch_bound": stats.launch_bound,
        "config": SimpleNamespace(device="cuda"),
        "run": SimpleNamespace(say=lambda sentence: None),
    }
    exec(last, names)
    assert said in names["sentence"]


# Warm-up


def cold_samples(walls, warmups=5, **config):
    return pd.DataFrame(
        {"mode": "step", "phase": WHOLE}
        | config
        | {
            "step": range(len(walls)),
            "warmup": [i < warmups for i in range(len(walls))],
            "wall_ms": walls,
            "enqueue_ms": 0.0,
        }
    )


def test_warm_up_is_answered_by_leaving_out_the_first_steps():
    walls = [1000.0, 30.0, 20.0, *[10.0] * 12]
    found = warm_up(cold_samples(walls)).set_index("warmups")
    assert found["mean_ms"].to_dict() == pytest.approx({0: 112, 1: 13, 2: 11, 5: 10})
    assert found["std_ms"][0] == pytest.approx(np.std(walls[:10], ddof=1)) and found["std_ms"][5] == 0
    assert found["first_ms"].to_dict() == {0: 1000, 1: 30, 2: 20, 5: 10}
    assert warm_up(cold_samples([7.0] * 12, 2))["warmups"].tolist() == [0, 1, 2], "as far as there are steps"
    assert warm_up(cold_samples([9.0, *[7.0] * 6], 3))["mean_ms"].tolist() == [7.5, 7, 7], (
        "of four timed steps"
    )


# Over all runs

GPU_MS = {"small": 10.0, "large": 100.0, "2.7B": 1000.0}  # of a full fp32 step at context 512
SHARES = {"forward": 0.3, "loss": 0.02, "backward": 0.55, "optimizer": 0.13}
LAUNCH_MS = {"small": 30.0, "large": 90.0, "2.7B": 80.0}


def mode_rows(size, context, scale=1.0, fused=1.0, wall=1.0, **config):
    """One run's times: kernels in proportion to the context, launches that do not depend on it."""
    found = {
        "size": size,
        "context_length": context,
        "batch_size": 4,
        "vocab_size": 10_000,
        "precision": "fp32",
        "attention": "naive",
        "compile": "none",
        "optimizer": "foreach",
        "repeat": 0,
    } | config
    step = GPU_MS[size] * context / 512 * scale
    for mode, names in PHASES.items():
        gpu = {phase: step * SHARES[phase] / (fused if phase == "optimizer" else 1) for phase in names}
        gpu[WHOLE] = sum(gpu.values())
        for phase, ms in gpu.items():
            parts = names if phase == WHOLE else [phase]
            enqueue_ms = LAUNCH_MS[size] * sum(SHARES[name] for name in parts) * wall
            wall_ms = max(ms, enqueue_ms)
            row = {
                "mode": mode,
                "phase": phase,
                "wall_ms": wall_ms,
                "wall_std_ms": wall_ms * (0.1 if ms < wall_ms else 0.001),
                "wall_q1_ms": wall_ms,
                "wall_q3_ms": wall_ms,
                "wall_min_ms": 0.9 * wall_ms,
                "steps": 30.0,
                "enqueue_ms": enqueue_ms,
                "gpu_ms": ms,
                "busy": ms / wall_ms,
                "operations": 1000.0,
                "status": "ok",
                "reason": "",
                "replay_reason": "",
            }
            if phase == WHOLE:
                row |= {
                    "replayed_ms": ms * 1.01,
                    "peak_gib": step,
                    "mfu": 0.5,
                    "mfu_measured": 0.7,
                    "tflops": 35.0,
                    "mfu_at_clock": 0.6,
                    "sm_clock_mhz": 1980.0,
                    "power_w": 600.0,
                    "step_j": 6.0,
                }
            yield found | dict.fromkeys(("replayed_ms", "peak_gib", "compile_s", "mfu"), math.nan) | row


def named(rows):
    """Of each phase two names: a matmul and another; compiled there are half as many of the other."""
    for row in rows:
        matmul = {"small": 0.6, "large": 0.7, "2.7B": 0.8}[row["size"]]
        if row["phase"] != WHOLE:
            kept = {name: row[name] for name in ("mode", "phase", "gpu_ms", *CONFIG)}
            half = 2 if row["compile"] != "none" else 1
            yield kept | {
                "name": "gemm",
                "family": "matrix multiply",
                "count": 100.0,
                "gpu_ms": row["gpu_ms"] * matmul,
            }
            yield kept | {
                "name": "add",
                "family": "elementwise",
                "count": 800.0 / half,
                "gpu_ms": row["gpu_ms"] * (1 - matmul) / half,
            }


def campaign():
    shapes = [(size, context) for size in GPU_MS for context in (128, 512)]
    eager = [row for shape in shapes for row in mode_rows(*shape)]
    low = [row for shape in shapes for row in mode_rows(*shape, scale=0.25, precision="bf16")]
    for row in low:  # mixed_precision has no repeats
        del row["repeat"]
    blocks = [
        row | {"compile_s": 12.0}
        for size in GPU_MS
        for row in mode_rows(size, 512, 0.2, wall=0.5, precision="bf16", compile="blocks")
    ]
    model = [
        row | {"compile_s": 40.0}
        for size, scale in zip(GPU_MS, (0.7, 0.75, 0.8))
        for row in mode_rows(size, 512, scale, compile="model")
    ]
    whole = [
        row | {"compile_s": 25.0}
        for row in mode_rows("small", 512, 0.2, wall=0.3, precision="bf16", compile="model")
    ]
    fused = [row for size in GPU_MS for row in mode_rows(size, 512, fused=3.0, optimizer="fused")]
    again = [
        row
        for repeat, off in ((1, 1.002), (2, 0.999))
        for row in mode_rows("small", 512, off, wall=1 + repeat / 4, repeat=repeat)
    ]
    tiny = list(mode_rows("small", 16, batch_size=1))
    own = [*eager, *blocks, *whole, *model, *fused, *again, *tiny]
    samples = [
        cold_samples(
            [row["wall_ms"] * (50 if i == 0 else 1.005 if i < 4 else 1) for i in range(15)],
            **{name: row[name] for name in ("mode", "phase", *CONFIG)},
        )
        for row in own
    ]
    operations = pd.DataFrame(named(row | {"repeat": 0} for row in low)).drop(columns="repeat")
    results = pd.DataFrame(
        [
            {
                "size": size,
                "batch_size": 4,
                "vocab_size": 10_000,
                "parameters": 1e9,
                "precision": precision,
                "matmul_tflops": rate,
                "copy_tb_s": 4.0,
            }
            for size in GPU_MS
            for precision, rate in (("fp32", 50.0), ("bf16", 700.0))
        ]
    )
    return {
        "benchmark.times": pd.DataFrame(own),
        "benchmark.results": results,
        "benchmark.samples": pd.concat(samples, ignore_index=True),
        "benchmark.operations": pd.DataFrame(named(own)),
        "mixed_precision.times": pd.DataFrame(low),
        "mixed_precision.operations": operations,
    }


@pytest.fixture(scope="module")
def all_runs():
    return campaign()


def functions(module):
    return {
        name: found
        for name, found in vars(module).items()
        if inspect.isfunction(found) and found.__module__ == module.__name__ and not name.startswith("_")
    }


DRAWN = [*PRINTED.values(), *functions(figures).values()]


# Said where another claim is not, or of what these rows have not: unlike processes, matmuls beside the rest.
ELSE = {"warmup_few", "warmup_cpu", "processes_least", "compiled_limit", "repeats_paced"}


@pytest.mark.parametrize("say", [*functions(claims).values(), *DRAWN])
def test_all_is_said_where_there_are_data_and_nothing_of_an_empty_folder(say, all_runs):
    assert (say(all_runs) is None) == (say.__name__ in ELSE)
    with pytest.raises(LookupError):
        say({})


def test_the_numbers_of_claims_are_those_of_the_tables(all_runs):
    bound = claims.launch_bound_forward(all_runs)
    assert (bound["size"], bound["context"], bound["operations"]) == ("small", 128, 1000)
    assert bound["gpu"] == pytest.approx(10 * 0.25 * 0.25 * 0.3) and bound["wall"] == pytest.approx(0.9 * 9)
    assert bound["idle"] == pytest.approx(1 - bound["gpu"] / bound["wall"]) and bound[
        "launch"
    ] == pytest.approx(0.9 * 9)
    assert claims.phases_fp32(all_runs) == pytest.approx(
        {"size": "2.7B", "context": 512, "forward": 0.3, "backward": 0.55, "optimizer": 0.13}
    )
    assert claims.fused_adamw(all_runs) == {"size": "2.7B", "gain": pytest.approx(3.0, rel=0.01)}
    assert (
        claims.compile_kernels(all_runs)["before"] == 2400
        and claims.compile_kernels(all_runs)["after"] == 1200
    )
    assert claims.repeats(all_runs) == pytest.approx(
        {"processes": 3, "shapes": 1, "gpu": 1.002 / 0.999 - 1, "wall": 0.5}
    )
    assert claims.launch_bound_where(all_runs) == {
        "short": 3,
        "long": 2,
        "sizes": 3,
        "short_context": 128,
        "long_context": 512,
    }
    assert claims.launch_rate(all_runs) == pytest.approx({"low": 30.0, "high": 30.0, "steps": 10})
    std = claims.answer_std(all_runs)
    assert (std["median"], std["worst"], std["cases"]) == (0.1, 0.1, 3 * 2 * 3 + 2 * 3)
    assert claims.std_where(all_runs) == {"launch": 15, "varies": 15}
    assert claims.processes_differ(all_runs) == {
        "size": "small",
        "context": 512,
        "low": 30,
        "high": 45,
        "processes": 3,
    }
    assert claims.answer_models(all_runs) == {
        "batch": 4,
        "vocabulary": 10_000,
        "warmups": 5,
        "more": 5,
        "timed": 10,
    }
    times = claims.answer_times(all_runs)
    assert times["forward"] + times["backward"] < times["both"] < times["step"] == pytest.approx(1000)
    assert claims.answer_warmup(all_runs)["first"] == pytest.approx(30 * 50)
    assert claims.warmup_where(all_runs)["share"] == pytest.approx(0.3)
    assert claims.warmup_enough(all_runs) == {
        "processes": "all 5 processes",
        "context": 512,
        "most": pytest.approx(0.005),
    }
    assert claims.compiled_wall(all_runs)["forward_high"] == pytest.approx(1.25)


def test_wall_times_that_the_gpu_sets_the_pace_of_are_told_apart_from_those_that_launches_do(all_runs):
    times = all_runs["benchmark.times"]
    own = (
        times["size"].eq("2.7B")
        & times["context_length"].eq(512)
        & times["compile"].eq("none")
        & times["optimizer"].eq("foreach")
    )
    again = times[own].assign(repeat=1)
    again["wall_ms"] *= 1.003
    found = claims.repeats_paced(all_runs | {"benchmark.times": pd.concat([times, again])})
    assert found == {"shapes": 1, "wall": pytest.approx(0.003)}
    again["wall_ms"] *= 1.4
    assert claims.repeats_paced(all_runs | {"benchmark.times": pd.concat([times, again])}) is None


def test_the_step_that_varies_most_is_named_with_its_process(all_runs):
    times = all_runs["benchmark.times"]
    odd = times["repeat"].eq(2) & times["mode"].eq("step") & times["phase"].eq(WHOLE)
    varied = times.assign(wall_std_ms=times["wall_std_ms"].mask(odd, times["wall_ms"]))
    found = claims.answer_std(all_runs | {"benchmark.times": varied})
    assert [found[name] for name in ("process", "size", "context", "mode", "worst")] == [
        3,
        "small",
        512,
        "full step",
        1.0,
    ]


def test_compiling_is_told_of_the_largest_size_that_was_compiled_both_ways(all_runs):
    times = all_runs["benchmark.times"]
    own = times["size"].eq("2.7B") & times["compile"].eq("blocks")
    found = claims.compile_cost(
        all_runs | {"benchmark.times": times.assign(compile_s=times["compile_s"].mask(own, 13.0))}
    )
    assert [found[name] for name in ("size", "low", "high", "own", "model")] == [
        "2.7B",
        12.0,
        13.0,
        13.0,
        40.0,
    ]


def test_the_model_compiled_whole_is_told_in_the_precision_of_most_sizes_and_beside_its_blocks_in_their_own(
    all_runs,
):
    assert (
        claims.answer_compiled(all_runs)["precision"] == "fp32"
        and claims.compile_cost(all_runs)["model_precision"] == "fp32"
    )
    assert len(PRINTED["compiled_model"](all_runs)) == len(GPU_MS) * len(PHASES)
    cost = PRINTED["compile_cost"](all_runs)
    assert [*cost.index][len(GPU_MS) :] == [
        *(("model", "fp32", size) for size in GPU_MS),
        ("model", "bf16", "small"),
    ]
    assert cost.loc[("model", "bf16", "small"), "compiling, s"] == 25
    found = claims.blocks_or_model(all_runs)
    assert found.pop("blocks") == pytest.approx(0.9 * 15) and found.pop("model") == pytest.approx(0.9 * 9)
    assert found == {"size": "small", "blocks_s": 12.0, "model_s": 25.0}


def test_runs_of_other_programs_and_of_another_order_change_nothing(all_runs):
    """But a large matmul's rate is the fastest of all runs, of any program; and what was compiled in fp16 cost that, too."""
    changed, times = {}, all_runs["benchmark.times"]
    runs = all_runs | {
        "benchmark.times": times.assign(wall_std_ms=times["wall_std_ms"] * (1 + times.index / 1e4))
    }  # none as another
    for name in runs.keys() - {"benchmark.results"}:
        first = "context_length == 512" + " and repeat == 0" * name.startswith("benchmark")
        changed |= shuffled(
            beside(
                {name: runs[name]}, first, batch_size=2, vocab_size=50_000, attention="sdpa", precision="fp16"
            )
        )
    costs = [PRINTED["compile_cost"](found) for found in (runs, runs | changed)]
    assert costs[0].equals(costs[1].drop("fp16", level="precision")) and len(costs[1]) > len(costs[0])
    says = [
        *functions(claims).values(),
        *(printed for name, printed in PRINTED.items() if name != "compile_cost"),
    ]
    assert told(says, runs | changed) == told(says, runs)


def test_each_cell_is_what_its_heading_names(all_runs):
    """Of rows in which no two measures are the same."""
    changed, off = {}, np.random.default_rng(0)
    for name in ("benchmark.times", "mixed_precision.times"):
        rows = all_runs[name]
        measures = [column for column in rows.select_dtypes("float") if column not in CONFIG]
        rows = rows.assign(
            **{column: rows[column] * off.uniform(0.99, 1.01, len(rows)) for column in measures}
        )
        changed[name] = rows.assign(
            **{
                f"wall_{which}_ms": part * rows["wall_ms"]
                for which, part in (("q1", 0.97), ("q3", 1.05), ("min", 0.9))
            }
        )
    runs = all_runs | changed
    at = {
        name: rows.query(
            "mode == 'step' and phase == 'whole' and context_length == 512 and batch_size == 4 and optimizer == 'foreach'"
        )
        for name, rows in changed.items()
    }
    own, low = at["benchmark.times"].query("repeat == 0"), at["mixed_precision.times"].set_index("size")
    plain, blocks = (own[own["compile"] == parts].set_index("size") for parts in ("none", "blocks"))
    found, cost, rates = (PRINTED[name](runs) for name in ("launch_bound", "compile_cost", "mfu_steps"))
    waits = stats.launch_bound_rows(low)
    assert waits.any() and not waits.all() and found["launch-bound"].tolist() == waits.tolist()
    for heading, values in {
        "operations, n": low["operations"],
        "wall, ms": low["wall_ms"],
        "at best, ms": low["wall_min_ms"].where(waits),
        "enqueued, ms": low["enqueue_ms"],
        "GPU time, ms": low["gpu_ms"],
        "busy, %": low["busy"],
        "replayed, ms": low["replayed_ms"],
    }.items():
        assert found[heading].tolist() == pytest.approx(values.tolist(), nan_ok=True), heading
    made = cost.loc[("blocks", "bf16")]
    for heading, which in {"before, ms": low, "after, ms": blocks}.items():
        assert made[heading].tolist() == which["wall_ms"].tolist()
        assert made[f"quartiles {heading}"].tolist() == [
            f"{number(q1, 'ms').removesuffix(' ms')} to {number(q3, 'ms').removesuffix(' ms')}"
            for q1, q3 in which[["wall_q1_ms", "wall_q3_ms"]].values
        ]
    assert made["compiling, s"].tolist() == blocks["compile_s"].tolist()
    for precision, rows in (("fp32", plain), ("bf16", low)):
        for heading, column in {
            "of the data sheet, %": "mfu",
            "SM clock, MHz": "sm_clock_mhz",
            "power, W": "power_w",
            "energy, J": "step_j",
        }.items():
            assert rates.loc[precision, heading].tolist() == rows[column].tolist(), heading
        assert rates.loc[precision, "of a large matmul, %"].tolist() == pytest.approx(
            (rows["tflops"] / {"fp32": 50, "bf16": 700}[precision]).tolist()
        )
    grown = PRINTED["optimizers"](runs)
    adamw = changed["benchmark.times"].query(
        "phase == 'optimizer' and context_length == 512 and compile == 'none' and repeat == 0 and batch_size == 4"
    )
    for name in ("foreach", "fused"):
        assert grown[f"{name}, ms"].tolist() == adamw.loc[adamw["optimizer"] == name, "gpu_ms"].tolist()


def test_where_one_process_waited_for_launches_a_difference_has_to_be_large(all_runs):
    times = all_runs["benchmark.times"].copy()
    own = (
        (times["size"] == "small")
        & (times["context_length"] == 512)
        & (times["mode"] == "step")
        & (times["phase"] == WHOLE)
    )
    times.loc[own & (times["repeat"] > 0), "enqueue_ms"] = 0.0
    times.loc[own & (times["repeat"] > 0), "wall_ms"] = 34.0
    assert claims.processes_differ(all_runs | {"benchmark.times": times}) is None
    times.loc[own, "enqueue_ms"] = 0.0
    assert claims.processes_differ(all_runs | {"benchmark.times": times})["high"] == 34


def test_a_second_step_that_is_slower_is_told_by_process(all_runs):
    samples = all_runs["benchmark.samples"].copy()
    second = (samples["size"] == "small") & (samples["repeat"] == 2) & (samples["step"] == 1)
    samples.loc[second & (samples["phase"] == "forward"), "wall_ms"] += 12
    samples.loc[second & (samples["phase"] == WHOLE), "wall_ms"] += 15
    changed = all_runs | {"benchmark.samples": samples}
    few = claims.warmup_few(changed)
    assert (few["second"], few["third"], few["processes"], few["size"]) == (1, 0, 5, "small")
    assert (sentences := said("warmup_few", few)) and all(
        number(few["second_ms"], "ms") in one for one in sentences
    )
    assert claims.warmup_enough(changed) is None and claims.warmup_cpu(changed) is None, (
        "it is enqueued as later ones are"
    )
    samples.loc[second & (samples["phase"] == "forward"), "enqueue_ms"] += 12
    cpu = claims.warmup_cpu(changed)
    assert cpu["over"] == pytest.approx(45 * 0.005 + 15) and cpu["forward"] == pytest.approx(
        13.5 * 0.005 + 12
    )
    assert cpu["enqueue"] == pytest.approx(cpu["later_enqueue"] + 12)
    samples.loc[second & (samples["phase"] == "forward"), "wall_ms"] -= 8
    assert claims.warmup_cpu(changed) is None, "most of it is elsewhere"
    samples.loc[second & (samples["phase"] == WHOLE), "wall_ms"] -= (
        10  # a launch-bound step is late by itself
    )
    assert claims.warmup_few(changed) is None and claims.warmup_enough(changed)
    for mode in ("forward", "forward_backward"):  # whatever other modes do
        changed = with_times(changed, {"enqueue_ms": 0.0, "busy": 0.99}, mode=mode)
    changed["benchmark.times"] = changed["benchmark.times"].sort_values("mode", kind="stable")
    assert claims.warmup_few(changed) is None and claims.warmup_enough(changed)


def test_a_step_with_more_gpu_time_than_wall_time_is_in_no_number(all_runs):
    busy = PRINTED["busy"](with_times(all_runs, {"busy": 1.021}, size="large", phase=WHOLE))
    assert (
        ("fp32", "large") not in busy.index
        and ("bf16", "large") in busy.index
        and "over 100%" not in busy.attrs["note"]
    )
    over = PRINTED["busy"](with_times(all_runs, {"busy": 1.012}, size="large", phase=WHOLE))
    assert (
        over.loc[("fp32", "large")].max() == 1.012
        and "101%" in markdown(over)
        and "over 100%" in over.attrs["note"]
    )
    drawn = figures.busy(
        all_runs | {"mixed_precision.times": all_runs["mixed_precision.times"].assign(busy=1.012)}
    )
    assert max(line.get_ydata().max() for line in drawn.axes[0].lines) == 1.012


def with_times(all_runs, change, **which):
    times = all_runs["benchmark.times"].copy()
    rows = np.logical_and.reduce([times[name] == value for name, value in which.items()])
    if "wall_ms" in change:
        change = {"wall_min_ms": change["wall_ms"]} | change
    times.loc[rows, list(change)] = list(change.values())
    return all_runs | {"benchmark.times": times}


def test_a_claim_that_does_not_hold_is_not_said(all_runs):
    for claim, change, which in [
        ("fused_adamw", {"gpu_ms": 1e6}, {"optimizer": "fused", "phase": "optimizer"}),
        ("backward_ratio", {"gpu_ms": 1e6}, {"phase": "backward", "compile": "none"}),
        ("compile_memory", {"peak_gib": 1e6}, {"compile": "blocks"}),
        ("compile_gain", {"gpu_ms": 1e6}, {"compile": "blocks", "size": "small"}),
        ("repeats", {"gpu_ms": 20.0}, {"repeat": 2}),
        ("repeats", {"wall_ms": 61.0}, {"size": "small"}),
        ("matmul_rate", {"tflops": 15.0}, {"phase": WHOLE}),
        ("compiled_slower", {"enqueue_ms": 1.0}, {"compile": "model"}),
        ("std_where", {"wall_std_ms": 0.0}, {"phase": WHOLE}),
        ("std_where", {"enqueue_ms": 0.0}, {"phase": WHOLE}),
        (
            "fused_adamw",
            {"gpu_ms": 130.0},
            {"size": "2.7B", "context_length": 512, "optimizer": "fused", "phase": "optimizer"},
        ),
        ("backward_ratio", {"gpu_ms": 1.0}, {"phase": "backward", "size": "large"}),
        ("compile_memory", {"peak_gib": 250.0}, {"compile": "blocks", "size": "2.7B"}),
        ("compile_gain", {"gpu_ms": 2.5}, {"compile": "blocks", "size": "small"}),
        ("compile_cost", {"compile_s": 19.0}, {"compile": "blocks", "size": "small"}),
        ("compile_cost", {"compile_s": 11.0}, {"compile": "model"}),
        ("compile_then", {"gpu_ms": 9.0}, {"compile": "blocks", "phase": "optimizer", "size": "2.7B"}),
        ("compile_then", {"enqueue_ms": 900.0, "busy": 0.2}, {"compile": "blocks", "size": "2.7B"}),
        ("compiled_trend", {"gpu_ms": 1.0}, {"compile": "model", "size": "2.7B", "mode": "forward"}),
        ("compiled_slower", {"gpu_ms": 3.0}, {"compile": "model", "size": "small", "mode": "forward"}),
        ("compiled_slower", {"wall_ms": 1.0}, {"compile": "model", "mode": "forward"}),
        ("blocks_or_model", {"wall_ms": 13.0}, {"compile": "model", "precision": "bf16"}),
        ("blocks_or_model", {"enqueue_ms": 1.0}, {"compile": "blocks"}),
        ("processes_differ", {"wall_ms": 30.0}, {"size": "small", "mode": "step"}),
    ]:
        changed = with_times(all_runs, change, **which)
        assert getattr(claims, claim)(all_runs) is not None and getattr(claims, claim)(changed) is None, (
            claim,
            change,
        )
    nowhere = all_runs | {"mixed_precision.times": all_runs["mixed_precision.times"].assign(busy=0.99)}
    assert not any(
        say(nowhere) for say in (claims.launch_bound_forward, claims.launch_bound_where, claims.replay_alone)
    )
    for size, factor in (
        ("2.7B", 0.1),
        ("large", 0.1),
        ("small", 9.0),
    ):  # of the matmuls; the largest's is the least, then not the least
        rows = all_runs["benchmark.operations"]
        own = (rows["size"] == size) & (rows["family"] == "matrix multiply")
        changed = all_runs | {
            "benchmark.operations": rows.assign(gpu_ms=rows["gpu_ms"].where(~own, factor * rows["gpu_ms"]))
        }
        assert (claims.matmul_share(changed) is None) == (size != "large"), size
    for replayed_ms, holds in ((22.0, True), (23.0, False)):  # of launch-bound steps of 27 ms at best
        low = all_runs["mixed_precision.times"].assign(replayed_ms=replayed_ms)
        assert (claims.replay_alone(all_runs | {"mixed_precision.times": low}) is not None) == holds


def test_what_compiled_blocks_fuse_is_told_where_it_is_less(all_runs):
    rows = all_runs["benchmark.operations"]
    blocks = (rows["compile"] == "blocks") & (rows["family"] != "matrix multiply")
    for column, factor in (("count", 2.0), ("gpu_ms", 2.5)):
        more = all_runs | {
            "benchmark.operations": rows.assign(
                **{column: rows[column].where(~blocks, factor * rows[column])}
            )
        }
        assert claims.compile_kernels(more) is None, column


def test_where_the_first_steps_of_a_process_lose_their_time(all_runs):
    samples = all_runs["benchmark.samples"]
    first = (
        (samples["size"] == "small")
        & (samples["step"] == 0)
        & (samples["mode"] == "step")
        & (samples["repeat"] == 0)
    )
    for phase, wall_ms in (
        ("forward", 1501.0),
        ("forward", 1.0),
        (WHOLE, 31.0),
    ):  # over the step's, less than later, the step little longer
        changed = samples.assign(
            wall_ms=samples["wall_ms"].mask(first & (samples["phase"] == phase), wall_ms)
        )
        assert claims.warmup_where(all_runs | {"benchmark.samples": changed}) is None, (phase, wall_ms)


def test_the_most_that_compiling_could_give_is_what_is_no_matmul(all_runs):
    """The matmuls of the largest size are 0.8 of its step."""
    for gpu_ms, holds in ((900.0, True), (1010.0, False), (700.0, False)):
        found = claims.compiled_limit(
            with_times(all_runs, {"gpu_ms": gpu_ms}, compile="model", size="2.7B", phase=WHOLE, mode="step")
        )
        assert found == (
            pytest.approx({"size": "2.7B", "share": 0.8, "limit": 1.25, "gain": 1000 / gpu_ms})
            if holds
            else None
        )


def test_of_shapes_that_wait_in_each_process_medians_and_fastest_steps_are_told(all_runs):
    times = all_runs["benchmark.times"]
    own = times["compile"].eq("none") & times["optimizer"].eq("foreach") & times["context_length"].eq(128)
    first = times[times["repeat"].eq(0)].assign(busy=0.5, enqueue_ms=lambda rows: rows["wall_ms"])
    again = first[own.reindex(first.index)].assign(repeat=1)
    again[["wall_ms", "wall_min_ms"]] *= [1.3, 1.1]
    again.loc[again["size"] == "large", ["wall_ms", "wall_min_ms"]] *= [1, 1.2]
    again.loc[again["size"] == "2.7B", "busy"] = 0.99
    again.loc[again["size"] == "2.7B", ["wall_ms", "wall_min_ms"]] *= 3
    changed = all_runs | {"benchmark.times": pd.concat([first, again])}
    found = claims.processes_least(changed)
    assert (found["shapes"], found["median"], found["fastest"]) == (
        2,
        pytest.approx(1.3),
        pytest.approx(1.32),
    )


def test_tables_have_sizes_in_order_and_what_was_measured(all_runs):
    means = PRINTED["handout_times"](all_runs)
    assert list(means.index) == [(size, context) for size in GPU_MS for context in (128, 512)]
    assert means.loc[("2.7B", 512), "backward, ms"].startswith("550 ± ")
    starts = PRINTED["first_steps"](all_runs)
    assert list(starts.index) == [("small", 1), ("small", 2), ("small", 3), ("large", 1), ("2.7B", 1)]
    assert starts.loc[("large", 1), "first step, ms"] == pytest.approx(50 * 100)
    warm = PRINTED["warmup"](all_runs)
    cold, ten = 30 * (50 + 3 * 1.005 + 6) / 10, 30
    for warmups, mean in ((0, cold), (5, ten)):
        assert warm.loc["small", f"after {warmups}, ms"].startswith(
            f"{number(mean, 'ms').removesuffix(' ms')} ± "
        )
    cost = PRINTED["compile_cost"](all_runs).loc[("blocks", "bf16", "small")]
    assert cost["break-even (steps), n"] == pytest.approx(12_000 / (0.9 * 15))
    slower = with_times(
        all_runs, {"wall_ms": 1e3, "wall_min_ms": 1e3}, compile="blocks", size="small", mode="step"
    )
    never = PRINTED["compile_cost"](slower).loc[("blocks", "bf16", "small")]
    assert np.isnan(never["break-even (steps), n"]) and never["after, ms"] == 1e3
    model = PRINTED["compiled_model"](all_runs)
    assert list(model.loc[("2.7B", "full step"), ["GPU time, ms", "GPU time compiled, ms"]]) == [1000, 800]
    assert model.loc[("2.7B", "forward"), "wall gain, x"] == pytest.approx(1.25)
    for name, printed in PRINTED.items():
        assert markdown(printed(all_runs)).count("\n") > len(printed(all_runs)), name


def test_modes_that_did_not_fit_are_in_no_number(all_runs):
    times = all_runs["benchmark.times"].copy()
    gone = (times["size"] == "2.7B") & (times["compile"] == "none") & (times["mode"] == "step")
    measures = times.select_dtypes("number").columns.difference(CONFIG)
    times.loc[gone, measures] = np.nan
    times.loc[gone, "status"] = "oom"
    samples = all_runs["benchmark.samples"]
    ran = ~((samples["size"] == "2.7B") & (samples["compile"] == "none") & (samples["mode"] == "step"))
    runs = all_runs | {
        "benchmark.times": times[~gone | (times["phase"] == WHOLE)],
        "benchmark.samples": samples[ran],
    }
    assert claims.answer_times(runs)["size"] == claims.phases_fp32(runs)["size"] == "large"
    assert all(say(runs) is not None for say in DRAWN)


def test_the_assignments_means_are_of_the_first_ten_steps_however_many_there_are(all_runs):
    samples = all_runs["benchmark.samples"]
    later = samples[samples["step"] == 14]
    more = pd.concat(
        [samples, *(later.assign(step=14 + n, wall_ms=1e6) for n in range(1, 21))], ignore_index=True
    )
    longer = all_runs | {"benchmark.samples": more}
    for name in ("handout_times", "warmup"):
        pd.testing.assert_frame_equal(PRINTED[name](longer), PRINTED[name](all_runs))
    assert claims.answer_times(longer) == claims.answer_times(all_runs)
    both = samples["mode"].eq("forward_backward")
    for wall_ms, noted in ((1e6, True), (1e-6, False)):
        odd = all_runs | {"benchmark.samples": samples.assign(wall_ms=samples["wall_ms"].mask(both, wall_ms))}
        assert ("do not subtract" in PRINTED["handout_times"](odd).attrs["note"]) == noted
