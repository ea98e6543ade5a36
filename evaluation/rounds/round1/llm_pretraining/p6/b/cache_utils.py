"""Tokenised-corpus cache shared by the processes of a job."""
import hashlib
import json
import os
from dataclasses import asdict

import numpy as np
import torch.distributed as dist


def fingerprint(cfg):
    blob = json.dumps(asdict(cfg), sort_keys=True, default=str)
    return hashlib.sha1(blob.encode()).hexdigest()[:16]


def job_store():
    return dist.PrefixStore("corpus", dist.distributed_c10d._get_default_store())


def tokenize(cfg):
    """Byte-pair-ish toy tokeniser: bytes, with the commonest pair merged a few times."""
    rng = np.random.default_rng(cfg.corpus_seed)
    lexicon = ["".join(chr(97 + c) for c in rng.integers(0, 26, rng.integers(2, 8))) for _ in range(50)]
    ids = list(" ".join(lexicon[i] for i in rng.zipf(1.6, cfg.corpus_words) % 50).encode())
    for new in range(128, 128 + cfg.merges):
        pairs = {}
        for p in zip(ids, ids[1:]):
            pairs[p] = pairs.get(p, 0) + 1
        best = max(pairs, key=pairs.get)
        out, i = [], 0
        while i < len(ids):
            if i + 1 < len(ids) and (ids[i], ids[i + 1]) == best:
                out.append(new)
                i += 2
            else:
                out.append(ids[i])
                i += 1
        ids = out
    return np.asarray(ids, dtype=np.uint16)


def load_or_build(cfg, rank):
    """Rank 0 builds the cache, the other ranks map it once it has been announced."""
    store, key = job_store(), fingerprint(cfg)
    path = os.path.join(cfg.cache_dir, f"tokens-{key}.npy")
    if rank == 0:
        if not os.path.exists(path):
            os.makedirs(cfg.cache_dir, exist_ok=True)
            np.save(f"{path}.{os.getpid()}.npy", tokenize(cfg))
            os.replace(f"{path}.{os.getpid()}.npy", path)
        store.set(key, path)
    else:
        store.wait([key])
        path = store.get(key).decode()
    return np.load(path, mmap_mode="r")
