"""What the report says of the ladder, from a campaign's tables made here: each claim where it holds, and where not."""

import inspect
from contextlib import suppress

import numpy as np
import pandas as pd
import pytest

from reports import said
from stepscope.config import StepConfig
from stepscope.model.flops import parameter_count, step_flops
from stepscope.report import claims_across
from stepscope.report.claims import collect
from stepscope.report.style import svg
from stepscope.report.tables import markdown, quartiles
from stepscope.studies.ladder import claims, claims_fp8, claims_parts, figures, parts, rows_fp8, tables
from stepscope.studies.ladder import rows as ladder_rows
from stepscope.studies.ladder.config import AS_IT_COMES, FAIR, RUNGS

# wall times in ms of the nine changes, Hugging Face's two, then GPU times of the first six
WALLS = {
    ("small", 512): (
        [58.5, 35.9, 37.9, 32.9, 26.7, 21.3, 6.45, 5.51, 5.22, 18.9, 6.8],
        [55.9, 29, 22, 13, 7.9, 6.2],
    ),
    ("small", 1024): (
        [123, 63.8, 55.7, 47.4, 49.9, 26.6, 10.3, 9.4, 9.2, 21.5, 11.0],
        [122, 62, 54, 25, 14, 10],
    ),
    ("2.7B", 512): (
        [1092, 334, 258, 196, 149, 110, 109, 95.1, 89.6, 114, 113],
        [1090, 333, 257, 195, 148, 105],
    ),
}
SHEETS = {"fp32": 67.0, "tf32": 494.5}
SPREAD = ["wall_q1_ms", "wall_q3_ms", "wall_min_ms"]


def row(size, context, change, wall, gpu, batch=4, vocab=10_000):
    config = StepConfig(size=size, context_length=context, device="cpu", batch_size=batch, vocab_size=vocab)
    moved = {"bf16_moments": 20}.get(change, 28) * parameter_count(config) / 4.2e9
    step_j = 0.3 * wall if change == "fp32" else 0.69 * gpu
    clock = 1665.0 if size == "2.7B" and wall < 120 else 1980.0
    return {
        "size": size,
        "context_length": context,
        "vocab_size": vocab,
        "run_id": f"{size} ladder",
        "optimization": change,
        "batch_size": batch,
        "unsteady": "",
        "status": "ok",
        "reason": "",
        "steps": 4.0,
        "wall_ms": wall,
        "wall_std_ms": 0.01 * wall,
        "wall_q1_ms": 0.995 * wall,
        "wall_q3_ms": 1.005 * wall,
        "wall_min_ms": 0.9 * wall,
        "enqueue_ms": np.nan,
        "gpu_ms": gpu,
        "operations": 430.0 if change == "bf16" else 400.0,
        "busy": gpu / wall,
        "replayed_ms": np.nan,
        "peak_gib": 52.0,
        "reserved_gib": 60.0,
        "sm_clock_mhz": clock,
        "power_w": 690.0,
        "step_j": step_j,
        "tokens_per_s": batch * context / wall * 1e3,
        "mfu": 0.48,
        "mfu_measured": 0.6,
        "mfu_at_clock": 0.57,
        "loss_error": 1e-5,
        "gradient_error": 0.7 if change == "fp8" else 0.07,
        "trained_gradient_error": {"bf16_moments": 0.02, "fp8": 0.03}.get(change, np.nan),
        "compile_s": np.nan,
        "matmul_ms": 54.0,
        "moved_ms": moved,
        "bound_ms": 54.0 + moved,
    }


@pytest.fixture
def campaign():
    rows = []
    for (size, context), (walls, gpus) in WALLS.items():
        gpus = [*gpus, *walls[6:9], walls[9] * 0.6, walls[10]]
        rows += [
            row(size, context, change, wall, gpu)
            for change, wall, gpu in zip((*RUNGS, *AS_IT_COMES), walls, gpus)
        ]
    for batch, low, eight in ((4, 89.6, 89.9), (8, 165, 155), (16, 310, 270), (32, 600, 497)):
        if batch > 4:
            rows.append(row("2.7B", 512, "bf16_moments", low, low, batch))
        rows.append(row("2.7B", 512, "fp8", eight, eight, batch))
    rows.append(row("2.7B", 512, "filled", 920, 920, 52))
    rows += [
        row("small", 512, change, wall, wall, vocab=50257)
        for change, wall in (("fp32", 68), ("bf16_moments", 6.6), ("chunked", 6.7))
    ]
    steps = pd.DataFrame(rows)
    steps.loc[steps["optimization"] == "chunked", "peak_gib"] = 51.0
    shape = {"size": "2.7B", "context_length": 512, "vocab_size": 10_000, "batch_size": 4}
    ran = [
        (shape, change, family, f"{family} kernel", share)
        for change in ("fp32", "blocks")
        for family, share in (("matrix multiply", 60.0), ("optimizer", 25.0), ("elementwise", 15.0))
    ]
    for change, matmuls, others in ((RUNGS[-1], 60, 1), ("fp8", 42, 20)):
        ran += [
            (shape, change, "matrix multiply", "gemm", matmuls),
            (shape, change, "optimizer", "step", 18),
            (shape, change, "compiler-generated", "triton_red", 6),
            (shape, change, "fused attention", "cudnn sdpa", 4),
            (shape, change, "elementwise", "scale", others),
        ]
    for (size, context), (
        walls,
        _,
    ) in WALLS.items():  # attention is a tenth of ours, and more of the baselines'
        own, attention = shape | {"size": size, "context_length": context}, 0.1 * walls[6]
        for change, times in (
            ("cuda_graph", attention),
            (AS_IT_COMES[0], 2 * attention),
            (AS_IT_COMES[1], walls[10] - walls[6] + attention),
        ):
            ran.append((own, change, "fused attention", "cudnn sdpa", times))
            if change in AS_IT_COMES:
                ran.append((own, change, "compiler-generated", "triton_bitwise_and_where", 0.01))
    kernels = pd.DataFrame(
        [
            own | {"optimization": change, "name": name, "family": family, "count": 2.0, "gpu_ms": times}
            for own, change, family, name, times in ran
        ]
    )
    small = {"size": "small", "context_length": 512, "vocab_size": 10_000, "batch_size": 4}
    noise, curves = np.random.default_rng(0), []
    for change, seed, off in (
        ("fp32", 0, 0),
        ("fp32", 1, 0.1),
        ("fp32", 2, -0.08),
        *((change, 0, 0.01) for change in RUNGS[1:]),
    ):
        loss = 5 * np.exp(-np.arange(200) / 60) + 1.5 + off + 0.001 * noise.standard_normal(200)
        curves += [
            small | {"optimization": change, "seed": seed, "step": step, "loss": one}
            for step, one in enumerate(loss)
        ]
    for change, seed, off in (
        ("bf16_moments", 0, 0),
        ("bf16_moments", 1, 0.05),
        ("bf16_moments", 2, -0.02),
        ("fp8", 0, -0.03),
    ):
        curves += [
            small
            | {
                "size": "medium",
                "optimization": change,
                "seed": seed,
                "step": step,
                "loss": 8 - 0.005 * step + off,
            }
            for step in range(1000)
        ]
    for change, off in (("bf16_moments", 0), ("fp8", 0.02)):
        curves += [
            shape
            | {
                "batch_size": 32,
                "optimization": change,
                "seed": 0,
                "step": step,
                "loss": 8 - 0.05 * step + off,
            }
            for step in range(50)
        ]
    results = pd.DataFrame(
        [
            {
                "size": size,
                "context_length": 512,
                "vocab_size": 10_000,
                "power_limit_w": 700.0,
                "sheet_bf16": 989.5,
                "run_id": f"{size} ladder",
                "kept_up_tflops": 667.0,
                "matmul_bf16": 770.0,
                "matmul_fp32": 51.0,
                "copy": 4.2,
                "kept_up_clock_mhz": 1515.0,
                "kept_up_power_w": 695.0,
                "v_fp32": 0.3514,
                "v_stochastic": 0.3515,
                "v_nearest": 1.0,
                "compared": 18330,
                "unequal": 0,
                "low_unequal": 0,
                "parameters": parameter_count(StepConfig(size=size, context_length=512, device="cpu")),
            }
            for size in ("small", "2.7B")
        ]
    )
    return {
        "ladder.steps": steps,
        "ladder.kernels": kernels,
        "ladder.curves": pd.DataFrame(curves),
        "ladder.results": results,
        "runs": pd.DataFrame({"study": ["ladder"], "device": ["NVIDIA H200"]}),
    }


