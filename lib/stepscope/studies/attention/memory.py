"""Predict, by formula, the peak memory of one forward and backward pass of attention.

B is the batch size, T the context length, and d the head dimension. All formulas count the bytes in use at the
peak, which occurs in the backward pass.
"""

# The number of (B, T, T) matrices at the peak. Naive attention keeps the exponentials of the scores and the
# attention weights from forward. Backward adds the gradient of the attention weights, and three matrices that
# softmax's backward pass computes from this gradient. SDPA's math implementation always computes in fp32. The
# number for the compiled implementation was measured.
SQUARES = {"naive": 6, "compiled": 3, "math": 4}
MASKED = ("naive", "compiled")  # implementations that keep a (T, T) mask of bool
# The number of (B, T, d) tensors at the peak: q, k, v, the output's gradient, the gradients computed so far and,
# if only dv has been computed, the output.
HIDDEN = {"naive": 6, "compiled": 6}
FUSED_HIDDEN = 8
MATH_HIDDEN_IN_16_BIT = 11  # the math implementation also keeps q, k and v in fp32
# Fused kernels accumulate dq in fp32 over blocks of keys, with d padded to at least this many dimensions.
PADDED = {"flash": 32, "efficient": 64, "cudnn": 1}
# FlexAttention's mask has four int32 indices for each block of 128 x 128 pairs of positions.
PAIRS_PER_FLEX_MASK_BYTE = 1024
# Bytes per pair of positions that are needed to create FlexAttention's mask: a bool, and sums in int64.
MAKING_MASK = 10


def element_bytes(precision: str) -> int:
    """Return the number of bytes per element of q, k and v."""
    return 2 if precision in ("bf16", "fp16") else 4


def peak_parts(
    name: str,
    batch: int,
    d: int,
    context_length: int,
    precision: str,
) -> dict[str, int]:
    """Return the bytes that each kind of tensor takes at the peak of a forward and backward pass.

    Kinds with 0 bytes are omitted.

    In addition to the output, fused kernels save one number per query, its logsumexp (Dao et al. 2022, algorithm
    1). Backward computes another number per query (Dao 2023, algorithm 2).

    Args:
        name: the implementation.
        batch: the batch size, B.
        d: the head dimension.
        context_length: T.
        precision: the precision of q, k and v.
    """
    batch, d, context_length = int(batch), int(d), int(context_length)  # NumPy's integers would overflow
    element = element_bytes(precision)
    queries = batch * context_length
    square_elements = batch * context_length**2
    square_element = 4 if name == "math" else element
    padded_d = max(d, PADDED[name]) if name in PADDED else 0
    parts = {
        "T x T matrices": SQUARES.get(name, 0) * square_elements * square_element,
        "mask": _mask_bytes(name, context_length),
        "T x d tensors": _hidden_count(name, element) * queries * d * element,
        "dq in fp32": queries * padded_d * 4,
        "rows": queries * _query_bytes(name, element),
    }
    return {part: size for part, size in parts.items() if size}


def _mask_bytes(name: str, context_length: int) -> int:
    pairs = context_length**2
    if name in MASKED:
        return pairs
    if name == "flex":
        return pairs // PAIRS_PER_FLEX_MASK_BYTE
    return 0


def _hidden_count(name: str, element: int) -> int:
    if name == "math" and element == 2:
        return MATH_HIDDEN_IN_16_BIT
    return HIDDEN.get(name, FUSED_HIDDEN)


def _query_bytes(name: str, element: int) -> int:
    """Return the number of bytes that are kept per query at the peak.

    The naive softmax keeps one number of ``element`` bytes, "math" keeps none, and all other implementations keep
    two fp32 numbers.
    """
    if name == "math":
        return 0
    if name == "naive":
        return element
    return 2 * 4


def needed_bytes(
    name: str,
    batch: int,
    d: int,
    context_length: int,
    precision: str,
) -> int:
    """Return the predicted peak memory in bytes.

    With FlexAttention, the peak may occur while the mask is created. The arguments are the same as those of
    :func:`peak_parts`.
    """
    batch, d, context_length = int(batch), int(d), int(context_length)
    peak = sum(peak_parts(name, batch, d, context_length, precision).values())
    if name != "flex":
        return peak
    inputs = 4 * batch * context_length * d * element_bytes(precision)
    making_mask = MAKING_MASK * context_length**2 + inputs
    return max(making_mask, peak)
