"""The two roles of the job. An actor streams its responses to its scorer, which answers with rewards."""
import logging

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from model import Policy, RewardModel
from rollout import RolloutEngine, pad

log = logging.getLogger("rl")


class Actor:
    def __init__(self, cfg, rank, group):
        self.cfg, self.rank, self.scorer = cfg, rank, cfg.partner(rank)
        self.policy = DDP(Policy(cfg.vocab, cfg.hidden), process_group=group)
        self.optim = torch.optim.Adam(self.policy.parameters(), lr=cfg.actor_lr)
        self.engine = RolloutEngine(self.policy.module, cfg, cfg.seed * 100 + rank)

    def run(self, step):
        rollouts = self.engine.collect()
        ids = torch.stack([pad(r, self.cfg.max_new_tokens) for r in rollouts])
        for row in ids:
            dist.send(row, dst=self.scorer)
        rewards = torch.empty(len(ids))
        dist.recv(rewards, src=self.scorer)
        advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-5)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(r) for r in rollouts]).unsqueeze(1)
        logp, entropy = self.policy(ids)
        loss = -((logp * advantage.unsqueeze(1) + self.cfg.entropy_coef * entropy) * mask).sum() / mask.sum()
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        if self.rank == self.cfg.actors[0] and step % 10 == 0:
            log.info("step %d reward %.3f length %.1f", step, rewards.mean(), mask.sum() / len(ids))


class Scorer:
    def __init__(self, cfg, rank, group):
        self.cfg, self.rank, self.actor = cfg, rank, cfg.partner(rank)
        self.model = DDP(RewardModel(cfg.vocab, cfg.hidden), process_group=group)
        self.optim = torch.optim.Adam(self.model.parameters(), lr=cfg.reward_lr)

    def receive(self):
        row = torch.empty(self.cfg.max_new_tokens, dtype=torch.long)
        for _ in range(self.cfg.rollouts_per_step):
            dist.recv(row, src=self.actor)
            yield row.clone()

    def run(self, step):
        ids = torch.stack(list(self.receive()))
        with torch.no_grad():
            rewards = self.model.module(ids) + 0.1 * (ids > 20).float().mean(1)
        dist.send(rewards, dst=self.actor)
        target = (ids > 20).float().mean(1)
        loss = (self.model(ids) - target).square().mean()
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
