"""Reads and writes the files of a run, and removes secrets from them."""
