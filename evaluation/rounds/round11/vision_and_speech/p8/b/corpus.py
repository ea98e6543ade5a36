import torch

WORDS, BANDS, FRAMES = 6, 10, 12


def templates():
    return torch.randn(WORDS, FRAMES, BANDS, generator=torch.Generator().manual_seed(77))


def keyword_batch(step, rank, n, noise):
    g = torch.Generator().manual_seed(step * 31 + rank)
    y = torch.randint(0, WORDS, (n,), generator=g)
    gain = 0.5 + torch.rand(n, 1, 1, generator=g)
    x = templates()[y] * gain + noise * torch.randn(n, FRAMES, BANDS, generator=g)
    return x, y
