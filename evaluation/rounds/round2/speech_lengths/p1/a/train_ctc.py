#!/usr/bin/env python3
import argparse
import logging
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from asr_datamodule import AsrDataModule
from model import TinyEncoder
from utils import AttributeDict, MetricsTracker, fix_random_seed, save_checkpoint, setup_dist, setup_logger, str2bool


def get_parser():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--num-epochs", type=int, default=3)
    parser.add_argument("--exp-dir", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "exp"))
    parser.add_argument("--base-lr", type=float, default=3e-3)
    parser.add_argument("--max-duration", type=float, default=9.0)
    parser.add_argument("--num-buckets", type=int, default=4)
    parser.add_argument("--num-train-cuts", type=int, default=170)
    parser.add_argument("--save-checkpoints", type=str2bool, default=True)
    parser.add_argument("--seed", type=int, default=42)
    return parser


def get_params():
    return AttributeDict(
        num_features=20,
        vocab_size=16,
        dim=32,
        min_duration=0.3,
        max_utt_duration=2.2,
        log_interval=5,
        best_valid_loss=float("inf"),
        batch_idx_train=0,
    )


def compute_loss(params, model, batch, is_training):
    with torch.set_grad_enabled(is_training):
        log_probs, out_lens = model(batch["inputs"], batch["num_frames"])
        loss = torch.nn.functional.ctc_loss(
            log_probs.transpose(0, 1), batch["tokens"], out_lens, batch["token_lens"], reduction="sum"
        )
    info = MetricsTracker(frames=float(out_lens.sum()), ctc_loss=loss.item())
    return loss, info


def compute_validation_loss(params, model, valid_dl):
    model.eval()
    tot = MetricsTracker(frames=0.0, ctc_loss=0.0)
    for batch in valid_dl:
        _, info = compute_loss(params, getattr(model, "module", model), batch, is_training=False)
        tot = tot + info
    tot.reduce()
    params.best_valid_loss = min(params.best_valid_loss, tot["ctc_loss"] / tot["frames"])
    return tot


def train_one_epoch(params, model, optimizer, train_dl, rank):
    model.train()
    tot = MetricsTracker(frames=0.0, ctc_loss=0.0)
    for batch_idx, batch in enumerate(train_dl):
        params.batch_idx_train += 1
        loss, info = compute_loss(params, model, batch, is_training=True)
        optimizer.zero_grad()
        (loss / info["frames"]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        tot = tot + info
        if batch_idx % params.log_interval == 0:
            logging.info("Epoch %d, batch %d, loss[%s], tot[%s]", params.cur_epoch, batch_idx, info, tot)


def run(args):
    params = get_params()
    params.update(vars(args))
    rank, world_size = setup_dist()
    setup_logger(rank, world_size)
    fix_random_seed(params.seed)

    model = TinyEncoder(params.num_features, params.dim, params.vocab_size)
    logging.info("Number of model parameters: %d", sum(p.numel() for p in model.parameters()))
    model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=params.base_lr)

    data = AsrDataModule(params, rank, world_size)
    train_dl, valid_dl = data.train_dataloader(), data.valid_dataloader()

    for epoch in range(1, params.num_epochs + 1):
        params.cur_epoch = epoch
        fix_random_seed(params.seed + epoch - 1)
        train_dl.sampler.set_epoch(epoch - 1)
        train_one_epoch(params, model, optimizer, train_dl, rank)

        if params.save_checkpoints and rank == 0:
            save_checkpoint(os.path.join(params.exp_dir, f"epoch-{epoch}.pt"), model, optimizer, params)
        dist.barrier()
        valid = compute_validation_loss(params, model, valid_dl)
        logging.info("Epoch %d, validation: %s", epoch, valid)

    logging.info("Done!")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(get_parser().parse_args())
