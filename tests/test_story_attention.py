"""The main text on attention: its facts by another path, and that words and titles follow the data."""
import pandas as pd
import pytest

from stepscope.report.story import attention
from stepscope.report.story.part import tell
from stepscope.studies.attention.cells import timed
from stepscope.traces.families import MATMUL
from test_attention_facts import EMPTY, gpu_cells

KERNELS = {"attention.scores": [("gemm", MATMUL, 3e6), ("mul", "elementwise", 1e6)],
           "attention.mask": [("where", "elementwise", 2e6)],
           "attention.softmax": [("MaxNan", "reduction and norm", 1e6), ("CUDAFunctor_add", "elementwise", 2e6),
                                 ("exp_kernel", "elementwise", 2e6), ("sum_functor", "reduction and norm", 1e6),
                                 ("DivFunctor", "elementwise", 4e6)],
           "attention.value": [("gemm", MATMUL, 2e6)], "ffn": [("gemm", MATMUL, 6e6)]}
TABLES = ("nsys.operations", "nsys.operations_fused", "nsys.phases", "benchmark.ceilings", "benchmark.times",
          "compile.times", "compile.kernels", "attention.cells", "attention.generations", "ladder.rungs",
          "attention.ends", "attention.predicted", "attention.accounting")


def operations(device="cuda", **columns):
    """Two captured forward passes of one size, as Nsight Systems lists them."""
    rows = [{"region": region, "name": name, "family": family, "total_ns": 2 * ns}
            for region, kernels in KERNELS.items() for name, family, ns in kernels]
    shape = {"size": "small", "context_length": 512, "batch_size": 4, "d_model": 768, "d_ff": 3072,
             "num_layers": 12, "num_heads": 12, "vocab_size": 10_000}
    return pd.DataFrame(rows).assign(mode="forward", phase="forward", steps=2, precision="fp32", device=device,
                                     study="nsys", run_id="small", **shape | columns)


def ceilings():
    return pd.DataFrame([{"ceiling": "copy", "value": 4.0, "run_id": "a"},
                         {"ceiling": "matmul_fp32", "value": 50.0, "run_id": "a"}])


def steps(**columns):
    """Full steps of two sizes, written out and fused; small's host launches to its end."""
    rows = [("small", "eager", 40, 5000, 1.0), ("small", "sdpa", 36, 4000, 1.0),
            ("large", "eager", 120, 9000, 30.0), ("large", "sdpa", 80, 9500, 30.0)]
    table = pd.DataFrame(rows, columns=["size", "attention", "median_ms", "peak_allocated_mib",
                                        "trailing_ms"])
    return table.assign(**{"mode": "step", "phase": "step", "variant": "eager", "optimizer": "foreach",
                           "device": "cuda", "precision": "bf16", "context_length": 512,
                           "flags": "", "sm_clock_mhz": 1980.0, "run_id": table["size"]} | columns)


def told(key, **tables):
    """One section's answer, None where it is silent; tables by their short name."""
    every = dict.fromkeys(TABLES, EMPTY) | {name.replace("__", "."): table for name, table in tables.items()}
    return next((one for one in tell(attention.PART, every) if one.key == key), None)


def test_softmax_is_compared_with_both_products_and_a_fused_kernel_with_all_that_it_replaces():
    found = attention.softmax(operations(), ceilings(), EMPTY, steps(), EMPTY, EMPTY, EMPTY)
    assert found["own"]["softmax_ms"] == pytest.approx(10) and found["own"]["products_ms"] == pytest.approx(5)
    assert found["writing_share"] == pytest.approx(0.8)  # subtract, exponentiate, divide
    assert found["replaced_ms"] == pytest.approx(18) and found["replaced_share"] == pytest.approx(18 / 24)
    assert found["fused_ms"] is None
    fused = operations().assign(region="attention.fused", name="flash").head(1)
    assert attention.softmax(operations(), ceilings(), EMPTY, EMPTY, fused, EMPTY, EMPTY)["fused_ms"] == pytest.approx(3)


