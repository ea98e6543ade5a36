import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def host_of(client, world):
    return client % world


def local_train(model, x, y, epochs, lr):
    local = copy.deepcopy(model)
    opt = torch.optim.SGD(local.parameters(), lr=lr)
    for _ in range(epochs):
        for xb, yb in zip(x.split(16), y.split(16)):
            loss = F.cross_entropy(local(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
    return nn.utils.parameters_to_vector(local.parameters()).detach()


class Server:
    """Every rank keeps the global model; updates arrive by broadcast from the client's host."""

    def __init__(self, model, data, cfg):
        self.model = model
        self.data = data
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def vector(self):
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()

    def round(self, cohort):
        start = self.vector()
        total = sum(self.data.size(c) for c in cohort)
        merged = torch.zeros_like(start)
        updates = {}
        for c in cohort:
            if host_of(c, self.world) == self.rank:
                updates[c] = local_train(self.model, self.data.x[c], self.data.y[c],
                                         self.cfg["local_epochs"], self.cfg["lr"])
        for c in cohort:
            update = updates[c] if c in updates else torch.empty_like(start)
            dist.broadcast(update, src=host_of(c, self.world))
            merged += update * (self.data.size(c) / total)
        nn.utils.vector_to_parameters(merged, self.model.parameters())
        return (merged - start).norm().item()

    @torch.no_grad()
    def accuracy(self):
        hit = torch.zeros(2)
        for c in range(self.rank, len(self.data), self.world):
            hit[0] += (self.model(self.data.x[c]).argmax(1) == self.data.y[c]).sum()
            hit[1] += self.data.size(c)
        dist.all_reduce(hit)
        return (hit[0] / hit[1]).item()
