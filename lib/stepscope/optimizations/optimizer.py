"""AdamW with fp32 master weights, which writes the bf16 weights for matmuls, so that a step needs no casts.

    optimizer = MasterAdamW(model, lr=3e-4, moments=torch.bfloat16)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

`docs/master_adamw.py` is a training loop with this optimizer: schedule, clipping, CUDA graph, and resuming.

**Why two copies of a weight.** Matmuls in bf16 are many times faster than in fp32, and read half the bytes.
Updates, however, need fp32. bf16 has 8 significant bits, so the next number above 1 is 1 + 2^-7, and an update of
3e-4 changes nothing, however often it is repeated. Therefore, training in mixed precision (Micikevicius et al.
2017, arXiv:1710.03740) accumulates updates in fp32 master weights, and runs matmuls with a bf16 copy.

**The difference from autocast.** Under autocast, the model's parameters are the fp32 weights. Every forward pass
casts each of them to bf16 (torch's autocast weight cache keeps the copy until the pass ends), and every backward
pass casts each gradient to fp32. With MasterAdamW, the model's matrices and their gradients *are* bf16. One kernel
reads the gradients, updates the fp32 masters and the moments, and writes the bf16 weights, so a step has no casts.
Vectors (norm weights and biases) stay fp32, and are their own masters. Weights with more than two dimensions
(convolutions, experts) become bf16 like matrices. The weights of ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` stay fp32.

**The formula** (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2), for gradient g at step t:

    m = beta1 m + (1 - beta1) g                 the running mean of the gradients
    v = beta2 v + (1 - beta2) g^2               the running mean of their squares
    w = w (1 - lr decay) - lr m' / (sqrt(v') + eps)      with m' = m / (1 - beta1^t), v' = v / (1 - beta2^t)

The formula needs only a dozen operations per parameter, so its run time is the time to move the data. Bytes per
parameter, in the GPU's memory and moved in one step:

                       in memory                     read             written        moved
    torch, fp32        w 4, g 4, m 4, v 4 = 16       w g m v 16       w m v 12          28
    here, fp32 m, v    w 4, low 2, g 2, 8 = 16       w g m v 14       w m v low 14      28
    here, bf16 m, v    w 4, low 2, g 2, 4 = 12       w g m v 10       w m v low 10      20

``low`` is what matmuls read: one bf16 copy, or two FP8 copies of one byte each (fp8.py). The kernel writes FP8
copies tile by tile, one in the weight's layout and one transposed.

**CUDA graphs** need no call after the capture: a captured step contains the addresses of its own gradients,
and writes them to its own table in each replay. You can alternate eager steps and several graphs. The learning
rate is a tensor on the GPU that the graph reads, so schedulers work as with eager steps. All other options
keep the values that they had during the capture.

**Weights that other code writes** (a checkpoint, a clamp, DDP's broadcast) are copied to the masters. Every
in-place operation of PyTorch increases a parameter's version counter, and an eager step compares each counter with
its previous value. The optimizer's own writes use other tensors that share this memory, so they don't change the
counter. A weight replaces its master only if it differs from the rounded master, so loading weights that were
rounded from the masters keeps the masters' precision. Each parameter has its own storage over its part of the
buffer (created with DLPack), because programs that save weights mistake two views of one storage for tied weights.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from itertools import accumulate, chain, compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepscope.optimizations import adamw, fp8, guards

MOMENTS = ("exp_avg", "exp_avg_sq")  # keys of a parameter's state
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01
# The scalars for a parameter without a gradient. With these scalars, a step doesn't change the parameter. In the
# kernel's order: kept, rate, correction, beta1, 1 - beta1, beta2, 1 - beta2, eps.
UNCHANGED = (1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0)


class TakeWeights:
    """A module hook that updates the optimizer's master weights when weights are loaded.

    In a copy of the model, or after pickling, the hook does nothing, because the optimizer doesn't own those
    weights.
    """

    def __init__(self, optimizer: "MasterAdamW | None" = None):
        self.optimizer = optimizer and weakref.ref(optimizer)  # the model may outlive its optimizer

    def __call__(self, *_: Any) -> None:
        if self.optimizer and (optimizer := self.optimizer()):
            optimizer.take_weights()

    def __reduce__(self) -> tuple[Any, ...]:
        return TakeWeights, ()


def add_masters(optimizer: "MasterAdamW", state_dict: dict[str, Any]) -> None:
    """Add each parameter's fp32 master to the state dict (a hook of ``state_dict``)."""
    optimizer.take_weights()
    for index, master in enumerate(optimizer.masters().values()):
        state_dict["state"][index]["master"] = master


