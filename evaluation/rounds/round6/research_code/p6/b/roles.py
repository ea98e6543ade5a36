import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from bandit import Exp3


def make_model(dim):
    return nn.Sequential(nn.Linear(dim, 48), nn.Tanh(), nn.Linear(48, 1))


class Trainer:
    def __init__(self, cfg, domains, group):
        self.cfg, self.domains = cfg, domains
        self.rank = dist.get_rank()
        self.group = group
        self.model = DDP(make_model(cfg.dim), process_group=self.group)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=cfg.lr)
        self.bandit = Exp3(cfg.domains, 0.2, cfg.seed)
        self.gen = torch.Generator().manual_seed(cfg.seed + 1 + self.rank)

    def train_on(self, arm):
        first = last = 0.0
        for i in range(self.cfg.inner):
            x, y = self.domains.sample(arm, self.cfg.batch, self.gen)
            loss = F.mse_loss(self.model(x).squeeze(1), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            last = loss.item()
            first = first or last
        gain = torch.tensor([(first - last) / max(first, 1e-6)])
        dist.all_reduce(gain, group=self.group)
        return gain.item() / dist.get_world_size(self.group)

    def run(self):
        for rnd in range(self.cfg.rounds):
            arm = self.bandit.choose()
            self.bandit.update(arm, self.train_on(arm))
            if self.rank == 0 and (rnd + 1) % self.cfg.eval_every == 0:
                vec = nn.utils.parameters_to_vector(self.model.parameters()).detach()
                dist.send(vec, dst=self.cfg.evaluator)
        if self.rank == 0:
            print("domain weights", self.bandit.probabilities().round(3).tolist(), flush=True)


class Evaluator:
    def __init__(self, cfg, domains):
        self.cfg, self.domains = cfg, domains
        self.model = make_model(cfg.dim)
        self.gen = torch.Generator().manual_seed(cfg.seed + 999)

    @torch.no_grad()
    def run(self):
        vec = nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()
        for i in range(self.cfg.rounds // self.cfg.eval_every):
            dist.recv(vec, src=0)
            nn.utils.vector_to_parameters(vec, self.model.parameters())
            errors = []
            for d in range(self.cfg.domains):
                x, y = self.domains.sample(d, 256, self.gen)
                errors.append(F.mse_loss(self.model(x).squeeze(1), y).item())
            print(f"eval {i}: " + " ".join(f"{e:.3f}" for e in errors), flush=True)
