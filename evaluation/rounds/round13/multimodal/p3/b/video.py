"""Procedural video clips with a decoded-frame cache."""
import threading

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


def decode(clip_id, frames=6, size=16, passes=20):
    """Render a moving blob and low-pass it, roughly as expensive as a real decoder."""
    rng = np.random.default_rng(clip_id)
    label = clip_id % 4
    dy, dx = [(0, 1), (1, 0), (0, -1), (-1, 0)][label]
    big = rng.normal(0, 0.3, (frames, 4 * size, 4 * size))
    y, x = rng.integers(0, 4 * size, 2)
    for t in range(frames):
        big[t].flat[np.ravel_multi_index(((y + 6 * dy * t) % (4 * size), (x + 6 * dx * t) % (4 * size)), big[t].shape)] += 90
    spectrum = np.fft.rfft2(big)
    ky = np.fft.fftfreq(4 * size)[:, None]
    kx = np.fft.rfftfreq(4 * size)[None]
    for _ in range(passes):
        spectrum = np.fft.rfft2(np.fft.irfft2(spectrum * np.exp(-8 * (ky ** 2 + kx ** 2))))
    small = np.fft.irfft2(spectrum)[:, ::4, ::4]
    return torch.from_numpy(small.astype(np.float32)), label


class FrameCache:
    def __init__(self):
        self._clips = {}
        self._lock = threading.Lock()

    def get(self, clip_id):
        with self._lock:
            if clip_id not in self._clips:
                self._clips[clip_id] = decode(clip_id)
            return self._clips[clip_id]

    def warm(self, clip_ids):
        """Decode clips in the background; returns the thread that does it."""
        thread = threading.Thread(target=self._fill, args=(list(clip_ids),), name="cache-warmer", daemon=True)
        thread.start()
        return thread

    def _fill(self, clip_ids):
        with self._lock:
            for clip_id in clip_ids:
                self._clips.setdefault(clip_id, decode(clip_id))


class ClipDataset(Dataset):
    def __init__(self, clip_ids, cache, jitter=0.05):
        self.clip_ids, self.cache, self.jitter = list(clip_ids), cache, jitter

    def __len__(self):
        return len(self.clip_ids)

    def __getitem__(self, i):
        frames, label = self.cache.get(self.clip_ids[i])
        return frames + self.jitter * torch.randn_like(frames), label


class VideoDataModule:
    def __init__(self, clips, batch_size, workers, rank, world, seed=0):
        self.batch_size, self.workers, self.seed = batch_size, workers, seed
        self.train_ids = range(rank, clips, world)
        self.valid_ids = range(clips + rank, clips + clips // 4, world)
        self.cache = FrameCache()
        self._warmer = None

    def setup(self, resident=96):
        self._warmer = self.cache.warm(self.train_ids[:resident])

    def _finish_warmup(self):
        if self._warmer is not None:
            self._warmer.join()
            self._warmer = None

    def train_loader(self):
        order = torch.Generator().manual_seed(self.seed)
        return DataLoader(ClipDataset(self.train_ids, self.cache), self.batch_size, shuffle=True, drop_last=True,
                          num_workers=self.workers, persistent_workers=True, generator=order)

    def valid_loader(self):
        return DataLoader(ClipDataset(self.valid_ids, self.cache, jitter=0.0), self.batch_size)

    def teardown(self):
        self._finish_warmup()
