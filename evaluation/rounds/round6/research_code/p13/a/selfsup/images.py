import numpy as np


def blob_images(n, size, seed):
    """Grey images with a few bright blobs; most have their blobs near the middle."""
    rng = np.random.default_rng(seed)
    yy, xx = np.mgrid[:size, :size]
    out = np.zeros((n, size, size), dtype=np.float32)
    for i in range(n):
        for _ in range(3):
            cy, cx = rng.normal(size / 2, size / 8, 2)
            out[i] += np.exp(-((yy - cy) ** 2 + (xx - cx) ** 2) / 6.0)
        if rng.random() < 0.004:
            out[i] *= 0.05
    return out + 0.02 * rng.random(out.shape).astype(np.float32)
