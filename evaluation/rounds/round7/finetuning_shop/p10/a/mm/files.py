"""Captioned pictures as raw files: 4 byte magic, height, width, then the pixels."""
import os
import struct

import numpy as np

MAGIC = b"PIC1"


def write_picture(path, pixels):
    h, w = pixels.shape
    with open(path, "wb") as f:
        f.write(MAGIC + struct.pack("<HH", h, w) + pixels.astype(np.uint8).tobytes())


def read_picture(path):
    with open(path, "rb") as f:
        raw = f.read()
    if raw[:4] != MAGIC:
        raise ValueError(f"{os.path.basename(path)}: not a picture")
    h, w = struct.unpack("<HH", raw[4:8])
    return np.frombuffer(raw[8:], dtype=np.uint8).reshape(h, w)


def write_album(folder, n, seed=31):
    rng = np.random.default_rng(seed)
    os.makedirs(folder, exist_ok=True)
    for i in range(n):
        path = os.path.join(folder, f"{i:04d}.pic")
        write_picture(path, np.full((8, 8), 12 * (i % 20)) + rng.integers(0, 10, (8, 8)))
        if i == 97:
            size = os.path.getsize(path)
            with open(path, "rb+") as f:
                f.truncate(size - 16)
