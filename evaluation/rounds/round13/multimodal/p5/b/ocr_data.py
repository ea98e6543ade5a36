import numpy as np
import torch

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789-"
WORDS = ("invoice total amount date street number receipt cash paid tax order item price unit bank sum "
         "account credit due net gross terms ship bill").split()
PLACE_NAMES = ["köln", "malmö", "genève", "são-luís"]


class Charset:
    """Index 0 is the CTC blank, index 1 stands for every character outside the alphabet."""

    def __init__(self, alphabet=ALPHABET):
        self.unknown = 1
        self.index = {c: i + 2 for i, c in enumerate(alphabet)}

    def __len__(self):
        return len(self.index) + 2

    def encode(self, text):
        return [self.index[c] for c in text]


def scan_lines(count, seed):
    """Text of the scanned documents, in the order of the archive."""
    rng = np.random.default_rng(seed)
    lines = []
    for i in range(count):
        word = str(rng.choice(WORDS))
        if rng.random() < 0.5:
            word += f"-{rng.integers(100)}"
        lines.append(word)
    for i, name in enumerate(PLACE_NAMES):
        lines[count // 2 + 7 + i] = name
    return lines


class LineImages(torch.utils.data.Dataset):
    def __init__(self, lines, seed, height=12, stretch=3):
        self.lines, self.seed, self.height, self.stretch = lines, seed, height, stretch
        self.glyphs = np.random.default_rng(99).normal(size=(512, height)).astype(np.float32)

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        text = self.lines[i]
        columns = np.stack([self.glyphs[ord(c)] for c in text for _ in range(self.stretch)])
        noise = np.random.default_rng(self.seed + i).normal(0, 0.2, columns.shape)
        return torch.from_numpy((columns + noise).astype(np.float32)), text


def collate(samples):
    width = torch.tensor([len(x) for x, _ in samples])
    image = torch.nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
    return image, width, [t for _, t in samples]


def contiguous_shard(lines, rank, world):
    per_rank = len(lines) // world
    return lines[rank * per_rank:(rank + 1) * per_rank]
