"""Generation tasks of the evaluation suite and the batching of their requests."""
import random
from dataclasses import dataclass, field

import torch

PAD, SEP, END = 0, 1, 2
CONTEXT = 26


@dataclass
class Task:
    name: str
    shortest: int
    longest: int
    max_gen: int
    seed: int
    requests: list = field(default_factory=list)

    def build(self, n, vocab):
        rng = random.Random(self.seed)
        for _ in range(n):
            size = rng.randint(self.shortest, self.longest)
            prompt = [rng.randrange(4, vocab) for _ in range(size)]
            if self.name == "copy":
                answer = prompt[:4]
            elif self.name == "reverse":
                answer = prompt[::-1][:4]
            else:
                answer = sorted(prompt)[:4]
            self.requests.append((prompt + [SEP], answer + [END]))
        return self


def suite(n, vocab):
    return [
        Task("copy", 4, 9, 6, seed=1).build(n, vocab),
        Task("reverse", 6, 14, 8, seed=2).build(n, vocab),
        Task("sort", 12, 21, 8, seed=3).build(n, vocab),
    ]


def shard_batches(task, size, rank, world):
    """Requests of this rank, longest first so that memory peaks at the start."""
    mine = sorted(task.requests[rank::world], key=lambda r: -len(r[0]))
    return [mine[i : i + size] for i in range(0, len(mine), size)]


def left_pad(prompts):
    width = max(len(p) for p in prompts)
    return torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])


def new_tokens(task, batch):
    """Tokens to generate for a batch: the limit of the task, within the context."""
    room = CONTEXT - max(len(p) for p, _ in batch)
    return min(task.max_gen, room)
