"""Is it still the same training? Every optimization from the same weights over the same text
(:mod:`stepscope.model.text`), beside three seeds of the first."""

import pandas as pd
import torch
from torch import Tensor

from stepscope.config import ConfigError
from stepscope.model.text import text_batches
from stepscope.optimizations.trainer import Trainer
from stepscope.studies.ladder.config import Config

SEEDS = 3  # of the first change: what another draw of the weights alone does


def losses(trainer: Trainer, batches: Tensor, seed: int) -> list[float]:
    """The loss of each step from a seed's weights over batches of (B, T + 1) token ids."""
    trainer.reset(seed)
    found = []
    for batch in batches.to(trainer.config.device):
        trainer.tokens.copy_(batch[:, :-1])
        trainer.targets.copy_(batch[:, 1:])
        found.append(trainer.step().clone())
    return torch.stack(found).float().tolist()


def train(config: Config, trainer: Trainer, name: str) -> pd.DataFrame:
    """Loss curves (change, batch_size, seed, step, loss): the first of a run's changes from three seeds, any
    other from the first of these.

    Raises:
        ConfigError: the vocabulary has no room for bytes.
    """
    if config.vocab_size < 256:
        raise ConfigError(
            f"vocab_size: got {config.vocab_size}, but the text is bytes: training needs 256 at least"
        )
    batches = text_batches(config.training_steps, trainer.batch, config.context_length)
    frames = []
    for seed in range(config.seed, config.seed + (SEEDS if name == config.optimizations[0] else 1)):
        curve = losses(trainer, batches, seed)
        named = {"optimization": name, "batch_size": trainer.batch, "seed": seed}
        frames.append(pd.DataFrame(named | {"step": range(len(curve)), "loss": curve}))
    return pd.concat(frames, ignore_index=True)
