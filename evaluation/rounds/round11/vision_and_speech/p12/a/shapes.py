import torch


def batch(gen, n, classes, size=16):
    """Oriented gratings; the class is the orientation bin."""
    y = torch.randint(0, classes, (n,), generator=gen)
    ang = (y + 0.5 * torch.rand(n, generator=gen)) * torch.pi / classes
    ax = torch.arange(size) / size * 12
    phase = torch.rand(n, 1, 1, generator=gen) * 6.28
    wave = ax[None, :, None] * ang.sin()[:, None, None] + ax[None, None, :] * ang.cos()[:, None, None]
    img = torch.sin(wave + phase) + 0.3 * torch.randn(n, size, size, generator=gen)
    return img.unsqueeze(1), y


def augment(img):
    shift = torch.randint(-2, 3, (2,)).tolist()
    return torch.roll(img, shift, dims=(-2, -1)) * (0.9 + 0.2 * torch.rand(()))
