"""Prepared clips on disk, shared by all ranks and their loader workers.

A clip is computed by whoever asks for it first; a lock file keeps others from doing the same work.
"""
import os
import time

import numpy as np


class ClipCache:
    def __init__(self, folder, prepare, min_len):
        self.folder = folder
        self.prepare = prepare
        self.min_len = min_len

    def _lock(self, path):
        while True:
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
                return
            except FileExistsError:
                time.sleep(0.05)

    def get(self, i):
        path = os.path.join(self.folder, f"{i:05d}.npy")
        if os.path.exists(path):
            return np.load(path)
        lock = path + ".lock"
        self._lock(lock)
        try:
            if os.path.exists(path):
                return np.load(path)
            clip = self.prepare(i)
            if clip.shape[1] < self.min_len:
                # too short after trimming: padded copy, not worth a file
                return np.pad(clip, ((0, 0), (0, self.min_len - clip.shape[1])))
            tmp = path[:-4] + ".tmp.npy"
            np.save(tmp, clip)
            os.replace(tmp, path)
            return clip
        finally:
            os.unlink(lock)
