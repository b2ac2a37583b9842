"""What a run of the attention study has."""
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from stepscope.config import Dimension, Length, RunConfig, Steps

# Attention by itself: written out, the same compiled, what scaled_dot_product_attention offers, and FlexAttention.
ATTENTIONS = ("eager", "compiled", "flash", "efficient", "cudnn", "math", "flex")


class Config(RunConfig):
    """Attention alone, without projections and with one head of ``d_model`` dimensions: one precision, all implementations,
    all sequences. ``timed_steps`` are passes, each a forward and its backward; ``context_length`` is the longest sequence."""

    retired: ClassVar[dict[str, Any]] = {
        "size": "custom", "d_ff": 1, "num_layers": 1, "num_heads": 1, "vocab_size": 10_000, "mode": "all", "attention": "all",
        "compile": False, "optimizer": "foreach"}

    study: Literal["attention"] = "attention"
    batch_size: Dimension = 8
    timed_steps: Steps = 100
    sequences: list[Length] = Field([64, 128, 256, 1024, 4096, 8192, 16384], min_length=1, max_length=1000)
    causal: list[Literal[ATTENTIONS]] = Field(list(ATTENTIONS))      # what is timed with the causal mask
    unmasked: list[Literal[ATTENTIONS]] = Field(["eager", "flash", "efficient", "cudnn"])  # and without it
    unmasked_from: Length = 256      # the shortest sequence that is timed without the mask
    cell_seconds: float = Field(0.5, gt=0, le=10**6, allow_inf_nan=False)     # a cell that would take longer is timed fewer times,
    least_passes: Steps = 10        # but so often at least
    find_end: bool = False                     # beyond the sequences, look for the longest one that fits

    @model_validator(mode="before")
    @classmethod
    def longest(cls, values: Any) -> Any:
        sequences = values.get("sequences") or cls.model_fields["sequences"].default if isinstance(values, dict) else None
        if isinstance(sequences, list) and all(isinstance(sequence, int) for sequence in sequences):
            return values | {"context_length": max(sequences)}
        return values

    @property
    def run_id(self) -> str:
        return f"d{self.d_model}-ctx{self.context_length}-all-{self.precision}-{self.digest()}"
