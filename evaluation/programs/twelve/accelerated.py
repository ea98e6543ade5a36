"""Sequence tagging with accelerate, and the accuracy over all processes at the end of each epoch."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sequences(Dataset):
    """Sequences of many lengths, sorted so that a batch needs little padding."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(5)
        lengths = torch.randint(4, 12, (count,), generator=generator).tolist()
        self.items = [torch.randint(1, 30, (length,), generator=generator) for length in sorted(lengths)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        tokens = self.items[index]
        return tokens, tokens % 3


def collate(items):
    tokens, tags = zip(*items, strict=True)
    pad = nn.utils.rnn.pad_sequence
    return pad(tokens, batch_first=True), pad(tags, batch_first=True, padding_value=-100)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16, padding_idx=0)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def evaluate(accelerator, model, loader, pad):
    right = total = 0
    for tokens, tags in loader:
        with torch.no_grad():
            predicted = model(tokens).argmax(dim=-1)
        if pad:
            predicted = accelerator.pad_across_processes(predicted, dim=1, pad_index=-1)
            tags = accelerator.pad_across_processes(tags, dim=1, pad_index=-100)
        predicted, tags = accelerator.gather_for_metrics((predicted, tags))
        known = tags != -100
        right += (predicted[known] == tags[known]).sum().item()
        total += known.sum().item()
    return right / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--fault", choices=["none", "hang", "fail"], default="none")
    parser.add_argument("--at", type=int, default=20)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(Sequences(160), batch_size=4, collate_fn=collate)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = 0
    while step < args.steps:
        for tokens, tags in loader:
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tags.flatten(), ignore_index=-100)
            if args.fault == "fail" and step == args.at and accelerator.process_index == 1:
                loss = loss * float("inf")
            if not torch.isfinite(loss):
                raise FloatingPointError(f"loss is {loss.item()} at step {step}")
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        accuracy = evaluate(accelerator, model, loader, pad=args.fault != "hang" or step < args.at)
        accelerator.print(f"step {step} loss {loss.item():.4f} accuracy {accuracy:.3f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
