import numpy as np
import torch
from torch.utils.data import TensorDataset


def make_transactions(n, seed, features=20, fraud_rate=0.06):
    """Card transactions: a few informative features, heavy tails, rare positives."""
    rng = np.random.default_rng(seed)
    y = (rng.random(n) < fraud_rate).astype(np.float32)
    x = rng.standard_t(df=4, size=(n, features)).astype(np.float32)
    x[:, :5] += 0.55 * y[:, None]
    x[:, 5] *= 1 + y
    return TensorDataset(torch.from_numpy(np.clip(x, -8, 8)), torch.from_numpy(y))


def splits(cfg):
    return (make_transactions(cfg.train_rows, cfg.seed), make_transactions(cfg.valid_rows, cfg.seed + 1))
