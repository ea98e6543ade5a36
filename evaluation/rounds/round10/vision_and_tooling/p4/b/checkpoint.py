import os

import torch
import torch.distributed as dist


def path_of(cfg):
    return os.path.join(cfg.workdir, "last.pt")


def save(cfg, step, net, ema, opt):
    if dist.get_rank() == 0:
        os.makedirs(cfg.workdir, exist_ok=True)
        tmp = path_of(cfg) + ".tmp"
        torch.save({"step": step, "net": net.state_dict(), "ema": ema.state_dict(),
                    "opt": opt.state_dict()}, tmp)
        os.replace(tmp, path_of(cfg))
    dist.barrier()


def restore(cfg, net, ema, opt):
    """Puts the last checkpoint into net / ema / opt and returns the step to go on from."""
    step = 0
    if dist.get_rank() == 0:
        # the other ranks get the weights from rank 0 when DDP is built
        ckpt = torch.load(path_of(cfg), map_location="cpu")
        net.load_state_dict(ckpt["net"])
        ema.load_state_dict(ckpt["ema"])
        opt.load_state_dict(ckpt["opt"])
        step = ckpt["step"]
    return step
