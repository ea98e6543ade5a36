from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class Utterance:
    key: str
    feats: torch.Tensor
    labels: torch.Tensor

    @property
    def frames(self):
        return len(self.labels)


def build_corpus(count, seed):
    rng = np.random.default_rng(seed)
    out = []
    centres = rng.normal(0, 1, (5, 8))
    for i in range(count):
        n = int(np.clip(rng.lognormal(2.9, 0.6), 6, 79))
        labels = np.repeat(rng.integers(0, 5, n // 3 + 1), 3)[:n]
        feats = centres[labels] + rng.normal(0, 0.7, (n, 8))
        out.append(Utterance(f"utt{i:04d}", torch.tensor(feats, dtype=torch.float32), torch.tensor(labels)))
    return out
