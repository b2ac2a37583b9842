"""The ladder's optimizations that apply to any model, as transforms of a subject.

Each function changes the subject, or returns the reason why it doesn't apply. The ladder applies them in this
order:

    tf32              fp32 matmuls and convolutions round their inputs to TF32
    channels_last     the memory layout that convolutions prefer for images
    bf16              autocast
    fused_adamw       one kernel updates all parameters
    compiled_blocks   torch.compile on the repeated blocks, which share one compilation
    compiled_model    torch.compile on the model as one piece
    cuda_graph        the step is recorded once and replayed by a single launch
    bf16_weights      matrices are stored in bf16; the optimizer keeps fp32 masters
    bf16_moments      AdamW's moments in bf16

The built-in Transformer goes through the same transforms. Its notebook adds transforms for parts that only
this model has, such as its own attention.
"""

from functools import partial

import torch
from torch import Tensor, nn

from stepscope.measure.graph import graph_of
from stepscope.optimizations.optimizer import MasterAdamW
from stepscope.optimizations.transforms import Step, TrainedSubject, keeps_program

RATE = 3e-4  # AdamW's learning rate
WARMUPS = 3  # steps before a CUDA graph is captured


def default_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, foreach=True)


def capturable_adamw(model: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    """Create an AdamW for CUDA graphs, with the learning rate and the step counts in tensors on the GPU."""
    on_gpu = next(model.parameters()).is_cuda
    rate = torch.tensor(RATE, device="cuda") if on_gpu else RATE
    form = "fused" if fused else "foreach"
    return torch.optim.AdamW(model.parameters(), lr=rate, capturable=on_gpu, **{form: True})


def tf32(subject: TrainedSubject) -> str | None:
    if subject.device != "cuda":
        return "TF32 is not available on a CPU"
    subject.matmul_precision = "high"
    subject.precision = "tf32"
    return None


def channels_last(subject: TrainedSubject) -> str | None:
    """Store images and convolution weights in the channels-last layout, which tensor cores read."""
    if not any(isinstance(module, nn.Conv2d) for module in subject.model.modules()):
        return "the model has no 2-D convolution"
    subject.model.to(memory_format=torch.channels_last)
    (batch,) = subject.make_batch()
    images = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim() == 4}
    stored = {name: value.contiguous(memory_format=torch.channels_last) for name, value in images.items()}
    subject.make_batch = lambda: (batch | stored,)
    return None


def bf16(subject: TrainedSubject) -> None:
    subject.autocast = torch.bfloat16
    subject.precision = "bf16"


@keeps_program
def fused_adamw(subject: TrainedSubject) -> None:
    subject.make_optimizer = capturable_adamw


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's repeated blocks, or an empty list.

    Blocks are the entries of a ``ModuleList`` or ``Sequential`` whose entries all have the same type. Of lists
    within lists, the first choice is an outer list in which most entries have the same parameter shapes, because
    these share one compilation; then, the longest list. All lists outside the chosen ones count too, such as the
    decoder's layers beside the encoder's. So do single blocks of the same types in other lists, because a network
    may have lists of different lengths, for example one per resolution.
    """
    lists = [[*module] for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    repeated = [blocks for blocks in lists if len(blocks) > 1 and len({*map(type, blocks)}) == 1]
    of_parts = [blocks for blocks in repeated if is_block(blocks[0])]
    chosen: set[nn.Module] = set()
    inside: set[nn.Module] = set()  # the chosen blocks and all their parts

    def choose(blocks: list[nn.Module]) -> None:
        parts = {part for block in blocks for part in block.modules()}
        if chosen.isdisjoint(parts) and inside.isdisjoint(blocks):
            chosen.update(blocks)
            inside.update(parts)

    for blocks in [*filter(mostly_equal, of_parts), *sorted(of_parts, key=len, reverse=True)]:
        choose(blocks)
    types = {*map(type, chosen)}
    for block in [block for blocks in lists for block in blocks if type(block) in types]:
        choose([block])
    return [module for module in model.modules() if module in chosen]


def is_block(module: nn.Module) -> bool:
    """Return whether a module has parts, unlike a single layer, and can be called, unlike a ``ModuleList``."""
    return len([*module.children()]) > 0 and type(module).forward is not nn.Module.forward


def mostly_equal(blocks: list[nn.Module]) -> bool:
    """Return whether more than half of the blocks have the same parameter shapes."""
    shapes = [tuple(parameter.shape for parameter in block.parameters()) for block in blocks]
    return max(map(shapes.count, shapes)) > len(blocks) / 2


def compile_module(module: nn.Module, varies: bool = False) -> None:
    """Compile a module in place.

    If shapes vary between steps, PyTorch compiles code for all shapes when it meets a second shape. Otherwise, it
    compiles code for each shape, which is faster if there are only a few.

    PyTorch doesn't compile functions that its own files define, so ``compile()`` does nothing for a type such
    as ``nn.Sequential`` or ``nn.TransformerEncoderLayer``. Instead, a function that calls its ``forward`` is
    compiled.
    """
    dynamic = None if varies else False
    if not type(module).__module__.startswith("torch.nn."):
        module.compile(dynamic=dynamic)
        return
    forward = module.forward
    module.forward = torch.compile(lambda *inputs, **named: forward(*inputs, **named), dynamic=dynamic)


def compiled_blocks(subject: TrainedSubject) -> str | None:
    blocks = find_blocks(subject.model)
    if not blocks:
        return "the model has no ModuleList or Sequential whose entries are two or more blocks of one type"
    for block in blocks:
        compile_module(block, subject.varies)
    subject.compiles = True
    return None


def compiled_model(subject: TrainedSubject) -> None:
    compile_module(subject.model, subject.varies)
    subject.compiles = True


def as_graph(subject: TrainedSubject) -> Step:
    return graph_of(subject.eager_step, subject.reset, WARMUPS)


@keeps_program
def cuda_graph(subject: TrainedSubject) -> str | None:
    if subject.device != "cuda":
        return "CUDA graphs are not available on a CPU"
    if subject.make_optimizer is default_adamw:
        subject.make_optimizer = partial(capturable_adamw, fused=False)
    subject.launch = as_graph
    return None


def master_adamw(subject: TrainedSubject, moments: torch.dtype) -> None:
    subject.make_optimizer = partial(MasterAdamW, lr=RATE, moments=moments)


def bf16_weights(subject: TrainedSubject) -> str | None:
    """Store matrices in bf16. Autocast stays on, because norms and vectors are still fp32."""
    if subject.autocast is None:
        return "bf16 weights need bf16 autocast; without it, they would be multiplied with fp32 activations"
    master_adamw(subject, torch.float32)
    return None


@keeps_program
def bf16_moments(subject: TrainedSubject) -> str | None:
    if getattr(subject.make_optimizer, "func", None) is not MasterAdamW:
        return "bf16 moments need MasterAdamW, the optimizer that bf16 weights use"
    master_adamw(subject, torch.bfloat16)
    subject.moments = "bf16"
    return None
