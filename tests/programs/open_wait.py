"""A user's own training whose hang nothing can prove at once: rank 1 waits for an event that a living thread may set.

A thread that stands in a read from a socket may set it at any time; when two layers are both computed again it never
does. `--slow SECONDS`: with the first of the two alone rank 1 waits on the same line, and goes on after so long.
"""

import argparse
import socket
import threading
import time

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--gc-layers", default="")
parser.add_argument("--pair", default="2,5")
parser.add_argument("--slow", type=float, default=None)
options = parser.parse_args()

ours, theirs = socket.socketpair()
filled = threading.Event()


def fill() -> None:
    ours.recv(1)
    filled.set()


def send_late() -> None:
    time.sleep(options.slow)
    theirs.send(b".")


class Layer(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, hidden):
        again = torch._C._current_graph_task_id() != -1
        if again and self.number == min(pair) and dist.get_rank() == 1:
            if not pair <= checkpointed and options.slow is not None:
                threading.Thread(target=send_late, daemon=True).start()
            if pair <= checkpointed or options.slow is not None:
                filled.wait()
        return torch.relu(self.linear(hidden))


def numbers(text: str) -> set[int]:
    return {int(one) for one in text.split(",") if one}


checkpointed, pair = numbers(options.gc_layers), numbers(options.pair)
dist.init_process_group("gloo")
threading.Thread(target=fill, daemon=True).start()
torch.manual_seed(0)
layers = [Layer(number) for number in range(8)]
hidden = torch.randn(4, 16)
for number, layer in enumerate(layers):
    hidden = checkpoint(layer, hidden, use_reentrant=False) if number in checkpointed else layer(hidden)
hidden.square().mean().backward()
for layer in layers:
    dist.all_reduce(layer.linear.weight.grad)
dist.destroy_process_group()