def test_what_a_step_gains_leaves_out_those_whose_host_launches_to_the_end():
    found = attention.softmax(operations(), ceilings(), EMPTY, steps(), EMPTY, EMPTY, EMPTY)
    assert [list(one["gains"]) for one in found["gained"]] == [[1.5]]
    printed = attention.printed_gains(found).set_index("size")
    assert printed.loc["small", "x faster"].endswith("‡") and not printed.loc["large", "x faster"].endswith("‡")
    assert printed.loc["large", "peak falls (GiB)"] == "not" and found["no_less"]
    assert attention.printed_gains(attention.softmax(operations(), ceilings(), EMPTY, EMPTY, EMPTY, EMPTY, EMPTY)) is None


def test_what_a_step_gains_leaves_out_unsteady_samples():
    table = steps(trailing_ms=30.0)
    noisy = table.assign(flags=["noisy: 9%" if size == "small" else "" for size in table["size"]])
    calm, found = (attention.softmax(operations(), ceilings(), EMPTY, own, EMPTY, EMPTY, EMPTY)
                   for own in (table, noisy))
    assert calm["gained"][0]["gains"].size == 2 and not calm["unsteady"]
    assert found["gained"][0]["gains"].tolist() == [1.5] and found["unsteady"]
    printed = attention.printed_gains(found).set_index("size")["x faster"]
    assert printed["small"].endswith("§") and not printed["large"].endswith("§")
    low = table.assign(sm_clock_mhz=table["sm_clock_mhz"].where(table["attention"] == "eager", 1900.0))
    apart = attention.softmax(operations(), ceilings(), EMPTY, low, EMPTY, EMPTY, EMPTY)
    assert apart["unlike"] and apart["gained"] is None and not found["unlike"]
    assert attention.printed_gains(apart)["x faster"].str.endswith("≠").all()


def test_where_a_capture_tells_who_waits_the_end_of_launching_decides_nothing():
    work = {"batch_size": 4, "vocab_size": 10_000, "compile": False}
    phases = steps(**work).assign(phase="forward")
    times = pd.concat([steps(**work), phases])
    captured = phases.assign(operations_ms=phases["median_ms"] * 0.99, operations=10, gap_us=1.0, deepest=9.0)
    calm = attention.fused_gains(times, captured).set_index("size")
    assert not calm["waits"].any() and not calm["launching"].any()  # the end of small's launching is no verdict
    half = captured["size"].eq("large") & captured["attention"].eq("sdpa")
    waits = attention.fused_gains(times, captured.assign(
        operations_ms=captured["operations_ms"].where(~half, 30.0))).set_index("size")
    assert waits["waits"].to_dict() == {"small": False, "large": True} and not waits["launching"].any()
    printed = attention.printed_gains(attention.softmax(operations(), ceilings(), EMPTY, times, EMPTY, EMPTY,
                                                        captured[~captured["size"].eq("small")]))
    assert list(printed["x faster"].str.endswith("‡")) == [True, False]
    one_side = attention.fused_gains(times, captured[captured["attention"] == "eager"]).set_index("size")
    assert one_side["launching"].to_dict() == {"small": True, "large": False}


def test_what_the_study_captured_tells_who_waits():
    captured = pd.DataFrame({"gap_us": [1.0, 2.0, 3.0]})
    passes = pd.concat([steps(mode="forward_backward", phase=phase, median_ms=50.0) for phase in ("forward", "backward")])
    times = pd.concat([steps(), passes])
    kernels = steps(mode="forward_backward").assign(count=1000, total_ms=97.0)  # 99 ms with their gaps
    assert attention.waits_by_kernels(times, kernels, captured) == set()
    short = kernels["size"].eq("large") & kernels["attention"].eq("sdpa")
    kernels = kernels.assign(total_ms=kernels["total_ms"].where(~short, 93.0))
    assert attention.waits_by_kernels(times, kernels, captured) == {"large"}
    again = pd.concat([times, times[times["size"] == "large"].assign(run_id="another")])
    assert attention.waits_by_kernels(again, kernels, captured) == {"large", "another"}, "of the same work"
    marked = attention.fused_gains(times, EMPTY, kernels).set_index("size")["waits"]
    assert not marked.any(), "no gap is known without a capture"
    assert attention.waits_by_kernels(times, EMPTY, captured) == set()


