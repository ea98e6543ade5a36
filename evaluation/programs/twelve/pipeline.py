"""Two pipeline stages of two tensor-parallel ranks each: four processes, a group for each stage and each lane."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 16


class ReduceOverStage(torch.autograd.Function):
    """Sums the parts of a layer that its ranks have computed."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Stage(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + ReduceOverStage.apply(self.down(torch.relu(self.up(x))), self.group)


def forward_backward(stage, rank, micro_batches, lane):
    """The first stage sends activations on and gets their gradients back, one micro-batch after the other."""
    partner = (rank + 2) % 4
    total = 0.0
    for x in micro_batches:
        if rank < 2:
            out = stage(x)
            dist.send(out.detach(), dst=partner)
            grad = torch.empty_like(out)
            dist.recv(grad, src=partner)
            out.backward(grad)
        else:
            received = torch.empty(x.shape)
            dist.recv(received, src=partner)
            received.requires_grad_()
            loss = (stage(received) - x).square().mean()
            loss.backward()
            dist.send(received.grad, dst=partner)
            total += loss.item()
    result = torch.tensor(total)
    dist.broadcast(result, src=lane[1], group=lane[2])
    return result.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--fault", choices=["none", "hang", "fail"], default="none")
    parser.add_argument("--at", type=int, default=15)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    lanes = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    lane = (rank % 2, rank % 2 + 2, lanes[rank % 2])
    torch.manual_seed(rank)
    stage = Stage(stages[rank // 2])
    optimizer = torch.optim.SGD(stage.parameters(), lr=1e-2)

    for step in range(args.steps):
        torch.manual_seed(step)
        micro_batches = torch.randn(4, 8, WIDTH).unbind()
        if step == args.at and args.fault == "hang" and rank == 3:
            micro_batches = torch.randn(5, 8, WIDTH).unbind()
        if step == args.at and args.fault == "fail" and rank % 2 == 1:
            lane = (1, 2, lanes[1])
        loss = forward_backward(stage, rank, micro_batches, lane)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {loss:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
