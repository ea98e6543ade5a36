"""A cache folder shared by all loader workers of a node."""
import os
import time

import numpy as np


class DiskCache:
    def __init__(self, folder, poll=0.02):
        self.folder, self.poll = folder, poll

    def _acquire(self, lock):
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
            return True
        except FileExistsError:
            return False

    def get(self, name, produce):
        path, lock = self.folder / f"{name}.npy", self.folder / f"{name}.lock"
        while not path.exists():
            if self._acquire(lock):
                self._fill(path, produce)
                os.unlink(lock)
            else:
                time.sleep(self.poll)
        return np.load(path)

    def _fill(self, path, produce):
        value = produce()
        tmp = path.with_suffix(f".{os.getpid()}.tmp.npy")
        np.save(tmp, value)
        os.replace(tmp, path)
