"""Variable-length token corpus and a planner that packs batches under a token budget."""
import numpy as np
import torch


class TokenCorpus:
    def __init__(self, samples, vocab, max_len, seed=3):
        rng = np.random.default_rng(seed)
        raw = np.clip(rng.lognormal(3.0, 0.7, size=samples), 4, max_len)
        self.lengths = raw.astype(np.int64)
        self.rows = [torch.from_numpy(rng.integers(1, vocab, size=n)) for n in self.lengths]

    def __len__(self):
        return len(self.rows)

    def collate(self, indices):
        width = max(int(self.lengths[i]) for i in indices)
        tokens = torch.zeros(len(indices), width, dtype=torch.long)
        for k, i in enumerate(indices):
            tokens[k, : len(self.rows[i])] = self.rows[i]
        targets = (tokens.sum(dim=1) % 4).long()
        return tokens, targets


class TokenBudgetPlanner:
    """Plans whole epochs so that every rank reads the same amount of padded tokens per step."""

    def __init__(self, lengths, cfg, rank, world):
        self.lengths = lengths
        self.cfg = cfg
        self.rank = rank
        self.world = world

    def plan(self, epoch):
        rng = np.random.default_rng((self.cfg.seed, epoch))
        order = rng.permutation(len(self.lengths))
        order = order[np.argsort(self.lengths[order] // self.cfg.bucket_width, kind="stable")]
        batches, current, width = [], [], 0
        for i in order:
            width_with = max(width, int(self.lengths[i]))
            if current and width_with * (len(current) + 1) > self.cfg.token_budget:
                batches.append(current)
                current, width_with = [], int(self.lengths[i])
            current.append(int(i))
            width = width_with
        if current:
            batches.append(current)
        rng.shuffle(batches)
        return batches

    def large_enough(self, batches):
        # batch statistics of the pooled features are useless on one or two rows
        return [b for b in batches if len(b) >= self.cfg.min_rows]

    def shard(self, epoch):
        batches = self.large_enough(self.plan(epoch))
        usable = len(batches) - len(batches) % self.world
        return batches[self.rank:usable:self.world]
