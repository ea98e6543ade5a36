import random


class FrameBudgetSampler:
    """Batches of utterances whose frames sum up to at most `max_frames`.

    All ranks see the same list of batches and take every world-th of them.
    """

    def __init__(self, lengths, max_frames, rank, world, seed=0):
        self.lengths = lengths
        self.max_frames = max_frames
        self.rank = rank
        self.world = world
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def _batches(self):
        order = list(range(len(self.lengths)))
        random.Random(self.seed + self.epoch).shuffle(order)
        batches, cur, frames = [], [], 0
        for i in order:
            if cur and frames + self.lengths[i] > self.max_frames:
                batches.append(cur)
                cur, frames = [], 0
            cur.append(i)
            frames += self.lengths[i]
        batches.append(cur)
        usable = len(batches) - len(batches) % self.world
        return batches[:usable]

    def __iter__(self):
        return iter(self._batches()[self.rank::self.world])

    def __len__(self):
        return len(self._batches()) // self.world
