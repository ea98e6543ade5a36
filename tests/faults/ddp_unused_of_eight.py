"""Eight ranks; on rank 5 the second batch has no image, so its adapter gets no gradient."""

import torch
from _job import FAULT, begin, end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "FAIL", "cause": "rank_conditional_unused_params", "culprit": [5], "step": 2, "ranks": 8}


class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = nn.EmbeddingBag(32, 8)
        self.adapter = nn.Linear(5, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, words, image=None):
        hidden = self.text(words)
        if image is not None:
            hidden = hidden + self.adapter(image)  # to blame
        return self.out(hidden)


torch.set_num_threads(1)
rank, _ = begin()
model = DistributedDataParallel(Captioner())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 5):
    image = None if FAULT and (rank, step) == (5, 2) else torch.randn(3, 5)
    model(torch.randint(32, (3, 4)), image).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
end()
