"""The compile study: what is compiled, timed and counted on a CPU; its facts, on times made for them."""

import re
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
import torch

from conftest import TINY, record_of
from stepscope.config import PHASES, ConfigError, configure
from stepscope.runs.store import Store
from stepscope.runs.tables import write_table
from stepscope.say.chapter import answer
from stepscope.studies.compile import facts, facts_kernels, facts_launches, figures, pairs, printed
from stepscope.studies.compile import measure as compiled
from stepscope.studies.compile.chapter import CHAPTER
from stepscope.studies.compile.tables import PART, all_kernels, all_times, at_a_glance, variant_times
from stepscope.traces.attention_kernels import sdpa_taken
from stepscope.traces.families import families

COMPILE = TINY | {"warmup_steps": 1, "timed_steps": 3}
TURNS = {"turns": 2, "captured_steps": 2}
QUESTIONS = {question.key: question for question in CHAPTER.questions}


def answered(key, times, kernels=None):
    tables = {"compile.times": times, "compile.kernels": gpu_kernels(times) if kernels is None else kernels,
              "processes.spread": pd.DataFrame()}
    return answer(CHAPTER, QUESTIONS[key], tables)


def texts(key, *tables):
    return {answered(key, table).text for table in tables}


# -- what is measured ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    """A run of every attention, variant and mode. Graphs are captured and differentiated as ever; turning
    them into C++, most of the seconds, is left out where torch can leave it out."""
    set_backend = getattr(torch.compiler, "set_default_backend", lambda backend: None)
    set_backend("aot_eager")
    config = configure("compile", **COMPILE, **TURNS)
    tables = compiled.measure_variants(config)
    set_backend(None)
    tables["ceilings"] = pd.DataFrame(
        {"ceiling": ["matmul_fp32"], "value": [0.1], "unit": "TFLOP/s", "time_ms": 1.0}
    )
    return config, tables


@pytest.fixture(scope="module")
def cpu_times(cpu_tables):
    return cpu_tables["times"]


@pytest.fixture(scope="module")
def cpu_tables(run, tmp_path_factory):
    """The study's tables of a store with that run."""
    config, tables = run
    store = Store(tmp_path_factory.mktemp("runs"))
    with store.writing():
        folder = store.begin(config)
        written = {name: write_table(folder, name, table) for name, table in tables.items()}
        store.commit(folder, record_of(config, tables=written))
    records = store.records()[0]
    return {"times": all_times(store, records), "kernels": all_kernels(store, records)}


def test_both_attentions_run_in_one_process_training_first(run):
    rows = run[1]["variants"]
    assert [tuple(row) for row in rows[PART].to_numpy()] == [
        (a, v, m)
        for a in ("eager", "sdpa")
        for m in ("forward_backward", "step", "forward")
        for v in ("eager", "block")
    ]
    assert set(rows["status"]) == {"ok"} and set(run[1]["samples"]["attention"]) == {"eager", "sdpa"}


def test_blocks_share_one_compiled_graph_with_gradients_and_one_without(run):
    rows = run[1]["variants"].set_index(PART).sort_index()
    for attention in ("eager", "sdpa"):
        assert rows.loc[(attention, "block"), "graphs"].to_dict() == {
            "forward_backward": 1,
            "step": 0,
            "forward": 1,
        }
        assert rows.loc[(attention, "eager"), "graphs"].sum() == 0
    assert rows["graph_breaks"].sum() == 0


def test_compiling_is_in_the_first_step_alone(run):
    config, tables = run
    times = variant_times(tables["samples"], tables["ceilings"], config)
    whole = times[times["phase"] == "step"].set_index(PART)
    assert set(whole.index) == {
        (a, v, m) for a in pairs.ATTENTIONS for v in pairs.VARIANTS for m in compiled.MODES
    }
    for attention in ("eager", "sdpa"):
        first = whole.loc[attention, "block", "forward_backward"]
        assert first["first_ms"] > 10 * first["median_ms"]
    said = compiled.reading(times)
    assert said.count("SDPA") == len(compiled.MODES) == said.count("fastest") <= 3
    slow = times.assign(median_ms=times["median_ms"].where(times["variant"] == "eager", 1e6))
    assert "compiled" not in compiled.reading(slow)  # of variants the fastest is named


