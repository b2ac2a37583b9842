"""What a run of the attention study has."""
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from stepscope.config import Dimension, Length, RunConfig, Steps

# Attention by itself: written out, the same compiled, what scaled_dot_product_attention offers,
# FlexAttention, and, where its package is installed and only when asked for, FlashAttention-4, which has
# kernels for Hopper.
Implementation = Literal["eager", "compiled", "flash", "efficient", "cudnn", "math", "flex", "fa4"]
ATTENTIONS: tuple[str, ...] = get_args(Implementation)
WRITTEN = ("eager", "math")                # of them, what is made of torch's own operators
QUADRATIC = ("eager", "compiled", "math")  # and what keeps whole T x T squares
# The largest error that still is this precision: relative, in the Frobenius norm, of the output and each
# gradient. TF32 keeps 10 bits of a factor (2^-11 = 5e-4) and bf16 7 (2^-9 = 2e-3); fp32's is far below one
# product in TF32.
TOLERANCE = {"fp32": 2e-5, "tf32": 5e-3, "bf16": 3e-2, "fp16": 5e-3}


class Config(RunConfig):
    """Attention alone, without projections and with one head of ``d_model`` dimensions: one precision, all
    implementations, all sequences. ``timed_steps`` are passes, each a forward and its backward;
    ``context_length`` is the longest sequence."""

    retired: ClassVar[dict[str, Any]] = {
        "size": "custom", "d_ff": 1, "num_layers": 1, "num_heads": 1, "vocab_size": 10_000, "mode": "all",
        "attention": "all", "compile": False, "optimizer": "foreach"}

    study: Literal["attention"] = "attention"
    batch_size: Dimension = 8
    timed_steps: Steps = 100
    sequences: list[Length] = Field([64, 128, 256, 1024, 4096, 8192, 16384], min_length=1, max_length=1000)
    # What is timed with the causal mask,
    causal: list[Implementation] = Field(["eager", "compiled", "flash", "efficient", "cudnn", "math", "flex"])
    unmasked: list[Implementation] = Field(["eager", "flash", "efficient", "cudnn"])  # and without it
    unmasked_from: Length = 256      # the shortest sequence that is timed without the mask
    # A cell that would take longer is timed fewer times,
    cell_seconds: float = Field(0.5, gt=0, le=10**6, allow_inf_nan=False)
    least_passes: Steps = 10        # but so often at least
    captured_passes: int = Field(0, ge=0, le=100)  # whose kernels are listed after the timing; 0: none
    find_end: bool = False                     # beyond the sequences, look for the longest one that fits

    @model_validator(mode="before")
    @classmethod
    def longest(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        sequences = values.get("sequences") or cls.model_fields["sequences"].default
        if isinstance(sequences, list) and all(isinstance(sequence, int) for sequence in sequences):
            return values | {"context_length": max(sequences)}
        return values

    @property
    def run_id(self) -> str:
        return f"d{self.d_model}-ctx{self.context_length}-all-{self.precision}-{self.digest()}"
