# stochastic block model with noisy features, stored as CSR
import numpy as np


class Graph:
    def __init__(self, n=2400, classes=6, dim=24, avg_deg=9, seed=0):
        rng = np.random.default_rng(seed)
        self.n, self.classes, self.dim = n, classes, dim
        self.y = rng.integers(classes, size=n)
        m = n * avg_deg // 2
        src = rng.integers(n, size=m)
        # 70% of the edges stay in the block
        by_class = [np.flatnonzero(self.y == c) for c in range(classes)]
        same = rng.random(m) < 0.7
        dst = rng.integers(n, size=m)
        dst[same] = [rng.choice(by_class[c]) for c in self.y[src[same]]]
        u = np.concatenate([src, dst])
        v = np.concatenate([dst, src])
        order = np.argsort(u, kind="stable")
        self.indices = v[order]
        self.indptr = np.concatenate([[0], np.cumsum(np.bincount(u, minlength=n))])
        centers = rng.normal(size=(classes, dim))
        self.x = (0.6 * centers[self.y] + rng.normal(size=(n, dim))).astype(np.float32)
        perm = rng.permutation(n)
        self.train, self.val = perm[: n // 2], perm[n // 2: n // 2 + n // 4]

    def neighbours(self, v):
        return self.indices[self.indptr[v]:self.indptr[v + 1]]


class NeighbourSampler:
    """uniform with replacement, layer by layer; isolated nodes see themselves"""

    def __init__(self, graph, fanouts, seed):
        self.g, self.fanouts = graph, fanouts
        self.rng = np.random.default_rng(seed)

    def _expand(self, nodes, k):
        out = np.empty((len(nodes), k), dtype=np.int64)
        for row, v in enumerate(nodes):
            nb = self.g.neighbours(v)
            out[row] = nb[self.rng.integers(len(nb), size=k)] if len(nb) else v
        return out

    def __call__(self, seeds):
        hop1 = self._expand(seeds, self.fanouts[0])
        hop2 = self._expand(hop1.reshape(-1), self.fanouts[1])
        hop2 = hop2.reshape(*hop1.shape, -1)
        return seeds, hop1, hop2


class FullGraphScorer:
    """accuracy on the validation nodes with all neighbours, plain numpy so it
    runs beside the trainer without touching torch"""

    def __init__(self, graph):
        self.g = graph
        deg = np.diff(graph.indptr)
        self.dst = np.repeat(np.arange(graph.n), deg)
        self.deg = np.maximum(deg, 1)[:, None].astype(np.float32)

    def _mean(self, h):
        out = np.zeros_like(h)
        np.add.at(out, self.dst, h[self.g.indices])
        return out / self.deg

    def __call__(self, job):
        epoch, w = job
        h = self.g.x
        h = np.concatenate([h, self._mean(h)], 1) @ w["lin1.weight"].T + w["lin1.bias"]
        h = np.maximum(h, 0)
        h = np.concatenate([h, self._mean(h)], 1) @ w["lin2.weight"].T + w["lin2.bias"]
        pred = h[self.g.val].argmax(1)
        return epoch, float((pred == self.g.y[self.g.val]).mean())
