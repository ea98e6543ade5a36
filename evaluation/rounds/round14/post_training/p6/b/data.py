import torch


class TokenStream:
    """Infinite stream of a synthetic domain; `skip` makes a resumed stream continue where it stopped."""

    STRIDES = {"general": (1, 2, 3, 5), "medical": (7, 11)}

    def __init__(self, domain, vocab, batch, seq, seed, rank):
        self.strides = torch.tensor(self.STRIDES[domain])
        self.vocab, self.batch, self.seq = vocab, batch, seq
        self.gen = torch.Generator().manual_seed(seed * 1000 + rank)

    def skip(self, n):
        for _ in range(n):
            self.next()

    def next(self):
        start = torch.randint(0, self.vocab, (self.batch, 1), generator=self.gen)
        pick = torch.randint(0, len(self.strides), (self.batch, 1), generator=self.gen)
        return (start + self.strides[pick] * torch.arange(self.seq + 1)) % self.vocab
