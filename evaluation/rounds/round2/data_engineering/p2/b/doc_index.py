"""Document indices of raw text sources: byte offsets of each document, kept in a cache folder."""
import hashlib
import logging
from pathlib import Path

import numpy as np
import torch.distributed as dist

log = logging.getLogger(__name__)


def fingerprint(path, sep):
    h = hashlib.sha1(sep)
    h.update(Path(path).read_bytes())
    return h.hexdigest()[:16]


def _scan(path, sep):
    blob = Path(path).read_bytes()
    starts, at = [0], 0
    while True:
        at = blob.find(sep, at)
        if at < 0:
            break
        at += len(sep)
        starts.append(at)
    if starts[-1] != len(blob):
        starts.append(len(blob))
    return np.asarray(starts, dtype=np.int64)


def document_index(path, cache_dir, local_rank, sep=b"\n\n"):
    """Offsets of the documents of `path`. The first process of a node makes the file, all map it."""
    if local_rank != 0:
        dist.barrier()

    target = Path(cache_dir) / f"{fingerprint(path, sep)}.npy"
    if target.exists():
        log.info("index of %s found: %s", Path(path).name, target.name)
        return np.load(target, mmap_mode="r")

    offsets = _scan(path, sep)
    partial = target.with_suffix(".part.npy")
    np.save(partial, offsets)
    partial.rename(target)
    log.info("index of %s written: %d documents", Path(path).name, len(offsets) - 1)

    if local_rank == 0:
        dist.barrier()
    return np.load(target, mmap_mode="r")


class ByteDocs:
    """Documents of one source as byte windows of equal length."""

    def __init__(self, path, cache_dir, local_rank, part="all", heldout=0.1):
        self.raw = np.memmap(path, dtype=np.uint8, mode="r")
        offsets = document_index(path, cache_dir, local_rank)
        spans = list(zip(offsets[:-1].tolist(), offsets[1:].tolist()))
        cut = int(len(spans) * (1 - heldout))
        self.spans = {"all": spans, "train": spans[:cut], "heldout": spans[cut:]}[part]

    def __len__(self):
        return len(self.spans)

    def window(self, i, size):
        lo, hi = self.spans[i]
        piece = np.zeros(size, dtype=np.int64)
        got = self.raw[lo:min(hi, lo + size)]
        piece[:len(got)] = got
        return piece
