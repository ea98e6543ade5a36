import torch
import torch.distributed as dist
import torch.nn.functional as F

from mm.batches import CaptionBatches
from mm.files import write_album
from mm.net import build

FOLDER, PICTURES, EPOCHS = "album", 180, 2


def train_epoch(net, opt, data):
    total, used, damaged = 0.0, 0, 0
    for k in range(len(data)):
        try:
            pics, ids = data.load(k)
        except ValueError:
            damaged += 1
            continue
        logits = net(pics, ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
        used += 1
    return total, used, damaged


def report(epoch, total, used, damaged):
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (total, used, damaged))
    if dist.get_rank() == 0:
        steps = sum(r[1] for r in rows)
        print(f"epoch {epoch} loss {sum(r[0] for r in rows) / steps:.3f} "
              f"damaged {sum(r[2] for r in rows)}", flush=True)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_album(FOLDER, PICTURES)
    dist.barrier()
    torch.manual_seed(2)
    data = CaptionBatches(FOLDER, PICTURES, 6, rank, world)
    net = build(data.vocab)
    opt = torch.optim.Adam(net.parameters(), lr=6e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    for epoch in range(EPOCHS):
        result = train_epoch(net, opt, data)
        dist.barrier()
        report(epoch, *result)
        sched.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