@pytest.fixture
def complete(campaign):
    """And fair peers, the script, steps without one change, more tokens a step."""
    rows = [
        row(size, 512, change, wall, gpu)
        for size, change, wall, gpu in (
            ("small", "hugging_face_captured", 6.4, 6.3),
            ("2.7B", "hugging_face_causal", 111, 104),
            ("2.7B", "hugging_face_captured", 108, 107),
            ("small", "fast_step", 6.6, 6.5),
            ("2.7B", "fast_step", 112, 111),
            ("2.7B", "without_cuda_graph", 90, 89),
            ("2.7B", "without_blocks", 121, 120),
            ("small", "without_cuda_graph", 20, 5.2),
            ("small", "without_bf16_weights", 6.1, 6.0),
        )
    ]
    for change, gpu in (
        ("fused", 40),
        ("blocks", 25),
        ("cuda_graph", 25),
        ("bf16_weights", 24),
        ("bf16_moments", 23),
        ("fp8", 20),
    ):
        rows.append(row("small", 512, change, gpu, gpu, batch=16))
    return campaign | {
        "ladder.steps": pd.concat([campaign["ladder.steps"], pd.DataFrame(rows)], ignore_index=True)
    }


def public(module):
    return [
        function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and [*inspect.signature(function).parameters] == ["tables"]
    ]


# Of what these rows have not; tests/test_reference.py has them on the reference.
NOT_HERE = {
    "attention_chosen",
    "few_steps",
    "first_mask",
    "fits_with",
    "fp8_gradient_worst",
    "fp8_strays",
    "fp8_trains_where",
    "fp8_vain",
    "last_attention",
    "reserved_last",
    "rung_graph",
}


@pytest.mark.parametrize(
    "say",
    [*public(claims), *public(claims_fp8), *public(claims_parts), *tables.PRINTED.values(), *public(figures)],
)
def test_all_is_said_of_a_campaign_and_nothing_without_data(complete, say):
    if say.__name__ in NOT_HERE:
        with suppress(LookupError):
            assert say(complete) is None
        return
    found = say(complete)
    if isinstance(found, dict):
        assert all(value == value for value in found.values()) and said(say.__name__, found)
    elif isinstance(found, pd.DataFrame):
        assert 0 < len(found) <= 15 and "nan" not in markdown(found).lower()
    else:
        assert "<svg" in svg(found) and found.message
    with pytest.raises(LookupError):
        say({})


@pytest.mark.parametrize(
    "say", [*public(claims), *public(claims_fp8), *public(claims_parts), *tables.PRINTED.values()]
)
def test_what_failed_and_the_order_of_rows_change_nothing(complete, say):
    """A step, a whole ladder, a larger batch and a run's checks that failed; all rows in another order."""
    steps, results = complete["ladder.steps"], complete["ladder.results"]
    lost = steps[steps["batch_size"] == 4].assign(
        status="oom", reason="out of memory", **dict.fromkeys(tables.MEASURES, np.nan)
    )
    failed = [
        lost.assign(size="xl"),
        lost.assign(vocab_size=5_000),
        lost.assign(context_length=2048),
        lost.assign(batch_size=64),
        steps[steps["optimization"] == "filled"].assign(
            status="oom", size="small", **dict.fromkeys(tables.MEASURES, np.nan)
        ),
        *(
            lost[lost["optimization"] == "without_blocks"].assign(optimization=change)
            for change in ("without_sdpa", "hugging_face_causal")
        ),
    ]
    kept = steps[["size", "context_length", "vocab_size", "batch_size", "optimization"]]
    more = pd.concat([*failed, steps], ignore_index=True).drop_duplicates([*kept], keep="last")
    nothing = (
        results.head(1)
        .reindex(columns=["size", "context_length", "vocab_size"])
        .assign(run_id="failed", size="xl")
    )
    other = complete | {
        "ladder.steps": more.sample(frac=1, random_state=0),
        "ladder.results": pd.concat([nothing, results]),
    }
    other["ladder.kernels"] = complete["ladder.kernels"].sample(frac=1, random_state=0)
    found = []
    for given in (complete, other):
        try:
            found.append(say(given))
        except LookupError:
            found.append(None)
    if isinstance(found[0], dict):
        assert found[1] == pytest.approx(found[0])
    elif found[0] is None:
        assert found[1] is None
    else:
        one, two = (frame.reset_index(drop=say is tables.mfu) for frame in found)
        pd.testing.assert_frame_equal(two, one)


def test_what_the_first_screen_says(campaign):
    assert claims.headline(campaign) == {"speedup": pytest.approx(1092 / 89.6), "gpu": "H200"}
    assert claims.first_ladder(campaign) == {"plain": 1092}
    bound = claims.first_bound(campaign)
    assert (bound["size"], bound["runs"]) == ("2.7B", 2) and bound["bound"] == pytest.approx(
        54 + 20 * 3.41 / 4.2, rel=0.01
    )
    assert claims.graph_small(campaign) == {
        "size": "small",
        "gain": pytest.approx(21.3 / 6.45),
        "before": pytest.approx(0.9 * 21.3),
        "after": 6.45,
    }
    assert claims.graph_large(campaign) == {"size": "2.7B", "gain": pytest.approx(110 / 109)}


def test_under_the_cap_the_step_is_held_against_what_a_matmul_keeps_up_and_time_against_energy(campaign):
    _, parts_, _ = parts.last_step(campaign)
    found, own = claims_parts.last_kept_up(campaign), parts_.loc["matmuls"]
    assert (
        found["kept_up"] == pytest.approx(own["bound_ms"] * 770 / 667)
        and found["matmuls"] == own["ms"]
        and found["clock"] == 1515
    )
    results = campaign["ladder.results"]
    assert (
        claims_parts.last_kept_up(
            campaign | {"ladder.results": results.assign(kept_up_tflops=1.1 * results["kept_up_tflops"])}
        )
        is None
    )
    energy = claims_parts.last_joules(campaign)
    assert energy["joules"] == pytest.approx(1 - 89.6 / 109) and energy["wall"] == pytest.approx(
        1 - 89.6 / 109
    )
    assert (energy["before_j"], energy["after_j"]) == pytest.approx((0.69 * 109, 0.69 * 89.6))
    steps = campaign["ladder.steps"]
    for column, value in (("power_w", 735.0), ("power_w", 500.0)):
        odd = steps.assign(**{column: steps[column].mask(steps["optimization"].eq("cuda_graph"), value)})
        assert claims_parts.last_joules(campaign | {"ladder.steps": odd}) is None


