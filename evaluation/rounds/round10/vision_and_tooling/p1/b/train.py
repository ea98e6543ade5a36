"""Train a small segmentation net.  usage: torchrun --nproc_per_node 3 train.py [config.json]"""
import json
import sys

import torch
import torch.distributed as dist

from seglab.data import ShapesDataset, build_loader
from seglab.hooks import EvalHook, LogHook, PolyLRHook, PreviewHook
from seglab.model import TinyUNet
from seglab.trainer import Trainer


def main():
    with open(sys.argv[1] if len(sys.argv) > 1 else "config.json") as f:
        cfg = json.load(f)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(cfg["seed"])

    train_set = ShapesDataset(cfg["train_images"], cfg["size"], cfg["classes"], seed=1)
    val_set = ShapesDataset(cfg["val_images"], cfg["size"], cfg["classes"], seed=2)
    train_loader = build_loader(train_set, cfg["batch"], shuffle=True)
    val_loader = build_loader(val_set, cfg["batch"], shuffle=False)

    model = TinyUNet(cfg["classes"], cfg["width"])
    trainer = Trainer(model, train_loader, lr=cfg["lr"], max_iters=cfg["max_iters"])
    trainer.register(PolyLRHook(power=0.9))
    trainer.register(EvalHook(val_loader, cfg["classes"], every=cfg["eval_every"]))
    if rank == 0:
        trainer.register(LogHook(every=cfg["log_every"]))
        trainer.register(PreviewHook(every=cfg["preview_every"], out_dir="previews"))
    trainer.train()
    if rank == 0:
        print("done, best mIoU %.3f" % trainer.state.get("best_miou", 0.0), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
