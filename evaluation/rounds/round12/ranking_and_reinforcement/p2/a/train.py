import torch.distributed as dist

from ppo.config import PPOConfig
from ppo.trainer import PPOTrainer


def main():
    dist.init_process_group("gloo")
    trainer = PPOTrainer(PPOConfig())
    trainer.train()
    dist.barrier()
    if dist.get_rank() == 0:
        print("training finished", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
