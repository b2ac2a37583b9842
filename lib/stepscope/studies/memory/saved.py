"""What one Transformer block saves for its backward pass, tensor by tensor, and the gradients it produces."""
import sys
from pathlib import Path
from types import FrameType

import pandas as pd
import torch

from stepscope.step import model
from stepscope.step.training_step import Step

MODEL = str(model.__file__)
SAVED_COLUMNS = ["line", "source", "region", "tensor", "dtype", "shape", "bytes"]


def block_saved(step: Step) -> tuple[pd.DataFrame, dict[str, int]]:
    """Run the first block forward and backward under saved-tensor hooks.

    Returns a row for each piece of memory that the block keeps for its backward, in :data:`SAVED_COLUMNS`:
    the line of the model that saved it first, what it is and its bytes. Two tensors on one piece of memory
    count once. Parameters and the model's tables, which live anyway, are left out; autocast's copies of
    weights are in, named as such. And scalars: ``block_saved_bytes``, ``block_copies_bytes`` (of it),
    ``block_gradient_bytes``.
    """
    model, config = step.model, step.config
    block = model.blocks[0]
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    weights = {tuple(p.shape) for p in block.parameters() if p.dim() == 2}
    found: dict[int, tuple] = {}
    kept = []  # pieces of memory stay alive, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and storage.data_ptr() not in found:
            frame: FrameType | None = sys._getframe(1)
            while frame and frame.f_code.co_filename != MODEL:
                frame = frame.f_back
            # A product saves its weight transposed; an activation of the same shape, as it lies in memory.
            copy = tensor.dim() == 2 and not tensor.is_contiguous() and tuple(tensor.t().shape) in weights
            place = frame.f_lineno if frame else 0
            found[storage.data_ptr()] = (place, "autocast copy" if copy else "activation", tensor.dtype,
                                         tuple(tensor.shape), storage.nbytes())
            kept.append(storage)
        return tensor.detach()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    step.clear_gradients()
    x = torch.randn(config.batch_size, config.context_length, config.d_model, device=config.device,
                    requires_grad=True)
    own_input = x.untyped_storage().data_ptr()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), step.autocast():
        output = block(x, model.cos, model.sin, model.future)
    output.sum().backward()
    gradients = sum(p.grad.untyped_storage().nbytes() for p in block.parameters())
    step.clear_gradients()
    lines = Path(MODEL).read_text(encoding="utf-8").splitlines()
    rows = [(f"stepscope/step/model.py:{place}", lines[place - 1].strip() if place else "",
             _region(lines, place), "the block's input" if pointer == own_input else tensor,
             str(dtype).removeprefix("torch."),
             "x".join(map(str, shape)), size)
            for pointer, (place, tensor, dtype, shape, size) in found.items()]
    table = pd.DataFrame(rows, columns=SAVED_COLUMNS).sort_values(
        "bytes", ascending=False, kind="stable", ignore_index=True)
    copies = int(table.loc[table["tensor"] == "autocast copy", "bytes"].sum())
    return table, {"block_saved_bytes": int(table["bytes"].sum()), "block_copies_bytes": copies,
                   "block_gradient_bytes": gradients}


def _region(lines: list[str], place: int) -> str:
    """The name of the region that a line of the model belongs to: that of the nearest ``@region`` above
    it."""
    above = (line.strip() for line in reversed(lines[:place]))
    return next((line.split('"')[1] for line in above if line.startswith("@region(")), "")
