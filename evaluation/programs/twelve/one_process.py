"""No torch.distributed: one process trains, a thread makes the batches ready."""

import argparse
import queue
import threading

import torch
from torch import nn

VOCABULARY = 64


def tokens_of(line):
    return [ord(letter) - ord("a") for letter in line if letter != " "]


def lines(count, odd):
    for number in range(count):
        yield "the quick brown fox" if number != odd else "the quick brown fóx"


def read_ahead(count, odd, ready, careless):
    try:
        for line in lines(count, odd):
            tokens = tokens_of(line)
            if not careless and max(tokens) >= VOCABULARY:
                raise ValueError(f"not in the vocabulary: {line!r}")
            ready.put(torch.tensor(tokens))
        ready.put(None)
    except ValueError as error:
        print(f"reader: {error}", flush=True)


def train(ready):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = 0
    while (tokens := ready.get()) is not None:
        loss = nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        step += 1
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--fault", choices=["none", "hang", "fail"], default="none")
    parser.add_argument("--at", type=int, default=40)
    args = parser.parse_args()

    ready = queue.Queue(maxsize=8)
    odd = None if args.fault == "none" else args.at
    reader = threading.Thread(target=read_ahead, args=(args.steps, odd, ready, args.fault == "fail"))
    reader.start()
    train(ready)
    reader.join()


if __name__ == "__main__":
    main()
