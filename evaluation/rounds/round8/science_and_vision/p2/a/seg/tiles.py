"""Raw tiles (a length header and packed bytes) and the dataset that reads them."""
import struct

import numpy as np
import torch
from torch.utils.data import Dataset

from .cache import DiskCache

IGNORE = 255


class TruncatedTile(ValueError):
    pass


def write_raw_tiles(folder, count, size, classes, seed):
    rng = np.random.default_rng(seed)
    for i in range(count):
        mask = np.zeros((size, size), np.uint8)
        for c in range(1, classes):
            y, x = rng.integers(0, size - 4, 2)
            mask[y:y + 6, x:x + 6] = c
        image = rng.integers(0, 60, (3, size, size)).astype(np.uint8)
        image += (mask * 60).astype(np.uint8)[None]
        body = image.tobytes() + mask.tobytes()
        blob = struct.pack("<II", size, len(body)) + body
        if i == 13:
            blob = blob[: len(blob) // 2]
        (folder / f"tile_{i:04d}.bin").write_bytes(blob)


def decode(blob):
    size, length = struct.unpack("<II", blob[:8])
    body = blob[8:]
    if len(body) != length:
        raise TruncatedTile(f"{len(body)} bytes of {length}")
    flat = np.frombuffer(body, np.uint8)
    return flat.reshape(4, size, size)


class TileDataset(Dataset):
    def __init__(self, work, count):
        self.raw = work / "raw"
        self.cache = DiskCache(work / "cache")
        self.count = count
        self.size = decode((self.raw / "tile_0000.bin").read_bytes()).shape[-1]

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        name = f"tile_{i:04d}"
        try:
            tile = self.cache.get(name, lambda: decode((self.raw / f"{name}.bin").read_bytes()))
        except TruncatedTile:
            tile = np.zeros((4, self.size, self.size), np.uint8)
            tile[3] = IGNORE
        image = torch.from_numpy(tile[:3].astype(np.float32)) / 255.0
        return image, torch.from_numpy(tile[3].astype(np.int64))
