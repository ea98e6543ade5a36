import torch

VOCAB = 64


def sequences(stage, n, length, generator):
    """Arithmetic token sequences; the 'hard' stage mixes in noise tokens."""
    start = torch.randint(0, VOCAB, (n, 1), generator=generator)
    stride = torch.randint(1, 4, (n, 1), generator=generator)
    ids = (start + stride * torch.arange(length)) % VOCAB
    if stage == "hard":
        noise = torch.rand(n, length, generator=generator) < 0.35
        ids = torch.where(noise, torch.randint(0, VOCAB, (n, length), generator=generator), ids)
    return ids
