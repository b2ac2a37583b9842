"""The attention study: what is checked, timed, counted and followed, on a CPU."""
import json
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from conftest import record_of
from stepscope.config import configure
from stepscope.say.chapter import answer, given
from stepscope.step.compiling import reason
from stepscope.studies.attention import checking, ending, following, implementations
from stepscope.studies.attention.chapter import CHAPTER
from stepscope.studies.attention.checking import errors, reference
from stepscope.studies.attention.implementations import Implementations, Inputs
from stepscope.studies.attention.measure import measure_attention, measure_cell
from stepscope.studies.attention.memory import memory_pass
from stepscope.studies.attention.timing import timed_passes

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "attention.ipynb"
SMALL = {"device": "cpu", "d_model": 8, "batch_size": 2, "sequences": [8, 16, 32], "timed_steps": 3,
         "warmup_steps": 1, "cell_seconds": 0.05}


@pytest.fixture
def small():
    return lambda **fields: configure("attention", **SMALL | fields)


@pytest.fixture(scope="module")
def measured():
    """One run of everything a CPU has, compiled too: configuration, tables, and what the compiler counted."""
    config = configure("attention", **SMALL | {"sequences": [8, 16]})
    counters["inductor"].clear()
    return config, measure_attention(config), counters["inductor"].copy()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["eager", "flash", "math"])
def test_what_a_cpu_has_agrees_with_float64_in_output_and_gradients(name, causal, small):
    inputs = Inputs(small(), 16, causal)
    output = Implementations().prepare(name, inputs)()
    output.backward(inputs.gradient)
    found = errors(output, inputs, reference(inputs))
    assert set(found) == {"output_error", "dq_error", "dk_error",
                          "dv_error"} and all(0 < error < 1e-6 for error in found.values())


def test_the_reference_is_the_definition(small):
    inputs = Inputs(small(), 8, True)
    output, dq, *_ = reference(inputs)
    q, k, v = (x.detach().double() for x in (inputs.q, inputs.k, inputs.v))
    for b in range(2):
        for i in range(8):
            weights = torch.exp(k[b, 0, :i + 1] @ q[b, 0, i] / 8**0.5)
            assert torch.allclose(output[b, 0, i], weights / weights.sum() @ v[b, 0, :i + 1])
    step = 1e-6  # dq against the difference quotient of one number
    moved = Inputs(small(), 8, True)
    with torch.no_grad():
        for x in (moved.q, moved.k, moved.v, moved.gradient):
            x.data = x.data.double()
        moved.q[0, 0, 5, 3] += step
    change = ((reference(moved)[0] - output) * inputs.gradient.double()).sum() / step
    assert float(dq[0, 0, 5, 3]) == pytest.approx(float(change), rel=1e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_the_reference_of_a_long_sequence_is_made_of_some_queries_at_a_time(causal, small, monkeypatch):
    inputs = Inputs(small(), 32, causal)
    whole = reference(inputs)
    monkeypatch.setattr(checking, "SQUARE", 32 * 5)  # five of 32 queries, and a rest of two
    assert all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in zip(whole, reference(inputs), strict=True))


def test_the_first_token_of_causal_attention_sees_itself_only(small):
    inputs = Inputs(small(), 16, True)
    for name in ("eager", "flash", "math"):
        assert torch.allclose(Implementations().prepare(name, inputs)()[:, :, 0], inputs.v[:, :, 0])


def test_a_wrong_implementation_is_not_timed(small, monkeypatch):
    config = small()
    inputs = Inputs(config, 16, True)
    doubled = implementations.PARTS.scores
    monkeypatch.setattr(implementations.PARTS, "scores", lambda q, k: 1.001 * doubled(q, k))
    row, samples = measure_cell("eager", Implementations(), inputs, reference(inputs), config)
    assert row["status"] == "wrong" and 2e-5 < row["error"] < 1e-2 and "2e-05" in row["reason"]
    assert samples.empty
    assert "saved_bytes" not in row
    timed, samples = measure_cell("flash", Implementations(), inputs, reference(inputs), config)
    assert timed["status"] == "ok" and len(samples) == 3


def test_kernels_are_captured_where_asked_for_and_an_absent_package_is_a_reason(small):
    config = small(causal=["flash", "fa4"], unmasked=[], sequences=[16], captured_passes=2)
    tables = measure_attention(config)
    cells, kernels = tables["cells"], tables["kernels"]
    assert cells["status"].tolist() == ["ok", "unsupported"] and "flash_attn" in cells["reason"][1]
    assert set(kernels["cell"]) == {0} and (kernels["count"] > 0).all()
    fused = kernels[kernels["family"] == "fused attention"]
    assert fused["name"].str.contains("flash_attention_for_cpu").any()
    assert "fa4" not in small().causal and "kernels" not in measure_attention(small(causal=["flash"], unmasked=[]))


