import torch
import torch.distributed as dist
import torch.nn.functional as F

from config import Config
from data import batches, make_clips
from model import FusionTagger, fusion_parameters, select_towers
from sync import BucketReducer, mean_over_ranks


def build_optimizer(model, cfg):
    groups = [{"params": fusion_parameters(model), "lr": cfg.lr, "name": "fusion"}]
    for name in select_towers(model, cfg.frozen):
        params = list(model.towers[name].parameters())
        groups.append({"params": params, "lr": cfg.lr * cfg.tower_lr_scale, "name": name})
    return torch.optim.Adam(groups)


@torch.no_grad()
def evaluate(model, cfg, data, rank, world):
    model.eval()
    hits = seen = 0
    for inputs, labels in batches(*data, cfg, 0, rank, world):
        hits += (model(inputs).argmax(-1) == labels).sum().item()
        seen += len(labels)
    (acc,) = mean_over_ranks(hits / seen)
    return acc


def run(cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    train, valid = make_clips(cfg, cfg.seed + 1), make_clips(cfg, cfg.seed + 2)
    model = FusionTagger(cfg)
    optimizer = build_optimizer(model, cfg)
    reducer = BucketReducer(optimizer)
    reducer.broadcast_parameters(model)

    for epoch in range(cfg.epochs):
        model.train()
        total = steps = 0
        for inputs, labels in batches(*train, cfg, epoch, rank, world):
            loss = F.cross_entropy(model(inputs), labels, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            reducer.average()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
        acc = evaluate(model, cfg, valid, rank, world)
        (loss,) = mean_over_ranks(total / steps)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f} valid accuracy {acc:.3f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        run(Config())
        dist.barrier()
    finally:
        dist.destroy_process_group()
