import torch


class PairStream:
    """Crawled image and text pairs, ordered by domain; some domains rarely have captions."""

    DOMAINS = ((480, 0.0), (320, 0.3), (160, 0.85))

    def __init__(self, seed, dim_img=20, dim_txt=14):
        g = torch.Generator().manual_seed(seed)
        n = sum(c for c, _ in self.DOMAINS)
        latent = torch.randn(n, 6, generator=g)
        a = torch.randn(6, dim_img, generator=g)
        b = torch.randn(6, dim_txt, generator=g)
        self.img = latent @ a + 0.1 * torch.randn(n, dim_img, generator=g)
        self.txt = latent @ b + 0.1 * torch.randn(n, dim_txt, generator=g)
        missing = torch.cat([torch.rand(c, generator=g) < p for c, p in self.DOMAINS])
        self.has_caption = ~missing
        self.txt[missing] = 0.0

    def shard(self, rank, world, batch):
        per = len(self.img) // world // batch * batch
        for i in range(rank * per, (rank + 1) * per, batch):
            s = slice(i, i + batch)
            yield self.img[s], self.txt[s], self.has_caption[s]
