import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from selfsup.augment import InformativeCrop
from selfsup.dataset import TwoViews
from selfsup.images import blob_images
from selfsup.model import Encoder, barlow


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--images", type=int, default=256)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--crop", type=int, default=16)
    ap.add_argument("--min-mass", type=float, default=12.0)
    ap.add_argument("--workers", type=int, default=1)
    ap.add_argument("--seed", type=int, default=15)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    images = blob_images(args.images, 24, args.seed)
    data = TwoViews(images, InformativeCrop(args.crop, args.min_mass), args.seed)
    sampler = DistributedSampler(data, seed=args.seed, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, num_workers=args.workers, drop_last=True)
    torch.manual_seed(args.seed)
    model = DDP(Encoder())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        data.set_epoch(epoch)
        total = torch.zeros(2)
        for a, b in loader:
            loss = barlow(*model(a, b))
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {(total[0] / total[1]).item():.4f} over {int(total[1])} batches", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
