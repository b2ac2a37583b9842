"""What a run of the study of processes has."""
import re
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from stepscope.config import PHASES, SIZES, RunConfig, StepConfig, Steps

Shape = Annotated[str, StringConstraints(pattern=f"^({'|'.join(map(re.escape, SIZES))})@[1-9][0-9]{{0,6}}$")]
MODES = tuple(PHASES)


class Config(RunConfig):
    """One process that times many shapes one after another, each in every mode, in an order of its own."""

    study: Literal["processes"] = "processes"
    process: int = Field(0, ge=0, lt=2**31)  # its number, by which the order is shuffled
    # A size and a context each. At 512 the GPU sets the time; at the short ones of small models the host may.
    shapes: list[Shape] = Field(
        ["small@512", "medium@512", "large@512", "xl@512", "2.7B@512",
         "small@128", "medium@128", "large@128", "small@256", "medium@256"], min_length=1, max_length=1000)
    modes: list[Literal[MODES]] = Field(list(MODES), min_length=1)  # type: ignore[valid-type]
    vocab_size: int = Field(10_000, ge=2, le=2**24)
    warmup_steps: int = Field(2, ge=0, le=10**6)
    timed_steps: Steps = 5

    @model_validator(mode="before")
    @classmethod
    def largest(cls, values: Any) -> Any:
        """``d_model`` and ``context_length`` are those of the largest shape."""
        if not isinstance(values, dict):
            return values
        shapes = values.get("shapes") or cls.model_fields["shapes"].default
        try:
            known = [(SIZES[size].d_model, int(context)) for size, context in map(shape_of, shapes)]
        except (KeyError, ValueError, TypeError, AttributeError):
            known = [(2, 1)]  # the field's own check says what is wrong
        widths, contexts = zip(*known, strict=True)
        return values | {"d_model": max(widths), "context_length": max(contexts)}

    def step(self, size: str, context_length: int, mode: str) -> StepConfig:
        """The plain step of one shape in one mode."""
        return StepConfig(size=size, context_length=context_length, mode=mode, batch_size=self.batch_size,
                          precision=self.precision, vocab_size=self.vocab_size, device=self.device,
                          warmup_steps=self.warmup_steps, timed_steps=self.timed_steps, seed=self.seed,
                          **SIZES[size]._asdict())

    @property
    def run_id(self) -> str:
        return f"process{self.process}-{self.precision}-{self.digest()}"

    @property
    def label(self) -> str:
        return f"{self.study} process {self.process} {self.precision}"


def shape_of(text: str) -> tuple[str, int]:
    """Size and context of a shape that is written ``size@context``."""
    size, _, context = text.partition("@")
    return size, int(context)
