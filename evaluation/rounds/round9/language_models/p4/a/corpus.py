import torch


class Curriculum:
    """Starts with all domains, then focuses on a shrinking list of them."""

    def __init__(self, vocab, domains, phases):
        self.width, self.domains, self.phases = vocab // domains, domains, phases

    def domains_at(self, step):
        current = self.phases[0][1]
        for start, names in self.phases:
            if step >= start:
                current = names
        return current

    def batch(self, step, rank, size, length):
        g = torch.Generator().manual_seed(7919 * step + rank)
        pool = torch.tensor(self.domains_at(step))
        domain = pool[torch.randint(len(pool), (size, 1), generator=g)]
        inside = (torch.randint(self.width, (size, 1), generator=g) + torch.arange(length)) % self.width
        return domain * self.width + inside
