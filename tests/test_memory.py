"""Memory: formulas against what storages live, snapshots that would run code, allocations that have to add
up."""
import gc
import pickle
import pickletools
import weakref
from pathlib import Path

import pandas as pd
import pytest
import torch

from memory_recording import CudaAutocast, stand_in
from stepscope import StepscopeError
from stepscope.config import configure
from stepscope.runs.record import read_record
from stepscope.step import accounting
from stepscope.step.accounting import MIB
from stepscope.step.training_step import Step, build_step
from stepscope.studies.memory import facts, nesting, saved, snapshot
from stepscope.studies.memory import measure as memory
from stepscope.studies.memory.tables import predicted

SHAPES = [{"d_model": 24, "d_ff": 50, "num_layers": 3, "num_heads": 2, "context_length": 24, "vocab_size": 70,
           "batch_size": 3},
          {"d_model": 12, "d_ff": 90, "num_layers": 2, "num_heads": 3, "context_length": 40, "vocab_size": 30,
           "batch_size": 2},
          {"d_model": 40, "d_ff": 40, "num_layers": 4, "num_heads": 4, "context_length": 10,
           "vocab_size": 400, "batch_size": 1},
          {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 4, "context_length": 70, "vocab_size": 20,
           "batch_size": 2}]


def config_of(shape: dict, **fields):
    return configure("memory", device="cpu", **shape, **fields)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_saves_what_the_formula_says(shape):
    config = config_of(shape, mode="forward_backward")
    table, found = saved.block_saved(build_step(config))
    assert found == {"block_saved_bytes": accounting.value(accounting.FORMULAS["fp32"].saved, config),
                     "block_copies_bytes": 0,
                     "block_gradient_bytes": accounting.value(accounting.BLOCK_GRADIENTS, config)}
    five = facts.largest_saved(table)
    assert five["share"].is_monotonic_decreasing and len(five) == 5
    everything = facts.largest_saved(table, 100)
    assert "activation" not in set(everything["names"])  # all have names in the model's terms
    its_input, = everything.loc[everything["tensor"] == facts.INPUT, "bytes"]
    assert its_input == 4 * config.batch_size * config.context_length * config.d_model
    assert facts.largest_saved(table, 100)["share"].sum() == pytest.approx(1)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_saves_what_the_formula_says_under_cudas_autocast(shape, monkeypatch):
    monkeypatch.setattr(Step, "autocast", lambda step: CudaAutocast())
    config = config_of(shape, mode="forward_backward", precision="bf16")
    table, found = saved.block_saved(build_step(config))
    formulas = accounting.FORMULAS["bf16"]
    assert "activation" not in set(facts.largest_saved(table, 100)["names"])
    assert found["block_copies_bytes"] == accounting.value(formulas.copies, config)
    saved_bytes, copies = (accounting.value(formula, config) for formula in (formulas.saved, formulas.copies))
    assert found["block_saved_bytes"] == saved_bytes + copies


def recorded(config, monkeypatch):
    if config.precision == "bf16":
        monkeypatch.setattr(Step, "autocast", lambda step: CudaAutocast())
    storages = stand_in(monkeypatch)
    with storages:
        return memory.record(config)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["forward", "forward_backward"])
def test_predicted_peak_and_categories_are_what_lives(shape, precision, mode, monkeypatch):
    config = config_of(shape, mode=mode, precision=precision)
    _, tables, found = recorded(config, monkeypatch)
    expected = accounting.peak(config)
    assert found["steady_peak_requested_mib"] * MIB == expected.bytes
    if mode != "forward":
        after_loss = predicted(config).query("moment == 'after loss'").set_index("category")["bytes"]
        levels = tables["levels"].query("step == 1 and phase == 'loss' and moment == 'end'")
        levels = levels.set_index("category")["bytes"]
        assert after_loss.drop("allocator rounding").to_dict() == levels.drop("allocator rounding").to_dict()


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_predicted_peak_with_checkpoints(blocks, monkeypatch):
    config = config_of(SHAPES[0] | {"num_layers": 5}, mode="forward_backward")
    storages = stand_in(monkeypatch)
    with storages:
        step = build_step(config)
        with nesting.arranged(step.model, nesting.every(5, blocks)):
            for _ in range(2):
                step.clear_gradients()
                storages.reset_peak()
                step()
    assert storages.bytes["requested_bytes"]["peak"] == accounting.peak(config, blocks).bytes


