import numpy as np


class InformativeCrop:
    """A random square crop that shows enough of the blobs, flipped and jittered."""

    def __init__(self, size, min_mass, attempts=40):
        self.size = size
        self.min_mass = min_mass
        self.attempts = attempts

    def candidate(self, img, rng):
        top, left = rng.integers(0, img.shape[0] - self.size + 1, 2)
        return img[top:top + self.size, left:left + self.size]

    def __call__(self, img, rng):
        for _ in range(self.attempts):
            crop = self.candidate(img, rng)
            if crop.sum() >= self.min_mass:
                break
        if rng.random() < 0.5:
            crop = crop[:, ::-1]
        return np.ascontiguousarray(crop * rng.uniform(0.8, 1.2), dtype=np.float32)
