# Fine grained flower classifier on packed shards.
# usage: torchrun --nproc-per-node=2 train_shards.py --epochs 3
import argparse
import os
import random
import shutil
import tempfile
import threading
import time
import zlib

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import get_worker_info
from torch.utils.data.distributed import DistributedSampler

SIDE = 24
NUM_CLASSES = 5


def pack_shard(path, n, seed):
    """index + zlib compressed uint8 images in one file"""
    rng = np.random.default_rng(seed)
    proto = np.random.default_rng(0).integers(40, 200, (NUM_CLASSES, SIDE, SIDE, 3))
    offsets, labels, blobs, pos = [], [], [], 0
    for _ in range(n):
        c = int(rng.integers(NUM_CLASSES))
        img = np.clip(proto[c] + rng.normal(0, 50, (SIDE, SIDE, 3)), 0, 255).astype(np.uint8)
        blob = zlib.compress(img.tobytes(), 6)
        offsets.append((pos, len(blob)))
        labels.append(c)
        blobs.append(blob)
        pos += len(blob)
    with open(path + ".bin", "wb") as f:
        f.write(b"".join(blobs))
    np.savez(path + ".npz", offsets=np.array(offsets), labels=np.array(labels))


class ShardImages(Dataset):
    def __init__(self, path, train, read_ms=8.0):
        meta = np.load(path + ".npz")
        self.offsets, self.labels = meta["offsets"], meta["labels"]
        self.file = path + ".bin"
        self.train, self.read_ms = train, read_ms
        self.cache = {}
        self.cache_lock = threading.Lock()

    def __len__(self):
        return len(self.labels)

    def _fetch(self, i):
        if i not in self.cache:
            pos, size = self.offsets[i]
            time.sleep(self.read_ms / 1000)  # the share that holds the shards answers in about this time
            with open(self.file, "rb") as f:
                f.seek(int(pos))
                raw = zlib.decompress(f.read(int(size)))
            self.cache[i] = np.frombuffer(raw, np.uint8).reshape(SIDE, SIDE, 3)
        return self.cache[i]

    def read_many(self, indices):
        with self.cache_lock:
            return [self._fetch(i) for i in indices]

    def __getitem__(self, i):
        img = self.read_many([i])[0].astype(np.float32) / 127.5 - 1.0
        if self.train:
            if random.random() < 0.5:
                img = img[:, ::-1]
            y, x = random.randrange(4), random.randrange(4)
            img = img[y:y + SIDE - 4, x:x + SIDE - 4]
        else:
            img = img[2:-2, 2:-2]
        return torch.from_numpy(np.ascontiguousarray(img.transpose(2, 0, 1))), int(self.labels[i])


def contact_sheet(dataset, out, rows=12, cols=20):
    """overview of the training images for the run page"""
    tiles = dataset.read_many(range(min(len(dataset), rows * cols)))
    tiles += [np.zeros_like(tiles[0])] * (rows * cols - len(tiles))
    sheet = np.concatenate([np.concatenate(tiles[r * cols:(r + 1) * cols], 1) for r in range(rows)], 0)
    with open(os.path.join(out, "samples.ppm"), "wb") as f:
        f.write(b"P6 %d %d 255\n" % (sheet.shape[1], sheet.shape[0]) + sheet.tobytes())


def init_worker(worker_id):
    info = get_worker_info()
    random.seed(info.seed)
    np.random.seed(info.seed % 2 ** 32)
    info.dataset.cache_lock = threading.Lock()


def build_net():
    return nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2),
                         nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, NUM_CLASSES))


def run_eval(net, loader):
    net.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            counts += torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float32)
    net.train()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--workers", type=int, default=1)
    ap.add_argument("--lr", type=float, default=0.05)
    opt = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(17)
    where = [tempfile.mkdtemp(prefix="shards_") if rank == 0 else None]
    if rank == 0:
        pack_shard(os.path.join(where[0], "train"), 320, seed=1)
        pack_shard(os.path.join(where[0], "val"), 64, seed=2)
    dist.broadcast_object_list(where, src=0)
    folder = where[0]

    train_set = ShardImages(os.path.join(folder, "train"), train=True)
    val_set = ShardImages(os.path.join(folder, "val"), train=False, read_ms=1.0)
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, opt.batch, sampler=train_sampler, num_workers=opt.workers,
                              worker_init_fn=init_worker, persistent_workers=True)
    val_loader = DataLoader(val_set, opt.batch, sampler=DistributedSampler(val_set, shuffle=False))

    model = DDP(build_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=opt.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, opt.lr, total_steps=opt.epochs * len(train_loader))
    sheet = None
    if rank == 0:
        sheet = threading.Thread(target=contact_sheet, args=(train_set, folder))
        sheet.start()

    for epoch in range(opt.epochs):
        train_sampler.set_epoch(epoch)
        running = 0.0
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            running += loss.item()
        acc = run_eval(model.module, val_loader)
        if rank == 0:
            print(f"[{epoch + 1}/{opt.epochs}] loss {running / len(train_loader):.4f} val acc {acc:.3f}", flush=True)
            torch.save(model.module.state_dict(), os.path.join(folder, "last.pt"))

    if sheet is not None:
        sheet.join()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
