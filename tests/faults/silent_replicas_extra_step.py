"""Rank 1 repeats its optimizer step after a retry that was not needed; its replica goes its own way from then on."""

from _job import FAULT, batch, begin, blocks, end
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [1]}


def train(rank: int) -> None:
    model = DistributedDataParallel(blocks())
    optimizer = AdamW(model.parameters(), lr=0.02)
    for step in range(1, 8):
        model(batch()).square().mean().backward()
        optimizer.step()
        if step == 3 and (FAULT and rank == 1):
            optimizer.step()
        optimizer.zero_grad()


train(begin()[0])
end()
