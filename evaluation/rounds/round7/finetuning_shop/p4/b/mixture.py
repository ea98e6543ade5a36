"""Mixture of captioning data (with image patches) and plain text chats."""
import torch

PATCHES, PATCH_DIM = 6, 20


class Mixture:
    def __init__(self, n, vocab, seq, image_share, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, vocab, (n, seq), generator=g)
        self.patches = torch.randn(n, PATCHES, PATCH_DIM, generator=g)
        self.has_image = torch.rand(n, generator=g) < image_share

    def __len__(self):
        return self.ids.shape[0]

    def batch(self, idx):
        return self.ids[idx], self.patches[idx], self.has_image[idx]


class ShardedBatches:
    def __init__(self, data, batch_size, rank, world, seed=0):
        self.data, self.batch_size = data, batch_size
        self.rank, self.world, self.seed = rank, world, seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(self.data), generator=g)
        order = order[: len(order) // self.world * self.world][self.rank::self.world]
        for idx in order.split(self.batch_size):
            yield self.data.batch(idx)
