"""Is it still the same training? Every rung from the same weights over the same text, beside three seeds in
fp32.

The text is the Python documentation's topics as the standard library ships them (``pydoc_data/topics.py``,
about 0.7 MB, PSF licence), a byte a token.
"""

import importlib.util
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from stepscope.config import ConfigError
from stepscope.studies.ladder.config import Config
from stepscope.studies.ladder.rungs import Program, Rung

SEEDS = 3  # of fp32: what another draw of the weights alone changes
COLUMNS = ["rung", "seed", "step", "loss"]


def text_batches(config: Config) -> Tensor:
    """(steps, B, T + 1) token ids: the same for every rung and seed.

    Raises:
        ConfigError: the vocabulary has no room for bytes.
    """
    if config.vocab_size < 256:
        raise ConfigError(
            f"vocab_size: got {config.vocab_size}, but the text is bytes: training needs 256 at least"
        )
    found = importlib.util.find_spec("pydoc_data.topics")
    if found is None or found.origin is None:
        raise ConfigError("training_steps: this Python comes without pydoc_data, whose text is trained on")
    text = torch.frombuffer(bytearray(Path(found.origin).read_bytes()), dtype=torch.uint8)
    count = config.training_steps * config.batch_size
    starts = torch.randint(
        len(text) - config.context_length, (count,), generator=torch.Generator().manual_seed(0)
    )
    rows = text.unfold(0, config.context_length + 1, 1)[starts]
    return rows.view(config.training_steps, config.batch_size, -1).to(config.device, torch.int64)


def losses(rung: Rung, batches: Tensor, seed: int) -> Tensor:
    """The loss of each step from a seed's weights."""
    rung.reset(seed)
    found = []
    for batch in batches:
        rung.tokens.copy_(batch[:, :-1])
        rung.targets.copy_(batch[:, 1:])
        found.append(rung.step().clone())
    return torch.stack(found).float().cpu()


def train(
    config: Config, names: list[str], programs: dict[tuple, Program], kernel: str | None = None
) -> pd.DataFrame:
    """Loss curves: columns rung, seed, step, loss; fp32 from three seeds, the others from the first."""
    if not config.training_steps:
        return pd.DataFrame(columns=COLUMNS)
    batches, frames = text_batches(config), []
    for name in names:
        rung = Rung(config, name, programs, kernel=kernel)
        try:
            rung.capture()
            for seed in range(config.seed, config.seed + (SEEDS if name == "fp32" else 1)):
                curve = losses(rung, batches, seed).tolist()
                frames.append(
                    pd.DataFrame({"rung": name, "seed": seed, "step": range(len(curve)), "loss": curve})
                )
        finally:
            rung.unload()
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=COLUMNS)
