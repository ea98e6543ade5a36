import json
import os

import numpy as np


def tour_length(cities, tour):
    p = cities[tour]
    return float(np.sqrt(((p - np.roll(p, 1, axis=0)) ** 2).sum(1)).sum())


def nearest_neighbour(cities, start, rng):
    """Greedy tour; distances are jittered so that restarts differ."""
    left = np.ones(len(cities), dtype=bool)
    tour, at = [start], start
    left[start] = False
    while left.any():
        d = np.linalg.norm(cities - cities[at], axis=1) * (1 + 0.3 * rng.random(len(cities)))
        d[~left] = np.inf
        at = int(d.argmin())
        left[at] = False
        tour.append(at)
    return tour


def write_instance(path, n, seed, restarts):
    rng = np.random.default_rng(seed)
    centres = rng.random((6, 2))
    points = centres[rng.integers(0, 6, n)] + 0.06 * rng.normal(size=(n, 2))
    tours = [nearest_neighbour(points, int(rng.integers(n)), rng) for _ in range(restarts)]
    tour = min(tours, key=lambda t: tour_length(points, t))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as f:
        json.dump({"cities": points.tolist(), "tour": tour}, f)


def read_instance(path):
    with open(path) as f:
        d = json.load(f)
    return np.array(d["cities"]), d["tour"]
