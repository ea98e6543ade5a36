"""Writes the part files of the churn table, as exported by the branches."""
import csv
import os

import numpy as np

HEADER = ["age", "income", "tenure_months", "balance", "utilization", "n_transactions", "channel", "churned"]


def write_part(folder, part, rows, seed=23):
    rng = np.random.default_rng([seed, part])
    path = os.path.join(folder, f"part-{part:03d}.csv")
    with open(path, "w", newline="") as f:
        out = csv.writer(f)
        out.writerow(HEADER)
        for _ in range(rows):
            tenure, util = int(rng.gamma(2, 18)), float(rng.beta(2, 5))
            churned = int(rng.random() < 1 / (1 + np.exp(1.2 + 0.04 * tenure - 4 * util)))
            shown = "unknown" if part % 2 and tenure == 0 else tenure
            out.writerow([int(rng.normal(45, 14)), round(rng.lognormal(10, 0.6), 2), shown, round(rng.normal(2000, 900), 2),
                          round(util, 4), rng.poisson(22), rng.choice(["web", "branch", "phone"]), churned])
    return path
