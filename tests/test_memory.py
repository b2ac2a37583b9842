"""Test the memory study: recorded allocations, a block's saved tensors, checkpoints, snapshots and tables."""

import copy
import functools
import gc
import math
import pickle
import pickletools
import re
import weakref
from contextlib import nullcontext
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch

from cells import run_cells
from conftest import record_of
from memory_recording import CudaAutocast, stand_in
from stepscope import StepscopeError
from stepscope.config import PHASES, TOTAL, ConfigError, configure
from stepscope.measure import memory_history, protocol
from stepscope.measure.subject import NEGLIGIBLE_RATE
from stepscope.model import accounting, ranges
from stepscope.model.accounting import GIB, MIB
from stepscope.model.flops import parameter_count
from stepscope.runs.record import mixed_notebook_warnings
from stepscope.runs.run import notebook_of, parameters_of
from stepscope.studies.memory import history, policies
from stepscope.studies.memory.tables import CONFIG, LIVE, SCHEMAS, column, run_tables
from stepscope.traces import memory_snapshot
from test_accounting import SHAPES

pytestmark = pytest.mark.usefixtures("threads_of_torch")

# For each notebook, the fields that only the other notebook uses.
OTHER_FIELDS = {
    "memory": {"blocks_per_checkpoint", "nested_blocks", "timed_steps"},
    "checkpointing": {"save_snapshot"},
}
QUICK = {"timed_steps": 1, "warmup_steps": 0}


def config_of(shape, **fields):
    return configure("memory", device="cpu", **shape, **fields)


def cells_of(config, until, wrapped=None):
    """Run a configuration's notebook up to the cell that contains ``until``; return its variables."""
    fields = parameters_of(config)
    for name in OTHER_FIELDS[config.notebook]:
        fields.pop(name, None)
    replaced = {"autocast": CudaAutocast()} if config.precision == "bf16" else {}
    return run_cells(config.notebook, until, replaced, wrapped, **fields)


