import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from corpus import FileStream, write_corpus
from env import Env, shard_spec

STEPS, BATCH, SEED, EVAL_EVERY = 40, 8, 13, 10


class ConvLM(nn.Module):
    def __init__(self, vocab=20, width=24, kernel=3):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, kernel) for _ in range(2))
        self.out = nn.Linear(width, vocab)
        self.pad = kernel - 1

    def forward(self, ids):
        x = self.emb(ids).transpose(1, 2)
        for conv in self.convs:
            x = x + torch.relu(conv(F.pad(x, (self.pad, 0))))
        return self.out(x.transpose(1, 2)).clone()


def lm_loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, batches, world):
    model.eval()
    total = sum(lm_loss(model, ids) for ids in batches) / len(batches)
    dist.all_reduce(total)
    model.train()
    return total.item() / world


def main():
    env = Env()
    dist.init_process_group("gloo")
    torch.set_num_threads(env.data_threads)
    if env.is_main:
        write_corpus("corpus/train")
        write_corpus("corpus/val", files=env.world, lines=16, seed=5)
    dist.barrier()

    torch.manual_seed(SEED)
    model = ConvLM()
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1)
    stream = FileStream("corpus/train", shard_spec(env, SEED), BATCH)
    val_stream = iter(FileStream("corpus/val", shard_spec(env, SEED), BATCH))
    val = [next(val_stream) for _ in range(2)]

    t0, tokens = time.perf_counter(), 0
    for step, ids in zip(range(1, STEPS + 1), stream):
        loss = lm_loss(model, ids)
        loss.backward()
        opt.step()
        opt.zero_grad()
        tokens += ids.numel() * env.world
        if step % EVAL_EVERY == 0:
            vloss = evaluate(model, val, env.world)
            sched.step(vloss)
            if env.is_main:
                rate = tokens / (time.perf_counter() - t0)
                print(f"step {step} loss {loss.item():.4f} val {vloss:.4f} {rate:.0f} tok/s", flush=True)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
