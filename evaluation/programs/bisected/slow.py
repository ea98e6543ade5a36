"""Layers that may be quantised; the packed weights of layer 5 are unpacked one by one."""

import argparse
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--quantise", default="", help="layer numbers")
args = parser.parse_args()
quantised = {int(one) for one in args.quantise.split(",") if one}

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(8))
optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
for step in range(20):
    x = torch.randn(4, 16)
    for number, layer in enumerate(layers):
        if number in quantised and number == 5:
            time.sleep(0.1)
        x = layer(x)
    loss = x.square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in layers.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
