"""The memory study: allocations that have to add up and have their place, what a block saves, checkpoints, snapshots,
tables."""

import gc
import pickle
import pickletools
import weakref
from functools import partial
from itertools import count
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from cells import executed, run_cells
from conftest import record_of
from memory_recording import CudaAutocast, stand_in
from stepscope import StepscopeError
from stepscope.config import ConfigError, configure
from stepscope.measure import memory_history
from stepscope.measure.subject import NEGLIGIBLE_RATE
from stepscope.model import accounting, ranges
from stepscope.model.accounting import GIB, MIB
from stepscope.model.flops import parameter_count
from stepscope.runs.record import mixed_notebook_warnings
from stepscope.runs.run import notebook_of, parameters_of
from stepscope.studies.memory import history, policies
from stepscope.studies.memory.tables import CONFIG, LIVE, SCHEMAS, checkpoint_rows, column, run_tables
from stepscope.traces import memory_snapshot
from test_accounting import SHAPES


def config_of(shape, **fields):
    return configure("memory", device="cpu", **shape, **fields)


pytestmark = pytest.mark.usefixtures("threads_of_torch")


def cells_of(config, until, wrapped=None, **replaced):
    """The names that the configuration's notebook has when it comes to the cell with ``until``."""
    other = {
        "memory": ("blocks_per_checkpoint", "nested_blocks", "timed_steps"),
        "checkpointing": ("save_snapshot",),
    }[config.notebook]
    fields = {name: value for name, value in parameters_of(config).items() if name not in other}
    return run_cells(config.notebook, until, replaced, wrapped, **fields)


def recorded(config, monkeypatch, until="always_there", **replaced):
    """The notebook's names once its cells have recorded, on a CPU as if it were a GPU."""
    monkeypatch.setattr(memory_history, "keeps_history", lambda device: True)
    with stand_in(monkeypatch):
        return cells_of(config, until, **autocast_of(config), **replaced)


def autocast_of(config):
    """What replaces the notebook's autocast in bf16, because a CPU's has other rules."""
    return {"autocast": CudaAutocast()} if config.precision == "bf16" else {}


def saved_by_block(config):
    """What the notebook's cells find that a block saves, on a CPU."""
    return cells_of(config, "is_copy = ", **autocast_of(config))["tables"]["allocations"]


def settings(config, **wrapped):
    """The table of the checkpointing notebook, with functions of its cells wrapped."""
    return cells_of(config, "names = ", wrapped)["table"]


def bytes_of(row):
    """A row's bytes by kind."""
    return {kind: round(row[column(kind)] * GIB) for kind in LIVE}


# -- one step's history --------------------------------------------------------------------------------------

# Beside the blocks': alive after forward (final norm, head's copy, logits), the head's copy, saved by the loss.
AFTER_LOSS = {"fp32": ("12X + 4r + 4V", "0X", "4V + 4"), "bf16": ("10X + 4r + 2V + 2E", "2E", "6V + 4")}


