import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from trainer import Trainer

CONFIG = {"lr": 5e-3, "patience": 2, "min_delta": 0.002, "epochs": 30, "batch_size": 16, "bucket": "bucket"}


class Lora(nn.Module):
    def __init__(self, base, r=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, r, bias=False)
        self.b = nn.Linear(r, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Classifier(nn.Module):
    def __init__(self, dim=24, classes=5):
        super().__init__()
        self.l1 = Lora(nn.Linear(dim, 48))
        self.l2 = Lora(nn.Linear(48, 48))
        self.out = nn.Linear(48, classes)

    def forward(self, x):
        return self.out(torch.relu(self.l2(torch.relu(self.l1(x)))))


def intent_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    centers = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 5, (n,), generator=g)
    return centers[y] + 1.5 * torch.randn(n, 24, generator=g), y


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(6)
    model = Classifier()
    for m in (model.l1, model.l2):
        fully_shard(m)
    fully_shard(model)
    trainer = Trainer(model, intent_data(320, 1), intent_data(160, 2), CONFIG)
    best = trainer.fit()
    if dist.get_rank() == 0:
        print(f"done, best validation loss {best:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
