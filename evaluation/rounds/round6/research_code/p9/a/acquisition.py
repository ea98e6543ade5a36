import torch


@torch.no_grad()
def entropy(model, x):
    logp = torch.log_softmax(model(x), -1)
    return -(logp.exp() * logp).sum(-1)


def pick(scores, candidates, budget):
    """The most uncertain candidates of this rank's slice."""
    order = scores.argsort(descending=True)
    return candidates[order[:budget]]


def query(model, pool, unlabelled, budget):
    scores = entropy(model, pool.x[unlabelled])
    return pick(scores, unlabelled, budget)
