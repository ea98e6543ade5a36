#!/usr/bin/env python3
"""Streaming CTC training from raw shards (length-prefixed records in one file a shard)."""
import argparse
import logging
import os

import torch
import torch.distributed as dist

from reader import ShardStream, write_shards
from prefetch import Prefetcher


def get_args():
    ap = argparse.ArgumentParser(description="training your network")
    here = os.path.dirname(os.path.abspath(__file__))
    ap.add_argument("--data_dir", default=os.path.join(here, "shards"))
    ap.add_argument("--model_dir", default=os.path.join(here, "model"))
    ap.add_argument("--num_shards", type=int, default=9)
    ap.add_argument("--steps_per_epoch", type=int, default=24)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--prefetch", type=int, default=4)
    ap.add_argument("--max_frames_in_batch", type=int, default=700)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--accum_grad", type=int, default=2)
    return ap.parse_args()


class ChunkEncoder(torch.nn.Module):
    def __init__(self, idim, hdim, odim):
        super().__init__()
        self.proj = torch.nn.Linear(idim * 3, hdim)
        self.rnn = torch.nn.GRU(hdim, hdim, batch_first=True)
        self.ctc = torch.nn.Linear(hdim, odim)

    def forward(self, feats, lens):
        t = feats.size(1) // 3 * 3
        x = feats[:, :t].reshape(feats.size(0), t // 3, -1)
        x, _ = self.rnn(torch.tanh(self.proj(x)))
        return self.ctc(x).log_softmax(-1), torch.div(lens, 3, rounding_mode="floor")


class Executor:
    def __init__(self, model, optimizer, args):
        self.model, self.optimizer, self.args = model, optimizer, args
        self.step = 0

    def reduce_gradients(self):
        handles = [dist.all_reduce(p.grad, async_op=True) for p in self.model.parameters()]
        for h in handles:
            h.wait()
        for p in self.model.parameters():
            p.grad /= dist.get_world_size()

    def train(self, batches, steps):
        self.model.train()
        shown = 0.0
        for _ in range(steps * self.args.accum_grad):
            feats, lens, labels, label_lens = next(batches)
            logp, out_lens = self.model(feats, lens)
            loss = torch.nn.functional.ctc_loss(
                logp.transpose(0, 1), labels, out_lens, label_lens, zero_infinity=True
            ) / self.args.accum_grad
            loss.backward()
            shown += loss.item()
            self.step += 1
            if self.step % self.args.accum_grad == 0:
                self.reduce_gradients()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return shown / steps


def main():
    args = get_args()
    torch.set_num_threads(1)
    torch.manual_seed(777)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.DEBUG, format=f"%(asctime)s rank {rank} %(levelname)s %(message)s")

    if rank == 0:
        write_shards(args.data_dir, args.num_shards, records=20)
    dist.barrier()
    paths = sorted(os.path.join(args.data_dir, f) for f in os.listdir(args.data_dir) if f.endswith(".rec"))
    stream = ShardStream(paths[rank::world_size], args.max_frames_in_batch, seed=rank)
    batches = iter(Prefetcher(stream, depth=args.prefetch))

    model = ChunkEncoder(13, 24, 12)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    executor = Executor(model, optimizer, args)
    for epoch in range(args.epochs):
        loss = torch.tensor([executor.train(batches, args.steps_per_epoch)])
        dist.all_reduce(loss)
        logging.info("epoch %d step %d loss %.4f", epoch, executor.step, loss.item() / world_size)
        if rank == 0:
            os.makedirs(args.model_dir, exist_ok=True)
            torch.save(model.state_dict(), os.path.join(args.model_dir, f"{epoch}.pt"))
    batches.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
