import random

import numpy as np
import torch


def seed_everything(seed, rank):
    """Noise and data streams are per rank; python's stream drives the recipe."""
    torch.manual_seed(seed + rank)
    np.random.seed(seed + rank)
    random.seed(seed)
