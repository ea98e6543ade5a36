"""The learning-rate schedule, with a linear warm-up and an optional decay.

The rate depends only on the step number, so a resumed run has the same rates as an uninterrupted run.
"""

from __future__ import annotations

import math

from .settings import Settings
from .values import Decay


def learning_rate(settings: Settings, step: int) -> float:
    """Return the learning rate at `step`, counted from 1."""
    highest, lowest, warmup = settings.learning_rate, settings.min_lr, settings.warmup_steps
    if step <= warmup:
        return highest * (step / warmup)
    if settings.lr_decay is Decay.NONE:
        return highest
    remaining = max(0.0, (settings.decay_steps - step) / (settings.decay_steps - warmup))
    factor = 0.5 - 0.5 * math.cos(math.pi * remaining) if settings.lr_decay is Decay.COSINE else remaining
    return lowest + (highest - lowest) * factor
