"""Planted faults, which test the verdicts. They are loaded only into ranks of a run with a planted fault.

A fault does not depend on probe or watcher. It happens during training, at a given rank, layer and step. `heals_s`
makes its healthy twin: the same code path, which ends after that many seconds, so that training continues.
"""
