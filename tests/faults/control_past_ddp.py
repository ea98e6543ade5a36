"""Programs that rightly use the model inside of DDP, or train parameters that DDP does not average."""

import copy

import torch
import torch.distributed as dist
from _job import FAULT, STEPS, Trainer, batch, begin, end
from torch import nn

LABEL = {"verdict": "PASS"}

rank, world_size = begin()
generator, critic = Trainer(), Trainer(nn.Sequential(nn.Linear(1, 1), nn.Tanh()))
average = copy.deepcopy(generator.model.module)
by_hand, in_one_tensor = nn.Linear(1, 1), nn.Linear(1, 1)
own = torch.nn.Parameter(torch.zeros(1))  # each rank's, from an optimizer of its own
generator.optimizer.add_param_group({"params": [*by_hand.parameters(), *in_one_tensor.parameters()]})
own_optimizer = torch.optim.SGD([own], lr=0.01)
for _ in range(STEPS if not FAULT else 2 * STEPS):
    with generator.model.no_sync():
        generator.model(batch() + rank).square().mean().backward()
    # Its gradients are averaged together with those of the pass that follows.
    generator.model.module(batch() + rank).square().mean().backward()
    fake = generator.model(batch() + rank)
    loss = in_one_tensor(by_hand(fake)).square().mean() + (own - rank - 1).square().sum()
    loss.backward()
    for parameter in by_hand.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    flat = torch.cat([parameter.grad.flatten() for parameter in in_one_tensor.parameters()])
    dist.all_reduce(flat)
    in_one_tensor.weight.grad.fill_(flat[0] / world_size)
    in_one_tensor.bias.grad.fill_(flat[1] / world_size)
    generator.optimizer.step()
    own_optimizer.step()
    own_optimizer.zero_grad()
    generator.optimizer.zero_grad()
    critic.model(generator.model(batch() + rank).detach()).square().mean().backward()
    critic.optimizer.step()
    critic.optimizer.zero_grad()
    with torch.no_grad():
        for mean, parameter in zip(average.parameters(), generator.model.module.parameters(), strict=True):
            mean.lerp_(parameter, 0.1)
        generator.model.module(batch() + rank)
    generator.model.module(batch())  # an evaluation that forgot no_grad
end()
