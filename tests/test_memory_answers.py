"""What is said of memory: sentences follow from the tables, and say so where there are none."""
import json
import re
from pathlib import Path

import pandas as pd
import pytest
from browser import opened
from memory_recording import CudaAutocast, stand_in
from stepscope.studies.memory import measure as memory
from stepscope.step.accounting import MIB, on_gpu, peak
from stepscope.studies.memory import answers as answers
from stepscope.studies.memory import options_answers as memory_options
from stepscope.config import configure
from stepscope.studies.memory import figures as figures
from stepscope.step.training_step import Step
from stepscope.studies.memory.timeline_page import timeline_page

SHAPE = {"size": "custom", "d_model": 16, "d_ff": 64, "num_layers": 3, "num_heads": 2, "vocab_size": 40, "batch_size": 3}


@pytest.fixture(scope="module")
def tables() -> dict[str, pd.DataFrame]:
    """As if recorded on a GPU: two contexts, both modes and precisions; one run out of memory; one of checkpointing."""
    parts = {name: [] for name in ("runs", "predicted", *memory.TABLES)}
    for context, mode, precision in ((4, m, p) for m in ("forward", "step") for p in ("fp32", "bf16")):
        for length in (context, 4 * context):
            config = configure("memory", device="cpu", context_length=length, mode=mode, precision=precision, **SHAPE)
            with pytest.MonkeyPatch.context() as patch, stand_in(patch):
                if precision == "bf16":
                    patch.setattr(Step, "autocast", lambda step: CudaAutocast())
                _, recorded, results = memory.record(config)
            _keep(parts, config, recorded | {"predicted": memory.predicted(config)}, results, "ok")
    _keep(parts, configure("memory", device="cpu", context_length=512, mode="step", **SHAPE), {}, {}, "oom")
    config = configure("memory", device="cpu", context_length=32, mode="forward_backward", checkpoints=[1, 2, 0], **SHAPE)
    samples, settings = memory.measure_checkpoints(config)
    settings["peak_allocated_bytes"] = settings["predicted_bytes"] + 1000
    _keep(parts, config, {"samples": samples, "checkpoints": settings}, {}, "ok")
    tables = {name: pd.concat(frames, ignore_index=True) if frames else pd.DataFrame() for name, frames in parts.items()}
    tables["runs"]["size"] = pd.Categorical(["custom"] * len(tables["runs"]), ["custom"], ordered=True)
    return tables


def _keep(parts, config, tables, results, status):
    at = {"run_id": config.run_id, "study": "memory", "device": "cuda"}
    own = config.model_copy(update={"device": "cpu"})
    parts["runs"].append(pd.DataFrame([config.model_dump() | at | results | {
        "status": status, "predicted_mib": peak(own).allocated / MIB, "gpu_memory_mib": 1.0, "parameters_bytes": 1000,
        "measured": "checkpointing" if config.checkpoints else "history", "block_saved_bytes": 5000, "block_copies_bytes": 0,
        "block_gradient_bytes": 1000}]))
    for name, table in tables.items():
        if name in parts:
            parts[name].append(table.assign(**at, size=config.size, context_length=config.context_length)
                               if name == "checkpoints" else table.assign(**at))


def changed(tables, name, **columns):
    return tables | {name: tables[name].assign(**columns)}


def test_timeline_says_when_and_how_the_first_step_differs(tables):
    answer = answers.timeline(tables)
    assert "Full step of custom at context 16, fp32" in answer.text and "AdamW's" in answer.text
    assert answers.TIMELINE in answer.text and len(answer.runs) == 2
    flat = tables["levels"].assign(bytes=1000)
    assert "Not all of the phases' peaks" in answers.timeline(tables | {"levels": flat}).text


def test_peaks_name_the_cause(tables):
    runs = tables["runs"]
    peaks, fp32 = runs["steady_peak_allocated_mib"], runs["precision"] == "fp32"
    raised, lowered = (runs.assign(steady_peak_allocated_mib=peaks.where(fp32, peaks * factor)) for factor in (10, 0.1))
    answer = answers.peaks(tables | {"runs": raised})
    assert "raises the peak of forward alone" in answer.text and answer.numbers["copies_mib"] > 0
    assert "lowers the peak of forward alone" in answers.peaks(tables | {"runs": lowered}).text
    assert "Out of memory, as predicted: full step at context 512" in answer.text
    roomy = changed(tables, "runs", gpu_memory_mib=1e6)
    assert "as predicted" not in answers.peaks(roomy).text


def test_accounting_says_how_far_off_it_is(tables):
    assert answers.accounting(tables).numbers["exact"] == 0  # there is no workspace on a CPU, and the formulas count two
    asked = [peak(answers.config_of(run)).bytes / MIB for _, run in tables["runs"].iterrows()]
    assert answers.accounting(changed(tables, "runs", steady_peak_requested_mib=asked)).numbers["exact"] == 8
    wrong = tables["runs"].assign(predicted_mib=tables["runs"]["predicted_mib"] * 1.5)
    other = answers.accounting(tables | {"runs": wrong})
    assert "8 runs: 0 are within 1%" in other.text and other.numbers["worst"] > 0.3