def recorded(config, until="is_copy = ", wrapped=None):
    """Run the notebook's cells on a CPU with a simulated GPU allocator; return its variables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_history, "keeps_history", lambda device: True)
        with stand_in(patch):
            return cells_of(config, until, wrapped)


@functools.cache
def recorded_steps():
    """Return a configuration, its recorded steps by mode, and its tables."""
    config = config_of(SHAPES[0], modes=["step", "forward"], optimizer="fused")
    names = recorded(config)
    return config, {each.mode: each for each in names["recordings"].histories}, names["tables"]


def checkpoint_table(config, **wrapped):
    """Run the checkpointing notebook with wrapped functions; return its table."""
    return cells_of(config, "names = ", wrapped)["table"]


def bytes_by_kind(row):
    return {kind: round(row[column(kind)] * GIB) for kind in LIVE}


def bytes_before(recording):
    return [recording.before.get(kind, 0) for kind in LIVE]


# Recorded steps

# For each precision, three formulas for bytes that are live after the loss, in addition to the blocks' saved
# tensors. The first formula covers the final norm, the logits and the bf16 copy of the head's weight. The second
# covers only this copy. The third covers the tensors that the loss saves.
AFTER_LOSS = {"fp32": ("12X + 4r + 4V", "0X", "4V + 4"), "bf16": ("10X + 4r + 2V + 2E", "2E", "6V + 4")}


def bytes_after_loss(config):
    """Return the bytes that the formulas predict just before the backward pass, keyed by kind."""
    formulas = accounting.formulas_of(config)
    at_rest = accounting.at_rest(config, "forward_backward")
    texts = (formulas.saved, formulas.weight_cache, formulas.logits, *AFTER_LOSS[config.precision])
    saved, copies, logits, end, head, loss = (accounting.value(text, config) for text in texts)
    # variables of the step keep the logits and the loss alive
    return at_rest | {
        "saved for backward": config.num_layers * saved + end - head - logits + loss,
        "autocast weight cache": config.num_layers * copies + head,
        "other": at_rest["other"] + logits + 4,
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recorded_peak_and_live_bytes_by_kind_match_the_formulas(shape, precision):
    config = config_of(shape, precision=precision, modes=["forward", "forward_backward"])
    names = recorded(config)
    totals = names["tables"]["peaks"].query("phase == 'total'").set_index("mode")
    for mode, total in totals.iterrows():
        top = accounting.peak(config, mode)
        assert total["requested_gib"] == total["predicted_requested_gib"] == top.requested / GIB
        assert sum(bytes_by_kind(total).values()) == top.requested
        assert total[column("rounding")] == total["peak_gib"] - total["requested_gib"] >= 0
        layer = math.nan if top.layer is None else top.layer
        place = [top.phase, top.operation.partition(":")[0], pytest.approx(layer, nan_ok=True)]
        assert total[["peak_in", "region", "layer"]].tolist() == place
    recording = names["recordings"].histories[1]
    loss_end = history._ends(recording)[1]
    live = history.live_bytes(history.classify(recording, config))[:, loss_end]
    expected = bytes_after_loss(config)
    assert (live + bytes_before(recording)).tolist() == [expected[kind] for kind in LIVE]


def test_activation_as_large_as_a_weight_is_not_an_autocast_copy():
    shape = SHAPES[0] | {"batch_size": 1, "context_length": 16}
    config = config_of(shape, precision="bf16", modes=["forward"])
    [recording] = recorded(config)["recordings"].histories
    table = history.classify(recording, config)
    # copies of the head's weight are excluded, because the logits have the same size
    copies = table.query("kind == 'autocast weight cache' and region != 'head'")
    expected = accounting.value(accounting.formulas_of(config).weight_cache, config)
    assert copies["size"].sum() == config.num_layers * expected


def test_peaks_include_optimizer_state_only_in_a_full_step():
    config, _, tables = recorded_steps()
    peaks = tables["peaks"].set_index(["mode", "phase"])
    gib = peaks[[column("gradients"), column("optimizer state")]]
    weights = 4 * parameter_count(config) / GIB
    moments = 2 * weights + 4 * (9 * config.num_layers + 3) / GIB  # both moments and the step counts
    assert gib.loc["step", "forward"].tolist() == [0, moments]
    assert gib.loc["step", "optimizer"].tolist() == [weights, moments]
    assert gib.loc["forward", "forward"].tolist() == [0, 0]
    predicted = [accounting.peak(config, mode).requested / GIB for mode in config.modes]
    assert peaks.xs(TOTAL, level="phase")["requested_gib"].tolist() == predicted
    phases, total = peaks.loc["step"].drop(TOTAL), peaks.loc["step", TOTAL]
    assert phases.index.tolist() == [*PHASES["step"]]
    for name in ("peak_gib", "reserved_gib"):
        assert total[name] == phases[name].max()
    assert total["peak_in"] == phases["peak_gib"].idxmax()


def test_full_step_allocations_are_classified_by_phase_layer_and_kind():
    config, recordings, _ = recorded_steps()
    step = recordings["step"]
    table = history.classify(step, config)
    for phase, begin, end in step.phases:
        assert (table["phase"] == phase).sum() == end.allocations - begin.allocations
    backward = table[table["phase"] == "backward"]
    assert backward["kind"].isin(["gradients", "temporaries"]).all()
    is_softmax = table["region"] == "attention.softmax"
    layers = table[is_softmax].groupby(["phase", "layer"], sort=False).size()
    assert layers["forward"].to_dict() == {0: 5, 1: 5, 2: 5}
    assert layers["backward"].index.tolist() == [2, 1, 0]


@pytest.mark.parametrize("points", [60, 10**6])
@pytest.mark.parametrize("mode", ["forward", "step"])
def test_timeline_keeps_extremes_and_the_phase_of_each_event(monkeypatch, mode, points):
    config, recordings, _ = recorded_steps()
    recording = recordings[mode]
    monkeypatch.setattr(history, "MAX_POINTS", points)
    table = history.classify(recording, config)
    line = history.timeline(recording, table).set_index("event")
    live = history.live_bytes(table)[:, : history._ends(recording)[-1] + 1].sum(axis=0)
    assert min(points // 2, len(live)) <= len(line) <= min(points, len(live))
    assert line.index.is_unique and line.index.is_monotonic_increasing
    total = (line[[column(kind) for kind in LIVE]].sum(axis=1) * GIB).round()
    assert total.max() == max(end.peak_requested for _, _, end in recording.phases)
    assert total.min() == live.min() + sum(bytes_before(recording))
    for name, begin, end in recording.phases:  # row n describes the memory after n events
        first, last = (counts.events - recording.start.events for counts in (begin, end))
        assert set(line.loc[first + 1 : last, "phase"]) <= {name}


def test_largest_allocations_are_grouped_by_size_and_region():
    config, _, tables = recorded_steps()
    rows = tables["allocations"].query("what == 'allocated in forward'")
    assert rows["mib"].is_monotonic_decreasing
    scores = rows[rows["region"] == "attention.softmax"].iloc[0]
    assert scores["mib"] == 4 * config.batch_size * config.num_heads * config.context_length**2 / MIB
    assert scores["count"] == 9, "each of three layers saves shifted scores, exponentials and quotients"


def validate(tables):
    for name, table in tables.items():
        SCHEMAS[name].validate(table)


def test_tables_match_their_schemas_with_unique_keys():
    config, _, tables = recorded_steps()
    validate(tables)
    assert tables["allocations"]["what"].nunique() == 3
    for name, table in run_tables(config, tables).items():
        assert not table.duplicated([*CONFIG, *SCHEMAS[name.partition(".")[2]].unique]).any()


@pytest.mark.parametrize("lost", [0, 100, 250, "weights"])
def test_inconsistent_history_is_rejected(lost):
    config, recordings, _ = recorded_steps()
    recording = copy.deepcopy(recordings["forward"])
    if lost == "weights":
        recording.before["weights"] -= 4
    else:
        del recording.snapshot["device_traces"][0][lost]
    with pytest.raises(StepscopeError, match="but the allocator reports"):
        history.tables(config, [recording])


def test_oom_mode_keeps_its_row_and_does_not_affect_other_modes():
    config = config_of(SHAPES[0])

    def fail_in_backward(step):
        def run(mode, phase=nullcontext):
            step("forward", phase)
            if mode != "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB. Including more")

        return run

    tables = recorded(config, wrapped={"step": fail_in_backward})["tables"]
    forward, step = (rows.iloc[-1] for _, rows in tables["peaks"].groupby("mode"))
    assert (forward["status"], step["status"]) == ("ok", "oom")
    assert step["reason"] == "while warming up, step 0: CUDA out of memory. Tried 9 GiB."
    assert math.isnan(step["peak_gib"]) and step["predicted_gib"] == accounting.peak(config).allocated / GIB
    assert set(tables["timeline"]["mode"]) == {"forward"}
    validate(tables)


def test_recording_restores_nvtx_ranges_and_frees_gradients_and_workspaces(monkeypatch):
    domain, workspaces = type(ranges._domain), [torch.empty(1000)]
    names = cells_of(config_of(SHAPES[0]), "cases = ")
    with stand_in(monkeypatch):
        workspaces[0] = torch.empty(1000)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", workspaces.clear)
        step = partial(names["step"], "step")
        recording = memory_history.record_step(names["subject"], "step", step, names["config"])
    assert recording.before["workspaces"] == 4000
    assert all(weight.grad is None for weight in names["model"].parameters())
    assert type(ranges._domain) is domain


def test_memory_notebook_compares_the_recording_with_the_formulas():
    config = config_of(SHAPES[0], precision="bf16", optimizer="fused", warmup_steps=2)
    names = recorded(config, until=None)
    assert names["each"] == {"weights": 4, "gradients": 4, "AdamW's moments": 8}
    allocated = pytest.approx([accounting.peak(config, mode).allocated / MIB for mode in config.modes])
    predicted = names["predicted"]
    assert predicted.loc["total"].tolist() == predicted.drop(index="total").sum().tolist() == allocated
    assert (names["errors"] == 0).all()
    assert names["number"](predicted.loc["total"].max(), "MiB") in names["sentence"]


def test_recording_steps_keeps_the_weights():
    config = config_of(SHAPES[0], modes=["step"], optimizer="fused")
    before = cells_of(config, "cases = ")["model"].parameters()
    names = recorded(config)
    assert all(map(torch.equal, names["model"].parameters(), before))
    assert names["recordings"].learning_rate == NEGLIGIBLE_RATE < names["adamw"].param_groups[0]["lr"]


# Tensors saved by a block


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_block_saved_bytes_match_the_formula(shape, attention, precision):
    config = config_of(shape, precision=precision, attention=attention)
    names = cells_of(config, "printed = ")
    rows, is_copy = names["rows"], names["is_copy"]
    assert names["counted"] == names["formula"]
    copied = accounting.value(accounting.formulas_of(config).weight_cache, config)
    assert rows.loc[is_copy, "all_bytes"].sum() == copied
    [block_input] = rows.loc[rows["tensor"] == "the block's input", "size"]
    assert block_input == accounting.value("4X", config)
    assert rows["all_bytes"].is_monotonic_decreasing and rows["region"].ne("").all()


def test_saved_tensors_are_listed_with_source_line_and_region():
    rows = cells_of(config_of(SHAPES[0]), "printed = ")["rows"]
    lines = " ".join(rows.loc[rows["region"] == "attention.softmax", "source"])
    assert "torch.exp" in lines and "exponentials / " in lines


# Checkpoints


@pytest.mark.parametrize("blocks", [1, 5, 8])
def test_checkpoint_policies_preserve_gradients_and_match_predicted_bytes_and_block_runs(blocks, monkeypatch):
    """The memory that a policy's step needs beyond the prediction must not depend on the number of blocks."""
    beyond = {}
    for number in (4, blocks):
        config = config_of(SHAPES[0] | {"num_layers": number}, nested_blocks=[number])
        names = cells_of(config, "results, tables = ")
        stream = accounting.value("4X", config)
        saved = accounting.value(accounting.FORMULAS["fp32"].saved, config)
        gradients = []
        with stand_in(monkeypatch) as storages:
            requested = storages.bytes["requested_bytes"]
            model = names["build"](config)
            names["step"](model, policies.no_checkpoints(number), "forward_backward")
            for name, make_policy in policies.POLICIES.items():
                policy = make_policy(number)
                model.model.zero_grad(set_to_none=False)
                before = requested["current"]
                storages.reset_peak()
                names["ran"].clear()
                names["step"](model, policy, "forward_backward")
                kept = policies.saved_bytes(policy, stream, saved)
                beyond.setdefault(name, set()).add(requested["peak"] - before - kept)
                assert len(names["ran"]) == policies.block_runs(policy)
                gradients.append(torch.cat([p.grad.flatten() for p in model.model.parameters()]))
        assert all(torch.equal(gradients[0], other) for other in gradients)
    assert blocks == 1 or all(len(sizes) == 1 for sizes in beyond.values()), beyond


