import torch

from tokenizer import PAD


class TokenBatcher:
    """Batches of similar length with at most `max_tokens` padded tokens, shuffled per epoch."""

    def __init__(self, samples, max_tokens, seed):
        self.samples, self.max_tokens, self.seed = samples, max_tokens, seed
        self.plan = self._plan()

    def _plan(self):
        order = sorted(range(len(self.samples)), key=lambda i: len(self.samples[i]))
        plan, current = [], []
        for i in order:
            if current and (len(current) + 1) * len(self.samples[i]) > self.max_tokens:
                plan.append(current)
                current = []
            current.append(i)
        return plan + [current]

    def __len__(self):
        return len(self.plan)

    def epoch(self, number, count):
        g = torch.Generator().manual_seed(self.seed + number)
        chosen = torch.randperm(len(self.plan), generator=g)[torch.arange(count) % len(self.plan)]
        for b in chosen.tolist():
            yield torch.nn.utils.rnn.pad_sequence([self.samples[i] for i in self.plan[b]], True, PAD)
