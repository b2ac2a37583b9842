"""The compile study: what is compiled, timed and counted, on a CPU; the answers on data made for the sentence."""
import re
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import record_of
from stepscope.studies.compile import measure as compiled
from stepscope.studies.compile import answers as answers
from stepscope.config import PHASES, configure
from stepscope.studies.attention import figures as figures
from stepscope.runs.tables import write_table

COMPILE = {"device": "cpu", "size": "nano", "vocab_size": 50, "context_length": 8, "batch_size": 1, "warmup_steps": 1, "timed_steps": 3}


@pytest.fixture(scope="module")
def variants():
    config = configure("compile", **COMPILE)
    tables = compiled.measure_variants(config)
    tables["ceilings"] = pd.DataFrame({"ceiling": ["matmul_fp32"], "value": [0.1], "unit": "TFLOP/s", "time_ms": 1.0})
    return config, tables


def test_both_attentions_run_in_one_process_training_first(variants):
    rows = variants[1]["variants"]
    assert [tuple(row) for row in rows[compiled.PART].to_numpy()] == [
        (a, v, m) for a in ("eager", "sdpa") for v in ("eager", "block") for m in ("forward_backward", "step", "forward")]
    assert set(rows["status"]) == {"ok"} and set(variants[1]["samples"]["attention"]) == {"eager", "sdpa"}


def test_blocks_share_one_compiled_graph_with_gradients_and_one_without(variants):
    rows = variants[1]["variants"].set_index(compiled.PART).sort_index()
    for attention_kind in ("eager", "sdpa"):
        assert rows.loc[(attention_kind, "block"), "graphs"].to_dict() == {"forward_backward": 1, "step": 0, "forward": 1}
        assert rows.loc[(attention_kind, "eager"), "graphs"].sum() == 0
    assert rows["graph_breaks"].sum() == 0


def test_each_attention_is_the_one_that_is_run(monkeypatch):
    called, plain = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *args, **more: called.append(1) or plain(*args, **more))
    for name, expected in (("eager", 0), ("sdpa", 3 * 4 * 2)):  # modes, steps, layers
        compiled.measure_variants(configure("compile", **COMPILE, attentions=[name], variants=["eager"]))
        assert len(called) == expected


