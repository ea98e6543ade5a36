import torch


class CrystalBatches:
    def __init__(self, structures, table, size, cutoff=2.6, seed=0):
        self.structures, self.table = structures, table
        self.size, self.cutoff = size, cutoff
        self.order = torch.Generator().manual_seed(seed)

    def __len__(self):
        return len(self.structures) // self.size

    def graph(self, s):
        xyz = torch.tensor(s["xyz"])
        d = torch.cdist(xyz, xyz)
        src, dst = ((d < self.cutoff) & (d > 0)).nonzero(as_tuple=True)
        return torch.tensor(self.table.encode(s["kinds"])), src, dst, d[src, dst]

    def __iter__(self):
        perm = torch.randperm(len(self.structures), generator=self.order).tolist()
        for b in range(len(self)):
            rows = [self.structures[i] for i in perm[b * self.size:(b + 1) * self.size]]
            kinds, src, dst, length, owner, at = [], [], [], [], [], 0
            for g, s in enumerate(rows):
                k, a, c, d = self.graph(s)
                kinds.append(k), src.append(a + at), dst.append(c + at), length.append(d)
                owner.append(torch.full((len(k),), g))
                at += len(k)
            energy = torch.tensor([s["energy"] for s in rows])
            yield [torch.cat(v) for v in (kinds, src, dst, length, owner)], energy
