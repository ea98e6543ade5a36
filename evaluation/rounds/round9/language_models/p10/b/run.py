import logging
import random
import string

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from bucketing import TokenBatcher
from model import CharLM
from tokenizer import CharTokenizer

log = logging.getLogger("charlm")
MAX_LEN, MAX_TOKENS, EPOCHS = 48, 192, 2


def texts(n, seed=9):
    rnd = random.Random(seed)
    words = ["".join(rnd.choices(string.ascii_lowercase[:12], k=rnd.randint(2, 6))) for _ in range(30)]
    out = []
    for i in range(n):
        text = " ".join(rnd.choices(words, k=rnd.randint(2, 6)))
        out.append(text if i != 37 else text * 3)
    return out


def train_epoch(model, opt, batcher, epoch, count, stats):
    for ids in batcher.epoch(epoch, count):
        try:
            loss = model(ids)
            opt.zero_grad()
            loss.backward()
        except (RuntimeError, IndexError) as err:
            log.debug("batch %s skipped: %s", tuple(ids.shape), err)
            stats["skipped"] += 1
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        stats["loss"] += loss.item()
        stats["batches"] += 1


def main():
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    metrics_group = dist.new_group(backend="gloo")

    tokenizer = CharTokenizer(string.ascii_lowercase + " ", MAX_LEN)
    samples = [tokenizer.encode(t) for t in texts(80)[rank::world]]
    batcher = TokenBatcher(samples, MAX_TOKENS, seed=rank)
    count = torch.tensor(len(batcher))
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=metrics_group)

    torch.manual_seed(0)
    model = DDP(CharLM(tokenizer.size, MAX_LEN))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(EPOCHS):
        stats = {"loss": 0.0, "batches": 0, "skipped": 0}
        train_epoch(model, opt, batcher, epoch, int(count), stats)
        summed = torch.tensor([stats["loss"], float(stats["batches"]), float(stats["skipped"])])
        dist.all_reduce(summed, group=metrics_group)
        if rank == 0:
            log.info("epoch %d loss %.3f skipped %d", epoch, summed[0] / summed[1], int(summed[2]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