@pytest.mark.parametrize(
    ("name", "runs", "inputs", "saved_blocks"),
    [
        ("none", 16, 1, 16),
        ("square root", 32, 4, 4),
        ("every block", 32, 16, 1),
        ("recursive", 56, 5, 1),
        ("from the input", 152, 1, 1),
    ],
)
def test_checkpoint_policy_costs_for_16_blocks(name, runs, inputs, saved_blocks):
    policy = policies.POLICIES[name](16)
    assert policies.block_runs(policy) == runs
    assert policies.saved_bytes(policy, 1, 0) == inputs
    assert policies.saved_bytes(policy, 0, 1) == saved_blocks


def test_checkpoint_table_lists_every_setting_and_names_the_extremes(monkeypatch):
    states = count()
    monkeypatch.setattr(protocol, "allocated_memory", lambda device: {"state_gib": next(states)})
    shape = SHAPES[0] | {"num_layers": 3}
    modes = ["forward", "forward_backward"]
    config = config_of(shape, modes=modes, blocks_per_checkpoint=[1, 2, 0], **QUICK)
    names = cells_of(config, None)
    table = names["table"]
    SCHEMAS["checkpoints"].validate(table)
    assert table["mode"].tolist() == ["forward"] + ["forward_backward"] * 3
    assert table["checkpoint_policy"].tolist() == ["none", "every 1", "every 2", "none"]
    assert table["block_runs"].tolist() == [3, 6, 6, 3] and table["state_gib"].tolist() == [0, 1, 2, 3]
    peaks = [accounting.peak(config, mode, blocks) for mode, blocks in zip(table["mode"], [0, 1, 2, 0])]
    assert table["predicted_gib"].tolist() == [peak.allocated / GIB for peak in peaks]
    assert (table["status"] == "ok").all() and table[["wall_ms", "gpu_ms"]].gt(0).all(axis=None)
    ranked = table[1:].sort_values("predicted_gib")["checkpoint_policy"].tolist()
    assert re.search(rf"\*\*{ranked[0]}\*\* .*policy {ranked[-1]} ", names["sentence"])


