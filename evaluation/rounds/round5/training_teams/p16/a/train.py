import copy
import json
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from documents import read_shard, write_documents
from windows import WindowSampler


class GruLM(nn.Module):
    def __init__(self, vocab=16, width=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def lm_loss(net, ids):
    return F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def ema_update(ema, net, decay):
    for e, p in zip(ema.parameters(), net.parameters()):
        e.lerp_(p, 1 - decay)


@torch.no_grad()
def evaluate(net, ids, world):
    loss = lm_loss(net, ids)
    dist.all_reduce(loss)
    return loss.item() / world


def main():
    cfg = json.load(open(sys.argv[1] if len(sys.argv) > 1 else "curriculum.json"))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_documents("corpus")
    dist.barrier()

    torch.manual_seed(0)
    model = DDP(GruLM())
    ema = copy.deepcopy(model.module).requires_grad_(False)
    opt = torch.optim.Adam(model.parameters())
    sampler = WindowSampler(read_shard("corpus", rank, world), seed=200 + rank)
    held_out = sampler.batch(16, cfg["stages"][0]["seq_len"])

    step = 0
    for number, stage in enumerate(cfg["stages"]):
        for group in opt.param_groups:
            group["lr"] = stage["lr"]
        if rank == 0:
            print(f"stage {number}: {stage}", flush=True)
        for _ in range(stage["steps"]):
            loss = lm_loss(model, sampler.batch(cfg["batch_size"], stage["seq_len"]))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            ema_update(ema, model.module, cfg["ema_decay"])
            step += 1
            if step % cfg["eval_interval"] == 0:
                val = evaluate(ema, held_out, world)
                if rank == 0:
                    print(f"step {step} loss {loss.item():.4f} ema val {val:.4f}", flush=True)

    dist.barrier()
    if rank == 0:
        torch.save(ema.state_dict(), "corpus/ema.pt")
        print(f"rejected windows {sampler.rejected}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
