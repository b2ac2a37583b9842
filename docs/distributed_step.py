"""Run one training step on all GPUs of a machine, with a choice of strategies for sharing the work.

    torchrun --nproc_per_node=2 distributed_step.py --strategy ddp_graph

trains the model of `fast_step.py`, which must be in the same folder, on random tokens, and prints the
milliseconds per step. `--batch` is the batch size of each rank, so n GPUs train on n times as many tokens. Each
strategy is a function below; select one by name with `--strategy`. Without a GPU, the ranks communicate through
gloo.

The strategies make these assumptions about a model of your own:

* All ranks start with equal weights, for example from the same seed. Only the strategies that use DDP copy
  rank 0's weights to the other ranks.
* Every parameter that requires a gradient gets one in every step. Freeze parameters that the model doesn't use,
  with `requires_grad_(False)`.
* Buffers don't change during training, because no strategy communicates them. For example, BatchNorm's running
  statistics would differ between the ranks.
* `model.blocks` contains the layers; only `fsdp` and `compile_blocks` need this.
"""

import argparse
import gc
import os
from collections.abc import Callable
from functools import partial
from timeit import default_timer
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

MIB = 2**20


class Batch(NamedTuple):
    """The batch that a rank's step reads. To change it, copy the next batch into `tokens` and `targets`."""

    tokens: torch.Tensor  # (B, T)
    targets: torch.Tensor  # (B, T)
    precision: str = "bf16"  # the dtype of autocast; "fp32" turns autocast off


class Message(NamedTuple):
    """One collective of a step: its kind, and the size and dtype of the larger of its input and output."""

    kind: str  # all_reduce, all_gather, reduce_scatter or broadcast
    elements: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


class Distributed(NamedTuple):
    """A strategy applied to a model.

    It consists of a step, which returns the rank's loss, the step's collectives, and the step's optimizer.
    """

    step: Callable[[], torch.Tensor]
    messages: Callable[[], list[Message]]  # call it after the warm-up
    optimizer: torch.optim.Optimizer


def compute(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Run forward and backward, and return the loss."""
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=batch.precision == "bf16"):
        logits = model(batch.tokens)
        loss = F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())
    loss.backward()
    return loss.detach()


def adamw(model: nn.Module, rate: float = 3e-4) -> torch.optim.Optimizer:
    on_gpu = next(model.parameters()).is_cuda
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=on_gpu)


MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    average_gradients: Callable[[], None] = lambda: None,
) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = compute(model, batch)
        average_gradients()
        optimizer.step()
        return loss

    return step


# <strategies>
def alone(model: nn.Module, batch: Batch, make_optimizer: MakeOptimizer = adamw) -> Distributed:
    """Train on each GPU separately and without communication, as a control."""
    optimizer = make_optimizer(model)
    return Distributed(training_step(model, optimizer, batch), list, optimizer)


def naive(model: nn.Module, batch: Batch, make_optimizer: MakeOptimizer = adamw) -> Distributed:
    """Average the gradients after backward with one all-reduce per parameter."""
    optimizer, parameters = make_optimizer(model), trained_parameters(model)

    def average_gradients() -> None:
        for parameter in parameters:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)

    def messages() -> list[Message]:
        return [Message("all_reduce", parameter.numel(), parameter.dtype) for parameter in parameters]

    step = training_step(model, optimizer, batch, average_gradients)
    return Distributed(step, messages, optimizer)


def flat(model: nn.Module, batch: Batch, make_optimizer: MakeOptimizer = adamw) -> Distributed:
    """Copy all gradients into one buffer after backward, and average them with one all-reduce."""
    optimizer, parameters = make_optimizer(model), trained_parameters(model)

    def average_gradients() -> None:
        gradients = [parameter.grad for parameter in parameters]
        buffer = _flatten_dense_tensors(gradients)
        dist.all_reduce(buffer, op=dist.ReduceOp.AVG)
        torch._foreach_copy_(gradients, _unflatten_dense_tensors(buffer, gradients))

    def messages() -> list[Message]:
        return [Message("all_reduce", sum(p.numel() for p in parameters), parameters[0].dtype)]

    step = training_step(model, optimizer, batch, average_gradients)
    return Distributed(step, messages, optimizer)


def overlapped(model: nn.Module, batch: Batch, make_optimizer: MakeOptimizer = adamw) -> Distributed:
    """Start each parameter's all-reduce once backward has its gradient; wait for all before the optimizer runs."""
    optimizer, parameters = make_optimizer(model), trained_parameters(model)
    works = []

    def start(parameter: torch.Tensor) -> None:
        works.append(dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, async_op=True))

    def wait() -> None:
        for work in works:
            work.wait()
        works.clear()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(start)

    def messages() -> list[Message]:
        return [Message("all_reduce", parameter.numel(), parameter.dtype) for parameter in parameters]

    return Distributed(training_step(model, optimizer, batch, wait), messages, optimizer)