def after_loss(config):
    """Bytes by kind when all is there that backward needs, by formula."""
    f, rest, layers = (
        accounting.formulas_of(config),
        accounting.at_rest(config, "forward_backward"),
        config.num_layers,
    )
    saved, copies, logits, end, head, loss = (
        accounting.value(formula, config)
        for formula in (f.saved, f.weight_cache, f.logits, *AFTER_LOSS[config.precision])
    )
    # the step's own variables hold logits and loss
    return rest | {
        "saved for backward": layers * saved + end - head - logits + loss,
        "autocast weight cache": layers * copies + head,
        "other": rest["other"] + logits + 4,
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peak_is_predicted_and_its_parts_are_of_the_kinds_that_the_formulas_say(
    shape, precision, monkeypatch
):
    config = config_of(shape, precision=precision, modes=["forward", "forward_backward"])
    names = recorded(config, monkeypatch)
    subject, recordings = names["subject"], names["recordings"].histories
    rows = history.tables(config, recordings)["peaks"]
    for mode in config.modes:
        whole = rows[(rows["mode"] == mode) & (rows["phase"] == "total")].iloc[0]
        assert (
            whole["requested_gib"]
            == whole["predicted_requested_gib"]
            == accounting.peak(config, mode).requested / GIB
        )
        assert sum(bytes_of(whole).values()) == round(whole["requested_gib"] * GIB)
        assert whole[column("rounding")] == whole["peak_gib"] - whole["requested_gib"] >= 0
        top = accounting.peak(config, mode)
        assert (whole["peak_in"], whole["region"]) == (top.phase, top.operation.partition(":")[0]) and whole[
            "allocation_gib"
        ] > 0
        assert np.array_equal([whole["layer"]], np.array([top.layer], float), equal_nan=True)
    one = recordings[1]
    assert len(one.gradients) == len([*subject.model.parameters()]), "each is known by its address"
    table, end = history.classify(one, config), history._ends(one)[1]
    live = dict(zip(LIVE, history.live_bytes(table)[:, end] + [one.before.get(kind, 0) for kind in LIVE]))
    assert live == {kind: after_loss(config)[kind] for kind in LIVE}


def test_in_inference_an_activation_of_a_weights_bytes_is_no_copy_of_it(monkeypatch):
    config = config_of(
        SHAPES[0] | {"batch_size": 1, "context_length": 16}, precision="bf16", modes=["forward"]
    )
    (one,) = recorded(config, monkeypatch)["recordings"].histories
    table = history.classify(one, config)
    found = table[
        (table["kind"] == "autocast weight cache") & (table["region"] != "head")
    ]  # logits are of its bytes and stay
    assert found["size"].sum() == 3 * accounting.value(accounting.formulas_of(config).weight_cache, config)


def test_a_full_steps_allocations_have_their_place(monkeypatch):
    config = config_of(SHAPES[0], optimizer="fused")
    recordings = recorded(config, monkeypatch)["recordings"].histories
    step, weights = recordings[1], 4 * parameter_count(config)
    table = history.classify(step, config)
    assert [(table["phase"] == name).sum() for name, *_ in step.phases] == [
        end.allocations - begin.allocations for _, begin, end in step.phases
    ]
    rows = history.tables(config, recordings)["peaks"].set_index(["mode", "phase"])
    assert [phase for mode, phase in rows.index if mode == "step"] == [
        "forward",
        "loss",
        "backward",
        "optimizer",
        "total",
    ]
    assert bytes_of(rows.loc["step", "optimizer"])["gradients"] == weights
    assert bytes_of(rows.loc["step", "forward"])["gradients"] == 0
    assert bytes_of(rows.loc["step", "forward"])["optimizer state"] == 2 * weights + 4 * (9 * 3 + 3)
    assert bytes_of(rows.loc["forward", "forward"])["optimizer state"] == 0
    assert rows.loc["step", "total"]["reserved_gib"] == rows.loc["step"].drop("total")["reserved_gib"].max()
    top = rows.loc["step"].drop("total")["peak_gib"].idxmax()
    assert (
        rows.loc["step", "total"]["peak_in"] == top
        and rows.loc["step", "total"]["peak_gib"] == rows.loc["step", top]["peak_gib"]
    )
    scores = table[(table["region"] == "attention.softmax") & (table["phase"] == "forward")]
    assert scores.groupby("layer").size().tolist() == [5, 5, 5]
    back = table[(table["phase"] == "backward") & (table["region"] == "attention.softmax")]
    assert back.groupby("layer", sort=False).size().index.tolist() == [
        2,
        1,
        0,
    ]  # backward meets the last layer first
    assert table.loc[table["phase"] == "backward", "kind"].isin(["gradients", "temporaries"]).all()


def test_a_mode_without_an_optimizer_has_none_of_its_memory(monkeypatch):
    config = config_of(SHAPES[0], modes=["step", "forward"], optimizer="fused")
    recordings = recorded(config, monkeypatch)["recordings"].histories
    rows = history.tables(config, recordings)["peaks"].set_index(["mode", "phase"])
    assert rows.loc["forward", "total"]["requested_gib"] == accounting.peak(config, "forward").requested / GIB
    assert rows.loc["step", "total"]["requested_gib"] == accounting.peak(config).requested / GIB


def test_a_timeline_keeps_the_peak_and_both_ends(monkeypatch):
    config = config_of(SHAPES[0])
    recordings = recorded(config, monkeypatch)["recordings"].histories
    monkeypatch.setattr(history, "MAX_POINTS", 60)
    for one, table in ((one, history.classify(one, config)) for one in recordings):
        line = history.timeline(one, table)
        total = line[[column(kind) for kind in LIVE]].sum(axis=1)
        assert 30 <= len(line) <= 60 and line["event"].is_unique and line["event"].is_monotonic_increasing
        top = max(end.peak_requested for _, _, end in one.phases)
        assert round(total.max() * GIB) == top
        live = history.live_bytes(table)[:, : history._ends(one)[-1] + 1].sum(axis=0)
        assert round(total.min() * GIB) == live.min() + sum(one.before.get(kind, 0) for kind in LIVE)
        assert list(dict.fromkeys(line["phase"])) == [
            name for name, *_ in one.phases if name != "loss"
        ] or "loss" in set(line["phase"])


def test_every_event_of_a_timeline_is_in_the_phase_that_made_it(monkeypatch):
    config = config_of(SHAPES[0])
    recordings = recorded(config, monkeypatch)["recordings"].histories
    monkeypatch.setattr(history, "MAX_POINTS", 10**6)
    for one in recordings:
        line = history.timeline(one, history.classify(one, config)).set_index("event")["phase"]
        last = one.phases[-1][2].events - one.start.events
        assert line.index.tolist() == list(range(last + 1)) and line[0] == one.phases[0][0]
        for name, begin, end in one.phases:  # after event n the n-th has been
            assert set(line.loc[begin.events - one.start.events + 1 : end.events - one.start.events]) <= {
                name
            }


def test_the_largest_allocations_are_grouped_by_size_and_region(monkeypatch):
    config = config_of(SHAPES[0], modes=["forward"])
    recordings = recorded(config, monkeypatch)["recordings"].histories
    rows = history.tables(config, recordings)["allocations"]
    assert rows["mib"].is_monotonic_decreasing and rows["rank"].tolist() == list(range(1, len(rows) + 1))
    T = config.context_length
    scores = rows[rows["region"] == "attention.softmax"].iloc[0]
    assert scores["mib"] == 4 * config.batch_size * config.num_heads * T * T / MIB
    # shifted, exponentiated, divided: three in each of three layers
    assert scores["count"] == 9


@pytest.mark.parametrize(
    "harm",
    [
        lambda one: one.snapshot["device_traces"][0].pop(0),
        lambda one: one.snapshot["device_traces"][0].pop(100),
        lambda one: one.snapshot["device_traces"][0].pop(250),
        lambda one: one.before.update(weights=one.before["weights"] - 4),
    ],
)
def test_a_history_that_does_not_add_up_is_refused(harm, monkeypatch):
    config = config_of(SHAPES[0], modes=["forward"])
    (one,) = recorded(config, monkeypatch)["recordings"].histories
    harm(one)
    with pytest.raises(StepscopeError, match="but the allocator says"):
        history.tables(config, [one])


def test_out_of_memory_is_a_result_of_its_mode_alone(monkeypatch):
    backward, calls = torch.Tensor.backward, count()

    def full(*arguments):
        if not next(calls):  # of the step whose bytes a parameter are counted
            return backward(*arguments)
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 9 GiB. Including non-PyTorch memory, ..."
        )

    monkeypatch.setattr(torch.Tensor, "backward", full)
    config = config_of(SHAPES[0])
    recordings = recorded(config, monkeypatch)["recordings"].histories
    tables = history.tables(config, recordings)
    whole = tables["peaks"].set_index(["mode", "phase"])
    assert whole.loc["forward", "total"]["status"] == "ok"
    failed = whole.loc["step", "total"]
    assert (
        failed["status"] == "oom"
        and "warming up, step 0" in failed["reason"]
        and "Including" not in failed["reason"]
    )
    assert pd.isna(failed["peak_gib"]) and failed["predicted_gib"] == accounting.peak(config).allocated / GIB
    assert set(tables["timeline"]["mode"]) == {"forward"}
    for name, table in tables.items():
        SCHEMAS[name].validate(table)


