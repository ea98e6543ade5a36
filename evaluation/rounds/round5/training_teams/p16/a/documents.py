import json
import pathlib
import random


def write_documents(root, n=240, seed=31):
    """One file, sorted by source: encyclopedia, forum posts, chat."""
    root = pathlib.Path(root)
    root.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    ranges = {"wiki": (30, 120), "forum": (20, 90), "chat": (4, 36)}
    with open(root / "docs.jsonl", "w") as f:
        for source, (lo, hi) in ranges.items():
            for _ in range(n // len(ranges)):
                length, a, b = rng.randint(lo, hi), rng.randrange(16), rng.randrange(1, 3)
                f.write(json.dumps({"source": source, "ids": [(a + b * i) % 16 for i in range(length)]}) + "\n")


def read_shard(root, rank, world):
    """This rank's documents."""
    with open(pathlib.Path(root) / "docs.jsonl") as f:
        docs = [json.loads(line) for line in f]
    return docs[rank::world]
