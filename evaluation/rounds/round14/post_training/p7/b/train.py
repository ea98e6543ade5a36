import logging
import os
import tempfile

import torch
import torch.distributed as dist

from data import PreferencePairs
from model import CausalLM
from trainer import DPOArgs, DPOTrainer


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO, format=f"[{rank}] %(message)s")
    args = DPOArgs()
    torch.manual_seed(args.seed)
    model = CausalLM(vocab=48, hidden=40)
    train_set = PreferencePairs(480, 48, prompt_len=8, answer_len=6, seed=args.seed)
    eval_set = PreferencePairs(96, 48, prompt_len=8, answer_len=6, seed=args.seed + 1)
    trainer = DPOTrainer(model, train_set, eval_set, args)
    trainer.fit()
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(trainer.policy.module.state_dict(), os.path.join(folder, "policy.pt"))
            logging.info("policy saved after %d steps", trainer.step)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
