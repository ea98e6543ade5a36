import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from callbacks import Metrics, WarmupCosine
from sink import JsonlSink, NullSink
from trainer import Trainer

EPOCHS, BATCH, LR = 5, 32, 0.05


def make_loader():
    gen = torch.Generator().manual_seed(5)
    x = torch.randn(1920, 16, generator=gen)
    mix = torch.randn(16, 3, generator=gen)
    y = torch.tanh(x @ mix) + 0.05 * torch.randn(1920, 3, generator=gen)
    data = TensorDataset(x, y)
    return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=True), drop_last=True)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    main_rank = dist.get_rank() == 0
    with tempfile.TemporaryDirectory(prefix="metrics_") as tmp:
        path = Path(tmp) / "run" / "metrics.jsonl"
        sink = JsonlSink(path) if main_rank else NullSink()
        loader = make_loader()
        total = EPOCHS * len(loader)
        trainer = Trainer(loader, LR, [WarmupCosine(LR, 10, total), Metrics(sink)])
        final = trainer.fit(EPOCHS)
        if main_rank:
            records = path.read_text().splitlines()
            print(f"steps {trainer.step} final loss {final:.4f} records {len(records)}", flush=True)
            print(records[-1], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
