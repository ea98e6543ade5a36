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
        symbols = [seen]
        dist.broadcast_object_list(symbols, src=0)
        return cls(symbols[0])
