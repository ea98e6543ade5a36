import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from config import HarnessConfig, seed_everything
from harness import Evaluator


class TinyLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.emb = nn.Embedding(cfg.vocab, cfg.hidden)
        self.rnn = nn.GRU(cfg.hidden, cfg.hidden, batch_first=True)
        self.head = nn.Linear(cfg.hidden, cfg.vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def training_batch(cfg):
    stem = torch.randint(2, cfg.vocab, (cfg.batch, cfg.seq_len // 2))
    shift = torch.randint(0, 2, (cfg.batch, 1))
    return torch.cat([stem, (stem + shift) % cfg.vocab], 1)


def shared_folder(rank):
    box = [tempfile.mkdtemp(prefix="harness-") if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    cfg = HarnessConfig()
    seed = seed_everything(cfg, rank)
    folder = shared_folder(rank)
    print(f"rank {rank} seed {seed} cache {folder}", flush=True)
    model = DDP(TinyLM(cfg))
    evaluator = Evaluator(cfg, folder, rank, world)
    optim = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    for step in range(1, cfg.steps + 1):
        ids = training_batch(cfg)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optim.zero_grad()
        loss.backward()
        optim.step()
        if step % cfg.eval_every == 0:
            report = evaluator.run(model.module)
            if rank == 0:
                text = " ".join(f"{k}={v:.3f}" for k, v in report.items())
                print(f"step {step} loss {loss.item():.4f} {text}", flush=True)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
