import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lm import comm
from lm.data import ShardReader, build_shards
from lm.model import DecoderLM, LMConfig


def get_args():
    ap = argparse.ArgumentParser("pretrain a decoder on packed shards")
    ap.add_argument("--data-dir", default=None)
    ap.add_argument("--n-shards", type=int, default=4)
    ap.add_argument("--block", type=int, default=32)
    ap.add_argument("--micro-batch", type=int, default=4)
    ap.add_argument("--min-doc", type=int, default=12)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--log-every", type=int, default=10)
    return ap.parse_args()


def validate(model, reader, limit=4):
    model.eval()
    acc = torch.zeros(2)
    with torch.no_grad():
        for i, (x, y) in enumerate(reader.batches()):
            if i == limit:
                break
            acc += torch.tensor([model(x, y).item(), 1.0])
    model.train()
    comm.sum_(acc)
    return (acc[0] / acc[1]).item()


def main():
    args = get_args()
    comm.setup()
    torch.manual_seed(7)
    data_dir = comm.from_main(lambda: build_shards(args.data_dir, args.n_shards))

    train = ShardReader(data_dir, "train", comm.rank(), comm.world(), args.block, args.micro_batch, args.min_doc)
    val = ShardReader(data_dir, "val", comm.rank(), comm.world(), args.block, args.micro_batch, args.min_doc)
    net = DecoderLM(LMConfig(block=args.block))
    model = DistributedDataParallel(net)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)

    # every rank has its own shards; an epoch is as long as the shortest of them
    steps = comm.min_int(train.num_batches())
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=steps * args.epochs)
    comm.say(f"{sum(p.numel() for p in net.parameters()):,} parameters, {steps} steps per epoch")

    seen = 0
    for epoch in range(args.epochs):
        tick = time.perf_counter()
        for i, (x, y) in zip(range(steps), train.batches(epoch)):
            loss = model(x, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            seen += x.numel()
            if i % args.log_every == 0:
                comm.say(f"epoch {epoch} {i}/{steps} loss {loss.item():.3f} lr {sched.get_last_lr()[0]:.2e}")
        comm.wait_all()
        v = validate(net, val)
        comm.say(f"epoch {epoch} val {v:.3f}, {seen / (time.perf_counter() - tick):.0f} tok/s/rank")
    comm.teardown()


if __name__ == "__main__":
    main()
