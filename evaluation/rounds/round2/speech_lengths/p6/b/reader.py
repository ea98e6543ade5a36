import logging
import os
import random
import struct

import numpy as np
import torch

HEADER = struct.Struct("<IHH")  # payload bytes, frames, labels
DIM = 13


def write_shards(root, num_shards, records):
    """The recipe downloads these; here they are made on the spot."""
    os.makedirs(root, exist_ok=True)
    for s in range(num_shards):
        rng = np.random.RandomState(s)
        with open(os.path.join(root, f"shard_{s:03d}.rec"), "wb") as f:
            for r in range(records):
                frames = int(rng.randint(30, 120))
                labels = rng.randint(1, 12, size=max(1, frames // 12)).astype(np.uint8)
                feats = rng.randn(frames, DIM).astype("<f4")
                body = labels.tobytes() + feats.tobytes()
                if s == 5 and r == records - 3:
                    # the upload of this one was cut, as it happens
                    body = body[: len(body) // 2 + 1]
                f.write(HEADER.pack(len(body), frames, len(labels)) + body)


def parse(body, frames, labels):
    y = np.frombuffer(body[:labels], dtype=np.uint8).astype(np.int64)
    x = np.frombuffer(body[labels:], dtype="<f4").reshape(frames, DIM)
    return torch.from_numpy(x.copy()), torch.from_numpy(y)


class ShardStream:
    """Endless: goes over its shards again and again, in another order every time."""

    def __init__(self, paths, max_frames, seed):
        self.paths, self.max_frames, self.seed = list(paths), max_frames, seed

    def records(self, path):
        with open(path, "rb") as f:
            while True:
                head = f.read(HEADER.size)
                if len(head) < HEADER.size:
                    return
                size, frames, labels = HEADER.unpack(head)
                body = f.read(size)
                try:
                    yield parse(body, frames, labels)
                except ValueError as e:
                    logging.warning("%s: skipped a record: %s", os.path.basename(path), e)

    def samples(self):
        rng = random.Random(self.seed)
        while True:
            order = rng.sample(self.paths, len(self.paths))
            for path in order:
                yield from self.records(path)

    def __iter__(self):
        cur, longest = [], 0
        for x, y in self.samples():
            if cur and max(longest, len(x)) * (len(cur) + 1) > self.max_frames:
                yield self.collate(cur)
                cur, longest = [], 0
            cur.append((x, y))
            longest = max(longest, len(x))

    @staticmethod
    def collate(samples):
        samples.sort(key=lambda s: -len(s[0]))
        feats = torch.nn.utils.rnn.pad_sequence([s[0] for s in samples], batch_first=True)
        return (
            feats,
            torch.tensor([len(s[0]) for s in samples]),
            torch.cat([s[1] for s in samples]),
            torch.tensor([len(s[1]) for s in samples]),
        )
