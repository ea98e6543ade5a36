"""Streaming CTR training over tab separated impression logs."""
import argparse
import logging
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from streamctr.index import LogIndex
from streamctr.model import HashedFM
from streamctr.reader import StreamReader
from streamctr.synth import write_logs


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--lines-per-file", type=int, default=3200)
    p.add_argument("--block", type=int, default=400, help="lines in a block")
    p.add_argument("--batch-size", type=int, default=80)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--buckets", type=int, default=5000)
    p.add_argument("--dim", type=int, default=8)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=3)
    return p.parse_args()


def shared_dir(rank):
    box = [tempfile.mkdtemp(prefix="streamctr_") if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def split_blocks(blocks, rank, world):
    per = len(blocks) // world
    return blocks[rank * per:(rank + 1) * per]


def train_epoch(model, opt, reader, epoch, logger):
    total, seen = 0.0, 0
    for i, (ids, price, y) in enumerate(reader.batches(epoch)):
        logit = model(ids, price)
        loss = F.binary_cross_entropy_with_logits(logit, y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        total += loss.item() * len(y)
        seen += len(y)
        if i % 40 == 0:
            logger.info("epoch %d batch %d loss %.4f", epoch, i, loss.item())
    stat = torch.tensor([total, float(seen)], dtype=torch.float64)
    dist.all_reduce(stat)
    return (stat[0] / stat[1]).item(), int(stat[1])


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING,
                        format="[%(levelname)s] %(message)s")
    logger = logging.getLogger("streamctr")
    torch.manual_seed(args.seed)

    root = shared_dir(rank)
    if rank == 0:
        write_logs(root, ["uk", "us", "zd_de", "ze_fr"], args.lines_per_file, args.seed)
    dist.barrier()

    index = LogIndex.scan(root, args.block)
    mine = split_blocks(index.blocks, rank, world)
    logger.info("%d blocks in %d files, %d of them here", len(index.blocks), index.n_files, len(mine))
    reader = StreamReader(mine, args.batch_size, args.buckets, seed=args.seed + rank)

    model = DDP(HashedFM(args.buckets, args.dim))
    opt = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        loss, seen = train_epoch(model, opt, reader, epoch, logger)
        logger.info("epoch %d done: %d impressions, logloss %.4f", epoch, seen, loss)
        if rank == 0:
            torch.save({"epoch": epoch, "model": model.module.state_dict()},
                       os.path.join(root, "last.pt"))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(root, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