@pytest.mark.parametrize("blocks", [1, 5, 8])
def test_arrangements_change_no_gradient_run_blocks_as_often_and_keep_as_much_as_told(blocks, monkeypatch):
    """What is kept is right to the byte: beyond it is the same for every number of blocks."""
    beyond = {}
    for number in (4, blocks):
        config = config_of(SHAPES[0] | {"num_layers": number}, mode="forward_backward", stacks=[number])
        storages = stand_in(monkeypatch)
        gradients = []
        with storages:
            step = build_step(config)
            step()
            for name, arrange in nesting.ARRANGEMENTS.items():
                runs = []
                hooks = [block.register_forward_pre_hook(lambda *called: runs.append(1))
                         for block in step.model.blocks]
                step.model.zero_grad(set_to_none=False)
                state = storages.bytes["requested_bytes"]["current"]
                storages.reset_peak()
                with nesting.arranged(step.model, arrange(number)):
                    step()
                for hook in hooks:
                    hook.remove()
                assert len(runs) == nesting.block_runs(arrange(number))
                top = storages.bytes["requested_bytes"]["peak"] - state
                stream, of_block = (accounting.value(formula, config)
                                    for formula in ("4X", accounting.FORMULAS["fp32"].saved))
                beyond.setdefault(name, set()).add(top - nesting.kept(arrange(number), stream, of_block))
                gradients.append(torch.cat([p.grad.flatten() for p in step.model.parameters()]))
        assert all(torch.equal(gradients[0], other) for other in gradients)
    assert all(len(found) == 1 for name, found in beyond.items() if blocks > 1), beyond


@pytest.mark.parametrize("power", range(1, 8))
def test_what_arrangements_cost_as_functions_of_the_number_of_blocks(power):
    """In inputs of blocks kept (beside one block at work, or as many as stand at a checkpoint) and in runs."""
    blocks = 2**power
    runs, inputs = ({name: make(arrange(blocks)) for name, arrange in nesting.ARRANGEMENTS.items()}
                    for make in (nesting.block_runs, lambda parts: nesting.kept(parts, 1, 0)))
    assert inputs["every block"] == blocks and inputs["halved"] == power + 1
    assert inputs["from the start"] == inputs["none"] == 1
    assert nesting.kept(list(range(blocks)), 0, 1) == blocks
    assert nesting.kept(nesting.every(blocks, 4), 0, 1) == min(4, blocks)
    assert all(nesting.kept(nesting.ARRANGEMENTS[name](blocks), 0, 1) == 1
               for name in ("every block", "halved", "from the start"))
    assert runs["none"] == blocks and runs["every block"] == runs["square root"] == 2 * blocks
    assert runs["halved"] == 2 * blocks + blocks // 2 * (power - 1)
    assert runs["from the start"] == blocks + blocks * (blocks + 1) // 2


def test_a_model_is_gone_before_the_next_is_built(monkeypatch):
    """Nothing in it is part of a cycle: twice a large model would not fit."""
    alive, built = [], []
    build = memory.build_step

    def noted(config):
        alive.append(sum(model() is not None for model in built))
        step = build(config)
        built.append(weakref.ref(step.model))
        return step
    monkeypatch.setattr(memory, "build_step", noted)
    monkeypatch.setattr(memory, "release", lambda *given, **named: None)
    gc.collect()
    gc.disable()
    try:
        memory.measure_checkpoints(config_of(SHAPES[1] | {"context_length": 8}, mode="forward_backward",
                                             checkpoints=[1, 0], contexts=[4, 6, 8]))
        memory.measure_stacks(config_of(SHAPES[1], mode="forward_backward", stacks=[1, 2, 4]))
    finally:
        gc.enable()
    assert alive == [0] * 6


def test_a_full_steps_allocations_have_their_place(monkeypatch):
    config = config_of(SHAPES[0], mode="step")
    _, tables, _ = recorded(config, monkeypatch)
    table, levels = tables["allocations.parquet"], tables["levels"]
    ends = levels[levels["moment"] == "end"].set_index(["step", "phase", "category"])["bytes"]
    weights = 4 * accounting.parameter_count(config)
    assert ends[1, "optimizer", "parameters"] == ends[0, "backward", "gradients"] == weights
    assert ends[0, "backward", "optimizer state"] == 0
    assert ends[1, "forward", "optimizer state"] >= 2 * weights
    steady = table[table["step"] == 1]
    scores = steady[(steady["region"] == "attention.softmax") & (steady["phase"] == "forward")]
    assert scores.groupby("layer").size().tolist() == [5, 5, 5]
    back = steady[(steady["phase"] == "backward") & (steady["region"] == "attention.softmax")]
    # Backward meets the last layer first.
    assert back.groupby("layer", sort=False).size().index.tolist() == [2, 1, 0]
    assert steady.loc[steady["phase"] == "backward", "category"].isin(["gradients", "temporaries"]).all()


