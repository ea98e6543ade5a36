"""Nothing is wrong: a cache that fills in the first steps and then serves, and a file that is mapped bit by bit."""

import tempfile

import torch
from _job import begin, blocks, end

LABEL = {"verdict": "PASS"}

begin()
model = blocks(1, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
cache: dict[int, torch.Tensor] = {}
with tempfile.NamedTemporaryFile() as file:
    file.truncate(64 << 20)
    mapped = torch.from_file(file.name, shared=True, size=16 << 20)
    for step in range(120):
        part = mapped.view(128, -1)[step]
        key = step % 30
        if key not in cache:
            cache[key] = torch.randn(8192, 64) + part[:64]
        model(cache[key][:256]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        part.sum()
end()
