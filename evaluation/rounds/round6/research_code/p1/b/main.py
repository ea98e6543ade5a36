import torch
import torch.distributed as dist

from actor import Actor
from config import load_config
from learner import Learner
from policy import ActorCritic


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    cfg = load_config("config.json", world)
    torch.manual_seed(cfg.seed)
    model = ActorCritic(cfg.env_size + 1, cfg.hidden)
    if rank == 0:
        role = Learner(cfg, model, actors=range(1, world))
    else:
        role = Actor(cfg, model, rank)
    result = torch.tensor([role.run() if rank else 0.0 * role.run()])
    dist.all_reduce(result)
    if rank == 0:
        print(f"total reward {result.item():.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
