"""Training with `MasterAdamW`: bf16 weights, fp32 masters, a schedule, clipping, a CUDA graph, and a resume.

`python master_adamw.py` trains fast_step.py's model on random tokens, saves in the middle, makes all anew
from another seed, resumes, and says whether both runs end alike, to the bit. On a CPU there is no graph.

**If you come from `torch.optim.AdamW`**, most things stay: groups, schedulers, clipping, gradient scaling,
`group["lr"] = x` in eager steps, copies and pickles, Hugging Face's Trainer and accelerate. These change:

* *Dtypes.* Weights of two and more dimensions are bf16 once the optimizer is made, and so are their gradients;
  adding many up, or averaging over many GPUs, loses bits. Cast and move the model before, not after.
* *Autocast.* This model needs none: it has no biases, and its norms cast back to bf16. Then the residual stream
  is bf16, too, and only norms and loss are computed in fp32. Leave autocast on if your model has biases or
  norms that return fp32 (GPT-2, Hugging Face's Llama), or if a convolution reads fp32 images: without it,
  PyTorch refuses to multiply bf16 weights and fp32 activations.
* *Checkpoints.* To continue to the bit, save the optimizer's state dict, which holds the fp32 masters. It is
  loaded in place: the model's weights are written from the masters, and a graph goes on from there, whether it
  was captured before or after. The model's own state dict is for inference, with weights rounded to bf16 (for
  FP8 weights, with their bytes). To migrate a run of torch's AdamW, load the model's fp32 weights, make the
  optimizer, then load AdamW's state dict.
* *Averages of weights.* Average `optimizer.masters()`: an average in bf16, as `AveragedModel(model)` makes it,
  stops moving, because a thousandth of the way to the new weight is less than half its last digit.
* *Writing weights.* A clamp, an initialization or a load is noticed at the next eager step. A replayed graph
  runs no Python, so call `optimizer.take_weights()` before it, unless you used `load_state_dict` of the model
  or of a part of it. Nothing can notice a write through `.data`: write under `torch.no_grad()` instead.
* *Several GPUs.* Make the optimizer, then wrap the model in DistributedDataParallel; the first step gives all
  ranks the masters of rank 0. FSDP and ZeRO, which shard weights, are refused.
* *No gradient.* A parameter without a gradient is skipped, as in PyTorch, but not in a captured graph, where all
  need one. Those that are frozen when the optimizer is made stay fp32 and outside; to train them later, make a
  new optimizer. Sparse gradients, `maximize`, `amsgrad` and groups that are added later are refused.
* *Rates* are tensors, and so are those that a scheduler's `get_last_lr()` returns: `float` makes them numbers.
"""

import argparse
import copy
import io
import math
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # two runs are alike to the bit only so

import torch
import torch.nn.functional as F
from fast_step import Model
from torch import nn

from stepscope.optimizations import MasterAdamW


def make_training(shape, batches, steps, moments):
    """A run from its start: the step, which takes a batch's number, the optimizer and its schedule."""
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
    scheduler = torch.optim.lr_scheduler.LambdaLR(  # a tenth of the steps up, then a cosine down
        optimizer, lambda t: min((t + 1) / (steps / 10), (1 + math.cos(math.pi * t / steps)) / 2)
    )
    batch = batches[0].clone()  # (B, T + 1) token ids, where a graph reads them

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
        loss = launch().clone()  # the next replay overwrites it; to read it here would wait for the GPU
        scheduler.step()  # fills each group's "lr", which the graph reads
        return loss

    return train_on, optimizer, scheduler


def captured(step, optimizer):
    """The step as one CUDA graph; what its warm-up's steps did is undone."""
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

    def replay(_held=step):  # what a graph reads it does not keep alive: the model, with its tables of RoPE
        graph.replay()
        return loss

    return replay


def main(arguments: list[str] | None = None) -> bool:
    """Whether the resumed run ended as the other did."""
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
    print(f"resumed at step {given.steps // 2}: {'the same to the bit' if same else 'NOT the same'}")
    return same


if __name__ == "__main__":
    raise SystemExit(not main())
