import json
import pathlib
import random


def write_shards(root, n_files=4, per_file=64, seed=9):
    """Line-wise JSON records: features as a list of numbers and a label."""
    root = pathlib.Path(root)
    root.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for f in range(n_files):
        lines = []
        for i in range(per_file):
            label = rng.randrange(3)
            feats = [round(rng.gauss(label - 1, 1.0), 3) for _ in range(12)]
            lines.append(json.dumps({"feats": feats, "label": label}))
        if f == 3:
            lines[37] = lines[37][: len(lines[37]) // 2]
        (root / f"part-{f:03d}.jsonl").write_text("\n".join(lines) + "\n")


def shard_paths(root, rank, world):
    return sorted(pathlib.Path(root).glob("part-*.jsonl"))[rank::world]
