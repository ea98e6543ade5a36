import torch.nn as nn


def build_stage(index, count, cfg):
    layers = []
    if index == 0:
        layers += [nn.Linear(cfg["features"], cfg["hidden"]), nn.ReLU()]
    layers += [nn.Linear(cfg["hidden"], cfg["hidden"]), nn.ReLU()]
    if index == count - 1:
        layers += [nn.Linear(cfg["hidden"], cfg["classes"])]
    return nn.Sequential(*layers)
