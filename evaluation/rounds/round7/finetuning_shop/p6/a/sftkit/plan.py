"""Turns the recipe into a number of optimizer steps."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    epochs: int = 3
    micro_batch: int = 4
    accumulate: int = 4
    peak_lr: float = 4e-3
    warmup_share: float = 0.2


@dataclass(frozen=True)
class Plan:
    micro_per_epoch: int
    steps_per_epoch: int
    total_steps: int


def make_plan(recipe, samples_on_rank):
    micro = -(-samples_on_rank // recipe.micro_batch)
    steps = -(-micro // recipe.accumulate)
    return Plan(micro, steps, steps * recipe.epochs)
