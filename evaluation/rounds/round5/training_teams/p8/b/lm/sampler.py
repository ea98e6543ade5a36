import random


class TokenBatchSampler:
    """Batches of documents of similar length with at most `max_tokens` padded tokens.

    The plan of an epoch covers the whole corpus; each rank takes every world-th batch.
    """

    def __init__(self, lengths, max_tokens, rank, world, noise=0.5):
        self.lengths = lengths
        self.max_tokens = max_tokens
        self.rank, self.world = rank, world
        self.noise = noise
        self.epoch_batches = 0

    def _plan(self):
        key = [n * (1 + random.uniform(-self.noise, self.noise)) for n in self.lengths]
        order = sorted(range(len(key)), key=key.__getitem__)
        batches, cur, longest = [], [], 0
        for i in order:
            longest_new = max(longest, self.lengths[i])
            if cur and longest_new * (len(cur) + 1) > self.max_tokens:
                batches.append(cur)
                cur, longest_new = [], self.lengths[i]
            cur.append(i)
            longest = longest_new
        batches.append(cur)
        random.shuffle(batches)
        return batches[: len(batches) - len(batches) % self.world]

    def __iter__(self):
        mine = self._plan()[self.rank :: self.world]
        self.epoch_batches = len(mine)
        yield from mine
