import torch

VOCAB, LENGTH = 60, 10
STRIDE = {"code": 1, "math": 3, "chat": 7}


def draw(shares, n, seed):
    g = torch.Generator().manual_seed(seed)
    names = sorted(shares)
    w = torch.tensor([shares[k] for k in names])
    pick = torch.multinomial(w, n, replacement=True, generator=g)
    stride = torch.tensor([STRIDE[k] for k in names])[pick].unsqueeze(1)
    start = torch.randint(0, VOCAB, (n, 1), generator=g)
    return (start + stride * torch.arange(LENGTH)) % VOCAB


def held_out(name, n=24):
    g = torch.Generator().manual_seed(STRIDE[name])
    start = torch.randint(0, VOCAB, (n, 1), generator=g)
    return (start + STRIDE[name] * torch.arange(LENGTH)) % VOCAB
