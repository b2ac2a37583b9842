"""Test the distributed step: strategies, controls, the ranks' profiles, and ranks that fail."""

import contextlib
import copy
import gc
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from types import SimpleNamespace

import pandas as pd
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from cells import run_cells
from stepscope import PROJECT
from stepscope.config import ConfigError, configure
from stepscope.model.flops import parameter_count
from stepscope.optimizations import distributed_step
from stepscope.optimizations.distributed_step import Batch, Distributed, adamw, alone, training_step
from stepscope.runs.machine import software
from stepscope.studies.distributed import figures, launch, process
from stepscope.studies.distributed.config import STRATEGIES
from stepscope.studies.distributed.launch import measure_strategies
from stepscope.studies.distributed.tables import (
    PARTS,
    SCHEMAS,
    bandwidth,
    efficiency,
    hidden_ms,
    memory,
    slowdown,
)

TINY = {
    "size": "nano",
    "context_length": 32,
    "vocab_size": 200,
    "batch_size": 2,
    "device": "cpu",
    "compile": "none",
}


def flat(model, batch):
    """Leave the gradients unaveraged; the numerics check must detect this fault."""
    optimizer = adamw(model)
    return Distributed(training_step(model, optimizer, batch), list, optimizer)


def overlapped(model, batch):
    """Make rank 1 exit without an error message, to test how the notebook reports a lost rank."""
    import os  # imported here, because the ranks receive only the source of this function

    if dist.get_rank() == 1:
        os._exit(3)
    return alone(model, batch)


def slept(step, seconds):
    """Return a step that first sleeps for this many seconds; ``zero1`` below uses this step to delay a rank."""
    import time

    def late_step():
        time.sleep(seconds)
        return step()

    return late_step


def zero1(model, batch):
    """Make rank 1 sleep for 0.3 s before each step, so that rank 0 waits for rank 1 in the first all-reduce."""
    distributed = naive(model, batch)  # noqa: F821 defined by the script
    seconds = 0.3 if dist.get_rank() == 1 else 0
    return distributed._replace(step=slept(distributed.step, seconds))


FIELDS = TINY | {
    "strategies": [
        "alone",
        "naive",
        "flat",
        "overlapped",
        "ddp_alone",
        "ddp_25_mib",
        "fsdp_alone",
        "fsdp",
        "fsdp_4_blocks",
        "zero1",
    ],
    "timed_steps": 2,
    "warmup_steps": 3,
    "collectives": True,
    "numerics": True,
}


@pytest.fixture(scope="module")
def results():
    """Execute the notebook's cells on two ranks with the functions above; return the notebook's results."""
    measure = partial(measure_strategies, flat=flat, overlapped=overlapped, slept=slept, zero1=zero1)
    return run_cells("distributed", replaced={"measure_strategies": measure}, **FIELDS)["results"]


@pytest.fixture(scope="module")
def steps(results):
    return results.steps.set_index("strategy")


def test_tables_match_their_schemas(results):
    for name, schema in SCHEMAS.items():
        schema.validate(results.tables[name])


def test_time_parts_of_each_rank_add_up_to_its_profiled_step(results):
    ranks = results.ranks
    assert ranks.groupby("strategy").size().eq(2).all()
    total_ms = ranks[[f"{part}_ms" for part in PARTS]].sum(axis=1)
    assert total_ms.to_numpy() == pytest.approx(ranks["profiled_ms"].to_numpy(), rel=1e-3)


def test_controls_do_not_communicate(results, steps):
    controls = [name for name, strategy in STRATEGIES.items() if not strategy.control and name in steps.index]
    assert len(controls) == 3
    communication_ms = results.ranks.groupby("strategy")["communication_ms"].max()
    assert (steps.loc[controls, "messages"] == 0).all()
    # gloo, unlike NCCL, runs the all-reduces of ddp_alone, whose groups have one rank
    assert (communication_ms[["alone", "fsdp_alone"]] == 0).all()
    assert (communication_ms[["naive", "ddp_25_mib", "fsdp"]] > 0).all()


def test_messages_contain_each_gradient_once(steps):
    config = configure("distributed", **FIELDS)
    assert steps.loc["naive", "parameters"] == parameter_count(config)
    gradient_gib = 4 * parameter_count(config) / 2**30
    assert steps.loc["naive", "message_gib"] == pytest.approx(gradient_gib)
    assert steps.loc["ddp_25_mib", "message_gib"] == pytest.approx(gradient_gib)
    gathered_and_reduced = steps.loc["fsdp", "message_gib"]
    # all weights are gathered in bf16, and the blocks' weights are gathered twice
    assert gradient_gib < gathered_and_reduced < 2 * gradient_gib
    # nano's two blocks are one group
    assert steps.loc["fsdp_4_blocks", "message_gib"] == pytest.approx(gathered_and_reduced)
    assert steps.loc[["fsdp", "fsdp_4_blocks"], "messages"].tolist() == [8, 5]


