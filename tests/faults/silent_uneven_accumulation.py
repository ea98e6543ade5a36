"""Rank 1 makes an optimizer step after every micro-batch, and rank 0 after every second one."""

from _job import FAULT, batch, begin, blocks, end
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}
MICRO_BATCHES = 32


def train(rank: int) -> None:
    accumulate = 1 if FAULT and rank == 1 else 2
    model = DistributedDataParallel(blocks())
    optimizer = AdamW(model.parameters(), lr=0.02)
    for micro in range(MICRO_BATCHES):
        (model(batch()).square().mean() / accumulate).backward()
        if micro % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()


train(begin()[0])
end()
