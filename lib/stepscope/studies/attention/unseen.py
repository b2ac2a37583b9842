"""What operators allocate inside themselves, which following their results does not see: written down."""

# What operators make inside on a GPU, as large as their result: softmax's backward multiplies gradient and
# output first.
INSIDE = {"_softmax_backward_data": "gradient times output, inside _softmax_backward_data"}
# Implementations whose prediction was corrected after a first measurement: what their operators make inside
# (softmax's backward, the mask's sum) or accumulate in fp32 (dq) was listed only then.
CORRECTED = ("efficient", "cudnn", "math", "flex")
# For each pair of positions, while FlexAttention's mask is made: sum() of booleans makes int64 of them first.
MASK_INSIDE_BYTES = 8


def fused_tensors(name: str, batch: int, sequence: int, d: int, item: int) -> dict[str, int]:
    """Bytes of each tensor that a fused kernel needs, at ``item`` bytes a number.

    Held throughout: q, k, v, the output and its gradient. Saved by forward besides them: a row's log-sum-exp
    in fp32 (Dao et al. 2022, alg. 1). Made in backward: the three gradients, a row's sum of gradient times
    output in fp32 (Dao 2023, alg. 2), and for SDPA's backends, which add up dq over blocks of keys, an fp32
    accumulator of it. FlexAttention's mask comes to it (``following.follow_mask``).
    """
    hidden, rows = batch * sequence * d * item, batch * sequence * 4
    tensors = dict.fromkeys(("q", "k", "v", "output", "gradient of the output", "dq", "dk", "dv"), hidden)
    tensors |= dict.fromkeys(("log-sum-exp", "rows' gradient times output"), rows)
    if name != "flex":
        tensors["dq, accumulated in fp32"] = batch * sequence * d * 4
    return tensors
