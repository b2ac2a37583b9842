"""Test the step on two GPUs: a delay planted on one of them, and CUDA graphs that communicate.

python -m pytest tests/test_distributed_gpu.py
"""

import pytest
import torch

from stepscope.config import configure
from stepscope.optimizations.distributed_step import Distributed, naive
from stepscope.studies.distributed.launch import measure_strategies

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
SMALL = {"size": "small", "context_length": 512, "batch_size": 4, "device": "cuda"}


def overlapped(model, batch):
    """Let rank 1's GPU spin for 20 ms before each step."""
    distributed = naive(model, batch)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(10**6)  # the first call loads the kernel
    torch.cuda.synchronize()
    start.record()
    torch.cuda._sleep(10**8)
    end.record()
    torch.cuda.synchronize()
    cycles = int(10**8 * 20 / start.elapsed_time(end))

    def step():
        if dist.get_rank() == 1:  # noqa: F821 defined by the script
            torch.cuda._sleep(cycles)
        return distributed.step()

    return Distributed(step, distributed.messages)


@pytest.fixture(scope="module")
def ranks():
    strategies = ["naive", "overlapped", "no_sync_graph", "ddp_graph"]
    results = measure_strategies(
        configure("distributed", **SMALL, strategies=strategies), overlapped=overlapped
    )
    assert (results.steps["status"] == "ok").all(), results.steps["reason"].tolist()
    return results.ranks.set_index(["strategy", "rank"])


def test_delay_on_one_gpu_is_found_and_blamed_on_its_rank(ranks):
    added_ms = ranks.loc[("overlapped", 0), "waiting_ms"] - ranks.loc[("naive", 0), "waiting_ms"]
    assert added_ms == pytest.approx(20, rel=0.05)
    assert ranks.loc[("overlapped", 1), "arrives_last"] >= 1


def test_graph_contains_the_communication(ranks):
    assert ranks.loc["ddp_graph", "communication_ms"].min() > 0
    assert (ranks.loc["no_sync_graph", "communication_ms"] == 0).all()
