"""A user's own training: eight layers on two ranks, some of them checkpointed, as an option of its own says.

Layers 5 and 6 share a scratch buffer whose lock one of them does not give back when both are computed again.
"""

import argparse
import os
import threading

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--gc-layers", default="")
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--batch", type=int, default=4)
options = parser.parse_args()

scratch = threading.Lock()


class Layer(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = torch.nn.Linear(options.width, options.width)

    def forward(self, hidden):
        again = torch._C._current_graph_task_id() != -1
        if again and self.number in (5, 6) and dist.get_rank() == 1:
            scratch.acquire()
            if self.number == 6 and 5 not in checkpointed:
                scratch.release()
        return torch.relu(self.linear(hidden))


def numbers(text: str) -> set[int]:
    return {int(one) for one in text.split(",") if one}


first, _, stop = os.environ.get("GC_RANGE", "0:0").partition(":")
checkpointed = numbers(options.gc_layers) | numbers(os.environ.get("GC_LAYERS", "")) | set(range(int(first), int(stop)))
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [Layer(number) for number in range(8)]
hidden = torch.randn(options.batch, options.width)
for number, layer in enumerate(layers):
    hidden = checkpoint(layer, hidden, use_reentrant=False) if number in checkpointed else layer(hidden)
loss = hidden.square().mean()
loss.backward()
for layer in layers:
    dist.all_reduce(layer.linear.weight.grad)
print(f"loss {loss.item():.6f}", flush=True)
dist.destroy_process_group()
