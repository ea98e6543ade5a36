import torch

CONCEPTS = 16


def pairs(step, rank, n):
    """Image of a concept plus a caption of four of its words."""
    base = torch.Generator().manual_seed(123)
    pictures = torch.randn(CONCEPTS, 1, 12, 12, generator=base)
    vocab = torch.randint(0, 40, (CONCEPTS, 8), generator=base)
    g = torch.Generator().manual_seed(step * 13 + rank)
    k = torch.randperm(CONCEPTS, generator=g)[:n]
    img = pictures[k] + 0.3 * torch.randn(n, 1, 12, 12, generator=g)
    pick = torch.stack([torch.randperm(8, generator=g)[:4] for _ in range(n)])
    return img, vocab[k].gather(1, pick)
