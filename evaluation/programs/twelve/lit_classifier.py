"""A classifier as a LightningModule, with a callback that keeps the newest weights."""

import argparse
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self, fault="none", at=20):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 32), nn.GELU())
        self.head = nn.Linear(32, 4)
        self.auxiliary = nn.Linear(32, 2)
        self.fault = fault
        self.at = at

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.body(x)
        loss = nn.functional.cross_entropy(self.head(hidden), y)
        if self.fault != "fail" or batch_idx < self.at:
            loss = loss + 0.1 * self.auxiliary(hidden).square().mean()
        if batch_idx % 10 == 0:
            self.log("train_loss", loss, sync_dist=True)
            self.print(f"step {batch_idx} loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class KeepNewest(lightning.Callback):
    def __init__(self, folder, every, only_first):
        self.path = Path(folder) / "newest.ckpt"
        self.every = every
        self.only_first = only_first

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % self.every:
            return
        if trainer.is_global_zero or not self.only_first:
            trainer.save_checkpoint(self.path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fault", choices=["none", "hang", "fail"], default="none")
    parser.add_argument("--at", type=int, default=20)
    parser.add_argument("--folder", default="lightning_out")
    args = parser.parse_args()

    lightning.seed_everything(3)
    x = torch.randn(args.steps * 2 * 8, 20)
    y = torch.randint(0, 4, (len(x),))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=args.folder,
        callbacks=[KeepNewest(args.folder, every=args.at, only_first=args.fault == "hang")],
    )
    trainer.fit(Classifier(args.fault, args.at), DataLoader(TensorDataset(x, y), batch_size=8))


if __name__ == "__main__":
    main()
