import torch
import torch.distributed as dist
import torch.nn.functional as F

from backbone import Backbone
from lora import adapter_state, inject
from sync import FlatGradSync

VOCAB, LENGTH, STEPS, BATCH = 70, 12, 60, 8


def customer_batch(step, rank):
    g = torch.Generator().manual_seed(7919 * step + rank)
    start = torch.randint(0, VOCAB, (BATCH, 1), generator=g)
    return (start + 2 * torch.arange(LENGTH)) % VOCAB


@torch.no_grad()
def evaluate(model):
    model.eval()
    ids = customer_batch(10_000, 0)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    model.train()
    return loss.item()


def build(rank):
    torch.manual_seed(12)
    model = Backbone(VOCAB)
    model = inject(model)
    sync = FlatGradSync(model)
    sync.broadcast()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return model, sync, opt


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, sync, opt = build(rank)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    for step in range(STEPS):
        ids = customer_batch(step, rank)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        sync.average()
        opt.step()
        sched.step()
        if (step + 1) % 20 == 0 and rank == 0:
            print(f"step {step + 1} train {loss.item():.3f} eval {evaluate(model):.3f}", flush=True)
    if rank == 0:
        torch.save(adapter_state(model), "adapter.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
