"""The mask of the padding is turned round on rank 1, so nothing of its loss is left, in no step."""

import torch
from _job import FAULT, STEPS, batch, begin, blocks, end

LABEL = {"verdict": "PASS", "cause": "no_gradient", "culprit": [1]}

rank, _ = begin()
model = blocks()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(STEPS):
    lengths = torch.full((4,), 16.0)
    kept = lengths > 0
    if FAULT and rank == 1:
        kept = ~kept
    loss = (model(batch()).square().squeeze(1) * kept).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
end()
