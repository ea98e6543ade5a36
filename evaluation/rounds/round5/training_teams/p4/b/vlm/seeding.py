import os
import random

import numpy as np
import torch


def seed_everything(seed, rank=0):
    """Python, numpy and torch generators; noise and crops differ between ranks."""
    os.environ["PL_GLOBAL_SEED"] = str(seed)
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)