TAKEN = {
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0": "cuDNN",
    "fmha_cutlassB_f32_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<float>::Params)":
        "memory-efficient",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>(params)":
        "FlashAttention-2",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<(int)2>>>(Params)":
        "FlashAttention-3",
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensorptrbf16":
        "FlashAttention-4",
}


def test_what_sdpa_took_is_told_by_its_kernels():
    for name, expected in TAKEN.items():
        table = pd.DataFrame({"name": ["nvjet_tst_128x256", name]})
        table["family"] = families(table["name"]).astype(str)
        assert sdpa_taken(table) == expected
        assert sdpa_taken(table.iloc[:1]) == "math"
    table = pd.DataFrame({"name": [*TAKEN][1:3], "family": "fused attention"})
    assert sdpa_taken(table) == "memory-efficient and FlashAttention-2"


def test_a_notebooks_table_has_a_row_for_each_whole_step(run):
    config, tables = run
    times = variant_times(tables["samples"], tables["ceilings"], config)
    table = at_a_glance(times)
    assert list(table)[:3] == ["mode", "attention", "variant"] and len(table) == 12
    assert (table.query("variant == 'eager'")["speedup"] == 1).all()
    assert table["first_ms"].gt(table["median_ms"])[table["mode"].eq("forward_backward")
                                                    & table["variant"].eq("block")].all()
    drawn = figures.one_run(times, "here")
    assert [len(axis.patches) for axis in drawn.axes] == [4, 4, 4]
    assert figures.one_run(times.iloc[:0], "nothing") is not None


def test_each_attention_is_the_one_that_is_run(monkeypatch):
    called, plain = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **more: called.append(1) or plain(*args, **more),
    )
    for name, expected in (("eager", 0), ("sdpa", 3 * 4 * 2)):  # modes, steps, layers
        compiled.measure_variants(configure("compile", **COMPILE, attentions=[name], variants=["eager"]))
        assert len(called) == expected


def test_nothing_compiled_comes_out_of_a_cache_on_disk(monkeypatch, tmp_path):
    """The same graph three times: without a cache of its own the second is not compiled; with one, the third
    is."""
    from torch._inductor import config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # Scalar code: no program is built to try out the CPU.
    monkeypatch.setattr(inductor.cpp, "vec_isa_ok", False)
    monkeypatch.setattr(compiled, "MODES", ("forward",))
    tiny = COMPILE | {"timed_steps": 1, "attentions": ["sdpa"]}
    with monkeypatch.context() as shared:
        shared.setattr("torch._inductor.utils.fresh_cache", nullcontext)
        config = configure("compile", **tiny, variants=["block"])
        twice = pd.concat([compiled.measure_variants(config)["variants"] for _ in range(2)])
    assert twice["graphs"].tolist() == [1, 1] and [n > 0 for n in twice["cached_graphs"]] == [False, True]
    written = {path for path in tmp_path.rglob("*") if path.is_file()}
    own = compiled.measure_variants(configure("compile", **tiny, variants=["block"]))["variants"]
    assert own["graphs"].tolist() == [1] and own["cached_graphs"].tolist() == [0]
    assert written and written == {path for path in tmp_path.rglob("*") if path.is_file()}


def test_a_variant_that_does_not_fit_is_a_row_and_the_next_is_still_run(monkeypatch):
    config = configure("compile", **COMPILE, attentions=["eager"], variants=["model", "eager"])
    plain = compiled.build_step

    def build(asked):
        build.calls += 1
        if build.calls <= 3:
            raise torch.OutOfMemoryError("while building the model: too large")
        return plain(asked)

    build.calls = 0
    monkeypatch.setattr(compiled, "build_step", build)
    monkeypatch.setattr(compiled, "with_compiled", lambda step, variant: step)  # the next, and not how it is made
    rows = compiled.measure_variants(config)["variants"]
    assert rows["status"].tolist() == ["oom"] * 3 + ["ok"] * 3 and "too large" in rows["reason"][0]
    assert rows["variant"].tolist() == ["model", "eager"] * 3


def test_variants_take_turns_and_every_turn_begins_with_a_step_that_is_not_timed(run):
    tables = run[1]
    for _, rows in tables["samples"].query("phase == 'step'").groupby(PART):
        assert rows["step"].tolist() == list(range(6))
        assert rows["timed"].tolist() == [False, False, True, True, False, True]
    once = configure("compile", **COMPILE, variants=["eager", "model"])
    assert compiled.schedule(once) == [("eager", 1, 3), ("model", 1, 3)]
    with pytest.raises(ConfigError, match="turns"):
        configure("compile", **COMPILE, turns=4)


