"""A small synthetic set of oxides and intermetallics with formation energies."""
import json
import os

import numpy as np

COMMON = ["O", "Si", "Al", "Fe", "Mg", "Ca", "Ti", "Ni", "Cu", "Zn"]
RARE = ["Yb", "Hf"]
AFFINITY = {s: 0.35 * i - 1.2 for i, s in enumerate(COMMON + RARE)}


def one(rng, number):
    atoms = int(rng.integers(4, 9))
    kinds = [COMMON[k] for k in rng.integers(0, len(COMMON), atoms)]
    if number % 29 == 23:
        kinds[0] = RARE[number // 100 % len(RARE)]
    xyz = rng.uniform(0, 4, (atoms, 3)).round(3)
    pull = np.mean([AFFINITY[k] for k in kinds])
    d = np.linalg.norm(xyz[:, None] - xyz[None], axis=-1)
    energy = pull - 0.4 * np.exp(-d[np.triu_indices(atoms, 1)]).mean()
    return {"id": f"mp-{number:04d}", "kinds": kinds, "xyz": xyz.tolist(), "energy": float(energy)}


def write_shards(folder, shards, per_shard=48, seed=17):
    os.makedirs(folder, exist_ok=True)
    rng = np.random.default_rng(seed)
    for s in range(shards):
        rows = [one(rng, s * per_shard + k) for k in range(per_shard)]
        with open(os.path.join(folder, f"shard{s}.json"), "w") as f:
            json.dump(rows, f)


def read_shard(folder, index):
    with open(os.path.join(folder, f"shard{index}.json")) as f:
        return json.load(f)
