"""Frame classifier for speech, batches of similar length, short buckets and long ones."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from asr.corpus import build_corpus
from asr.buckets import BucketedBatches
from asr.encoder import Encoder


class BucketReport:
    """Mean loss of each length bucket over all ranks."""

    def __init__(self, world, rank):
        self.world, self.rank = world, rank
        self.rows = {}

    def add(self, bucket, total, frames):
        mine = torch.tensor([total, float(frames)])
        parts = [torch.zeros(2) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        s = torch.stack(parts).sum(0)
        self.rows[bucket] = (s[0] / s[1].clamp(min=1)).item()

    def show(self, epoch):
        if self.rank == 0:
            text = " ".join(f"{k}:{v:.3f}" for k, v in sorted(self.rows.items()))
            print(f"epoch {epoch} {text}", flush=True)


def train_bucket(net, opt, batches):
    total, frames = 0.0, 0
    for feats, labels, mask in batches:
        logits = net(feats)
        raw = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        loss = (raw * mask).sum() / mask.sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += (raw.detach() * mask).sum().item()
        frames += int(mask.sum())
    return total, frames


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--utterances", type=int, default=220)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--max-frames", type=int, default=160)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=2)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    corpus = build_corpus(args.utterances, args.seed)
    batches = BucketedBatches(corpus, args.max_frames, rank, world)
    net = DDP(Encoder(feats=8, hidden=16, classes=5))
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        report = BucketReport(world, rank)
        for bucket in batches.order(epoch):
            total, frames = train_bucket(net, opt, batches.of(bucket))
            report.add(bucket, total, frames)
        report.show(epoch)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