def test_variants_share_their_parameters_and_no_module():
    step = compiled.build_step(configure("compile", **COMPILE).step(mode="step", attention="sdpa"))
    twin = compiled.twin(step.model)
    tensors, modules = (lambda m: [*m.parameters(), *m.buffers()]), (lambda m: {id(x) for x in m.modules()})
    assert all(a is b for a, b in zip(tensors(step.model), tensors(twin), strict=True))
    assert not modules(step.model) & modules(twin)


def test_kernels_are_captured_after_the_timing_and_say_what_sdpa_took(run, cpu_times):
    tables = run[1]
    counts = tables["kernels"].groupby([*PART[:2], "family"])["count"].sum().unstack("family")
    products, fused = counts["matrix multiply"], counts["fused attention"].dropna()
    assert products["eager", "eager"] == products["eager", "block"] > products["sdpa", "eager"]
    assert fused.index.tolist() == [("sdpa", "block"), ("sdpa", "eager")] and fused.nunique() == 1
    taken = tables["variants"].set_index(PART)["sdpa_taken"].dropna()
    assert set(taken) == {"flash on a CPU"}
    assert {(attention, mode) for attention, _, mode in taken.index} == {("sdpa", "forward_backward")}
    found = facts.taken(cpu_times)
    assert [(one["implementation"], one["precisions"]) for one in found] == [("flash on a CPU", ["fp32"])]
    assert facts.taken(gpu_times()) == []


# -- facts, on times made for the question -------------------------------------------------------------------

PHASE_MS = {"forward": 30.0, "loss": 0.0, "backward": 60.0, "optimizer": 10.0}


def gpu_times(sizes=("small", "large"), variants=("eager", "block"), optimizer="foreach"):
    """Times as an H200 could have left them: forward 30 ms, backward 60, AdamW 10; blocks compiled twice as
    fast, SDPA the same, the whole model at once as blocks; peaks of 8 GiB and,
    compiled, 6."""
    rows = []
    for size, attention, variant, mode in (
        (s, a, v, m) for s in sizes for a in pairs.ATTENTIONS for v in variants for m in compiled.MODES
    ):
        eager = variant == "eager"
        part = {
            "run_id": f"{size}-bf16-{optimizer}",
            "size": size,
            "precision": "bf16",
            "attention": attention,
            "variant": variant,
            "mode": mode,
            "optimizer": optimizer,
            "graphs": int(not eager and mode != "step"),
            "peak_allocated_mib": 8192.0 if eager else 6144.0,
        }
        times = {
            phase: PHASE_MS[phase] if eager or phase == "optimizer" else PHASE_MS[phase] / 2
            for phase in PHASES[mode]
        }
        rows += [
            part | {"phase": phase, "median_ms": ms}
            for phase, ms in (times | {"step": sum(times.values())}).items()
        ]
    times = pd.DataFrame(rows)
    return times.assign(
        status="ok",
        reason="",
        flags="",
        graph_breaks=0,
        cached_graphs=0,
        enqueue_ms=5.0,
        trailing_ms=times["median_ms"] / 2,
        sm_clock_mhz=1980.0,
        cudagraph_skips=0,
        context_length=512,
        batch_size=4,
        device="cuda",
        study="compile",
        beside=0,
        timed_steps=10,
        warmup_steps=5,
        ci_low_ms=times["median_ms"] * 0.99,
        ci_high_ms=times["median_ms"] * 1.01,
        first_ms=times["median_ms"] + np.where(times["graphs"] > 0, 4000.0, 0.0),
    )


KERNELS = {
    "eager": [("nvjet_tst_128x256", 90, 40.0), ("void at::native::vectorized_elementwise_kernel<4>", 600, 30.0),
              ("void at::native::reduce_kernel<512>", 60, 10.0)],
    "block": [("nvjet_tst_128x256", 90, 40.0), ("triton_poi_fused_mul_0", 100, 8.0),
              ("triton_red_fused_mean_1", 10, 2.0)],
}
KERNELS |= {"model": KERNELS["block"], "cuda_graphs": KERNELS["block"]}
FLASH = ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>(Flash_fwd_params)", 12, 5.0)


