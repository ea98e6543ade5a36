"""Small CTC phone recogniser trained with DDP on generated utterances."""
import argparse
import gc
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

PHONES = 9
BLANK = 0
MELS = 16


class Utterances:
    """Deterministic corpus: utterance k has a speaking rate and a phone string."""

    def __init__(self, n, seed=21):
        g = torch.Generator().manual_seed(seed)
        self.proto = torch.randn(PHONES, MELS, generator=g)
        self.items = []
        for k in range(n):
            length = int(torch.randint(4, 9, (1,), generator=g))
            rate = 1 if k % 41 == 17 else int(torch.randint(5, 8, (1,), generator=g))
            self.items.append((torch.randint(1, PHONES, (length,), generator=g), rate))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, k):
        phones, rate = self.items[k]
        g = torch.Generator().manual_seed(k)
        frames = self.proto[phones.repeat_interleave(rate)]
        return frames + 0.3 * torch.randn(frames.shape, generator=g), phones


def collate(samples):
    feats = nn.utils.rnn.pad_sequence([s[0] for s in samples], batch_first=True)
    flen = torch.tensor([len(s[0]) for s in samples])
    labels = torch.cat([s[1] for s in samples])
    llen = torch.tensor([len(s[1]) for s in samples])
    return feats, flen, labels, llen


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.sub = nn.Conv1d(MELS, dim, 3, stride=2, padding=1)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, PHONES)

    def forward(self, feats, flen):
        x = F.relu(self.sub(feats.transpose(1, 2))).transpose(1, 2)
        x, _ = self.rnn(x)
        return F.log_softmax(self.out(x), dim=-1), (flen + 1) // 2


def warmup(step, warm=10):
    return min(1.0, (step + 1) / warm) * math.sqrt(warm / max(step + 1, warm))


def train_epoch(model, opt, sched, corpus, order, batch_size):
    total, used, skipped = 0.0, 0, 0
    for i in range(0, len(order), batch_size):
        feats, flen, labels, llen = collate([corpus[k] for k in order[i:i + batch_size]])
        logp, olen = model(feats, flen)
        loss = F.ctc_loss(logp.transpose(0, 1), labels, olen, llen, blank=BLANK)
        bad = torch.tensor(0.0 if torch.isfinite(loss) else 1.0)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad.item() > 0:
            skipped += 1
            continue
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        opt.step()
        sched.step()
        total += loss.item()
        used += 1
    return total / max(used, 1), skipped


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--utts", type=int, default=120)
    p.add_argument("--batch-size", type=int, default=4)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)

    corpus = Utterances(args.utts)
    model = DDP(Encoder())
    opt = torch.optim.Adam(model.parameters(), lr=8e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, warmup)
    for epoch in range(args.epochs):
        perm = torch.randperm(len(corpus), generator=torch.Generator().manual_seed(epoch)).tolist()
        usable = len(perm) - len(perm) % (world * args.batch_size)
        loss, skipped = train_epoch(model, opt, sched, corpus, perm[rank:usable:world], args.batch_size)
        report = [None] * world
        dist.all_gather_object(report, {"loss": loss, "skipped": skipped})
        if rank == 0:
            mean = sum(r["loss"] for r in report) / world
            print(f"epoch {epoch} ctc {mean:.3f} skipped {[r['skipped'] for r in report]}", flush=True)
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
