import json
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

import progress as prog
from modeling import VOCAB, sharded_backbone


def sample(cfg, step, rank):
    g = torch.Generator().manual_seed(cfg["seed"] * 1000 + 10 * step + rank)
    start = torch.randint(0, VOCAB, (cfg["batch_size"], 1), generator=g)
    stride = torch.randint(1, 4, (cfg["batch_size"], 1), generator=g)
    return (start + stride * torch.arange(13)) % VOCAB


def train(cfg, net, state, last_step):
    rank = dist.get_rank()
    opt = torch.optim.AdamW(net.parameters(), lr=cfg["lr"])
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 1.0 - k / (2 * cfg["total_steps"]))
    for _ in range(state["step"]):
        opt.step()
        sched.step()
    while state["step"] < last_step:
        ids = sample(cfg, state["step"], rank)
        logits = net(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        state["step"] += 1
        state["samples"] += ids.shape[0]
        state["best"] = min(state["best"], loss.item())
    return state


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with open("job.json") as f:
        cfg = json.load(f)

    # first allocation: the scheduler takes the node back after `save_every` steps
    if rank == 0 and os.path.isdir(cfg["workdir"]):
        for name in os.listdir(cfg["workdir"]):
            os.remove(os.path.join(cfg["workdir"], name))
    dist.barrier()
    torch.manual_seed(cfg["seed"])
    net = sharded_backbone(cfg["dim"], world)
    state = train(cfg, net, prog.restore_progress(cfg["workdir"]), cfg["save_every"])
    prog.save(cfg["workdir"], net, state)
    if rank == 0:
        print(f"preempted at step {state['step']} best {state['best']:.3f}", flush=True)
    del net

    # second allocation
    torch.manual_seed(cfg["seed"] + 1)
    net = sharded_backbone(cfg["dim"], world)
    prog.restore_weights(cfg["workdir"], net)
    state = train(cfg, net, prog.restore_progress(cfg["workdir"]), cfg["total_steps"])
    dist.barrier()
    if rank == 0:
        print(f"finished at step {state['step']} samples {state['samples']} best {state['best']:.3f}", flush=True)
    prog.save(cfg["workdir"], net, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
