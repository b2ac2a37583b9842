"""What one Transformer block saves for its backward pass, tensor by tensor, and the gradients it produces."""
import sys
from pathlib import Path
from types import FrameType

import pandas as pd
import torch

from stepscope.step import model
from stepscope.step.accounting import MIB
from stepscope.step.training_step import Step

MODEL = str(model.__file__)
COPY, INPUT, ACTIVATION = "bf16 copy of a weight", "the block's input", "activation"


def saved_by_block(step: Step) -> tuple[pd.DataFrame, dict[str, int]]:
    """Run the first block forward and backward under saved-tensor hooks.

    Returns what the block keeps for its backward and the gradients that it produces, each largest first, as
    rows of a run's ``allocations``: tensors of one line, kind and size are one row with their ``count``. Two
    tensors on one piece of memory count once; weights and the model's tables, which live anyway, are left
    out. And ``block_saved_bytes``, ``block_copies_bytes`` (of them, autocast's copies of weights) and
    ``block_gradient_bytes``.
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
            found[address] = (line_here(), INPUT if address == own_input else COPY if copy else ACTIVATION,
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
    gradients = [p.grad.untyped_storage().nbytes() for p in block.parameters()]
    step.clear_gradients()
    saved = pd.DataFrame(list(found.values()), columns=["line", "tensor", "bytes"])
    made = pd.DataFrame({"line": 0, "tensor": "gradient", "bytes": gradients})
    sizes = {"block_saved_bytes": int(saved["bytes"].sum()), "block_gradient_bytes": sum(gradients),
             "block_copies_bytes": int(saved.loc[saved["tensor"] == COPY, "bytes"].sum())}
    return pd.concat([grouped("saved by a block", saved), grouped("gradients of a block", made)]), sizes


def line_here() -> int:
    """The innermost line of the model that runs now."""
    frame: FrameType | None = sys._getframe(2)
    while frame and frame.f_code.co_filename != MODEL:
        frame = frame.f_back
    return frame.f_lineno if frame else 0


def grouped(what: str, table: pd.DataFrame) -> pd.DataFrame:
    """Tensors by line, kind and size, in the columns of ``allocations``, the largest sum first."""
    lines = ["", *Path(MODEL).read_text(encoding="utf-8").splitlines()]
    rows = table.groupby(["line", "tensor", "bytes"], sort=False).size().rename("count").reset_index()
    order = (rows["bytes"] * rows["count"]).sort_values(ascending=False, kind="stable").index
    rows = rows.loc[order].reset_index(drop=True)
    return pd.DataFrame({"what": what, "rank": rows.index + 1, "tensor": rows["tensor"],
                         "line": [f"stepscope/step/model.py:{place}" * bool(place) for place in rows["line"]],
                         "source": [lines[place].strip() for place in rows["line"]],
                         "region": [region(lines, place) for place in rows["line"]],
                         "mib": rows["bytes"] / MIB, "count": rows["count"]})


def region(lines: list[str], place: int) -> str:
    """The region that a line of the model belongs to: that of the nearest ``@region`` above it."""
    above = (line.strip() for line in reversed(lines[:place + 1]))
    return next((line.split('"')[1] for line in above if line.startswith("@region(")), "")
