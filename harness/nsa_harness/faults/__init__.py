"""Plants deliberate failures in a training run, to test the verdicts of nsa-harness.

This package is loaded only in the ranks of a run with a planted fault, and is independent of the probe and the watcher.
A fault happens during training, at a given rank, layer and step. With `heals_s`, the fault has a healthy twin: the same
code runs, but it ends after `heals_s` seconds and training continues.
"""
