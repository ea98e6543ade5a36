"""Document shards. One manifest line is one file; ranks take them round robin."""
import random

import torch

LENGTHS = {"chat": (8, 30), "web": (16, 56), "books": (90, 400)}
SOURCES = tuple(LENGTHS)


def _read_shard(entry, vocab, seed):
    rng = random.Random(f"{seed}/{entry['id']}")
    docs = []
    for source in SOURCES:
        low, high = LENGTHS[source]
        for _ in range(entry[source]):
            length = rng.randint(low, high)
            start, stride = rng.randrange(vocab), rng.choice((1, 2, 3, 5))
            docs.append((source, [(start + i * stride) % vocab for i in range(length)]))
    rng.shuffle(docs)
    return docs


def collate(docs, seq_len):
    tokens = torch.zeros(len(docs), seq_len + 1, dtype=torch.long)
    mask = torch.zeros(len(docs), seq_len)
    for row, (_, ids) in enumerate(docs):
        ids = ids[: seq_len + 1]
        tokens[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids) - 1] = 1.0
    return {
        "tokens": tokens,
        "mask": mask,
        "meta": [(source, len(ids)) for source, ids in docs],
    }


def shard_stream(cfg, rank, world):
    """Micro batches of this rank, shard after shard."""
    per = cfg["docs_per_micro"]
    for entry in cfg["shards"][rank::world]:
        docs = _read_shard(entry, cfg["vocab"], cfg["seed"])
        for i in range(0, len(docs) - per + 1, per):
            yield collate(docs[i : i + per], cfg["seq_len"])