def gpu_kernels(times):
    """Kernels as captures of such runs could have left them: products untouched, 660 others of 40 ms fused
    into 110 of 10; SDPA's own besides."""
    if times.empty:
        return times
    rows = times.drop_duplicates(["run_id", "attention", "variant"]).to_dict("records")
    table = pd.DataFrame([
        {name: row[name] for name in ("run_id", "attention", "variant")}
        | {"mode": "forward_backward", "name": kernel, "count": count, "total_ms": ms}
        for row in rows
        for kernel, count, ms in KERNELS[row["variant"]] + [FLASH] * (row["attention"] == "sdpa")
    ])
    return table.assign(family=families(table["name"]).astype(str))


def scaled(times, factor, query):
    """The rows of a query so many times as long, intervals too."""
    times = times.copy()
    times.loc[times.query(query).index, ["median_ms", "ci_low_ms", "ci_high_ms"]] *= factor
    return times


def changed(times, query, **columns):
    times = times.copy()
    for column, value in columns.items():
        times.loc[times.query(query).index, column] = value
    return times


def launches(times, kernels=None):
    """Facts of the question, without other studies' tables."""
    return facts_launches.launches(times, pd.DataFrame() if kernels is None else kernels, pd.DataFrame())


def by_mode(gains):
    return {own["mode"]: own for own in gains}


def ways(gain):
    """How many pairs got faster, slower and neither."""
    found = {
        "faster" if way["faster"] else "slower" if way["slower"] else "neither": way["pairs"]
        for way in gain["ways"]
    }
    return [found.get(way, 0) for way in ("faster", "slower", "neither")]


def test_speedups_are_of_one_process_and_the_best_and_least_are_found():
    times = gpu_times()
    found = facts.whole_model(times)
    gains = by_mode(found["gains"])
    assert all(gain["all_faster"] and gain["pairs"] == 4 for gain in gains.values())
    assert gains["forward"]["ways"][0]["lowest"]["speedup"] == pytest.approx(2)
    assert gains["step"]["ways"][0]["lowest"]["speedup"] == pytest.approx(100 / 55)
    assert not found["slower"]
    quicker = scaled(times, 0.5, "size == 'large' and variant == 'block' and attention == 'sdpa'")
    (way,) = by_mode(facts.whole_model(quicker)["gains"])["step"]["ways"]
    assert (way["lowest"]["times"], way["highest"]["times"]) == pytest.approx((100 / 55, 200 / 55))


def test_what_compiling_slows_down_is_told():
    times = gpu_times()
    some = scaled(times, 4, "variant == 'block' and size == 'small' and attention == 'eager'")
    found = facts.whole_model(some)
    assert all(ways(gain) == [3, 1, 0] and not gain["all_faster"] for gain in found["gains"])
    assert {(pair["size"], pair["attention"]) for pair in found["slower"]} == {("small", "eager")}
    slow = scaled(times, 4, "variant == 'block'")
    (way,) = by_mode(facts.whole_model(slow)["gains"])["step"]["ways"]
    assert way["slower"] and way["lowest"]["times"] == pytest.approx(220 / 100) and way["highest"] is None
    assert len(texts("compile-model", times, some, slow)) == 3


def test_a_change_within_the_intervals_is_none():
    times = scaled(
        gpu_times(sizes=["small"]), 1.8, "variant == 'block' and phase == 'step' and mode == 'step'"
    )
    found = facts.whole_model(times)
    assert ways(by_mode(found["gains"])["step"]) == [0, 0, 2] and ways(
        by_mode(found["gains"])["forward"]
    ) == [2, 0, 0]
    assert found["marks"]["unchanged"]
    table = printed.times(found)
    assert (
        table["full step"].str.endswith(": not sure").all() and not table["forward"].str.endswith(": not sure").any()
    )
    assert not facts.whole_model(gpu_times())["marks"]["unchanged"]


