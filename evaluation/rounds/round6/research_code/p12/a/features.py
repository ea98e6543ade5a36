import torch


def clip_features(cfg, rank):
    """Frame features of this rank's clips; a clip dwells in a few of the styles."""
    shared = torch.Generator().manual_seed(99)
    centres = 2.5 * torch.randn(cfg["styles"], cfg["dim"], generator=shared)
    gen = torch.Generator().manual_seed(1000 + rank)
    x, y = [], []
    for _ in range(cfg["clips"]):
        pool = torch.randperm(cfg["styles"], generator=gen)[:3]
        style = pool[torch.randint(3, (cfg["frames"],), generator=gen)]
        x.append(centres[style] + 1.1 * torch.randn(cfg["frames"], cfg["dim"], generator=gen))
        y.append(style)
    return torch.cat(x), torch.cat(y)