def test_ranges_are_nvtxs_again_after_a_recording(monkeypatch):
    before = ranges._domain
    recorded(config_of(SHAPES[0], modes=["forward"]), monkeypatch)
    assert type(ranges._domain) is type(before)


def test_workspaces_are_what_is_freed_with_them_and_no_gradient_stays(monkeypatch):
    names = cells_of(config_of(SHAPES[0]), "cases = ")
    subject, forwards = names["subject"], []
    with stand_in(monkeypatch):
        workspaces = [torch.empty(1000)]
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", workspaces.clear, raising=False)
        subject.model.register_forward_hook(lambda *_: forwards.append(1))
        one = memory_history.record_step(subject, "step", partial(names["step"], "step"), names["config"])
    assert one.before["workspaces"] == 4000 and len(forwards) == 2, "a warm-up, and the step"
    assert all(weight.grad is None for weight in subject.model.parameters())
    states = [memory_history.live_bytes(subject, mode)["optimizer state"] for mode in ("forward", "step")]
    assert states[0] == 0 < states[1], "not the other modes'"


@pytest.mark.parametrize("precision, modes", [("fp32", ["forward", "step"]), ("bf16", ["step", "forward"])])
def test_memory_notebook_compares_what_it_recorded_with_the_formulas(monkeypatch, precision, modes):
    config = config_of(SHAPES[0], modes=modes, precision=precision, optimizer="fused", warmup_steps=2)
    names = recorded(config, monkeypatch, until=None)
    assert names["each"] == {"weights": 4, "gradients": 4, "AdamW's moments": 8}
    tops = [accounting.peak(config, mode) for mode in modes]
    assert (names["unit"], names["scale"]) == ("MiB", MIB) and names["highest"] in tops
    for rows in (names["predicted"].loc["total"], names["predicted"].drop(index="total").sum()):
        assert (rows * MIB).tolist() == pytest.approx([top.allocated for top in tops])
    assert names["counted"] == names["formula"]
    recorded_steps = names["tables"]["peaks"].query("phase == 'total'")
    assert recorded_steps["mode"].tolist() == modes and (names["errors"] == 0).all()
    assert names["number"](max(top.allocated for top in tops) / MIB, "MiB") in names["sentence"]
    large = config_of({"size": "2.7B", "context_length": 512}, modes=modes)
    assert executed("memory", "highest =", names | {"config": large})["unit"] == "GiB"


