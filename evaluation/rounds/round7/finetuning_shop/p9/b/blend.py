"""Weighted blend of the customer's data sets."""
import torch

VOCAB, LENGTH = 90, 12


def make_source(spec, k):
    g = torch.Generator().manual_seed(40 + k)
    start = torch.randint(0, VOCAB, (spec["n"], 1), generator=g)
    return (start + (k + 1) * torch.arange(LENGTH)) % VOCAB


class Blend:
    def __init__(self, specs, samples_per_epoch):
        self.sources = [make_source(s, k) for k, s in enumerate(specs)]
        self.weights = torch.tensor([s["weight"] for s in specs])
        self.samples_per_epoch = samples_per_epoch

    def plan(self, epoch):
        """The same list of (source, row) on every rank."""
        g = torch.Generator().manual_seed(1000 + epoch)
        src = torch.multinomial(self.weights, self.samples_per_epoch, replacement=True, generator=g)
        rows = torch.rand(self.samples_per_epoch, generator=g)
        return [(int(s), int(r * len(self.sources[int(s)]))) for s, r in zip(src, rows)]

    def batches(self, epoch, batch_size, topo):
        todo = self.plan(epoch)[topo.data_rank::topo.data_parallel]
        for i in range(0, len(todo), batch_size):
            part = todo[i:i + batch_size]
            yield torch.stack([self.sources[s][r] for s, r in part]), part
