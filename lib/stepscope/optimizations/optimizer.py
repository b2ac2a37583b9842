"""AdamW with fp32 master weights that writes the bf16 weights that matmuls read: nothing is cast.

    optimizer = MasterAdamW(model, lr=3e-4, moments=torch.bfloat16)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

`docs/master_adamw.py` is a training loop with it: its schedule, clipping, CUDA graph and resume.

**Why two copies of a weight.** Matmuls want bf16: they are many times as fast in it, and the weights are
half the bytes. Updates want fp32: bf16 has 8 significant bits, so that above 1 its next number is 1 + 2^-7,
and a step of 3e-4 changes nothing at all, however often it is made. So training in mixed precision
(Micikevicius et al. 2017, arXiv:1710.03740) adds its updates up in fp32 master weights, and multiplies with
a bf16 copy.

**What autocast does, and what is done here.** Under autocast the model's parameters are the fp32 weights;
every forward pass casts each of them to bf16 (torch's autocast weight cache keeps the copy until the pass
ends), and every backward pass casts each gradient to fp32. Here the model's matrices *are* bf16 and their
gradients with them; one kernel reads the gradients, updates the fp32 masters and the moments, and writes
the bf16 copy. No cast is left in the step. Vectors (norm weights and biases) stay fp32: they are the master
itself. Weights of more than two dimensions (convolutions, experts) become bf16 like matrices.

**The formula** (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2), of gradient g at step t:

    m = beta1 m + (1 - beta1) g                 the mean of the last gradients
    v = beta2 v + (1 - beta2) g^2               the mean of their squares
    w = w (1 - lr decay) - lr m' / (sqrt(v') + eps)      with m' = m / (1 - beta1^t), v' = v / (1 - beta2^t)

It does a dozen operations a number: what it takes is the bytes it moves. A parameter's, in the GPU's memory
and in one step:

                       held there                    read             written        moved
    torch, fp32        w 4, g 4, m 4, v 4 = 16       w g m v 16       w m v 12          28
    here, fp32 m, v    w 4, low 2, g 2, 8 = 16       w g m v 14       w m v low 14      28
    here, bf16 m, v    w 4, low 2, g 2, 4 = 12       w g m v 10       w m v low 10      20

``low`` is what matmuls read: a bf16 copy, or in its place two FP8 ones of a byte each (fp8.py), which the
kernel writes a tile at a time, as it lies and transposed.

**In a CUDA graph** nothing has to be said after the capture: a captured step takes the addresses of its own
gradients along, and writes them to its own table in each replay. Eager steps and several graphs may take
turns. The learning rate is a tensor on the GPU that the graph reads, so a scheduler goes on as it does
for eager steps. The other fields are as at the capture.

**Weights that other code writes** (a checkpoint, a clamp, DDP's broadcast) become the masters. An eager step
compares each parameter's version counter, which every in-place operation of PyTorch raises, with the one that
it saw last; our own writes go through other tensors over the same memory and don't raise it. A weight is taken
only where it isn't its master's rounding, so that loading weights that the masters were rounded to loses none
of their digits. Each parameter has a storage of its own over its part of the buffer (DLPack makes it), because
programs that save weights take two views of one storage for tied weights.
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

MOMENTS = ("exp_avg", "exp_avg_sq")  # of each parameter, in a state dict
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01
# The scalars of a parameter without a gradient, which a step leaves as it is: kept, rate, correction, beta1,
# 1 - beta1, beta2, 1 - beta2, eps.
UNCHANGED = (1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0)


class TakeWeights:
    """A hook of a model's modules, by which its optimizer takes weights that were loaded. In a copy of the
    model, or after pickling, the hook does nothing: those weights are not this optimizer's."""

    def __init__(self, optimizer: "MasterAdamW | None" = None):
        self.optimizer = optimizer and weakref.ref(optimizer)  # the model may outlive its optimizer

    def __call__(self, *_: Any) -> None:
        if self.optimizer and (optimizer := self.optimizer()):
            optimizer.take_weights()

    def __reduce__(self) -> tuple[Any, ...]:
        return TakeWeights, ()


