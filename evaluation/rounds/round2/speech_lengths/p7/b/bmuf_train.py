# Frame-level training of a TDNN with block-wise model update filtering; the last few models are combined at the end.
import argparse
import glob
import io
import lzma
import os
import queue
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.nn as nn


def log(*a):
    print(time.strftime("%H:%M:%S"), f"LOG (bmuf[{dist.get_rank()}])", *a, file=sys.stderr, flush=True)


class Tdnn(nn.Module):
    def __init__(self, feat_dim, hidden, num_pdfs):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Conv1d(feat_dim, hidden, 3), nn.Conv1d(hidden, hidden, 3, dilation=2), nn.Conv1d(hidden, hidden, 1)]
        )
        self.output = nn.Conv1d(hidden, num_pdfs, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.output(x)


class Egs:
    """Chunks of features with alignments.  Chunk widths differ (as --frames-per-eg=60,40,30)."""

    def __init__(self, archive, feat_dim, num_pdfs, widths=(60, 40, 30)):
        self.g = torch.Generator().manual_seed(1000 + archive)
        self.means = torch.randn(num_pdfs, feat_dim, generator=torch.Generator().manual_seed(4))
        self.widths = widths

    def minibatches(self, n, size):
        for i in range(n):
            w = self.widths[i % len(self.widths)]
            ali = torch.randint(0, len(self.means), (size, w), generator=self.g)
            feats = self.means[ali] + torch.randn(size, w, self.means.size(1), generator=self.g)
            yield feats.transpose(1, 2), ali[:, 3:-3]


class Bmuf:
    def __init__(self, model, momentum, block_lr):
        self.model, self.momentum, self.block_lr = model, momentum, block_lr
        self.anchor = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        dist.broadcast(self.anchor, 0)
        nn.utils.vector_to_parameters(self.anchor.clone(), model.parameters())
        self.delta = torch.zeros_like(self.anchor)

    def sync(self):
        mean = nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        self.delta = self.momentum * self.delta + self.block_lr * (mean - self.anchor)
        self.anchor = self.anchor + self.delta
        nn.utils.vector_to_parameters(self.anchor.clone(), self.model.parameters())


class ModelWriter:
    """Compresses and writes models behind the back of the training."""

    def __init__(self, directory):
        self.directory = directory
        self.jobs = queue.Queue()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self):
        while True:
            it, state = self.jobs.get()
            buf = io.BytesIO()
            torch.save(state, buf)
            with lzma.open(os.path.join(self.directory, f"{it}.mdl.xz"), "wb", preset=9) as f:
                f.write(buf.getvalue())
            self.jobs.task_done()

    def put(self, it, model):
        self.jobs.put((it, {k: v.clone() for k, v in model.state_dict().items()}))

    def flush(self):
        self.jobs.join()


def read_model(path):
    with lzma.open(path, "rb") as f:
        return torch.load(io.BytesIO(f.read()))


def combine(directory, iters):
    log("combining models", *iters)
    total = None
    for it in iters:
        state = read_model(os.path.join(directory, f"{it}.mdl.xz"))
        total = state if total is None else {k: total[k] + v for k, v in state.items()}
    return {k: v / len(iters) for k, v in total.items()}


@torch.no_grad()
def frame_accuracy(model, egs, opts):
    hit, num = 0, 0
    for x, ali in egs.minibatches(3, opts.minibatch_size):
        hit += (model(x).argmax(1) == ali).sum().item()
        num += ali.numel()
    counts = torch.tensor([hit, num], dtype=torch.float64)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--dir", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "exp_tdnn"))
    p.add_argument("--num-iters", type=int, default=8)
    p.add_argument("--num-combine", type=int, default=3)
    p.add_argument("--minibatches-per-iter", type=int, default=6)
    p.add_argument("--minibatch-size", type=int, default=8)
    p.add_argument("--hidden", type=int, default=384)
    p.add_argument("--lr", type=float, default=0.03)
    p.add_argument("--block-momentum", type=float, default=0.5)
    return p.parse_args()


def main():
    opts = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    feat_dim, num_pdfs = 40, 30
    if rank == 0:
        os.makedirs(opts.dir, exist_ok=True)
        for old in glob.glob(os.path.join(opts.dir, "*.mdl.xz")):
            os.remove(old)
    dist.barrier()

    model = Tdnn(feat_dim, opts.hidden, num_pdfs)
    bmuf = Bmuf(model, opts.block_momentum, 1.0)
    writer = ModelWriter(opts.dir) if rank == 0 else None
    valid = Egs(500 + rank, feat_dim, num_pdfs)
    wanted = list(range(opts.num_iters - opts.num_combine + 1, opts.num_iters + 1))

    for it in range(1, opts.num_iters + 1):
        opt = torch.optim.SGD(model.parameters(), lr=opts.lr, momentum=0.9)
        for x, ali in Egs(it * world + rank, feat_dim, num_pdfs).minibatches(opts.minibatches_per_iter, opts.minibatch_size):
            loss = nn.functional.cross_entropy(model(x), ali)
            opt.zero_grad()
            loss.backward()
            opt.step()
        bmuf.sync()
        if writer is not None and it in wanted:
            writer.put(it, model)
        log(f"iteration {it}: objf {-loss.item():.4f}, valid accuracy {frame_accuracy(model, valid, opts):.4f}")

    # the combination is the job of the last worker, the first one still has the writer to look after
    if writer is not None:
        writer.flush()
    dist.barrier()
    if rank == world - 1:
        model.load_state_dict(combine(opts.dir, wanted))
    for t in model.state_dict().values():
        dist.broadcast(t, world - 1)
    log(f"final: valid accuracy {frame_accuracy(model, valid, opts):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
