import torch
from torch.utils.data import Dataset

VOCAB = 56


class Progressions(Dataset):
    def __init__(self, n, length, seed=6):
        g = torch.Generator().manual_seed(seed)
        start = torch.randint(VOCAB, (n, 1), generator=g)
        stride = torch.randint(1, 5, (n, 1), generator=g)
        self.rows = (start + stride * torch.arange(length)) % VOCAB

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]
