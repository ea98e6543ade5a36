import numpy as np
import torch
from torch.utils.data import Dataset

CROP = 16


class Corpus(Dataset):
    """Log-mel-like sequences of different lengths; an item is two random crops of an utterance."""

    def __init__(self, n, mels=12, seed=5):
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(18, 90, n).tolist()
        self.feats = []
        for i, t in enumerate(self.lengths):
            speaker = rng.normal(size=(1, mels))
            self.feats.append((speaker + 0.5 * rng.normal(size=(t, mels))).astype(np.float32))

    def __len__(self):
        return len(self.feats)

    def _crop(self, x):
        s = np.random.randint(0, len(x) - CROP + 1)
        return x[s:s + CROP] + 0.05 * np.random.randn(CROP, x.shape[1]).astype(np.float32)

    def __getitem__(self, i):
        x = self.feats[i]
        return torch.from_numpy(self._crop(x)), torch.from_numpy(self._crop(x))


def collate(items):
    a, b = zip(*items)
    return torch.stack(a), torch.stack(b)
