import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from impressions import Impressions, batches
from network import SharedBottom
from objectives import multi_task

WEIGHTS = {"ctr": 1.0, "cvr": 0.5}


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    log = Impressions(users=200, items=100, days=8, per_day=96)
    torch.manual_seed(0)
    model = DDP(SharedBottom(200, 100))
    opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
    average = {}
    for step, (user, item, click, convert) in enumerate(batches(log.shard(rank, world), 16)):
        ctr, cvr = model(user, item)
        loss, parts = multi_task(ctr, cvr, click, convert, WEIGHTS)
        opt.zero_grad()
        loss.backward()
        opt.step()
        for name, value in parts.items():
            average[name] = 0.9 * average.get(name, value.item()) + 0.1 * value.item()
        if rank == 0 and step % 6 == 0:
            print(f"step {step}", {k: round(v, 3) for k, v in average.items()}, flush=True)
    final = torch.tensor([average[k] for k in sorted(WEIGHTS)])
    dist.all_reduce(final)
    if rank == 0:
        print("final", (final / world).tolist(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
