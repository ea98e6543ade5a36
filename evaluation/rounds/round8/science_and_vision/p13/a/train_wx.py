"""Weather transformer on station grids, sharded with fully_shard."""
import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from checks import BadSample, checked_loss
from stations import StationArchive
from wx import WxFormer


def build(args):
    model = WxFormer(variables=5, tokens=12, dim=24, depth=args.depth)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def any_rank(flag):
    t = torch.tensor([1.0 if flag else 0.0])
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return bool(t.item())


class Loop:
    def __init__(self, model, opt, sched, clip):
        self.model, self.opt, self.sched, self.clip = model, opt, sched, clip
        self.skipped = 0

    def loss_or_none(self, state, target):
        try:
            return checked_loss(self.model(state), target)
        except BadSample:
            return None

    def batch(self, state, target):
        loss = self.loss_or_none(state, target)
        if any_rank(loss is None):
            self.skipped += 1
            return None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        self.sched.step()
        return loss.item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--days", type=int, default=64)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--depth", type=int, default=2)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=77)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    archive = StationArchive(args.days, tokens=12, variables=5, seed=args.seed)
    model = build(args)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    per_rank = args.days // world // args.batch
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.2, total_iters=args.epochs * per_rank)
    loop = Loop(model, opt, sched, args.clip)
    for epoch in range(args.epochs):
        losses = [l for s, t in archive.batches(epoch, args.batch, rank, world)
                  if (l := loop.batch(s, t)) is not None]
        mean = torch.tensor([sum(losses) / max(1, len(losses))])
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch} loss {mean.item() / world:.4f} skipped {loop.skipped}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
