#!/usr/bin/env python
import argparse
import logging
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from engine import train_one_epoch, validate
from model_ema import ModelEma
from models import convert_bn, create_model

_logger = logging.getLogger("train")

parser = argparse.ArgumentParser(description="Classifier training")
parser.add_argument("--model", default="resnet_tiny")
parser.add_argument("--num-classes", type=int, default=6)
parser.add_argument("-b", "--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--mixup", type=float, default=0.2)
parser.add_argument("--clip-grad", type=float, default=5.0)
parser.add_argument("--log-interval", type=int, default=8)
parser.add_argument("--sync-bn", action="store_true", default=True)
parser.add_argument("--model-ema", action="store_true", default=True)
parser.add_argument("--model-ema-start", type=int, default=1, help="first epoch in which the EMA weights are scored")
parser.add_argument("--output", default="", help="checkpoint folder (default: none written)")
parser.add_argument("--seed", type=int, default=42)


def make_split(n, num_classes, seed):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(num_classes, 3, 12, 12, generator=torch.Generator().manual_seed(7))
    y = torch.randint(num_classes, (n,), generator=g)
    return TensorDataset(proto[y] + 1.2 * torch.randn(n, 3, 12, 12, generator=g), y)


def main():
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    dist.init_process_group("gloo")
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + args.rank)
    torch.set_num_threads(1)

    model = create_model(args.model, num_classes=args.num_classes, drop_rate=0.1)
    if args.sync_bn:
        model = convert_bn(model)
    model_ema = ModelEma(model) if args.model_ema and args.rank == 0 else None
    model = NativeDDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    train_set, val_set = make_split(512, args.num_classes, 1), make_split(192, args.num_classes, 2)
    train_loader = DataLoader(train_set, args.batch_size, sampler=DistributedSampler(train_set), drop_last=True)
    val_loader = DataLoader(val_set, 32, sampler=DistributedSampler(val_set, shuffle=False))
    ema_loader = DataLoader(val_set, 32)

    generator = torch.Generator().manual_seed(args.seed + args.rank)
    best = torch.zeros(1)
    for epoch in range(args.epochs):
        train_metrics = train_one_epoch(epoch, model, train_loader, optimizer, args, generator, model_ema)
        scheduler.step()
        model.eval()
        eval_metrics = validate(model, val_loader, distributed=True)
        score = torch.tensor([eval_metrics["top1"]])
        if args.model_ema and epoch >= args.model_ema_start:
            if model_ema is not None:
                ema_metrics = validate(model_ema.module, ema_loader, distributed=False)
                _logger.info("Test (EMA): %d  Acc@1: %.2f", epoch, ema_metrics["top1"])
                score = torch.maximum(score, torch.tensor([ema_metrics["top1"]]))
            dist.broadcast(score, src=0)
        if args.rank == 0:
            _logger.info("Test: %d  loss %.4f  Acc@1: %.2f  (train %.4f)", epoch, eval_metrics["loss"],
                         eval_metrics["top1"], train_metrics["loss"])
            if score > best and args.output:
                os.makedirs(args.output, exist_ok=True)
                torch.save({"model": model.module.state_dict(), "ema": model_ema and model_ema.state_dict()},
                           os.path.join(args.output, "model_best.pth.tar"))
        best = torch.maximum(best, score)
    if args.rank == 0:
        _logger.info("*** Best metric: %.2f", best.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
