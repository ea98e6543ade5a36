"""Synthetic preference pairs: the chosen answer continues the pattern of the prompt, the rejected one does not."""
import numpy as np
import torch
from torch.utils.data import Dataset


class PreferencePairs(Dataset):
    def __init__(self, size, vocab, prompt_len, answer_len, seed):
        rng = np.random.default_rng(seed)
        start = rng.integers(0, vocab, (size, 1))
        stride = rng.integers(1, 5, (size, 1))
        total = prompt_len + answer_len
        chosen = (start + stride * np.arange(total)) % vocab
        rejected = chosen.copy()
        rejected[:, prompt_len:] = rng.integers(0, vocab, (size, answer_len))
        self.chosen, self.rejected = torch.from_numpy(chosen), torch.from_numpy(rejected)
        self.mask = torch.zeros(total)
        self.mask[prompt_len:] = 1

    def __len__(self):
        return len(self.chosen)

    def __getitem__(self, i):
        return {"chosen": self.chosen[i], "rejected": self.rejected[i], "mask": self.mask}
