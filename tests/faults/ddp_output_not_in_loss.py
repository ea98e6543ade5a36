"""Both heads run on every rank, but in step 4 the loss of rank 1 leaves the second one out."""

import torch
from _job import FAULT, begin, end
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "FAIL", "cause": "rank_conditional_unused_params", "culprit": [1], "step": 4}


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(9, 9)
        self.boxes = nn.Linear(9, 4)
        self.classes = nn.Linear(9, 3)

    def forward(self, x):
        features = self.backbone(x).relu()
        return self.boxes(features), self.classes(features)


def loss_of(boxes, classes, empty):
    loss = mse_loss(classes, torch.zeros_like(classes))
    if not empty:
        loss = loss + mse_loss(boxes, torch.ones_like(boxes))  # to blame
    return loss


rank, _ = begin()
model = DistributedDataParallel(Detector())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(1, 7):
    boxes, classes = model(torch.randn(5, 9))
    optimizer.zero_grad()
    loss_of(boxes, classes, empty=FAULT and rank == 1 and step == 4).backward()
    optimizer.step()
end()
