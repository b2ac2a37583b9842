"""What one Transformer block saves for its backward pass, tensor by tensor, and the gradients it produces."""
import sys
from pathlib import Path
from traceback import walk_stack

import pandas as pd
import torch

from stepscope.step import model
from stepscope.step.training_step import Step
from stepscope.studies.memory.history import grouped

MODEL = str(model.__file__)
COPY, INPUT, ACTIVATION = "bf16 copy of a weight", "the block's input", "activation"


def saved_by_block(step: Step) -> pd.DataFrame:
    """Run the first block forward and backward under saved-tensor hooks.

    Returns what the block keeps for its backward and the gradients that it produces, each largest first, as
    rows of a run's ``allocations``: tensors of one line, kind and size are one row with their ``count``. Two
    tensors on one piece of memory count once; weights and the model's tables, which live anyway, are left
    out.
    """
    block = step.model.blocks[0]
    known = {t.untyped_storage().data_ptr() for t in (*step.model.parameters(), *step.model.buffers())}
    shapes = {tuple(p.shape) for p in block.parameters() if p.dim() == 2}
    found: dict[int, tuple] = {}
    alive = []  # pieces of memory stay, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in known and address not in found:
            # A matmul saves its weight transposed; an activation of the same shape, as it lies in memory.
            copy = tensor.dim() == 2 and not tensor.is_contiguous() and tuple(tensor.t().shape) in shapes
            found[address] = (*place_here(), INPUT if address == own_input else COPY if copy else ACTIVATION,
                              storage.nbytes())
            alive.append(storage)
        return tensor.detach()

    step.clear_gradients()
    config = step.config
    x = torch.randn(config.batch_size, config.context_length, config.d_model, device=step.device,
                    requires_grad=True)
    own_input = x.untyped_storage().data_ptr()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), step.autocast():
        output = block(x, step.model.cos, step.model.sin, step.model.future)
    output.sum().backward()
    made = [("", "", "gradient", p.grad.untyped_storage().nbytes()) for p in block.parameters()]
    step.clear_gradients()
    tables = {"saved by a block": list(found.values()), "gradients of a block": made}
    return pd.concat([grouped(what, pd.DataFrame(rows, columns=["line", "region", "tensor", "size"]), ["sum"])
                      for what, rows in tables.items()])


def place_here() -> tuple[str, str]:
    """The innermost line of the model that runs now, "path:line", and the region that it belongs to: that of
    the nearest ``@region`` above it."""
    number = next(line for frame, line in walk_stack(sys._getframe()) if frame.f_code.co_filename == MODEL)
    above = (line.strip() for line in reversed(Path(MODEL).read_text(encoding="utf-8").splitlines()[:number]))
    region = next((line.split('"')[1] for line in above if line.startswith("@region(")), "")
    return f"stepscope/step/model.py:{number}", region
