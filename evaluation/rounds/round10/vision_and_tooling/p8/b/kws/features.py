"""Log-spectrogram features of the keyword clips, kept on disk between runs."""
import hashlib
import json
import os
import time

import numpy as np


def synth_clip(i, cfg):
    rng = np.random.default_rng(i)
    label = i % cfg.classes
    t = np.arange(cfg.samples)
    f0 = 0.05 + 0.06 * label + 0.01 * rng.normal()
    return np.sin(2 * np.pi * f0 * t) + 0.8 * rng.normal(size=cfg.samples), label


def log_spectrogram(x, cfg):
    starts = range(0, len(x) - cfg.n_fft + 1, cfg.hop)
    frames = np.stack([x[s:s + cfg.n_fft] for s in starts]) * np.hanning(cfg.n_fft)
    return np.log1p(np.abs(np.fft.rfft(frames, axis=1))).astype(np.float32)


def cache_path(cfg):
    blob = json.dumps(cfg.dict(), sort_keys=True).encode()
    return os.path.join(cfg.cache_dir, "feats-" + hashlib.sha1(blob).hexdigest()[:10] + ".npz")


def build(cfg):
    feats, labels = [], []
    for i in range(cfg.clips):
        x, y = synth_clip(i, cfg)
        feats.append(log_spectrogram(x, cfg))
        labels.append(y)
    os.makedirs(cfg.cache_dir, exist_ok=True)
    tmp = cache_path(cfg) + ".part.npz"
    np.savez(tmp, feats=np.stack(feats), labels=np.array(labels))
    os.replace(tmp, cache_path(cfg))


def wait_for(path, limit=25.0):
    end = time.monotonic() + limit
    while not os.path.exists(path):
        if time.monotonic() > end:
            raise TimeoutError(f"no features at {path} after {limit:.0f} s")
        time.sleep(0.2)


def load_features(cfg, rank):
    """Rank 0 computes the features when there are none yet; everybody reads them from disk."""
    path = cache_path(cfg)
    if rank == 0 and not os.path.exists(path):
        build(cfg)
    wait_for(path)
    with np.load(path) as z:
        return z["feats"], z["labels"]
