"""Reports of other machines than the reference's: a CPU's own, a tour's, and one beside the reference."""

import math
import re
from itertools import combinations
from pathlib import Path

import pandas as pd
import pytest

import reports
from stepscope.model.accounting import GIB, peak
from stepscope.report import claims_across, tables_across
from stepscope.report.claims import collect
from stepscope.report.left_out import TOPICS, not_measured
from stepscope.report.load import load
from stepscope.report.render import CHAPTERS, WITHOUT_GPU, Rendered, render
from stepscope.report.shipped import shipped
from stepscope.report.tables import all_of, listed, some_of
from stepscope.report.tables_across import key_numbers, with_reference
from stepscope.studies.ladder.config import RUNGS
from stepscope.studies.ladder.rows import gain, largest_ladder
from stepscope.studies.memory.tables import predicted

CPU = Path(__file__).parent / "data" / "cpu"  # runs of `stepscope sweep cpu`, without their notebooks


def _rendered(runs: Path, out: Path) -> tuple[Rendered, str]:
    return render(runs, out), (out / "writeup.md").read_text()


def _prose(text: str) -> str:
    return re.sub(r"^```.*?^```$|^\|.*$", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    return *_rendered(CPU, out := tmp_path_factory.mktemp("cpu")), out


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tour")
    runs = reports.tour(folder / "runs")
    return *_rendered(runs, folder / "out"), folder / "out", runs


def test_a_cpu_has_chapters_of_its_own_and_nothing_of_a_gpus(cpu):
    rendered, text, out = cpu
    assert not rendered.errors
    titles = [path.read_text().partition("\n")[0] for path in sorted(WITHOUT_GPU.glob("*.md"))]
    assert [line for line in text.splitlines() if line.startswith(("# ", "## "))] == titles
    assert {path.name for path in out.glob("evidence/*")} == {"runs.md"} and not (
        out / "answers-2026.md"
    ).exists()
    assert "GPU time" not in text and not re.search(r"\b0\.\d+x", text), "a step that is slower is no gain"
    assert {"reference", "predicted_timeline", "norms"} == {path.stem for path in out.glob("figures/*")}


def test_of_a_whole_cpu_sweep_all_is_said_that_a_cpu_can_know(cpu):
    """What is missing does not hold here, or is of a precision that this processor's PyTorch lacks."""
    assert {one.name for one in cpu[0].omitted} <= {"health", "warmup_few", "warmup_enough", "norm_other"}
    assert all(line.count("stepscope sweep") <= 1 and "reference" not in line for line in cpu[0].left_out)


def test_what_a_gpu_would_hold_is_computed_and_what_a_block_saves_counted(cpu):
    said, config = claims_across.predicted_peak({}), predicted()
    assert said["peak"] == peak(config).allocated / GIB and config.device == "cuda"
    assert f"{said['peak']:.1f} GiB" in cpu[1]
    tables = load(CPU)
    counted = claims_across.block_saves_formula(tables)
    assert counted["tensors"] == 20
    rows = tables["memory.allocations"]
    more = tables | {"memory.allocations": rows.assign(mib=rows["mib"] + 1 / 2**20)}
    assert claims_across.block_saves_formula(more) is None, "a byte more a tensor"


def test_every_number_of_a_cpus_chapters_follows_from_its_records():
    """Each field of each claim, by another way: the configurations are of sizes tiny, nano and one without a name."""
    tables = load(CPU)
    samples = tables["benchmark.samples"].sort_values("step")
    walls = {case: own["wall_ms"].to_numpy() for case, own in samples.groupby(["mode", "phase"])}
    ten = {
        case: own.query("not warmup")["wall_ms"].to_numpy()[:10]
        for case, own in samples.groupby(["mode", "phase"])
    }
    step, later = (
        walls["step", "whole"],
        samples.query("mode == 'step' and phase == 'whole' and not warmup")["wall_ms"].median(),
    )
    times = tables["benchmark.times"].query("mode == 'step'").set_index("phase")["wall_ms"]
    passes = tables["attention.passes"].query("sequence == 128").set_index("implementation")
    numbers = tables["mixed_precision.numerics"].set_index(["experiment", "case", "quantity", "at"])["value"]
    sums = numbers["sums"].xs("result", level="quantity").droplevel("at")
    forward, block = (
        tables["nsys.operations"].query("mode == 'forward'"),
        tables["memory.allocations"].assign(all=lambda rows: rows["mib"] * rows["count"]),
    )
    parts, blocks = (
        forward.groupby(["region", "family"])["total_ns"].sum(),
        block.groupby("what")["all"].sum(),
    )
    families = forward["family"].mask(forward["region"] == "attention.softmax", "attention softmax")
    rest = (
        forward.groupby(families)["total_ns"].sum().sort_values(ascending=False) / forward["total_ns"].sum()
    )
    checks, ladder = tables["attention.checks"], tables["ladder.results"].iloc[0]
    losses = (
        tables["ladder.curves"]
        .pivot(index="step", columns=["optimization", "seed"], values="loss")
        .rolling(10, min_periods=5)
        .mean()
    )
    seeds = min(
        (losses["fp32", a] - losses["fp32", b]).abs().mean() for a, b in combinations(losses["fp32"], 2)
    )
    apart = max((losses[rung, 0] - losses["fp32", 0]).abs().mean() for rung in RUNGS[1:] if rung in losses)
    parameters, gradients = 4 * 128**2 + 3 * 128 * 512 + 2 * 128, blocks["gradients of a block"]
    assert (tables["benchmark.results"]["parameters"] == 4 * parameters + 2 * 1000 * 128 + 128).all()
    matmuls = parts["attention.scores", "matrix multiply"] + parts["attention.value", "matrix multiply"]
    expected = {
        "cpu_step": {
            "size": "tiny",
            "parameters": 1305728,
            "context": 128,
            "batch": 4,
            "vocabulary": 1000,
            "precision": "fp32",
            "attention": "naive",
            "compiled": "none",
            "optimizer": "foreach",
            "wall": times["whole"],
            "cpu": "AMD EPYC",
        },
        "cpu_phases": {
            phase: times[phase] / times["whole"] for phase in ("forward", "backward", "optimizer")
        },
        "answer_times": {
            "size": "tiny",
            "context": 128,
            "forward": ten["forward", "whole"].mean(),
            "backward": ten["forward_backward", "backward"].mean(),
            "both": ten["forward_backward", "whole"].mean(),
            "step": ten["step", "whole"].mean(),
            "warmups": 5,
            "timed": 10,
        },
        "answer_warmup": {
            "size": "tiny",
            "context": 128,
            "first": step[0],
            "cold": step[:10].mean(),
            "cold_std": step[:10].std(ddof=1),
            "warm": step[5:15].mean(),
            "warm_std": step[5:15].std(ddof=1),
        },
        "warmup_few": None,
        "warmup_enough": {"processes": "the one process", "context": 128, "most": abs(step[1] / later - 1)},
        "softmax_flops": {
            "size": "tiny",
            "context": 128,
            "matmul_flops": 2 * 4 * 128 * 128 * 128 * 4,
            "softmax_flops": 5 * 4 * 4 * 128 * 128 * 4,
            "times": parts["attention.softmax"].sum() / matmuls,
            "flops": 5 / (4 * 32),
        },
        "softmax_passes": {
            "batch": 4,
            "heads": 4,
            "context": 128,
            "matrix": "1.0 MB",
            "layers": 4,
            "together": "0.03 GB",
        },
        "first_kernel_is_a_matmul": {"profiles": "the one profile"},
        "nontrivial_kernels": {
            "size": "tiny",
            "families": listed(
                [
                    f"{name} ({100 * share:.2g}%)"
                    for name, share in rest.items()
                    if share >= 0.05 and name != "matrix multiply"
                ]
            ),
        },
        "answer_sums": {
            name: f"{sums[case]:.4f}".rstrip("0").rstrip(".")
            for name, case in {
                "fp32": "fp32 into fp32",
                "fp16": "fp16 into fp16",
                "bf16": "bf16 into bf16",
                "mixed": "fp16 into fp32",
                "cast": "fp16 into fp32",
            }.items()
        },
        "sums_why": {"off": 10 - sums["fp16 into fp16"]},
        "sums_half_step": {"sum": "4", "step": "1/32", "half": "1/64 = 0.0156", "term": "0.01"},
        "answer_norm": {
            "overflow": 100,
            "underflow": "0.1",
            "terms": 1024,
            "error": numbers["norm error", "bf16", "variance by a running sum", 1.0],
        },
        "norm_overflow": {
            "share": numbers["norm lost", "fp16", "squares", 100.0],
            "expected": math.erfc(2.56 / math.sqrt(2)),
        },
        "answer_toy": {
            "exact": "parameters, loss, gradients",
            "low": "first layer's output, LayerNorm's output, logits",
        },
        "health": None,
        "losses": {"last": 50, "steps": 200},
        "cpu_attention": {
            "sequence": 128,
            "d": 16,
            "batch": 2,
            "precision": "fp32",
            "naive": passes.loc["naive", "wall_ms"],
            "best": passes["wall_ms"].min(),
            "naive_saved": passes.loc["naive", "saved_mib"] * 1024,
            "saved": passes["saved_mib"].min() * 1024,
        },
        "attention_checked": {"cases": len(checks)},
        "block_saves_formula": {"saved": blocks["saved by a block"], "tensors": 20, "size": "tiny"},
        "block_gradients": {
            "gradients": gradients,
            "parameters": parameters,
            "expected": parameters * 4 / 2**20,
            "saved": blocks["saved by a block"] / gradients,
        },
        "rungs_training": {
            "size": ladder["size"],
            "steps": tables["ladder.curves"]["step"].nunique(),
            "most": apart,
            "seeds": seeds,
        },
        "optimizer_exact": {"numbers": ladder["compared"]},
        "moments_rounding": {
            "exact": f"{ladder['v_fp32']:.3f}",
            "nearest": f"{ladder['v_nearest']:.2f}",
            "chance": f"{ladder['v_stochastic']:.3f}",
        },
        "measured_on": {"device": "AMD EPYC", "torch": "2.13.0+cpu"},
    }
    named = {
        name for page in WITHOUT_GPU.glob("*.md") for name in re.findall(r"{% claim (\w+)", page.read_text())
    }
    assert named - expected.keys() == {"predicted_peak"}, "which reads no records"
    for name in expected:
        try:
            made = collect("claim")[name](tables)
        except LookupError:
            made = None
        assert made == (expected[name] and pytest.approx(expected[name])), name


def test_a_tour_says_first_what_it_is_of_and_what_it_leaves_out(tour):
    rendered, text, out, runs = tour
    assert not rendered.errors
    first = text.partition("\n\n")[2].partition("\n")[0]
    assert all(
        words in first
        for words in (
            "2 of the handout's 5 sizes, small and 2.7B (ladder alone)",
            "medium, large and xl",
            *TOPICS.values(),
        )
    )
    place = re.search(r"`stepscope sweep reference --runs (\S+)`", first)[1]
    assert (out / place).samefile(runs)
    assert re.findall("Not measured here: (.*?)\\.", text) == ["Compiling"], (
        "the one part that lacks all of its runs"
    )
    assert len(rendered.left_out) == 1 and not re.search(r"\w_\w", rendered.left_out[0])


def test_one_measured_case_is_told_as_one(tour):
    for page in [*tour[2].glob("*.md"), *tour[2].glob("evidence/*.md")]:
        text = _prose(page.read_text())
        assert not re.findall(r"[^.\n]*\b(?:1 of 1|all [12]|0 repeats|([\d.,]+x?) to \1)\b[^.\n]*", text), (
            page.name
        )
    assert not re.findall(r"^#{2,} .*\n+(?=#{1,2} |\Z)", tour[1], re.MULTILINE), (
        "a heading with nothing below it"
    )


@pytest.mark.parametrize(
    "name",
    [
        "fused_adamw",
        "snapshot_kept",
        "precision_launch",
        "answer_attention_growth",
        "answer_attention_half",
        "attention_growth_why",
        "gradients_off",
        "memory_formula",
    ],
)
def test_what_a_tour_measured_is_said_of_it(tour, name):
    assert name not in {one.name for one in tour[0].omitted}


@pytest.mark.parametrize(
    "name", ["rung_graph", "compile_gain", "fair_peer", "mixed_memory_long", "compile_then"]
)
def test_what_a_tour_lacks_is_not_said_of_it(tour, name):
    assert name in {one.name for one in tour[0].omitted}


def test_a_gain_below_its_own_noise_is_none(tour):
    """As a rented H200's first tour had it: four steps of 124 and 131 ms that differed by 13 and 15."""
    shape, rows = largest_ladder(load(tour[3]))
    changed, ends = rows.assign(busy=0.99), ["wall_ms", "wall_q1_ms", "wall_q3_ms"]
    for spread, told in ((13.4, False), (1.5, True)):
        for change, ms in (("blocks", 124.0), ("cuda_graph", 131.0)):
            changed.loc[change, ends] = ms, ms - spread / 2, ms + spread / 2
        assert (gain(changed, "cuda_graph") is not None) == told, shape


def test_topics_are_tags_of_the_chapters():
    pages = "".join(path.read_text() for path in CHAPTERS.rglob("*.md"))
    assert all(name in collect(kind) and f"{{% {kind} {name} %}}" in pages for kind, name in TOPICS)


def test_of_a_study_without_runs_no_topic_is_missed(tmp_path):
    runs = reports.few(tmp_path / "runs", 1, ("benchmark",))
    said = render(runs, tmp_path / "out").left_out[-1]
    assert TOPICS["table", "repeats"] in said and TOPICS["table", "reach_10b"] not in said
    assert not_measured({}, []) == []


def test_a_host_is_told_where_all_runs_had_the_same():
    runs = pd.DataFrame(
        {"machine_cpu": ["Xeon", "Xeon"], "machine_cpu_cores": [16, 16], "driver": ["580.1", "580.1"]}
    )
    assert claims_across.measured_host({"runs": runs}) == {"cpu": "Xeon", "cores": 16, "driver": "580.1"}
    for other in (runs.assign(machine_cpu=["Xeon", "EPYC"]), runs.assign(driver=None)):
        assert claims_across.measured_host({"runs": other}) is None


def test_a_machine_stands_beside_the_reference_of_the_same_gpu_alone(tour):
    tables = load(tour[3])
    there = pd.DataFrame(shipped()["key_numbers"])
    assert {"TFLOP/s", "TB/s", "us", "ms"} == set(there["unit"]) and (key_numbers(tables)["value"] > 0).all()
    assert with_reference(tables)["speed"].between(0.9, 1.1).all()
    assert claims_across.beside_reference(tables) is None and claims_across.beside_reference_alike(tables)
    assert "as fast as it should be?" in tour[1]
    slow = tables | {
        "ladder.steps": tables["ladder.steps"].assign(wall_ms=2 * tables["ladder.steps"]["wall_ms"])
    }
    said = claims_across.beside_reference(slow)
    assert said["speed"] == pytest.approx(0.5, rel=0.1) and "all changes" in said["what"]
    assert claims_across.beside_reference_alike(slow) is None
    for others in (tables | {"runs": tables["runs"].assign(device="NVIDIA H100")}, load(reports.RUNS)):
        with pytest.raises(LookupError):
            with_reference(others)


def test_counts_and_lists_in_words():
    assert [all_of(count, "process") for count in (1, 2, 22)] == [
        "the one process",
        "both processes",
        "all 22 processes",
    ]
    assert [some_of(*pair, "run") for pair in ((0, 2), (2, 2), (1, 2))] == [
        "none of the 2 runs",
        "both runs",
        "1 of the 2 runs",
    ]
    assert [listed(words) for words in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]


@pytest.mark.parametrize(
    "spans_s, most",
    [
        ([(0, 10), (10, 5)], None),
        ([(5, 1), (0, 10), (10, 10), (4, 10)], 3),
        ([(0, 9), (0, 1)], 2),
        ([(0, 10), (None, 10), (5, None)], None),
    ],
)
def test_runs_overlap_where_one_begins_before_another_ends(spans_s, most):
    """What ends as another begins was over; of what is not known when or how long nothing is counted."""
    runs = pd.DataFrame(spans_s, columns=["at", "seconds"], dtype=float)
    runs["started_at"] = pd.Timestamp("2026-01-01", tz="UTC") + pd.to_timedelta(runs["at"], unit="s")
    assert claims_across.runs_overlap({"runs": runs}) == (most and {"most": most})


@pytest.mark.parametrize("column", ["device", "torch"])
def test_runs_of_two_devices_or_versions_are_told_as_of_none(column):
    runs = pd.DataFrame({"device": ["H100"] * 2, "torch": ["2.9"] * 2})
    assert claims_across.measured_on({"runs": runs}) == {"device": "H100", "torch": "2.9"}
    assert claims_across.measured_on({"runs": runs.assign(**{column: ["one", "other"]})}) is None


PASSES = pd.DataFrame(
    [
        ("sdpa", 256, 3.0, 2.0, "ok", None),
        ("naive", 128, 1.0, 9.0, "ok", None),
        ("compiled", 256, 1.5, 30.0, "ok", None),
        ("naive", 256, 4.0, 40.0, "ok", None),
        ("flash", 256, 2.0, 1.0, "ok", None),
        ("naive", 512, 8.0, 80.0, "failed", None),
        ("naive", 1024, None, 80.0, "ok", None),
        ("flash", 2048, 0.1, 0.1, "ok", 80.0),
    ],
    columns=["implementation", "sequence", "wall_ms", "saved_mib", "status", "device_gib"],
).assign(d_model=16, batch_size=8, precision="bf16")


def test_attention_on_a_cpu_is_of_the_longest_sequence_that_all_went_through():
    """The others failed, were not timed, or ran on a GPU; the fastest saves the squares and is none of those meant."""
    said = claims_across.cpu_attention({"attention.passes": PASSES})
    assert said == {
        "sequence": 256,
        "d": 16,
        "batch": 8,
        "precision": "bf16",
        "naive": 4.0,
        "best": 2.0,
        "naive_saved": 40960.0,
        "saved": 1024.0,
    }
    flash = PASSES["implementation"] == "flash"
    for column, value in (("saved_mib", 4.1), ("wall_ms", 4.1)):
        worse = PASSES.assign(**{column: PASSES[column].mask(flash, value)}).query("implementation != 'sdpa'")
        assert claims_across.cpu_attention({"attention.passes": worse}) is None, column


def test_the_worst_gradient_is_of_the_largest_size_that_has_any():
    rows = pd.DataFrame(
        [
            ("bf16", "small", 512, 4, 0.5),
            ("bf16", "medium", 512, 4, 0.1),
            ("tf32", "medium", 512, 4, 0.2),
            ("blocks", "medium", 512, 4, None),
            ("fp32", "medium", 512, 4, 0.6),
            ("fp8", "medium", 512, 4, 0.7),
            ("tf32", "medium", 1024, 4, 0.8),
            ("tf32", "medium", 512, 1, 0.9),
            ("tf32", "xl", 512, 4, None),
        ],
        columns=["optimization", "size", "context_length", "batch_size", "gradient_error"],
    ).assign(vocab_size=1000)
    assert claims_across.gradients_off({"ladder.steps": rows}) == {
        "size": "medium",
        "most": 0.2,
        "optimization": claims_across.LADDER_NAMES["tf32"],
    }


def _step(
    size="small",
    context=512,
    batch=4,
    busy=0.9,
    wall=10.0,
    gpu=9.0,
    mode="step",
    phase="whole",
    precision="fp32",
    **more,
):
    return {
        "size": size,
        "context_length": context,
        "vocab_size": 1000,
        "batch_size": batch,
        "busy": busy,
        "wall_ms": wall,
        "gpu_ms": gpu,
        "wall_min_ms": 0.8 * wall,
        "enqueue_ms": 99.0,
        "mode": mode,
        "phase": phase,
        "precision": precision,
        "operations": 100,
        **more,
    }


def test_each_key_number_is_of_the_rows_that_it_names():
    """Each of the other rows differs from those meant in one thing, and comes before them."""
    others = {"mode": "forward", "phase": "backward", "precision": "tf32"}
    launches = [
        _step("nano", 17, 1, 0.1),
        *(_step("tiny", 16, 1, 0.1, **{name: others[name]}) for name in ("mode", "phase")),
        _step("nano", 16, 2, 0.1),
        _step("tiny", 16, 1, 0.99),
        _step("tiny", 16, 1, 0.1, wall=5.0),
    ]
    bound = [
        *(_step(gpu=70.0, **{name: value}) for name, value in others.items()),
        _step(gpu=80.0, context=1024),
        _step(gpu=math.nan),
        _step(gpu=8.5),
    ]
    waiting = [
        *(
            _step("tiny", 256, busy=0.1, wall=90.0, **({"precision": "bf16"} | {name: value}))
            for name, value in others.items()
        ),
        *(
            _step(size, context, busy=busy, wall=wall, precision="bf16")
            for size, context, busy, wall in (
                ("tiny", 1024, 0.1, 7.0),
                ("medium", 256, 0.1, 6.0),
                ("small", 256, 0.1, 4.0),
                ("tiny", 256, 0.99, 3.0),
            )
        ),
    ]
    ladder = [
        _step(wall=20.0, optimization="bf16"),
        _step(wall=math.nan, optimization=RUNGS[-1]),
        _step(wall=21.0, context=1024, optimization=RUNGS[-1]),
        _step(wall=2.5, optimization=RUNGS[-1]),
    ]
    tables = {
        "benchmark.times": pd.DataFrame([*launches, *bound]),
        "mixed_precision.times": pd.DataFrame(waiting),
        "ladder.steps": pd.DataFrame(ladder),
        "ladder.results": pd.DataFrame(
            {"matmul_bf16": [900.0, 100.0, 700.0, None], "kept_up_tflops": [50.0, 650.0, 600.0, None]}
        ),
        "benchmark.results": pd.DataFrame(
            {
                "precision": ["fp32", "bf16", "fp32", "fp32"],
                "matmul_tflops": [60.0, 999.0, 40.0, 51.0],
                "copy_tb_s": [1.0, 9.0, 2.0, 4.0],
            }
        ),
    }
    found = key_numbers(tables)
    assert found["value"].tolist() == pytest.approx(
        [900.0, 650.0, 60.0, 9.0, 0.8 * 5.0 / 100 * 1000, 8.5, 0.8 * 4.0, 2.5]
    )
    assert found["unit"].tolist() == ["TFLOP/s"] * 3 + ["TB/s", "us", "ms", "ms", "ms"]
    assert found["shape"].tolist()[3:5] == ["", "context 16, vocabulary 1,000, batch 1"]
    assert [word in what for word, what in zip(("tiny", "small", "small", "small"), found["what"][4:])] == [
        True
    ] * 4


def test_of_a_step_that_two_studies_measured_the_medians_furthest_apart_are_told():
    """Of those that wait in both; less than such times differ by is nothing, nor is another precision's or shape's."""
    ladder = [
        _step(optimization="tf32", busy=0.5, wall=30.0, gpu=9.0),
        _step(optimization="bf16", busy=0.5, wall=40.0, gpu=8.0),
        _step("xl", optimization="bf16", busy=0.99, wall=10.0),
        _step(context=1024, optimization="bf16", busy=0.5, wall=1.0),
    ]
    plain = [
        _step(precision="tf32", busy=0.5, wall=45.0, gpu=9.1),
        _step(precision="bf16", busy=0.5, wall=50.0),
        _step(busy=0.5, wall=900.0),
        _step("xl", precision="bf16", busy=0.5, wall=50.0),
        _step(precision="tf32", mode="forward", busy=0.5, wall=500.0),
    ]
    ladder = pd.DataFrame(ladder).drop(columns="precision")
    tables = {"ladder.steps": ladder, "mixed_precision.times": pd.DataFrame(plain)}
    assert claims_across.two_processes(tables) == {
        "precision": "TF32",
        "size": "small",
        "context": 512,
        "ladder": 30.0,
        "waited": 45.0,
        "ladder_host": 99.0,
        "waited_host": 99.0,
        "ladder_gpu": 9.0,
        "waited_gpu": 9.1,
    }
    near = ladder.assign(wall_ms=ladder["wall_ms"].replace({30.0: 39.0, 40.0: 43.0}))
    assert claims_across.two_processes(tables | {"ladder.steps": near}) is None


def test_a_division_that_trained_weights_make_slower_is_told_with_what_it_does_to_both_clocks():
    """Summed over phases; at the shape where it is most; not where the step waits or the clock is low, nor of as much."""
    div = "void elementwise_kernel<BinaryFunctor<float, float, float, binary_internal::DivFunctor<float>>>"
    rows = [("xl", 50.0, div), ("xl", 10.0, div), ("small", 3.0, div), ("xl", 900.0, "MulFunctor")]
    operations = pd.DataFrame([_step(size, name=name, gpu=gpu) for size, gpu, name in rows])
    trained = [
        operations.assign(gpu_ms=[59.0, 14.0, 9.0, 100.0]),
        operations.assign(precision="bf16", gpu_ms=[60.0, 15.0, 9.0, 100.0]),
    ]
    times = pd.DataFrame(
        [
            _step("xl", precision="bf16", gpu=510.0, wall=500.0, busy=1.02),
            _step("small", precision="bf16"),
            _step("xl", precision="tf32"),
        ]
    )
    tables = {
        "benchmark.operations": operations,
        "mixed_precision.operations": pd.concat(trained),
        "mixed_precision.times": times.assign(sm_clock_mhz=1980.0),
    }
    said = claims_across.division_slower(tables)
    assert said == {
        "size": "xl",
        "context": 512,
        "before": 60.0,
        "after": 73.0,
        "share": pytest.approx(15 / 510),
        "over": pytest.approx(0.02),
    }
    capped = times.assign(sm_clock_mhz=[1700.0, 1980.0, 1980.0])
    for name, other in {
        "mixed_precision.times": capped,
        "mixed_precision.operations": pd.concat(
            [operations.assign(gpu_ms=1.05 * operations["gpu_ms"]), trained[1]]
        ),
    }.items():
        assert claims_across.division_slower(tables | {name: other}) is None
    waits = times.assign(sm_clock_mhz=1980.0, busy=0.9)
    assert claims_across.division_slower(tables | {"mixed_precision.times": waits}) is None


def test_of_two_profilers_farthest_cell_the_share_of_the_division_is_told():
    """Where it is most of the difference and not more than all of it; of the same mode, shape and precision."""
    of = {"precision": "bf16", "attention": "naive"}
    clocks = [
        _step(mode=mode, **of)
        | {"captured": captured, "host_ns": 1e6, "projected_ns": 1e6 * gpu, "busy_ns": 1e6 * gpu}
        for mode, gpu in (("step", 10.0), ("forward", 3.0))
        for captured in (False, True)
    ]
    div = [
        _step(mode=mode, name="DivFunctor", gpu=ms, **of) | {"total_ns": 1e6 * ns}
        for mode, ns, ms in (("step", 1.0, 1.5), ("forward", 9.0, 1.0))
    ]
    times = [_step(gpu=10.8, **of), _step(mode="forward", gpu=3.0, **of)]
    tables = {
        "nsys.clocks": pd.DataFrame(clocks),
        "nsys.operations": pd.DataFrame(div).drop(columns="gpu_ms"),
        "mixed_precision.operations": pd.DataFrame(div),
        "mixed_precision.times": pd.DataFrame(times),
    }
    assert claims_across.nsys_division(tables) == {
        "apart": pytest.approx(0.8),
        "division": pytest.approx(0.5),
    }
    for ms in (1.3, 2.0):
        other = pd.DataFrame(div).assign(gpu_ms=ms)
        assert claims_across.nsys_division(tables | {"mixed_precision.operations": other}) is None


def test_the_uncompiled_step_that_reserves_most_beyond_its_peak_is_told_of_both_studies():
    peaks = pd.DataFrame(
        [
            _step(
                "xl",
                mode=mode,
                status=status,
                peak_gib=10.0,
                reserved_gib=reserved,
                expandable_segments=segments,
            )
            for mode, status, reserved, segments in (
                ("forward", "ok", 12.0, False),
                ("step", "oom", 99.0, False),
                ("step", "ok", 90.0, True),
            )
        ]
    )
    rungs = pd.DataFrame(
        [
            _step(optimization=rung, status="ok", peak_gib=10.0, reserved_gib=reserved)
            for rung, reserved in (("sdpa", 11.0), ("blocks", 80.0))
        ]
    )
    tables = {"memory.peaks": peaks, "ladder.steps": rungs}
    assert claims_across.reserved_most(tables) == {
        "most": pytest.approx(0.2),
        "what": "forward",
        "size": "xl",
        "context": 512,
    }
    more = rungs.assign(reserved_gib=rungs["reserved_gib"] + 4)
    assert claims_across.reserved_most(tables | {"ladder.steps": more})["what"] == "fused attention"


def test_a_greater_rate_and_a_shorter_time_are_faster(monkeypatch):
    here = pd.DataFrame(
        [(unit, "of it", unit, 8.0) for unit in ("TFLOP/s", "TB/s", "ms", "us")],
        columns=["what", "shape", "unit", "value"],
    )
    there = here.assign(value=[10.0, 4.0, 10.0, 4.0])
    tables = {"runs": pd.DataFrame({"device": ["H100", "H100"]})}

    def compared(here, there, device="H100"):
        monkeypatch.setattr(tables_across, "key_numbers", lambda _: here)
        monkeypatch.setattr(
            tables_across, "shipped", lambda: {"device": device, "key_numbers": there.to_dict("records")}
        )
        return with_reference(tables)

    assert compared(here, there)["speed"].tolist() == pytest.approx([0.8, 2.0, 1.25, 0.5])
    said = claims_across.beside_reference(tables)
    assert (said["what"], said["speed"]) == ("us", 0.5) and claims_across.beside_reference_alike(
        tables
    ) is None
    printed = tables_across.beside_reference(tables)
    assert (printed["here"][3], printed["the reference"][3]) == ("8.00 µs", "4.00 µs")
    compared(here, there.assign(value=[8.0, 7.0, 8.1, 9.0]))
    assert claims_across.beside_reference(tables) is None and claims_across.beside_reference_alike(
        tables
    ) == {"numbers": 4, "least": 1.0}
    for nothing in (
        (here.head(3), there),
        (here, here),
        (here, there, "H200"),
        (here.assign(shape=["other", *here["shape"][1:]]), there),
    ):
        with pytest.raises(LookupError):
            compared(*nothing)
