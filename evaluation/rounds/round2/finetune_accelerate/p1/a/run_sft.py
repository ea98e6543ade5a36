"""Supervised finetuning of a small causal LM on instruction pairs."""
import argparse
import logging
import os
import random
import tempfile
from dataclasses import dataclass

import torch

from sft.accelerator import set_seed
from sft.modeling import BOS, EOS, PAD, VOCAB, TinyCausalLM
from sft.trainer import HistoryCallback, SampleCompletionsCallback, Trainer


@dataclass
class TrainingArguments:
    output_dir: str
    num_train_epochs: int = 2
    per_device_batch_size: int = 8
    gradient_accumulation_steps: int = 2
    learning_rate: float = 3e-3
    logging_steps: int = 5
    eval_steps: int = 8
    seed: int = 11


def parse_args():
    p = argparse.ArgumentParser()
    default_out = os.path.join(tempfile.gettempdir(), f"sft_{os.getppid()}")
    p.add_argument("--output_dir", default=default_out)
    p.add_argument("--num_train_epochs", type=int, default=2)
    p.add_argument("--learning_rate", type=float, default=3e-3)
    p.add_argument("--sample_prompts", type=int, default=2)
    return p.parse_args()


def build_pairs(n, seed):
    """prompt = digits, answer = the prompt reversed"""
    rng = random.Random(seed)
    pairs = []
    for _ in range(n):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(3, 10))]
        pairs.append((prompt, prompt[::-1]))
    return pairs


class PromptMaskingCollator:
    def __call__(self, pairs):
        rows = [[BOS] + q + a + [EOS] for q, a in pairs]
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), PAD)
        labels = torch.full((len(rows), width), -100)
        for i, (row, (q, _)) in enumerate(zip(rows, pairs)):
            ids[i, : len(row)] = torch.tensor(row)
            labels[i, len(q) + 1: len(row)] = torch.tensor(row[len(q) + 1:])
        return {"input_ids": ids, "labels": labels}


def main():
    cli = parse_args()
    args = TrainingArguments(cli.output_dir, cli.num_train_epochs, learning_rate=cli.learning_rate)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    set_seed(args.seed)
    train_set, eval_set = build_pairs(360, seed=1), build_pairs(70, seed=2)
    trainer = Trainer(args, TinyCausalLM(), train_set, eval_set, PromptMaskingCollator())
    if trainer.accelerator.is_main_process:
        trainer.add_callback(HistoryCallback())
        trainer.add_callback(SampleCompletionsCallback([q for q, _ in eval_set[: cli.sample_prompts]]))
    state = trainer.train()
    metrics = trainer.evaluate()
    trainer.accelerator.print("finished", state.global_step, metrics)
    trainer.accelerator.end()


if __name__ == "__main__":
    main()
