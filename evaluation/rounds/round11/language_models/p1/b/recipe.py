"""Recipe of the mixed-objective pretraining run: corpus, batches and objective mix."""
import random

import torch

CFG = {
    "seed": 20,
    "vocab": 96,
    "block": 24,
    "batch": 6,
    "steps": 40,
    "lr": 3e-3,
    "warmup": 8,
    "mix": {"causal": 0.6, "denoise": 0.25, "contrastive": 0.15},
}


class ObjectiveMix:
    """Draws the objective of the next step, as in a UL2-like mixture."""

    def __init__(self, weights, seed, warmup):
        self.names = list(weights)
        self.probs = [weights[n] for n in self.names]
        self.rng = random.Random(seed)
        self.warmup = warmup
        self.counts = {n: 0 for n in self.names}

    def pick(self, step):
        if step < self.warmup:
            name = "causal"
        else:
            name = self.rng.choices(self.names, self.probs)[0]
        self.counts[name] += 1
        return name


class MarkovText:
    """Synthetic corpus: a sparse first-order chain over the vocabulary."""

    def __init__(self, vocab, block, batch, seed):
        table = torch.Generator().manual_seed(7)
        self.next = torch.randint(4, vocab, (vocab, 3), generator=table)
        self.vocab, self.block, self.batch = vocab, block, batch
        self.gen = torch.Generator().manual_seed(seed)

    def draw(self):
        out = torch.empty(self.batch, self.block + 1, dtype=torch.long)
        out[:, 0] = torch.randint(4, self.vocab, (self.batch,), generator=self.gen)
        pick = torch.randint(0, 3, (self.batch, self.block), generator=self.gen)
        for t in range(self.block):
            out[:, t + 1] = self.next[out[:, t], pick[:, t]]
        return out


def stream_seed(cfg, rank):
    return cfg["seed"] * 1000 + rank


def make_streams(cfg, rank):
    """Return the batch source of this rank and the objective mix of the run."""
    text = MarkovText(cfg["vocab"], cfg["block"], cfg["batch"], stream_seed(cfg, rank))
    mix = ObjectiveMix(cfg["mix"], stream_seed(cfg, rank), cfg["warmup"])
    return text, mix