def test_nothing_compiled_comes_out_of_a_cache_on_disk(variants, monkeypatch, tmp_path):
    """The same graph twice: the second is compiled again; without the caches of their own it would not be."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert (variants[1]["variants"]["cached_graphs"] == 0).all()
    config = configure("compile", **COMPILE, attentions=["sdpa"], variants=["block", "block"])
    assert (compiled.measure_variants(config)["variants"]["cached_graphs"] == 0).all()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("torch._inductor.utils.fresh_cache", nullcontext)
    shared = compiled.measure_variants(config)["variants"]["cached_graphs"].tolist()
    assert shared[:3] == [0, 0, 0] and shared[3] > 0 and shared[5] > 0 and list(tmp_path.iterdir())


def test_compiling_is_in_the_first_step_alone(variants):
    times = compiled.variant_times(variants[1]["samples"], variants[1]["ceilings"], variants[0])
    whole = times[times["phase"] == "step"].set_index(["attention", "variant", "mode"])
    assert set(whole.index) == {(a, v, m) for a in ("eager", "sdpa") for v in ("eager", "block") for m in compiled.MODES}
    for attention_kind in ("eager", "sdpa"):
        first = whole.loc[attention_kind, "block", "forward_backward"]
        assert first["first_ms"] > 10 * first["median_ms"]
    assert "block with sdpa attention **" in compiled.reading(times)


def test_a_variant_that_does_not_fit_is_a_row_and_the_next_is_still_run(tiny, monkeypatch):
    config = configure("compile", device="cpu", size="nano", vocab_size=50, context_length=8, batch_size=1, warmup_steps=0,
                       timed_steps=1, attentions=["eager"],
                       variants=["model", "eager"])
    plain = compiled.build_step

    def build(asked):
        build.calls += 1
        if build.calls <= 3:
            raise torch.OutOfMemoryError("while building the model: too large")
        return plain(asked)
    build.calls = 0
    monkeypatch.setattr(compiled, "build_step", build)
    rows = compiled.measure_variants(config)["variants"]
    assert rows["status"].tolist() == ["oom"] * 3 + ["ok"] * 3 and "too large" in rows["reason"][0]


@pytest.fixture
def model_times(variants, store):
    """The tidy table of a store with that run."""
    config, tables = variants
    with store.writing():
        folder = store.begin(config)
        record = record_of(config, tables={name: write_table(folder, name, table) for name, table in tables.items()})
        store.commit(folder, record)
    return compiled.all_times(store, store.records()[0])


# -- answers, on data made for the sentence ----------------------------------------------------------------------------

def gpu_times(sizes=("small", "large"), precisions=("bf16",), variants=("eager", "block"), optimizer="foreach"):
    """Times as an H200 could have left them: forward 30 ms, backward 60, AdamW 10; blocks compiled twice as fast, SDPA the
    same, the whole model at once as blocks; nothing launch-bound; peaks of 8 GiB and, compiled, 6."""
    rows = []
    for size in sizes:
        for precision in precisions:
            run = f"{size}-{precision}-{optimizer}"
            for attention in ("eager", "sdpa"):
                for variant in variants:
                    for mode in compiled.MODES:
                        part = {"run_id": run, "size": size, "precision": precision, "attention": attention, "variant": variant,
                                "mode": mode, "optimizer": optimizer, "graphs": int(variant != "eager" and mode != "step"),
                                "peak_allocated_mib": 8192.0 if variant == "eager" else 6144.0}
                        times = {phase: {"forward": 30.0, "loss": 0.0, "backward": 60.0, "optimizer": 10.0}[phase] for phase in PHASES[mode]}
                        times = {phase: ms / (2 if variant != "eager" and phase != "optimizer" else 1) for phase, ms in times.items()}
                        rows += [part | {"phase": phase, "median_ms": ms} for phase, ms in (times | {"step": sum(times.values())}).items()]
    times = pd.DataFrame(rows).assign(status="ok", reason="", flags="", graph_breaks=0, cached_graphs=0, launch_bound_share=0.0,
                                      enqueue_ms=5.0, context_length=512, batch_size=4, device="cuda", study="compile", beside=0,
                                      timed_steps=10, warmup_steps=5)
    return with_intervals(times.assign(first_ms=times["median_ms"] + np.where(times["graphs"] > 0, 4000.0, 0.0)))


def with_intervals(times):
    return times.assign(ci_low_ms=times["median_ms"] * 0.99, ci_high_ms=times["median_ms"] * 1.01)


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


EVERY = [answers.whole_model, answers.launches, answers.peak_memory, answers.cost, answers.sdpa]


def test_speedups_are_of_one_process_and_the_best_and_least_are_named():
    times = gpu_times()
    answer = answers.whole_model(times)
    assert "measured in one process" in answer.text and "full step, 1.82 times as fast" in answer.text
    assert answer.numbers["forward_backward_high"] == pytest.approx(2)
    assert "Slower" not in answer.text and "no change" not in answer.text and "†" not in answer.tables[0][0]
    quicker = answers.whole_model(scaled(times, 0.5, "size == 'large' and variant == 'block' and attention == 'sdpa'"))
    assert "most for large in bf16 with SDPA: 100 ms to 27.5 ms." in quicker.finding
    slower = answers.whole_model(scaled(times, 4, "variant == 'block' and size == 'small' and mode == 'forward'"))
    assert "Slower: small in bf16 with written-out attention (forward, 0.500) and small in bf16 with SDPA (forward, 0.500)." in slower.text
    assert not answers.whole_model(scaled(times, 4, "variant == 'block'")).finding
    some = answers.whole_model(scaled(times, 4, "variant == 'block' and size == 'small' and attention == 'eager'"))
    assert "full step, of 4 pairs faster in 3 (1.82 times as fast) and slower in 1 (0.455 times as fast)." in some.text


def test_a_change_within_the_intervals_is_none():
    times = scaled(gpu_times(sizes=["small"]), 1.8, "variant == 'block' and phase == 'step' and mode == 'step'")
    answer = answers.whole_model(times)
    assert "full step, of 2 pairs no change in 2." in answer.text and not answer.finding
    assert answer.tables[0][1]["full step"].tolist() == ["100 to 99.0: none"] * 2 and "intervals overlap" in answer.tables[0][0]
    assert answer.tables[0][1]["forward"].tolist() == ["30.0 to 15.0: 2.00"] * 2


def test_samples_that_are_not_one_steady_state_are_marked():
    times = changed(gpu_times(), "size == 'large' and variant == 'block' and mode == 'step' and attention == 'sdpa' and phase == 'step'",
                    flags="noisy: standard deviation is 9% of the mean; drifting: +5.0% from first to last sample")
    caption, table = answers.whole_model(times).tables[0]
    assert "†: samples of a side are drifting or noisy" in caption
    assert table["full step"].str.contains("†").tolist() == [False, False, False, True]
    best = answers.whole_model(scaled(times, 0.9, "flags != ''"))
    assert "100 ms to 49.5 ms (samples not steady)." in best.finding and "† marks a pair" in best.text
    assert "†" not in answers.whole_model(gpu_times()).text
    assert "†" in answers.sdpa(times).tables[0][1]["compiled"].iloc[1] and "†" not in answers.sdpa(times).tables[0][1]["eager"].iloc[1]


def test_runs_with_another_optimizer_double_no_row():
    main, fused = gpu_times(), scaled(gpu_times(optimizer="fused", sizes=["small"]), 0.5, "phase == 'optimizer'")
    fused = scaled(fused, 0.9, "phase == 'step' and mode == 'step'")
    both = pd.concat([main, fused], ignore_index=True)
    for answer in EVERY:
        alone, beside = answer(main), answer(both)
        assert alone.tables[0][1].equals(beside.tables[0][1]) and alone.numbers == beside.numbers
        assert "fused" not in alone.text and ("fused" in beside.text) == (answer is answers.launches)
    text, (_, table) = answers.launches(both).text, answers.launches(both).tables[1]
    assert "49.5 ms with fused AdamW and 55.0 ms with foreach for small in bf16 with written-out attention" in text
    assert "two processes each" in text and "large in bf16 with" not in text
    assert table["AdamW"].tolist() == ["10.0 to 5.00"] * 2 and table["full step"].tolist() == ["55.0 to 49.5: 1.11"] * 2
    level = pd.concat([main, gpu_times(optimizer="fused", sizes=["small"])], ignore_index=True)
    assert "(no change)" in answers.launches(level).text


def test_launch_bound_shares_that_rise_and_fall_are_told_apart():
    times = gpu_times()
    text = answers.launches(times).text
    assert "lowers the share nowhere" in text and "raises" not in text and "(none of 4 pairs)" in answers.launches(times).finding
    rises = changed(times, "size == 'large' and attention == 'eager' and variant == 'block' and mode == 'forward_backward'",
                    launch_bound_share=0.67)
    answer = answers.launches(rises)
    assert "It raises the share for large in bf16, written-out (0% to 67%): the GPU, with less to do" in answer.text
    assert answer.numbers["forward_backward_rises"] == 1 and "raises that share in 1 of the 4" in answer.finding
    assert answer.tables[0][1]["launch-bound, forward + backward"].tolist() == ["0% to 0%", "0% to 0%", "0% to 67%", "0% to 0%"]
    unsteady = answers.launches(changed(rises, "size == 'large' and mode == 'forward_backward' and phase == 'step'", flags="noisy: std is 9%")).text
    assert "(0% to 67% †)" in unsteady and "with less to do" not in unsteady
    # A share that rises where nothing got faster has no such reason.
    assert "with less to do" not in answers.launches(scaled(rises, 3, "variant == 'block'")).text
    falls = changed(times, "size == 'small' and variant == 'eager' and mode == 'forward_backward'", launch_bound_share=0.9)
    assert "lowers the share for small in bf16, written-out (90% to 0%) and small in bf16, SDPA (90% to 0%)" in answers.launches(falls).text
    stays = changed(changed(times, "size == 'small'", launch_bound_share=1.0), "variant == 'block'", enqueue_ms=3.0)
    assert "on both sides (2 pairs), the host takes 0.600 times as long" in answers.launches(stays).text
    assert "on both sides" not in answers.launches(falls).text


def test_what_only_the_optimizers_growing_part_lowers_is_said():
    """All but AdamW's phase stays launch-bound, so that the full step's share falls by its growing part alone."""
    times = changed(gpu_times(sizes=["small"]), "phase in ('forward', 'loss', 'backward')", launch_bound_share=1.0)
    times = changed(times, "phase == 'step' and mode == 'step' and variant == 'eager'", launch_bound_share=90 / 100)
    times = changed(times, "phase == 'step' and mode == 'step' and variant == 'block'", launch_bound_share=45 / 55)
    answer = answers.launches(times)
    assert "it is 10% of the eager full step and 18% of the compiled one" in answer.text
    assert "falls in none of the 2 in which it falls with it: there AdamW only takes a larger part" in answer.text
    assert answer.tables[0][1]["AdamW's part of the full step"].tolist() == ["10% to 18%"] * 2
    gone = changed(times, "phase == 'step' and mode == 'step' and variant == 'block'", launch_bound_share=0.1)
    assert "falls in 2 of the 2 in which it falls with it." in answers.launches(gone).text
    assert "itself launch-bound in none of 2 eager steps" in answer.text
    assert "itself launch-bound in 2 of 2 eager steps" in answers.launches(changed(times, "phase == 'optimizer'", launch_bound_share=1.0)).text


def test_peaks_follow_the_data():
    times = gpu_times()
    answer = answers.peak_memory(times)
    assert "peaks 25% lower**, most for small in bf16 with written-out attention: 8.00 to 6.00 GiB." in answer.finding
    assert answer.tables[0][1]["forward + backward"].tolist() == ["8.00 to 6.00: -25%"] * 4
    more = answers.peak_memory(changed(times, "variant == 'block' and size == 'large'", peak_allocated_mib=10240.0))
    assert not more.finding and "grows by more than 5% for large in bf16 with written-out attention (forward + backward, 8.00 to 10.0 GiB)" in more.text
    assert "grows" not in answer.text and "forward" not in answer.tables[0][1]  # that mode's peak has AdamW's moments in it
    assert "keeps no peak" in answers.peak_memory(times.drop(columns="peak_allocated_mib")).text


def test_the_first_to_be_compiled_is_kept_apart():
    times = changed(gpu_times(), "variant == 'block' and attention == 'eager' and mode == 'forward_backward'", first_ms=12045.0)
    seconds = answers.compile_seconds(times)
    assert seconds["first"].tolist() == [True, False] * 2
    text = answers.cost(times).text
    assert "12.0 s with written-out attention, which comes first in its process and pays for starting the compiler as well" in text
    assert "4.00 s with SDPA, which comes after something else was compiled" in text
    assert "Beside" not in text and "Beside 1 of 2 runs others went on" in answers.cost(changed(times, "size == 'small'", beside=1)).text
    assert "no graph came out of one" in text and "two graphs" in text and "no graph breaks" in text
    assert "2 graphs came out of one all the same" in answers.cost(changed(
        times, "variant == 'block' and attention == 'eager' and mode == 'forward' and phase == 'step'", cached_graphs=1)).text
    assert "3 graphs, where two are needed" in answers.cost(changed(times, "variant == 'block' and mode == 'step'", graphs=1)).text


def test_the_whole_forward_at_once_is_beside_blocks_in_every_mode():
    times = gpu_times(variants=("eager", "block", "model"))
    same = answers.cost(times)
    assert "forward, of 4 pairs no change in 4; forward + backward, of 4 pairs no change in 4; full step, of 4 pairs no change in 4" in same.text
    mixed = answers.cost(scaled(scaled(times, 0.5, "variant == 'model' and mode == 'step'"), 2, "variant == 'model' and mode == 'forward_backward'"))
    assert "forward + backward, of 4 pairs slower in 4 (0.500 times as fast); full step, 2.00 times as fast." in mixed.text
    assert mixed.tables[1][1]["full step"].iloc[0] == "55.0 to 27.5: 2.00"
    assert "more than 5%" not in same.text
    assert "By more than 5% it makes the full step faster for small in bf16 with written-out attention, small in bf16 with SDPA," in mixed.text
    assert "none of these 4 are mostly launch-bound" in mixed.text
    assert "The whole forward" not in answers.cost(gpu_times()).text and len(answers.cost(gpu_times()).tables) == 1


def test_sdpa_sentences_follow_the_data():
    quick = scaled(gpu_times(), 0.8, "attention == 'sdpa'")
    answer = answers.sdpa(quick)
    assert "The full step with SDPA is: eager, 1.25 times as fast; compiled, 1.25 times as fast." in answer.text and "measured in one process" in answer.text and "slower" not in answer.text
    assert "make a full step 2.27 times as fast**, most for small in bf16: 100 ms to 44.0 ms." in answer.finding
    slow = scaled(gpu_times(), 1.25, "attention == 'sdpa' and variant == 'block'")
    text = answers.sdpa(slow).text
    assert "of 12 pairs slower in 6 (0.800 times as fast) and no change in 6" in text and "It is slower for small in bf16, compiled (forward, 0.800)" in text
    assert "Launches set" not in text
    waiting = changed(changed(slow, "attention == 'sdpa'", enqueue_ms=5.5), "phase == 'step'", launch_bound_share=0.8)
    assert "with SDPA the host takes 1.10 times as long to enqueue them" in answers.sdpa(waiting).text
    assert not answers.sdpa(scaled(slow, 4, "variant == 'block'")).finding


def test_a_loss_in_unsteady_samples_is_no_result_and_its_repetition_is_told():
    query = "size == 'small' and attention == 'sdpa' and variant == 'block' and mode == 'forward' and phase == 'step'"
    unsteady = changed(scaled(gpu_times(), 1.25, query), query, flags="noisy: std is 9%")
    text = answers.sdpa(unsteady).text
    assert "It is slower" not in text and "It measured slower for small in bf16, compiled (forward, 0.800 †), of whose samples one side is not steady." in text
    fused = scaled(gpu_times(sizes=("small",), optimizer="fused"), 0.5, "attention == 'sdpa'")
    assert "with fused AdamW, which is not in this mode: 2.00 times as fast" in answers.sdpa(pd.concat([unsteady, fused], ignore_index=True)).text


def test_an_extreme_of_unsteady_samples_is_marked():
    times = changed(gpu_times(), "size == 'small' and mode == 'forward' and attention == 'eager'", flags="noisy: std is 9%")
    text = answers.whole_model(scaled(times, 1.5, "size == 'small' and variant == 'eager' and mode == 'forward' and attention == 'eager'")).text
    assert "forward, 2.00 to 3.00 † times as fast" in text and "† marks a pair" in text and "median of 10 steps after 5 of warm-up" in text


def test_what_did_not_fit_is_named_and_the_rest_is_answered():
    times = gpu_times()
    rows = times.query("size == 'large' and variant == 'block'").index
    gone = times.drop(times.loc[rows].query("phase != 'step'").index)
    rows = rows.intersection(gone.index)
    gone.loc[rows, ["median_ms", "ci_low_ms", "ci_high_ms", "first_ms", "launch_bound_share", "flags", "peak_allocated_mib"]] = np.nan
    gone.loc[rows, "status"] = "oom"
    answer = answers.whole_model(gone)
    assert "Out of memory: large in bf16 with written-out attention (forward + backward, compiled)" in answer.text
    assert len(answer.tables[0][1]) == 2 and "Out of memory" not in answers.whole_model(times).text
    assert all(not re.search(r"\bnan\b", answer(gone).text) for answer in EVERY) and figures.whole_model(gone, "here") is not None
    assert answers.whole_model(gone.loc[rows]).text.startswith("Nothing can be compared. Out of memory")


def test_without_data_every_question_says_so():
    for answer in EVERY:
        assert answer(pd.DataFrame()).text.startswith("Not answered here")
    assert figures.whole_model(pd.DataFrame(), "here") is None and figures.whole_model(gpu_times().query("variant == 'block'"), "here") is None


def test_a_cpus_tables_are_answered_and_drawn(model_times):
    for answer in EVERY:
        found = answer(model_times)
        assert "Not answered" not in found.text and not re.search(r"\bnan\b", found.text)
        assert all(len(table) and not table.isna().any().any() for _, table in found.tables)
    assert "Launches set no time here" in answers.launches(model_times).text and not answers.launches(model_times).finding
    assert figures.whole_model(model_times, "here") is not None


def test_bars_are_multiples_of_eager_with_the_ends_of_both_intervals():
    times = changed(gpu_times(sizes=["small"]), "phase == 'step' and variant == 'block'", launch_bound_share=1.0)
    rows = answers.relative(times).set_index(["attention", "variant", "mode"]).sort_index()
    row = rows.loc["sdpa", "block", "step"]
    assert (row["relative"], row["relative_low"], row["relative_high"]) == pytest.approx((0.55, 0.55 * 0.99 / 1.01, 0.55 * 1.01 / 0.99))
    drawn = figures.whole_model(times, "here")
    (backward,), (step,) = ([axis for axis in drawn.axes if axis.get_title(loc="left").startswith(words)] for words in ("forward", "full step"))
    assert [bar.get_height() for bar in step.patches] == pytest.approx([1, 0.55, 1, 0.55])
    assert [bool(bar.get_hatch()) for bar in backward.patches] == [False, True, False, True]
    assert [label.get_text() for label in step.get_xticklabels()] == ["small\n100 ms"] and step.get_yscale() == "linear"
