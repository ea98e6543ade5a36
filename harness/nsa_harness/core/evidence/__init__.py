"""Data classes for the evidence of a run, and parsers for the files that torch, NCCL and other programs write."""