def test_gradients_match_one_accumulating_rank_only_when_ranks_average_them(results):
    errors = results.numerics.pivot(index="strategy", columns="compared_in", values="gradient_error")
    averaged = errors.drop(index=["flat"])
    assert {"naive", "ddp_25_mib", "fsdp", "fsdp_4_blocks", "zero1"} <= {*averaged.index}
    assert (averaged["fp32"] <= 1e-5).all() and (averaged["bf16"] <= 1e-2).all()
    assert (errors.loc["flat"] > 0.1).all()


def test_delay_on_one_rank_counts_as_waiting_on_the_other_rank(results):
    ranks = results.ranks.set_index(["strategy", "rank"])
    on_time, late = ranks.loc[("zero1", 0)], ranks.loc[("zero1", 1)]
    added_ms = on_time["waiting_ms"] - ranks.loc[("naive", 0), "waiting_ms"]
    assert added_ms == pytest.approx(300, rel=0.3)
    assert late["waiting_ms"] < 150 and late["idle_ms"] > 250
    assert late["arrives_last"] >= 1


def test_dead_rank_is_recorded_as_failed_and_later_strategies_are_measured(steps):
    assert steps.loc["overlapped", "status"] == "failed"
    assert steps.loc["overlapped", "reason"] == "rank 1 exited with status 3"
    assert (steps.drop(index="overlapped")["status"] == "ok").all()


def test_wait_ends_when_a_rank_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "LIMIT_S", 0.5)
    sleeping = subprocess.Popen(["sleep", "60"])
    try:
        assert launch._wait(sleeping, tmp_path, ["naive"]) == "no result after 0.5 s"
    finally:
        sleeping.kill()
        sleeping.wait()


