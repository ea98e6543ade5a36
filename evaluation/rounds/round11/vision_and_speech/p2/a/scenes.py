import numpy as np
import torch


def scene(rng, size=32):
    img = rng.normal(0, 0.1, (size, size))
    mask = np.zeros((size, size), dtype=np.int64)
    yy, xx = np.mgrid[:size, :size]
    for cls, level in ((1, 1.0), (2, -1.0)):
        cy, cx = rng.integers(8, size - 8, 2)
        r = rng.integers(4, 8)
        where = (yy - cy) ** 2 + (xx - cx) ** 2 <= r * r
        img[where] += level
        mask[where] = cls
    return img, mask


def scene_batch(seed, n):
    rng = np.random.default_rng(seed)
    items = [scene(rng) for _ in range(n)]
    img = torch.tensor(np.stack([i for i, _ in items]), dtype=torch.float32)
    return img, torch.tensor(np.stack([m for _, m in items]))
