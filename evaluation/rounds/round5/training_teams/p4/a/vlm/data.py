import numpy as np
import torch


class ImageSource:
    def __init__(self, n=256, seed=0):
        rng = np.random.default_rng(seed)
        self.proto = rng.normal(size=(8, 48)).astype("float32")

    def batch(self, size):
        y = np.random.randint(0, 8, size)
        x = self.proto[y] + 0.5 * np.random.normal(size=(size, 48)).astype("float32")
        return torch.from_numpy(x.astype("float32")), torch.from_numpy(y)


class TextSource:
    def __init__(self, vocab=40, length=12):
        self.vocab, self.length = vocab, length

    def batch(self, size):
        y = np.random.randint(0, 8, size)
        ids = np.random.randint(8, self.vocab, (size, self.length))
        ids[:, ::3] = y[:, None]
        return torch.from_numpy(ids), torch.from_numpy(y)