def add_masters(optimizer: "MasterAdamW", state_dict: dict[str, Any]) -> None:
    """Put each parameter's fp32 master beside its moments (a hook of ``state_dict``)."""
    optimizer.take_weights()
    for index, master in enumerate(optimizer.masters().values()):
        state_dict["state"][index]["master"] = master


class MasterAdamW(torch.optim.Optimizer):
    """AdamW over all parameters of a model whose matrices become bf16: one launch for all of them.

    The parameters become views of two flat buffers, bf16 ones of ``low``, fp32 ones of ``master``; the master
    weights begin where the model is. Weights that are loaded or written later become the masters, in bf16's
    digits: an eager step, ``state_dict`` and a load into the model see to it. To continue to the bit, load
    the optimizer's own state dict, which is torch's with each parameter's fp32 ``master`` beside its moments.
    As in torch its tensors are the optimizer's own, so save or copy them before the next step.

    Autocast is off for a model without biases whose norms cast back to bf16. Any other model needs it on.

    Args:
        params: a model on its device, or what torch's optimizers take: parameters, named or not, or groups of
            them. Those of two and more dimensions are bf16 from here on; what needs no gradient is left
            alone. Make the optimizer before DistributedDataParallel wraps the model.
        lr: the learning rate. Each group's ``"lr"`` is a tensor, (), on the parameters' device: write it in
            place, as torch's schedulers do. A number that is assigned instead reaches eager steps alone. A
            tensor that is given stays the caller's, who writes that.
        moments: how both moments are stored, ``torch.float32`` or ``torch.bfloat16``.
        betas, eps, weight_decay: of groups that do not have their own.

    Raises:
        ValueError: moments of another dtype, an option out of range, a rate on another device, a name that is
            given twice, parameters that are sharded, wrapped by DistributedDataParallel, on several devices,
            or neither fp32 nor bf16, or, on a GPU, an FP8 weight with a side that is no multiple of 64.
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
            raise ValueError(f"moments: got {moments}, but they are torch.float32 or torch.bfloat16")
        self.moments = moments
        self.frozen: list[Tensor] = []  # parameters that needed no gradient
        modules = params.modules() if isinstance(params, nn.Module) else ()
        if isinstance(params, nn.Module):
            params = params.named_parameters()
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            guards.check_group(group, moments)
        self.parameters: list[nn.Parameter] = [
            parameter for group in self.param_groups for parameter in group["params"]
        ]
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        self.named = dict(zip(names or map(str, range(len(self.parameters))), self.parameters))
        if len(self.named) < len(self.parameters):
            raise ValueError("two parameters have the same name")
        if not self.parameters:
            raise ValueError("no parameter requires a gradient")
        self.device = self.parameters[0].device
        guards.check_parameters(self.named)
        self._make_scalars()
        self._make_buffers()
        self.reset()
        if self.device.type == "cuda":
            self._make_tables()
        self.register_state_dict_post_hook(add_masters)
        for module in modules:
            module.register_load_state_dict_post_hook(TakeWeights(self))

    def _make_buffers(self) -> None:
        """Make the flat buffers, of which the parameters become views; so are the moments in ``state``."""
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.counts = [parameter.numel() for parameter in self.parameters]
        self.in_fp8 = [index for index, one in enumerate(self.parameters) if hasattr(one, "fp8_scale")]
        places = sorted(range(len(self.parameters)), key=lambda index: index in self.in_fp8)  # FP8 ones last
        padded = [-(-self.counts[index] // adamw.BLOCK) * adamw.BLOCK for index in places]
        *starts, total = accumulate(padded, initial=0)
        self.offsets = [start for _, start in sorted(zip(places, starts))]
        self.master = torch.zeros(total, device=self.device, dtype=torch.float32)
        self.low = torch.zeros(total, device=self.device, dtype=torch.bfloat16)
        self.m, self.v = (torch.zeros(total, device=self.device, dtype=self.moments) for _ in range(2))
        parameters = len(self.parameters)
        self.count = torch.zeros(parameters, device=self.device, dtype=torch.int64)  # steps of each so far
        self.scales, self.largest = torch.ones(2, parameters, device=self.device, dtype=torch.float32)
        for index, parameter in enumerate(self.parameters):
            self.view(self.master, index).copy_(parameter)
            flat = self.view(self.low if parameter.dim() > 1 else self.master, index).flatten()
            parameter.data = torch.from_dlpack(flat).view(parameter.shape)  # the same memory, a new storage
            self.state[parameter] = {
                "step": self.count[index],
                "exp_avg": self.view(self.m, index),
                "exp_avg_sq": self.view(self.v, index),
            }
            if index in self.in_fp8:
                parameter.fp8_scale.data = self.state[parameter]["scale"] = self.scales[index]
        self.addresses = [parameter.data_ptr() for parameter in self.parameters]
        self.versions = [parameter._version for parameter in self.parameters]
        self.replicas: Any = None  # a weak reference to the DDP whose ranks have the same masters

    def _make_scalars(self) -> None:
        """Make what a step reads of each parameter's group, on the device; a group's ``lr`` is a view of
        ``rates``."""
        groups, parameters = len(self.param_groups), len(self.parameters)
        sizes = [len(group["params"]) for group in self.param_groups]
        self.group_of = torch.arange(groups, device="cpu").repeat_interleave(
            torch.tensor(sizes, device="cpu")
        )
        self.groups = self.group_of.to(self.device)
        self.rates = torch.zeros(groups, device=self.device, dtype=torch.float64)
        self.decays, *betas = torch.zeros(3, parameters, device=self.device, dtype=torch.float64)
        self.betas = torch.stack(betas)
        self.scalars = torch.zeros(parameters, adamw.COLUMNS, device=self.device, dtype=torch.float32)
        self.fixed: list[Any] = []  # as it was last read
        for rate, group in zip(self.rates.unbind(), self.param_groups):
            if not isinstance(group["lr"], Tensor):
                group["lr"] = rate.fill_(group["lr"])
            elif group["lr"].device != self.device:
                raise ValueError(f"lr: a tensor on {group['lr'].device}, but weights are on {self.device}")
        self.given = [group["lr"] for group in self.param_groups]
        self._read_groups()

    def _make_tables(self) -> None:
        """Make what the kernels' programs look up: each parameter's place, and whose they are."""
        in_fp32 = [parameter.dtype == torch.float32 for parameter in self.parameters]
        widths = [shape[-1] if shape else 1 for shape in self.shapes]
        numbers = in_fp32, widths, self.counts, self.offsets
        self.in_fp32, self.widths, *self.places = (
            torch.tensor(each, dtype=torch.int64, device=self.device) for each in numbers
        )
        flat = [index for index in range(len(self.counts)) if index not in self.in_fp8]
        tiles = [self._tiles(index) for index in self.in_fp8]
        self.owners = self._owners(flat, [-(-self.counts[index] // adamw.BLOCK) for index in flat])
        self.tile_owners = self._owners(self.in_fp8, [len(starts) for starts in tiles])
        self.tiles = torch.cat(tiles or [torch.zeros(0)]).to(self.device, torch.int32)
        self.gradients_at = [0] * len(self.counts)  # the addresses in the table
        self.table = torch.zeros(len(self.counts), device=self.device, dtype=torch.int64)

    def _owners(self, indices: list[int], programs: list[int]) -> Tensor:
        """Whose each program is: parameters' indices, int32, each as often as it has programs."""
        owners, times = torch.tensor([indices, programs], dtype=torch.int32, device="cpu")
        return owners.repeat_interleave(times).to(self.device)

    def _tiles(self, index: int) -> Tensor:
        """Where in a matrix its tiles start.

        Raises:
            ValueError: a side is no multiple of 64.
        """
        height, width = self.shapes[index]
        if height % 64 or width % 64:
            raise ValueError(f"FP8 weights have sides that are multiples of 64, got {height} x {width}")
        tops, lefts = (
            torch.arange(0, side, step, device="cpu") for side, step in zip((height, width), adamw.TILE)
        )
        return (tops[:, None] * width + lefts).flatten()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, without what needs no gradient; only while the optimizer is made."""
        if hasattr(self, "master"):
            raise RuntimeError("all weights lie in one buffer: give MasterAdamW all groups when it is made")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        trained = [parameter.requires_grad for parameter in group["params"]]
        self.frozen += [parameter for parameter in group["params"] if not parameter.requires_grad]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = list(compress(group[key], trained))

    def __getstate__(self) -> dict[str, Any]:
        if self.in_fp8:
            raise TypeError("MasterAdamW of FP8 weights cannot be copied or pickled: save its state_dict()")
        return {"groups": self.param_groups, "moments": self.moments, "saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a copy from its parameters, which are copies, too."""
        type(self).__init__(self, [dict(group) for group in state["groups"]], moments=state["moments"])
        self.load_state_dict(state["saved"])

    def view(self, flat: Tensor, index: int) -> Tensor:
        start, count = self.offsets[index], self.counts[index]
        return flat[start : start + count].view(self.shapes[index])

    def masters(self) -> dict[str, Tensor]:
        """The fp32 weights, by the parameters' names: "0", "1" and so on where they were given without."""
        return {name: self.view(self.master, index) for index, name in enumerate(self.named)}

    def reset(self) -> None:
        """Start over from the master weights as they are now, as before the first step."""
        self._round()
        for tensor in (self.m, self.v, self.count):
            tensor.zero_()

    @torch.no_grad()
    def take_weights(self) -> None:
        """Make masters of weights that other code has written since the last call. Eager steps, ``state_dict``
        and loads into the model call this. After any other write, call it before you replay a graph, which
        runs no code on the host. A write through ``.data`` cannot be noticed.

        Raises:
            RuntimeError: a parameter was moved or cast, and is no view of the buffer any more.
        """
        parameters = self.named.items()
        for (name, parameter), address in zip(parameters, self.addresses):
            if parameter.data_ptr() != address:
                raise RuntimeError(f"{name} was moved or cast after MasterAdamW was made")
        versions = [parameter._version for parameter in self.parameters]
        if versions == self.versions:
            return
        for index, parameter in enumerate(self.parameters):
            if versions[index] != self.versions[index]:
                self._take(index, parameter.detach())
        self.versions = versions
        self._share_masters()

    def _take(self, index: int, weight: Tensor) -> None:
        """Make a master of one weight, where this isn't the master's rounding."""
        master = self.view(self.master, index)
        if index not in self.in_fp8:
            master.copy_(torch.where(weight == master.to(weight.dtype), master, weight.float()))
            return
        rounded = torch.empty_like(weight)
        fp8.write(rounded, master, self.scales[index])
        if not torch.equal(rounded.view(torch.int16), weight.view(torch.int16)):
            master.copy_(weight)
            self._round_fp8(index)

    def _share_masters(self) -> None:
        """Give all ranks the masters and moments of rank 0, once, after DDP gave them its rounded weights."""
        if self.replicas and self.replicas() is not None:
            return
        wrapper = guards.find_wrapper(self.parameters)
        if wrapper is not None:
            for tensor in (self.master, self.m, self.v, self.count):
                dist.broadcast(tensor, group=wrapper.process_group, group_src=0)
            self.replicas = weakref.ref(wrapper)
            self._round()

    def _round(self, rescale: bool = True) -> None:
        """Write all weights that matmuls read, from the masters; FP8 ones with the scales that these have."""
        self.low.copy_(self.master)
        for index in self.in_fp8:
            self._round_fp8(index, rescale)

    def _round_fp8(self, index: int, rescale: bool = True) -> None:
        if rescale:
            self.scales[index] = fp8.power_of_two(self.view(self.master, index).abs().amax())
        self._write_fp8(index)

    def _write_fp8(self, index: int) -> None:
        """An FP8 weight's two layouts, and the largest magnitude that its next scale is made of."""
        master = self.view(self.master, index)
        self.largest[index] = master.abs().amax()
        fp8.write(self.parameters[index].data, master, self.scales[index])

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state dict of MasterAdamW or of torch's AdamW: masters, the model's weights (from
        these), moments and rates are written in place, so that captured graphs continue from there, too.
        Moments of another dtype are rounded to nearest. Where there are no masters, which torch's AdamW does
        not have, they remain the model's weights.

        Raises:
            ValueError: the groups or the parameters' shapes are others, an option is out of range, or some
                parameters have a master and others have not. Nothing is changed then.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups, state = state_dict["param_groups"], state_dict["state"]
        sizes, own_sizes = ([len(group["params"]) for group in some] for some in (groups, self.param_groups))
        if sizes != own_sizes:
            raise ValueError(f"the state dict has groups of {sizes} parameters, the optimizer of {own_sizes}")
        for own, group in zip(self.param_groups, groups):
            guards.check_group({**own, **group}, self.moments)
        saved = [state.get(index, {}) for index in chain.from_iterable(group["params"] for group in groups)]
        self._check_state(saved)
        self.take_weights()
        for master, parameter, one in zip(self.masters().values(), self.parameters, saved):
            master.copy_(one.get("master", master))
            for key, own in self.state[parameter].items():
                if key == "scale":  # missing where weights were bf16
                    own.copy_(one.get(key, own))
                else:  # torch's AdamW has no state for a parameter that never had a gradient
                    own.copy_(torch.as_tensor(one.get(key, 0)))
        self._read_rates(False)
        for own, group in zip(self.param_groups, groups):
            for key in group.keys() - {"params", "param_names"}:
                if isinstance(own.get(key), Tensor):
                    own[key].fill_(float(group[key]))
                else:
                    own[key] = deepcopy(group[key])
        self._round(rescale=any("scale" not in saved[index] for index in self.in_fp8))
        self._read_groups()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _check_state(self, saved: Sequence[dict[str, Any]]) -> None:
        """Refuse parameters' states that lack something, or have it in another shape (ValueError)."""
        has_masters = any("master" in one for one in saved)
        keys = ("master", *MOMENTS) if has_masters else MOMENTS
        for name, shape, one in zip(self.named, self.shapes, saved):
            if not (one or has_masters):
                continue
            if "step" not in one or any(key not in one or one[key].shape != shape for key in keys):
                raise ValueError(
                    f"{name}: the state dict lacks step or {', '.join(keys)} of shape {tuple(shape)}"
                )

    def _read_groups(self) -> None:
        """Bring what groups hold as numbers to the device, where it has changed."""
        for group in self.param_groups:
            guards.check_group(group, self.moments)
        fixed = [
            (*map(float, group["betas"]), float(group["eps"]), float(group["weight_decay"]))
            for group in self.param_groups
        ]
        if fixed == self.fixed:
            return
        numbers = torch.tensor(fixed, dtype=torch.float64, device="cpu")[self.group_of]
        beta1, beta2, eps, decay = numbers.unbind(1)
        self.betas.copy_(torch.stack((beta1, beta2)))
        self.decays.copy_(decay)
        self.scalars[:, 3:].copy_(torch.stack((beta1, 1 - beta1, beta2, 1 - beta2, eps), 1))
        self.fixed = fixed

    def _read_rates(self, capturing: bool) -> None:
        for index, group in enumerate(self.param_groups):
            if not isinstance(group["lr"], Tensor):
                if capturing:
                    raise TypeError(
                        f'group["lr"] was replaced by {group["lr"]}, which a captured graph would not see: '
                        'write group["lr"].fill_(...)'
                    )
                group["lr"] = self.given[index].fill_(group["lr"])
            if group["lr"].data_ptr() != self.rates[index].data_ptr():  # the caller's own
                self.rates[index].copy_(group["lr"].reshape(()))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Parameters without a gradient stay as they are.

        Raises:
            RuntimeError: a gradient is sparse, of another dtype, or does not lie as the kernel reads it; a
                parameter was moved or cast, no longer has its group, or did not require a gradient when the
                optimizer was made; a graph is captured, and a parameter has no gradient.
            TypeError: a graph is captured, and a group's rate is no tensor any more.
            ValueError: a group's option is out of range.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        gradients = self._gradients()
        missing = [index for index, gradient in enumerate(gradients) if gradient is None]
        if capturing and missing:
            names = ", ".join(list(self.named)[index] for index in missing)
            raise RuntimeError(f"{names}: no gradient, but a captured graph updates all parameters")
        if not capturing:
            self._check_unchanged()
            self.take_weights()
        if len(missing) == len(self.parameters):
            return loss
        self._read_groups()
        self._read_rates(capturing)
        table = None
        if self.device.type == "cuda":
            for index in missing:  # zeros that live until the kernel is launched
                gradients[index] = torch.zeros_like(self.parameters[index])
            table = self._table(gradients, capturing)
        self.count.add_(1)
        if missing:
            self.count[missing] -= 1
        corrections = 1 - torch.pow(self.betas, self.count)
        kept, rate, correction = self.scalars.unbind(1)[:3]
        rates = self.rates[self.groups]
        torch.sub(1, rates * self.decays, out=kept)
        torch.div(rates, corrections[0], out=rate)
        torch.rsqrt(corrections[1], out=correction)
        if self.in_fp8:
            self.scales.copy_(fp8.power_of_two(self.largest))
            self.largest.zero_()
        if table is None:
            self._update()
        else:
            self._launch(table, missing)
        return loss

    def _gradients(self) -> list[Any]:
        """List the gradients, None where there is none; refuse those that no kernel reads (RuntimeError)."""
        gradients = [parameter.grad for parameter in self.parameters]
        for (name, parameter), gradient in zip(self.named.items(), gradients):
            if gradient is None:
                continue
            if gradient.layout != torch.strided or gradient.dtype != parameter.dtype:
                raise RuntimeError(
                    f"{name}: got a gradient that is {gradient.layout} and {gradient.dtype},"
                    f" but expected torch.strided and {parameter.dtype}: no sparse gradients"
                )
        return gradients

    def _check_unchanged(self) -> None:
        """Refuse a step where other parameters should be updated than those of the buffers (RuntimeError)."""
        grouped = chain.from_iterable(group["params"] for group in self.param_groups)
        if [id(parameter) for parameter in grouped] != [id(parameter) for parameter in self.parameters]:
            raise RuntimeError("the groups have other parameters than those that MasterAdamW was made with")
        if len(self.state) < len(self.parameters):
            raise RuntimeError(
                "the state was cleared, but its tensors are views of a buffer: call reset() instead"
            )
        if any(parameter.requires_grad for parameter in self.frozen):
            raise RuntimeError(
                "a parameter requires a gradient that did not when MasterAdamW was made: make it anew"
            )

    def _update(self) -> None:
        """Do what the kernel does, by the plain formula."""
        for index, parameter in enumerate(self.parameters):
            master, m, v = (self.view(flat, index) for flat in (self.master, self.m, self.v))
            bits = None
            if self.moments == torch.bfloat16:
                at = self.offsets[index] + torch.arange(self.counts[index], device=self.device)
                bits = adamw.hashed(at, self.count[index]).view(self.shapes[index])
            if parameter.grad is not None:
                adamw.update_(master, m, v, parameter.grad, self.scalars[index], bits)
            if parameter.dtype != torch.float32:
                parameter.data.copy_(master)
            if index in self.in_fp8:
                self._write_fp8(index)

    def _launch(self, table: Tensor, missing: list[int]) -> None:
        exact, scalars = self.moments == torch.float32, self.scalars
        if missing:
            scalars = scalars.clone()
            scalars[missing] = scalars.new_tensor(UNCHANGED)
        buffers = self.master, self.m, self.v, self.low, scalars, self.count, table
        # Each operation is rounded by itself, as in the formula: nothing is fused.
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
        """Make the table of the gradients' addresses for this step's kernel; refuse gradients that do not lie as
        it reads them (RuntimeError)."""
        addresses = [gradient.data_ptr() for gradient in gradients]
        for name, gradient, address in zip(self.named, gradients, addresses):
            if not gradient.is_contiguous() or address % 16:
                raise RuntimeError(
                    f"{name}: the gradient is not contiguous from a multiple of 16 bytes on,"
                    " and the optimizer's kernel reads it as it lies"
                )
        if capturing:
            # The graph's own table, written by its kernels, whose arguments the addresses are: a copy from
            # the host would read memory that has to stay as it is for as long as the graph lives.
            table = torch.full_like(self.table, 0)
            torch._foreach_add_(table.unbind(), addresses)
            return table
        if addresses != self.gradients_at:
            self.table.copy_(torch.tensor(addresses, device="cpu"))
            self.gradients_at = addresses
        return self.table
