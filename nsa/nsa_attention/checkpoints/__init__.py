"""Checkpoints of a run: a folder for each step, whole or not there; any wrapper and number of ranks goes on from it."""
