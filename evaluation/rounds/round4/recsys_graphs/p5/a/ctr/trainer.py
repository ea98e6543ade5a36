import copy
import logging
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from .model import multi_task_loss

logger = logging.getLogger(__name__)


class Trainer:
    def __init__(self, model, cfg, rank, world, workdir):
        self.cfg, self.rank, self.world, self.workdir = cfg, rank, world, workdir
        self.model = DistributedDataParallel(model)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=cfg.lr)
        warm = max(1, cfg.warmup_steps)
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda s: min(1.0, (s + 1) / warm))
        self.best, self.best_state, self.strikes = float("inf"), None, 0
        self.global_step = 0

    def conv_weight(self, epoch):
        # curriculum: learn to predict clicks first, then fade conversions in
        ramp = (epoch + 1) / self.cfg.conv_ramp_epochs
        return self.cfg.conv_weight * min(1.0, ramp)

    def train_epoch(self, loader, epoch):
        self.model.train()
        weight, running = self.conv_weight(epoch), 0.0
        for cat, num, click, conv in loader:
            out = self.model(cat, num)
            loss = multi_task_loss(out, click, conv, weight)
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            clip_grad_norm_(self.model.parameters(), self.cfg.clip)
            self.opt.step()
            self.sched.step()
            self.global_step += 1
            running += loss.item()
        return running / len(loader)

    @torch.no_grad()
    def evaluate(self, loader):
        self.model.eval()
        sums = torch.zeros(4, dtype=torch.float64)  # click loss, rows, conversion loss, clicks
        bce = torch.nn.functional.binary_cross_entropy_with_logits
        for cat, num, click, conv in loader:
            out = self.model.module(cat, num)
            sums[0] += bce(out["click"], click, reduction="sum").item()
            sums[1] += click.numel()
            hit = click > 0
            if hit.any():
                sums[2] += bce(out["conversion"][hit], conv[hit], reduction="sum").item()
                sums[3] += hit.sum().item()
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item(), (sums[2] / sums[3].clamp(min=1)).item()

    def checkpoint(self, epoch, metric):
        self.best, self.best_state = metric, copy.deepcopy(self.model.module.state_dict())
        if self.rank == 0:
            path = os.path.join(self.workdir, f"epoch_{epoch}.pt")
            torch.save({"model": self.best_state, "metric": metric, "step": self.global_step}, path)

    def fit(self, train, train_sampler, valid):
        for epoch in range(self.cfg.epochs):
            train_sampler.set_epoch(epoch)
            loss = self.train_epoch(train, epoch)
            click_ll, conv_ll = self.evaluate(valid)
            logger.info("epoch %d train %.4f  valid click %.4f conversion %.4f", epoch, loss, click_ll, conv_ll)
            # the same number everywhere, so everybody takes the same branch
            if click_ll < self.best - 1e-4:
                self.strikes = 0
                self.checkpoint(epoch, click_ll)
            else:
                self.strikes += 1
            if self.strikes > self.cfg.patience:
                logger.info("early stop after epoch %d", epoch)
                break
        if self.best_state is not None:
            self.model.module.load_state_dict(self.best_state)
        dist.barrier()