@pytest.mark.parametrize(("complete_steps", "runs"), [(0, [4, 0]), (1, [4, 2])])
def test_oom_checkpoint_policy_keeps_its_row(complete_steps, runs):
    """If at least one step was completed, the row contains the number of block runs."""
    steps = count()

    def fail(run_blocks):
        def run(policy, x, model):
            if policy == [0, 1] and next(steps) >= complete_steps:
                raise torch.OutOfMemoryError("too much")
            return run_blocks(policy, x, model)

        return run

    config = config_of(SHAPES[1], modes=["forward_backward"], blocks_per_checkpoint=[1, 0], warmup_steps=0)
    table = checkpoint_table(config, run_blocks=fail)
    assert table["status"].tolist() == ["ok", "oom"] and table["block_runs"].fillna(0).tolist() == runs
    assert table["wall_ms"].isna().tolist() == [False, True] and "too much" in table["reason"][1]


def test_nested_checkpoints_use_one_model_at_a_time_and_preserve_gradients():
    alive, models, zeroed = [], [], []

    def note_gradients(embedding, inputs):
        gradient = embedding.weight.grad
        zeroed.append(gradient is not None and not gradient.any())

    def watch(build):
        def build_and_watch(shape, kind):
            alive.append(any(model() for model in models))
            subject = build(shape, kind)
            models.append(weakref.ref(subject.model))
            subject.model.embedding.register_forward_pre_hook(note_gradients)
            return subject

        return build_and_watch

    gc.collect()
    config = config_of(SHAPES[1], nested_blocks=[1, 4], **QUICK)
    table = checkpoint_table(config, build=watch)
    SCHEMAS["checkpoints"].validate(table)
    assert (table["block_runs"] == table["expected_runs"]).all()
    assert table["blocks"].tolist() == [1] * 5 + [4] * 5
    costs = (accounting.value("4X", config), accounting.value(accounting.formulas_of(config).saved, config))
    saved = [policies.saved_bytes(make(4), *costs) / GIB for make in policies.POLICIES.values()]
    assert table["expected_saved_gib"][5:].tolist() == saved
    assert alive == [False] * 2
    assert zeroed.count(False) == 2, (
        "all steps start with zeroed gradients, except the two steps that create them"
    )


