import torch
import torch.nn.functional as F


def gradient_penalty(disc, real, fake, gen):
    mix = torch.rand(real.shape[0], 1, generator=gen)
    x = (mix * real + (1 - mix) * fake).requires_grad_(True)
    grad, = torch.autograd.grad(disc(x).sum(), x, create_graph=True)
    return (grad.norm(dim=1) - 1.0).pow(2).mean()


def class_pairs(label):
    """Index pairs (i, j), i < j, of samples that share a class."""
    same = label[:, None] == label[None, :]
    pairs = torch.triu(same, diagonal=1).nonzero()
    if pairs.numel() == 0:
        raise ValueError("no two samples of one class in the batch")
    return pairs


def compactness(features, label):
    try:
        i, j = class_pairs(label).unbind(1)
    except ValueError:
        return features.sum() * 0.0
    return (features[i] - features[j]).pow(2).mean()


def d_hinge(real_score, fake_score):
    return F.relu(1 - real_score).mean() + F.relu(1 + fake_score).mean()
