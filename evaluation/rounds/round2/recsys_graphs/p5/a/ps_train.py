"""Asynchronous embedding server on rank 0, workers on the other ranks.

Workers pull rows, compute, push row gradients; the dense tower is averaged
among the workers only. The server keeps a bounded table and drops seldom
used rows.
"""
import argparse
import logging
import threading
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

PULL, PUSH, BYE = 1, 2, 3
T_HEAD, T_IDS, T_ROWS = 10, 11, 12


class EmbeddingStore:
    def __init__(self, dim, capacity, lr, seed=0):
        self.dim, self.capacity, self.lr = dim, capacity, lr
        self.rows = {}
        self.hits = defaultdict(float)
        self.evicted = 0
        self.gen = torch.Generator().manual_seed(seed)
        self.lock = threading.Lock()

    def evict(self, keep, fraction=0.1):
        """Drop the least used rows, never those in ``keep``."""
        with self.lock:
            n = max(1, int(self.capacity * fraction))
            cold = sorted((k for k in self.rows if k not in keep), key=self.hits.__getitem__)
            for k in cold[:n]:
                del self.rows[k]
                self.hits.pop(k, None)
            for k in self.hits:
                self.hits[k] *= 0.5
            self.evicted += len(cold[:n])

    def _row(self, key, keep):
        row = self.rows.get(key)
        if row is None:
            if len(self.rows) >= self.capacity:
                self.evict(keep)
            row = torch.randn(self.dim, generator=self.gen) * 0.05
            self.rows[key] = row
        return row

    def pull(self, ids):
        keys = ids.tolist()
        keep = set(keys)
        with self.lock:
            out = []
            for k in keys:
                self.hits[k] += 1
                out.append(self._row(k, keep).clone())
        return torch.stack(out)

    def push(self, ids, grads):
        with self.lock:
            for k, g in zip(ids.tolist(), grads):
                row = self.rows.get(k)
                if row is not None:
                    row.sub_(g, alpha=self.lr)

    def snapshot(self):
        with self.lock:
            return {"rows": len(self.rows), "evicted": self.evicted}


class Server:
    def __init__(self, store, workers):
        self.store = store
        self.threads = [threading.Thread(target=self.serve, args=(w,), name="ps-%d" % w) for w in workers]

    def serve(self, peer):
        head = torch.zeros(2, dtype=torch.int64)
        while True:
            dist.recv(head, src=peer, tag=T_HEAD)
            op, n = head.tolist()
            if op == BYE:
                return
            ids = torch.empty(n, dtype=torch.int64)
            dist.recv(ids, src=peer, tag=T_IDS)
            if op == PULL:
                dist.send(self.store.pull(ids), dst=peer, tag=T_ROWS)
            else:
                grads = torch.empty(n, self.store.dim)
                dist.recv(grads, src=peer, tag=T_ROWS)
                self.store.push(ids, grads)

    def run(self):
        for t in self.threads:
            t.start()
        for t in self.threads:
            t.join()
        logging.info("server done: %s", self.store.snapshot())


class Client:
    def __init__(self, dim, server=0):
        self.dim, self.server = dim, server

    def _head(self, op, n):
        dist.send(torch.tensor([op, n]), dst=self.server, tag=T_HEAD)

    def pull(self, ids):
        self._head(PULL, len(ids))
        dist.send(ids, dst=self.server, tag=T_IDS)
        rows = torch.empty(len(ids), self.dim)
        dist.recv(rows, src=self.server, tag=T_ROWS)
        return rows

    def push(self, ids, grads):
        self._head(PUSH, len(ids))
        dist.send(ids, dst=self.server, tag=T_IDS)
        dist.send(grads, dst=self.server, tag=T_ROWS)

    def close(self):
        self._head(BYE, 0)


class Sessions:
    """User sessions; the item catalogue moves on slowly as new items arrive."""

    def __init__(self, rank, batch, length):
        self.g = torch.Generator().manual_seed(40 + rank)
        self.batch, self.length = batch, length

    def __call__(self, step):
        base = 4 * step
        off = torch.randint(0, 300, (self.batch, self.length), generator=self.g)
        items = base + off
        y = ((items % 7).float().mean(1) > 3).float()
        return items, y


def work(args, group, n_workers):
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    tower = nn.Sequential(nn.Linear(args.dim, 16), nn.Tanh(), nn.Linear(16, 1))
    opt = torch.optim.Adam(tower.parameters(), lr=args.lr)
    client, data = Client(args.dim), Sessions(rank, args.batch, 6)
    for step in range(args.steps):
        items, y = data(step)
        ids, inv = items.unique(return_inverse=True)
        rows = client.pull(ids).requires_grad_()
        out = tower(rows[inv].mean(1)).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(out, y)
        opt.zero_grad()
        loss.backward()
        client.push(ids, rows.grad)
        for p in tower.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= n_workers
        opt.step()
        if rank == 1 and step % 20 == 0:
            logging.info("step %d loss %.4f", step, loss.item())
    client.close()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=160)
    ap.add_argument("--dim", type=int, default=8)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--capacity", type=int, default=480)
    ap.add_argument("--lr", type=float, default=0.01)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(process)d %(message)s")
    dist.init_process_group("gloo")
    workers = list(range(1, dist.get_world_size()))
    group = dist.new_group(workers)
    if dist.get_rank() == 0:
        Server(EmbeddingStore(args.dim, args.capacity, lr=0.5, seed=args.seed), workers).run()
    else:
        work(args, group, len(workers))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
