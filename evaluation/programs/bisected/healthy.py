"""Nothing is wrong with it, whichever layers are frozen."""

import argparse

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--freeze", default="")
args = parser.parse_args()
frozen = {int(one) for one in args.freeze.split(",") if one}

dist.init_process_group("gloo")
layers = [torch.nn.Linear(8, 8) for _ in range(8)]
for number in frozen:
    layers[number].requires_grad_(False)
x = torch.ones(2, 8, requires_grad=True)
for layer in layers:
    x = layer(x)
x.sum().backward()
for number, layer in enumerate(layers):
    if number not in frozen:
        dist.all_reduce(layer.weight.grad)
print("trained", flush=True)
dist.destroy_process_group()
