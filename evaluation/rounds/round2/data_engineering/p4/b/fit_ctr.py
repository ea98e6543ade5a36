"""Click-through model on daily jsonl logs.

Every process reads its own log files in a background thread (json decoding and hashing are slow), the main
thread takes ready batches from a bounded queue.
"""
import argparse
import hashlib
import json
import os
import queue
import random
import sys
import tempfile
import threading

import torch
import torch.distributed as dist
import torch.nn as nn


def log(msg):
    print(f"[{os.environ.get('RANK', '?')}] {msg}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------ data
def make_logs(folder, days, rows, seed):
    """Writes what the front ends have shipped; a front end that restarts leaves its last row short."""
    rng = random.Random(seed)
    for d in range(days):
        with open(os.path.join(folder, f"clicks.{d:02d}.jsonl"), "w") as f:
            for i in range(rows):
                user, item = rng.randint(0, 400), rng.randint(0, 90)
                row = {"user": f"u{user}", "item": f"i{item}", "hour": rng.randint(0, 23),
                       "click": int((user * 7 + item) % 5 == 0)}
                text = json.dumps(row)
                if d == 3 and i == rows // 2:
                    text = text[:len(text) // 2]
                f.write(text + "\n")


def bucket(text, size):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") % size


def features(row, size):
    return [bucket(row["user"], size), bucket(row["item"], size),
            bucket(f"{row['user']}|{row['hour']}", size)], float(row["click"])


class BatchReader(threading.Thread):
    def __init__(self, files, batch_size, hash_size, depth):
        super().__init__(daemon=True, name="batch-reader")
        self.files = files
        self.batch_size = batch_size
        self.hash_size = hash_size
        self.ready = queue.Queue(maxsize=depth)
        self.stopping = threading.Event()
        self.rejected = 0

    def _push(self, batch):
        while not self.stopping.is_set():
            try:
                self.ready.put(batch, timeout=0.5)
                return
            except queue.Full:
                continue

    def run(self):
        idx, lab = [], []
        while not self.stopping.is_set():
            for path in self.files:
                with open(path) as f:
                    for number, line in enumerate(f, 1):
                        if self.stopping.is_set():
                            return
                        try:
                            x, y = features(json.loads(line), self.hash_size)
                        except (ValueError, KeyError) as e:
                            self.rejected += 1
                            log(f"{os.path.basename(path)}:{number}: row rejected ({type(e).__name__})")
                            continue
                        idx.append(x)
                        lab.append(y)
                        if len(idx) == self.batch_size:
                            self._push((torch.tensor(idx), torch.tensor(lab)))
                            idx, lab = [], []

    def take(self):
        return self.ready.get()

    def close(self):
        self.stopping.set()
        self.join()


# ------------------------------------------------------------------ model
class CTR(nn.Module):
    def __init__(self, hash_size, dim=16):
        super().__init__()
        self.table = nn.Embedding(hash_size, dim)
        self.mlp = nn.Sequential(nn.Linear(3 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.mlp(self.table(x).flatten(1)).squeeze(1)


def sync_parameters(model):
    for p in model.parameters():
        dist.broadcast(p.data, 0)


def average_gradients(model, world):
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at:at + p.numel()].view_as(p))
        at += p.numel()


def auc(scores, labels):
    order = scores.argsort()
    ranks = torch.empty_like(scores)
    ranks[order] = torch.arange(1, len(scores) + 1, dtype=scores.dtype)
    pos = labels.sum()
    neg = len(labels) - pos
    return ((ranks[labels > 0].sum() - pos * (pos + 1) / 2) / (pos * neg).clamp(min=1)).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--days", type=int, default=6)
    ap.add_argument("--rows", type=int, default=400)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--hash-size", type=int, default=2000)
    ap.add_argument("--queue-depth", type=int, default=4)
    ap.add_argument("--iterations", type=int, default=80)
    ap.add_argument("--report", type=int, default=16)
    ap.add_argument("--seed", type=int, default=21)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    where = [tempfile.mkdtemp(prefix="ctr_") if rank == 0 else None]
    if rank == 0:
        make_logs(where[0], args.days, args.rows, args.seed)
    dist.broadcast_object_list(where)
    folder = where[0]

    files = sorted(os.path.join(folder, n) for n in os.listdir(folder) if n.endswith(".jsonl"))[rank::world]
    log("reads " + ", ".join(os.path.basename(f) for f in files))
    reader = BatchReader(files, args.batch_size, args.hash_size, args.queue_depth)
    reader.start()

    torch.manual_seed(args.seed)
    model = CTR(args.hash_size)
    sync_parameters(model)
    opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
    bce = nn.BCEWithLogitsLoss()
    window = []
    for it in range(1, args.iterations + 1):
        x, y = reader.take()
        logits = model(x)
        loss = bce(logits, y)
        opt.zero_grad(set_to_none=False)
        loss.backward()
        average_gradients(model, world)
        opt.step()
        window.append((logits.detach(), y))
        if it % args.report == 0:
            s = torch.cat([w[0] for w in window])
            l = torch.cat([w[1] for w in window])
            window.clear()
            figures = torch.tensor([loss.item(), auc(s, l)])
            dist.reduce(figures, 0)
            if rank == 0:
                figures /= world
                log(f"iter {it} loss {figures[0]:.4f} auc {figures[1]:.3f}")
                torch.save(model.state_dict(), os.path.join(folder, "ctr.pt"))
    reader.close()
    rejected = torch.tensor([reader.rejected])
    dist.all_reduce(rejected)
    if rank == 0:
        log(f"done, {rejected.item()} rows rejected")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
