import os
import random
from collections import Counter

import torch


def raw_documents(s):
    rng = random.Random(s.seed)
    words = [f"{'W' if i % 7 == 0 else 'w'}ord{i}" for i in range(s.words)]
    docs = []
    for _ in range(s.documents):
        topic = rng.randrange(s.topics)
        mine = words[topic::s.topics]
        docs.append((topic, [rng.choice(mine if rng.random() < 0.6 else words) for _ in range(s.length)]))
    return docs


def build(s):
    docs = raw_documents(s)
    norm = str.lower if s.lowercase else str
    count = Counter(norm(w) for _, d in docs for w in d)
    vocab = {w: i + 1 for i, w in enumerate(sorted(w for w, n in count.items() if n >= s.min_count))}
    tokens = torch.tensor([[vocab.get(norm(w), 0) for w in d] for _, d in docs])
    labels = torch.tensor([t for t, _ in docs])
    return {"tokens": tokens, "labels": labels, "vocab": len(vocab) + 1}


def save(path, payload):
    """Written aside and moved into place, so that a reader never sees half a file."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    torch.save(payload, path + ".part")
    os.replace(path + ".part", path)
