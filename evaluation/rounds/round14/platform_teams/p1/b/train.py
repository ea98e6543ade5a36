import logging

import torch
import torch.distributed as dist

from callbacks import EpochReport, Throughput
from config import TrainConfig
from data import TokenBudgetPlanner, TokenCorpus
from model import PooledClassifier
from trainer import Trainer


def main():
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    cfg = TrainConfig()
    corpus = TokenCorpus(cfg.samples, cfg.vocab, cfg.max_len)
    planner = TokenBudgetPlanner(corpus.lengths, cfg.planner, dist.get_rank(), dist.get_world_size())
    model = PooledClassifier(cfg.vocab, cfg.dim)
    Trainer(cfg, model, corpus, planner, [Throughput(cfg.log_every), EpochReport()]).fit()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
