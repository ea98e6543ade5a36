"""Write one file per turbine with a day of readings; outages are NaN, as in the SCADA export."""
import os

import numpy as np

OUTAGES = {1: (40, 190), 4: (300, 420), 7: (100, 260), 10: (220, 330), 2: (10, 20), 9: (500, 512)}


def write_turbines(folder, count=12, length=600):
    os.makedirs(folder, exist_ok=True)
    t = np.arange(length)
    for i in range(count):
        rng = np.random.default_rng(100 + i)
        wind = 8 + 2 * np.sin(2 * np.pi * t / (90 + i)) + np.cumsum(rng.normal(0, 0.05, length))
        power = np.clip(wind, 3, 12) ** 3 / 600 + rng.normal(0, 0.05, length)
        series = np.stack([wind / 8 - 1, power], axis=1).astype(np.float32)
        if i in OUTAGES:
            lo, hi = OUTAGES[i]
            series[lo:hi] = np.nan
        np.save(os.path.join(folder, f"turbine_{i:02d}.npy"), series)
