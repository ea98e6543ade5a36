from dataclasses import dataclass, field

import numpy as np


@dataclass
class Part:
    rank: int
    owned: np.ndarray
    edges: np.ndarray
    send: dict = field(default_factory=dict)
    recv: dict = field(default_factory=dict)


def owners(nodes, parts):
    bounds = np.linspace(0, nodes, parts + 1).astype(int)
    return np.searchsorted(bounds, np.arange(nodes), side="right") - 1


def make_part(edges, nodes, rank, parts):
    owner = owners(nodes, parts)
    src, dst = edges
    mine = owner[dst] == rank
    part = Part(rank=rank, owned=np.flatnonzero(owner == rank), edges=edges[:, mine])
    for peer in range(parts):
        if peer == rank:
            continue
        need = np.unique(src[mine & (owner[src] == peer)])
        if len(need):
            part.recv[peer] = need
        give = np.unique(src[(owner[src] == rank) & (owner[dst] == peer)])
        if len(give):
            part.send[peer] = give
    return part
