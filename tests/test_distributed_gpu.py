"""Test the distributed step on two GPUs: an artificial delay on one GPU, and CUDA graphs that contain collectives.

python -m pytest tests/test_distributed_gpu.py
"""

import pytest
import torch

from stepscope.config import configure
from stepscope.optimizations.distributed_step import Distributed, graph_adamw, in_graph, training_step
from stepscope.studies.distributed.launch import measure_strategies

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
SMALL = {"size": "small", "context_length": 512, "batch_size": 4, "device": "cuda"}


def averaged(model, batch, cycles):
    """Delay the GPU by this many cycles before averaging the gradients.

    The step is one CUDA graph, so the host doesn't add any delays.
    """

    def average_gradients():
        if cycles:
            torch.cuda._sleep(cycles)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)  # noqa: F821 defined by the script

    optimizer = graph_adamw(model)
    step = training_step(model, optimizer, batch, average_gradients)
    return in_graph(lambda: Distributed(step, list, optimizer), model)


def flat(model, batch):
    return averaged(model, batch, 0)


def overlapped(model, batch):
    """Delay rank 1's GPU by 20 ms after the backward pass, before the gradients are averaged."""
    for _ in range(2):  # the first call also loads the kernel, so only the second call's time is used
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(10**8)
        end.record()
        torch.cuda.synchronize()
    cycles = int(10**8 * 20 / start.elapsed_time(end))
    return averaged(model, batch, cycles if dist.get_rank() == 1 else 0)  # noqa: F821


def naive(model, batch):
    """Fail unless building DDP's graph changes neither weights nor moments, and replays read the learning rate."""
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def is_unchanged():
        return all(map(torch.equal, model.parameters(), before))

    distributed = ddp_graph(model, batch)  # noqa: F821 defined by the script
    assert is_unchanged(), "building the graph changed the weights"
    states = distributed.optimizer.state.values()
    assert not any(tensor.any() for state in states for tensor in state.values()), "moments are not zero"
    rate = distributed.optimizer.param_groups[0]["lr"]
    rate.zero_()
    distributed.step()
    assert is_unchanged(), "a step at a learning rate of zero changed the weights"
    rate.fill_(3e-4)
    distributed.step()
    assert not is_unchanged(), "a step at the usual learning rate didn't change the weights"
    return distributed


@pytest.fixture(scope="module")
def results():
    strategies = ["naive", "flat", "overlapped", "ddp_alone", "ddp_25_mib", "ddp_alone_graph", "ddp_graph"]
    strategies += ["naive_graph", "flat_graph", "overlapped_graph"]
    strategies += ["ddp_graph_bf16_gradients", "ddp_graph_gradient_copies"]
    config = configure("distributed", **SMALL, strategies=strategies, numerics=True)
    functions = {"averaged": averaged, "naive": naive, "flat": flat, "overlapped": overlapped}
    return measure_strategies(config, **functions)


@pytest.fixture(scope="module")
def ranks(results):
    return results.ranks.set_index(["strategy", "rank"])


def test_every_strategy_runs(results):
    assert (results.steps["status"] == "ok").all(), results.steps["reason"].tolist()


def test_no_strategy_counts_memory_of_an_earlier_one(results):
    added_gib = results.steps["built_gib"] - 4 * results.steps["parameters"] / 2**30
    # the buckets of DDP would add 0.48 GiB, and a workspace of cuBLAS 0.06 GiB
    assert (added_gib < 0.02).all()


def test_delay_on_one_gpu_is_detected_and_attributed_to_its_rank(ranks):
    added_ms = ranks.loc[("overlapped", 0), "waiting_ms"] - ranks.loc[("flat", 0), "waiting_ms"]
    assert added_ms == pytest.approx(20, rel=0.05)
    assert ranks.loc[("overlapped", 1), "arrives_last"] >= 1


def test_cuda_graph_contains_the_communication(ranks):
    assert ranks.loc["ddp_graph", "communication_ms"].min() > 0
    assert (ranks.loc["ddp_alone_graph", "communication_ms"] == 0).all()


@pytest.mark.parametrize(
    ("strategy", "control"), [("ddp_25_mib", "ddp_alone"), ("ddp_graph", "ddp_alone_graph")]
)
def test_ddp_control_runs_the_same_kernels_without_communication(results, strategy, control):
    counts = results.kernels.set_index(["strategy", "rank", "kernel_category"])["count"]
    assert "communication" not in counts[control].index.get_level_values("kernel_category")
    assert (
        counts[strategy].drop("communication", level="kernel_category").to_dict() == counts[control].to_dict()
    )


def test_gradients_of_a_cuda_graph_match_one_accumulating_gpu(results):
    errors = results.numerics.pivot(index="strategy", columns="compared_in", values="gradient_error")
    errors = errors.drop("naive")  # it has already changed the weights
    bf16 = errors.index == "ddp_graph_bf16_gradients"
    assert len(errors) == 9
    assert (errors.loc[~bf16, "fp32"] < 1e-4).all() and (errors["bf16"] < 0.02).all()
    assert (errors.loc[bf16, "fp32"].between(1e-4, 0.02)).all()
