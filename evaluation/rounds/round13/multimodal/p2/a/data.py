import torch


def make_clips(cfg, split_seed):
    """One feature vector per tower; the class shifts every modality a little."""
    g = torch.Generator().manual_seed(split_seed)
    anchors = torch.Generator().manual_seed(cfg.seed)
    labels = torch.randint(cfg.classes, (cfg.clips,), generator=g)
    features = {}
    for name, spec in cfg.towers.items():
        centre = torch.randn(cfg.classes, spec.in_dim, generator=anchors)
        features[name] = centre[labels] + 1.5 * torch.randn(cfg.clips, spec.in_dim, generator=g)
    return features, labels


def batches(features, labels, cfg, epoch, rank, world):
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1000 + epoch))
    per_step = cfg.batch * world
    for start in range(0, len(order) - per_step + 1, per_step):
        pick = order[start + rank * cfg.batch: start + (rank + 1) * cfg.batch]
        yield {k: v[pick] for k, v in features.items()}, labels[pick]
