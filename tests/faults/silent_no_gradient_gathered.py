"""The text features of all ranks are gathered without a gradient, and this rank's own are not put back."""

import torch
import torch.distributed as dist
from _job import FAULT, STEPS, Trainer, begin, end
from torch import Tensor, nn

LABEL = {"verdict": "PASS", "cause": "no_gradient"}


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(16, 8)
        self.text = nn.Linear(16, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        image, text = self.image(inputs), self.text(inputs.flip(1))
        texts = [torch.empty_like(text) for _ in range(dist.get_world_size())]
        dist.all_gather(texts, text)
        if not FAULT:
            texts[dist.get_rank()] = text
        labels = torch.arange(len(image)) + dist.get_rank() * len(image)
        return nn.functional.cross_entropy(image @ torch.cat(texts).T, labels)


begin()
trainer = Trainer(TwoTowers(), find_unused_parameters=FAULT)
for _ in range(STEPS):
    trainer.step()
end()
