"""What a run of the attention study has."""

from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from stepscope.config import Dimension, Length, RunConfig, Steps

# Attention by itself: naive, the same compiled, the kernels that scaled_dot_product_attention (SDPA) offers,
# and FlexAttention.
Implementation = Literal["naive", "compiled", "flash", "efficient", "cudnn", "math", "flex"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)
COMPILED = ("compiled", "flex")
PASSES = ("forward", "backward")
QUANTITIES = ("output", "dq", "dk", "dv")  # what is checked
# The largest error that still is this precision: relative, in the Frobenius norm, of the output and each
# gradient. TF32 keeps 10 bits of a factor (2^-11 = 5e-4) and bf16 7 (2^-9 = 2e-3); fp32's is far below one
# matmul in TF32.
TOLERANCE = {"fp32": 2e-5, "tf32": 5e-3, "bf16": 3e-2, "fp16": 5e-3}


class Config(RunConfig):
    """Causal attention without projections and with one head of ``d_model`` dimensions: one precision, some
    implementations and sequences. ``timed_steps`` are passes, each a forward and its backward;
    ``context_length`` is the longest sequence."""

    study: Literal["attention"] = "attention"
    batch_size: Dimension = 8
    warmup_steps: int = Field(3, ge=1, le=1000)
    timed_steps: Steps = 100
    context_lengths: list[Length] = Field([256, 1024, 4096, 8192, 16384], min_length=1, max_length=100)
    implementations: list[Implementation] = Field(list(get_args(Implementation)), min_length=1, max_length=7)
    # A case (implementation and sequence) that would take longer is timed fewer times,
    max_seconds_per_case: float = Field(0.25, gt=0, le=10**6, allow_inf_nan=False)
    min_passes: Steps = 3  # but so often at least
    profiled_passes: int = Field(3, ge=1, le=100)  # whose kernels are read, for their GPU time

    @model_validator(mode="before")
    @classmethod
    def longest(cls, values: Any) -> Any:
        """The context length follows from the sequences, which are put in order, each once."""
        if not isinstance(values, dict):
            return values
        context_lengths = values.get("context_lengths", cls.model_fields["context_lengths"].default)
        if (
            isinstance(context_lengths, list)
            and context_lengths
            and all(type(length) is int for length in context_lengths)
        ):
            return values | {
                "context_lengths": sorted(set(context_lengths)),
                "context_length": max(context_lengths),
            }
        return values
