import torch


class Curriculum:
    """Starts with a small vocabulary and short rows; widens both as training goes on."""

    def __init__(self, vocab, start_vocab=5, start_len=3, max_len=12, grow_every=12):
        self.vocab = vocab
        self.start_vocab = start_vocab
        self.start_len = start_len
        self.max_len = max_len
        self.grow_every = grow_every

    def stage(self, step):
        level = step // self.grow_every
        return (min(self.start_vocab * 2 ** level, self.vocab),
                min(self.start_len + 2 * level, self.max_len))

    def batches(self, rows, steps, seed):
        gen = torch.Generator().manual_seed(seed)
        for step in range(steps):
            words, length = self.stage(step)
            first = torch.randint(0, words, (rows, 1), generator=gen)
            stride = torch.randint(1, 3, (rows, 1), generator=gen)
            seq = (first + stride * torch.arange(length + 1)) % words
            yield step, seq[:, :-1], seq[:, 1:]
