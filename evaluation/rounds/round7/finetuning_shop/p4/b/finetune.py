import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from mixture import Mixture, ShardedBatches
from vlm import SmallVLM

VOCAB, SEQ, BATCH, EPOCHS = 150, 16, 4, 2


class Ema:
    def __init__(self, model, decay=0.98):
        self.decay = decay
        self.shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model):
        for k, v in model.state_dict().items():
            self.shadow[k].lerp_(v, 1 - self.decay)


def token_counts(ids):
    n = torch.tensor([int((ids > 9).sum())])
    out = [torch.zeros_like(n) for _ in range(dist.get_world_size())]
    dist.all_gather(out, n)
    return torch.cat(out)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    data = Mixture(160, VOCAB, SEQ, image_share=0.45, seed=9)
    net = SmallVLM(VOCAB)
    ema = Ema(net)
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    seen = 0
    start = time.perf_counter()
    for epoch in range(EPOCHS):
        for ids, patches, has_image in ShardedBatches(data, BATCH, rank, world, seed=epoch):
            logits = model(ids[:, :-1], patches, has_image)
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            ema.update(net)
            seen += int(token_counts(ids).sum())
        if rank == 0:
            speed = seen / (time.perf_counter() - start)
            print(f"epoch {epoch} loss {loss.item():.3f} tokens {seen} ({speed:.0f}/s)", flush=True)
    if rank == 0:
        torch.save(ema.shadow, "vlm_ema.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
