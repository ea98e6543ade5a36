import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import refcache
from policy import Policy
from settings import DPOSettings


def preference_data(s):
    g = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, s.vocab, (s.n_pairs, s.prompt_len), generator=g)
    chosen = torch.randint(0, s.vocab // 2, (s.n_pairs, s.answer_len), generator=g)
    rejected = torch.randint(s.vocab // 2, s.vocab, (s.n_pairs, s.answer_len), generator=g)
    return prompt, chosen, rejected


def make_policy(s):
    torch.manual_seed(s.ref_seed)
    return Policy(s.vocab)


@torch.no_grad()
def reference_logps(s, data):
    ref = make_policy(s).eval()
    prompt, chosen, rejected = data
    return {"chosen": ref(prompt, chosen), "rejected": ref(prompt, rejected)}


def dpo_loss(model, batch, ref, beta):
    prompt, chosen, rejected = batch
    both = model(torch.cat([prompt, prompt]), torch.cat([chosen, rejected]))
    pc, pr = both.chunk(2)
    margin = (pc - ref["chosen"]) - (pr - ref["rejected"])
    return -F.logsigmoid(beta * margin).mean(), (margin > 0).float().mean()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    s = DPOSettings()
    data = preference_data(s)
    ref = refcache.load_or_compute(s, rank, lambda: reference_logps(s, data))

    model = DDP(make_policy(s))
    opt = torch.optim.RMSprop(model.parameters(), lr=s.lr)
    warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: min(1.0, (k + 1) / 4))

    mine = torch.arange(rank, s.n_pairs, world)
    for epoch in range(s.epochs):
        g = torch.Generator().manual_seed(epoch)
        order = mine[torch.randperm(len(mine), generator=g)]
        for idx in order.split(s.batch_size):
            batch = [t[idx] for t in data]
            loss, acc = dpo_loss(model, batch, {k: v[idx] for k, v in ref.items()}, s.beta)
            opt.zero_grad()
            loss.backward()
            opt.step()
            warm.step()
        stats = torch.stack([loss.detach(), acc]) / world
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} dpo loss {stats[0]:.4f} preference accuracy {stats[1]:.2f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "policy.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