def test_what_a_cpu_lacks_has_torchs_reason(measured):
    _, tables, _ = measured
    cells = tables["cells"]
    status = cells[cells["causal"]].groupby("implementation")["status"].unique().map(list).to_dict()
    assert status == {"eager": ["ok"], "compiled": ["ok"], "flash": ["ok"], "math": ["ok"],
                      "efficient": ["unsupported"], "cudnn": ["unsupported"], "flex": ["unsupported"]}
    reasons = cells[cells["status"] == "unsupported"].set_index("implementation")["reason"]
    assert "FlexAttention does not support backward on CPU" in reasons["flex"].iloc[0]
    assert "No viable backend" in reasons["cudnn"].iloc[0]
    assert not reasons.str.contains("/").any()


def test_torchs_warnings_say_why_no_kernel_fits():
    class Warned:
        def __init__(self, message):
            self.message = message
    warned = [Warned(f"{text} (Triggered internally at /build/x.cpp:1.)")
              for text in ("Flash attention kernel not used because:", "Head dim is 512, at" " most 256.",
                           "Memory efficient attention has been runtime" " disabled.")]
    assert reason(RuntimeError("No available kernel. Aborting"
                                         " execution."), warned) == "Head dim is 512, at most 256."
    assert reason(RuntimeError("failed in /usr/somewhere/file.py badly"), warned) == "failed in file.py badly"


def test_compiling_is_counted_and_is_not_in_the_times(measured):
    config, tables, _ = measured
    own = tables["cells"].set_index(["implementation", "sequence"])
    own = own[own["causal"]]
    for sequence in (8, 16):
        row = own.loc["compiled", sequence]
        assert row["graphs"] == 1 and row["later_graphs"] == 0 and row["graph_breaks"] == 0
        assert row["first_forward_ms"] > 10 * row["forward_median_ms"]
        assert own.loc["eager", sequence]["graphs"] == 0
    samples = tables["samples.parquet"]
    assert samples.groupby("cell").size().max() <= config.timed_steps + config.least_passes
    whole = samples[samples["cell"] == 0]
    assert tables["cells"]["pass_median_ms"][0] == pytest.approx(float((whole["forward_ms"]
                                                                        + whole["backward_ms"]).median()),
                                                                 rel=1e-4)


def test_nothing_is_compiled_out_of_an_earlier_runs_cache(measured, small):
    forward_and_backward = 2
    assert measured[2]["fxgraph_cache_hit"] == 0
    assert measured[2]["fxgraph_cache_miss"] >= len(measured[0].sequences) * forward_and_backward
    torch._dynamo.reset()
    counters["inductor"].clear()
    again = measure_attention(small(sequences=[8], causal=["compiled"], unmasked=[]))
    assert (again["cells"]["status"] == "ok").all()
    assert counters["inductor"]["fxgraph_cache_hit"] == 0
    assert counters["inductor"]["fxgraph_cache_miss"] == forward_and_backward


def test_passes_are_as_many_as_asked_for_or_as_time_allows(small, monkeypatch):
    inputs = Inputs(small(), 8, True)
    call = Implementations().prepare("flash", inputs)
    assert len(timed_passes(call, inputs, small(timed_steps=30, cell_seconds=10.0))) == 30
    assert len(timed_passes(call, inputs, small(timed_steps=30, cell_seconds=1e-9, least_passes=4))) == 4


# -- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eager", "math"])
def test_what_the_code_alone_predicts_is_what_autograd_is_handed(name, small):
    config = small()
    for sequence in (16, 32):
        inputs = Inputs(config, sequence, True)
        call = Implementations().prepare(name, inputs)
        saved = memory_pass(call, inputs, inputs.held_bytes(name), "cpu")["saved_bytes"]
        # A mask is made by forward there, and a boolean is not counted on a CPU.
        masks = sequence**2 if name == "math" else 0
        predicted = following.follow_pass(name, config, sequence, True)["saved_bytes"]
        assert abs(predicted - saved) <= max(masks, 0.3 * saved if name == "math" else 0)


def test_fake_tensors_live_as_long_as_real_ones(small):
    config = small()
    with following.LiveStorages() as storages:
        inputs = Inputs(config, 32, True)
        call = Implementations().prepare("eager", inputs)
        storages.peak_bytes = 0
        output = call()
        output.backward(inputs.gradient)
    followed = following.follow_pass("eager", config, 32, True)
    assert followed["peak_bytes"] == storages.peak_bytes == sum(size for *_, size in followed["tensors"])


