import torch


@torch.no_grad()
def entropy(model, x):
    logp = torch.log_softmax(model(x), -1)
    return -(logp.exp() * logp).sum(-1)


def pick(scores, candidates, budget, floor=1.0):
    """The most uncertain candidates of this rank's slice."""
    order = scores.argsort(descending=True)
    order = order[scores[order] > floor]
    return candidates[order[:budget]]


def query(model, pool, unlabelled, budget):
    scores = entropy(model, pool.x[unlabelled])
    return pick(scores, unlabelled, budget)