SUMMARY = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : {} (pid: 8680)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : {} (pid: 8681)
============================================================
"""
LOST = {"status": "failed", "reason": "rank 0: Connection closed by peer", "time_ns": 20}


@pytest.mark.parametrize(
    ("codes", "errors", "expected"),
    [
        ((1, -9), {0: LOST}, ("failed", "rank 1 was killed by SIGKILL")),
        ((-15, -11), {}, ("failed", "rank 1 was killed by SIGSEGV")),
        ((1, 1), {0: LOST, 1: {"status": "failed", "reason": "rank 1: first", "time_ns": 10}}, ("failed", "rank 1: first")),
        ((1, -6), {0: LOST | {"status": "oom", "reason": "rank 0: no memory"}}, ("oom", "rank 0: no memory")),
        ((-15, -15), {}, ("failed", "the ranks ended without a result: exitcode : -15 (pid: 8681)")),
    ],
    ids=["killed", "silent", "first", "oom", "other"],
)  # fmt: skip
def test_reason_for_a_failure_is_its_cause(tmp_path, codes, errors, expected):
    (tmp_path / "log.txt").write_text(SUMMARY.format(*codes))
    for rank, error in errors.items():
        (tmp_path / f"error.{rank}").write_text(json.dumps(error))
    assert launch._failure(tmp_path, "") == expected


def test_reason_for_a_hang_names_the_function_of_each_rank(tmp_path):
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from threading import Thread\n"
        "from stepscope.studies.distributed.process import end_with_launcher\n"
        "Thread(target=end_with_launcher, args=[Path(sys.argv[1])]).start()\n"
        "def stuck():\n"
        "    while True: print('ready', flush=True); time.sleep(60)\n"
        "stuck()\n"
    )
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, tmp_path / "program.py", tmp_path / "place.1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout.readline()
        rank.stdin.close()
        assert rank.wait(60) == 1
    _, reason = launch._failure(tmp_path, "no result after 120 s")
    assert reason == "no result after 120 s; rank 1 was in stuck of program.py"


def test_each_failing_rank_writes_its_error(tmp_path, monkeypatch):
    def fail(*_):
        raise SystemExit(3)

    monkeypatch.setattr(process, "Rank", fail)
    monkeypatch.setattr(process, "end_with_launcher", lambda place: None)
    monkeypatch.setattr(process.os, "_exit", fail)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            process.main(tmp_path, None, ["naive"])
        error = json.loads((tmp_path / f"error.{rank}").read_text())
        assert (error["status"], error["reason"]) == ("failed", f"rank {rank}: SystemExit: 3")


def test_record_keeps_the_settings_of_nccl_without_hosts_and_paths(monkeypatch):
    settings = {"NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "^Tree", "NCCL_HOSTID": "node7"}
    settings |= {"NCCL_TOPO_FILE": "/etc/topology.xml", "NCCL_COMM_ID": "10.0.0.1:80"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    kept = {name: value for name, value in software().items() if name.startswith("NCCL_")}
    assert kept == {"NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "^Tree"}


def test_odd_repeats_measure_in_reverse_order(monkeypatch):
    measured = []

    def fail_all(config, folder, names):
        measured.append(names)
        return dict.fromkeys(names, ("failed", "not run"))

    monkeypatch.setattr(launch, "run_ranks", fail_all)
    for repeat in (0, 1):
        strategies = ["alone", "naive", "flat"]
        results = measure_strategies(configure("distributed", **TINY, strategies=strategies, repeat=repeat))
        assert results.steps["strategy"].tolist() == strategies
    assert measured[0] == ["alone", "naive", "flat", "alone.profile", "naive.profile", "flat.profile"]
    assert measured[1] == ["flat", "naive", "alone", "flat.profile", "naive.profile", "alone.profile"]


def test_child_that_imports_the_script_does_not_measure_again():
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        measured = pool.submit(measure_strategies, configure("distributed", **TINY, strategies=["alone"]))
        with pytest.raises(launch.DistributedError, match="if __name__ == '__main__'"):
            measured.result()


@pytest.mark.slow
def test_ranks_end_when_their_parent_is_killed(tmp_path):
    program = (
        "from stepscope.config import configure\n"
        "from stepscope.studies.distributed.launch import measure_strategies\n"
        f"if __name__ == '__main__': measure_strategies(configure('distributed', **{TINY}, timed_steps=50))"
    )
    (tmp_path / "program.py").write_text(program)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "program.py")], env=None)
    processes = psutil.Process(parent.pid)
    deadline = time.monotonic() + 60
    while len(children := processes.children(recursive=True)) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(children) >= 3  # torchrun and two ranks
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


def run_on_two_ranks(command):
    """Return both ranks' outputs; set torchrun's environment directly, because starting it would take seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "PATH": "", "PYTHONPATH": "docs"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=PROJECT,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return outputs


def test_script_trains_on_two_ranks():
    shape = {"width": 32, "hidden": 64, "layers": 1, "heads": 2, "vocabulary": 100, "context": 16}
    options = [f"--{name}={value}" for name, value in shape.items()]
    outputs = run_on_two_ranks(["docs/distributed_step.py", "--strategy=ddp", "--steps=2", *options])
    assert "ddp: " in outputs[0] and "on 2 ranks" in outputs[0], outputs[0]


TRAIN_WITH_EACH_STRATEGY = """
import torch
from distributed_step import *
from fast_step import Model

start_process_group()
own = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
tokens = torch.randint(100, (2, 4, 16), generator=torch.Generator().manual_seed(1))


def change(strategy, tokens):
    torch.manual_seed(0)
    model = Model(32, 64, 4, 2, 100, 16)
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    step = strategy(model, Batch(*tokens, precision="fp32")).step
    for _ in range(3):
        step()
    whole = [getattr(parameter, "full_tensor", lambda: parameter)() for parameter in model.parameters()]
    return torch.cat([parameter.detach().flatten() for parameter in whole]) - before


expected = change(alone, tokens)
for name, strategy in {
    "alone": alone,
    "naive": naive,
    "flat": flat,
    "overlapped": overlapped,
    "ddp": ddp,
    "ddp with views": partial(ddp, gradient_views=True),
    "zero1": zero1,
    "fsdp": fsdp,
    "fsdp without resharding": partial(fsdp, reshard=False),
    "fsdp in groups of blocks": partial(fsdp, blocks_per_group=3),
}.items():
    error = (change(strategy, tokens[:, own]) - expected).norm() / expected.norm()
    print(f"error of {name}: {error.item():.3g}", flush=True)
    gc.collect()  # as in the script
dist.barrier()
dist.destroy_process_group()
"""