def test_largest_allocations_and_residual(tables):
    assert answers.residual(tables).numbers["mib"] * MIB == 3 * 512 * 16 * 4
    answer = answers.largest_of_forward(tables)
    assert tables["allocations.parquet"]["layer"].max() == 2  # counted anew in each step
    assert answer.numbers["mib"] * MIB == 4 * 3 * 16 * 64


def test_checkpointing_compares_the_optimum(tables):
    answer = memory_options.checkpointing(tables)
    assert answer.numbers["predicted_optimum"] == answer.numbers["measured_optimum"] == 1
    assert "block: the predicted one" in answer.text
    turned = tables["checkpoints"].assign(peak_allocated_bytes=[3e6, 1e6, 2e6])
    assert "not the predicted one" in memory_options.checkpointing(tables | {"checkpoints": turned}).text


def test_fragmentation_pairs_runs(tables):
    runs = tables["runs"]
    pair = runs[runs["measured"] == "history"].iloc[[0]].assign(expandable_segments=True, run_id="other", first_peak_reserved_mib=0.001,
                                                                steady_peak_reserved_mib=0.001)
    both = tables | {"runs": pd.concat([runs, pair], ignore_index=True).astype({"size": runs["size"].dtype})}
    assert " less (" in memory_options.fragmentation(both).text
    assert "With expandable segments" not in memory_options.fragmentation(tables).text


@pytest.mark.parametrize("answer", [answers.timeline, answers.peaks, answers.accounting, answers.residual, answers.largest_of_forward,
                                    answers.block, memory_options.checkpointing, memory_options.fragmentation])
def test_question_without_data_says_so(answer):
    empty = dict.fromkeys(("runs", "predicted", *memory.TABLES), pd.DataFrame())
    assert "stepscope sweep memory" in answer(empty).text


def test_figures(tables):
    runs = answers.matrix(tables)
    figure = figures.peaks(runs, "here")
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["forward alone", "full step"]
    assert figures.checkpoints(memory_options.curve(tables), "here") is not None
    assert figures.peaks(pd.DataFrame(), "here") is None and figures.checkpoints(pd.DataFrame(), "here") is None


def test_what_the_figure_stacks_is_what_lives(tables):
    own = tables["allocations.parquet"]
    own = own[own["run_id"] == answers.reference(tables)["run_id"]]
    _, total = figures.stacked(own)
    steady = answers.reference(tables)["steady_peak_requested_mib"]
    assert total.max() == pytest.approx(steady * MIB)


def test_a_prediction_for_each_out_of_memory():
    config = on_gpu(size="2.7B", context_length=2048)
    assert peak(config).allocated > 143_156 * MIB


@pytest.fixture(scope="module")
def small() -> pd.DataFrame:
    """Two steps of the small model at context 128, fp32, as recorded on an H200; the allocator counted 2,536.95 MiB at its peak."""
    return pd.read_parquet(Path(__file__).parent / "data/memory/small-ctx128-step-fp32.parquet")


def test_timeline_of_a_recorded_step(small):
    _, total = figures.stacked(small)
    assert total.max() / MIB == pytest.approx(2536.95, abs=0.01)
    for step in figures.steps_of(small):
        phases = figures.bounds(small, step)
        assert list(phases) == ["forward", "loss", "backward", "optimizer"]
        assert all(before[1] == after[0] for before, after in zip(phases.values(), list(phases.values())[1:]))
    figure = figures.timeline(small, "title")
    labels = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert "2.48 GiB" in labels and len(figure.axes) == 2
    marked = labels.index("2.48 GiB")
    assert labels[marked - 1].strip() == "optimizer"  # the steady step's label comes after its phases'


def test_interactive_timeline_is_whole_and_loads_nothing(small):
    evil = small.assign(line=small["line"].where(small.index != 5, "</script><img src=x>"))
    page = timeline_page("A title", {"one": evil, "two": small.head(600)})
    assert page.count("</script>") == 1 and "<img" not in page
    assert not re.search(r"(src|href)\s*=|https?:|@import|url\(", timeline_page("A title", {"one": small}))
    data = json.loads(re.search(r"const DATA = (\{.*\});", page)[1])
    run = data["runs"][0]
    assert [r["title"] for r in data["runs"]] == ["one", "two"]
    assert sum(run["size"]) == small["size"].sum() and pd.Series(run["at"]).cumsum().tolist() == small["allocated_at"].tolist()
    at = small.index[(small["region"] == "attention.softmax") & (small["layer"] == 3)][0]
    assert data["places"][run["place"][at]].startswith("forward, layer 3, attention.softmax, stepscope/model.py:")


def test_interactive_timeline_runs_in_a_browser(small, tmp_path):
    file = tmp_path / "timeline.html"
    point = "find_(); function find_() { const i = find(canvas.clientWidth / 2, canvas.clientHeight - 2); document.title = 'found ' + DATA.places[run.raw.place[i]]; }"
    file.write_text(timeline_page("A title", {"one": small}).replace("open_(0);\n</script>", f"open_(0); {point}\n</script>"))
    shown, _ = opened(file)
    assert "<title>found build" in shown  # at the bottom lies what was made first: a parameter
