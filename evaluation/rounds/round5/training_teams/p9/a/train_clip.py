import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

from losses import PairLoss
from pairs import PairStream

EPOCHS = 2
BATCH = 8


def tower(d_in, d_out=16):
    return nn.Sequential(nn.Linear(d_in, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, d_out))


class TwoTower(nn.Module):
    def __init__(self, dim_img, dim_txt):
        super().__init__()
        self.image, self.text = tower(dim_img), tower(dim_txt)
        self.loss = PairLoss()

    def forward(self, img, txt, has_caption):
        return self.loss(self.image(img), self.text(txt), has_caption)


@torch.no_grad()
def recall_at_1(model, data, k=64):
    img = nn.functional.normalize(model.image(data.img[:k]), dim=-1)
    txt = nn.functional.normalize(model.text(data.txt[:k]), dim=-1)
    return ((img @ txt.T).argmax(1) == torch.arange(k)).float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = PairStream(seed=6)
    model = DDP(TwoTower(data.img.shape[1], data.txt.shape[1]))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for epoch in range(EPOCHS):
        running = torch.zeros(2)
        for img, txt, has_caption in data.shard(rank, world, BATCH):
            loss = model(img, txt, has_caption)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            running += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(running)
        if rank == 0:
            r1 = recall_at_1(model.module, data)
            print(f"epoch {epoch} loss {running[0] / running[1]:.4f} R@1 {r1:.3f}", flush=True)

    dist.barrier()
    if rank == 0:
        torch.save(model.module.state_dict(), "clip.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