def test_three_steps_change_the_weights_as_on_one_rank_with_all_data(tmp_path):
    """Compare weights, because equal gradients don't prove that sharded optimizers update all weights."""
    program = tmp_path / "train.py"
    program.write_text(TRAIN_WITH_EACH_STRATEGY)
    for output in run_on_two_ranks([str(program)]):
        errors = {name: float(error) for name, error in re.findall("error of (.*): (.*)", output)}
        assert len(errors) == 10, output
        assert errors.pop("alone") > 0.1
        assert max(errors.values()) < 1e-3, errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "start this script with torchrun, for example: torchrun --nproc_per_node=2 distributed_step.py"),
        (["--strategy=ddp_graph"], "ddp_graph needs a GPU for its CUDA graph; select another --strategy"),
    ],
)
def test_script_run_incorrectly_gives_one_line_error(arguments, message):
    command = [sys.executable, "docs/distributed_step.py", *arguments]
    environment = {"PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, message + "\n")


def test_rank_without_a_gpu_gives_one_line_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(os, "environ", {"RANK": "2", "LOCAL_RANK": "2"})
    with pytest.raises(SystemExit, match="no GPU for rank 2: start at most 2, with --nproc_per_node=2"):
        distributed_step.start_process_group()


def test_nccl_error_handling_is_off_only_for_graphs(monkeypatch):
    environment = {"RANK": "0"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    distributed_step.start_process_group()
    assert environment == {"RANK": "0"}
    distributed_step.start_process_group(for_graph=True)
    assert environment == {"RANK": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


@pytest.fixture
def one_rank():
    """Join a process group of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # otherwise, gloo may hang
    dist.destroy_process_group()


@pytest.fixture
def cuda_stub(monkeypatch):
    """Replace the functions of torch.cuda that `in_graph` calls. A capture then executes the step."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    replacements = {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_device": lambda: 0,
        "get_rng_state": lambda device: None,
        "set_rng_state": lambda state, device: None,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "CUDAGraph": lambda: None,
        "graph": lambda graph, stream: contextlib.nullcontext(),
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)


def small_model(dtype=torch.float32):
    """Return a model with dropout and with buffers that change during training, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 10))
    batch = Batch(torch.randn(4, 3, dtype=dtype), torch.randint(10, (4,)), "fp32")
    return model.to(dtype), batch


def test_building_a_graph_changes_neither_model_nor_optimizer_nor_random_state(cuda_stub):
    model, batch = small_model()
    rate = torch.tensor(1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    train = training_step(model, optimizer, batch)
    states = []

    def step():
        moments = [each["exp_avg"] for each in optimizer.state.values()]
        random = torch.get_rng_state()
        states.append(copy.deepcopy(({"random": random} | model.state_dict(), moments)))
        return train()

    def make():
        return Distributed(step, list, optimizer)

    assert distributed_step.in_graph(make, model).optimizer is optimizer
    before, (warm, _), (captured, moments) = states[0][0], states[-2], states[-1]
    assert len(states) == 12 and not torch.equal(warm["1.running_mean"], before["1.running_mean"])
    torch.testing.assert_close(captured, before, rtol=0, atol=0)
    assert len(moments) == 6 and not any(moment.any() for moment in moments)
    # the step that was captured was the optimizer's first one, at the original rate
    assert optimizer.param_groups[0]["lr"] is rate and rate == torch.tensor(1e-3)
    assert all(each["step"] == 1 for each in optimizer.state.values())


def test_ddp_graph_uses_and_returns_the_optimizer_that_the_caller_makes(one_rank, cuda_stub):
    model, batch = small_model()
    optimizer = adamw(model)
    distributed = distributed_step.ddp_graph(model, batch, make_optimizer=lambda model: optimizer)
    assert distributed.optimizer is optimizer and optimizer.state


@pytest.mark.parametrize("strategy", ["naive", "flat", "overlapped", "ddp"])
def test_frozen_parameters_are_not_communicated_and_messages_have_the_gradients_dtype(one_rank, strategy):
    model, batch = small_model(torch.bfloat16)
    model[0].weight.requires_grad_(False)
    distributed = distributed_step.STRATEGIES[strategy](model, batch)
    for _ in range(2):
        distributed.step()
    messages = distributed.messages()
    assert {message.dtype for message in messages} == {torch.bfloat16}
    assert sum(message.elements for message in messages) == 8 + 8 + 8 + 8 * 10 + 10


def test_gradient_views_share_the_memory_of_the_bucket_and_train_alike(one_rank):
    storages, trained = [], []
    for gradient_views in (False, True):
        model, batch = small_model()
        step = distributed_step.ddp(model, batch, gradient_views=gradient_views).step
        for _ in range(3):
            step()
        storages.append({parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()})
        trained.append(model.state_dict())
    assert len(storages[1]) == 1 < len(storages[0])
    torch.testing.assert_close(trained[1], trained[0], rtol=0, atol=0)


def test_ddp_control_runs_the_same_operations_as_ddp(one_rank):
    operations = {}
    for communicate in (True, False):
        model, batch = small_model()
        distributed = distributed_step.ddp(model, batch, communicate=communicate)
        assert bool(distributed.messages()) == communicate
        for _ in range(2):  # DDP rebuilds its buckets in the second step
            distributed.step()
        with torch.profiler.profile() as profile:
            distributed.step()
        operations[communicate] = Counter(event.name for event in profile.events())
    assert operations[False] == operations[True] and operations[True]["c10d::allreduce_"] == 1


@pytest.mark.parametrize("name", ["ddp_graph", "ddp_bf16_gradients"])
def test_strategy_that_needs_a_gpu_is_rejected_on_a_cpu_and_omitted_by_default(name):
    with pytest.raises(ConfigError, match=f"strategies: got {name}, but .* need a GPU"):
        configure("distributed", **TINY, strategies=[name])
    assert name not in configure("distributed", **TINY).names
    assert "fsdp_bf16_reduction" in configure("distributed", **TINY).names


def test_derived_tables_compare_a_strategy_with_its_control():
    steps = pd.DataFrame(
        {
            "strategy": ["alone", "naive"],
            "control": ["", "alone"],
            "tokens_per_s": [200.0, 150.0],
            "messages": [0, 4],
            "message_gib": [0.0, 1.0],
            "communication_only_ms": [float("nan"), 10.0],
            "parameters": 2**26,
            **dict.fromkeys(["built_gib", "peak_backward_gib", "peak_optimizer_gib", "reserved_gib"], 1.0),
        }
    )
    compared = efficiency(steps, 2)
    assert compared["efficiency"].tolist() == [1.0, 0.75] and compared["times_one_gpu"].tolist() == [2.0, 1.5]
    kernels = pd.DataFrame(
        [
            ("alone", 0, "matrix multiply", 5, 8.0),
            ("alone", 1, "matrix multiply", 5, 12.0),
            ("alone", 0, "copy and cast", 5, 1.0),
            ("naive", 0, "matrix multiply", 5, 11.0),
            ("naive", 1, "matrix multiply", 5, 13.0),
            # the kernel count differs from the control's, so this category isn't compared
            ("naive", 0, "copy and cast", 9, 9.0),
            ("naive", 0, "communication", 4, 50.0),
        ],
        columns=["strategy", "rank", "kernel_category", "count", "gpu_ms"],
    )
    slower = slowdown(steps, kernels).set_index("kernel_category")["slowdown"]
    assert slower.to_dict() == pytest.approx({"matrix multiply": 0.2, "all": 0.2})
    ranks = pd.DataFrame({"strategy": ["naive", "naive"], "transfer_total_ms": [20.0, 20.0]})
    table = bandwidth(steps, ranks, 4).iloc[0]
    sent_gb = 1.5 * 2**30 / 1e9  # 2 (n - 1) / n of one GiB
    assert table["in_step_gb_s"] == pytest.approx(sent_gb / 0.02)
    assert table["alone_gb_s"] == pytest.approx(sent_gb / 0.01)
    sharded = pd.concat([steps, steps.iloc[[1]].assign(strategy="fsdp", control="fsdp_alone")])
    states_gib = memory(sharded, 4)["states_gib"]
    assert states_gib.tolist() == [1.0, 1.0, 0.25]
    ranks = {"communication_ms": [0.3, 5.0], "transfer_ms": [0.1, 1.0], "waiting_ms": [0.2, 1.5]}
    assert hidden_ms(pd.DataFrame(ranks)).astype(str).tolist() == ["0.0", "2.5"]  # 0.3 - 0.1 - 0.2 isn't 0


def test_figure_names_the_fastest_strategy_that_communicates_with_other_ranks():
    zeros = dict.fromkeys(("waiting_ms", "copies_ms", "idle_ms"), 0.0)
    parts = pd.DataFrame({"compute_ms": [3.0, 4.0, 5.0], "transfer_ms": [0.1, 2.0, 2.0], **zeros})
    parts = parts.assign(wall_ms=[3.1, 6.0, 7.0]).set_axis(["ddp_alone", "flat", "naive"])
    assert "flat, takes 6.00 ms" in figures.where_time_goes(parts).message