def _has_shape(state: dict[str, Any], key: str, shape: torch.Size) -> bool:
    return key in state and state[key].shape == shape


class MasterAdamW(torch.optim.Optimizer):
    """AdamW with fp32 master weights for a model whose matrices become bf16. One kernel updates all parameters.

    The parameters become views of two flat buffers: bf16 parameters are views of ``low``, and fp32 parameters are
    views of ``master``. They keep their memory format, such as ``torch.channels_last``.

    The master weights are initialized from the model's weights. If other code overwrites a weight later, the next
    eager step or ``state_dict()`` copies the new value to its master, with bf16's precision. Loaded weights are
    copied immediately. To resume bit-identically, load the optimizer's own state dict, which is torch's plus each
    parameter's fp32 ``master``. As in torch, the tensors in the state dict belong to the optimizer, so save or
    copy them before the next step.

    Run the model under autocast, unless it has no biases and its norms cast their output back to bf16.

    Args:
        params: a model on its device, or anything that torch's optimizers accept: parameters, named parameters,
            or groups. Parameters with two or more dimensions become bf16, except for those of a model's recurrent
            layers. Parameters that don't require a gradient are not changed. Create the optimizer before
            DistributedDataParallel wraps the model.
        lr: the learning rate. Each group's ``"lr"`` is a 0-dim tensor on the parameters' device; write it in
            place, as torch's schedulers do. If you assign a number instead, only eager steps use it. If you
            pass a tensor, the groups keep it, and you can write to it.
        moments: dtype of both moments, ``torch.float32`` or ``torch.bfloat16``.
        betas, eps, weight_decay: defaults for groups that don't set them.

    Raises:
        ValueError: If ``moments`` is another dtype, an option is out of range, ``lr`` is on another device, or a
            name is used twice; if parameters are sharded, wrapped by DistributedDataParallel, on several devices,
            or neither fp32 nor bf16; or if, on a GPU, an FP8 weight has a dimension that is not a multiple of 64.
    """

    @torch.no_grad()
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        moments: torch.dtype = torch.float32,
        *,
        betas: tuple[float, float] = BETAS,
        eps: float = EPS,
        weight_decay: float = WEIGHT_DECAY,
    ):
        if moments not in (torch.float32, torch.bfloat16):
            raise ValueError(f"moments: got {moments}, but expected torch.float32 or torch.bfloat16")
        self.moments = moments
        self.frozen: list[Tensor] = []  # parameters that didn't require a gradient
        modules: Iterable[nn.Module] = ()
        if isinstance(params, nn.Module):
            modules = [*params.modules()]
            params = params.named_parameters()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.parameters: list[nn.Parameter] = []
        names: list[str] = []
        for group in self.param_groups:
            guards.check_group(group, moments)
            self.parameters += group["params"]
            names += group.get("param_names", ())
        if not names:
            names = [str(index) for index in range(len(self.parameters))]
        self.named = dict(zip(names, self.parameters))
        if len(self.named) < len(self.parameters):
            raise ValueError("got two parameters with the same name, but expected unique names")
        if not self.parameters:
            raise ValueError("no parameter requires a gradient")
        self.device = self.parameters[0].device
        guards.check_parameters(self.named)
        self._make_scalars()
        self._make_buffers(guards.recurrent_weights(modules))
        self.reset()
        if self.device.type == "cuda":
            self._make_tables()
        self.register_state_dict_post_hook(add_masters)
        for module in modules:
            module.register_load_state_dict_post_hook(TakeWeights(self))

    def _make_buffers(self, kept_in_fp32: set[Tensor]) -> None:
        """Create the flat buffers. The parameters, and the moments in ``state``, become views of them."""
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.strides = [torch.empty_like(parameter, device="meta").stride() for parameter in self.parameters]
        self.counts = [parameter.numel() for parameter in self.parameters]
        indices = range(len(self.parameters))
        self.in_fp8 = [index for index in indices if hasattr(self.parameters[index], "fp8_scale")]
        order = sorted(indices, key=lambda index: index in self.in_fp8)  # FP8 weights last
        padded = [self._blocks(index) * adamw.BLOCK for index in order]
        *starts, total = accumulate(padded, initial=0)
        start_of = dict(zip(order, starts))
        self.offsets = [start_of[index] for index in indices]
        device = self.device
        self.master = torch.zeros(total, device=device, dtype=torch.float32)
        self.low = torch.zeros(total, device=device, dtype=torch.bfloat16)
        self.m = torch.zeros(total, device=device, dtype=self.moments)
        self.v = torch.zeros(total, device=device, dtype=self.moments)
        num_parameters = len(self.parameters)
        self.count = torch.zeros(num_parameters, device=device, dtype=torch.int64)  # steps so far
        self.scales, self.largest = torch.ones(2, num_parameters, device=device, dtype=torch.float32)
        for index, parameter in enumerate(self.parameters):
            self.view(self.master, index).copy_(parameter)
            becomes_bf16 = parameter.dim() > 1 and parameter not in kept_in_fp32
            buffer = self.low if becomes_bf16 else self.master
            new_storage = torch.from_dlpack(self._flat(buffer, index))  # shares the buffer's memory
            parameter.data = new_storage.as_strided(parameter.shape, self.strides[index])
            state = {
                "step": self.count[index],
                "exp_avg": self.view(self.m, index),
                "exp_avg_sq": self.view(self.v, index),
            }
            if index in self.in_fp8:
                state["scale"] = self.scales[index]
                parameter.fp8_scale.data = state["scale"]
            self.state[parameter] = state
        self.addresses = [parameter.data_ptr() for parameter in self.parameters]
        self.versions = [parameter._version for parameter in self.parameters]
        self.replicas: Any = None  # a weak reference to the DDP wrapper whose ranks share the masters

    def _blocks(self, index: int) -> int:
        """Return the number of the kernel's blocks that a parameter fills."""
        return -(-self.counts[index] // adamw.BLOCK)

    def _make_scalars(self) -> None:
        """Create the scalars that a step reads, on the device. Each group's ``lr`` becomes a view of ``rates``."""
        num_groups = len(self.param_groups)
        num_parameters = len(self.parameters)
        sizes = [len(group["params"]) for group in self.param_groups]
        group_sizes = torch.tensor(sizes, device="cpu")
        groups = torch.arange(num_groups, device="cpu")
        self.group_of = groups.repeat_interleave(group_sizes)
        device = self.device
        self.groups = self.group_of.to(device)
        self.rates = torch.zeros(num_groups, device=device, dtype=torch.float64)
        self.decays, *betas = torch.zeros(3, num_parameters, device=device, dtype=torch.float64)
        self.betas = torch.stack(betas)
        self.scalars = torch.zeros(num_parameters, adamw.COLUMNS, device=device, dtype=torch.float32)
        self.fixed: list[Any] = []  # the other options of each group when they were last read
        for rate, group in zip(self.rates.unbind(), self.param_groups):
            lr = group["lr"]
            if not isinstance(lr, Tensor):
                group["lr"] = rate.fill_(lr)
            elif lr.device != self.device:
                raise ValueError(f"lr: got a tensor on {lr.device}, but expected {self.device}")
        self.given = [group["lr"] for group in self.param_groups]
        self._read_groups()

    def _make_tables(self) -> None:
        """Create the tables in which a kernel's programs look up their parameter, its offset and its size."""
        in_fp32 = [parameter.dtype == torch.float32 for parameter in self.parameters]
        widths = [shape[-1] if shape else 1 for shape in self.shapes]

        def tensor(numbers: Sequence[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=self.device)

        self.in_fp32 = tensor(in_fp32)
        self.widths = tensor(widths)
        self.places = [tensor(self.counts), tensor(self.offsets)]
        num_parameters = len(self.counts)
        flat = [index for index in range(num_parameters) if index not in self.in_fp8]
        blocks = [self._blocks(index) for index in flat]
        tiles = [self._tiles(index) for index in self.in_fp8]
        num_tiles = [len(starts) for starts in tiles]
        all_tiles = torch.cat(tiles) if tiles else torch.zeros(0)
        self.owners = self._owners(flat, blocks)
        self.tile_owners = self._owners(self.in_fp8, num_tiles)
        self.tiles = all_tiles.to(self.device, torch.int32)
        self.gradients_at = [0] * num_parameters  # the addresses that the table contains
        self.table = torch.zeros(num_parameters, device=self.device, dtype=torch.int64)

    def _owners(self, indices: list[int], programs: list[int]) -> Tensor:
        """Return each program's parameter index, int32. ``programs`` contains each parameter's program count."""
        owners, times = torch.tensor([indices, programs], dtype=torch.int32, device="cpu")
        by_program = owners.repeat_interleave(times)
        return by_program.to(self.device)

    def _tiles(self, index: int) -> Tensor:
        """Return the offset of each tile's first element in a matrix.

        Raises:
            ValueError: If a dimension is not a multiple of 64.
        """
        height, width = self.shapes[index]
        if height % 64 or width % 64:
            raise ValueError(f"got an FP8 weight of {height} x {width}, but expected multiples of 64")
        tile_height, tile_width = adamw.TILE
        tops = torch.arange(0, height, tile_height, device="cpu")
        lefts = torch.arange(0, width, tile_width, device="cpu")
        starts = tops[:, None] * width + lefts
        return starts.flatten()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, omitting its frozen parameters. This works only during construction."""
        if hasattr(self, "master"):
            raise RuntimeError("all weights share one buffer: pass all groups when you create MasterAdamW")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        parameters = group["params"]
        trained = [parameter.requires_grad for parameter in parameters]
        self.frozen += [parameter for parameter in parameters if not parameter.requires_grad]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = list(compress(group[key], trained))

    def __getstate__(self) -> dict[str, Any]:
        if self.in_fp8:
            raise TypeError("MasterAdamW with FP8 weights cannot be copied or pickled: save its state_dict()")
        return {
            "groups": self.param_groups,
            "moments": self.moments,
            "saved": self.state_dict(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Reconstruct the optimizer from the pickled copies of its parameters."""
        groups = [dict(group) for group in state["groups"]]
        type(self).__init__(self, groups, moments=state["moments"])
        self.load_state_dict(state["saved"])

    def _flat(self, buffer: Tensor, index: int) -> Tensor:
        start = self.offsets[index]
        return buffer[start : start + self.counts[index]]

    def view(self, buffer: Tensor, index: int) -> Tensor:
        """Return a parameter's part of a buffer, with the parameter's shape and memory format."""
        return self._flat(buffer, index).as_strided(self.shapes[index], self.strides[index])

    def masters(self) -> dict[str, Tensor]:
        """Return the fp32 weights, keyed by parameter name ("0", "1" and so on for unnamed parameters)."""
        return {name: self.view(self.master, index) for index, name in enumerate(self.named)}

    def reset(self) -> None:
        """Reset the moments and step counts, and keep the current master weights."""
        self._round()
        for tensor in (self.m, self.v, self.count):
            tensor.zero_()

    @torch.no_grad()
    def take_weights(self) -> None:
        """Update the masters from weights that other code has written since the last call.

        Eager steps, ``state_dict`` and the model's ``load_state_dict`` call this method. After any other write,
        call it before you replay a graph, because a replay runs no Python. Writes through ``.data`` are not
        detected.

        Raises:
            RuntimeError: If a parameter was moved or cast, and is no longer a view of the buffer.
        """
        parameters = self.named.items()
        for (name, parameter), address in zip(parameters, self.addresses):
            if parameter.data_ptr() != address:
                raise RuntimeError(f"{name} was moved or cast after MasterAdamW was created")
        versions = [parameter._version for parameter in self.parameters]
        if versions == self.versions:
            return
        for index, parameter in enumerate(self.parameters):
            if versions[index] != self.versions[index]:
                self._take(index, parameter.detach())
        self.versions = versions
        self._share_masters()

    def _take(self, index: int, weight: Tensor) -> None:
        """Update the master from a weight, but only where the weight differs from the rounded master."""
        master = self.view(self.master, index)
        if index not in self.in_fp8:
            is_rounded_master = weight == master.to(weight.dtype)
            master.copy_(torch.where(is_rounded_master, master, weight.float()))
            return
        rounded = torch.empty_like(weight)
        fp8.write_layouts(rounded, master, self.scales[index])
        if not torch.equal(rounded.view(torch.int16), weight.view(torch.int16)):
            master.copy_(weight)
            self._round_fp8(index)

    def _share_masters(self) -> None:
        """Broadcast the masters and moments of rank 0 once, because DDP broadcasts only the rounded weights."""
        if self.replicas and self.replicas() is not None:
            return
        wrapper = guards.find_wrapper(self.parameters)
        if wrapper is not None:
            for tensor in (self.master, self.m, self.v, self.count):
                dist.broadcast(tensor, group=wrapper.process_group, group_src=0)
            self.replicas = weakref.ref(wrapper)
            self._round()

    def _round(self, rescale: bool = True) -> None:
        """Write all bf16 and FP8 weights from the masters. Without ``rescale``, FP8 weights keep their scales."""
        self.low.copy_(self.master)
        for index in self.in_fp8:
            self._round_fp8(index, rescale)

    def _round_fp8(self, index: int, rescale: bool = True) -> None:
        if rescale:
            largest = self.view(self.master, index).abs().amax()
            self.scales[index] = fp8.power_of_two_scale(largest)
        self._write_fp8(index)

    def _write_fp8(self, index: int) -> None:
        """Write an FP8 weight's two layouts, and its largest magnitude, which determines the next scale."""
        master = self.view(self.master, index)
        self.largest[index] = master.abs().amax()
        fp8.write_layouts(self.parameters[index].data, master, self.scales[index])

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of MasterAdamW or of torch's AdamW.

        Masters, the model's weights (from the masters), moments and learning rates are written in place, so
        captured graphs also continue from the loaded state. Moments of another dtype are rounded to nearest. State
        dicts of torch's AdamW have no masters; the masters are then the model's current weights.

        Raises:
            ValueError: If groups or parameter shapes don't match, an option is out of range, or only some
                parameters have a master. The optimizer is then unchanged.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        expected = [len(group["params"]) for group in self.param_groups]
        if sizes != expected:
            raise ValueError(f"got a state dict with groups of {sizes} parameters, but expected {expected}")
        for group, saved_group in zip(self.param_groups, groups):
            guards.check_group({**group, **saved_group}, self.moments)
        indices = chain.from_iterable(group["params"] for group in groups)
        saved = [state_dict["state"].get(index, {}) for index in indices]
        self._check_state(saved)
        self.take_weights()
        masters = self.masters().values()
        for master, parameter, saved_state in zip(masters, self.parameters, saved):
            master.copy_(saved_state.get("master", master))
            for key, tensor in self.state[parameter].items():
                if key == "scale":  # missing if the saved weights were bf16
                    tensor.copy_(saved_state.get(key, tensor))
                else:  # torch's AdamW has no state for a parameter that never had a gradient
                    tensor.copy_(torch.as_tensor(saved_state.get(key, 0)))
        self._read_rates(False)
        for group, saved_group in zip(self.param_groups, groups):
            for key in saved_group.keys() - {"params", "param_names"}:
                saved_value = saved_group[key]
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(float(saved_value))
                else:
                    group[key] = deepcopy(saved_value)
        lacks_scales = any("scale" not in saved[index] for index in self.in_fp8)
        self._round(rescale=lacks_scales)
        self._read_groups()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _check_state(self, saved: Sequence[dict[str, Any]]) -> None:
        """Raise a ValueError if a parameter's saved state is incomplete, or has the wrong shapes."""
        has_masters = any("master" in state for state in saved)
        keys = ("master", *MOMENTS) if has_masters else MOMENTS
        for name, shape, state in zip(self.named, self.shapes, saved):
            if not (state or has_masters):
                continue
            is_complete = "step" in state and all(_has_shape(state, key, shape) for key in keys)
            if not is_complete:
                raise ValueError(
                    f"{name}: the state dict lacks step or {', '.join(keys)} of shape {tuple(shape)}"
                )

    def _read_groups(self) -> None:
        """Copy the groups' options to the device, if they have changed."""
        for group in self.param_groups:
            guards.check_group(group, self.moments)
        fixed = []
        for group in self.param_groups:
            options = (*group["betas"], group["eps"], group["weight_decay"])
            fixed.append(tuple(map(float, options)))
        if fixed == self.fixed:
            return
        by_group = torch.tensor(fixed, dtype=torch.float64, device="cpu")
        beta1, beta2, eps, decay = by_group[self.group_of].unbind(1)
        scalars = torch.stack((beta1, 1 - beta1, beta2, 1 - beta2, eps), 1)
        self.betas.copy_(torch.stack((beta1, beta2)))
        self.decays.copy_(decay)
        self.scalars[:, 3:].copy_(scalars)
        self.fixed = fixed

    def _read_rates(self, capturing: bool) -> None:
        for index, group in enumerate(self.param_groups):
            lr = group["lr"]
            if not isinstance(lr, Tensor):
                if capturing:
                    raise TypeError(
                        f'group["lr"] was replaced by {lr}, which a captured graph would ignore: '
                        'use group["lr"].fill_(...)'
                    )
                lr = self.given[index].fill_(lr)
                group["lr"] = lr
            rate = self.rates[index]
            if lr.data_ptr() != rate.data_ptr():  # a tensor that the caller passed
                rate.copy_(lr.reshape(()))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Parameters without a gradient don't change.

        Raises:
            RuntimeError: If a gradient is sparse, or has another memory format or dtype; if a parameter was moved
                or cast, is no longer in its group, or has started to require a gradient; or if a parameter has no
                gradient while a graph is captured.
            TypeError: If a group's learning rate is no longer a tensor while a graph is captured.
            ValueError: If an option of a group is out of range.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        on_gpu = self.device.type == "cuda"
        capturing = on_gpu and torch.cuda.is_current_stream_capturing()
        gradients = self._gradients()
        indices = range(len(gradients))
        missing = [index for index in indices if gradients[index] is None]
        if capturing and missing:
            all_names = list(self.named)
            names = ", ".join(all_names[index] for index in missing)
            raise RuntimeError(f"{names}: no gradient, but a captured graph updates all parameters")
        if not capturing:
            self._check_unchanged()
            self.take_weights()
        if len(missing) == len(self.parameters):
            return loss
        self._read_groups()
        self._read_rates(capturing)
        table = None
        if on_gpu:
            for index in missing:  # these zeros must stay alive until the launch
                gradients[index] = torch.zeros_like(self.parameters[index])
            table = self._table(gradients, capturing)
        self.count.add_(1)
        if missing:
            self.count[missing] -= 1
        corrections = 1 - torch.pow(self.betas, self.count)
        kept, rate, correction, *_ = self.scalars.unbind(1)
        rates = self.rates[self.groups]
        torch.sub(1, rates * self.decays, out=kept)
        torch.div(rates, corrections[0], out=rate)
        torch.rsqrt(corrections[1], out=correction)
        if self.in_fp8:
            self.scales.copy_(fp8.power_of_two_scale(self.largest))
            self.largest.zero_()
        if table is None:
            self._update()
        else:
            self._launch(table, missing)
        return loss

    def _gradients(self) -> list[Any]:
        """Return all gradients (None if missing); raise a RuntimeError if any is sparse or has the wrong dtype."""
        gradients = [parameter.grad for parameter in self.parameters]
        for (name, parameter), gradient in zip(self.named.items(), gradients):
            if gradient is None:
                continue
            is_dense = gradient.layout == torch.strided
            if not is_dense or gradient.dtype != parameter.dtype:
                raise RuntimeError(
                    f"{name}: got a gradient that is {gradient.layout} and {gradient.dtype},"
                    f" but expected torch.strided and {parameter.dtype}: sparse gradients are not supported"
                )
        return gradients

    def _check_unchanged(self) -> None:
        """Raise a RuntimeError if the parameters to update are no longer those in the buffers."""
        grouped = chain.from_iterable(group["params"] for group in self.param_groups)
        grouped_ids = list(map(id, grouped))
        if grouped_ids != list(map(id, self.parameters)):
            raise RuntimeError(
                "the groups no longer contain the parameters with which MasterAdamW was created"
            )
        if len(self.state) < len(self.parameters):
            raise RuntimeError(
                "the state was cleared, but its tensors are views of a buffer: call reset() instead"
            )
        is_frozen_trained = any(parameter.requires_grad for parameter in self.frozen)
        if is_frozen_trained:
            raise RuntimeError(
                "a parameter requires a gradient now, but didn't when MasterAdamW was created: create a new one"
            )

    def _update(self) -> None:
        """Update all parameters on a CPU, with the formula that the kernel implements."""
        for index, parameter in enumerate(self.parameters):
            master = self.view(self.master, index)
            m = self.view(self.m, index)
            v = self.view(self.v, index)
            bits = None
            if self.moments == torch.bfloat16:
                numbers = torch.arange(self.counts[index], device=self.device)
                elements = self.offsets[index] + numbers
                bits = adamw.random_bits(elements, self.count[index])
                bits = bits.as_strided(self.shapes[index], self.strides[index])
            if parameter.grad is not None:
                adamw.update_(master, m, v, parameter.grad, self.scalars[index], bits)
            if parameter.dtype != torch.float32:
                parameter.data.copy_(master)
            if index in self.in_fp8:
                self._write_fp8(index)

    def _launch(self, table: Tensor, missing: list[int]) -> None:
        exact = self.moments == torch.float32
        scalars = self.scalars
        if missing:
            scalars = scalars.clone()
            scalars[missing] = scalars.new_tensor(UNCHANGED)
        buffers = self.master, self.m, self.v, self.low, scalars, self.count, table
        # enable_fp_fusion=False: every operation is rounded separately, as in the formula
        if len(self.owners):
            adamw.adamw_kernel[(len(self.owners),)](
                *buffers,
                self.in_fp32,
                *self.places,
                self.owners,
                exact,
                adamw.BLOCK,
                math.gcd(16, *self.counts),
                num_warps=2 if exact else 4,
                enable_fp_fusion=False,
            )
        if self.in_fp8:
            adamw.adamw_fp8_kernel[(len(self.tiles),)](
                *buffers,
                self.widths,
                *self.places,
                self.tile_owners,
                self.tiles,
                self.scales,
                self.largest,
                exact,
                *adamw.TILE,
                num_warps=8,
                enable_fp_fusion=False,
            )

    def _table(self, gradients: list[Tensor], capturing: bool) -> Tensor:
        """Return the table of gradient addresses; raise a RuntimeError if the kernel can't read a gradient."""
        addresses = [gradient.data_ptr() for gradient in gradients]
        for name, gradient, strides, address in zip(self.named, gradients, self.strides, addresses):
            if not guards.has_strides(gradient, strides) or address % 16:
                raise RuntimeError(
                    f"{name}: the optimizer's kernel requires a gradient in the weight's memory format, at an"
                    " address that is a multiple of 16 bytes"
                )
        if capturing:
            # The graph gets its own table, and kernels that fill it with addresses from their arguments. A copy
            # from the host would read host memory in each replay, so this memory would have to stay unchanged.
            table = torch.full_like(self.table, 0)
            torch._foreach_add_(table.unbind(), addresses)
            return table
        if addresses != self.gradients_at:
            self.table.copy_(torch.tensor(addresses, device="cpu"))
            self.gradients_at = addresses
        return self.table
