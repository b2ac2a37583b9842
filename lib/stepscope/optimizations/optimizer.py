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

**bf16 moments.** Arithmetic stays fp32; only what is stored is rounded. The first moment is rounded to
nearest: it changes by a tenth of its distance to the gradient a step, far more than half a bf16 ulp (2^-9
to 2^-8 of a number). The second moment decays by 1 - beta2 = 0.001 a step, less than half an ulp: rounded
to nearest it could never fall. So it is rounded up or down at random, up as often as it lies nearer to the
number above (stochastic rounding: Gupta et al. 2015, arXiv:1502.02551): right in the mean.

    2.000  rounds to 2.000, always
    2.004  lies a quarter of the way to bf16's next number 2.016: a quarter of the times up, else down

The random bits are a hash of the element's index and the step's number, which a replayed CUDA graph reads
from the GPU; Philox would cost several times as much arithmetic, and rounding needs no better numbers.

**One launch.** All parameters are views of flat buffers, so that one kernel updates them all, whatever
groups they are in. Gradients are the tensors that backward makes, wherever these lie; the kernel finds them
in a table of their addresses. What a group says (lr, betas, eps, weight decay) it reads from the GPU, too.

**In a CUDA graph** nothing has to be said after the capture: a captured step takes the addresses of its own
gradients along, as a copy to its own table that is part of the graph. Eager steps and several graphs may
take turns. The learning rate is a tensor on the GPU that the graph reads, so a scheduler goes on as it does
for eager steps. The other fields are as at the capture.
"""
import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from importlib.util import find_spec
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

_adamw_kernel: Any = None
HAS_TRITON = find_spec("triton") is not None  # torch for a CPU comes without
if HAS_TRITON:
    import triton
    import triton.language as tl

BLOCK = 2048  # elements of one program of the kernel
ALIGNED = 64  # every tensor starts at a multiple of so many elements
COLUMNS = 8  # scalars of a group that the kernel reads
SAVED = ("master", "exp_avg", "exp_avg_sq")  # of each parameter, in a state dict
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01
GOLDEN, MIX1, MIX2 = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35  # of the hash


def hashed(index: Tensor, count: Tensor) -> Tensor:
    """16 random bits for each element of a step, int64: MurmurHash3's finalizer (Appleby 2011) of its index
    (int64, of any shape) and the step's number ``count``, (), in 32 bits."""
    mask = 0xFFFFFFFF
    h = (index & mask) ^ (count * GOLDEN & mask)
    h = (h ^ (h >> 16)) * MIX1 & mask
    h = (h ^ (h >> 13)) * MIX2 & mask
    return (h ^ (h >> 16)) & 0xFFFF


