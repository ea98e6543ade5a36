"""Training passes that end in an exception and lose nothing: tried again, left by the program's own word, too large."""

import torch
from _job import STEPS, batch, begin, blocks, end
from torch import Tensor, nn

LABEL = {"verdict": "PASS"}


class Skip(Exception):
    pass


class Moody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = blocks()
        self.mood = ""

    def forward(self, features: Tensor) -> Tensor:
        mood, self.mood = self.mood, ""
        if mood == "narrow":
            return self.inner(features[:, :8])
        if mood == "large":
            return self.inner(torch.empty(1 << 50))
        if mood == "skip":
            raise Skip
        return self.inner(features)


begin()
model = Moody()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(2 * STEPS):
    features = batch()
    model.mood = ("", "narrow", "large", "skip")[step % 4]
    try:
        try:
            loss = model(features).square().mean()
        except RuntimeError as error:
            if "allocate" in str(error):
                continue
            loss = model(features).square().mean()
    except Skip:
        continue
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
features = batch()
loss = model(features).sum()
loss.backward()
try:
    loss.backward()
except RuntimeError:
    model(features).sum().backward()
end()
