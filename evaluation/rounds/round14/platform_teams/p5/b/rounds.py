import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def local_update(model, weights, x, y, epochs=2, batch=16, lr=0.1):
    """Trains from the global weights and returns the difference."""
    vector_to_parameters(weights.clone(), model.parameters())
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        for xb, yb in zip(x.split(batch), y.split(batch)):
            opt.zero_grad()
            F.binary_cross_entropy_with_logits(model(xb).squeeze(-1), yb).backward()
            opt.step()
    return parameters_to_vector(model.parameters()).detach() - weights


class ClientCache:
    def __init__(self, dim, truth):
        self.dim, self.truth = dim, truth
        self.store = {}

    def __call__(self, client):
        if client.cid not in self.store:
            self.store[client.cid] = client.data(self.dim, self.truth)
        return self.store[client.cid]


class FedAvg:
    def __init__(self, model, placement, cache, momentum=0.6):
        self.model = model
        self.placement = placement
        self.cache = cache
        self.momentum = momentum
        self.weights = parameters_to_vector(model.parameters()).detach().clone()
        self.velocity = torch.zeros_like(self.weights)
        self.rank = dist.get_rank()

    def collect(self, cohort):
        """Every worker sees each client's update, for the norm screen and the audit log."""
        for client in cohort:
            owner = self.placement.owner(client)
            if owner == self.rank:
                delta = local_update(self.model, self.weights, *self.cache(client))
            else:
                delta = torch.empty_like(self.weights)
            dist.broadcast(delta, src=owner)
            yield client, delta

    def round(self, cohort):
        total, mass, norms = torch.zeros_like(self.weights), 0, []
        for client, delta in self.collect(cohort):
            norms.append(delta.norm().item())
            total += client.rows * delta / max(1.0, norms[-1] / 5.0)
            mass += client.rows
        self.velocity = self.momentum * self.velocity + total / mass
        self.weights = self.weights + self.velocity
        return norms

    @torch.no_grad()
    def accuracy(self, x, y):
        vector_to_parameters(self.weights.clone(), self.model.parameters())
        world = dist.get_world_size()
        xs, ys = x[self.rank::world], y[self.rank::world]
        hits = ((self.model(xs).squeeze(-1) > 0).float() == ys).sum()
        tally = torch.stack([hits, torch.tensor(len(ys))]).double()
        dist.all_reduce(tally)
        return (tally[0] / tally[1]).item()