def test_weights_stay_as_they_are_while_steps_are_recorded(monkeypatch):
    config = config_of(SHAPES[0], modes=["step"], optimizer="fused", warmup_steps=2)
    before = [weight.clone() for weight in cells_of(config, "cases = ")["model"].parameters()]
    names = recorded(config, monkeypatch)
    assert all(map(torch.equal, names["model"].parameters(), before)) and len(before) > 0
    assert names["recordings"].learning_rate == NEGLIGIBLE_RATE < names["adamw"].param_groups[0]["lr"]
    assert (
        cells_of(config_of(SHAPES[0], modes=["forward"]), "always_there")["recordings"].learning_rate is None
    )


def test_without_a_gpu_there_are_predictions_and_the_reason():
    config = config_of(SHAPES[0])
    tables = history.tables(config, [])
    assert (
        tables["peaks"]["status"].tolist() == ["unsupported"] * 2
        and tables["peaks"]["predicted_gib"].gt(0).all()
    )
    assert tables["timeline"].empty and tables["allocations"].empty
    for name, table in tables.items():
        SCHEMAS[name].validate(table)


# -- what one block saves ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_block_saves_what_the_formula_says(shape, attention, precision):
    config = config_of(shape, precision=precision, attention=attention)
    table = saved_by_block(config)
    formulas = accounting.formulas_of(config)
    saved, copies, gradients = (
        accounting.value(formula, config)
        for formula in (formulas.saved, formulas.weight_cache, accounting.BLOCK_GRADIENTS)
    )
    sums = (
        (table["mib"] * table["count"] * MIB)
        .groupby([table["what"], table["tensor"] == "bf16 copy of a weight"])
        .sum()
        .to_dict()
    )
    assert sums.pop(("saved by a block", True), 0) == copies
    assert sums == {("saved by a block", False): saved, ("gradients of a block", False): gradients}
    its_input = table[table["tensor"] == "the block's input"]
    assert (its_input["mib"] * MIB).tolist() == [
        4 * config.batch_size * config.context_length * config.d_model
    ]
    own = table[table["what"] == "saved by a block"]
    assert (own["mib"] * own["count"]).is_monotonic_decreasing and own["region"].ne("").all()
    assert not table.duplicated(["what", "rank"]).any()


