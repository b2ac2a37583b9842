"""Memory of a pass of attention: as the allocator counts it, and by closed formula."""

# T x T matrices a batch element in use at the peak, which is in backward. Naive: the scores' exponentials and
# the weights, which forward saves, the weights' gradient and three more that softmax's backward makes of it.
# SDPA's math computes in fp32 whatever it is given; what Inductor keeps of the compiled one was measured.
SQUARES = {"naive": 6, "compiled": 3, "math": 4}
MASKED = ("naive", "compiled")  # they hold a (T, T) mask of bool
# (B, T, d) tensors then: q, k, v, the output's gradient, the gradients made so far and, but where only dv is
# made, the output; math keeps q, k, v in fp32, too.
HIDDEN = {"naive": 6, "compiled": 6}
# Of fused kernels that add dq up in fp32 over blocks of keys: to how many dimensions they fill up d.
PADDED = {"flash": 32, "efficient": 64, "cudnn": 1}
# FlexAttention's mask: bytes for each pair of positions while it is made (bool, its sums in int64).
MAKING_MASK = 10


def peak_parts(name: str, batch: int, d: int, context_length: int, precision: str) -> dict[str, int]:
    """Bytes in use at the peak of a forward and its backward, by what they are.

    Fused kernels save one number a row besides the output, its log-sum-exp (Dao et al. 2022, algorithm 1);
    backward makes another (Dao 2023, algorithm 2).
    """
    batch, d, context_length = int(batch), int(d), int(context_length)  # a table's integers would overflow
    item = 2 if precision in ("bf16", "fp16") else 4
    rows, hidden = batch * context_length * 4, batch * context_length * d * item
    square = batch * context_length**2 * (4 if name == "math" else item)
    parts = {"T x T matrices": SQUARES.get(name, 0) * square}
    parts["mask"] = (
        context_length**2 if name in MASKED else context_length**2 // 1024 if name == "flex" else 0
    )
    count = HIDDEN.get(name, 11 if name == "math" and item == 2 else 8)
    parts["T x d tensors"] = count * hidden
    if name in PADDED:
        parts["dq in fp32"] = batch * context_length * max(d, PADDED[name]) * 4
    parts["rows"] = 0 if name == "math" else rows * item // 4 if name == "naive" else 2 * rows
    return {part: size for part, size in parts.items() if size}


def needed_bytes(name: str, batch: int, d: int, context_length: int, precision: str) -> int:
    """The most in use at any time; for FlexAttention also while its mask is made."""
    batch, d, item = int(batch), int(d), 2 if precision in ("bf16", "fp16") else 4
    making = MAKING_MASK * context_length**2 + 4 * batch * context_length * d * item if name == "flex" else 0
    return max(making, sum(peak_parts(name, batch, d, context_length, precision).values()))
