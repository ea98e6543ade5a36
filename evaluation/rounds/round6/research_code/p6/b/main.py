from types import SimpleNamespace

import torch
import torch.distributed as dist

from control import ControlPlane
from domains import Domains
from roles import Evaluator, Trainer


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    cfg = SimpleNamespace(dim=8, domains=4, rounds=12, inner=5, batch=32, lr=5e-3,
                          eval_every=4, seed=13, eval_rank=-1)
    cfg.evaluator = cfg.eval_rank % world
    torch.manual_seed(cfg.seed)
    domains = Domains(cfg.domains, cfg.dim, cfg.seed)
    trainers = [r for r in range(world) if r != cfg.eval_rank]
    train_group = dist.new_group(trainers)
    if rank == cfg.evaluator:
        role = Evaluator(cfg, domains)
    else:
        role = Trainer(cfg, domains, train_group)
    control = ControlPlane()
    role.run()
    if not control.all_finished(True):
        raise SystemExit("a rank did not finish")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