def test_written_out_attention_keeps_two_squares_and_needs_six(small):
    square = 2 * 4096**2 * 4
    followed = following.follow_pass("eager", small(), 4096, True)
    assert followed["saved_bytes"] / square == pytest.approx(2, rel=0.01)
    assert followed["peak_bytes"] / square == pytest.approx(6, rel=0.03)  # and the mask, an eighth here
    table = following.accounting("eager", small(), 4096)
    assert table["bytes"].sum() == followed["peak_bytes"] and (table["bytes"] == square).sum() == 6
    assert {"q", "k", "v", "gradient of the output"} <= set(table["tensor"])


def test_following_needs_no_memory(small):
    followed = following.follow_pass("eager", small(), 2_000_000, True)
    assert followed["peak_bytes"] > 2**45


def test_the_mask_of_flexattention_is_followed_as_it_is_made():
    with following.LiveStorages() as storages:
        mask = implementations.block_mask(1024, "cpu")
        real = storages.peak_bytes
    followed = following.follow_mask(1024)
    assert followed["mask_bytes"] == sum(x.untyped_storage().nbytes()
                                         for x in implementations.mask_tensors(mask))
    assert followed["mask_peak_bytes"] == real and 2 < real / 1024**2 < 2.01
    assert implementations.mask_tensors(None) == []


def test_what_an_operator_makes_inside_counts_at_the_peak_on_a_gpu_alone(small):
    here, gpu = (following.follow_pass("math", small(device=device), 1024, True)
                 for device in ("cpu", "cuda"))
    square = 2 * 1024**2 * 4
    assert gpu["peak_bytes"] - here["peak_bytes"] == square and gpu["saved_bytes"] == here["saved_bytes"]
    assert gpu["tensors"][-1][0] == "backward: gradient times output, inside _softmax_backward_data"


def test_a_search_doubles_until_it_fails_and_halves_back():
    def attempt(end):
        return lambda sequence: {"sequence": sequence, "status": "ok" if sequence <= end else "oom"}
    found = [row["sequence"] for row in ending.search(attempt(100), 16, 256, 3)]
    assert found == [32, 64, 128, 96, 112, 104]
    assert [row["sequence"] for row in ending.search(attempt(1e9), 16, 64, 3)] == [32, 64]
    broken = ending.search(lambda sequence: {"sequence": sequence, "status": "failed"}, 16, 64, 3)
    assert len(broken) == 1


# -- from the notebook to the answers ------------------------------------------------------------------------


def execute(config, folder):
    """The notebook's cells, one after another in this process, as a sweep has them executed in a kernel."""
    names = config.model_dump(mode="json") | {"run_folder": str(folder)}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code" and "parameters" not in cell["metadata"].get("tags", []):
            exec("".join(cell["source"]), names)
    return json.loads((folder / "outcome.json").read_text(encoding="utf-8"))


def test_a_notebooks_run_becomes_cells_with_rates_and_answers_without_a_gpu(store):
    asked = {"causal": ["eager", "flash", "cudnn"], "unmasked": ["eager", "flash"], "unmasked_from": 16}
    config = configure("attention", **SMALL | asked)
    store.folder(config).mkdir(parents=True)
    outcome = execute(config, store.folder(config))
    assert set(outcome["tables"]) == {"cells", "samples.parquet", "ceilings", "ends", "predicted",
                                      "accounting"}
    fields = ("tables", "results", "machine", "software")
    record = record_of(config, **{field: outcome[field] for field in fields})
    tables = {f"attention.{name}": table for name, table in CHAPTER.load(store, [record]).items()}
    cells = tables["attention.cells"]
    assert len(cells) == 3 * 3 + 2 * 2
    assert cells["status"].value_counts().to_dict() == {"ok": 10, "unsupported": 3}
    row = cells[cells["status"] == "ok"].iloc[-1]
    flops = 3 * 4 * 2 * row["sequence"] ** 2 * 8
    assert row["pass_tflops"] == pytest.approx(flops / row["pass_median_ms"] / 1e9)
    answers = {question.key: answer(CHAPTER, question, tables) for question in CHAPTER.questions}
    assert "No viable backend" in answers["attention-same"].tables[1][1]["reason"].iloc[0]
    assert not any(" nan" in one.text for one in answers.values())
    assert all(picture.draw(*given(tables, picture), where="here") is not None
               for picture in CHAPTER.pictures)
