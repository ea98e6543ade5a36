import csv
import os
from collections import namedtuple

import numpy as np

Event = namedtuple("Event", "day user item")


def write_log(path, days=10, users=90, seed=4):
    """Daily purchases; the catalogue changes slowly: items come and go."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    rng = np.random.default_rng(seed)
    home = rng.integers(0, 20, users)
    with open(path, "w", newline="") as fh:
        out = csv.writer(fh)
        out.writerow(Event._fields)
        for day in range(days):
            for user in range(users):
                item = (home[user] + int(rng.integers(0, 4))) % 20
                if day < 3 and user in (50, 53):
                    item = 100 + user
                out.writerow([day, f"u{user:03d}", f"sku-{item:04d}"])


def read_log(path):
    with open(path, newline="") as fh:
        return [Event(int(r["day"]), r["user"], r["item"]) for r in csv.DictReader(fh)]
