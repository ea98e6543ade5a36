import torch
import torch.nn as nn
import torch.nn.functional as F


class TinyVAE(nn.Module):
    def __init__(self, z=4):
        super().__init__()
        self.enc = nn.Conv2d(3, z, 4, stride=4)
        self.dec = nn.ConvTranspose2d(z, 3, 4, stride=4)

    def encode(self, x):
        return self.enc(x)

    def decode(self, z):
        return self.dec(z)


class TextEncoder(nn.Module):
    def __init__(self, vocab=64, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)

    def forward(self, ids):
        return self.emb(ids)


class CrossAttention(nn.Module):
    def __init__(self, dim, ctx):
        super().__init__()
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(ctx, dim)
        self.to_v = nn.Linear(ctx, dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, ctx):
        return self.to_out(F.scaled_dot_product_attention(self.to_q(x), self.to_k(ctx), self.to_v(ctx)))


class Denoiser(nn.Module):
    def __init__(self, z=4, dim=32, ctx=32, depth=2):
        super().__init__()
        self.inp = nn.Linear(z, dim)
        self.time = nn.Linear(1, dim)
        self.attn = nn.ModuleList(CrossAttention(dim, ctx) for _ in range(depth))
        self.ff = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU()) for _ in range(depth))
        self.out = nn.Linear(dim, z)

    def forward(self, x, sigma, ctx):
        b, c, h, w = x.shape
        t = self.inp(x.flatten(2).transpose(1, 2)) + self.time(sigma[:, None])[:, None]
        for attn, ff in zip(self.attn, self.ff):
            t = t + attn(t, ctx)
            t = t + ff(t)
        return self.out(t).transpose(1, 2).reshape(b, c, h, w)


class LoRALinear(nn.Module):
    def __init__(self, base, r):
        super().__init__()
        self.base = base
        self.lora_down = nn.Linear(base.in_features, r, bias=False)
        self.lora_up = nn.Linear(r, base.out_features, bias=False)
        nn.init.zeros_(self.lora_up.weight)

    def forward(self, x):
        return self.base(x) + self.lora_up(self.lora_down(x))


def inject_lora(net, r):
    for m in net.modules():
        if isinstance(m, CrossAttention):
            for name in ("to_q", "to_k", "to_v", "to_out"):
                setattr(m, name, LoRALinear(getattr(m, name), r))


def lora_parameters(net):
    return [p for n, p in net.named_parameters() if "lora_" in n]


def lora_state_dict(net):
    return {k: v for k, v in net.state_dict().items() if "lora_" in k}
