import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from model import concatenated, frozen_copy

log = logging.getLogger("dpo")


@dataclass
class DPOArgs:
    beta: float = 0.2
    lr: float = 2e-3
    batch: int = 8
    epochs: int = 2
    label_smoothing: float = 0.05
    log_every: int = 10
    seed: int = 21


class DPOTrainer:
    def __init__(self, model, train_set, eval_set, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        self.reference = frozen_copy(model)
        self.policy = DDP(model)
        self.sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed, drop_last=True)
        self.train_loader = DataLoader(train_set, args.batch, sampler=self.sampler, drop_last=True)
        eval_sampler = DistributedSampler(eval_set, shuffle=False)
        self.eval_loader = DataLoader(eval_set, args.batch, sampler=eval_sampler)
        self.optim = torch.optim.AdamW(self.policy.parameters(), lr=args.lr)
        self.step = 0

    def margins(self, batch):
        """Implicit reward of the chosen minus that of the rejected answer."""
        ids, mask = concatenated(batch)
        policy = self.policy.module.sequence_logprob(ids, mask)
        with torch.no_grad():
            reference = self.reference.sequence_logprob(ids, mask)
        chosen, rejected = (self.args.beta * (policy - reference)).chunk(2)
        return chosen - rejected

    def loss(self, margin):
        eps = self.args.label_smoothing
        return -(F.logsigmoid(margin) * (1 - eps) + F.logsigmoid(-margin) * eps).mean()

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        for batch in self.train_loader:
            margin = self.margins(batch)
            loss = self.loss(margin)
            self.optim.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self.optim.step()
            self.step += 1
            if self.step % self.args.log_every == 0:
                stats = torch.stack([loss.detach(), (margin > 0).float().mean()])
                dist.all_reduce(stats)
                if self.rank == 0:
                    log.info("epoch %d step %d loss %.4f accuracy %.3f", epoch, self.step, *(stats / self.world).tolist())

    @torch.no_grad()
    def evaluate(self):
        self.policy.eval()
        hits = torch.zeros(2)
        for batch in self.eval_loader:
            margin = self.margins(batch)
            hits += torch.tensor([(margin > 0).sum().item(), float(len(margin))])
        dist.all_reduce(hits)
        self.policy.train()
        return (hits[0] / hits[1]).item()

    def fit(self):
        for epoch in range(self.args.epochs):
            self.train_epoch(epoch)
            accuracy = self.evaluate()
            if self.rank == 0:
                log.info("epoch %d reward accuracy %.3f", epoch, accuracy)
