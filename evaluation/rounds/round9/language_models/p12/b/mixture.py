import torch

DOMAINS = ("books", "code", "forum", "web")
VOCAB = 64


class Mixture:
    """Documents drawn by domain weight; each domain has its own token stride."""

    def __init__(self, weights, rank, batch, length):
        self.weights = torch.tensor([weights[d] for d in DOMAINS])
        self.g = torch.Generator().manual_seed(400 + rank)
        self.batch, self.length = batch, length

    def draw(self):
        domain = torch.multinomial(self.weights, self.batch, replacement=True, generator=self.g)
        start = torch.randint(VOCAB, (self.batch, 1), generator=self.g)
        ids = (start + (domain[:, None] + 1) * torch.arange(self.length)) % VOCAB
        return ids, domain
