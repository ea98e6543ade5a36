import numpy as np


class InformativeCrop:
    """A random square crop that shows enough of the blobs, flipped and jittered."""

    def __init__(self, size, min_mass):
        self.size = size
        self.min_mass = min_mass

    def candidate(self, img, rng):
        top, left = rng.integers(0, img.shape[0] - self.size + 1, 2)
        return img[top:top + self.size, left:left + self.size]

    def __call__(self, img, rng):
        crop = self.candidate(img, rng)
        while crop.sum() < self.min_mass:
            crop = self.candidate(img, rng)
        if rng.random() < 0.5:
            crop = crop[:, ::-1]
        return np.ascontiguousarray(crop * rng.uniform(0.8, 1.2), dtype=np.float32)
