"""Is it still the same training? Every optimization from the same weights over the same text
(:mod:`stepscope.model.text`), beside three seeds of the first."""

import pandas as pd
import torch
from torch import Tensor

from stepscope.config import ConfigError
from stepscope.model.text import text_batches
from stepscope.optimizations.transforms import TrainedSubject
from stepscope.studies.ladder.config import Config

SEEDS = 3  # of the first change: what another draw of the weights alone does


def losses(subject: TrainedSubject, text: Tensor, seed: int) -> list[float]:
    """Train from a seed's weights; return the loss of each step.

    Args:
        text: token ids, (steps, B, T + 1).
    """
    subject.draw_weights(seed)
    tokens, targets = subject.batch
    curve = []
    for batch in text.to(tokens.device):
        tokens.copy_(batch[:, :-1])
        targets.copy_(batch[:, 1:])
        curve.append(subject.step().clone())
    return torch.stack(curve).float().tolist()


def train(config: Config, subject: TrainedSubject, name: str) -> pd.DataFrame:
    """Return loss curves (optimization, batch_size, seed, step, loss): the run's first optimization from
    three seeds, any other from the first of them.

    Raises:
        ConfigError: the vocabulary has no room for bytes.
    """
    if config.vocab_size < 256:
        raise ConfigError(
            f"vocab_size: got {config.vocab_size}, but the text is bytes: training needs 256 at least"
        )
    batch_size = len(subject.batch[0])
    text = text_batches(config.training_steps, batch_size, config.context_length)
    seeds = SEEDS if name == config.optimizations[0] else 1
    frames = []
    for seed in range(config.seed, config.seed + seeds):
        curve = losses(subject, text, seed)
        frame = pd.DataFrame({"seed": seed, "step": range(len(curve)), "loss": curve})
        frames.append(frame.assign(optimization=name, batch_size=batch_size))
    columns = ["optimization", "batch_size", "seed", "step", "loss"]
    return pd.concat(frames, ignore_index=True)[columns]