def test_samples_that_are_not_one_steady_state_are_marked():
    large = "size == 'large' and variant == 'block' and attention == 'sdpa' and mode == phase == 'step'"
    times = changed(gpu_times(), large, flags="noisy: its standard deviation is 9%; drifting: +5.0%")
    found = facts.whole_model(times)
    assert (
        found["marks"]["kinds"] == ["drifting", "noisy"]
        and facts.whole_model(gpu_times())["marks"]["kinds"] == []
    )
    assert printed.times(found)["full step"].str.endswith("†").tolist() == [False, False, False, True]
    steps = printed.steps(facts.sdpa(times))
    assert "†" in steps["compiled"].iloc[1] and "†" not in steps["eager"].iloc[1]
    told = answered("compile-model", scaled(times, 0.9, "flags != ''"))
    assert (
        "†" in told.text and "†" not in answered("compile-model", gpu_times()).text
    )


def test_an_extreme_of_unsteady_samples_is_marked():
    query = "size == 'small' and mode == 'forward' and attention == 'eager'"
    times = scaled(changed(gpu_times(), query, flags="noisy: 9%"), 1.5, f"{query} and variant == 'eager'")
    found = facts.whole_model(times)
    (way,) = by_mode(found["gains"])["forward"]["ways"]
    assert way["highest"]["times"] == pytest.approx(3) and way["highest"]["flagged"]
    assert not way["lowest"]["flagged"] and by_mode(found["gains"])["step"]["ways"][0]["highest"] is None


def test_runs_with_another_optimizer_double_no_row():
    main, fused = gpu_times(), gpu_times(optimizer="fused", sizes=["small"])
    fused = scaled(scaled(fused, 0.5, "phase == 'optimizer'"), 0.9, "phase == 'step' and mode == 'step'")
    both = pd.concat([main, fused], ignore_index=True)
    for key in QUESTIONS:
        alone, beside = answered(key, main), answered(key, both)
        assert alone.tables[0][1].equals(beside.tables[0][1])
        assert (alone.text != beside.text) == (key == "compile-launches")
    found = facts_launches.fused_adamw(both, spread_of(0.001))
    assert [
        (pair["size"], pair["median_ms"], pair["median_ms_after"]) for pair in found["sure"]
    ] == [("small", 55, pytest.approx(49.5))] * 2
    assert printed.fused({"fused": found})["AdamW"].tolist() == ["10.0 → 5.00"] * 2
    level = pd.concat([main, gpu_times(optimizer="fused", sizes=["small"])], ignore_index=True)
    assert not facts_launches.fused_adamw(level, spread_of(0.001))["sure"]
    assert facts_launches.fused_adamw(main, spread_of(0.001)) is None


def spread_of(share):
    """Cells measured in several processes whose medians differ by so much, the host ahead in all of them."""
    return pd.DataFrame([{"size": "xl", "context_length": 512, "mode": mode, "phase": "step",
                          "between_share": share, "host_ahead_share": 0.5} for mode in PHASES])


def test_two_processes_are_told_apart_by_the_spread_between_processes_alone():
    fused = scaled(gpu_times(optimizer="fused", sizes=["small"]), 0.8, "phase == mode == 'step'")
    both = pd.concat([gpu_times(), fused], ignore_index=True)
    near, far, unknown = (facts_launches.fused_adamw(both, spread)
                          for spread in (spread_of(0.01), spread_of(0.5), pd.DataFrame()))
    assert len(near["sure"]) == 2 and not far["sure"] and not unknown["sure"]
    assert near["table"]["low"].iloc[0] > 1 > far["table"]["low"].iloc[0]
    assert far["between_known"] and not unknown["between_known"]
    assert not printed.fused({"fused": unknown})["x faster [95% interval]"].str.contains("[", regex=False).any()
    behind = both.assign(trailing_ms=0.0)  # of that kind no cell was repeated
    assert not facts_launches.fused_adamw(behind, spread_of(0.01))["between_known"]


def test_energy_is_of_full_steps_kept_up():
    of_steps = "mode == 'step' and phase == 'step'"
    times = changed(gpu_times(), of_steps, kept_up_power_w=600.0, kept_up_sm_clock_median_mhz=1980.0)
    times = times.assign(step_energy_j=(times["median_ms"] * 0.6).where(times.eval(of_steps)))
    found = facts.whole_model(times)
    assert len(found["energy"]["pairs"]) == 4 and found["energy"]["all_less"]
    assert found["energy"]["less"].tolist() == pytest.approx([100 / 55] * 4)
    table = printed.energy(found)
    assert table["energy (J)"].iloc[0] == "60.0 → 33.0" and table["power (W)"].iloc[0] == "600 → 600"
    more = scaled(times, 1.0, "mode == 'step'").assign(
        step_energy_j=lambda rows: rows["step_energy_j"].where(rows["variant"] == "eager", 90.0))
    assert not facts.whole_model(more)["energy"]["all_less"]
    assert facts.whole_model(gpu_times())["energy"] is None and printed.energy(facts.whole_model(gpu_times())) is None
    assert len(texts("compile-model", times, more, gpu_times())) == 2


