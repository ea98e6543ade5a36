import torch
import torch.nn.functional as F

LOSSES = {}


def loss(name):
    def wrap(fn):
        LOSSES[name] = fn
        return fn

    return wrap


class BadBatch(ValueError):
    pass


@loss("ips_softmax")
def ips_softmax(score, click, propensity):
    weight = click / propensity
    if not torch.isfinite(weight).all():
        raise BadBatch("propensity outside (0, 1]")
    return -(weight * F.log_softmax(score, dim=1)).sum(1).mean()


@loss("softmax")
def softmax(score, click, propensity):
    return -(click * F.log_softmax(score, dim=1)).sum(1).mean()
