import torch

SIZE = 16


class Blobs(torch.utils.data.Dataset):
    """One disc per image on a noisy background; mask is the disc."""

    def __init__(self, n, offset, noise):
        self.n, self.offset, self.noise = n, offset, noise

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.offset + i)
        c = torch.randint(4, SIZE - 4, (2,), generator=g)
        r = int(torch.randint(2, 5, (1,), generator=g))
        ax = torch.arange(SIZE)
        mask = ((ax[:, None] - c[0]) ** 2 + (ax[None] - c[1]) ** 2 <= r * r).long()
        img = mask.float() + self.noise * torch.randn(SIZE, SIZE, generator=g)
        return img.unsqueeze(0), mask