def test_the_busy_share_is_kernels_over_the_time_without_a_profiler():
    times = gpu_times()
    found = facts_launches.busy(times, gpu_kernels(times))
    assert found["table"]["eager"].tolist() == pytest.approx([80 / 90, 85 / 90] * 2)
    assert found["table"]["block"].tolist() == pytest.approx([50 / 45, 55 / 45] * 2)
    assert (found["pairs"], found["lower"], found["higher"]) == (4, 0, 4)
    waits = scaled(times, 3, "variant == 'block' and phase != 'step'")
    lower = facts_launches.busy(waits, gpu_kernels(times))
    assert (lower["lower"], lower["higher"]) == (4, 0)
    assert printed.busy({"busy": lower})["compiled"].tolist() == ["37%", "41%"] * 2
    none = gpu_kernels(times).iloc[:0]
    assert facts_launches.busy(times, none) is None
    answers = {answered("compile-launches", rows, table).text for rows, table in (
        (times, None), (waits, gpu_kernels(times)), (times, none))}
    assert len(answers) == 3


def test_the_optimizers_part_is_of_the_phases_time():
    [found] = launches(gpu_times(sizes=["small"]))["adamw"]
    assert found["share"].tolist() == pytest.approx([0.1] * 2)
    assert found["share_after"].tolist() == pytest.approx([10 / 55] * 2)


def test_what_is_fused_is_told_apart_from_products_and_attention():
    times = changed(gpu_times(), "variant == 'eager'", saved_mib=4096.0)
    times = changed(times, "variant == 'block'", saved_mib=2048.0)
    found = facts_kernels.why(times, gpu_kernels(times))
    assert set(found["rest_count"]) == {660} and set(found["rest_count_after"]) == {110}
    assert set(found["rest_ratio"]) == {4} and set(found["products"]) == {1} and found["products_alike"]
    assert set(found["pairs"]["saved_ms"]) == {45} and set(found["pairs"]["fused_ms"]) == {30}
    assert set(found["kept"]["ratio"]) == {2} and found["kept"]["most"]["saved_gib"] == 4
    assert (found["fewer"]["saved_ms"], found["fewer"]["kernels_ms"]) == (45, 30)  # 15 ms of launches
    kernels = gpu_kernels(times)
    rest = (kernels["variant"] == "eager") & (kernels["count"] == 600)
    long = kernels.assign(total_ms=kernels["total_ms"] + 15 * rest)
    assert facts_kernels.why(times, long)["fewer"] is None  # all that is saved is kernels'
    table = printed.kernels(found)
    assert table["fused attention"].tolist() == ["–", "–", "12: 5.00 ms", "12: 5.00 ms"] * 2
    assert table["all else"].tolist() == ["660: 40.0 ms", "110: 10.0 ms"] * 4
    assert table["kept for backward (GiB)"].tolist() == ["4.00", "2.00"] * 4
    slower = gpu_kernels(times)
    slower.loc[(slower["variant"] == "block") & (slower["family"] == "matrix multiply"), "total_ms"] *= 2
    assert not facts_kernels.why(times, slower)["products_alike"]
    unknown = facts_kernels.why(gpu_times(), gpu_kernels(gpu_times()))
    assert unknown["kept"] is None and "kept for backward (GiB)" not in printed.kernels(unknown)
    answers = {answered("compile-why", times, kernels).text for kernels in (gpu_kernels(times), slower)}
    assert len(answers | texts("compile-why", gpu_times())) == 3
    assert facts_kernels.why(gpu_times(variants=["block"]), gpu_kernels(gpu_times(variants=["block"]))) is None


