"""transformers.Trainer on a GPT-2 of two layers that is made here."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Poems(Dataset):
    def __init__(self, count, ragged=None):
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(0, 96, (count, 16), generator=generator)
        self.ragged = ragged

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        if index == self.ragged:
            tokens = tokens[:-3]
        return {"input_ids": tokens, "labels": tokens}


class StopWhenGoodEnough(TrainerCallback):
    """Stops where the loss of the newest batches is low enough."""

    def __init__(self, good_enough):
        self.good_enough = good_enough

    def on_log(self, args, state, control, logs=None, **kwargs):
        if args.process_index == 0:
            print(f"step {state.global_step} {logs}", flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        if self.good_enough(args, state):
            control.should_training_stop = True
        return control


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--fault", choices=["none", "hang", "fail"], default="none")
    parser.add_argument("--at", type=int, default=12)
    args = parser.parse_args()

    config = GPT2Config(vocab_size=96, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)

    def good_enough(arguments, state):
        if args.fault == "hang":
            return arguments.process_index == 1 and state.global_step >= args.at
        return False

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="hf_out",
            max_steps=args.steps,
            per_device_train_batch_size=4,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            ddp_backend="gloo",
            disable_tqdm=True,
        ),
        train_dataset=Poems(args.steps * 8, ragged=args.at * 8 + 5 if args.fault == "fail" else None),
        callbacks=[StopWhenGoodEnough(good_enough)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