def test_what_makes_a_step_fit_is_told(campaign):
    steps = campaign["ladder.steps"]
    large = steps[
        steps["size"].eq("2.7B") & steps["optimization"].isin(RUNGS) & steps["batch_size"].eq(4)
    ].assign(batch_size=64)
    out = large["optimization"].isin(["fp32", "fused"])
    lost = {"status": large["status"].mask(out, "oom"), "wall_ms": large["wall_ms"].mask(out)}
    tried = large.assign(**lost)[large["optimization"].isin(["fp32", "fused", "blocks", "cuda_graph"])]
    assert claims.fits_with(campaign | {"ladder.steps": pd.concat([steps, tried])}) == {
        "size": "2.7B",
        "tokens": 64 * 512,
        "optimization": "compiled blocks",
        "peak": 52.0,
    }
    later = tried.assign(status=tried["status"].mask(tried["optimization"].eq("cuda_graph"), "oom"))
    assert claims.fits_with(campaign | {"ladder.steps": pd.concat([steps, later])}) == {
        "size": "2.7B",
        "tokens": 64 * 512,
        "optimization": "compiled blocks",
        "peak": 52.0,
    }, "a graph's pool may be too much again"
    never = tried.assign(status="oom")
    with pytest.raises(LookupError):
        claims.fits_with(campaign | {"ladder.steps": pd.concat([steps, never])})


def test_attention_is_told_at_two_contexts_where_the_longer_is_faster(campaign):
    """Four times the pairs of positions, less the diagonal's, in the same milliseconds."""

    def both(slower=1.0):
        kernels = campaign["ladder.kernels"].query("size == '2.7B' and context_length == 512")
        kernels = kernels.assign(
            context_length=1024,
            gpu_ms=kernels["gpu_ms"].where(
                kernels["family"] != "fused attention", slower * kernels["gpu_ms"]
            ),
        )
        steps = (
            campaign["ladder.steps"]
            .query("size == '2.7B' and context_length == 512")
            .assign(context_length=1024)
        )
        return campaign | {
            name: pd.concat([campaign[name], longer])
            for name, longer in (("ladder.steps", steps), ("ladder.kernels", kernels))
        }

    found = claims_parts.last_attention(both())
    assert (found["context"], found["longer"]) == (512, 1024)
    assert found["long_rate"] / found["rate"] == pytest.approx(4 * (1025 / 2048) / (513 / 1024))
    assert claims_parts.last_attention(both(slower=3.5)) is None


def test_the_same_steps_again_and_what_a_process_makes_of_compiling_and_of_its_memory(campaign):
    steps = campaign["ladder.steps"]
    campaign["benchmark.times"] = pd.DataFrame({"compile": ["blocks"]})
    assert claims.reserved_last(campaign) is None
    with pytest.raises(LookupError):
        claims_across.compile_apart(campaign)
    seconds = steps["compile_s"].mask(
        steps["optimization"].eq("blocks"), steps["size"].map({"small": 80.0, "2.7B": 8.0})
    )
    assert claims_across.compile_apart(campaign | {"ladder.steps": steps.assign(compile_s=seconds)}) == {
        "low": 8.0,
        "high": 80.0,
    }
    assert (
        claims_across.compile_apart(
            campaign | {"ladder.steps": steps.assign(compile_s=seconds.clip(upper=16.0))}
        )
        is None
    )
    graph = steps["optimization"].eq("bf16_weights") & steps["size"].eq("2.7B")
    more = steps.assign(
        reserved_gib=steps["reserved_gib"].mask(graph, 75.0).mask(steps["optimization"].eq("fp32"), 200.0)
    )
    assert claims.reserved_last(campaign | {"ladder.steps": more}) == {
        "optimization": "bf16 weights, fp32 masters",
        "size": "2.7B",
        "context": 512,
        "peak": 52.0,
        "reserved": 75.0,
    }
    alone = campaign | {"ladder.steps": steps[~steps["optimization"].str.startswith("without")]}
    with_again = [
        steps,
        *(
            steps[steps["optimization"].eq(rung)].assign(
                optimization=again, gpu_ms=lambda rows: 1.002 * rows["gpu_ms"]
            )
            for again, rung in (
                ("without_bf16_weights", "cuda_graph"),
                ("without_bf16_moments", "bf16_weights"),
            )
        ),
    ]
    again = pd.concat(with_again, ignore_index=True).drop_duplicates(
        ["size", "context_length", "vocab_size", "batch_size", "optimization"], keep="last"
    )
    with pytest.raises(LookupError):
        claims.repeats_cap(alone)
    assert claims.repeats_cap(campaign | {"ladder.steps": again}) == {
        "size": "2.7B",
        "pairs": 2,
        "most": pytest.approx(0.002),
    }


def test_a_larger_batch_is_told_where_it_gives_more_tokens(campaign):
    steps, tokens = campaign["ladder.steps"], 52 * 512 / 0.92
    assert claims.larger_batch(campaign) == {
        "size": "2.7B",
        "batch": 4,
        "tokens": pytest.approx(2048 / 0.0896),
        "most": 52,
        "most_tokens": pytest.approx(tokens),
        "how": ", the loss in chunks",
        "more": pytest.approx(tokens / 2048 * 0.0896),
    }
    alone = campaign | {"ladder.steps": steps[steps["batch_size"] == 4]}
    slower = campaign | {
        "ladder.steps": steps.assign(tokens_per_s=steps["tokens_per_s"].where(steps["batch_size"] == 4, 1.0))
    }
    assert claims.larger_batch(alone) is claims.larger_batch(slower) is None


def test_the_parts_of_the_last_step_add_up_to_its_wall_time(campaign):
    """What matmuls, attention and AdamW need adds up to the bound, and what is over it to the remainder."""
    shape, found, rates = parts.last_step(campaign)
    row = ladder_rows.bounds(campaign, ladder_rows.timed(ladder_rows.largest_ladder(campaign)[1])).loc[
        RUNGS[-1]
    ]
    assert shape.size == "2.7B" and found["ms"].sum() == pytest.approx(89.6) and rates.matmul == 770
    assert found["bound_ms"].sum() == pytest.approx(row["bound_ms"])
    assert found["over"].sum() == pytest.approx(89.6 - row["bound_ms"])
    assert (
        found.loc["between kernels", "ms"] == pytest.approx(0.6)
        and found.loc["casts, copies, rest", "ms"] == 1
    )
    config = StepConfig(size="2.7B", context_length=512, device="cpu", vocab_size=10_000)
    causal = 3 * 2 * sum(2 * 4 * (at + 1) * config.d_model for at in range(512)) * config.num_layers
    assert found.loc["attention", "flops"] == pytest.approx(causal)
    assert found.loc["matmuls", "flops"] == pytest.approx(54 * 770e9 - causal)
    assert found.loc["matmuls", "tflops"] == pytest.approx(found.loc["matmuls", "flops"] / 60e9)
    assert found.loc["AdamW", "tb_s"] == pytest.approx(20 * parameter_count(config) / 18e9)
    told = claims_parts.last_largest(campaign)
    assert (told["part"], told["most"]) == ("matmuls", found.loc["matmuls", "over"]) and told[
        "wall"
    ] == pytest.approx(89.6)
    kernels = campaign["ladder.kernels"]
    kernels.loc[(kernels["optimization"] == RUNGS[-1]) & (kernels["family"] == "optimizer"), "gpu_ms"] = 30
    assert claims_parts.last_largest(campaign)["part"] == "AdamW"
    printed = tables.last_parts(campaign)
    assert (
        printed.loc["the step", "ms"] == pytest.approx(89.6) and printed.loc["matmuls", "with FP8, ms"] == 42
    )


