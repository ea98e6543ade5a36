import math
import random
import time

import torch
import torch.distributed as dist

from problem import tour_length


class Clock:
    """Seconds since the annealing began, against a budget."""

    def __init__(self, budget):
        self.budget = budget
        self.begin = time.monotonic()

    def fraction(self):
        return min((time.monotonic() - self.begin) / self.budget, 1.0)


def propose(tour, rng):
    i, j = sorted(rng.sample(range(len(tour)), 2))
    return tour[:i] + tour[i:j + 1][::-1] + tour[j + 1:]


class Annealer:
    """Independent chains; after every sweep all of them restart from the best tour."""

    def __init__(self, cities, tour, cfg):
        self.group = dist.new_group()
        self.cities = cities
        self.cfg = cfg
        self.rank = dist.get_rank()
        self.rng = random.Random(cfg.seed + self.rank)
        self.tour = list(tour)
        self.length = tour_length(cities, self.tour)
        self.sweeps = 0

    def temperature(self, fraction):
        return self.cfg.t_start * (self.cfg.t_end / self.cfg.t_start) ** fraction

    def sweep(self, temperature):
        for _ in range(self.cfg.moves):
            cand = propose(self.tour, self.rng)
            length = tour_length(self.cities, cand)
            if length < self.length or self.rng.random() < math.exp((self.length - length) / temperature):
                self.tour, self.length = cand, length

    def share(self):
        lengths = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(lengths, torch.tensor([self.length], dtype=torch.float32), group=self.group)
        best = int(torch.cat(lengths).argmin())
        tour = torch.tensor(self.tour)
        dist.broadcast(tour, src=best, group=self.group)
        self.tour = tour.tolist()
        self.length = tour_length(self.cities, self.tour)

    def run(self, clock):
        fraction = clock.fraction()
        while fraction < 1.0:
            self.sweep(self.temperature(fraction))
            self.share()
            self.sweeps += 1
            if self.rank == 0 and self.sweeps % self.cfg.log_every == 0:
                print(f"sweep {self.sweeps} at {fraction:.2f}: length {self.length:.3f}", flush=True)
            fraction = clock.fraction()
        return self.length
