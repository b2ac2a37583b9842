"""Recognize what the names of ranges denote: operators, library internals, phases, layers, warm-ups or steps."""

import re
from collections.abc import Callable

import numpy as np
import pandas as pd

# ranges from emit_nvtx and from torch itself
OPERATOR_RANGE = re.compile(r", (op_id|seq) = \d+|^autograd::|^ProfilerStep")
LIBRARY_RANGE = re.compile(
    r"^(nccl|cuBLAS|cuDNN|cub::|thrust::|TRITON|c10d::)[A-Z:_]?|^## Call Compiled|^Torch-Compiled Region"
)
PROFILER_STEP = re.compile(r"^ProfilerStep\s?#\d+$")
OPTIMIZER = re.compile(r"^Optimizer\.step#")
SPLIT_PHASES = {"F": "forward", "B": "backward", "W": "backward"}  # pipeline parallelism: "attn(F)", "mlp(B)"
SPLIT_PHASE = re.compile(r"\((F|B|W)\)$")
WARM_UP = re.compile(r"\bwarm(?:ing)? ?up\b")  # matches a name returned by plain_name
STEP_WORDS = {"step", "steps", "iter", "iteration", "batch"}
LAYER_WORD = re.compile(
    r"\b(layer|block|attn|attention|mlp|ffn|conv|norm|layernorm|rmsnorm|linear|embed|expert|module|relu"
    r"|softmax|dropout|head)"
)
# Words for phases; a phase's name may otherwise contain only FILLER_WORDS.
PHASE_WORDS = {
    word: phase
    for phase, words in {
        "forward": "forward fwd",
        "loss": "loss criterion",
        "backward": "backward bwd backprop",
        "optimizer": "optimizer optim opt adamw adam sgd",
    }.items()
    for word in words.split()
}
FILLER_WORDS = {
    "pass",
    "step",
    "model",
    "the",
    "compute",
    "train",
    "training",
    "phase",
    "update",
    "calc",
    "run",
}


def plain_name(name: str) -> str:
    """Convert a name to lower-case words without numbers or punctuation.

    For example, "Profiler_Step#7" becomes "profiler step".
    """
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    return " ".join(re.findall(r"[a-z]+", text.lower()))


def phase_of(name: str) -> str | None:
    """Return the phase that a range's name denotes, or None if it doesn't denote a phase.

    Case and most punctuation don't matter. For example, both "## Forward pass ##" and "attn(F)" denote forward.
    """
    if OPTIMIZER.match(name):
        return "optimizer"
    if split := SPLIT_PHASE.search(name):
        return SPLIT_PHASES[split[1]]
    words = plain_name(name).split()
    phases = {PHASE_WORDS[word] for word in words if word in PHASE_WORDS}
    only_words = set(words) <= {*PHASE_WORDS, *FILLER_WORDS} and "#" not in name.strip("# ")
    return phases.pop() if only_words and len(phases) == 1 else None


def map_categories(names: pd.Series, value: Callable[[str], str]) -> np.ndarray:
    """Apply a function to the names in a categorical column, calling it only once per distinct name."""
    return np.array([*map(value, names.cat.categories), ""], object)[names.cat.codes]
