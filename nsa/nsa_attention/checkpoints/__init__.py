"""Checkpoints of a training run: one directory per step, which appears under its name only once it is complete.

A run with another wrapper or another number of ranks can resume from it.
"""
