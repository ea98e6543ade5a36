import numpy as np
import torch
from torch.utils.data import Dataset

from .text import ALPHABET, encode

WORDS = "yes no stop go left right up down on off one two three four uh um".split()
DIM = 20


class Spoken(Dataset):
    """Sentences of a few words; every letter is three noisy frames of its own direction."""

    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.letters = np.random.default_rng(0).normal(size=(len(ALPHABET) + 1, DIM))
        self.texts = [" ".join(rng.choice(WORDS, rng.integers(1, 4))) for _ in range(n)]
        self.noise = seed

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        ids = encode(self.texts[i])
        rng = np.random.default_rng((self.noise, i))
        x = np.repeat(self.letters[ids], 3, axis=0)
        x = x + 0.6 * rng.normal(size=x.shape)
        return torch.from_numpy(x.astype(np.float32)), torch.tensor(ids), self.texts[i]


def collate(items):
    xs, ys, texts = zip(*items)
    return (torch.nn.utils.rnn.pad_sequence(xs, batch_first=True), torch.tensor([len(x) for x in xs]),
            torch.cat(ys), torch.tensor([len(y) for y in ys]), list(texts))
