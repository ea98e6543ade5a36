import torch

TASKS = ("caption", "vqa", "ocr", "grounding", "retrieval", "summary")
MODALITY = {"caption": 0, "vqa": 0, "ocr": 0, "grounding": 0, "retrieval": 1, "summary": 1}
DIFFICULTY = {"caption": 0.2, "vqa": 0.6, "ocr": 1.0, "grounding": 1.4, "retrieval": 1.8, "summary": 2.2}


def make_task(name, n, seed, dim=12):
    """Regression data of one task; harder tasks carry more noise."""
    g = torch.Generator().manual_seed(seed * 100 + sum(map(ord, name)))
    w = torch.randn(dim, 2, generator=torch.Generator().manual_seed(MODALITY[name]))
    x = torch.randn(n, dim, generator=g)
    y = x @ w + DIFFICULTY[name] * torch.randn(n, 2, generator=g)
    return x, y
