"""An encoder's output is detached on its way to the head; find_unused_parameters hides that it never learns."""

import torch
from _job import FAULT, STEPS, Trainer, begin, end
from torch import Tensor, nn

LABEL = {"verdict": "PASS", "cause": "no_gradient"}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        features = torch.relu(self.encoder(inputs))
        return self.head(features.detach() if FAULT else features)


begin()
trainer = Trainer(Classifier(), find_unused_parameters=FAULT)
for _ in range(STEPS):
    trainer.step()
end()
