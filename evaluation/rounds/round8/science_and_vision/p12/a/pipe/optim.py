import math

import torch


def build_optimizer(module, args):
    opt = torch.optim.AdamW(module.parameters(), lr=args.max_lr, weight_decay=1e-4)
    steps_per_epoch = math.ceil(args.patches / args.batch)
    sched = torch.optim.lr_scheduler.OneCycleLR(
        opt, max_lr=args.max_lr, epochs=args.epochs, steps_per_epoch=steps_per_epoch
    )
    return opt, sched
