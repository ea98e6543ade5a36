import json
import os
import pathlib

import numpy as np


def settings_key(settings):
    """Short name for everything that decides what the prepared data look like."""
    text = json.dumps(settings, sort_keys=True)
    return "tok-" + format(hash(text) & 0xFFFFFFFFFF, "010x")


def tokenize(settings):
    rng = np.random.default_rng(settings["seed"])
    docs = []
    for _ in range(settings["docs"]):
        start, stride = rng.integers(settings["vocab"]), rng.integers(1, 4)
        ids = (start + stride * np.arange(settings["seq"])) % settings["vocab"]
        noise = rng.random(settings["seq"]) < settings["noise"]
        ids[noise] = rng.integers(settings["vocab"], size=int(noise.sum()))
        docs.append(ids)
    return np.stack(docs).astype("int64")


def prepare(settings, store, rank, root="prepared"):
    """The first process tokenizes, the others go on when it has announced the file."""
    key = settings_key(settings)
    path = pathlib.Path(root) / "tokens.npy"
    if rank == 0:
        path.parent.mkdir(exist_ok=True)
        tmp = path.parent / "tokens.part.npy"
        np.save(tmp, tokenize(settings))
        os.replace(tmp, path)
        store.set(key, str(path))
    else:
        store.wait([key])
    return np.load(store.get(key).decode())