def test_cuda_graphs_are_beside_the_same_graph_without_them():
    times = gpu_times(variants=("eager", "block", "model", "cuda_graphs"))
    quick = scaled(times, 0.5, "variant == 'cuda_graphs'")
    found = launches(quick)["graphed"]
    assert all(gain["all_faster"] for gain in found["gains"]) and found["skips"] == 0
    assert by_mode(found["eager"])["step"]["ways"][0]["lowest"]["speedup"] == pytest.approx(200 / 55)
    skipped = changed(quick, "variant == 'cuda_graphs' and mode == 'forward'", cudagraph_skips=1)
    assert launches(skipped)["graphed"]["skips"] == 4
    assert launches(gpu_times())["graphed"] is None
    assert len(texts("compile-launches", times, quick, skipped, gpu_times())) == 4
    for key in set(QUESTIONS) - {"compile-launches", "compile-cost", "compile-why"}:
        assert answered(key, quick).tables[0][1].equals(answered(key, gpu_times()).tables[0][1])


def test_pairs_at_unlike_clocks_have_them_beside_their_ratio():
    query = "variant == 'block' and size == 'large' and attention == 'eager' and mode == 'step'"
    times = changed(gpu_times(), query, sm_clock_mhz=1702.0)
    found = facts.whole_model(times)
    assert found["marks"]["unlike"] == 1 and facts.whole_model(gpu_times())["marks"]["unlike"] == 0
    cells = printed.times(found)["full step"]
    assert cells.str.endswith("(1,980, 1,702 MHz)").tolist() == [False, False, True, False]
    assert found["marks"]["capped"] is None
    held = changed(changed(times, "run_id != ''", power_capped_s=0.0, watched_s=2.0), query, power_capped_s=1.5)
    assert facts.whole_model(held)["marks"]["capped"].tolist() == [0.75]
    assert facts.whole_model(held.assign(watched_s=1.0))["marks"]["capped"].tolist() == [1.0]
    assert found["marks"]["faster_lower"]
    slower = facts.whole_model(scaled(times, 9, query))["marks"]
    assert slower["unlike"] == 1 and not slower["faster_lower"]
    assert found["timed"]["none"] and facts.whole_model(times.assign(turns=2))["timed"]["all"]
    assert len(texts("compile-model", times, held)) == 2
    assert len(texts("compile-model", times, gpu_times())) == 2


def test_peaks_follow_the_data():
    times = gpu_times()
    found = facts.peak_memory(times)
    assert (
        found["backward"]["lower_percent"].tolist() == [25] * 4
        and found["backward"]["alike"]
        and not found["more"]
    )
    table = printed.peaks(found)
    assert table["forward + backward"].tolist() == ["8.00 → 6.00: -25%"] * 4
    assert "forward" not in table  # that mode's peak has AdamW's moments in it
    more = changed(times, "variant == 'block' and size == 'large'", peak_allocated_mib=10240.0)
    found = facts.peak_memory(more)
    assert found["backward"] is None and {pair["size"] for pair in found["more"]} == {"large"}
    assert not found["by_mode"][0]["alike"]
    none = times.drop(columns="peak_allocated_mib")
    assert not facts.peak_memory(none)["measured"] and len(texts("compile-memory", times, more, none)) == 3


def test_the_first_to_be_compiled_is_kept_apart():
    times = changed(
        gpu_times(),
        "variant == 'block' and attention == 'eager' and mode == 'forward_backward'",
        first_ms=12045.0,
    )
    assert facts_launches.compile_seconds(times)["first"].tolist() == [True, False] * 2
    found = facts_launches.cost(times)
    first, later = found["blocks"]
    assert first["first"] and first["attentions"] == ["eager"] and first["training_s"].tolist() == [12] * 2
    assert not later["first"] and later["attentions"] == ["sdpa"] and later["training_s"].tolist() == [4] * 2
    assert found["neighbours"] is None and found["cached"] == found["breaks"] == 0 and found["two_graphs"]
    busy = changed(times, "size == 'small'", beside=1)
    assert facts_launches.cost(busy)["neighbours"] == {"runs": 2, "beside": 1, "each": False}
    cached = changed(
        times,
        "variant == 'block' and attention == 'eager' and mode == 'forward' and phase == 'step'",
        cached_graphs=1,
    )
    assert facts_launches.cost(cached)["cached"] == 2
    third = changed(times, "variant == 'block' and mode == 'step'", graphs=1)
    assert not facts_launches.cost(third)["two_graphs"] and set(facts_launches.cost(third)["graphs"]) == {3}
    assert len(texts("compile-cost", times, busy, cached, third)) == 4


