"""One of four ranks draws a sample without an annotation, and its dataset raises KeyError."""

import torch
from _job import FAULT, Trainer, begin, end
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LABEL = {"verdict": "FAIL", "cause": "exception", "culprit": [2], "step": 3, "ranks": 4}

begin()
annotations = {f"img{index:02}": index / 40 for index in range(40)}
names = sorted(annotations)
if FAULT:
    del annotations["img22"]


class Annotated(Dataset):
    def __len__(self) -> int:
        return len(names)

    def __getitem__(self, index: int) -> torch.Tensor:
        value = annotations[names[index]]  # to blame
        return torch.full((16,), value)


trainer = Trainer()
data = Annotated()
for samples in DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False)):
    trainer.model(samples).square().mean().backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
end()
