"""Joint training set put together from several speech sources."""
import csv
import os

import torch

SOURCES = {"libri": 7, "tedtalk": 4, "callcenter": 9, "podcast": 3, "lecture": 6, "radio": 5, "meeting": 8, "kids": 2}
FRAMES, BANDS, CLASSES = 10, 12, 5


def write(path, unit):
    rows = []
    for n, (source, share) in enumerate(SOURCES.items()):
        for i in range(share * unit):
            rows.append((f"{source}-{i:04d}", source, (i * 7 + n) % CLASSES))
    with open(path + ".tmp", "w", newline="") as f:
        csv.writer(f).writerows(rows)
    os.replace(path + ".tmp", path)


class Manifest:
    def __init__(self, path):
        with open(path, newline="") as f:
            self.rows = [(utt, source, int(label)) for utt, source, label in csv.reader(f)]
        self.sources = list({source for _, source, _ in self.rows})

    def subset(self, source, rank, world):
        rows = [r for r in self.rows if r[1] == source]
        return rows[rank: len(rows) // world * world: world]


def features(rows, step_seed):
    g = torch.Generator().manual_seed(step_seed)
    proto = torch.randn(CLASSES, FRAMES, BANDS, generator=torch.Generator().manual_seed(9))
    y = torch.tensor([label for _, _, label in rows])
    tilt = torch.tensor([len(source) * 0.05 for _, source, _ in rows]).view(-1, 1, 1)
    return proto[y] + tilt + 0.8 * torch.randn(len(rows), FRAMES, BANDS, generator=g), y