def test_a_long_kernel_behind_the_last_launch_is_no_host_that_waits():
    ahead = attention.fused_gains(steps(median_ms=1000.0, trailing_ms=40.0), EMPTY)
    assert not ahead["launching"].any()
    assert attention.fused_gains(steps(median_ms=100.0, trailing_ms=4.0), EMPTY)["launching"].all()


def test_the_softmax_pictures_title_is_what_was_measured():
    title = attention.draw_softmax(operations(), ceilings(), EMPTY, EMPTY, "here").axes[0].get_title("left")
    slow = operations()
    slow.loc[slow["region"] == "attention.softmax", "total_ns"] *= 2
    other = attention.draw_softmax(slow, ceilings(), EMPTY, EMPTY, "here").axes[0].get_title("left")
    assert "2.0x" in title and "4.0x" in other
    assert attention.draw_softmax(operations("cpu"), ceilings(), EMPTY, EMPTY, "here") is None


def test_a_cpu_and_missing_tables_say_nothing_of_a_gpu():
    assert told("softmax", nsys__operations=operations("cpu"), benchmark__ceilings=ceilings()) is None
    assert told("which-kernel", attention__cells=gpu_cells(device="cpu")) is None
    assert told("attention-memory", attention__cells=gpu_cells(device="cpu")) is None
    steps = pd.DataFrame([{"phase": "step", "mode": "step", "variant": "eager", "device": "cpu", "median_ms": 1.0}])
    assert attention.fused_gains(steps, EMPTY).empty  # a CPU's steps have no peaks
    assert tell(attention.PART, dict.fromkeys(TABLES, EMPTY)) == []
    assert told("softmax", nsys__operations=operations(), benchmark__ceilings=ceilings()) is not None


def test_the_fastest_kernel_follows_the_data():
    cells = gpu_cells()
    cells = cells[cells["implementation"] != "fa4"]
    fast = (cells["implementation"] == "cudnn") & (cells["sequence"] > 1024)
    times = [column for column in cells if column.endswith("_ms")]
    cells.loc[fast, times] /= 10
    found = attention.which_kernel(cells, EMPTY)
    assert (found["precision"], found["top"]["implementation"]) == ("bf16", "cudnn")
    assert found["top"]["faster"] == pytest.approx(40)
    assert found["order"].startswith("SDPBackend.CUDNN_ATTENTION, ") and found["order_to"] is None
    wider = pd.concat([cells, cells[cells["implementation"] == "eager"].assign(d_model=4096)])
    assert attention.which_kernel(wider, EMPTY)["order_to"] == cells["d_model"].max()
    assert "cuDNN" in attention.draw_time(cells, EMPTY, "here").get_suptitle()
    slow = cells.copy()
    slow.loc[slow["implementation"] != "eager", times] *= 1e3
    assert not attention.which_kernel(slow, EMPTY)["fused_wins"]
    words = told("which-kernel", attention__cells=slow).text
    assert "faster than attention written out" not in words


