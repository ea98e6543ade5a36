import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from moe import groups as moe_groups
from moe.layer import MoELayer
from moe.sync import average_gradients, broadcast_parameters


class MoELM(nn.Module):
    def __init__(self, vocab, dim, layers, groups):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.blocks = nn.ModuleList(MoELayer(dim, 2 * dim, groups) for _ in range(layers))
        self.out = nn.Linear(dim, vocab)

    def forward(self, tokens):
        h, _ = self.mix(self.emb(tokens))
        shape, h = h.shape, h.reshape(-1, h.shape[-1])
        aux = 0.0
        for block in self.blocks:
            h, a = block(h)
            aux = aux + a
        return self.out(h).view(*shape[:2], -1), aux / len(self.blocks)


def batches(vocab, batch, length, gen):
    """Arithmetic sequences modulo the vocabulary, with some noise."""
    while True:
        start = torch.randint(vocab, (batch, 1), generator=gen)
        step = torch.randint(1, 4, (batch, 1), generator=gen)
        seq = (start + step * torch.arange(length)) % vocab
        noisy = torch.rand(seq.shape, generator=gen) < 0.05
        yield torch.where(noisy, torch.randint(vocab, seq.shape, generator=gen), seq)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--ep-size", type=int, default=2)
    ap.add_argument("--dim", type=int, default=32)
    ap.add_argument("--layers", type=int, default=2)
    ap.add_argument("--vocab", type=int, default=24)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = moe_groups.build(args.ep_size)
    torch.manual_seed(5 + rank)
    model = MoELM(args.vocab, args.dim, args.layers, groups)
    broadcast_parameters(model, groups)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    stream = batches(args.vocab, 8, 12, torch.Generator().manual_seed(100 + rank))
    for step in range(args.steps):
        tokens = next(stream)
        logits, aux = model(tokens[:, :-1])
        nll = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        opt.zero_grad()
        (nll + 0.01 * aux).backward()
        average_gradients(model, groups)
        opt.step()
        if step % 10 == 9:
            report = torch.tensor([nll.item(), aux.item()])
            dist.all_reduce(report)
            if rank == 0:
                nll_, aux_ = (report / dist.get_world_size()).tolist()
                print(f"step {step + 1} nll {nll_:.4f} balance {aux_:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
