import os
import shutil
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cache import PreparedData
from settings import DataSettings

EPOCHS, BATCH, LR = 5, 16, 5e-3


class TopicModel(nn.Module):
    def __init__(self, vocab, topics, dim=24):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.out = nn.Sequential(nn.ReLU(), nn.Linear(dim, topics))

    def forward(self, tokens):
        return self.out(self.emb(tokens))


def run_name(rank):
    name = [time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}" if rank == 0 else None]
    dist.broadcast_object_list(name, src=0)
    return name[0]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    name = run_name(rank)
    settings = DataSettings()
    prepared = PreparedData("work", name).load(settings, rank)
    data = TensorDataset(prepared["tokens"], prepared["labels"])
    sampler = DistributedSampler(data, seed=settings.seed)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    torch.manual_seed(settings.seed)
    model = DDP(TopicModel(prepared["vocab"], settings.topics))
    opt = torch.optim.Adam(model.parameters(), lr=LR)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        stat = torch.zeros(3)
        for tokens, labels in loader:
            logits = model(tokens)
            loss = F.cross_entropy(logits, labels)
            opt.zero_grad()
            loss.backward()
            opt.step()
            stat += torch.tensor([loss.item() * len(labels), (logits.argmax(1) == labels).sum().item(), len(labels)])
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch} loss {stat[0] / stat[2]:.4f} acc {stat[1] / stat[2]:.3f}", flush=True)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(os.path.join("work", name), ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