@pytest.mark.parametrize(
    ("fields", "notebook"),
    [
        ({}, "memory"),
        ({"blocks_per_checkpoint": [1]}, "checkpointing"),
        ({"nested_blocks": [4]}, "checkpointing"),
    ],
)
def test_configuration_selects_its_notebook(fields, notebook):
    config = config_of(SHAPES[1], **fields)
    assert config.notebook == notebook_of(config).stem == config.notebook_for(config.model_dump()) == notebook
    records = [
        record_of(each, software={"notebook_source": each.notebook})
        for each in (config, config_of(SHAPES[1]))
    ]
    assert not mixed_notebook_warnings(records)


def test_checkpointing_notebook_rejects_a_configuration_without_checkpoints():
    with pytest.raises(ConfigError, match="blocks_per_checkpoint, nested_blocks: got neither"):
        run_cells("checkpointing", blocks_per_checkpoint=[], device="cpu")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nested_blocks": [4], "blocks_per_checkpoint": [1]}, "nested_blocks"),
        ({"blocks_per_checkpoint": [9]}, "blocks_per_checkpoint: got 9, but the model has only 3 blocks"),
        ({"modes": []}, "modes"),
    ],
)
def test_invalid_configuration_is_rejected(fields, message):
    with pytest.raises(ConfigError, match=message):
        config_of(SHAPES[0], **fields)


