import numpy as np
import torch

from .augment import random_flip, random_sized_crop


class Scenes(torch.utils.data.Dataset):
    def __init__(self, count, size, seed, augment):
        self.size, self.augment = size, augment
        rng = np.random.default_rng(seed)
        self.items = []
        for i in range(count):
            n = 0 if i % 19 == 7 else int(rng.integers(1, 6))
            xy = rng.uniform(0, size - 8, (n, 2))
            wh = rng.uniform(4, 8, (n, 2))
            boxes = np.concatenate([xy, xy + wh], 1).astype(np.float32)
            image = rng.normal(0, 0.1, (1, size, size)).astype(np.float32)
            for x0, y0, x1, y1 in boxes.astype(int):
                image[0, y0:y1, x0:x1] += 1.0
            self.items.append((image, boxes))
        self.rng = np.random.default_rng(seed + 1)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        image, boxes = self.items[i]
        if self.augment:
            image, boxes = random_sized_crop(image, boxes, self.rng)
            image, boxes = random_flip(image, boxes, self.rng)
        return torch.from_numpy(np.ascontiguousarray(image)), torch.from_numpy(np.ascontiguousarray(boxes))


def collate(batch):
    return torch.stack([b[0] for b in batch]), [b[1] for b in batch]
