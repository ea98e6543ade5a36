import numpy as np


def community_graph(nodes, blocks, p_in, p_out, seed):
    """Directed edges of a block model; returns edge index (2, E), features and labels."""
    rng = np.random.default_rng(seed)
    label = np.sort(rng.integers(0, blocks, nodes))
    prob = np.where(label[:, None] == label[None, :], p_in, p_out)
    adj = rng.random((nodes, nodes)) < prob
    np.fill_diagonal(adj, False)
    src, dst = adj.nonzero()
    feat = rng.normal(size=(nodes, 12)).astype(np.float32)
    feat[np.arange(nodes), label] += 1.0
    return np.stack([src, dst]), feat, label


def trim(edges, max_in_degree, seed):
    """Keep at most max_in_degree incoming edges of every node."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(edges.shape[1])
    seen, keep = {}, []
    for e in order:
        d = int(edges[1, e])
        if seen.get(d, 0) < max_in_degree:
            seen[d] = seen.get(d, 0) + 1
            keep.append(e)
    return edges[:, np.sort(np.array(keep))]