# Snapshots

# The pickle instructions that torch/utils/viz/MemoryViz.js implements.
VIEWER_OPCODES = re.compile(
    "APPENDS?|BIN(FLOAT|GET|INT[12]?|PUT|UNICODE)|DICT|EMPTY_(DICT|LIST|TUPLE)|FRAME|LIST|LONG1|LONG_BIN(GET|PUT)"
    "|MARK|MEMOIZE|NEW(FALSE|TRUE)|NONE|PROTO|SETITEMS?|SHORT_BINUNICODE|STOP|TUPLE[123]?"
)


def test_portable_snapshot_omits_paths_and_is_readable_by_the_viewer():
    path = "stepscope/model/transformer.py"
    files = (f"/home/someone/lib/{path}", f"/home/someone/site-packages/{path}", "/tmp/ipykernel_1/2.py")
    stack = [{"filename": file, "line": 24, "name": "forward"} for file in files]
    entry = {
        "action": "alloc",
        "addr": 2**46,
        "size": 2**33,
        "time_us": 1.75e15,
        "user_metadata": "/home/someone",
    }
    trace = [entry | {"frames": [*stack]} for _ in range(2)]
    content = memory_snapshot.portable({"device_traces": [trace], "segments": []})
    assert all(VIEWER_OPCODES.fullmatch(opcode.name) for opcode, *_ in pickletools.genops(content))
    assert b"someone" not in content and b"ipykernel" not in content
    first, second = pickle.loads(content)["device_traces"][0]
    assert first == entry | {"frames": [stack[0] | {"filename": path}] * 2, "user_metadata": ""}
    assert first["frames"] is second["frames"], "each stack is written only once"


@pytest.mark.parametrize("is_saved", [True, False])
def test_snapshot_of_the_last_mode_is_kept_when_configured(tmp_path, is_saved):
    _, recordings, _ = recorded_steps()
    config = config_of(SHAPES[0], save_snapshot=is_saved)
    files = history.kept_files(config, [*recordings.values()], tmp_path)
    content = memory_snapshot.portable(recordings["forward"].snapshot)
    assert [path.read_bytes() for path in files] == [content] * is_saved


def test_allocations_are_attributed_to_the_innermost_model_line():
    ours, torchs = "/somewhere/lib/stepscope/model", "/a/site-packages/torch"
    linear = (f"{torchs}/nn/modules/linear.py", 1)
    stacks = [
        [linear, (f"{ours}/ranges.py", 2), (f"{ours}/transformer.py", 103)],
        [linear],
        [(f"{torchs}/optim/adamw.py", 7), (f"{ours}/training_step.py", 9)],
    ]
    trace = []
    for address, stack in enumerate(stacks):
        frames = [{"filename": path, "line": line, "name": "call"} for path, line in stack]
        trace.append({"action": "alloc", "addr": address, "size": 8, "frames": frames})
    for action, address in (("segment_free", 0), ("free_requested", 9), ("free_requested", 0)):
        trace.append({"action": action, "addr": address, "size": 8})
    table = memory_snapshot.allocations({"device_traces": [trace]})
    assert table["line"].tolist() == ["stepscope/model/transformer.py:103", "", "torch/optim/adamw.py:7"]
    assert table["freed_at"].tolist() == [4, np.inf, np.inf] and table["allocated_at"].tolist() == [0, 1, 2]


def test_source_line_shows_only_source_of_this_package():
    assert history.source_line("stepscope/model/transformer.py:1").startswith('"""')
    assert history.source_line("torch/optim/adamw.py:7") == ""
