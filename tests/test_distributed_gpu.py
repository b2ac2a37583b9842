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

    step = training_step(model, graph_adamw(model), batch, average_gradients)
    return in_graph(lambda: Distributed(step, list), model)


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


@pytest.fixture(scope="module")
def results():
    strategies = ["flat", "overlapped", "ddp_alone_graph", "ddp_graph", "ddp_graph_bf16_gradients"]
    config = configure("distributed", **SMALL, strategies=strategies, numerics=True)
    results = measure_strategies(config, averaged=averaged, flat=flat, overlapped=overlapped)
    assert (results.steps["status"] == "ok").all(), results.steps["reason"].tolist()
    return results


@pytest.fixture(scope="module")
def ranks(results):
    return results.ranks.set_index(["strategy", "rank"])


def test_delay_on_one_gpu_is_detected_and_attributed_to_its_rank(ranks):
    added_ms = ranks.loc[("overlapped", 0), "waiting_ms"] - ranks.loc[("flat", 0), "waiting_ms"]
    assert added_ms == pytest.approx(20, rel=0.05)
    assert ranks.loc[("overlapped", 1), "arrives_last"] >= 1


def test_cuda_graph_contains_the_communication(ranks):
    assert ranks.loc["ddp_graph", "communication_ms"].min() > 0
    assert (ranks.loc["ddp_alone_graph", "communication_ms"] == 0).all()


def test_gradients_of_a_cuda_graph_match_one_accumulating_gpu(results):
    """`flat` and `overlapped` are CUDA graphs here, too, but with separate all-reduces instead of DDP."""
    errors = results.numerics.pivot(index="strategy", columns="compared_in", values="gradient_error")
    bf16 = errors.index == "ddp_graph_bf16_gradients"
    assert len(errors) == 4
    assert (errors.loc[~bf16, "fp32"] < 1e-4).all() and (errors["bf16"] < 0.02).all()
    assert (errors.loc[bf16, "fp32"].between(1e-4, 0.02)).all()
