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
the bf16 copy. No cast is left in the step. Vectors (the norms' weights) stay fp32: they are the master
itself.

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
"""

import math
import weakref
from collections.abc import Callable, Iterable
from copy import deepcopy
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.optimizations import adamw, fp8

SAVED = ("master", "exp_avg", "exp_avg_sq")  # of each parameter, in a state dict
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01


class MasterAdamW(torch.optim.Optimizer):
    """AdamW over all parameters of a model whose matrices become bf16: one launch for all of them.

    The parameters become views of two flat buffers, bf16 ones of ``low``, fp32 ones of ``master``; the master
    weights begin where the model is. Weights that are loaded into this model later become the masters, in
    bf16's digits; to go on to the bit load the optimizer's own state dict.

    Autocast is off with it: the matrices are bf16 by themselves, and so is all that flows between them.

    Args:
        params: a model on its device, or what torch's optimizers take: parameters, named or not, or groups of
            them. Its matrices are bf16 from here on; what needs no gradient is left alone.
        lr: the learning rate. Each group's ``"lr"`` is a tensor, (), on the parameters' device: write it in
            place, as torch's schedulers do. A tensor that is given stays the caller's, who writes that.
        moments: how both moments are stored, ``torch.float32`` or ``torch.bfloat16``.
        betas, eps, weight_decay: of groups that do not have their own.

    Raises:
        ValueError: moments of another dtype, a rate on another device, a name that is given twice, or, on a
            GPU, an FP8 weight with a side that is no multiple of 64.
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
        if isinstance(params, nn.Module):
            model = params
            params = [(name, weight) for name, weight in params.named_parameters() if weight.requires_grad]
            take = weakref.WeakMethod(self._take_weights)  # the model may outlive its optimizer
            model.register_load_state_dict_post_hook(lambda *_: (own := take()) and own())
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.parameters: list[nn.Parameter] = [
            parameter for group in self.param_groups for parameter in group["params"]
        ]
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        self.named = dict(zip(names or map(str, range(len(self.parameters))), self.parameters))
        if len(self.named) < len(self.parameters):
            raise ValueError("two parameters have the same name")
        self.group_of = [index for index, group in enumerate(self.param_groups) for _ in group["params"]]
        self.device = self.parameters[0].device
        self._make_buffers(moments)
        self._make_scalars()
        self.reset()
        if self.device.type == "cuda":
            self._make_tables()

    def _make_buffers(self, moments: torch.dtype) -> None:
        """The flat buffers, of which the parameters become views; so are the moments in ``state``."""
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.counts = [parameter.numel() for parameter in self.parameters]
        self.in_fp8 = [index for index, one in enumerate(self.parameters) if hasattr(one, "fp8_scale")]
        places = sorted(range(len(self.parameters)), key=lambda index: index in self.in_fp8)  # FP8 ones last
        padded = [-(-self.counts[index] // adamw.BLOCK) * adamw.BLOCK for index in places]
        *starts, total = accumulate(padded, initial=0)
        self.offsets = [start for _, start in sorted(zip(places, starts))]
        self.master = torch.zeros(total, device=self.device)
        self.low = torch.zeros(total, device=self.device, dtype=torch.bfloat16)
        self.m, self.v = (torch.zeros(total, device=self.device, dtype=moments) for _ in range(2))
        self.count = torch.zeros((), device=self.device, dtype=torch.int64)  # steps so far
        self.scales, self.largest = torch.ones(2, len(self.parameters), device=self.device)
        for index, parameter in enumerate(self.parameters):
            self.view(self.master, index).copy_(parameter)
            parameter.data = self.view(self.low if parameter.dim() == 2 else self.master, index)
            self.state[parameter] = {
                "step": self.count,
                "exp_avg": self.view(self.m, index),
                "exp_avg_sq": self.view(self.v, index),
            }
            if index in self.in_fp8:
                parameter.fp8_scale.data = self.state[parameter]["scale"] = self.scales[index]

    def _make_scalars(self) -> None:
        """What a step takes from its groups, on the device; a group's ``lr`` is a view of ``rates``."""
        groups = len(self.param_groups)
        self.rates, self.decays = torch.zeros(2, groups, device=self.device, dtype=torch.float64)
        self.betas = torch.zeros(2, groups, device=self.device, dtype=torch.float64)
        self.scalars = torch.zeros(groups, adamw.COLUMNS, device=self.device)
        self.fixed: list[Any] = []  # as it was last read
        for rate, group in zip(self.rates.unbind(), self.param_groups):
            if not isinstance(group["lr"], Tensor):
                group["lr"] = rate.fill_(group["lr"])
            elif group["lr"].device != self.device:
                raise ValueError(f"lr: a tensor on {group['lr'].device}, but weights are on {self.device}")
        self._read_groups()

    def _make_tables(self) -> None:
        """What the kernels' programs look up: of each parameter its place and group, and whose they are."""
        in_fp32 = [parameter.dtype == torch.float32 for parameter in self.parameters]
        numbers = in_fp32, [shape[-1] for shape in self.shapes], self.counts, self.offsets, self.group_of
        self.in_fp32, self.widths, *self.places = (
            torch.tensor(each, dtype=torch.int64, device=self.device) for each in numbers
        )
        flat = [index for index in range(len(self.counts)) if index not in self.in_fp8]
        tiles = [self._tiles(index) for index in self.in_fp8]
        self.owners = self._owners(flat, [-(-self.counts[index] // adamw.BLOCK) for index in flat])
        self.tile_owners = self._owners(self.in_fp8, [len(starts) for starts in tiles])
        self.tiles = torch.cat(tiles or [torch.zeros(0)]).to(self.device, torch.int32)
        self.addresses = [0] * len(self.counts)  # of the gradients, as the table has them
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
        """Only while it is made: all parameters lie in one buffer."""
        if hasattr(self, "master"):
            raise RuntimeError("all weights lie in one buffer: give MasterAdamW all groups when it is made")
        super().add_param_group(param_group)

    def view(self, flat: Tensor, index: int) -> Tensor:
        start, count = self.offsets[index], self.counts[index]
        return flat[start : start + count].view(self.shapes[index])

    def masters(self) -> dict[str, Tensor]:
        """The fp32 weights, by the parameters' names: "0", "1" and so on where they were given without."""
        return {name: self.view(self.master, index) for index, name in enumerate(self.named)}

    def reset(self) -> None:
        """As before the first step, with the master weights as they are now."""
        self._round()
        for tensor in (self.m, self.v, self.count):
            tensor.zero_()

    @torch.no_grad()
    def _take_weights(self) -> None:
        """Make masters of what was loaded into the model."""
        for index, parameter in enumerate(self.parameters):
            self.view(self.master, index).copy_(parameter)
        self._round()

    def _round(self, rescale: bool = True) -> None:
        """Write all weights that matmuls read, from the masters; FP8 ones with the scales that these have."""
        self.low.copy_(self.master)
        for index in self.in_fp8:
            if rescale:
                self.scales[index] = fp8.power_of_two(self.view(self.master, index).abs().amax())
            self._write_fp8(index)

    def _write_fp8(self, index: int) -> None:
        """An FP8 weight's two layouts, and the largest magnitude that its next scale is made of."""
        master = self.view(self.master, index)
        self.largest[index] = master.abs().amax()
        fp8.write(self.parameters[index].data, master, self.scales[index])

    def state_dict(self) -> dict[str, Any]:
        """As torch's AdamW's, with each parameter's fp32 ``master`` beside its moments: from that training
        goes on to the bit. Its tensors are the optimizer's own, as in torch: save or copy them before the
        next step."""
        found = super().state_dict()
        masters = self.masters().values()
        found["state"] = {
            index: {**found["state"][index], "master": master} for index, master in enumerate(masters)
        }
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there: masters, the model's weights (from these), moments and rates are written in
        place, so that captured graphs go on from there, too. Moments of another dtype are rounded to nearest.

        Raises:
            ValueError: the groups or the parameters' shapes are others, or there are no masters. Nothing is
                changed then.
        """
        groups, state = state_dict["param_groups"], state_dict["state"]
        sizes, own_sizes = ([len(group["params"]) for group in some] for some in (groups, self.param_groups))
        if sizes != own_sizes:
            raise ValueError(f"the state dict has groups of {sizes} parameters, the optimizer of {own_sizes}")
        saved = [state.get(index, {}) for index in chain.from_iterable(group["params"] for group in groups)]
        for name, shape, one in zip(self.named, self.shapes, saved):
            if "step" not in one or any(key not in one or one[key].shape != shape for key in SAVED):
                raise ValueError(f"{name}: the state dict has not {', '.join(SAVED)} of shape {tuple(shape)}")
        for master, parameter, one in zip(self.masters().values(), self.parameters, saved):
            master.copy_(one["master"])
            for key, own in self.state[parameter].items():
                own.copy_(one.get(key, own))  # a scale is missing where weights were bf16
        for own, group in zip(self.param_groups, groups):
            for key in group.keys() - {"params", "param_names"}:
                if isinstance(own.get(key), Tensor):
                    own[key].fill_(group[key])
                else:
                    own[key] = deepcopy(group[key])
        self._round(rescale=any("scale" not in saved[index] for index in self.in_fp8))
        self._read_groups()

    def _read_groups(self) -> None:
        """Bring what groups hold as numbers to the device, where it has changed."""
        fixed = [(*group["betas"], group["eps"], group["weight_decay"]) for group in self.param_groups]
        if fixed == self.fixed:
            return
        beta1, beta2, eps, decay = torch.tensor(fixed, dtype=torch.float64, device="cpu").unbind(1)
        self.betas.copy_(torch.stack((beta1, beta2)))
        self.decays.copy_(decay)
        self.scalars[:, 3:].copy_(torch.stack((beta1, 1 - beta1, beta2, 1 - beta2, eps), 1))
        self.fixed = fixed

    def _read_rates(self) -> None:
        for rate, group in zip(self.rates.unbind(), self.param_groups):
            given = group["lr"]
            if not isinstance(given, Tensor):
                raise TypeError(
                    f'group["lr"] was replaced by {given}, which a captured graph would not see: '
                    'write group["lr"].fill_(...)'
                )
            if given.data_ptr() != rate.data_ptr():  # the caller's own
                rate.copy_(given)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step.

        Raises:
            RuntimeError: a parameter has no gradient, or one that does not lie as the kernel reads it.
            TypeError: a group's rate is no tensor any more.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, parameter in self.named.items():
            if parameter.grad is None:
                raise RuntimeError(f"{name} has no gradient, and MasterAdamW updates all parameters at once")
        self._read_groups()
        self._read_rates()
        gradients = self._gradients() if self.device.type == "cuda" else None
        self.count.add_(1)
        corrections = 1 - torch.pow(self.betas, self.count)
        kept, rate, correction = self.scalars.unbind(1)[:3]
        torch.sub(1, self.rates * self.decays, out=kept)
        torch.div(self.rates, corrections[0], out=rate)
        torch.rsqrt(corrections[1], out=correction)
        if self.in_fp8:
            self.scales.copy_(fp8.power_of_two(self.largest))
            self.largest.zero_()
        if gradients is None:
            self._update()
        else:
            self._launch(gradients)
        return loss

    def _update(self) -> None:
        """What the kernel does, by the plain formula."""
        for index, parameter in enumerate(self.parameters):
            master, m, v = (self.view(flat, index) for flat in (self.master, self.m, self.v))
            bits = None
            if v.dtype == torch.bfloat16:
                at = self.offsets[index] + torch.arange(self.counts[index], device=self.device)
                bits = adamw.hashed(at, self.count).view(self.shapes[index])
            adamw.update_(master, m, v, parameter.grad, self.scalars[self.group_of[index]], bits)
            if parameter.dtype != torch.float32:
                parameter.data.copy_(master)
            if index in self.in_fp8:
                self._write_fp8(index)

    def _launch(self, gradients: Tensor) -> None:
        exact = self.v.dtype == torch.float32
        buffers = self.master, self.m, self.v, self.low, self.scalars, self.count, gradients
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

    def _gradients(self) -> Tensor:
        """The table of the gradients' addresses for this step's kernel."""
        gradients = [parameter.grad for parameter in self.parameters]
        addresses = [gradient.data_ptr() for gradient in gradients]
        for name, gradient, address in zip(self.named, gradients, addresses):
            if not gradient.is_contiguous() or address % 16:
                raise RuntimeError(
                    f"{name}: the gradient is not contiguous from a multiple of 16 bytes on,"
                    " and the optimizer's kernel reads it as it lies"
                )
        if torch.cuda.is_current_stream_capturing():
            # The graph's own table, written by its kernels, whose arguments the addresses are: a copy from
            # the host would read memory that has to stay as it is for as long as the graph lives.
            table = torch.full_like(self.table, 0)
            torch._foreach_add_(table.unbind(), addresses)
            return table
        if addresses != self.addresses:
            self.table.copy_(torch.tensor(addresses, device="cpu"))
            self.addresses = addresses
        return self.table
