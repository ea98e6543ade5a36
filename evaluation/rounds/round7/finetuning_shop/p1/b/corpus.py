"""Instruction corpus: one json object per line, {"source": ..., "ids": [...]}."""
import json
import os

import numpy as np


def write_corpus(path, n_docs, vocab, seed=11):
    rng = np.random.default_rng(seed)
    sources = ["manual", "chat", "faq"]
    mean = {"manual": 34, "chat": 18, "faq": 10}
    with open(path + ".tmp", "w") as f:
        for i in range(n_docs):
            src = sources[i % 3]
            n = int(np.clip(rng.normal(mean[src], 5), 4, 60))
            ids = rng.integers(3, vocab, size=n).tolist()
            f.write(json.dumps({"source": src, "ids": ids}) + "\n")
    os.replace(path + ".tmp", path)


def read_corpus(path):
    with open(path) as f:
        return [json.loads(line)["ids"] for line in f]
