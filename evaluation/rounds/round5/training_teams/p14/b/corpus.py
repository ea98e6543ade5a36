import pathlib
import random

import torch


def write_corpus(root, files=12, lines=40, seed=4):
    root = pathlib.Path(root)
    root.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for f in range(files):
        rows = []
        for _ in range(lines):
            a, b = rng.randrange(10), rng.randrange(1, 4)
            rows.append(" ".join(str((a + i * b + (f % 3)) % 20) for i in range(14)))
        (root / f"{f:04d}.txt").write_text("\n".join(rows))


class FileStream:
    """Endless batches from this process's files, in a new order in each pass."""

    def __init__(self, root, spec, batch_size):
        files = sorted(pathlib.Path(root).glob("*.txt"))
        self.files = files[spec.index :: spec.count]
        self.rng = random.Random(spec.seed)
        self.batch_size = batch_size
        self.passes = 0

    def __iter__(self):
        rows = []
        while True:
            order = self.rng.sample(self.files, len(self.files))
            for path in order:
                lines = path.read_text().split("\n")
                self.rng.shuffle(lines)
                for line in lines:
                    rows.append([int(t) for t in line.split()])
                    if len(rows) == self.batch_size:
                        yield torch.tensor(rows)
                        rows = []
            self.passes += 1
