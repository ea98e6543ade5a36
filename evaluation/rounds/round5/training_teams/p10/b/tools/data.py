import torch


def shapes(n, seed):
    """8x8 pictures of bars and crosses with noise."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    x = torch.zeros(n, 1, 8, 8)
    pos = torch.randint(2, 6, (n, 2), generator=g)
    for i in range(n):
        if y[i] in (0, 2):
            x[i, 0, pos[i, 0]] = 1
        if y[i] in (1, 2):
            x[i, 0, :, pos[i, 1]] = 1
        if y[i] == 3:
            x[i, 0].fill_diagonal_(1)
    return x + 0.3 * torch.randn(n, 1, 8, 8, generator=g), y
