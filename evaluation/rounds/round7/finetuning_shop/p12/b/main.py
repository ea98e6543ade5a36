import torch
import torch.distributed as dist
import torch.nn.functional as F

from adapters import AdaptedEncoder
from customers import CLASSES, DIM, customer_of, samples
from lanes import Lane

PER_LANE, ROUNDS, BATCH = 2, 3, 8


def lane_step(model, opt, lane, x, y):
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    lane.mean(flat)
    offset = 0
    for p in model.parameters():
        p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
        offset += p.numel()
    opt.step()
    return loss.item()


def merge_shared(model):
    world = dist.get_world_size()
    for p in model.shared():
        dist.all_reduce(p.data)
        p.data.div_(world)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(77)
    lane = Lane(PER_LANE)
    name, x, y = samples(customer_of(rank, PER_LANE), lane.position, PER_LANE)
    model = AdaptedEncoder(DIM, CLASSES)
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    for rnd in range(ROUNDS):
        g = torch.Generator().manual_seed(rnd)
        losses = []
        for idx in torch.randperm(len(x), generator=g).split(BATCH):
            losses.append(lane_step(model, opt, lane, x[idx], y[idx]))
        merge_shared(model)
        if lane.position == 0:
            print(f"round {rnd} {name}: {len(losses)} steps, loss {sum(losses) / len(losses):.3f}", flush=True)
    if lane.position == 0:
        torch.save(model.state_dict(), f"adapter_{name}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
