"""Discrete units from frame features, then a linear probe from units to styles."""
import tomllib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from codebook import Codebook
from features import clip_features


def probe(codes, labels, n_codes, n_styles, cfg, rank):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Embedding(n_codes, 16), nn.Linear(16, n_styles)))
    opt = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    gen = torch.Generator().manual_seed(rank)
    stat = torch.zeros(2)
    for epoch in range(cfg["epochs"]):
        stat.zero_()
        for idx in torch.randperm(len(codes), generator=gen).split(cfg["batch_size"]):
            logits = model(codes[idx])
            loss = F.cross_entropy(logits, labels[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
            stat += torch.tensor([(logits.argmax(1) == labels[idx]).sum().item(), float(len(idx))])
        dist.all_reduce(stat)
    return (stat[0] / stat[1]).item()


def main():
    with open("config.toml", "rb") as f:
        cfg = tomllib.load(f)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x, style = clip_features(cfg["data"], rank)
    book = Codebook(x, cfg["codebook"])
    for it in range(cfg["codebook"]["iterations"]):
        err = book.iterate()
        if rank == 0 and it % 3 == 2:
            print(f"iteration {it + 1}: error {err:.3f}, revived {book.restarts}", flush=True)
    acc = probe(book.assign(x), style, cfg["codebook"]["codes"], cfg["data"]["styles"], cfg["probe"], rank)
    if rank == 0:
        print(f"probe accuracy {acc:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
