from collections import defaultdict

import torch

from .vocab import PAD


class SequenceBatches:
    """Users dealt out in turn; windows over the history of each user."""

    def __init__(self, events, vocab, rank, world, window, batch):
        history = defaultdict(list)
        for e in sorted(events):
            history[e.user].append(e.item)
        self.users = sorted(history)[rank::world]
        self.history, self.vocab = history, vocab
        self.window, self.batch = window, batch

    def encode(self, user, end):
        ids = [self.vocab[i] for i in self.history[user][max(0, end - self.window):end]]
        return [PAD] * (self.window - len(ids)) + ids

    def __iter__(self):
        for end in range(9, 4, -1):
            for k in range(0, len(self.users), self.batch):
                part = self.users[k:k + self.batch]
                x = torch.tensor([self.encode(u, end) for u in part])
                y = torch.tensor([self.vocab[self.history[u][end]] for u in part])
                yield x, y
