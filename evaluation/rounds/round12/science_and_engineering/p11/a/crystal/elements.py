import torch.distributed as dist


class ElementTable:
    """Numbers the chemical elements; the same numbering on every rank."""

    def __init__(self, symbols):
        self.number = {s: i for i, s in enumerate(symbols)}

    def __len__(self):
        return len(self.number)

    def encode(self, kinds):
        return [self.number[k] for k in kinds]

    @classmethod
    def from_structures(cls, structures):
        seen = sorted({k for s in structures for k in s["kinds"]})
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, seen)
        return cls(sorted(set().union(*found)))
