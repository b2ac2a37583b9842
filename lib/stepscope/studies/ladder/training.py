"""Train on text with each optimization added, from the same weights, to check that the loss curves agree.

For the first optimization, training is run with three different seeds, to show how much the loss curve depends on
the initial weights. The text comes from :mod:`stepscope.model.text`.
"""

import pandas as pd
import torch
from torch import Tensor

from stepscope.config import ConfigError
from stepscope.model.text import text_batches
from stepscope.optimizations.transforms import TrainedSubject
from stepscope.studies.ladder.config import Config

SEEDS = 3  # number of seeds for the first optimization


def losses(subject: TrainedSubject, text: Tensor, seed: int) -> list[float]:
    """Initialize the weights from a seed and train; return the loss of each step.

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
    """Train with one optimization; return a table of loss curves (optimization, batch_size, seed, step, loss).

    For the run's first optimization, training is repeated with three seeds. All other optimizations use only the
    first of these seeds.

    Raises:
        ConfigError: If the vocabulary has fewer than 256 tokens, because each of the 256 byte values is a token.
    """
    if config.vocab_size < 256:
        raise ConfigError(
            f"vocab_size: got {config.vocab_size}, but training needs at least 256, because each byte is a token"
        )
    batch_size = len(subject.batch[0])
    text = text_batches(config.training_steps, batch_size, config.context_length)
    seeds = SEEDS if name == config.optimizations[0] else 1
    frames = []
    for seed in range(config.seed, config.seed + seeds):
        curve = losses(subject, text, seed)
        frame = pd.DataFrame(
            {
                "optimization": name,
                "batch_size": batch_size,
                "seed": seed,
                "step": range(len(curve)),
                "loss": curve,
            }
        )
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)
