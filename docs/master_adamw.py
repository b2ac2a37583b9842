"""Train with `MasterAdamW`: bf16 weights, fp32 master weights, a schedule, clipping, a CUDA graph and resuming.

`python master_adamw.py` trains the model of fast_step.py on random tokens and saves a checkpoint halfway. The
script then creates everything again from another seed, resumes from the checkpoint, and reports whether both runs
have bit-identical losses and final weights. On a CPU, it runs without a CUDA graph.

**If you come from `torch.optim.AdamW`**, most things stay the same: groups, schedulers, clipping, gradient
scaling, `group["lr"] = x` in eager steps, copying and pickling, Hugging Face's Trainer and accelerate. The
following differs:

* *Dtypes.* Creating the optimizer converts weights with two or more dimensions to bf16, so their gradients are
  bf16, too. Summing many gradients, or averaging them over many GPUs, therefore loses precision. Cast and move
  the model before you create the optimizer, not after.
* *Autocast.* This model doesn't need autocast, because it has no biases and its norms cast back to bf16. The
  residual stream is then bf16, too, and only norms and loss are computed in fp32. Leave autocast on if your
  model has biases or norms that return fp32 (GPT-2, Hugging Face's Llama), or if a convolution reads fp32
  images. Otherwise, PyTorch refuses to multiply bf16 weights by fp32 activations.
* *Checkpoints.* To resume bit-identically, save the optimizer's state dict, which holds the fp32 master
  weights. Loading works in place and also sets the model's weights from the master weights. A CUDA graph then
  continues from the loaded state, whether it was captured before or after loading. The model's own state dict is
  for inference: its weights are rounded to bf16 (FP8 weights are stored as their bytes). To migrate a run from
  torch's AdamW, load the model's fp32 weights, create the optimizer, then load AdamW's state dict.
* *Weight averaging.* Average `optimizer.masters()`. An average in bf16, as in `AveragedModel(model)`, stops
  moving, because a thousandth of the distance to the new weight is less than half a unit in its last place.
* *Writing weights.* The next eager step notices a clamp, an initialization or a load. A replayed graph runs no
  Python, so call `optimizer.take_weights()` before you replay it, unless you used `load_state_dict` of the model
  or of one of its modules. Writes through `.data` go unnoticed: write under `torch.no_grad()` instead.
* *Several GPUs.* Create the optimizer, then wrap the model in DistributedDataParallel. The first step
  broadcasts the masters of rank 0. FSDP and ZeRO shard weights and are rejected.
* *Missing gradients.* As in PyTorch, parameters without a gradient are skipped. In a captured graph, however,
  every parameter needs one. Parameters that are frozen when you create the optimizer stay fp32 and are not
  part of it; to train them later, create a new optimizer. Sparse gradients, `maximize`, `amsgrad` and groups
  added later are rejected.
* *Learning rates* are tensors, including those that a scheduler's `get_last_lr()` returns; `float` converts them.
"""

import argparse
import copy
import io
import math
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this setting

import torch
import torch.nn.functional as F
from fast_step import Model
from torch import nn

from stepscope.optimizations import MasterAdamW


def make_training(shape, batches, steps, moments):
    """Start a new run; return its function ``train_on(batch_number)``, its optimizer and its scheduler."""
    model = Model(*shape)
    for block in model.blocks:
        block.cos, block.sin = block.cos.bfloat16(), block.sin.bfloat16()
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    optimizer = MasterAdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=3e-3,
        moments=moments,
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(  # linear warm-up, then cosine decay
        optimizer, lambda t: min((t + 1) / (steps / 10), (1 + math.cos(math.pi * t / steps)) / 2)
    )
    batch = batches[0].clone()  # (B, T + 1) token ids; a graph reads this tensor's address

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    launch = captured(step, optimizer) if batch.is_cuda else step

    def train_on(number):
        batch.copy_(batches[number % len(batches)])
        # cloned, because the next replay overwrites the loss; calling .item() here would wait for the GPU
        loss = launch().clone()
        scheduler.step()  # fills each group's "lr" tensor, which the graph reads
        return loss

    return train_on, optimizer, scheduler


def captured(step, optimizer):
    """Capture the step as a CUDA graph, undo its warm-up steps, and return a function that replays it."""
    before = copy.deepcopy(optimizer.state_dict())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.load_state_dict(before)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        loss = step()

    # the default argument keeps the model and its RoPE tables alive, because the graph itself doesn't
    def replay(_held=step):
        graph.replay()
        return loss

    return replay


def main(arguments: list[str] | None = None) -> bool:
    """Train, resume and print the results; return whether both runs are bit-identical."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {
        "width": 128,
        "hidden": 512,
        "layers": 2,
        "heads": 4,
        "vocabulary": 256,
        "context": 64,
        "batch": 4,
        "steps": 40,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--moments", choices=["float32", "bfloat16"], default="bfloat16")
    given = parser.parse_args(arguments)
    torch.use_deterministic_algorithms(True)
    shape = given.width, given.hidden, given.layers, given.heads, given.vocabulary, given.context
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        batches = torch.randint(given.vocabulary, (4, given.batch, given.context + 1))
        making = shape, batches, given.steps, getattr(torch, given.moments)
        step, optimizer, scheduler = make_training(*making)
        losses, file = [], io.BytesIO()
        for number in range(given.steps):
            if number == given.steps // 2:
                torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, file)
            losses.append(step(number))
        losses = torch.stack(losses).tolist()
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {given.steps} steps on {batches.device}")

        torch.manual_seed(1)
        step, resumed, scheduler = make_training(*making)
        file.seek(0)
        saved = torch.load(file)
        scheduler.load_state_dict(saved["scheduler"])
        resumed.load_state_dict(saved["optimizer"])
        again = torch.stack([step(number) for number in range(given.steps // 2, given.steps)]).tolist()
    ends = zip(optimizer.masters().values(), resumed.masters().values())
    same = again == losses[given.steps // 2 :] and all(torch.equal(one, other) for one, other in ends)
    print(f"resumed at step {given.steps // 2}: {'bit-identical' if same else 'NOT bit-identical'}")
    return same


if __name__ == "__main__":
    raise SystemExit(not main())