def test_a_saved_tensor_is_named_by_the_line_that_makes_it():
    table = saved_by_block(config_of(SHAPES[0]))
    scores = table[table["source"].str.contains("torch.exp")]
    assert scores["region"].tolist() == ["attention.softmax"]
    assert "exponentials / " in table["source"][table["region"] == "attention.softmax"].str.cat(sep=" ")


# -- checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 5, 8])
def test_arrangements_change_no_gradient_run_blocks_as_often_and_keep_as_much_as_told(blocks, monkeypatch):
    """What is kept is right to the byte: beyond it is the same for every number of blocks."""
    beyond = {}
    for number in (4, blocks):
        config = config_of(SHAPES[0] | {"num_layers": number}, nested_blocks=[number])
        names = cells_of(config, "results, tables = ")
        storages = stand_in(monkeypatch)
        gradients = []
        with storages:
            subject = names["build"](config)
            names["step"](subject, policies.no_checkpoints(number), "forward_backward")
            for name, arrange in policies.POLICIES.items():
                subject.model.zero_grad(set_to_none=False)
                state = storages.bytes["requested_bytes"]["current"]
                storages.reset_peak()
                names["ran"].clear()
                names["step"](subject, arrange(number), "forward_backward")
                top = storages.bytes["requested_bytes"]["peak"] - state
                gradients.append(torch.cat([p.grad.flatten() for p in subject.model.parameters()]))
                assert len(names["ran"]) == policies.block_runs(arrange(number))
                stream, of_block = (
                    accounting.value(formula, config) for formula in ("4X", accounting.FORMULAS["fp32"].saved)
                )
                beyond.setdefault(name, set()).add(
                    top - policies.saved_bytes(arrange(number), stream, of_block)
                )
        assert all(torch.equal(gradients[0], other) for other in gradients)
    assert all(len(found) == 1 for name, found in beyond.items() if blocks > 1), beyond


@pytest.mark.parametrize("power", range(1, 8))
def test_what_arrangements_cost_as_functions_of_the_number_of_blocks(power):
    """In inputs of blocks kept (beside one block at work, or as many as stand at a checkpoint) and in runs."""
    blocks = 2**power
    runs, inputs = (
        {name: make(arrange(blocks)) for name, arrange in policies.POLICIES.items()}
        for make in (policies.block_runs, lambda parts: policies.saved_bytes(parts, 1, 0))
    )
    assert inputs["every block"] == blocks and inputs["recursive"] == power + 1
    assert inputs["from the input"] == inputs["none"] == 1
    assert policies.saved_bytes(list(range(blocks)), 0, 1) == blocks
    assert policies.saved_bytes(policies.uniform(blocks, 4), 0, 1) == min(4, blocks)
    assert all(
        policies.saved_bytes(policies.POLICIES[name](blocks), 0, 1) == 1
        for name in ("every block", "recursive", "from the input")
    )
    assert runs["none"] == blocks and runs["every block"] == runs["square root"] == 2 * blocks
    assert runs["recursive"] == 2 * blocks + blocks // 2 * (power - 1)
    assert runs["from the input"] == blocks + blocks * (blocks + 1) // 2


def test_each_setting_has_its_row():
    config = config_of(
        SHAPES[0] | {"num_layers": 3},
        modes=["forward", "forward_backward"],
        blocks_per_checkpoint=[1, 2, 0],
        timed_steps=1,
        warmup_steps=0,
    )
    table = settings(config)
    SCHEMAS["checkpoints"].validate(table)
    rows = table.set_index(["mode", "checkpoint_policy"])
    assert list(rows.index) == [
        ("forward", "none"),
        ("forward_backward", "every 1"),
        ("forward_backward", "every 2"),
        ("forward_backward", "none"),
    ]
    assert rows["block_runs"].tolist() == [3, 6, 6, 3]
    assert rows["predicted_gib"].tolist() == [
        accounting.peak(config, mode, blocks).allocated / GIB
        for mode, blocks in (
            ("forward", 0),
            ("forward_backward", 1),
            ("forward_backward", 2),
            ("forward_backward", 0),
        )
    ]
    assert (rows["status"] == "ok").all() and rows[["wall_ms", "gpu_ms"]].gt(0).all(axis=None)


