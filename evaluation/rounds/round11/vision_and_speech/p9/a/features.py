"""Log-spectrum cache shared by all ranks of a node."""
import hashlib
import json
import os

import numpy as np


def synth(split_seed, n, length=256, classes=5):
    rng = np.random.default_rng(split_seed)
    y = rng.integers(0, classes, n)
    t = np.arange(length)
    wave = np.sin(2 * np.pi * t[None] * (0.03 + 0.05 * y[:, None]) + rng.uniform(0, 6.28, (n, 1)))
    return wave + 0.4 * rng.normal(size=(n, length)), y


def log_spectrum(wave, win=32):
    frames = wave.reshape(len(wave), -1, win) * np.hanning(win)
    return np.log1p(np.abs(np.fft.rfft(frames, axis=-1))).mean(axis=1).astype(np.float32)


def fingerprint(recipe):
    return hashlib.sha1(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


class FeatureCache:
    def __init__(self, folder, store, rank):
        self.folder, self.store, self.rank = folder, store, rank

    def build(self, recipe, path):
        wave, y = synth(recipe["seed"], recipe["n"])
        with open(path + ".tmp", "wb") as f:
            np.savez(f, x=log_spectrum(wave, recipe["win"]), y=y)
        os.replace(path + ".tmp", path)

    def load(self, split, recipe):
        path = os.path.join(self.folder, fingerprint(recipe) + ".npz")
        key = f"features/{split}"
        if self.rank == 0:
            if not os.path.exists(path):
                self.build(recipe, path)
            self.store.set(key, path)
        else:
            path = self.store.get(key).decode()
        blob = np.load(path)
        return blob["x"], blob["y"]
