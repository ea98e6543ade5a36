"""Differentiable-ish augmentations for both real and generated images."""
import random

import torch


def jitter(img, rng):
    return img * rng.uniform(0.8, 1.2)


def shift(img, rng):
    return torch.roll(img, (rng.randint(-2, 2), rng.randint(-2, 2)), dims=(-2, -1))


def cutout(img, rng):
    n = img.size(-1) // 4
    y = rng.randint(0, img.size(-2) - n)
    x = rng.randint(0, img.size(-1) - n)
    out = img.clone()
    out[..., y:y + n, x:x + n] = 0.0
    return out


class AugmentPipe:
    """Applies each op with probability p; p is raised as the critic gets stronger."""

    def __init__(self, seed, p=0.4, ops=(jitter, shift, cutout)):
        self.rng = random.Random(seed)
        self.p = p
        self.ops = ops

    def __call__(self, batch):
        out = []
        for img in batch:
            for op in self.ops:
                if self.rng.random() < self.p:
                    img = op(img, self.rng)
            out.append(img)
        return torch.stack(out)