def test_nested_arrangements_have_their_rows_and_their_gradients_stay():
    config = config_of(SHAPES[1], nested_blocks=[4], timed_steps=1, warmup_steps=0)
    table = settings(config)
    SCHEMAS["checkpoints"].validate(table)
    assert table["checkpoint_policy"].tolist() == list(policies.POLICIES) and set(table["blocks"]) == {4}
    assert (table["block_runs"] == table["expected_runs"]).all()
    stream = 4 * config.batch_size * config.context_length * config.d_model  # of an input
    block = accounting.value(accounting.formulas_of(config).saved, config)
    kept = {
        "none": stream + 4 * block,
        "square root": 2 * stream + 2 * block,
        "every block": 4 * stream + block,
        "recursive": 3 * stream + block,
        "from the input": stream + block,
    }
    assert (table.set_index("checkpoint_policy")["expected_saved_gib"] * GIB).to_dict() == pytest.approx(
        kept, rel=1e-9
    )


def test_checkpoint_rows_hold_each_policys_readings_and_predictions():
    """A policy that failed has no block runs, and keeps the memory that was allocated before it."""
    cases = [("every 1", "step"), ("none", "step")]
    times = pd.DataFrame(cases, columns=["checkpoint_policy", "mode"]).assign(
        phase="total", status=["ok", "oom"], reason=["", "full"], peak_gib=[2.0, None], wall_ms=[5.0, None]
    )
    times = pd.concat([times.assign(phase="forward", peak_gib=None), times])
    rows = checkpoint_rows(
        times,
        {case: {"state_gib": number} for number, case in enumerate(cases)},
        {case: {"predicted_gib": 3.0 + number} for number, case in enumerate(cases)},
        {cases[0]: 7},
        4,
    )
    SCHEMAS["checkpoints"].validate(rows)
    found = rows.set_index("checkpoint_policy")
    assert found["state_gib"].tolist() == [0, 1] and found["predicted_gib"].tolist() == [3, 4]
    assert found["block_runs"].fillna(0).tolist() == [7, 0] and (found["blocks"] == 4).all()
    assert found["peak_gib"].fillna(0).tolist() == [2, 0] and found["reason"].tolist() == ["", "full"]


def test_checkpointing_notebook_names_the_policies_with_least_and_most_memory():
    """Of the fullest mode, of the most blocks, and of what ran."""
    config = config_of(
        SHAPES[0] | {"num_layers": 3},
        modes=["forward", "forward_backward"],
        blocks_per_checkpoint=[1, 2, 0],
        timed_steps=1,
        warmup_steps=0,
    )
    names, said = cells_of(config, "VERBS = "), []
    answer = names["answer"].set_index("checkpoint_policy")
    assert answer.loc[["none", "every block"]].values.tolist() == [[16, 1, 16], [32, 16, 1]]
    assert names["ratio"].to_dict() == {"every 1": 2, "every 2": 2, "none": 1}
    table = names["table"].assign(peak_gib=[0.5, 2.0, 1.0, 7.0])
    others = [
        table.assign(**change, peak_gib=0.1, block_runs=99)
        for change in ({"mode": "forward"}, {"blocks": 2}, {"status": "oom"})
    ]
    rows = pd.concat([*others, table]).reset_index(drop=True)
    executed(
        "checkpointing", "VERBS = ", names | {"table": rows, "run": SimpleNamespace(conclude=said.append)}
    )
    assert "**every 2** peaks at 1.00 GiB" in said[0] and "none peaks at 7.00 GiB" in said[0]
    assert "6 and 3 times" in said[0]


def test_what_does_not_fit_has_its_row_too():
    config = config_of(
        SHAPES[1], modes=["forward_backward"], blocks_per_checkpoint=[1, 0], timed_steps=1, warmup_steps=0
    )

    def without_memory(run_blocks):
        def run(policy, x, model):
            if policy == [0, 1]:
                raise torch.OutOfMemoryError("too much")
            return run_blocks(policy, x, model)

        return run

    rows = settings(config, run_blocks=without_memory).set_index("checkpoint_policy")
    assert rows["status"].to_dict() == {"every 1": "ok", "none": "oom"}
    assert pd.isna(rows.loc["none", "wall_ms"]) and pd.isna(rows.loc["none", "block_runs"])
    assert "too much" in rows.loc["none", "reason"]


