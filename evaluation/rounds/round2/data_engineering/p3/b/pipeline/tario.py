"""Plain tar shards: members that share a basename form one sample."""
import io
import os
import tarfile

import numpy as np


def _add(tar, name, payload):
    info = tarfile.TarInfo(name)
    info.size = len(payload)
    tar.addfile(info, io.BytesIO(payload))


def write_shards(folder, n_shards, per_shard, dim, vocab, seed):
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(vocab, dim)).astype(np.float32)
    for s in range(n_shards):
        with tarfile.open(os.path.join(folder, f"pairs-{s:05d}.tar"), "w") as tar:
            for k in range(per_shard):
                words = rng.integers(0, vocab, size=4)
                image = centers[words].mean(0) + 0.1 * rng.normal(size=dim).astype(np.float32)
                buf = io.BytesIO()
                np.save(buf, image.astype(np.float32))
                _add(tar, f"{s:05d}{k:05d}.npy", buf.getvalue())
                _add(tar, f"{s:05d}{k:05d}.txt", " ".join(map(str, words)).encode())


def iter_tar(path):
    key, sample = None, {}
    with tarfile.open(path) as tar:
        for member in tar:
            stem, ext = member.name.rsplit(".", 1)
            if stem != key and sample:
                yield sample
                sample = {}
            key = stem
            sample[ext] = tar.extractfile(member).read()
    if sample:
        yield sample
