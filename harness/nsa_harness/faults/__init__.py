"""Planted faults, which test the verdicts. Loaded only into ranks of a run that asks for one.

A fault does not know probe or watcher. It happens during training, at a given rank, layer and step. `heals_s` makes its
healthy twin: the same code path, which ends after that many seconds, so that training continues.
"""
