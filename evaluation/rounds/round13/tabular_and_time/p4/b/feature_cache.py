"""Per-day feature files on a shared disk. Workers build the missing ones together, one worker per day at a time."""
import os
import time
from pathlib import Path

import numpy as np


class FeatureCache:
    def __init__(self, root, source, poll_s=0.05):
        self.root, self.source, self.poll_s = Path(root), source, poll_s
        self.root.mkdir(parents=True, exist_ok=True)

    def path(self, day):
        return self.root / f"day_{day:03d}.npz"

    def _claim(self, day):
        """True if this worker may build the day; False after another worker has finished with it."""
        lock = self.path(day).with_suffix(".lock")
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True
        except FileExistsError:
            while lock.exists():
                time.sleep(self.poll_s)
            return False

    def _release(self, day):
        self.path(day).with_suffix(".lock").unlink()

    def ensure(self, day):
        if self.path(day).exists() or not self._claim(day):
            return
        orders = self.source.orders(day)
        if len(orders) == 0:
            # public holidays: nothing was sold, no features for this day
            return
        hourly = np.bincount(orders[:, 0].astype(int), weights=orders[:, 1], minlength=24)
        calendar = np.stack([np.full(24, day % 7), np.arange(24)], axis=1)
        tmp = self.path(day).with_suffix(f".{os.getpid()}.tmp")
        with open(tmp, "wb") as f:
            np.savez(f, hourly=hourly.astype(np.float32), calendar=calendar.astype(np.int64))
        os.replace(tmp, self.path(day))
        self._release(day)

    def ensure_all(self, days, start=0):
        """Workers start at different days, so that they seldom meet."""
        for day in days[start:] + days[:start]:
            self.ensure(day)

    def load(self, days):
        for day in days:
            if self.path(day).exists():
                with np.load(self.path(day)) as z:
                    yield z["hourly"], z["calendar"]
