import numpy as np
import torch

from tables import CATEGORIES


def click_stream(rank, batches, batch_size, seed):
    """Yields (ids, dense, clicked); popular ids are much more frequent, as in real logs."""
    rng = np.random.default_rng([seed, rank])
    truth = np.random.default_rng(seed)
    lift = {c: truth.normal(0, 0.6, n) for c, n in CATEGORIES.items()}
    for _ in range(batches):
        ids = np.stack([np.minimum(rng.zipf(1.3, batch_size) - 1, n - 1) for n in CATEGORIES.values()], axis=1)
        dense = rng.lognormal(0, 0.5, (batch_size, 4)).astype(np.float32)
        logit = -2.0 + sum(lift[c][ids[:, i]] for i, c in enumerate(CATEGORIES)) + 0.3 * dense[:, 0]
        clicked = rng.random(batch_size) < 1 / (1 + np.exp(-logit))
        yield torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(dense), torch.from_numpy(clicked.astype(np.float32))
