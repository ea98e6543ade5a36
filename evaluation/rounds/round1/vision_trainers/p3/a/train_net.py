"""One stage detector with boxes and instance masks, trained with hooks around a simple loop."""
import argparse
import itertools
import logging
import time
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

logger = logging.getLogger("detnet")


@dataclass
class Config:
    max_iter: int = 80
    ims_per_batch: int = 3
    base_lr: float = 0.02
    warmup_iters: int = 10
    eval_period: int = 40
    log_period: int = 20
    num_workers: int = 1
    grid: int = 8
    seed: int = 4


class SceneDataset:
    """Scenes with one to three objects; only a part of them came with polygon annotations."""

    def __init__(self, n, grid, seed, polygon_share):
        self.n, self.grid, self.seed, self.share = n, grid, seed, polygon_share

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 10007 + i)
        image = 0.1 * torch.randn(3, self.grid * 4, self.grid * 4, generator=g)
        obj = torch.zeros(self.grid, self.grid)
        box = torch.zeros(4, self.grid, self.grid)
        mask = torch.zeros(self.grid, self.grid)
        for _ in range(int(torch.randint(1, 4, (1,), generator=g))):
            cy, cx = torch.randint(1, self.grid - 1, (2,), generator=g).tolist()
            image[:, cy * 4 - 4:cy * 4 + 8, cx * 4 - 4:cx * 4 + 8] += 1.0
            obj[cy, cx] = 1.0
            box[:, cy, cx] = torch.tensor([4.0, 4.0, 8.0, 8.0]) / 8
            mask[cy - 1:cy + 2, cx - 1:cx + 2] = 1.0
        target = {"objectness": obj, "box": box}
        if float(torch.rand((), generator=g)) < self.share:
            target["mask"] = mask
        return {"image": image, "target": target}


class TrainingSampler(Sampler):
    """Endless shuffled indices, every process takes its own slice of the same stream."""

    def __init__(self, size, seed):
        self.size, self.seed, self.rank, self.world = size, seed, dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        perms = (torch.randperm(self.size, generator=g).tolist() for _ in itertools.count())
        yield from itertools.islice(itertools.chain.from_iterable(perms), self.rank, None, self.world)


class DetNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 2, 1), nn.GroupNorm(4, width), nn.ReLU())
        self.cls_head = nn.Conv2d(width, 1, 3, padding=1)
        self.box_head = nn.Conv2d(width, 4, 3, padding=1)
        self.mask_head = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 1))

    def forward(self, batched_inputs):
        feat = self.backbone(torch.stack([x["image"] for x in batched_inputs]))
        scores, deltas = self.cls_head(feat).squeeze(1), self.box_head(feat)
        if not self.training:
            return scores.sigmoid()
        targets = [x["target"] for x in batched_inputs]
        obj = torch.stack([t["objectness"] for t in targets])
        box = torch.stack([t["box"] for t in targets])
        fg = obj.unsqueeze(1).expand_as(box) > 0
        losses = {"loss_cls": F.binary_cross_entropy_with_logits(scores, obj, pos_weight=torch.tensor(8.0)),
                  "loss_box": F.smooth_l1_loss(deltas[fg], box[fg])}
        if any("mask" in t for t in targets):
            losses["loss_mask"] = self.mask_loss(feat, targets)
        return losses

    def mask_loss(self, feat, targets):
        keep = [i for i, t in enumerate(targets) if "mask" in t]
        logits = self.mask_head(feat[keep]).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, torch.stack([targets[i]["mask"] for i in keep]))


class HookBase:
    trainer = None
    def after_step(self): ...


class PeriodicWriter(HookBase):
    def __init__(self, period):
        self.period, self.start = period, time.perf_counter()

    def after_step(self):
        tr = self.trainer
        if (tr.iter + 1) % self.period:
            return
        names = sorted(tr.loss_dict)
        values = torch.stack([tr.loss_dict[k].detach() for k in names])
        dist.reduce(values, dst=0)
        if dist.get_rank() == 0:
            values /= dist.get_world_size()
            eta = (time.perf_counter() - self.start) / (tr.iter + 1)
            logger.info("iter: %d  %s  time: %.4f", tr.iter + 1,
                        "  ".join(f"{k}: {v:.4f}" for k, v in zip(names, values.tolist())), eta)


class EvalHook(HookBase):
    def __init__(self, period, dataset):
        self.period, self.dataset = period, dataset

    def after_step(self):
        if (self.trainer.iter + 1) % self.period:
            return
        net = self.trainer.model.module.eval()
        hits, total = 0, 0
        with torch.no_grad():
            for i in range(dist.get_rank(), len(self.dataset), dist.get_world_size()):
                item = self.dataset[i]
                obj = item["target"]["objectness"] > 0
                hits += int(((net([item])[0] > 0.5) & obj).sum())
                total += int(obj.sum())
        net.train()
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, {"hits": hits, "total": total})
        recall = sum(d["hits"] for d in gathered) / max(1, sum(d["total"] for d in gathered))
        if dist.get_rank() == 0:
            logger.info("evaluation at %d: recall %.3f", self.trainer.iter + 1, recall)


class SimpleTrainer:
    def __init__(self, cfg, model):
        self.cfg = cfg
        self.model = DistributedDataParallel(model)
        data = SceneDataset(240, cfg.grid, seed=11, polygon_share=0.7)
        self.loader = iter(DataLoader(data, cfg.ims_per_batch, sampler=TrainingSampler(len(data), cfg.seed),
                                      num_workers=cfg.num_workers, collate_fn=list))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=cfg.base_lr, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda it: min(1.0, (it + 1) / cfg.warmup_iters))
        self.hooks = []

    def register_hooks(self, hooks):
        for h in hooks:
            h.trainer = weakref.proxy(self)
            self.hooks.append(h)

    def run_step(self):
        self.loss_dict = self.model(next(self.loader))
        losses = sum(self.loss_dict.values())
        self.optimizer.zero_grad()
        losses.backward()
        self.optimizer.step()
        self.scheduler.step()

    def train(self):
        for self.iter in range(self.cfg.max_iter):
            self.run_step()
            for h in self.hooks:
                h.after_step()


def main():
    parser = argparse.ArgumentParser()
    for name, value in vars(Config()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    cfg = Config(**vars(parser.parse_args()))
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s %(name)s]: %(message)s")
    dist.init_process_group("gloo")
    torch.manual_seed(cfg.seed)
    trainer = SimpleTrainer(cfg, DetNet())
    trainer.register_hooks([
        EvalHook(cfg.eval_period, SceneDataset(32, cfg.grid, seed=12, polygon_share=0.0)),
        PeriodicWriter(cfg.log_period),
    ])
    trainer.train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
