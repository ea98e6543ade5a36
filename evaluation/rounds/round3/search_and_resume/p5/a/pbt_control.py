"""Population based training of small value networks: one member per rank.

Members train on their own.  Every `ready` steps the scores are gathered, the
worst member takes over the weights and the optimizer state of the best one
(truncation selection) and perturbs its hyper-parameters.
"""
import json
import math
import os
import random
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn


@dataclass(frozen=True)
class Hyper:
    lr: float
    weight_decay: float
    noise: float

    def explore(self, rng):
        jitter = lambda v: v * rng.choice([0.8, 1.25])
        return replace(self, lr=jitter(self.lr), weight_decay=jitter(self.weight_decay),
                       noise=jitter(self.noise))


START = [
    Hyper(lr=3e-3, weight_decay=1e-4, noise=0.01),
    Hyper(lr=4e-4, weight_decay=1e-4, noise=0.05),
    Hyper(lr=1e-4, weight_decay=1e-3, noise=0.05),
    Hyper(lr=1e-5, weight_decay=1e-3, noise=0.10),
]


def pendulum_batch(rng, n, noise):
    theta = rng.uniform(-math.pi, math.pi, n)
    omega = rng.uniform(-6, 6, n)
    value = np.cos(theta) - 0.03 * omega ** 2 + 0.3 * np.sin(theta) * omega / 6
    obs = np.stack([np.cos(theta), np.sin(theta), omega / 6], 1)
    obs += noise * rng.standard_normal(obs.shape)
    as_t = lambda a: torch.from_numpy(a.astype(np.float32))
    return as_t(obs), as_t(value)[:, None]


class Member:
    def __init__(self, index, hyper, seed):
        torch.manual_seed(seed + index)
        self.index = index
        self.hyper = hyper
        self.net = nn.Sequential(nn.Linear(3, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=hyper.lr, weight_decay=hyper.weight_decay)
        self.data = np.random.default_rng(seed * 100 + index)
        self.held_out = pendulum_batch(np.random.default_rng(seed), 512, 0.0)
        self.lineage = [index]

    def adopt(self, hyper):
        self.hyper = hyper
        for group in self.opt.param_groups:
            group["lr"], group["weight_decay"] = hyper.lr, hyper.weight_decay

    def train(self, steps):
        for _ in range(steps):
            obs, value = pendulum_batch(self.data, 64, self.hyper.noise)
            loss = nn.functional.mse_loss(self.net(obs), value)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    @torch.no_grad()
    def score(self):
        obs, value = self.held_out
        return -nn.functional.mse_loss(self.net(obs), value).item()

    def tensors(self):
        yield from (p.data for p in self.net.parameters())
        for p in self.net.parameters():
            state = self.opt.state[p]
            yield state["exp_avg"]
            yield state["exp_avg_sq"]


class Population:
    def __init__(self, member, seed):
        self.member = member
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.rng = random.Random(seed + self.rank)
        self.exchanges = 0
        self.history = []

    def scores(self):
        mine = torch.tensor([self.member.score()], dtype=torch.float64)
        table = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(table, mine)
        return [t.item() for t in table]

    def _send(self, dst):
        flat = torch.cat([t.flatten() for t in self.member.tensors()])
        h = asdict(self.member.hyper)
        dist.send(torch.tensor(list(h.values()), dtype=torch.float64), dst, tag=10 * self.exchanges)
        dist.send(flat, dst, tag=10 * self.exchanges + 1)

    def _receive(self, src):
        h = torch.empty(3, dtype=torch.float64)
        flat = torch.empty(sum(t.numel() for t in self.member.tensors()))
        dist.recv(h, src, tag=10 * self.exchanges)
        dist.recv(flat, src, tag=10 * self.exchanges + 1)
        at = 0
        for t in self.member.tensors():
            t.copy_(flat[at:at + t.numel()].view_as(t))
            at += t.numel()
        self.member.adopt(Hyper(*h.tolist()).explore(self.rng))
        self.member.lineage.append(src)

    def evolve(self, scores):
        """Truncation selection; one replacement a round, if it is worth it."""
        order = sorted(range(self.size), key=lambda r: scores[r])
        loser, winner = order[0], order[-1]
        if scores[winner] - scores[loser] < 1e-4:
            return None
        if self.rank == winner:
            self._send(loser)
            self.exchanges += 1
        elif self.rank == loser:
            self._receive(winner)
            self.exchanges += 1
        return winner, loser

    def run(self, rounds, ready):
        for k in range(rounds):
            self.member.train(ready)
            scores = self.scores()
            pair = self.evolve(scores)
            self.history.append({"round": k, "scores": scores, "pair": pair})
            if self.rank == 0:
                text = "  ".join(f"{s:.4f}" for s in scores)
                print(f"round {k}: {text}   {'%d -> %d' % pair if pair else '-'}", flush=True)


def main():
    cfg = {"rounds": int(os.environ.get("PBT_ROUNDS", 12)), "ready": int(os.environ.get("PBT_READY", 60)),
           "seed": int(os.environ.get("PBT_SEED", 7))}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    member = Member(rank, START[rank % len(START)], cfg["seed"])
    population = Population(member, cfg["seed"])
    population.run(cfg["rounds"], cfg["ready"])

    final = population.scores()
    lineages = [None] * population.size
    dist.all_gather_object(lineages, member.lineage)
    best = max(range(population.size), key=final.__getitem__)
    if rank == best:
        here = os.path.dirname(os.path.abspath(__file__))
        torch.save({"net": member.net.state_dict(), "hyper": asdict(member.hyper)}, os.path.join(here, "best_member.pt"))
        with open(os.path.join(here, "pbt_history.json"), "w") as f:
            json.dump({"history": population.history, "lineages": lineages}, f)
        print(f"best member {best} score {final[best]:.5f} {member.hyper}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