def test_history_that_does_not_add_up_is_refused(monkeypatch):
    storages = stand_in(monkeypatch)
    storages.dump_all = storages.dump

    def dump(path):
        del storages.trace[len(storages.trace) // 2]
        storages.dump_all(path)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    with storages, pytest.raises(StepscopeError, match="bytes"):
        memory.record(config_of(SHAPES[0], mode="forward"))


def test_out_of_memory_is_told_as_it_is(monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("full")
    monkeypatch.setattr(torch.Tensor, "backward", full)
    with stand_in(monkeypatch), pytest.raises(torch.OutOfMemoryError, match="running step 0"):
        memory.record(config_of(SHAPES[0], mode="step"))


# The instructions that torch/utils/viz/MemoryViz.js carries out.
VIEWER = {"APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE",
          "DICT", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET",
          "LONG_BINPUT", "MARK", "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS",
          "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}


def test_a_kept_snapshot_says_the_same_without_paths(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    storages = stand_in(monkeypatch)
    stack = [{"filename": f"{place}/stepscope/step/model.py", "line": 24, "name": "forward"}
             for place in ("/home/someone/lib", "/home/someone/site-packages")]
    stack += [{"filename": "/tmp/ipykernel_1/2.py", "line": 1, "name": "<module>"}]
    storages.dump_plain = storages.dump

    def dump(path):
        for entry in storages.trace:
            entry |= {"frames": [dict(frame) for frame in stack], "addr": entry["addr"] + 2**46,
                      "time_us": 1.75e15, "stream": 0, "user_metadata": "/home/someone"}
        storages.dump_plain(path)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    with storages:
        memory.record(config_of(SHAPES[0], mode="forward", keep_snapshot=True))
    content = memory.SNAPSHOT.read_bytes()
    kept = snapshot.load_snapshot(memory.SNAPSHOT)
    assert {opcode.name for opcode, *_ in pickletools.genops(content)} <= VIEWER
    assert b"someone" not in content and b"ipykernel" not in content
    frames = [{"filename": "stepscope/step/model.py", "line": 24, "name": "forward"}] * 2
    for entry, original in zip(kept["device_traces"][0], storages.trace, strict=True):
        assert entry == original | {"frames": frames, "user_metadata": ""}
    assert len({id(entry["frames"]) for entry in kept["device_traces"][0]}) == 1


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_snapshot_that_would_run_code_is_refused(tmp_path):
    mark, file = tmp_path / "was-here", tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps({"device_traces": [[]], "segments": [Hostile(mark)]}))
    with pytest.raises(snapshot.SnapshotError, match="plain data only"):
        snapshot.load_snapshot(file)
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps([1, 2]),
                                     pickle.dumps({"device_traces": 3}),
                                     pickle.dumps({"segments": []}),
                                     pickle.dumps({"device_traces": []})[:-5]])
def test_file_that_is_no_snapshot_is_named(tmp_path, content):
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(content)
    with pytest.raises(snapshot.SnapshotError, match=r"snapshot\.pickle"):
        snapshot.load_snapshot(file)


def test_places_are_the_projects():
    frames = [{"filename": "/a/site-packages/torch/nn/modules/linear.py", "line": 1, "name": "forward"},
              {"filename": "/somewhere/lib/stepscope/annotate.py", "line": 2, "name": "call"},
              {"filename": "/somewhere/lib/stepscope/model.py", "line": 103, "name": "forward"}]
    history = {"device_traces": [[{"action": "alloc", "addr": 1, "size": 8, "frames": frames},
                                  {"action": "alloc", "addr": 2, "size": 4, "frames": frames[:1]},
                                  {"action": "segment_free", "addr": 1, "size": 9},
                                  {"action": "free_requested", "addr": 1, "size": 8}]]}
    table = snapshot.allocations(history)
    assert table["line"].tolist() == ["stepscope/model.py:103", "torch/nn/modules/linear.py:1"]
    assert table["freed_at"].tolist() == [2, pd.NA] and table["allocated_at"].tolist() == [0, 1]


def test_h200_peaks_are_predicted():
    """Sixty fp32 peaks that were measured before the formulas were written."""
    off = {}
    for folder in (Path(__file__).parents[1] / "runs/h200/benchmark").iterdir():
        record = read_record(folder)
        if record.status == "ok":
            fields = {k: v for k, v in record.config.items() if k not in ("study", "device")}
            peak_mib = accounting.peak(accounting.on_gpu(**fields)).allocated / MIB
            off[record.run_id] = peak_mib / record.results["peak_allocated_mib"] - 1
    assert len(off) >= 60
    assert max(abs(e) for run, e in off.items() if run.startswith("2.7B")) < 0.01
    assert sum(abs(e) < 0.01 for e in off.values()) >= len(off) - 3 and max(map(abs, off.values())) < 0.025


def test_what_fits():
    config = accounting.on_gpu(size="2.7B", context_length=512)
    largest = accounting.largest_that_fits(config, "context_length", 143_156)
    at = config.model_copy(update={"context_length": largest})
    beyond = config.model_copy(update={"context_length": largest + 1})
    assert accounting.peak(at).allocated <= 143_156 * MIB < accounting.peak(beyond).allocated
    assert accounting.largest_that_fits(config, "batch_size", 1_000) == 0
    with pytest.raises(accounting.AccountingError, match="compile"):
        accounting.peak(config.model_copy(update={"compile": True}))


@pytest.mark.parametrize(
    "entry", [{"size": "8"}, {"size": -8}, {"size": 2**63}, {"size": 8.5}, {"addr": [1]}]
)
def test_sizes_and_addresses_that_no_memory_has_are_refused(entry):
    history = {"device_traces": [[{"action": "alloc", "addr": 1, "size": 8, "frames": []} | entry]]}
    with pytest.raises(snapshot.SnapshotError, match="is no address or size of 64 bits"):
        snapshot.allocations(history)
