import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from sftkit.data import loaders
from sftkit.loop import evaluate, train_epoch
from sftkit.plan import Recipe, make_plan


class Lm(nn.Module):
    def __init__(self, vocab, dim=40):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.out(h)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    recipe = Recipe()
    train, sampler, val = loaders(recipe, rank, world)
    plan = make_plan(recipe, sampler.num_samples)
    model = DDP(Lm(train.dataset.vocab))
    opt = torch.optim.AdamW(model.parameters(), lr=recipe.peak_lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(
        opt, max_lr=recipe.peak_lr, total_steps=plan.total_steps, pct_start=recipe.warmup_share)
    if rank == 0:
        print(plan, flush=True)
    for epoch in range(recipe.epochs):
        sampler.set_epoch(epoch)
        tr = train_epoch(model, train, opt, sched, recipe.accumulate)
        va = evaluate(model, val)
        if rank == 0:
            print(f"epoch {epoch} train {tr:.3f} val {va:.3f} lr {sched.get_last_lr()[0]:.2e}", flush=True)
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, "sft_last.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
