"""Synthetic detection set: one jsonl line per image, boxes in pixels."""
import json
import os

import numpy as np
import torch

SIZE = 32
NUM_CLASSES = 4


def write_annotations(path, n_images=96, seed=5):
    rng = np.random.default_rng(seed)
    with open(path + ".tmp", "w") as f:
        for i in range(n_images):
            boxes = []
            for _ in range(int(rng.integers(1, 4))):
                w, h = rng.integers(4, 16, size=2)
                x, y = rng.integers(0, SIZE - 16, size=2)
                boxes.append([int(x), int(y), int(x + w), int(y + h), int(rng.integers(NUM_CLASSES))])
            if i % 3 == 1 and i < 48:
                boxes = [[b[0], b[1], b[0] + 2, b[1] + 2, b[4]] for b in boxes]
            f.write(json.dumps({"id": i, "boxes": boxes}) + "\n")
    os.replace(path + ".tmp", path)


def read_annotations(path):
    with open(path) as f:
        return [json.loads(line) for line in f]


def large_enough(box, min_side):
    return box[2] - box[0] >= min_side and box[3] - box[1] >= min_side


def clean(records, min_side):
    kept = []
    for r in records:
        boxes = [b for b in r["boxes"] if large_enough(b, min_side)]
        if boxes:
            kept.append({"id": r["id"], "boxes": boxes})
    return kept


def split(records, rank, world):
    per_rank = len(records) // world
    return records[rank: per_rank * world: world]


def load_split(path, rank, world, min_side=4):
    records = clean(read_annotations(path), min_side)
    records = split(records, rank, world)
    return BoxDataset(records)


class BoxDataset(torch.utils.data.Dataset):
    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, i):
        rec = self.records[i]
        g = torch.Generator().manual_seed(rec["id"])
        img = torch.randn(3, SIZE, SIZE, generator=g) * 0.1
        heat = torch.zeros(NUM_CLASSES, SIZE // 4, SIZE // 4)
        wh = torch.zeros(2, SIZE // 4, SIZE // 4)
        for x0, y0, x1, y1, c in rec["boxes"]:
            img[c % 3, y0:y1, x0:x1] += 1.0 + 0.5 * (c // 3)
            cx, cy = (x0 + x1) // 8, (y0 + y1) // 8
            heat[c, cy, cx] = 1.0
            wh[:, cy, cx] = torch.tensor([x1 - x0, y1 - y0]) / SIZE
        return img, heat, wh
