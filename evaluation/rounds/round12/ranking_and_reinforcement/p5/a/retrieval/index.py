import torch
import torch.distributed as dist

from .cache import LRU


class NegativeIndex:
    """Embeddings of the whole corpus, for hard negatives. They may be some
    steps old; `refresh` says how many."""

    def __init__(self, encoder, corpus, refresh, capacity=2):
        self.encoder, self.refresh = encoder, refresh
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.local = corpus.slice(self.rank, self.world)
        self.cache = LRU(capacity)

    def key(self, step, topic):
        return step // self.refresh

    @torch.no_grad()
    def build(self):
        mine = self.encoder(self.local).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        return torch.cat(parts)

    @torch.no_grad()
    def hard_negatives(self, step, topic, query, pos, k):
        table = self.cache.get_or(self.key(step, topic), self.build)
        score = query @ table.t()
        score.scatter_(1, pos.unsqueeze(1), float("-inf"))
        return score.topk(k, dim=1).indices