def test_flash_attention_4_stands_beside_the_fastest_of_sdpa():
    fused = timed(gpu_cells())
    fused = fused[fused["implementation"].isin(["flash", "cudnn", "efficient"]) & (fused["precision"] == "bf16")]
    d, last = int(fused["d_model"].iloc[0]), fused["sequence"].max()
    best = fused[fused["d_model"] == d].groupby("sequence")["pass_median_ms"].min()
    factor = fused["sequence"].map(lambda sequence: 0.5 if sequence == last else 2.0)
    own = fused.assign(implementation="fa4", pass_median_ms=fused["sequence"].map(best) * factor)
    found = attention.newer_than_sdpa(pd.concat([fused, own.drop_duplicates("sequence")]), d, "bf16")
    assert (found["sequence"], found["against_ms"]) == (last, best[last])
    assert found["faster"] == pytest.approx(2)
    assert (found["points"], found["slower"]) == (len(best), len(best) - 1) and not found["unsteady"]
    noisy = own.drop_duplicates("sequence").assign(pass_flags="noisy: 9%")
    assert attention.newer_than_sdpa(pd.concat([fused, noisy]), d, "bf16")["unsteady"]
    assert attention.newer_than_sdpa(fused, d, "bf16") is None
    assert attention.newer_than_sdpa(EMPTY, d, "bf16") is None


def test_tf32_is_said_to_help_only_where_it_does():
    cells = gpu_cells()
    cells = cells[(cells["implementation"] != "efficient") | (cells["precision"] != "tf32")]
    same = cells[(cells["implementation"] == "efficient") & (cells["precision"] == "fp32")]
    cells = pd.concat([cells, same.assign(precision="tf32")], ignore_index=True)
    helps = {one["implementation"]: one["helps"] for one in attention.which_kernel(cells, EMPTY)["tf32"]}
    assert helps == {"eager": True, "compiled": True, "efficient": False}
    assert attention.which_kernel(cells[cells["precision"] == "bf16"], EMPTY)["tf32"] is None


def test_an_end_is_said_where_it_was_looked_for():
    cells = gpu_cells()
    probes = pd.DataFrame([{"part": "pass", "implementation": "eager", "sequence": sequence, "status": status,
                            "reason": "", "expandable": False, "run_id": f"d64-{precision}",
                            "precision": precision, "d_model": 64, "mask_peak_bytes": float("nan")}
                           for precision in ("fp32", "bf16")
                           for sequence, status in ((32768, "ok"), (36864, "oom"))])
    found = attention.where_it_ends(cells, probes, EMPTY, EMPTY)
    assert found["ended"] == [{"implementation": "eager", "fits": 32768, "fails": 36864}]
    assert "flash" in found["open"] and "eager" not in found["open"]
    figure = attention.draw_time(cells, probes, "here")
    words = [text.get_text() for text in figure.axes[0].texts]
    assert any("out of" in text and "36,864" in text for text in words)
    assert told("attention-memory", attention__cells=gpu_cells(find_end=False)) is None


def test_a_winner_whose_launching_took_as_long_is_marked_and_no_finding():
    cells = gpu_cells()
    calm = attention.which_kernel(cells.assign(enqueue_ms=0.0), EMPTY)
    assert not calm["launching"]
    held = attention.which_kernel(cells.assign(enqueue_ms=cells["pass_median_ms"]), EMPTY)
    assert held["launching"]
    assert attention.printed_winners(held).iloc[:, 1:].map(lambda cell: cell == "–" or cell.endswith("†")).all(axis=None)
    noisy = attention.which_kernel(cells.assign(enqueue_ms=0.0, pass_flags="noisy"), EMPTY)
    assert noisy["unsteady"] and not calm["unsteady"]
    marked = attention.printed_winners(noisy).iloc[:, 1:]
    assert marked.map(lambda cell: cell == "–" or cell.endswith("‡")).all(axis=None)


def test_what_the_ladder_gains_by_a_fused_kernel_stands_beside():
    rungs = pd.DataFrame({"size": ["small", "large", "small", "small"], "rung": ["sdpa", "sdpa", "sdpa", "bf16"], "context_length": [512, 512, 1024, 512],
                          "vocab_size": 10_000, "status": "ok", "gain": [1.2, 1.3, 2.0, 3.0],
                          "gain_low": [1.1, 0.9, 1.9, 2.9]})
    found = attention.softmax(operations(), ceilings(), EMPTY, steps(), EMPTY, rungs, EMPTY)
    assert found["ladder"] == [{"size": "small", "gain": 1.2, "low": 1.1}]