def stochastic_round(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16 of the same shape, up with the probability of being nearer there: 16 random ``bits`` are
    added below the last that stays, and what is below it is cut off."""
    truncated = (x.view(torch.int32) + bits.to(torch.int32)) & -(2**16)
    return truncated.view(torch.float32).bfloat16()


def adamw_(
        master: Tensor, m: Tensor, v: Tensor, gradient: Tensor, scalars: Tensor, bits: Tensor | None) -> None:
    """The plain formula (Loshchilov & Hutter 2019, algorithm 2), each operation rounded to fp32 by itself.

    Args:
        master: fp32, changed in place.
        m, v: fp32 or bf16, changed in place.
        gradient: fp32 or bf16, of the same shape.
        scalars: 1 - rate * decay, rate / (1 - beta1^t), 1 / sqrt(1 - beta2^t); then of the group alone beta1,
            1 - beta1, beta2, 1 - beta2, eps. (8,), fp32.
        bits: by which a bf16 ``v`` is rounded (:func:`hashed`); None where it is fp32.
    """
    gradient = gradient.float()
    kept, rate, correction, beta1, rest1, beta2, rest2, eps = scalars
    new_m = m.float() * beta1 + gradient * rest1
    new_v = v.float() * beta2 + gradient * gradient * rest2
    root = new_v.double().sqrt().float()  # torch's in fp32 is an ulp off for some numbers on a CPU
    master.copy_(master * kept - rate * (new_m / (root * correction + eps)))
    m.copy_(new_m)
    v.copy_(new_v if bits is None else stochastic_round(new_v, bits))


if HAS_TRITON:

    @triton.jit
    def _adamw_kernel(master, m, v, low, gradients, wide, counts, offsets, groups, owners, starts, scalars,
                      step, columns: tl.constexpr, block: tl.constexpr, aligned: tl.constexpr,
                      low_moments: tl.constexpr, golden: tl.constexpr, mix1: tl.constexpr,
                      mix2: tl.constexpr):
        """:func:`adamw_` on one block of one parameter. ``gradients`` holds each parameter's gradient's
        address, ``scalars`` a row of so many ``columns`` for each group."""
        program = tl.program_id(0)
        owner = tl.load(owners + program)
        # What is said to be a multiple is read and written 16 bytes at a time.
        within = tl.multiple_of(tl.load(starts + program), block) + tl.arange(0, block)
        inside = within < tl.multiple_of(tl.load(counts + owner), aligned)
        at = tl.multiple_of(tl.load(offsets + owner), 64) + within
        address = tl.load(gradients + owner)
        if tl.load(wide + owner) != 0:
            gradient = tl.load(
                tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + within, mask=inside, other=0.0)
        else:
            gradient = tl.load(
                tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16) + within, mask=inside, other=0.0
            ).to(tl.float32)
        row = scalars + tl.load(groups + owner) * columns
        kept, rate, correction = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        beta1, rest1, beta2, rest2 = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
        eps = tl.load(row + 7)
        new_m = tl.load(m + at, mask=inside, other=0.0).to(tl.float32) * beta1 + gradient * rest1
        new_v = tl.load(v + at, mask=inside, other=0.0).to(tl.float32) * beta2 + gradient * gradient * rest2
        change = tl.div_rn(new_m, tl.sqrt_rn(new_v) * correction + eps)
        weight = tl.load(master + at, mask=inside, other=0.0) * kept - rate * change
        tl.store(master + at, weight, mask=inside)
        tl.store(low + at, weight.to(tl.bfloat16), mask=inside)
        if low_moments:
            h = at.to(tl.uint32) ^ (tl.load(step).to(tl.uint32) * golden).to(tl.uint32)
            h = ((h ^ (h >> 16)) * mix1).to(tl.uint32)
            h = ((h ^ (h >> 13)) * mix2).to(tl.uint32)
            bits = new_v.to(tl.uint32, bitcast=True) + ((h ^ (h >> 16)) & 0xFFFF)
            tl.store(m + at, new_m.to(tl.bfloat16), mask=inside)
            tl.store(v + at, (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=inside)
        else:
            tl.store(m + at, new_m, mask=inside)
            tl.store(v + at, new_v, mask=inside)


class MasterAdamW(torch.optim.Optimizer):
    """AdamW over all parameters of a model whose matrices become bf16: one launch for all of them.

    The parameters become views of two flat buffers, bf16 ones of ``low``, fp32 ones of ``master``; the master
    weights begin where the model is. Weights that are loaded into the model later are undone by the next
    step: load them before, or write :meth:`masters` and call :meth:`reset`.

    Autocast is off with it: the matrices are bf16 by themselves, and so is all that flows between them.

    Args:
        params: a model on its device, or what torch's optimizers take: parameters, named or not, or groups of
            them. Its matrices are bf16 from here on; what needs no gradient is left alone.
        lr: the learning rate. Each group's ``"lr"`` is a tensor, (), on the parameters' device: write it in
            place, as torch's schedulers do. A tensor that is given stays the caller's, who writes that.
        moments: how both moments are stored, ``torch.float32`` or ``torch.bfloat16``.
        betas, eps, weight_decay: of groups that do not have their own.

    Raises:
        ValueError: moments of another dtype, a rate on another device, or a name that is given twice.
    """

    @torch.no_grad()
    def __init__(self, params: nn.Module | Iterable[Any], lr: float | Tensor = 1e-3,
                 moments: torch.dtype = torch.float32, *, betas: tuple[float, float] = BETAS,
                 eps: float = EPS, weight_decay: float = WEIGHT_DECAY):
        if moments not in (torch.float32, torch.bfloat16):
            raise ValueError(f"moments: got {moments}, but they are torch.float32 or torch.bfloat16")
        if isinstance(params, nn.Module):
            params = [(name, weight) for name, weight in params.named_parameters() if weight.requires_grad]
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.parameters: list[nn.Parameter] = [
            parameter for group in self.param_groups for parameter in group["params"]]
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
        padded = [-(-count // ALIGNED) * ALIGNED for count in self.counts]
        *self.offsets, total = accumulate(padded, initial=0)
        self.master = torch.zeros(total, device=self.device)
        self.low = torch.zeros(total, device=self.device, dtype=torch.bfloat16)
        self.m, self.v = (torch.zeros(total, device=self.device, dtype=moments) for _ in range(2))
        self.count = torch.zeros((), device=self.device, dtype=torch.int64)  # steps so far
        for index, parameter in enumerate(self.parameters):
            self.view(self.master, index).copy_(parameter)
            parameter.data = self.view(self.low if parameter.dim() == 2 else self.master, index)
            self.state[parameter] = {"step": self.count, "exp_avg": self.view(self.m, index),
                                     "exp_avg_sq": self.view(self.v, index)}

    def _make_scalars(self) -> None:
        """What a step takes from its groups, on the device; a group's ``lr`` is a view of ``rates``."""
        groups = len(self.param_groups)
        self.rates, self.decays = torch.zeros(2, groups, device=self.device, dtype=torch.float64)
        self.betas = torch.zeros(2, groups, device=self.device, dtype=torch.float64)
        self.scalars = torch.zeros(groups, COLUMNS, device=self.device)
        self.fixed: list[Any] = []  # as it was last read
        for rate, group in zip(self.rates.unbind(), self.param_groups):
            if not isinstance(group["lr"], Tensor):
                group["lr"] = rate.fill_(group["lr"])
            elif group["lr"].device != self.device:
                raise ValueError(f"lr: a tensor on {group['lr'].device}, but weights are on {self.device}")
        self._read_groups()

    def _make_tables(self) -> None:
        """What the kernel's programs look up: each program's parameter and start, each parameter's place."""
        wide = [parameter.dtype == torch.float32 for parameter in self.parameters]
        places = (wide, self.counts, self.offsets, self.group_of)
        tables = [torch.tensor(place, device="cpu") for place in places]
        blocks = -(-tables[1] // BLOCK)
        owners = torch.arange(len(blocks), device="cpu").repeat_interleave(blocks)
        firsts = blocks.cumsum(0) - blocks
        starts = (torch.arange(len(owners), device="cpu") - firsts[owners]) * BLOCK
        self.tables = [table.to(self.device, torch.int64) for table in (*tables, owners, starts)]
        self.programs = len(owners)
        self.addresses = [0] * len(blocks)  # of the gradients, as the table has them
        self.table = torch.zeros(len(blocks), device=self.device, dtype=torch.int64)
        self.captured: list[tuple[Tensor, Tensor]] = []  # each captured step's own, which its graph reads
        self._make_spare()

    def _make_spare(self) -> None:
        """The next captured step's addresses in pinned memory, and its table: neither can be allocated during
        a capture."""
        host = torch.zeros(len(self.addresses), dtype=torch.int64, device="cpu", pin_memory=True)
        self.spare: tuple[Tensor, Tensor] | None = (host, torch.zeros_like(self.table))

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
        self.low.copy_(self.master)
        self.m.zero_()
        self.v.zero_()
        self.count.zero_()

    def state_dict(self) -> dict[str, Any]:
        """As torch's AdamW's, with each parameter's fp32 ``master`` beside its moments: from that training
        goes on to the bit. Its tensors are the optimizer's own, as in torch: save or copy them before the
        next step."""
        found = super().state_dict()
        masters = self.masters().values()
        found["state"] = {
            index: {**found["state"][index], "master": master} for index, master in enumerate(masters)}
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
                own.copy_(one[key])
        for own, group in zip(self.param_groups, groups):
            for key in group.keys() - {"params", "param_names"}:
                if isinstance(own.get(key), Tensor):
                    own[key].fill_(group[key])
                else:
                    own[key] = deepcopy(group[key])
        self.low.copy_(self.master)
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
                raise TypeError(f'group["lr"] was replaced by {given}, which a captured graph would not see: '
                                'write group["lr"].fill_(...)')
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
                bits = hashed(at, self.count).view(self.shapes[index])
            adamw_(master, m, v, parameter.grad, self.scalars[self.group_of[index]], bits)
            if parameter.dtype != torch.float32:
                parameter.data.copy_(master)

    def _launch(self, gradients: Tensor) -> None:
        _adamw_kernel[(self.programs,)](
            self.master, self.m, self.v, self.low, gradients, *self.tables, self.scalars, self.count,
            COLUMNS, BLOCK, math.gcd(16, *self.counts), self.v.dtype == torch.bfloat16, GOLDEN, MIX1, MIX2,
            num_warps=4, enable_fp_fusion=False)  # each operation rounded by itself, as in the formula

    def _gradients(self) -> Tensor:
        """The table of the gradients' addresses for this step's kernel."""
        gradients = [parameter.grad for parameter in self.parameters]
        addresses = [gradient.data_ptr() for gradient in gradients]
        for name, gradient, address in zip(self.named, gradients, addresses):
            if not gradient.is_contiguous() or address % 16:
                raise RuntimeError(f"{name}: the gradient is not contiguous from a multiple of 16 bytes on,"
                                   " and the optimizer's kernel reads it as it lies")
        if torch.cuda.is_current_stream_capturing():
            if self.spare is None:
                raise RuntimeError("take an eager step of MasterAdamW before each capture")
            host, table = self.spare
            self.captured.append(self.spare)
            self.spare = None
            host.copy_(torch.tensor(addresses, device="cpu"))
            return table.copy_(host, non_blocking=True)  # part of the graph
        if self.spare is None:
            self._make_spare()
        if addresses != self.addresses:
            self.table.copy_(torch.tensor(addresses, device="cpu"))
            self.addresses = addresses
        return self.table
