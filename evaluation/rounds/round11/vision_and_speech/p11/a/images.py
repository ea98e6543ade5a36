"""A shard of 'encoded' images: run-length coded rows, decoded on the fly."""
import numpy as np


class DecodeError(ValueError):
    pass


def encode(img):
    flat = img.ravel()
    cut = np.flatnonzero(np.diff(flat)) + 1
    starts = np.concatenate([[0], cut])
    runs = np.diff(np.concatenate([starts, [flat.size]]))
    return flat[starts].astype(np.uint8).tobytes(), runs.astype(np.uint16).tobytes()


def decode(blob, size):
    values = np.frombuffer(blob[0], dtype=np.uint8)
    runs = np.frombuffer(blob[1], dtype=np.uint16)
    flat = np.repeat(values, runs)
    if flat.size != size * size:
        raise DecodeError(f"decoded {flat.size} pixels, expected {size * size}")
    return flat.reshape(size, size)


def make_shard(rank, n, size=16, classes=4):
    rng = np.random.default_rng(40 + rank)
    shard = []
    for i in range(n):
        y = int(rng.integers(classes))
        img = np.zeros((size, size), dtype=np.uint8)
        r, c = rng.integers(0, size // 2 - 2, 2)
        r, c = r + (y // 2) * size // 2, c + (y % 2) * size // 2
        img[r:r + 3, c:c + 3] = 200
        values, runs = encode(img)
        if rank == 1 and i == 37:
            runs = runs[:-2]
        shard.append(((values, runs[: len(values) * 2]) if len(runs) // 2 == len(values)
                      else (values[: len(runs) // 2], runs), y))
    return shard