def test_the_whole_forward_at_once_is_beside_blocks_in_every_mode():
    times = gpu_times(variants=("eager", "block", "model"))
    same = facts_launches.cost(times)["whole"]
    assert [ways(gain) for gain in same["gains"]] == [[0, 0, 4]] * 3 and not same["better"]
    mixed = scaled(
        scaled(times, 0.5, "variant == 'model' and mode == 'step'"),
        2,
        "variant == 'model' and mode == 'forward_backward'",
    )
    found = facts_launches.cost(mixed)["whole"]
    gains = by_mode(found["gains"])
    assert ways(gains["forward_backward"]) == [0, 4, 0] and gains["step"]["all_faster"]
    assert (
        len(found["better"]) == 4
        and found["compiling_ratio"].tolist() == pytest.approx([1] * 2, rel=0.1)
    )
    assert printed.whole({"whole": found})["full step"].iloc[0] == "55.0 → 27.5: 2.00x faster"
    assert (
        facts_launches.cost(gpu_times())["whole"] is None
        and len(answered("compile-cost", gpu_times()).tables) == 1
    )
    assert len(texts("compile-cost", times, mixed, gpu_times())) == 3


def test_sdpa_is_compared_by_variant_and_with_both_changes():
    quick = scaled(gpu_times(), 0.8, "attention == 'sdpa'")
    found = facts.sdpa(quick)
    assert [own["variant"] for own in found["by_variant"]] == ["eager", "block"]
    assert all(own["ways"][0]["lowest"]["speedup"] == pytest.approx(1.25) for own in found["by_variant"])
    assert found["together"]["ways"][0]["lowest"]["speedup"] == pytest.approx(100 / 44) and not found["losses"]
    slow = scaled(gpu_times(), 1.25, "attention == 'sdpa' and variant == 'block'")
    found = facts.sdpa(slow)
    assert len(found["losses"]) == 6 and {pair["slowdown"] for pair in found["losses"]} == {1.25}
    assert {pair["variant"] for pair in found["losses"]} == {"block"}
    assert len(texts("compile-sdpa", quick, slow)) == 2


def test_what_did_not_fit_is_named_and_the_rest_is_answered():
    times = gpu_times()
    rows = times.query("size == 'large' and variant == 'block'").index
    gone = times.drop(times.loc[rows].query("phase != 'step'").index)
    rows = rows.intersection(gone.index)
    gone.loc[
        rows,
        [
            "median_ms",
            "ci_low_ms",
            "ci_high_ms",
            "first_ms",
            "flags",
            "peak_allocated_mib",
        ],
    ] = np.nan
    gone.loc[rows, "status"] = "oom"
    found = facts.whole_model(gone)
    assert len(found["out_of_memory"]) == 6 and not found["not_compiled"] and len(printed.times(found)) == 2
    assert {(run["size"], run["variant"]) for run in found["out_of_memory"]} == {("large", "block")}
    assert not facts.whole_model(times)["out_of_memory"]
    assert all(not re.search(r"\bnan\b", answered(key, gone).text) for key in QUESTIONS)
    nothing = facts.whole_model(gone.loc[rows])
    assert nothing["pairs"] is None and len(nothing["out_of_memory"]) == 6
    answer = answered("compile-model", gone.loc[rows])
    assert answer.runs and not answer.tables and not answer.figures


def test_without_data_there_are_no_facts():
    assert len({answered(key, pd.DataFrame()).text for key in QUESTIONS}) == 1
    compiled_alone = gpu_times().query("variant == 'block'")
    assert facts.whole_model(compiled_alone) is None and launches(compiled_alone) is None
    assert facts.peak_memory(compiled_alone) is None
    assert facts_launches.cost(gpu_times().query("variant == 'eager'")) is None
    assert facts.sdpa(gpu_times().query("attention == 'sdpa'")) is None


def test_a_cpus_tables_are_answered_and_drawn(cpu_tables):
    cpu_times = cpu_tables["times"]
    for key in QUESTIONS:
        found = answered(key, cpu_times, cpu_tables["kernels"])
        assert found.runs and not re.search(r"\bnan\b", found.text)
        assert all(len(table) and not table.isna().any().any() for _, table in found.tables)
    found = launches(cpu_times, cpu_tables["kernels"])
    assert not found["on_gpu"] and found["busy"] is None and found["adamw"]
    assert not facts.peak_memory(cpu_times)["measured"]
