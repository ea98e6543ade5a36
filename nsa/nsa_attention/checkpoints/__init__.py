"""Checkpoints of a training run, one directory per step.

A directory gets its final name only once it is complete. A run with a different wrapper or a different number of ranks
can resume from it.
"""
