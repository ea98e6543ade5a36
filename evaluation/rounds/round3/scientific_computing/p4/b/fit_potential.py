"""Behler-Parrinello style potential: one small network per element.

Energies and forces are fitted to frames of a mixed trajectory (water, methane,
formaldehyde clusters ...) with DistributedDataParallel over the frames.
"""
import argparse
import json
import pathlib
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ELEMENTS = ["H", "C", "O"]
FORMULAS = [("H", "H", "O"), ("C", "H", "H", "H", "H"), ("C", "H", "H", "O"), ("C", "O", "O")]


def reference(pos, z):
    """Cheap stand-in for DFT: Morse pairs with element dependent depth."""
    i, j = torch.triu_indices(len(z), len(z), 1)
    d = (pos[i] - pos[j]).norm(dim=1)
    depth = 0.3 + 0.1 * (z[i] + z[j]).float()
    r0 = 1.0 + 0.15 * (z[i] + z[j]).float()
    return (depth * ((1 - torch.exp(-1.5 * (d - r0))).pow(2) - 1)).sum()


class Frames(Dataset):
    """Clusters of `copies` molecules, jittered around a lattice."""

    def __init__(self, n, seed, copies=2):
        rng = random.Random(seed)
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            formula = rng.choices(FORMULAS, weights=[5, 2, 4, 2])[0] * copies
            z = torch.tensor([ELEMENTS.index(e) for e in formula])
            base = torch.cartesian_prod(*[torch.arange(3.0)] * 3)[: len(z)] * 1.3
            pos = (base + 0.15 * torch.randn(len(z), 3, generator=g)).requires_grad_()
            e = reference(pos, z)
            f, = torch.autograd.grad(-e, pos)
            self.items.append((pos.detach(), z, e.detach(), f))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    """Concatenate the frames of a batch, with an index of the frame."""
    frame = torch.cat([torch.full((len(z),), k) for k, (_, z, _, _) in enumerate(items)])
    pos, z = torch.cat([i[0] for i in items]), torch.cat([i[1] for i in items])
    e, f = torch.stack([i[2] for i in items]), torch.cat([i[3] for i in items])
    return pos, z, frame, e, f


def neighbour_list(pos, frame, cutoff):
    with torch.no_grad():
        d = torch.cdist(pos, pos)
        near = (d < cutoff) & (frame[:, None] == frame[None, :])
        near.fill_diagonal_(False)
        return near.nonzero(as_tuple=True)


class Potential(nn.Module):
    def __init__(self, cutoff=4.0, n_rad=8, width=16):
        super().__init__()
        self.cutoff, self.n_rad = cutoff, n_rad
        self.register_buffer("centers", torch.linspace(0.6, cutoff, n_rad))
        self.nets = nn.ModuleDict({
            e: nn.Sequential(nn.Linear(n_rad * len(ELEMENTS), width), nn.SiLU(),
                             nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
            for e in ELEMENTS})

    def descriptors(self, pos, z, frame):
        i, j = neighbour_list(pos, frame, self.cutoff)
        d = (pos[i] - pos[j]).norm(dim=1, keepdim=True)
        fc = 0.5 * (torch.cos(torch.pi * d / self.cutoff) + 1)
        rad = torch.exp(-4 * (d - self.centers).pow(2)) * fc
        slot = i * len(ELEMENTS) + z[j]
        g = rad.new_zeros(len(z) * len(ELEMENTS), self.n_rad).index_add(0, slot, rad)
        return g.view(len(z), -1)

    def forward(self, pos, z, frame, n_frames):
        pos = pos.detach().requires_grad_()
        g = self.descriptors(pos, z, frame)
        energy = pos.new_zeros(n_frames)
        for k, e in enumerate(ELEMENTS):
            sel = z == k
            if sel.any():
                energy = energy.index_add(0, frame[sel], self.nets[e](g[sel]).squeeze(1))
        forces, = torch.autograd.grad(-energy.sum(), pos, create_graph=True)
        return energy, forces


def criterion(energy, forces, e, f, n_atoms, w_force):
    return ((energy - e) / n_atoms).pow(2).mean() + w_force * (forces - f).pow(2).mean()


def evaluate(net, frames, rank, world):
    err = torch.zeros(2, dtype=torch.double)
    for i in range(rank, len(frames), world):
        pos, z, frame, e, f = collate([frames[i]])
        energy, forces = net(pos, z, frame, 1)
        err += torch.tensor([(energy - e).abs().item() / len(z), (forces - f).abs().mean().item()])
    dist.all_reduce(err)
    return (err / len(frames)).tolist()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--frames", type=int, default=160)
    ap.add_argument("--batch-size", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--w-force", type=float, default=0.5)
    ap.add_argument("--seed", type=int, default=13)
    ap.add_argument("--dir", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent / "fit")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    train, valid = Frames(args.frames, args.seed), Frames(24, args.seed + 1)
    sampler = DistributedSampler(train, world, rank, seed=args.seed, drop_last=True)
    loader = DataLoader(train, args.batch_size, sampler=sampler, collate_fn=collate, drop_last=True)
    net = Potential()
    model = DDP(net, find_unused_parameters=True)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    history, start = [], time.time()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        running = 0.0
        for pos, z, frame, e, f in loader:
            n_atoms = torch.bincount(frame, minlength=len(e))
            energy, forces = model(pos, z, frame, len(e))
            loss = criterion(energy, forces, e, f, n_atoms, args.w_force)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            running += loss.item()
        sched.step()
        mae_e, mae_f = evaluate(net, valid, rank, world)
        history.append({"epoch": epoch, "loss": running / len(loader), "mae_e": mae_e, "mae_f": mae_f})
        if rank == 0:
            print("epoch %2d  loss %.4f  E mae %.4f  F mae %.4f  %.1fs"
                  % (epoch, running / len(loader), mae_e, mae_f, time.time() - start), flush=True)
    if rank == 0:
        args.dir.mkdir(exist_ok=True)
        torch.save(net.state_dict(), args.dir / "potential.pt")
        (args.dir / "history.json").write_text(json.dumps(history, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
