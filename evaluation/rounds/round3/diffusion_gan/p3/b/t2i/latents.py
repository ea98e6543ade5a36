import os

import torch


def prepare_images(data_dir, n, size=32):
    """Render the image/caption pairs once; later callers read the file."""
    path = os.path.join(data_dir, f"pairs_{n}_{size}.pt")
    if not os.path.exists(path):
        os.makedirs(data_dir, exist_ok=True)
        g = torch.Generator().manual_seed(0)
        captions = torch.randint(1, 64, (n, 8), generator=g)
        base = torch.rand(n, 3, 1, 1, generator=g)
        ramp = torch.linspace(0, 1, size)
        images = base * ramp[None, None, :, None] + (1 - base) * ramp[None, None, None, :]
        torch.save({"images": images * 2 - 1, "captions": captions}, path + ".tmp")
        os.replace(path + ".tmp", path)
    blob = torch.load(path)
    return blob["images"], blob["captions"]


class LatentCache:
    """Encodes this process's share of the images and keeps the latents in memory."""

    def __init__(self, launcher, vae, batch=16):
        self.launcher, self.vae, self.batch = launcher, vae, batch
        self.latents = self.captions = self.mean = self.std = None

    def __len__(self):
        return len(self.latents)

    @property
    def shape(self):
        return tuple(self.latents.shape[1:])

    @torch.no_grad()
    def build(self, images, captions):
        k, n = self.launcher.process_index, self.launcher.num_processes
        images, captions = images[k::n], captions[k::n]
        self.latents = torch.cat([self.vae.encode(b) for b in images.split(self.batch)])
        self.captions = captions
        self._fit()
        return self

    def _fit(self):
        x = self.latents.double()
        count = torch.tensor(float(x.numel() / x.shape[1]), dtype=torch.float64)
        sums = torch.stack([x.sum((0, 2, 3)), x.square().sum((0, 2, 3))])
        sums, count = self.launcher.reduce_sum(sums), self.launcher.reduce_sum(count)
        mean = sums[0] / count
        var = sums[1] / count - mean.square()
        self.mean = mean.float()[None, :, None, None]
        self.std = var.clamp(min=1e-6).sqrt().float()[None, :, None, None]

    def normalise(self, z):
        return (z - self.mean) / self.std

    def denormalise(self, z):
        return z * self.std + self.mean