def test_the_roofline_has_the_bytes_of_each_product_and_the_wall_of_launches(campaign):
    """Of a matmul both factors and the product, three times; of naive attention its two products, too."""
    config = StepConfig(size="small", context_length=512, device="cpu", vocab_size=10_000)
    tokens, d, f, heads, layers = 2048, config.d_model, config.d_ff, config.num_heads, config.num_layers
    products = [(tokens, d, d)] * 4 + [(tokens, d, f)] * 2 + [(tokens, f, d)]
    dense = layers * sum(m * k + k * n + m * n for m, k, n in products) + tokens * (d + 10_000) + d * 10_000
    assert parts.matmul_bytes(config, 2, attention=False) == 3 * 2 * dense
    square = layers * 2 * 4 * heads * (512 * 512 + 2 * 512 * d // heads)
    assert parts.matmul_bytes(config, 4, attention=True) == 3 * 4 * (dense + square)
    _, points = parts.roofline(campaign)
    points = points.set_index(["step", "part"])
    assert points.loc[("bf16_moments", "AdamW"), "intensity"] == pytest.approx(14 / 20)
    assert ("fp32", "attention") not in points.index
    assert points.loc[("fp32", "matmuls"), "flops"] == step_flops(
        StepConfig(size="2.7B", context_length=512, device="cpu", vocab_size=10_000)
    )
    size, operations, launch, wall = parts.launch_wall(campaign)
    assert (size, operations) == ("small", 400) and launch == pytest.approx(0.9 * 21.3 / 0.4)
    assert wall == pytest.approx(step_flops(config) / (0.9 * 21.3e9))
    assert claims_parts.roofline_wall(campaign) == {"size": "small", "operations": 400, "launch": launch}


def test_gains_by_tokens_are_of_sizes_at_several_batches(campaign, complete):
    """FP8 is beside the last step; a size whose other batches have only that is not told."""
    found = tables.which_at_tokens(complete)
    assert list(found.columns) == ["small, 2,048", "small, 8,192"]
    more = found["small, 8,192"]
    assert more["compiled blocks"] == pytest.approx(40 / 25) and np.isnan(more["CUDA graph of the step"])
    assert more["FP8 matmuls"] == pytest.approx(23 / 20) and np.isnan(
        found.loc["FP8 matmuls", "small, 2,048"]
    )
    assert found.loc["CUDA graph of the step", "small, 2,048"] == pytest.approx(21.3 / 6.45)
    with pytest.raises(LookupError):
        tables.which_at_tokens(campaign)


def test_what_the_last_step_loses_without_a_change_is_gpu_time_but_the_graphs(complete):
    found = tables.which_without(complete)
    assert list(found.columns) == ["small 512", "2.7B 512"]
    assert found.loc["compiled blocks", "2.7B 512"] == pytest.approx(120 / 89.6)
    assert np.isnan(found.loc["CUDA graph of the step", "2.7B 512"]), "less than steps differ by"
    assert found.loc["CUDA graph of the step", "small 512"] == pytest.approx(20 / 5.22)
    assert found.loc["bf16 weights, fp32 masters", "small 512"] == pytest.approx(6.0 / 5.22)
    assert claims.without_most(complete) == {
        "size": "2.7B",
        "optimization": "compiled blocks",
        "longer": pytest.approx(120 / 89.6),
    }
    steps = complete["ladder.steps"]
    steps.loc[steps["optimization"] == "without_blocks", "gpu_ms"] = 89.6
    assert claims.without_most(complete) is None


def test_beside_fair_peers_only_what_remains_is_told(campaign, complete):
    """The mask's sentence is of the first screen only where no fair peer was measured."""
    assert (
        claims.first_mask(campaign) == claims.baseline_mask(campaign) and claims.first_mask(complete) is None
    )
    assert claims.first_peer(complete) == {
        "baseline": 108,
        "same": 109,
        "how": "compiled and in one CUDA graph",
    }
    steps = complete["ladder.steps"]
    assert claims.fair_peer(complete) == {
        "ladders": 2,
        "low": pytest.approx(6.3 / 6.45),
        "high": pytest.approx(107 / 109),
    }
    assert claims.own_remains(complete)["low"] == pytest.approx(109 / 89.6)
    assert list(tables.baselines(complete)["Hugging Face, ms"]) == [6.4, 108]
    assert "Hugging Face, no mask, one graph" in svg(figures.ladder(complete))
    steps.loc[steps["optimization"].isin(FAIR), "wall_ms"] = np.nan
    assert claims.first_mask(complete) is not None
    for say in (claims.first_peer, claims.fair_peer):
        with pytest.raises(LookupError):
            say(complete)


def test_the_script_is_told_as_measured_where_it_was(campaign, complete):
    assert "fp32, naive attention" in tables.fast_step(campaign).index
    found = tables.fast_step(complete)
    assert list(found["wall, ms"]) == [6.6, 112] and list(found["the ladder's, to its CUDA graph, ms"]) == [
        6.45,
        109,
    ]


def test_what_a_billion_tokens_cost(campaign):
    """Of the largest size's last step: 89.6 ms and 0.69 J a millisecond for 2,048 tokens."""
    found = claims.cost_billion(campaign)
    assert found["hours"] == pytest.approx(1e9 / 2048 * 0.0896 / 3600) and (
        found["batch"],
        found["most"],
    ) == (4, 52)
    assert found["kwh"] == pytest.approx(1e9 / 2048 * 0.69 * 89.6 / 3.6e6)
    assert found["most_hours"] == pytest.approx(1e9 / (52 * 512) * 0.92 / 3600)
    assert found["most_kwh"] == pytest.approx(1e9 / (52 * 512) * 0.69 * 920 / 3.6e6)
    assert tables.cost(campaign)["a thousand tokens, J"].to_dict() == pytest.approx(
        {"small": 1e3 / 2048 * 0.69 * 5.22, "2.7B": 1e3 / 2048 * 0.69 * 89.6}
    )
    campaign["ladder.steps"]["power_w"] = np.nan
    with pytest.raises(LookupError):
        tables.cost(campaign)


def test_bounds_are_at_the_fastest_rates_of_the_runs_on_the_same_gpu(campaign):
    """A run's own rates do not count, nor do those of another GPU; what is kept up is a reference beside it."""
    results = pd.DataFrame(
        {
            "run_id": ["2.7B ladder", "b", "c", "other"],
            "matmul_bf16": [700.0, 770.0, 780.0, 300.0],
            "copy": [4.0, 4.2, 4.3, 2.0],
            "kept_up_tflops": [650.0, 660.0, 670.0, 100.0],
        }
    )
    runs = pd.DataFrame({"run_id": results["run_id"], "device": ["H200"] * 3 + ["A100"]})
    rows = pd.DataFrame([row("2.7B", 512, "bf16_moments", 92, 91)])
    found = ladder_rows.bounds({"ladder.results": results, "runs": runs}, rows).iloc[0]
    assert found["matmul_ms"] == pytest.approx(54 * 700 / 780)
    assert found["moved_ms"] == pytest.approx(rows["moved_ms"].item() * 4.0 / 4.3)
    assert found["bound_ms"] == pytest.approx(found["matmul_ms"] + found["moved_ms"])
    assert found["reference_ms"] == pytest.approx(54 * 700 / 660 + found["moved_ms"])
    assert ladder_rows.ceilings({"ladder.results": results, "runs": runs}, "b")[:4] == (780, 4.3, 700, 3)
    both = {
        "ladder.steps": campaign["ladder.steps"],
        "ladder.results": results.assign(matmul_fp32=[51.0, 52.0, 53.0, 20.0]),
        "runs": runs,
    }
    assert ladder_rows.roofs(both).to_dict() == {"matmul_fp32": 53, "matmul_bf16": 780, "copy": 4.3}


def test_launch_bound_steps_are_compared_by_the_fastest_and_not_under_a_fifth(campaign):
    steps = campaign["ladder.steps"].copy()
    steps["enqueue_ms"] = steps["wall_ms"].where(steps["optimization"].isin(["bf16", "blocks"]), 1.0)
    steps["wall_min_ms"], steps["wall_q1_ms"], steps["wall_q3_ms"] = (
        0.7 * steps["wall_ms"],
        0.9 * steps["wall_ms"],
        steps["wall_ms"],
    )
    graph = steps["optimization"] == "cuda_graph"
    steps.loc[graph, "wall_min_ms"] = steps.loc[graph, "wall_ms"]
    changed = campaign | {"ladder.steps": steps}
    assert claims.graph_small(changed)["gain"] == pytest.approx(0.7 * 21.3 / 6.45)
    printed = tables.ladder_steps(changed)
    assert "std, ms" not in printed and printed["quartiles, ms"].iloc[0] == "983 to 1,092"
    cure = tables.launch_cure(changed)
    assert cure["at best, ms"].notna().tolist() == [False, True, False]
    steps.loc[graph, "wall_min_ms"] = 0.6 * 21.3
    assert (
        claims.graph_small(changed) is None
        and ladder_rows.gain(ladder_rows.smallest_ladder(changed)[1], "cuda_graph") is None
    )


def test_which_optimization_is_in_gpu_time_but_for_the_graph(campaign):
    found = tables.which_optimization(campaign)
    assert list(found.columns) == ["small", "2.7B"]
    assert found.loc["TF32", "small"] == pytest.approx(55.9 / 29)
    assert found.loc["CUDA graph of the step", "small"] == pytest.approx(21.3 / 6.45)
    assert np.isnan(found.loc["CUDA graph of the step", "2.7B"]), "less than steps differ by themselves"
    assert found.loc["bf16 moments", "2.7B"] == pytest.approx(95.1 / 89.6)
    assert found.loc["all of them", "small"] == pytest.approx(55.9 / 5.22)
    assert found.loc["all of them, in wall time", "small"] == pytest.approx(58.5 / 5.22)
    longer = tables.which_optimization_longer(campaign)
    assert list(longer.columns) == ["small"] and longer.loc["fused attention", "small"] == pytest.approx(
        54 / 25
    )
    assert claims.rung_context(campaign) == {
        "context": 1024,
        "low": pytest.approx(123 / 9.2),
        "high": pytest.approx(123 / 9.2),
    }


def test_of_a_disturbed_fp32_step_no_wall_time_is_compared(campaign):
    steps = campaign["ladder.steps"]
    steps.loc[(steps["size"] == "small") & (steps["optimization"] == "fp32"), "wall_q3_ms"] += 4
    found = tables.which_optimization(campaign)["small"]
    assert np.isnan(found["all of them, in wall time"]) and found["all of them"] == pytest.approx(55.9 / 5.22)
    assert claims.rung_context(campaign) is None, "which names small's alone"


def test_at_one_context_no_longer_one_is_told(campaign):
    campaign["ladder.steps"] = campaign["ladder.steps"].query("context_length == 512")
    for say in (claims.rung_context, tables.which_optimization_longer):
        with pytest.raises(LookupError):
            say(campaign)


def test_the_baselines_graphs_are_beside_our_graph_and_its_attention_told_apart(campaign):
    steps = campaign["ladder.steps"]
    at = (steps["size"] == "2.7B") & (steps["optimization"] == AS_IT_COMES[1])
    steps.loc[at, ["wall_ms", "gpu_ms"]] = 115, 111  # its plain mode is quicker, 114
    kernels = campaign["ladder.kernels"]
    baseline = (
        (kernels["size"] == "2.7B")
        & (kernels["optimization"] == AS_IT_COMES[1])
        & (kernels["family"] == "fused attention")
    )
    kernels.loc[baseline, "gpu_ms"] = 12
    row = ladder_rows.baseline_attention(campaign).set_index(["size", "context_length"]).loc[("2.7B", 512)]
    assert (row["ours_ms"], row["fp32_ms"], row["baseline_ms"]) == (89.6, 109, 115)
    assert row["whole"] == pytest.approx(111 / 109) and row["attention"] == pytest.approx(12 / 10.9)
    assert row["without"] == pytest.approx((111 - 12 + 10.9) / 109)
    found = claims.baseline_mask(campaign)
    assert found["ladders"] == 3 and found["least"] == pytest.approx(1) and found["most"] == row["without"]
    assert found["low"] == pytest.approx(12 / 10.9)


def test_baselines_with_attention_of_their_own_are_not_told_apart(campaign):
    kernels = campaign["ladder.kernels"]
    kernels.loc[
        kernels["optimization"].isin(AS_IT_COMES) & (kernels["family"] == "fused attention"), "name"
    ] = "flash"
    with pytest.raises(LookupError):
        tables.baselines_attention(campaign)


def test_busy_is_printed_as_recorded_but_not_of_a_disturbed_cell(campaign):
    steps = campaign["ladder.steps"]
    own = (steps["size"] == "2.7B") & (steps["batch_size"] == 4)
    steps.loc[own & (steps["optimization"] == "cuda_graph"), "busy"] = 1.013
    steps.loc[own & (steps["optimization"] == "fp32"), "busy"] = 1.03
    found = tables.ladder_steps(campaign)["busy, %"]
    assert found["CUDA graph of the step"] == 1.013 and np.isnan(found["fp32, naive attention"])


def test_the_clock_and_what_waiting_steps_take_a_kernel(campaign):
    """All steps have 400 kernels."""
    assert claims.clock_apart(campaign)["longer"] == pytest.approx(6.45 / 6.2 - 1)
    steps = campaign["ladder.steps"]
    steps.loc[(steps["size"] == "2.7B") & (steps["optimization"] == "cuda_graph"), "gpu_ms"] = 105 * 1.05
    assert claims.clock_apart(campaign) == {
        "size": "2.7B",
        "context": 512,
        "longer": pytest.approx(0.05),
        "operations": 400,
    }
    found = claims.launch_wait(campaign)
    assert found["most"] == pytest.approx(0.9 * 49.9 / 0.4) and found["least"] == pytest.approx(
        0.9 * 21.3 / 0.4
    )


def test_what_the_evidence_says(campaign):
    steps = campaign["ladder.steps"]
    another = pd.concat([steps, steps[steps["size"] == "small"].assign(size="medium")])
    assert claims.rung_graph(campaign) is None, "one size has no smaller ones"
    assert claims.rung_graph(campaign | {"ladder.steps": another}) == {"size": "medium", "context": 512}
    assert claims.rung_matmul(campaign) == {"share": pytest.approx(0.6), "size": "2.7B"}
    told = claims.rungs_training(campaign)
    assert (told["size"], told["steps"]) == ("small", 200) and 0 < claims.rungs_floor(campaign)[
        "floor"
    ] < 1e-3
    assert (told["most"], told["seeds"]) == pytest.approx((0.01, 0.08), abs=5e-4)
    distance, seeds = ladder_rows.loss_shift(ladder_rows.trained(campaign)[1])
    assert distance[RUNGS[-1]] == pytest.approx(0.01, abs=5e-4) and seeds == pytest.approx(0.08, abs=5e-4)
    assert claims.own_remains(campaign) == pytest.approx({"low": 10.3 / 9.2, "high": 6.45 / 5.22})
    printed = tables.baselines(campaign)["ours faster, x"]
    assert list(printed) == pytest.approx([6.8 / 5.22, 11 / 9.2, 113 / 89.6])
    halved = steps.assign(
        wall_ms=steps["wall_ms"].mask(steps["optimization"].isin(AS_IT_COMES), steps["wall_ms"] / 2)
    )
    slower = tables.baselines(campaign | {"ladder.steps": halved})["ours faster, x"]
    assert list(slower) == pytest.approx(list(printed / 2)), "where ours is slower, it is told"
    assert claims_fp8.fp8_small_batch(campaign) == {"size": "2.7B", "batch": 4, "saved": 18, "added": 19}
    assert claims_fp8.fp8_pays(campaign) is None, "not at batch 4"
    larger = campaign | {
        "ladder.steps": steps[~(steps["optimization"].eq("fp8") & steps["batch_size"].eq(4))]
    }
    assert claims_fp8.fp8_pays(larger) == {
        "sizes": "2.7B",
        "least": 8 * 512,
        "most": 32 * 512,
        "low": pytest.approx(165 / 155),
        "high": pytest.approx(600 / 497),
    }
    assert claims_fp8.fp8_gradient(campaign) == {
        "size": "2.7B",
        "fp8": 0.7,
        "bf16": 0.07,
        "trained_fp8": 0.03,
        "trained_bf16": 0.02,
    }
    assert claims_fp8.fp8_gradient_worst(campaign) is None, "the largest itself"
    smaller = steps[steps["size"] == "2.7B"].assign(size="xl")
    smaller["trained_gradient_error"] = smaller["optimization"].map({RUNGS[-1]: 0.005, "fp8": 0.025})
    both = campaign | {"ladder.steps": pd.concat([smaller, steps])}
    assert claims_fp8.fp8_gradient(both) == claims_fp8.fp8_gradient(campaign)
    assert claims_fp8.fp8_gradient_worst(both) == {"size": "xl", "fp8": 0.025, "bf16": 0.005}
    assert claims_fp8.fp8_training(campaign)["most"] == pytest.approx(0.02 / 5.55)
    assert claims_parts.ridge(campaign) == {
        "fp32": 51,
        "bf16": 770,
        "copy": 4.2,
        "fp32_ridge": 51 / 4.2,
        "bf16_ridge": 770 / 4.2,
    }
    assert claims_parts.last_power(campaign) == {"power": 690, "cap": 700, "clock": 1665, "full": 1980}
    assert claims.power(campaign) == {
        "size": "2.7B",
        "context": 512,
        "first": "compiled blocks",
        "last": "bf16 moments",
        "cap": 700,
        "low": 1665,
        "high": 1665,
        "full": 1980,
    }
    steps = campaign["ladder.steps"]
    last = steps["optimization"].eq("bf16_moments") & steps["size"].eq("2.7B")
    one = campaign | {"ladder.steps": steps.assign(power_w=steps["power_w"].where(last, 400.0))}
    assert claims.power(one) is None, "of one step nothing follows"
    assert claims.power_read(campaign) == {"runs": 2, "low": 695, "high": 695, "clock": 1515}
    assert claims.optimizer_exact(campaign)["numbers"] == 18330


def test_fp8s_loss_is_held_against_other_seeds_of_bf16(campaign):
    numbers = {"size": "medium", "steps": 1000, "fp8": 0.03, "low": 0.02, "high": 0.07}
    assert claims_fp8.fp8_trains(campaign) == pytest.approx(numbers | {"sizes": "medium"})
    assert claims_fp8.fp8_strays(campaign) is None
    curves = campaign["ladder.curves"]
    curves.loc[(curves["optimization"] == "fp8") & (curves["size"] == "medium"), "loss"] -= 0.05
    assert claims_fp8.fp8_trains(campaign) is None
    assert claims_fp8.fp8_strays(campaign) == pytest.approx(numbers | {"fp8": 0.08})


def test_fp8_pays_at_a_size_where_it_gains_at_every_batch(complete):
    """And for the largest size of those that it was tried at twice it may gain nothing clear."""
    found = pd.DataFrame(
        {"size": ["xl", "small", "2.7B", "xl", "small"], "clear": [True, False, True, True, True]}
    )
    assert rows_fp8.pays_at(found) == ["xl", "2.7B"]
    steps = complete["ladder.steps"]
    less = pd.DataFrame([row("small", 512, "fp8", gpu, gpu, batch) for gpu, batch in ((5.3, 4), (22.9, 16))])
    others = steps[
        ~(steps["size"].eq("small") & steps["optimization"].eq("fp8"))
        & ~(steps["optimization"].eq("fp8") & steps["batch_size"].eq(4))
    ]
    tried = complete | {"ladder.steps": pd.concat([others, less])}
    assert claims_fp8.fp8_vain(tried) == {
        "size": "small",
        "tokens": 16 * 512,
        "low": pytest.approx(5.22 / 5.3),
        "high": pytest.approx(23 / 22.9),
    }
    assert claims_fp8.fp8_vain(complete) is None, "small at one batch"
    assert (
        claims_fp8.fp8_vain(tried | {"ladder.steps": tried["ladder.steps"].query("size == 'small'")}) is None
    ), "none gains"


def test_a_gain_within_the_spread_of_steps_is_not_clear(campaign):
    steps = campaign["ladder.steps"]
    steps.loc[(steps["optimization"] == "bf16_moments") & (steps["batch_size"] == 8), "wall_q3_ms"] = 176
    found = rows_fp8.by_batch(campaign).set_index("batch_size")["clear"]
    assert found.to_dict() == {4: False, 8: False, 16: True, 32: True}


def test_a_loss_above_and_below_has_moved():
    off = pd.DataFrame(
        {("fp32", 0): [0, 0], ("fp32", 1): [0.3, 0.3], ("fp32", 2): [0.5, 0.5], ("bf16", 0): [0.1, -0.1]}
    )
    distance, nearest = ladder_rows.loss_shift(off.rename_axis(columns=["optimization", "seed"]))
    assert distance.to_dict() == {"bf16": 0.1} and nearest == pytest.approx(0.2)


def test_fp8s_loss_is_beside_bf16s_of_the_same_step_above_or_below(campaign):
    curves = campaign["ladder.curves"]
    curves.loc[curves["optimization"] == "fp8", "loss"] -= 0.04
    other = curves[curves["optimization"] == "fp8"].assign(optimization="bf16", loss=9.0)
    found = claims_fp8.fp8_training(campaign | {"ladder.curves": pd.concat([curves, other])})
    assert found["most"] == pytest.approx(0.02 / 5.55)


def test_of_batches_that_fill_the_memory_the_best_is_told(campaign):
    steps = campaign["ladder.steps"]
    worse = steps[steps["optimization"] == "filled"].assign(size="small", batch_size=200, mfu=0.3)
    assert claims.filled(campaign | {"ladder.steps": pd.concat([steps, worse])})["batch"] == 52


STEPS, KERNELS, CURVES, RESULTS = (f"ladder.{name}" for name in ("steps", "kernels", "curves", "results"))


@pytest.mark.parametrize(
    ("claim", "name", "column", "value", "which"),
    [
        ("headline", STEPS, "wall_ms", 2000, {"optimization": "bf16_moments"}),
        ("first_bound", STEPS, "matmul_ms", 95, {}),
        ("rung_matmul", KERNELS, "gpu_ms", 30, {"family": "matrix multiply"}),
        ("rung_optimizer", KERNELS, "gpu_ms", 5, {"family": "optimizer"}),
        ("rung_graph", STEPS, "wall_ms", 7, {"optimization": "blocks"}),
        ("rung_context", STEPS, "gpu_ms", 54, {"context_length": 1024, "optimization": "sdpa"}),
        ("own_remains", STEPS, "gpu_ms", 6.4, {"optimization": "bf16_moments"}),
        ("last_largest", STEPS, "matmul_ms", 95, {}),
        ("last_rates", KERNELS, "gpu_ms", 40, {"family": "matrix multiply"}),
        ("last_rates", KERNELS, "gpu_ms", 9, {"family": "optimizer"}),
        ("baseline_mask", KERNELS, "gpu_ms", 0.5, {"optimization": "hugging_face_graphs"}),
        ("baseline_mask", KERNELS, "name", "cutlass", {"family": "fused attention"}),
        ("baseline_mask", KERNELS, "name", "copy", {"family": "compiler-generated"}),
        ("graph_small", STEPS, "wall_ms", 7, {"optimization": "blocks"}),
        ("graph_small", STEPS, "busy", 0.99, {}),
        ("graph_large", STEPS, "wall_ms", 80, {"optimization": "cuda_graph"}),
        ("graph_large", STEPS, "busy", 0.9, {"optimization": "blocks"}),
        ("launch_wait", STEPS, "busy", 0.99, {}),
        ("clock_apart", STEPS, "power_w", 400, {}),
        ("clock_apart", STEPS, "operations", 300, {"optimization": "blocks"}),
        ("rungs_training", CURVES, "loss", 9, {"optimization": "bf16_moments"}),
        ("attention_step", STEPS, "gpu_ms", 257, {"optimization": "sdpa"}),
        ("precision_masters", STEPS, "gpu_ms", 109, {"optimization": "bf16_weights"}),
        ("moments_rounding", RESULTS, "v_nearest", 0.352, {}),
        ("moments_rounding", RESULTS, "v_stochastic", 0.4, {}),
        ("optimizer_exact", RESULTS, "low_unequal", 3, {"size": "2.7B"}),
        ("fp8_small_batch", STEPS, "gpu_ms", 60, {"optimization": "fp8"}),
        ("fp8_small_batch", KERNELS, "gpu_ms", 31, {"name": "scale"}),
        ("fp8_pays", STEPS, "gpu_ms", 900, {"optimization": "fp8"}),
        ("fp8_gradient", STEPS, "gradient_error", 0.05, {"optimization": "fp8"}),
        ("fp8_gradient", STEPS, "trained_gradient_error", 0.18, {"optimization": "fp8"}),
        ("fp8_training", CURVES, "loss", 9, {"optimization": "fp8"}),
        ("fp8_trains", CURVES, "loss", 7, {"optimization": "fp8", "size": "medium"}),
        ("last_power", STEPS, "power_w", 600, {}),
        ("last_power", STEPS, "sm_clock_mhz", 1980, {}),
        ("power", STEPS, "power_w", 400, {}),
        ("power", STEPS, "sm_clock_mhz", 1980, {}),
        ("chunked_memory", STEPS, "peak_gib", 53, {"optimization": "chunked"}),
        ("first_from", STEPS, "wall_ms", 91, {"optimization": "fused"}),
        ("bf16_launches", STEPS, "gpu_ms", 40, {"optimization": "bf16"}),
        ("bf16_launches", STEPS, "operations", 400, {"optimization": "bf16"}),
        ("bf16_launches", STEPS, "wall_ms", 26, {"optimization": "bf16"}),
        ("first_bound", STEPS, "wall_ms", 60, {"optimization": "bf16_moments"}),
        ("last_power", STEPS, "sm_clock_mhz", 1950, {}),
        ("baseline_mask", STEPS, "gpu_ms", 4, {"optimization": "hugging_face_graphs", "context_length": 512}),
        ("optimizer_exact", RESULTS, "unequal", 1, {"size": "small"}),
        ("moments_rounding", RESULTS, "v_stochastic", 0.3, {}),
        ("power", STEPS, "power_w", 400, {"optimization": "bf16_moments"}),
        ("power", STEPS, "sm_clock_mhz", 1980, {"optimization": "bf16_moments"}),
        (
            "own_remains",
            STEPS,
            "gpu_ms",
            6.4,
            {"optimization": "bf16_moments", "size": "small", "context_length": 512},
        ),
        ("rung_context", STEPS, "gpu_ms", 8, {"context_length": 1024, "optimization": "bf16_weights"}),
    ],
)
def test_a_claim_that_does_not_hold_is_not_said(campaign, claim, name, column, value, which):
    rows = campaign[name]
    at = np.logical_and.reduce([rows.index >= 0, *(rows[field] == wanted for field, wanted in which.items())])
    assert at.any()
    rows.loc[at, [column, *SPREAD] if column == "wall_ms" else column] = value
    assert collect("claim")[claim](campaign) is None


def test_what_is_slower_is_told_as_such(complete):
    """FP8 at more tokens, a step without a change, bf16 moments and the chunked loss, the other way round."""
    steps = complete["ladder.steps"]
    for change, where, gpu in (
        ("fp8", "batch_size == 16 and size == 'small'", 46),
        ("bf16_moments", "size == '2.7B' and batch_size == 4", 190.2),
        ("without_blocks", "size == '2.7B'", 95.1),
    ):
        steps.loc[steps.eval(where) & (steps["optimization"] == change), ["gpu_ms", "wall_ms"]] = gpu
    assert tables.which_at_tokens(complete).loc["FP8 matmuls", "small, 8,192"] == pytest.approx(0.5)
    assert tables.which_optimization(complete).loc["bf16 moments", "2.7B"] == pytest.approx(0.5)
    assert tables.which_without(complete).loc["compiled blocks", "2.7B 512"] == pytest.approx(0.5)
    assert (
        claims.headline(complete)["speedup"] == pytest.approx(1092 / 190.2)
        and claims.without_most(complete) is None
    )
    assert "about as long" in claims.chunked_memory(complete)["cost"]
    steps.loc[steps["optimization"] == "chunked", "wall_ms"] *= 1.5
    assert "52%" in claims.chunked_memory(complete)["cost"]


def test_of_two_spreads_the_larger_decides(campaign):
    """A quiet step beside a disturbed one, whichever of the two that is."""
    steps = campaign["ladder.steps"]
    quiet = steps.assign(wall_q1_ms=steps["wall_ms"], wall_q3_ms=steps["wall_ms"])
    for change, other in (("cuda_graph", "blocks"), ("blocks", "cuda_graph")):
        both = quiet.assign(busy=0.99)
        both.loc[both["optimization"] == change, "wall_q3_ms"] += 100.0
        assert (
            ladder_rows.gain(ladder_rows.smallest_ladder({"ladder.steps": both})[1], "cuda_graph") is None
        ), other
    for change in ("fp8", "bf16_moments"):
        both = quiet.copy()
        both.loc[both["optimization"] == change, "wall_q3_ms"] += 150.0
        assert rows_fp8.by_batch({"ladder.steps": both})["clear"].sum() == 0
    worse = quiet.copy()
    worse.loc[worse["optimization"] == "fp8", "wall_ms"] *= 3
    assert not rows_fp8.by_batch({"ladder.steps": worse})["clear"].any(), "less GPU time, more wall time"


def test_each_columns_numbers_are_those_of_its_step(campaign):
    """Of bf16 and FP8, of ours and the baseline, where no two numbers are alike."""
    steps = campaign["ladder.steps"]
    columns = ["sm_clock_mhz", "steps", "peak_gib", "reserved_gib"]
    for at, column in enumerate(columns):
        steps[column] = np.arange(len(steps)) / 1e6 + 1000 * (at + 1)
    own = steps[(steps["size"] == "2.7B") & (steps["batch_size"] == 4)].set_index("optimization")
    batch = rows_fp8.by_batch(campaign).set_index("batch_size").loc[4]
    base = ladder_rows.with_baseline(campaign).set_index(["size", "context_length"]).loc[("2.7B", 512)]
    told = [
        (batch, "bf16", RUNGS[-1]),
        (batch, "fp8", "fp8"),
        (base, "ours", RUNGS[-1]),
        (base, "fp32", "cuda_graph"),
        (base, "baseline", base["baseline"]),
    ]
    for row, name, change in told:
        found = [row[f"{name}_{short}"] for short in ("ms", "clock", "steps")]
        assert found == own.loc[change, ["wall_ms", *columns[:2]]].tolist(), name
        assert row[f"{name}_quartiles"] == quartiles(own.loc[[change]]).item(), name
    assert base["same_faster"] == pytest.approx(113 / 109) and base["faster"] == pytest.approx(113 / 89.6)
    memory = tables.ladder_memory(campaign)["2.7B 512, GiB"].dropna()
    assert memory.str.match(r"3,?0\d\d/4,?0\d\d").all()
    off = tables.training_check(campaign)
    _, seeds = ladder_rows.loss_shift(ladder_rows.trained(campaign)[1])
    assert off["of another seed, %"].to_numpy() == pytest.approx(off["loss moved"].to_numpy() / seeds)


def test_what_other_records_would_say(complete):
    """Claims of which these rows have not the kernels, steps or modes, with them."""
    steps, kernels = complete["ladder.steps"], complete["ladder.kernels"]
    chosen = kernels.assign(optimization="sdpa")
    assert claims.attention_chosen({"ladder.kernels": chosen}) == {}
    one = chosen.assign(name=chosen["name"].where(chosen["size"] == "small", "flash"))
    assert claims.attention_chosen({"ladder.kernels": one}) is None
    (
        steps.loc[steps["optimization"] == "fp32", "steps"],
        steps.loc[steps["optimization"] == "tf32", "steps"],
    ) = 3, 2
    steps.loc[steps["optimization"] == "tf32", "wall_std_ms"] *= 5
    few = claims.few_steps(complete)
    assert (few["few"], few["all"]) == (7, len(steps)) and (few["median"], few["most"]) == pytest.approx(
        (0.01, 0.05)
    )
    steps.loc[steps["optimization"] == "fused", "steps"] = 9
    start = claims.first_from(complete)
    assert (start["least"], start["most"]) == (4, 9) and start["gpu"] == pytest.approx(148 / 89.6)
    assert start["left"] == pytest.approx(149 / 89.6)


def test_of_one_size_nothing_is_compared(campaign):
    alone = campaign | {"ladder.steps": campaign["ladder.steps"].query("size == 'small'")}
    assert claims.rung_graph(alone) is claims.graph_large(alone) is None


def test_figures_say_what_is_so(campaign):
    steps, curves = campaign["ladder.steps"], campaign["ladder.curves"]
    steps.loc[steps["optimization"] == "fp8", ["wall_ms", "gpu_ms"]] *= 1.5
    curves.loc[curves["optimization"] == "bf16_moments", "loss"] += 0.5
    assert figures.fp8(campaign).message.startswith("FP8 matmuls clearly pay for no size")
    assert figures.ladder_training(campaign).message == "How far each change moves the loss"
    assert tables.training_check(campaign)["of another seed, %"].max() > 1
    campaign["ladder.steps"] = steps[~steps["optimization"].isin(AS_IT_COMES)]
    with pytest.raises(LookupError):
        tables.baselines(campaign)


def test_a_ladder_that_ended_early_is_still_shown(campaign):
    """Of a CPU: no TF32, no CUDA graph, no energy, one size."""
    steps = campaign["ladder.steps"]
    own = steps[
        (steps["size"] == "small") & (steps["context_length"] == 512) & (steps["vocab_size"] == 10_000)
    ]
    own = own[~own["optimization"].isin(AS_IT_COMES)].copy()
    lacks = own["optimization"].isin(["tf32", "cuda_graph"])
    own.loc[lacks, "status"] = "unsupported"
    own.loc[lacks, [*tables.MEASURES, *tables.ADDED]] = np.nan
    own[["step_j", "power_w", "sm_clock_mhz", "mfu"]] = np.nan
    alone = {"ladder.steps": own, "runs": campaign["runs"]}
    assert len(tables.ladder_steps(alone)) == 7 and "MFU, %" not in tables.mfu(alone)
    assert list(tables.fast_step(alone).columns) == [
        "small, ms",
        "quartiles of small, ms",
        "small at best, ms",
    ]
    assert tables.which_optimization(alone).loc["bf16 autocast", "small"] == pytest.approx(55.9 / 22)
    assert "small" in figures.ladder(alone).message


def test_schemas_hold_what_is_written(campaign):
    for name, schema in tables.SCHEMAS.items():
        frame = campaign[f"ladder.{name}"].drop(columns=[*tables.CONFIG, "run_id"], errors="ignore")
        for _, own in frame.groupby([campaign[f"ladder.{name}"][column] for column in tables.CONFIG]):
            schema.validate(own)
        assert not campaign[f"ladder.{name}"].duplicated([*tables.CONFIG, *tables.SCHEMAS[name].unique]).any()
        assert all(column.required for column in schema.columns.values()), name
