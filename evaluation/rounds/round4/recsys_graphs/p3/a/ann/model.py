import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class BiEncoder(nn.Module):
    def __init__(self, vocab, dim=48):
        super().__init__()
        self.words = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.q_proj = nn.Linear(dim, dim)
        self.d_proj = nn.Linear(dim, dim)

    def encode_queries(self, tok):
        return F.normalize(self.q_proj(self.words(tok)), dim=-1)

    def encode_docs(self, tok):
        return F.normalize(self.d_proj(self.words(tok)), dim=-1)

    def forward(self, q_tok, d_tok):
        return self.encode_queries(q_tok), self.encode_docs(d_tok)


def gather_with_grad(x):
    """Everybody's rows; only our own carry gradient."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    parts[dist.get_rank()] = x
    return torch.cat(parts)


def contrastive_loss(q, d, batch, temperature=0.07):
    """d holds the positives [0:batch] followed by the hard negatives."""
    everyone = gather_with_grad(d)
    target = torch.arange(batch) + dist.get_rank() * d.size(0)
    return F.cross_entropy(q @ everyone.T / temperature, target)
