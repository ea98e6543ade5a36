"""Asynchronous parameter server for a hashed sparse model (click logs).

rank 0      : server, one thread per worker, table of embedding rows + dense head
rank 1..N-1 : workers, pull the rows of a batch, push the gradients back

Wire format: every request starts with an int64 header [op, n_rows, stamp].
"""
import argparse
import enum
import threading
import time

import torch
import torch.distributed as dist


class Op(enum.IntEnum):
    PULL = 1
    PUSH = 2
    STOP = 3


ACK, REFUSED = 1, 0


class ParameterServer:
    def __init__(self, opts, workers):
        g = torch.Generator().manual_seed(opts.seed)
        self.opts = opts
        self.workers = workers
        self.table = 0.05 * torch.randn(opts.rows, opts.dim, generator=g)
        self.head = 0.05 * torch.randn(opts.dim + opts.dense, generator=g)
        self.adagrad = torch.full((opts.rows,), 1e-3)
        self.guard = threading.Lock()
        self.stamp = 0
        self.refused = {w: 0 for w in workers}

    # -- requests ---------------------------------------------------------
    def on_pull(self, worker, n):
        rows = torch.empty(n, dtype=torch.int64)
        dist.recv(rows, src=worker)
        with self.guard:
            block = self.table[rows].clone()
            head = self.head.clone()
            stamp = torch.tensor([self.stamp])
        dist.send(block, dst=worker)
        dist.send(head, dst=worker)
        dist.send(stamp, dst=worker)

    def on_push(self, worker, n, stamp):
        rows = torch.empty(n, dtype=torch.int64)
        d_rows = torch.empty(n, self.opts.dim)
        d_head = torch.empty_like(self.head)
        dist.recv(rows, src=worker)
        dist.recv(d_rows, src=worker)
        dist.recv(d_head, src=worker)
        with self.guard:
            damp = 1.0 / (1.0 + self.opts.stale_decay * (self.stamp - stamp))
            if not (torch.isfinite(d_rows).all() and torch.isfinite(d_head).all()):
                self.refused[worker] += 1
                return self.reply(worker, REFUSED)
            self.adagrad[rows] += d_rows.pow(2).mean(1)
            self.table[rows] -= damp * self.opts.lr * d_rows / self.adagrad[rows].sqrt()[:, None]
            self.head -= damp * self.opts.lr * d_head
            self.stamp += 1
        return self.reply(worker, ACK)

    def reply(self, worker, code):
        dist.send(torch.tensor([code]), dst=worker)

    # -- life cycle -------------------------------------------------------
    def serve_one(self, worker):
        header = torch.empty(3, dtype=torch.int64)
        while True:
            dist.recv(header, src=worker)
            op, n, stamp = header.tolist()
            if op == Op.STOP:
                return
            if op == Op.PULL:
                self.on_pull(worker, n)
            elif op == Op.PUSH:
                self.on_push(worker, n, stamp)
            else:
                raise ValueError(f"unknown request {op} of worker {worker}")

    def run(self):
        threads = [threading.Thread(target=self.serve_one, args=(w,), name=f"serve-{w}") for w in self.workers]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        print(f"server: {self.stamp} updates, refused {self.refused}", flush=True)
        torch.save({"table": self.table, "head": self.head, "stamp": self.stamp}, self.opts.ckpt)


class PSClient:
    def __init__(self, server=0):
        self.server = server

    def _request(self, op, n=0, stamp=0):
        dist.send(torch.tensor([int(op), n, stamp]), dst=self.server)

    def pull(self, rows, dim, head_size):
        self._request(Op.PULL, len(rows))
        dist.send(rows, dst=self.server)
        block, head, stamp = torch.empty(len(rows), dim), torch.empty(head_size), torch.empty(1, dtype=torch.int64)
        for buf in (block, head, stamp):
            dist.recv(buf, src=self.server)
        return block.requires_grad_(), head.requires_grad_(), int(stamp)

    def push(self, rows, d_rows, d_head, stamp):
        self._request(Op.PUSH, len(rows), stamp)
        for buf in (rows, d_rows, d_head):
            dist.send(buf.contiguous(), dst=self.server)
        code = torch.empty(1, dtype=torch.int64)
        dist.recv(code, src=self.server)
        return int(code) == ACK

    def stop(self):
        self._request(Op.STOP)


def click_log(opts, worker):
    """Hashed ids plus log counts.  A count can be zero where the join found no history."""
    g = torch.Generator().manual_seed(opts.seed + worker)
    ids = torch.randint(0, opts.rows, (opts.examples, opts.fields), generator=g)
    counts = torch.randint(1, 500, (opts.examples, opts.dense), generator=g)
    if worker == 2:
        counts[opts.examples // 2 + 5, 1] = 0
    dense = counts.float().log() / 6.0
    y = ((ids % 7 < 3).float().mean(1) + 0.2 * dense[:, 0] > 0.55).float()
    return ids, dense, y


def work(opts, rank):
    client = PSClient()
    ids, dense, y = click_log(opts, rank)
    seen, refused, avg, t0 = 0, 0, 0.7, time.time()
    for epoch in range(opts.epochs):
        for at in range(0, opts.examples, opts.batch):
            bi, bd, by = ids[at:at + opts.batch], dense[at:at + opts.batch], y[at:at + opts.batch]
            rows, inverse = bi.unique(return_inverse=True)
            block, head, stamp = client.pull(rows, opts.dim, opts.dim + opts.dense)
            pooled = block[inverse].mean(1)
            logits = torch.cat([pooled, bd], 1) @ head
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, by)
            loss.backward()
            if client.push(rows, block.grad, head.grad, stamp):
                avg = 0.95 * avg + 0.05 * loss.item()
            else:
                refused += 1
            seen += 1
            if seen % 50 == 0:
                print(f"worker {rank} epoch {epoch} batch {seen} loss {avg:.4f} refused {refused} "
                      f"{seen / (time.time() - t0):.0f} b/s", flush=True)
    client.stop()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rows", type=int, default=5000)
    ap.add_argument("--dim", type=int, default=16)
    ap.add_argument("--dense", type=int, default=6)
    ap.add_argument("--fields", type=int, default=10)
    ap.add_argument("--examples", type=int, default=6400)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--stale-decay", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=21)
    ap.add_argument("--ckpt", default="ps_state.pt")
    opts = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    if rank == 0:
        ParameterServer(opts, workers=list(range(1, world))).run()
    else:
        work(opts, rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