def test_block_runs_are_those_of_a_complete_step():
    calls = count()

    def without_memory_in_the_second_step(run_blocks):
        def run(policy, x, model):
            if policy == [1] and next(calls) == 2:
                raise torch.OutOfMemoryError("too much")
            return run_blocks(policy, x, model)

        return run

    config = config_of(SHAPES[1], modes=["forward_backward"], blocks_per_checkpoint=[1], warmup_steps=0)
    table = settings(config, run_blocks=without_memory_in_the_second_step)
    assert table["status"].tolist() == ["oom"] and table["block_runs"].tolist() == [4]


def test_a_model_is_gone_before_the_next_is_built_and_its_gradients_are_added_to():
    """Nothing in it is part of a cycle: twice a large model would not fit."""
    alive, built, kept = [], [], []

    def noted(build):
        def built_and_noted(shape, kind):
            alive.append(sum(model() is not None for model in built))
            subject = build(shape, kind)
            built.append(weakref.ref(subject.model))
            subject.model.embedding.register_forward_pre_hook(
                lambda *_: kept.append(
                    [p.grad is not None and not p.grad.any() for p in subject.model.parameters()]
                )
            )
            return subject

        return built_and_noted

    gc.collect()
    config = config_of(SHAPES[1], nested_blocks=[1, 2], timed_steps=1, warmup_steps=0)
    assert len(settings(config, build=noted)) == 10
    assert alive == [0] * 2
    assert [all(zeros) for zeros in kept].count(False) == 2, "only the two steps that create them"


def test_a_configuration_names_its_notebook():
    """Also where only its fields are known; each notebook refuses what the other measures."""
    plain, checkpoints, nested_blocks = (
        config_of(SHAPES[1], **fields)
        for fields in ({}, {"blocks_per_checkpoint": [1]}, {"nested_blocks": [4]})
    )
    assert [one.notebook for one in (plain, checkpoints, nested_blocks)] == [
        "memory",
        "checkpointing",
        "checkpointing",
    ]
    assert [notebook_of(one).name for one in (plain, nested_blocks)] == [
        "memory.ipynb",
        "checkpointing.ipynb",
    ]
    assert nested_blocks.notebook_for(nested_blocks.model_dump()) == "checkpointing"
    with pytest.raises(ConfigError, match="blocks_per_checkpoint, nested_blocks: got neither"):
        run_cells("checkpointing", blocks_per_checkpoint=[], device="cpu")
    records = [
        record_of(one, software={"notebook_source": one.notebook})
        for one in (plain, checkpoints, nested_blocks)
    ]
    assert not mixed_notebook_warnings(records)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"nested_blocks": [4], "blocks_per_checkpoint": [1]}, "nested_blocks"),
        ({"blocks_per_checkpoint": [9]}, "blocks_per_checkpoint: got 9, but there are 3 blocks"),
        ({"modes": []}, "modes"),
    ],
)
def test_wrong_configurations_are_told(fields, said):
    with pytest.raises(ConfigError, match=said):
        config_of(SHAPES[0], **fields)


# -- snapshots -----------------------------------------------------------------------------------------------

# The instructions that torch/utils/viz/MemoryViz.js carries out.
VIEWER = {
    "APPEND",
    "APPENDS",
    "BINFLOAT",
    "BINGET",
    "BININT",
    "BININT1",
    "BININT2",
    "BINPUT",
    "BINUNICODE",
    "DICT",
    "EMPTY_DICT",
    "EMPTY_LIST",
    "EMPTY_TUPLE",
    "FRAME",
    "LIST",
    "LONG1",
    "LONG_BINGET",
    "LONG_BINPUT",
    "MARK",
    "MEMOIZE",
    "NEWFALSE",
    "NEWTRUE",
    "NONE",
    "PROTO",
    "SETITEM",
    "SETITEMS",
    "SHORT_BINUNICODE",
    "STOP",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
}


