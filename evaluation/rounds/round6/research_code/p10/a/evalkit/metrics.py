import torch
import torch.distributed as dist


class Perplexity:
    def __init__(self):
        self.nll, self.tokens = 0.0, 0

    def add(self, token_nll):
        self.nll += token_nll.sum().item()
        self.tokens += token_nll.numel()

    def reduce(self):
        t = torch.tensor([self.nll, float(self.tokens)], dtype=torch.float64)
        dist.all_reduce(t)
        return torch.exp(t[0] / t[1]).item()


def gather_ragged(rows):
    """Concatenate 1-d tensors of different lengths from all ranks."""
    world = dist.get_world_size()
    n = torch.tensor([rows.numel()])
    sizes = [torch.zeros_like(n) for _ in range(world)]
    dist.all_gather(sizes, n)
    most = int(max(sizes))
    padded = rows.new_zeros(most)
    padded[: rows.numel()] = rows
    out = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(out, padded)
    return torch.cat([o[: int(s)] for o, s in zip(out, sizes)])
