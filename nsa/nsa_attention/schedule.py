"""The learning rate of each step: a warm-up, then a decay.

A function of the step alone, so that a run that goes on has the rates of one that was never interrupted.
"""

from __future__ import annotations

import math

from .settings import Settings
from .values import Decay


def learning_rate(settings: Settings, step: int) -> float:
    """Of a step, counted from 1. The warm-up ends at the highest rate, in its last step."""
    highest, lowest, warmup = settings.learning_rate, settings.min_lr, settings.warmup_steps
    if step <= warmup:
        return highest * (step / warmup)
    if settings.lr_decay is Decay.NONE:
        return highest
    remaining = max(0.0, (settings.decay_steps - step) / (settings.decay_steps - warmup))
    factor = 0.5 - 0.5 * math.cos(math.pi * remaining) if settings.lr_decay is Decay.COSINE else remaining
    return lowest + (highest - lowest) * factor
