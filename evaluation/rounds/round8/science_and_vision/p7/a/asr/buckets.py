"""Group utterances by length; batches hold at most max_frames padded frames."""
import random

import torch
from torch.nn.utils.rnn import pad_sequence

EDGES = [10, 15, 20, 25, 32, 40, 55, 80]


def bucket_name(frames):
    for lo, hi in zip([0] + EDGES, EDGES):
        if frames < hi:
            return f"{lo:02d}-{hi:02d}"
    raise ValueError(f"utterance of {frames} frames")


class BucketedBatches:
    def __init__(self, corpus, max_frames, rank, world):
        self.rank, self.world = rank, world
        self.names = sorted({bucket_name(u.frames) for u in corpus})
        self.batches = {name: [] for name in self.names}
        for name in self.names:
            members = [u for u in corpus if bucket_name(u.frames) == name]
            longest = max(u.frames for u in members)
            size = max(1, max_frames // longest)
            groups = [members[i:i + size] for i in range(0, len(members), size)]
            while len(groups) % world:
                groups.append(groups[0])
            self.batches[name] = groups

    def order(self, epoch):
        """Short ones first at the start (sortagrad), mixed afterwards."""
        names = list(self.names)
        if epoch > 0:
            random.Random(epoch).shuffle(names)
        return names

    def of(self, name):
        for group in self.batches[name][self.rank::self.world]:
            feats = pad_sequence([u.feats for u in group], batch_first=True)
            labels = pad_sequence([u.labels for u in group], batch_first=True)
            mask = pad_sequence([torch.ones(u.frames) for u in group], batch_first=True)
            yield feats, labels, mask