def ddp(
    model: nn.Module,
    batch: Batch,
    bucket_mib: float | None = 25,
    bf16_gradients: bool = False,
    gradient_views: bool = False,
    communicate: bool = True,
    make_optimizer: MakeOptimizer = adamw,
) -> Distributed:
    """Let PyTorch's DDP all-reduce the gradients in buckets during backward.

    Args:
        bucket_mib: the size of a bucket; None for DDP's defaults, with a smaller first bucket of 1 MiB.
        bf16_gradients: all-reduce the gradients in bf16.
        gradient_views: let each `.grad` be a view of its bucket. Otherwise, DDP copies the averages from the
            buckets back to the gradients, so there are two copies of all gradients.
        communicate: if False, all-reduce within a group of one rank, which sends nothing. This is a control with
            DDP's overhead and the same kernels.
        make_optimizer: returns the optimizer of a model.
    """
    # otherwise torch.compile would split each block at the bucket boundaries
    torch._dynamo.config.optimize_ddp = False
    group = None if communicate else dist.new_subgroups(1)[0]
    replica = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=gradient_views
    )
    replica.broadcast_buffers = False  # buffers never change here; if yours do, remove this line
    if bf16_gradients:
        replica.register_comm_hook(group, bf16_compress_hook)
    optimizer = make_optimizer(model)
    dtype = trained_parameters(model)[0].dtype

    def messages() -> list[Message]:
        if not communicate:
            return []
        data = replica._get_ddp_logging_data()
        sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]  # in bytes, before compression
        sent = torch.bfloat16 if bf16_gradients else dtype
        return [Message("all_reduce", int(size) // dtype.itemsize, sent) for size in sizes.split(",")]

    return Distributed(training_step(replica, optimizer, batch), messages, optimizer)


def zero1(model: nn.Module, batch: Batch) -> Distributed:
    """Shard the optimizer's moments: each rank updates its share of the parameters, and then broadcasts them."""

    def sharded_adamw(model: nn.Module) -> torch.optim.Optimizer:
        on_gpu = next(model.parameters()).is_cuda
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4, fused=on_gpu)

    parameters = list(model.parameters())
    distributed = ddp(model, batch, make_optimizer=sharded_adamw)

    def messages() -> list[Message]:
        updates = [Message("broadcast", parameter.numel(), parameter.dtype) for parameter in parameters]
        return distributed.messages() + updates

    return distributed._replace(messages=messages)


class ReduceScatter(DefaultReduceScatter):
    """FSDP's reduce-scatter on a separate communicator, so that it doesn't wait for all-gathers."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return super().__call__(output_tensor, input_tensor, self.group, op, async_op)


def fsdp(
    model: nn.Module,
    batch: Batch,
    reshard: bool = True,
    bf16_reduction: bool = False,
    separate_group: bool = False,
    blocks_per_group: int = 1,
    communicate: bool = True,
) -> Distributed:
    """Shard weights, gradients and moments with FSDP2, which gathers the weights of a group of blocks when needed.

    The layers must be in `model.blocks`. Each rank builds the complete model before it is sharded, so the weights
    must fit on one GPU.

    Args:
        reshard: free the gathered weights after forward, and gather them again for backward.
        bf16_reduction: reduce the gradients in bf16.
        separate_group: reduce gradients on a separate communicator.
        blocks_per_group: the number of blocks whose weights are gathered at once. Larger groups need more memory
            and hide less communication, but the host has less to do.
        communicate: if False, shard over a single rank, as a control with FSDP's overhead but no communication.
    """
    device = batch.tokens.device.type
    ranks = dist.get_world_size()
    if communicate:
        mesh = init_device_mesh(device, (ranks,))
    else:
        mesh = init_device_mesh(device, (ranks, 1), mesh_dim_names=("ranks", "alone"))["alone"]
    is_bf16 = batch.precision == "bf16"
    reduced = torch.bfloat16 if is_bf16 and bf16_reduction else torch.float32
    policy = MixedPrecisionPolicy(torch.bfloat16 if is_bf16 else None, reduced)
    gathered = policy.param_dtype or next(model.parameters()).dtype
    blocks = [*model.blocks]
    groups = [blocks[i : i + blocks_per_group] for i in range(0, len(blocks), blocks_per_group)]
    numbers = [
        sum(parameter.numel() for block in group for parameter in block.parameters()) for group in groups
    ]
    number_outside = sum(parameter.numel() for parameter in model.parameters()) - sum(numbers)
    for group in groups:
        fully_shard(group, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # with None, the root's weights stay gathered until backward
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=None if reshard else False)
    if separate_group:
        reduce_scatter = ReduceScatter(dist.new_group())
        for module in (model, *(group[0] for group in groups)):
            module.set_custom_reduce_scatter(reduce_scatter)

    def messages() -> list[Message]:
        if not communicate:
            return []
        gathers = [number_outside, *numbers * (2 if reshard else 1)]  # the root stays gathered until backward
        weights = [Message("all_gather", number, gathered) for number in gathers]
        return weights + [Message("reduce_scatter", n, reduced) for n in [number_outside, *numbers]]

    optimizer = adamw(model)
    return Distributed(training_step(model, optimizer, batch), messages, optimizer)


def in_graph(make: Callable[[], Distributed], model: nn.Module, warmup_steps: int = 11) -> Distributed:
    """Capture a strategy's step, including its communication, as one CUDA graph.

    The warm-up runs on the current batch, but it changes neither weights nor buffers nor the random state, and it
    resets AdamW's moments and step count to zero. To resume from a checkpoint, load the optimizer's state with
    `resume` of `fast_step.py`, because the graph reads the existing tensors.

    Args:
        make: a function that applies the strategy. It is called on the capture's stream, because DDP must be built
            there. The optimizer must be one that a CUDA graph can capture, such as `graph_adamw`.
        warmup_steps: the number of warm-up steps before the capture; DDP needs 11.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.random.fork_rng([torch.cuda.current_device()]):
        distributed = make()
        optimizer = distributed.optimizer
        rates = [group["lr"] for group in optimizer.param_groups]
        buffers = [buffer.clone() for buffer in model.buffers()]
        for group in optimizer.param_groups:
            group["lr"] = 0 * group["lr"]  # so that the warm-up changes no weights
        for _ in range(warmup_steps):
            distributed.step()
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        for buffer, before in zip(model.buffers(), buffers):
            buffer.copy_(before)
        for state in optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
        model.zero_grad(set_to_none=True)  # the graph allocates its own gradients
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    gc.collect()  # so that nothing is freed during the capture
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        loss = distributed.step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss  # overwritten by the next replay

    return distributed._replace(step=replay)


def graph_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return an AdamW that a CUDA graph can capture. To change its learning rate, which is a tensor, fill it."""
    rate = torch.tensor(3e-4, device=next(model.parameters()).device)
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)


def ddp_graph(
    model: nn.Module,
    batch: Batch,
    bucket_mib: float = 100,
    gradient_views: bool = True,
    make_optimizer: MakeOptimizer = graph_adamw,
    **options,
) -> Distributed:
    """Run DDP's step, including its all-reduces, as one CUDA graph that the host launches with one call.

    Unlike DDP's default, each `.grad` is a view of its bucket, so the averages aren't copied back.
    """
    options |= {"gradient_views": gradient_views, "make_optimizer": make_optimizer}
    make = partial(ddp, model, batch, bucket_mib, **options)
    return in_graph(make, model)


def alone_graph(model: nn.Module, batch: Batch) -> Distributed:
    """Train on each GPU separately with the step captured as one CUDA graph, as a control."""
    return in_graph(partial(alone, model, batch, graph_adamw), model)


def naive_graph(model: nn.Module, batch: Batch) -> Distributed:
    """Run the step of `naive`, including its all-reduces, as one CUDA graph."""
    return in_graph(partial(naive, model, batch, graph_adamw), model)


def flat_graph(model: nn.Module, batch: Batch) -> Distributed:
    """Run the step of `flat`, including its all-reduces, as one CUDA graph."""
    return in_graph(partial(flat, model, batch, graph_adamw), model)


def overlapped_graph(model: nn.Module, batch: Batch) -> Distributed:
    """Run the step of `overlapped`, including its all-reduces, as one CUDA graph."""
    return in_graph(partial(overlapped, model, batch, graph_adamw), model)


# </strategies>


def communication_only(messages: list[Message], device: torch.device) -> Callable[[], None]:
    """Return a step that only communicates, as a control.

    Args:
        messages: the collectives to run, as returned by another strategy's `messages`.
    """
    world_size = dist.get_world_size()
    largest = max(message.bytes for message in messages)
    whole = torch.zeros(largest, dtype=torch.uint8, device=device)
    shard = torch.zeros(-(-largest // world_size) + 8, dtype=torch.uint8, device=device)

    def start(message: Message) -> dist.Work:
        elements = message.elements // world_size  # elements of a shard
        tensor = whole[: message.bytes].view(message.dtype)
        part = shard[: elements * message.dtype.itemsize].view(message.dtype)
        tensor_of_shards = tensor[: elements * world_size]
        if message.kind == "all_reduce":
            return dist.all_reduce(tensor, async_op=True)
        if message.kind == "broadcast":
            return dist.broadcast(tensor, 0, async_op=True)
        if message.kind == "all_gather":
            return dist.all_gather_into_tensor(tensor_of_shards, part, async_op=True)
        return dist.reduce_scatter_tensor(part, tensor_of_shards, async_op=True)

    def step() -> None:
        for work in [start(message) for message in messages]:
            work.wait()

    return step


STRATEGIES: dict[str, Callable[..., Distributed]] = {
    "alone": alone,
    "naive": naive,
    "flat": flat,
    "overlapped": overlapped,
    "ddp": ddp,
    "zero1": zero1,
    "fsdp": fsdp,
    "alone_graph": alone_graph,
    "naive_graph": naive_graph,
    "flat_graph": flat_graph,
    "overlapped_graph": overlapped_graph,
    "ddp_graph": ddp_graph,
}


def compile_blocks(model: nn.Module) -> None:
    """Compile each block's forward pass, but not the hooks that DDP and FSDP add to the block."""
    for block in model.blocks:
        block.forward = torch.compile(block.forward, dynamic=False)


def start_process_group(for_graph: bool = False) -> torch.device:
    """Join the process group of the ranks that torchrun started, and return this rank's device.

    Args:
        for_graph: whether this rank will capture a CUDA graph that contains collectives.
    """
    if "RANK" not in os.environ:
        raise SystemExit(
            "start this script with torchrun, for example: torchrun --nproc_per_node=2 distributed_step.py"
        )
    if for_graph:
        # NCCL's error handling would break the capture with its queries. The other strategies need it: without it,
        # a rank waits forever for a rank that hangs.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local_rank >= gpus:
        raise SystemExit(f"no GPU for rank {local_rank}: start at most {gpus}, with --nproc_per_node={gpus}")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def main(arguments: list[str] | None = None) -> None:
    from fast_step import Model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, default="ddp")
    for name, default in {
        "width": 768,
        "hidden": 3072,
        "layers": 12,
        "heads": 12,
        "vocabulary": 10_000,
        "context": 512,
        "batch": 4,
        "steps": 20,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    is_graph = options.strategy.endswith("_graph")
    if is_graph and not torch.cuda.is_available():
        raise SystemExit(f"{options.strategy} needs a GPU for its CUDA graph; select another --strategy")
    device = start_process_group(is_graph)
    torch.manual_seed(0)  # the same weights on all ranks
    with device:
        model = Model(
            options.width,
            options.hidden,
            options.layers,
            options.heads,
            options.vocabulary,
            options.context,
        )
        torch.manual_seed(1 + dist.get_rank())  # different tokens on each rank
        batch = Batch(*torch.randint(options.vocabulary, (2, options.batch, options.context)))
    compile_blocks(model)
    step = STRATEGIES[options.strategy](model, batch).step
    for _ in range(12):  # warm up: the first steps compile, and DDP rebuilds its buckets
        step()
    dist.barrier()
    start = default_timer()
    for _ in range(options.steps):
        loss = step()
    loss.item()  # waits for the GPU
    ms = (default_timer() - start) / options.steps * 1e3
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        tokens_per_s = ranks * options.batch * options.context / ms * 1e3
        print(f"{options.strategy}: {ms:.4g} ms per step on {ranks} ranks, {tokens_per_s:,.0f} tokens/s")
    del step, loss
    gc.collect()  # frees the optimizer first; otherwise gloo may hang
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
