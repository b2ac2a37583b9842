"""Configuration of the attention study: implementations, tolerances, and the fields of a run."""

from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from stepscope.config import Dimension, Length, RunConfig, Steps

# Naive attention uncompiled and compiled, the backends of scaled_dot_product_attention (SDPA), and FlexAttention.
Implementation = Literal["naive", "compiled", "flash", "efficient", "cudnn", "math", "flex"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)
COMPILED = ("compiled", "flex")
PASSES = ("forward", "backward")
QUANTITIES = ("output", "dq", "dk", "dv")  # compared with float64
# The maximum relative error (Frobenius norm) of the output and of each gradient, by precision. TF32 rounds inputs
# to 10 mantissa bits (error 2^-11 = 5e-4), and bf16 rounds them to 7 (error 2^-8 = 4e-3). The tolerance for fp32
# is far below the error of a single TF32 matmul.
TOLERANCE = {"fp32": 2e-5, "tf32": 5e-3, "bf16": 3e-2, "fp16": 5e-3}


class Config(RunConfig):
    """A run that measures causal attention in one precision.

    Attention has one head of ``d_model`` dimensions and no projections.

    ``timed_steps`` is the maximum number of timed passes; a pass is a forward pass followed by its backward pass.
    ``context_length`` is the longest of ``context_lengths``.
    """

    study: Literal["attention"] = "attention"
    batch_size: Dimension = 8
    warmup_steps: int = Field(3, ge=1, le=1000)
    timed_steps: Steps = 100
    context_lengths: list[Length] = Field(
        [256, 1024, 4096, 8192, 16384],
        min_length=1,
        max_length=100,
    )
    implementations: list[Implementation] = Field(
        list(get_args(Implementation)),
        min_length=1,
        max_length=7,
    )
    # Limits the time per case (implementation and context length); at least min_passes are timed, even
    # if the case is slow.
    max_seconds_per_case: float = Field(0.25, gt=0, le=10**6, allow_inf_nan=False)
    min_passes: Steps = 3
    profiled_passes: int = Field(3, ge=1, le=100)

    @model_validator(mode="before")
    @classmethod
    def set_context_length(cls, values: Any) -> Any:
        """Sort ``context_lengths``, remove duplicates, and set ``context_length`` to the longest.

        Leave values of unexpected types unchanged; field validation then rejects them.
        """
        if not isinstance(values, dict):
            return values
        lengths = values.get("context_lengths", cls.model_fields["context_lengths"].default)
        if not isinstance(lengths, list) or not lengths:
            return values
        if not all(type(length) is int for length in lengths):
            return values
        return values | {"context_lengths": sorted(set(lengths)), "context_length": max(lengths)}
