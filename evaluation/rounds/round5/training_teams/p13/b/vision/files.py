import pathlib

import numpy as np

CLASSES = 5


def write_files(root, split, counts, seed):
    """One .npz for each recording session; sessions are of unequal length."""
    root = pathlib.Path(root) / split
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    proto = np.random.default_rng(77).normal(size=(CLASSES, 32))
    for i, n in enumerate(counts):
        y = rng.integers(0, CLASSES, n)
        x = proto[y] + 0.9 * rng.normal(size=(n, 32))
        np.savez(root / f"session_{i:02d}.npz", x=x.astype("float32"), y=y)


def assign(root, split, rank, world):
    """Whole files to ranks, largest first to the rank with the least so far."""
    sizes = []
    for f in sorted((pathlib.Path(root) / split).glob("*.npz")):
        with np.load(f) as z:
            sizes.append((len(z["y"]), f))
    load = [0] * world
    parts = [[] for _ in range(world)]
    for n, f in sorted(sizes, key=lambda s: (-s[0], s[1].name)):
        r = load.index(min(load))
        load[r] += n
        parts[r].append(f)
    return parts[rank], load[rank]