def test_a_kept_snapshot_says_the_same_without_paths_and_the_viewer_can_read_it(monkeypatch):
    config = config_of(SHAPES[0], modes=["forward"])
    (one,) = recorded(config, monkeypatch)["recordings"].histories
    stack = [
        {"filename": f"{place}/stepscope/model/transformer.py", "line": 24, "name": "forward"}
        for place in ("/home/someone/lib", "/home/someone/site-packages")
    ]
    stack += [{"filename": "/tmp/ipykernel_1/2.py", "line": 1, "name": "<module>"}]
    for entry in one.snapshot["device_traces"][0]:
        entry |= {
            "frames": [dict(frame) for frame in stack],
            "addr": entry["addr"] + 2**46,
            "time_us": 1.75e15,
            "stream": 0,
            "user_metadata": "/home/someone",
        }
    content = memory_snapshot.portable(one.snapshot)
    assert {opcode.name for opcode, *_ in pickletools.genops(content)} <= VIEWER
    assert b"someone" not in content and b"ipykernel" not in content
    kept, frames = (
        pickle.loads(content),
        [{"filename": "stepscope/model/transformer.py", "line": 24, "name": "forward"}] * 2,
    )
    for entry, original in zip(kept["device_traces"][0], one.snapshot["device_traces"][0], strict=True):
        assert entry == original | {"frames": frames, "user_metadata": ""}
    assert len({id(entry["frames"]) for entry in kept["device_traces"][0]}) == 1


@pytest.mark.parametrize("keep", [True, False])
def test_the_last_modes_snapshot_is_kept_where_that_is_asked_for(monkeypatch, tmp_path, keep):
    monkeypatch.chdir(tmp_path)
    config = config_of(SHAPES[0], modes=["forward", "forward_backward"], save_snapshot=keep)
    names = recorded(config, monkeypatch, until="is_copy = ")
    kept = [path.read_bytes() for path in tmp_path.iterdir()]
    assert kept == [memory_snapshot.portable(names["recordings"].histories[-1].snapshot)] * keep


def test_places_are_the_projects():
    frames = [
        {"filename": "/a/site-packages/torch/nn/modules/linear.py", "line": 1, "name": "forward"},
        {"filename": "/somewhere/lib/stepscope/model/ranges.py", "line": 2, "name": "call"},
        {"filename": "/somewhere/lib/stepscope/model/transformer.py", "line": 103, "name": "forward"},
    ]
    adamw = [
        {"filename": "/a/site-packages/torch/optim/adamw.py", "line": 7, "name": "step"},
        {"filename": "/somewhere/lib/stepscope/model/training_step.py", "line": 9, "name": "__call__"},
    ]
    trace = [
        {"action": "alloc", "addr": 1, "size": 8, "frames": frames},
        {"action": "alloc", "addr": 2, "size": 4, "frames": frames[:1]},
        {"action": "alloc", "addr": 3, "size": 4, "frames": adamw},
        {"action": "segment_free", "addr": 1, "size": 9},
        {"action": "free_requested", "addr": 9, "size": 9},
        {"action": "free_requested", "addr": 1, "size": 8},
    ]
    table = memory_snapshot.allocations({"device_traces": [trace]})
    assert table["line"].tolist() == ["stepscope/model/transformer.py:103", "", "torch/optim/adamw.py:7"]
    assert table["freed_at"].tolist() == [4, np.inf, np.inf] and table["allocated_at"].tolist() == [0, 1, 2]
    assert history.source_line("stepscope/model/transformer.py:1").startswith(
        '"""'
    ) and not history.source_line("torch/optim/adamw.py:7")


# -- tables --------------------------------------------------------------------------------------------------


def test_tables_pass_their_schemas_and_keys_are_unique(monkeypatch):
    config = config_of(SHAPES[0])
    tables = recorded(config, monkeypatch, until="is_copy = ")["tables"]
    assert len(set(tables["allocations"]["what"])) == 3
    for name, table in tables.items():
        SCHEMAS[name].validate(table)
        full = run_tables(config, tables)[f"memory.{name}"]
        key = [*CONFIG, *SCHEMAS[name].unique]
        assert not full.duplicated(key).any() and set(key) <= set(full)
