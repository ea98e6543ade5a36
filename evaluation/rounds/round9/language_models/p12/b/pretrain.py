import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from meters import Meters
from mixture import DOMAINS, VOCAB, Mixture
from net import Net

SCHEDULE = [
    (0, {"books": 0.3, "code": 0.3, "forum": 0.2, "web": 0.2}),
    (12, {"books": 0.3, "code": 0.05, "forum": 0.15, "web": 0.5}),
]
STEPS, LOG_EVERY = 24, 4


def weights_at(step):
    return [w for start, w in SCHEDULE if start <= step][-1]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    meters = Meters(DOMAINS, dist.new_group(backend="gloo"))
    torch.manual_seed(0)
    model = DDP(Net(VOCAB))
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    source = Mixture(weights_at(0), rank, batch=4, length=12)
    for step in range(STEPS):
        source.weights = torch.tensor([weights_at(step)[d] for d in DOMAINS])
        ids, domain = source.draw()
        losses = model(ids)
        opt.zero_grad()
        losses.mean().backward()
        opt.step()
        for i, d in enumerate(domain.tolist()):
            meters.add(DOMAINS[d], losses[i].item())
        if (step + 1) % LOG_EVERY == 0:
            line = meters.averages()
            if rank == 0:
                print(f"step {step + 1}", " ".join(f"{k}={v:.3f}" for k, v in line.items()), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
